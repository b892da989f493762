"""One weight for trainer and engine beside what others do, a merged engine with an unmerged trainer (here alone).

    python -m tests.gpu.adapter_precision mismatch [--shape tiny]   # log-probs, with adapters of three sizes
    python -m tests.gpu.adapter_precision learn [--steps 60]        # lora_tiny_arithmetic in bfloat16, 3 seeds of each

`mismatch` sets every adapter at random, so that |dW| / |W| is 1e-4, 1e-3, 1e-2, and prints how far the log-probs of
tokens that the engine has just sampled differ from the trainer's: mean and largest, nats. `learn` needs the model and
data of the quickstart (recipes.prepare_arithmetic, recipes.make_tiny_model), runs the recipe in processes of its own,
one after the other, and prints a line when each ends and a table at last.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn

from lib.config import parse_cli, reporting_errors
from lib.data import write_rows
from lib.dist import SINGLE, init_distributed, shutdown_distributed
from lib.engine.engine import RolloutEngine
from lib.engine.rollout_config import RolloutConfig, Sampling
from lib.engine.weight_sync import WeightSync
from lib.model.batching import make_batch
from lib.model.forward import compute_log_probs
from lib.model.fsdp import FSDPConfig, full_tensor, load_policy, reshard
from lib.model.lora import AdaptedLinear, LoRAConfig
from lib.model.networks import CausalPolicy, ModelConfig, put_
from lib.tracking.console import format_table, validation_values
from lib.tracking.run_folder import read_metrics
from lib.types import Sample, Score
from recipes import make_random_model

RATIOS = (0.0, 1e-4, 1e-3, 1e-2)
"""|dW| / |W|, Frobenius norms."""
NUM_PROMPTS, PROMPT_LEN, RESPONSE_LEN = 64, 100, 128


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """What is looked at."""

    shape: Literal["tiny", "0.6b", "1.7b", "4b"] = "1.7b"
    """Of `mismatch`: the model's."""
    steps: int = 60
    """Of `learn`: the runs'."""
    seeds: int = 3
    """Of `learn`: runs of each kind."""
    rank: int = 32
    """Of `mismatch`: the adapters'."""


def unmerged(self: AdaptedLinear, x: Tensor) -> Tensor:
    """x (..., in) to (..., out), by W and by A and B one after the other: as peft computes, in the precision of x."""
    assert self.lora_A0 is None, "only adapters that begin at zero"
    y = nn.functional.linear(x, self.weight, self.bias)
    if not self.is_on:
        return y
    return y + self.scale * nn.functional.linear(nn.functional.linear(x, self.lora_A), self.lora_B)


@contextmanager
def unmerged_trainer() -> Iterator[None]:
    """Within it the trainer does not merge; the engine gets merged weights as ever."""
    torch._dynamo.reset()  # layers may have been compiled with the other way
    with patch.object(AdaptedLinear, "forward", unmerged):
        yield
    torch._dynamo.reset()


# ---- mismatch ----


def mismatch(cfg: PrecisionConfig) -> None:
    """Prints a row for each size of the adapters."""
    world = init_distributed()
    with tempfile.TemporaryDirectory() as inside:
        text = [{"role": "user", "content": " ".join(f"word{number}" for number in range(1000))}]
        write_rows(Path(inside) / "texts.parquet", [{"prompt": text}])
        folder = f"{inside}/model"
        shape = make_random_model.RandomModelConfig(shape=cfg.shape, texts=f"{inside}/texts.parquet", out=folder)
        make_random_model.main(shape)
        rollout = RolloutConfig(
            max_response_len=RESPONSE_LEN, max_num_seqs=NUM_PROMPTS, gpu_memory_utilization=0.35, sleep=False
        )
        engine = RolloutEngine(
            rollout, folder, dtype="bfloat16", max_prompt_len=PROMPT_LEN, most_responses=NUM_PROMPTS,
            stop_token_ids=[2], world=world, seed=0,
        )  # fmt: skip
        policy = load_policy(ModelConfig(dtype="bfloat16"), folder, FSDPConfig(), world, lora=LoRAConfig(rank=cfg.rank))
        sync = WeightSync(policy, engine, fsdp=FSDPConfig())
        sync.load()
        rows = []
        for ratio in RATIOS:
            set_adapters_(policy, ratio)
            sync.copy()
            sync.verify(None)
            rows.append((f"{ratio:g}", *look(engine, policy)))
            print("  ".join(rows[-1]), flush=True)
            engine.sleep()
    print(format_table(("|dW| / |W|", "one weight, mean", "max", "unmerged trainer, mean", "max"), rows))
    shutdown_distributed()


