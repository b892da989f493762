"""A job that is killed again and again, at any moment, ends as the one that nobody touched. Minutes, so all slow."""

import os
import random
import signal
import time
from contextlib import suppress

import pytest
import torch

from lib.storage.checkpoint_folder import find_checkpoints, verify
from lib.tracking.run_folder import read_metrics, read_status
from tests.ranks import Job
from tests.tiny import make_model, make_tokenizer

NUM_STEPS, NUM_KILLS = 300, 20


def job(folder, name):
    """Two ranks that train without an engine and save after every step (tests/checkpoint_worker.py)."""
    return Job(
        2, "-m", "tests.checkpoint_worker", str(folder / "model"), str(folder / f"{name}.pt"), "--run-dir",
        str(folder / name), "--num-steps", str(NUM_STEPS), "--checkpoint.every", "1", "--checkpoint.keep", "2",
    )  # fmt: skip


def whole_steps(run):
    return [found.step for found in find_checkpoints(run) if found.problem is None]


def newest_step(run):
    """While the job runs: 0 where all that were listed have been deleted, as too old, before they were looked at."""
    return max(whole_steps(run), default=0)


@pytest.mark.slow
def test_random_kills_lose_no_checkpoint_and_change_nothing(tmp_path):
    make_tokenizer(make_model(tmp_path / "model"))
    with job(tmp_path, "straight") as running:
        assert running.wait() == 0, running.stderr
    run, draw = tmp_path / "killed", random.Random(0)
    last, in_a_save = 0, 0
    for kill in range(NUM_KILLS):
        with job(tmp_path, "killed") as running:
            running.until(lambda last=last: newest_step(run) > last)
            time.sleep(draw.uniform(0, 0.3))
            before = newest_step(run)
            for pid in [running.process.pid] if kill % 2 else running.alive():  # the launcher alone, or all
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            running.wait_for_all()  # no rank outlives its launcher
        last = max(whole_steps(run))
        assert before <= last < NUM_STEPS
        verify(run / f"global_step_{last}")  # every byte
        assert len(whole_steps(run)) >= min(2, last)
        assert read_status(run)["state"] == "running"
        in_a_save += any(name.startswith(".tmp-global_step_") for name in os.listdir(run))
    assert in_a_save >= 2
    with job(tmp_path, "killed") as running:
        assert running.wait() == 0, running.stderr
        assert f"global_step_{last}: step {last + 1} of {NUM_STEPS} is next" in running.stdout
    expected, found = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("straight", "killed"))
    assert expected["weights"].keys() == found["weights"].keys()
    assert all(torch.equal(weights, found["weights"][name]) for name, weights in expected["weights"].items())
    assert expected["state"] == found["state"]
    steps = [[(row["step"], row["x"]) for row in read_metrics(tmp_path / name)] for name in ("straight", "killed")]
    assert steps[0] == steps[1] and len(steps[0]) == NUM_STEPS
