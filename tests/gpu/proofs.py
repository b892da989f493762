"""The proof of the start on a GPU, in bfloat16: as it is, and with errors planted in the engine.

    torchrun --nproc_per_node=1 -m tests.gpu.proofs FOLDER...

FOLDER is a model's, or the name of a shape of recipes/make_random_model.py or of a tiny family of tests/tiny.py, which
is then made in a temporary folder. Prints a line per model and error: nats, and what they may be.
"""

import re
import sys
import tempfile
import time
from pathlib import Path

import torch

from lib.dist import World, init_distributed, shutdown_distributed
from lib.engine.engine import RolloutEngine
from lib.engine.function_proof import prove_function
from lib.engine.rollout_config import RolloutConfig
from lib.engine.weight_sync import WeightSync
from lib.errors import LockstepError
from lib.model.fsdp import FSDPConfig, load_policy
from lib.model.networks import ModelConfig
from recipes import make_random_model
from tests.families_worker import PLANTED
from tests.tiny import KINDS, make_model, make_questions, make_tokenizer


def folder_of(name: str, inside: Path) -> Path:
    """The model's folder, made here where it is none."""
    if Path(name).is_dir():
        return Path(name)
    if name in KINDS:
        make_tokenizer(make_model(inside / name, kind=name, tied=False))
        return inside / name
    make_questions(inside / "texts.parquet", count=300, start=0)
    make_random_model.main(
        make_random_model.RandomModelConfig(shape=name, texts=str(inside / "texts.parquet"), out=str(inside / name))
    )
    return inside / name


def look(name: str, path: Path, world: World) -> None:
    """Prints what the proof says of one model."""
    started = time.monotonic()
    cfg = RolloutConfig(max_response_len=128, max_num_seqs=64, gpu_memory_utilization=0.35)
    engine = RolloutEngine(
        cfg, str(path), dtype="bfloat16", max_prompt_len=64, most_responses=64, stop_token_ids=[3], world=world, seed=5
    )
    print(f"{name}: engine {time.monotonic() - started:.1f} s, {engine.warnings}", flush=True)
    engine.sleep()
    policy = load_policy(ModelConfig(dtype="bfloat16"), str(path), FSDPConfig(), world)
    weight_sync = WeightSync(policy, engine, fsdp=FSDPConfig())
    engine.wake("weights")
    started = time.monotonic()
    weight_sync.load()
    torch.cuda.synchronize()
    print(f"{name}: {weight_sync.verify()} tensors equal, computed {sorted(weight_sync.computed)}; "
          f"{time.monotonic() - started:.2f} s", flush=True)  # fmt: skip
    started = time.monotonic()
    weight_sync.copy()
    torch.cuda.synchronize()
    print(f"{name}: sync {1000 * (time.monotonic() - started):.1f} ms", flush=True)
    engine.wake("kv_cache")
    for error, plant in {"none": lambda _: None, **PLANTED}.items():
        compute_logits, started = engine.model.compute_logits, time.monotonic()
        with torch.no_grad():
            plant(weight_sync)
        try:
            proof = prove_function(weight_sync, str(path), dtype=torch.bfloat16, max_prompt_len=64)
            said = f"mean {proof.mean:.4f} of {proof.limit:.3f} nats: passes"
        except LockstepError as refused:
            said = re.sub(r"; the likely causes.*", "", str(refused)) + ": refused"
        print(f"{name}, {error}: {said}; {time.monotonic() - started:.2f} s", flush=True)
        engine.model.compute_logits = compute_logits
        if engine._awake:  # a refusal leaves it asleep
            engine.sleep()
        engine.wake("weights")
        weight_sync.copy()
        engine.wake("kv_cache")


def main(*names: str) -> None:
    """Looks at every model, one after the other."""
    world = init_distributed()
    with tempfile.TemporaryDirectory() as inside:
        for name in names:
            look(name, folder_of(name, Path(inside)), world)
    shutdown_distributed()


if __name__ == "__main__":
    main(*sys.argv[1:])