@torch.no_grad()
def set_adapters_(policy: CausalPolicy, ratio: float) -> None:
    """Random B, so long that every dW is `ratio` of its W."""
    reshard(policy)
    generator = torch.Generator(device=next(policy.parameters()).device).manual_seed(1)
    for name, module in policy.named_modules():
        if isinstance(module, AdaptedLinear):
            weight, a = full_tensor(module.weight, torch.float32), full_tensor(module.lora_A, torch.float32)
            b = torch.randn(module.lora_B.shape, generator=generator, device=weight.device)
            put_(module.lora_B, b * (ratio * weight.norm() / (module.scale * (b @ a).norm())))
            assert ratio == 0 or float(full_tensor(module.lora_B, torch.float32).norm()) > 0, name


def look(engine: RolloutEngine, policy: CausalPolicy) -> tuple[str, ...]:
    """Mean and largest |trainer - engine| of the sampled tokens' log-probs: of one weight, and of two ways."""
    ids = torch.randint(3, 300, (NUM_PROMPTS, PROMPT_LEN), generator=torch.Generator().manual_seed(0)).tolist()
    samples = [
        Sample(uid=uid, prompt_ids=own, data_source="", ground_truth="", extra_info={}) for uid, own in enumerate(ids)
    ]
    sampling = Sampling(n=1, max_response_len=RESPONSE_LEN, temperature=1.0, log_probs=True, full_len=True)
    rollouts = [replace(it, score=Score(score=0.0)) for group in engine.generate(samples, sampling) for it in group]
    batch = make_batch(rollouts, SINGLE, mini_batch_size=len(rollouts))
    found = []
    for way in (nullcontext, unmerged_trainer):
        with way(), torch.no_grad():
            log_probs, _ = compute_log_probs(policy, batch, max_tokens_per_gpu=8192, temperature=1.0, world=SINGLE)
        difference = (log_probs - batch.rollout_log_probs)[batch.response_mask].abs()
        found += [f"{difference.mean():.5f}", f"{difference.max():.4f}"]
    return tuple(found)


# ---- learn ----


def learn(cfg: PrecisionConfig) -> None:
    """Prints a row for each run."""
    rows = []
    with tempfile.TemporaryDirectory() as inside:
        for seed in range(cfg.seeds):
            for kind in ("one", "unmerged"):
                run, started = f"{inside}/{kind}_{seed}", time.monotonic()
                subprocess.run(
                    [sys.executable, "-m", "tests.gpu.adapter_precision", f"run_{kind}", "--run-dir", run,
                     "--model.dtype", "bfloat16", "--num-steps", str(cfg.steps), "--seed", str(seed),
                     "--checkpoint.every-minutes", "0", "--checkpoint.at-end", "False"],
                    check=True, stdout=subprocess.DEVNULL,
                )  # fmt: skip
                found = read_metrics(Path(run))
                series = validation_values(found)
                accuracy = [value for _, value in series[min(name for name in series if "/acc/" in name)]]
                gap = [row["training/rollout_log_probs_diff/mean"] for row in found
                       if "training/rollout_log_probs_diff/mean" in row]  # fmt: skip
                shown = [accuracy[round(share * (len(accuracy) - 1))] for share in (0, 1 / 3, 2 / 3, 1)]
                numbers = (*shown, fmean(gap), max(gap))
                rows.append((f"{kind} {seed}", *(f"{it:.4f}" for it in numbers)))
                print("  ".join(rows[-1]), f"{time.monotonic() - started:.0f} s", flush=True)
    print(format_table(("run", "start", "a third", "two thirds", "end", "mismatch, mean", "largest step"), rows))


def run(kind: str) -> None:
    """The recipe, in this process."""
    from recipes.lora_tiny_arithmetic import config
    from train_grpo import main

    with unmerged_trainer() if kind == "unmerged" else nullcontext():
        main(parse_cli(config))


if __name__ == "__main__":
    command = sys.argv.pop(1) if len(sys.argv) > 1 else "--help"
    if command.startswith("run_"):
        run(command.removeprefix("run_"))
    elif command in ("mismatch", "learn"):
        with reporting_errors():
            (mismatch if command == "mismatch" else learn)(parse_cli(PrecisionConfig()))
    else:
        print(__doc__)
