"""GRPO with a 4B model in 24 GB of a card, all else of which another process holds: adapters run, all weights do not.

    python -m tests.gpu.small_card [--left-gb 24] [--shape 4b]

Writes a model with random weights, takes the memory in a process of its own, and launches train_grpo.py twice: with
`--lora.rank 32`, and without. Prints how each ended: seconds of its last step and the most that torch reserved beside
the engine, or the line in which it said why not. Without a GPU nothing is held: to try the commands, --shape tiny.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from lib.config import parse_cli, reporting_errors
from lib.tracking.console import format_table
from lib.tracking.run_folder import read_metrics
from recipes.bench import Workload, write_inputs

ENGINE_SHARE = 0.46
"""Of what is left, for the engine: its weights, and a KV cache of about 15,000 tokens; the trainer's weights and
adapters lie beside it."""
HOLD = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(free - int(sys.argv[1]), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True, kw_only=True)
class SmallCardConfig:
    """How small the card is, and what runs there."""

    left_gb: float = 24.0
    """GB (1e9 bytes) that the other process leaves."""
    shape: Literal["tiny", "1.7b", "4b", "8b"] = "4b"
    """Shape of the model."""
    steps: int = 2
    """Training steps of 16 prompts x 8 responses of 256 tokens."""


@contextmanager
def other_process(left_bytes: int) -> Iterator[None]:
    """Within it all of the GPU but so many bytes is held."""
    if not torch.cuda.is_available():
        yield
        return
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(left_bytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout.readline() == "held\n", "the other process could not take the memory"
            yield
        finally:
            holder.stdin.close()  # it ends


def train(folder: str, cfg: SmallCardConfig, rank: int, *, total_bytes: float) -> tuple[str, ...]:
    """A row: how a run ended."""
    run = Path(folder) / f"run_{rank}"
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1", "--standalone", "train_grpo.py",
         "--model.path", f"{folder}/model", "--data.train-files", f"{folder}/prompts.parquet",
         "--data.max-prompt-len", "256", "--reward.path", "recipes/hash_reward.py",
         "--rollout.n", "8", "--rollout.max-response-len", "256", "--rollout.ignore-eos", "True",
         "--rollout.sleep", "True", "--rollout.max-num-seqs", "64", "--rollout.max-num-batched-tokens", "4096",
         "--rollout.gpu-memory-utilization", f"{ENGINE_SHARE * 1e9 * cfg.left_gb / total_bytes:.4f}",
         "--prompts-per-step", "16", "--mini-batch-size", "128", "--max-tokens-per-gpu", "4096",
         "--model.gradient-checkpointing", "True", "--num-steps", str(cfg.steps), "--optim.lr", "1e-5",
         "--optim.weight-decay", "0", "--lora.rank", str(rank), "--eval.every", "0",
         "--checkpoint.every-minutes", "0", "--checkpoint.at-end", "False", "--run-dir", str(run)],
        capture_output=True, text=True, cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    what = f"--lora.rank {rank}" if rank else "all weights"
    seconds = f"{time.monotonic() - started:.0f}"
    rows = [row for row in read_metrics(run) if "timing_s/step" in row] if (run / "metrics.jsonl").exists() else []
    if done.returncode == 0:
        peak = rows[-1].get("perf/max_memory_reserved_gb", 0.0)
        return what, "runs", seconds, f"{rows[-1]['timing_s/step']:.1f}", f"{peak:.1f}"
    lines = [it for it in (done.stdout + done.stderr).splitlines() if "error[" in it or "OutOfMemory" in it]
    print(f"{what}: {(lines or [done.stderr[-600:]])[-1].strip()[:600]}", flush=True)
    return what, f"ends with {len(rows)} steps", seconds, "-", "-"


def main(cfg: SmallCardConfig) -> None:
    """Prints a row for each run, and a table."""
    rows, total_bytes = [], 1e12
    if torch.cuda.is_available():  # before the rest is taken: asking costs some memory too
        total_bytes = torch.cuda.mem_get_info()[1]
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Workload(cfg.shape, 16, 256), folder, num_prompts=16)
        with other_process(int(1e9 * cfg.left_gb)):
            for rank in (32, 0):
                rows.append(train(folder, cfg, rank, total_bytes=total_bytes))
                print("  ".join(rows[-1]), flush=True)
    print(
        format_table((f"{cfg.shape}, {cfg.left_gb:g} GB", "", "launch to end, s", "last step, s", "reserved GiB"), rows)
    )


if __name__ == "__main__":
    with reporting_errors():
        main(parse_cli(SmallCardConfig()))
