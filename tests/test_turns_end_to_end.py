"""Runs whose model is answered between its turns: real engines, real workers, the whole command."""

import json
import os
import re
import signal
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from lib.tracking.run_folder import read_metrics, read_status
from tests.ranks import LIMIT_S, ROOT, Job, torchrun


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Options for the quickstart's model and little data."""
    folder = tmp_path_factory.mktemp("turns")
    data, model = str(folder / "data"), str(folder / "model")
    words = (("prepare_arithmetic", "--out", data), ("make_tiny_model", "--data", data, "--out", model))
    for name, *more in words:
        subprocess.run([sys.executable, "-m", f"recipes.{name}", *more], cwd=ROOT, check=True, timeout=LIMIT_S)
    return (
        "recipes.grpo_tiny_arithmetic", "--model.path", model, "--data.train-files", f"{data}/train.parquet",
        "--data.val-files", f"{data}/val.parquet", "--data.train-max-samples", "80", "--data.val-max-samples", "20",
        "--prompts-per-step", "8", "--mini-batch-size", "64", "--num-steps", "2", "--rollout.max-response-len", "60",
        "--turns.path", "tests/environments.py", "--turns.num-workers", "1", "--turns.max-turns", "3",
    )  # fmt: skip


LAYOUTS = {"2 replicas": (), "tensor parallel 2": ("--rollout.tensor-model-parallel-size", "2")}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_samples_and_learns_from_episodes(task, tmp_path, layout):
    from transformers import AutoTokenizer

    run = tmp_path / "run"
    words = (*task, *LAYOUTS[layout], "--turns.name", "Begins", "--run-dir", str(run))
    done = torchrun(2, "-m", *words)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    line = r"turns: Begins in tests/environments.py \(sha256 \w{16}\); at most 3 turns, joined by arrival"
    assert re.search(line, done.stdout)
    assert "reward: the environments score" in done.stdout
    tokenizer = AutoTokenizer.from_pretrained(task[2])
    rows = [json.loads(line) for line in (run / "samples" / "step_2.jsonl").read_text().splitlines()]
    assert len(rows) == 20 and {row["finish_reason"] for row in rows} <= {"stop", "turns", "length"}
    several = [row for row in rows if row["finish_reason"] == "turns"]
    assert several
    for row in several:  # what was appended turn by turn is what the template makes of the whole
        turns = row["response"].split("<|im_end|>\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n")
        assert len(turns) == 3
        _, asked, number, _ = row["prompt"].split("<|im_start|>")
        messages = [it.removeprefix("user\n").removesuffix("<|im_end|>\n") for it in (asked, number)]
        conversation = [{"role": "user", "content": text} for text in messages]
        for turn in turns:
            conversation.append({"role": "assistant", "content": turn.removesuffix("<|im_end|>")})
            conversation.append({"role": "user", "content": "no"})
        text = tokenizer.apply_chat_template(conversation[:-1], tokenize=False)
        assert row["prompt"] + row["response"] == text.removesuffix("\n")
    _, first, last = read_metrics(run)
    for row in (first, last):
        assert row["training/rollout_log_probs_diff/max"] < 2e-5 and row["turns/excluded"] == 0
        assert 1 <= row["turns/per_episode"] <= 3 and row["num_turns/max"] <= 6
        assert row["turns/cached_prompt_ratio"] >= 0 and row["turns/tool_latency_s/max"] > 0
    assert last["val-aux/num_turns/mean"] > 1


TOGETHER = {
    "PPO, adapters, a KL in the reward": (
        ("recipes.ppo_tiny_arithmetic", "--lora.rank", "4", "--kl-reward.coef", "0.01", "--critic.warmup-steps", "1"),
        {"critic/vf_loss", "critic/values/mean", "actor/reward_kl_penalty"},
    ),
    "a greedy baseline, masked truncation": (
        ("recipes.remax_tiny_arithmetic", "--overlong.mask-truncated", "True"), {"remax/greedy_score"},
    ),
    "dynamic sampling, curriculum, partial rollouts, several reward keys": (
        (
            "recipes.grpo_tiny_arithmetic", "--filter-groups.enable", "True", "--data.curriculum", "True",
            "--rollout.partial-share", "0.8", "--advantage", "gdpo", "--advantage.reward-keys", "score", "acc",
        ),
        {"filter_groups/kept", "curriculum/drawn_unseen", "partial/continued"},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("which", TOGETHER)
def test_what_else_decides_a_step_sees_episodes_as_responses(task, tmp_path, which):
    (recipe, *more), names = TOGETHER[which]
    words = (recipe, *task[1:], "--rollout.n", "8", "--turns.name", "Retry", "--run-dir", str(tmp_path / "run"))
    done = torchrun(2, "-m", *words, *more)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    rows = [row for row in read_metrics(tmp_path / "run") if row["step"]]
    for row in rows:
        assert names <= row.keys(), sorted(row)
        assert row["training/rollout_log_probs_diff/max"] < 2e-5 and row["turns/excluded"] == 0
        assert 1 < row["turns/per_episode"] <= 3
    assert rows[-1]["actor/grad_norm"] > 0


@pytest.mark.slow
def test_a_step_waits_for_episodes_that_cannot_be_replayed(task, tmp_path):
    """Each observation of an episode is of one environment's, also with partial rollouts."""
    run = tmp_path / "run"
    options = (
        "--rollout.partial-share",
        "0.5",
        "--tracking.rollouts-every",
        "1",
        "--num-steps",
        "4",
        "--rollout.n",
        "8",
    )
    done = torchrun(2, "-m", *task, "--turns.name", "Remembers", *options, "--run-dir", str(run))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    num_several = 0
    for step in range(1, 5):
        for row in pq.read_table(run / "rollouts" / f"step_{step}.parquet").to_pylist():
            for turns in map(json.loads, row["turns"]):
                said = [turn["content"] for turn in turns if turn["role"] == "user"]
                assert len(set(said)) <= 1, said
                num_several += len(said) > 1
    assert num_several > 0
    rows = [row for row in read_metrics(run) if row["step"]]
    assert all(row["partial/unfinished"] == 0 for row in rows)


def test_a_run_stops_while_an_environment_thinks(task, tmp_path):
    run = tmp_path / "run"
    words = (*task, "--turns.name", "Sleeps", "--turns.timeout-s", "100", "--eval.before-train", "False", "--run-dir")
    log = run / "logs" / "turns_0.log"
    with Job(2, "-m", *words, str(run)) as running:
        running.until(lambda: log.exists() and "asked" in log.read_text())
        os.kill(running.pid_of_rank(1), signal.SIGTERM)
        assert running.wait() == 1
        assert running.stderr.count("exitcode  : 143") == 2
        running.wait_for_all()  # the workers too
    assert "answered" not in log.read_text()
    assert read_status(run)["error"] == "SIGTERM on rank 1"
