"""Under torchrun: each family in trainer and engine against transformers' own model; JSON from rank 0.

torchrun --nproc_per_node=N -m tests.families_worker FOLDER OUT TP_SIZE KIND...
"""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lib.dist import SINGLE, World, init_distributed, shutdown_distributed
from lib.engine.engine import RolloutEngine
from lib.engine.function_proof import prove_function
from lib.engine.rollout_config import RolloutConfig, Sampling
from lib.engine.weight_sync import WeightSync
from lib.errors import UserError, WeightSyncError
from lib.model.batching import make_batch
from lib.model.forward import forward_policy
from lib.model.fsdp import FSDPConfig, full_tensor, load_policy, reshard
from lib.model.networks import ModelConfig
from lib.types import Rollout, Sample, Score
from tests.tiny import make_model, make_tokenizer

TIED = ("gemma3", "llama", "smollm3")


def eager_log_probs(model, rollouts: list[Rollout]) -> list[torch.Tensor]:
    """Of each response alone, by transformers; gradients on."""
    found = []
    for rollout in rollouts:
        prompt = rollout.sample.prompt_ids
        ids = torch.tensor([prompt + rollout.response_ids])
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        found.append(logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0])
    return found


def prove(weight_sync: WeightSync, path: Path) -> float | str:
    """The mean difference, or what stops the run."""
    try:
        return prove_function(weight_sync, str(path), dtype=torch.float32, max_prompt_len=8).mean
    except WeightSyncError as error:
        return str(error)


def with_error(plant: Callable, weight_sync: WeightSync, path: Path) -> float | str:
    """What a proof says of an engine in which `plant(weight_sync)` has changed something."""
    compute_logits = weight_sync.engine.model.compute_logits
    with torch.no_grad():
        plant(weight_sync)
    said = prove(weight_sync, path)
    weight_sync.engine.model.compute_logits = compute_logits
    weight_sync.copy()
    return said


def scale_logits(weight_sync: WeightSync) -> None:
    model = weight_sync.engine.model
    compute_logits = model.compute_logits
    model.compute_logits = lambda *of, **named: 1.1 * compute_logits(*of, **named)


def skip_layer(weight_sync: WeightSync) -> None:
    held = weight_sync.engine.parameters()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        held[f"model.layers.1.{name}.weight"].zero_()


def transpose_box(weight_sync: WeightSync) -> None:
    """Of the first layer's `o_proj`: its numbers, read along the columns."""
    held, source = weight_sync.engine.parameters(), "model.layers.0.self_attn.o_proj.weight"
    whole = full_tensor(dict(weight_sync.policy.named_parameters())[source], torch.float32)
    whole = whole.t().contiguous().view(whole.shape)
    for box in (box for boxes in weight_sync.layout.boxes.values() for box in boxes):
        if box.source == source:
            box.place(held[box.target]).copy_(box.part(whole))


PLANTED = {"logits": scale_logits, "layer": skip_layer, "box": transpose_box}


def start(path: Path, tp_size: int, world: World) -> WeightSync:
    """An engine with the policy's weights."""
    cfg = RolloutConfig(
        tensor_model_parallel_size=tp_size, max_response_len=16, max_num_seqs=8, max_num_batched_tokens=2048,
        cpu_kv_cache_gib=0.1,
    )  # fmt: skip
    engine = RolloutEngine(
        cfg, str(path), dtype="float32", max_prompt_len=8, most_responses=8, stop_token_ids=[3], world=world, seed=5
    )
    engine.sleep()
    policy = load_policy(ModelConfig(dtype="float32"), str(path), FSDPConfig(), world)
    weight_sync = WeightSync(policy, engine, fsdp=FSDPConfig())
    weight_sync.load()
    return weight_sync


def look_at_a_stray_window(folder: Path, tp_size: int, world: World) -> str:
    """What the proof says of an entry that the engine obeys and transformers' Llama does not."""
    path = folder / f"stray{world.size}"
    if world.rank == 0:
        make_model(path, kind="llama")
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"sliding_window": 4}))
    world.gather(None)
    try:
        prove_function(start(path, tp_size, world), str(path), dtype=torch.float32, max_prompt_len=8)
    except UserError as error:
        return str(error)
    return "nothing"


STARTED = {"DiffLlama": 64, "Llama": 64, "HyperCLOVAX": 128}
"""{family: its width, in 4 heads}. For layers of the first the engine has neither code of its own nor transformers' to
run; for heads of 16 numbers a CPU has no kernel, which the first step finds; for the third it brings a config class."""


