"""Runs a test's script under torchrun, as users run ours."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def torchrun(num_ranks: int, *words: str, timeout_s: float = 300, **env: str) -> subprocess.CompletedProcess:
    """The finished `torchrun --nproc_per_node=num_ranks WORDS`, its output as text."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={num_ranks}", "--standalone"]
    return subprocess.run(
        [*command, *words], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **env}, capture_output=True, text=True,
        timeout=timeout_s,
    )  # fmt: skip
