"""Data and a reward of one's own, from the file to the evaluation, with real engines."""

import json
import os
import re
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from lib.data.parquet import write_rows
from lib.tracking.run_folder import read_metrics
from tests.ranks import LIMIT_S, ROOT
from tests.test_resume_end_to_end import numbers
from tests.tiny import make_model, make_tokenizer

REWARD = """
def compute_scores(rows):
    assert all(type(row["extra_info"]["level"]) is (int if int(row["ground_truth"]) % 2 else str) for row in rows)
    print(len(rows))
    return [{"score": len(row["solution_str"]) / 12, "pred": row["ground_truth"]} for row in rows]
"""
"""Random weights write texts of different lengths, so a group has a signal."""


def questions(count, start=0):
    """Rows without data_source and reward_model; a level is a number in one line and text in the next."""
    return [
        {"question": f"what is {i}", "answer": str(i), "extra_info": {"level": i if i % 2 else str(i)}}
        for i in range(start, start + count)
    ]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own_data")
    make_model(folder / "model")
    make_tokenizer(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    write_lines(folder / "train.jsonl", questions(12))
    write_lines(folder / "val.jsonl", questions(5, start=100))
    return folder


def _environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}


def run(*words):
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S,
        env=_environment(),
    )  # fmt: skip


def train(folder, name, *more, data="train.jsonl"):
    return run(
        "train_grpo.py", "--model.path", str(folder / "model"), "--data.train-files", str(folder / data),
        "--data.val-files", str(folder / "val.jsonl"), "--data.prompt-key", "question", "--data.answer-key", "answer",
        "--data.max-prompt-len", "24", "--rollout.max-response-len", "12", "--rollout.n", "4", "--prompts-per-step",
        "4", "--mini-batch-size", "8", "--max-tokens-per-gpu", "80", "--optim.lr", "1e-3", "--eval.every", "2",
        "--reward.path", str(folder / "reward.py"), "--reward.num-workers", "1", "--reward.batch-size", "3",
        "--checkpoint.every", "2", "--run-dir", str(folder / name), *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def lines(folder):
    """A run of 2 steps on JSON lines."""
    return train(folder, "lines", "--num-steps", "2")


def test_a_run_on_lines_trains_on_rewards_of_many_rows(folder, lines):
    assert lines.returncode == 0, lines.stdout[-2000:] + lines.stderr[-3000:]
    assert f"reward: compute_scores in {folder / 'reward.py'} (sha256 " in lines.stdout
    assert ", up to 3 rows a call" in lines.stdout
    rows = read_metrics(folder / "lines")
    assert [row["step"] for row in rows] == [0, 1, 2] and "val-core/own/reward/mean@1" in rows[0]
    for row in rows[1:]:
        assert row["critic/score/max"] > row["critic/score/min"] and row["actor/grad_norm"] > 0
        assert row["reward/num_errors"] == row["reward/num_excluded"] == row["reward/num_failed_calls"] == 0
    calls = [int(word) for word in (folder / "lines/logs/rewards_0.log").read_text().split()]
    assert sum(calls) == 2 * 16 + 2 * 5 and max(calls) == 3
    first = pq.read_table(folder / "lines/rollouts/step_1.parquet").to_pylist()[0]
    assert first["prompt"] == [{"role": "user", "content": f"what is {first['reward_model']['ground_truth']}"}]


def test_an_evaluation_of_the_run_needs_its_data_alone(folder, lines):
    done = run(
        "eval.py", "--model.path", str(folder / "lines"), "--data.files", str(folder / "val.jsonl"),
        "--output", str(folder / "out.parquet"), "--rollout.n", "4", "--rollout.temperature", "1.0",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("taken from the run of ")]
    assert line == (
        f"taken from the run of {folder / 'lines/global_step_2'}: --data.prompt-key question --data.answer-key answer "
        f"--data.max-prompt-len 24 --rollout.max-response-len 12 --reward.path {folder / 'reward.py'} "
        "--reward.num-workers 1 --reward.batch-size 3"
    )
    table = pq.read_table(folder / "out.parquet").to_pylist()
    assert [row["question"] for row in table] == [row["question"] for row in questions(5, start=100)]
    assert [json.loads(row["extra_info"]) for row in table] == [row["extra_info"] for row in questions(5, start=100)]
    assert all(row["scores"] == [len(text) / 12 for text in row["responses"]] for row in table)
    assert all(max(row["response_lengths"]) <= 12 for row in table)
    done = run(
        "eval.py", "--score-only", "--model.path", str(folder / "lines"), "--data.files", str(folder / "out.parquet"),
        "--output", str(folder / "again.parquet"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert pq.read_table(folder / "again.parquet").to_pylist() == table


@pytest.mark.slow
def test_a_run_goes_on_by_what_its_files_say_whatever_their_kind(folder):
    """From lines to the same rows as parquet it goes on to the bit; with one other answer it does not."""
    rows = [row | {"extra_info": {"level": 1}} for row in questions(12)]
    (folder / "reward.py").write_text(REWARD.replace("assert ", ""))
    write_lines(folder / "same.jsonl", rows)
    write_rows(folder / "same.parquet", rows)
    other = [*rows[:5], rows[5] | {"answer": "77"}, *rows[6:]]
    write_lines(folder / "other.jsonl", other)
    done = train(folder, "straight", "--num-steps", "4", data="same.jsonl")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    done = train(folder, "again", "--num-steps", "2", data="same.jsonl")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    done = train(folder, "again", "--num-steps", "4", data="other.jsonl")
    assert done.returncode == 2 and "error[2] the prompts" in done.stderr, done.stderr[-3000:]
    done = train(folder, "again", "--num-steps", "4", data="same.parquet")
    assert done.returncode == 0 and "step 3 of 4 is next" in done.stdout, done.stdout[-2000:] + done.stderr[-3000:]
    assert numbers(folder / "again") == numbers(folder / "straight")


@pytest.mark.slow
def test_the_readmes_lines_work_by_copy_and_paste(tmp_path):
    """In a folder with the scripts and the quickstart's model, as the README says."""
    section = (ROOT / "README.md").read_text().split("**Data** is JSONL or parquet.")[1].split("**Rewards**")[0]
    [code] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    commands = "\n".join(line[4:] for line in section.partition(code)[2].splitlines() if line.startswith("    "))
    assert len([line for line in code.splitlines() if line and not line.startswith("#")]) <= 10
    (tmp_path / "mine.py").write_text(code)
    for name in ("train_grpo.py", "eval.py", "lib"):
        (tmp_path / name).symlink_to(ROOT / name)
    for words in (("prepare_arithmetic", "--out", "data/arithmetic"), ("make_tiny_model",)):
        command = [sys.executable, "-m", f"recipes.{words[0]}", *words[1:]]
        subprocess.run(command, cwd=tmp_path, env=_environment(), check=True, timeout=LIMIT_S)
    shell = (
        'python() { "$PYTHON" "$@"; }; torchrun() { "$PYTHON" -m torch.distributed.run --standalone "$@"; }; set -e\n'
    )
    done = subprocess.run(
        ["bash", "-c", shell + commands], cwd=tmp_path, env=_environment(), capture_output=True, text=True,
        timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    scores = [row["critic/score/mean"] for row in read_metrics(tmp_path / "runs/mine")]
    assert len(scores) == 40 and sum(scores[-5:]) > sum(scores[:5]) + 0.5