def look_at_a_start(kind: str, folder: Path, tp_size: int, world: World) -> str:
    """What is said of one of STARTED."""
    import transformers

    path = folder / f"{kind}_started{world.size}"
    if world.rank == 0:
        shape = dict(num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, max_position_embeddings=64)
        shape |= dict(vocab_size=200, hidden_size=STARTED[kind], intermediate_size=96, pad_token_id=1)
        config = getattr(transformers, f"{kind}Config")(**shape)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    world.gather(None)
    try:
        prove_function(start(path, tp_size, world), str(path), dtype=torch.float32, max_prompt_len=8)
    except UserError as error:
        return str(error)
    except RuntimeError as error:
        return repr(error)
    return "nothing"


def look(kind: str, folder: Path, tp_size: int, world: World) -> dict:
    """What is found of one family."""
    from transformers import AutoModelForCausalLM

    path = folder / f"{kind}{world.size}"
    if world.rank == 0:
        make_model(path, kind=kind, tied=kind in TIED, random_norms=True)
        make_tokenizer(path)
    world.gather(None)
    weight_sync = start(path, tp_size, world)
    policy, engine = weight_sync.policy, weight_sync.engine
    found = {"bits": weight_sync.verify(), "computed": sorted(weight_sync.computed)}
    found["function"] = prove(weight_sync, path)
    found["planted"] = {name: with_error(plant, weight_sync, path) for name, plant in PLANTED.items()}
    generator = torch.Generator().manual_seed(1)
    samples = [
        Sample(uid=uid, prompt_ids=torch.randint(4, 200, (uid + 2,), generator=generator).tolist(), data_source="",
               ground_truth="", extra_info={})
        for uid in range(4)
    ]  # fmt: skip
    sampling = Sampling(n=2, temperature=1.0, top_p=1.0, top_k=0, max_response_len=16, log_probs=True)
    rollouts = [replace(r, score=Score(score=0.0)) for group in engine.generate(samples, sampling) for r in group]
    rollouts.sort(key=lambda r: (r.sample.uid, r.index))
    found["tokens"] = sum(len(r.response_ids) for r in rollouts)

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    eager = eager_log_probs(model, rollouts)
    engines = [torch.tensor(r.rollout_log_probs) for r in rollouts]
    eager_values = [each.detach() for each in eager]
    found["engine"] = max(float((a - b).abs().max()) for a, b in zip(eager_values, engines, strict=True))
    batch = make_batch(rollouts, SINGLE, mini_batch_size=len(rollouts))
    log_probs, _ = forward_policy(policy, batch, temperature=1.0)
    packed = [row[mask] for row, mask in zip(log_probs, batch.response_mask, strict=True)]
    found["packed"] = max(float((a - b.detach()).abs().max()) for a, b in zip(eager_values, packed, strict=True))
    weights = torch.randn(sum(len(x) for x in eager), generator=generator)
    (torch.cat(eager) * weights).sum().backward()
    (torch.cat(packed) * weights).sum().backward()
    expected = {name: p.grad * world.size for name, p in model.named_parameters() if p.grad is not None}
    grads = {n: p.grad.full_tensor() for n, p in policy.named_parameters() if p.grad is not None}
    assert grads.keys() == expected.keys()
    found["gradients"] = max(
        float((grads[n] - expected[n]).norm() / expected[n].norm().clamp_min(1e-9)) for n in expected
    )
    first = rollouts[0]
    other = replace(first, sample=replace(first.sample, prompt_ids=[i + 1 for i in first.sample.prompt_ids]))
    with torch.no_grad():
        changed, _ = forward_policy(
            policy, make_batch([other, *rollouts[1:]], SINGLE, mini_batch_size=len(rollouts)), temperature=1.0
        )
    difference = (changed - log_probs.detach()).abs().amax(1)
    found["first"], found["leak"] = float(difference[0]), float(difference[1:].max())

    reshard(policy)
    state = {n: _sharded(p.detach(), world) for n, p in policy.named_parameters()}
    target = folder / f"checkpoint{world.size}" / kind
    dcp.save(
        state, storage_writer=dcp.HuggingFaceStorageWriter(str(target / "model"), save_distributed=True, thread_count=1)
    )
    if world.rank == 0:
        shutil.copytree(path, target / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    return found


def _sharded(tensor: torch.Tensor, world: World) -> DTensor:
    if isinstance(tensor, DTensor):
        return tensor
    return DTensor.from_local(tensor, init_device_mesh("cpu", (world.size,)))


def main(folder: str, out: str, tp_size: str, *kinds: str) -> None:
    """Looks at every family, one engine after the other."""
    world = init_distributed()
    found = {kind: look(kind, Path(folder), int(tp_size), world) for kind in kinds}
    found["stray window"] = look_at_a_stray_window(Path(folder), int(tp_size), world)
    found["started"] = {name: look_at_a_start(name, Path(folder), int(tp_size), world) for name in STARTED}
    if world.rank == 0:
        Path(out).write_text(json.dumps(found, indent=1))
    shutdown_distributed()


if __name__ == "__main__":
    main(*sys.argv[1:])
