"""The quickstart as a user runs it, and its negative control: minutes each, so all of it is marked slow."""

import subprocess
import sys

import pytest

from lib.tracking.run_folder import read_metrics
from tests.ranks import LIMIT_S, ROOT

ACCURACY = "val-core/arithmetic/acc/mean@1"
SHUFFLED = '''
"""Rewards as often right as the real ones, but of other responses: each gets a score of a block of 256 before it.

From whole blocks, since responses are scored in the order in which their groups end: the latest scores say how long
the present ones took.
"""

import random

from lib.rewards.arithmetic import compute_score as real

block = []
before = [0.0, 1.0]
rng = random.Random(0)


def compute_score(data_source, solution_str, ground_truth, extra_info):
    result = real(data_source, solution_str, ground_truth, extra_info)
    if extra_info["split"] == "train":
        block.append(result["score"])
        result["score"] = rng.choice(before)
        if len(block) == 256:
            before[:] = block
            block.clear()
    return result
'''


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A function that trains the quickstart's model for a seed and gives the run's metrics by step."""
    folder = tmp_path_factory.mktemp("quickstart")

    def run(*words):
        done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]

    def train(name, *options, seed=0, num_ranks=2):
        data, model = str(folder / f"data{seed}"), str(folder / f"model{seed}")
        if not (folder / f"model{seed}").exists():
            run("recipes.prepare_arithmetic", "--out", data, "--seed", str(seed))
            run("recipes.make_tiny_model", "--data", data, "--out", model, "--seed", str(seed))
        run(
            "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}", "-m",
            "recipes.grpo_tiny_arithmetic", "--model.path", model, "--data.train-files", f"{data}/train.parquet",
            "--data.val-files", f"{data}/val.parquet", "--run-dir", str(folder / name), "--seed", str(seed), *options,
        )  # fmt: skip
        return read_metrics(folder / name)

    return train


def accuracies(rows):
    return [row[ACCURACY] for row in rows if ACCURACY in row]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "num_ranks"),
    [
        ("two_ranks", (), 2),
        ("one_rank", (), 1),
        ("tensor_parallel", ("--rollout.tensor-model-parallel-size", "2"), 2),
    ],
)
def test_accuracy_rises(start, name, options, num_ranks):
    rows = start(name, *options, num_ranks=num_ranks)
    before, *_, after = accuracies(rows)
    assert rows[0]["step"] == 0 and 0.2 <= before <= 0.5
    assert after >= 0.85 and after >= before + 0.3
    assert all(row["training/rollout_log_probs_diff/max"] < 1e-3 for row in rows[1:])


@pytest.mark.slow
def test_accuracy_does_not_rise_when_rewards_belong_to_other_responses(start, tmp_path):
    (tmp_path / "shuffled.py").write_text(SHUFFLED)
    rows = start("shuffled", "--reward.path", str(tmp_path / "shuffled.py"))
    before, *later = accuracies(rows)
    assert len(later) == 6 and max(later) <= before + 0.05
    rewards = [row["critic/score/mean"] for row in rows[1:]]
    assert 0.1 < sum(rewards) / len(rewards) < 0.9  # the control did get rewards, only not for what it did
