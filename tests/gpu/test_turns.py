"""Conversations on a GPU: the decode loop and one-pass sampling with episodes that join a running batch."""

import subprocess
import sys

import pytest

from lib.tracking.run_folder import read_metrics
from tests.ranks import LIMIT_S, ROOT, torchrun

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Options for the quickstart's model and an environment that says no to a wrong sum."""
    folder = tmp_path_factory.mktemp("turns")
    data, model = str(folder / "data"), str(folder / "model")
    for name, *more in (("prepare_arithmetic", "--out", data), ("make_tiny_model", "--data", data, "--out", model)):
        subprocess.run([sys.executable, "-m", f"recipes.{name}", *more], cwd=ROOT, check=True, timeout=LIMIT_S)
    return (
        "-m", "recipes.grpo_tiny_arithmetic", "--model.path", model, "--data.train-files", f"{data}/train.parquet",
        "--data.val-files", f"{data}/val.parquet", "--num-steps", "3", "--rollout.max-response-len", "60",
        "--turns.path", "tests/environments.py", "--turns.max-turns", "3", "--run-dir",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["Retry", "Begins"])  # joined by step, on arrival
def test_episodes_are_sampled_and_learnt_from(task, tmp_path, name):
    done = torchrun(1, *task, str(tmp_path), "--turns.name", name)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    rows = [row for row in read_metrics(tmp_path) if row["step"]]
    assert len(rows) == 3
    for row in rows:
        assert 1 < row["turns/per_episode"] <= 3 and row["turns/excluded"] == 0
        assert row["training/rollout_log_probs_diff/mean"] < 0.05 and row["actor/grad_norm"] > 0
