"""Killed and continued, the whole command is the run that was never killed: real engines, minutes each, so all slow."""

import json
import shutil
import subprocess
import sys

import pytest

from lib.tracking.run_folder import read_metrics, read_status
from tests.ranks import LIMIT_S, ROOT, torchrun

NUM_STEPS = 4
OF_CALLS = ("turns/tool_latency_s", "turns/waiting_share")
TIMES = ("timing", "perf/", *OF_CALLS, *(f"val-aux/{name}" for name in OF_CALLS))
RECIPES = {
    # Dynamic sampling with groups that are left over and train in the next step.
    "dapo": ("recipes.dapo_tiny_arithmetic", "--filter-groups.max-rounds", "6"),
    # A critic's warm-up that ends after the kill, and a KL coefficient that adapts.
    "ppo": ("recipes.ppo_tiny_arithmetic", "--critic.warmup-steps", "3", "--kl-reward.coef", "0.05",
            "--kl-reward.target", "0.01", "--kl-reward.horizon", "500"),
    # Adapters, and the KL to the policy without them.
    "lora": ("recipes.lora_tiny_arithmetic", "--kl-loss-coef", "0.05"),
    # Responses that are interrupted after step 2 and go on in step 3, to prompts that a curriculum drew.
    "partial": ("recipes.grpo_tiny_arithmetic", "--rollout.partial-share", "0.7", "--data.curriculum", "True"),
    # Episodes that are interrupted in a turn, or between two, and whose environments are asked again in step 3.
    "turns": ("recipes.grpo_tiny_arithmetic", "--rollout.partial-share", "0.7", "--rollout.max-response-len", "60",
              "--turns.path", "tests/environments.py", "--turns.name", "Retry", "--turns.max-turns", "3"),
}  # fmt: skip


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Options for the quickstart's model and data, of which there is little: a new epoch begins within step 3."""
    folder = tmp_path_factory.mktemp("arithmetic")
    data, model = str(folder / "data"), str(folder / "model")
    for words in (("prepare_arithmetic", "--out", data), ("make_tiny_model", "--data", data, "--out", model)):
        subprocess.run([sys.executable, "-m", f"recipes.{words[0]}", *words[1:]], cwd=ROOT, check=True, timeout=LIMIT_S)
    return (
        "--model.path", model, "--data.train-files", f"{data}/train.parquet", "--data.val-files",
        f"{data}/val.parquet", "--data.train-max-samples", "80", "--data.val-max-samples", "20", "--eval.every", "1",
        "--num-steps", str(NUM_STEPS), "--checkpoint.every", "1", "--checkpoint.keep", "None",
    )  # fmt: skip


@pytest.fixture(scope="module")
def straight(task, tmp_path_factory):
    """A function that gives the folder of an undisturbed run on 2 ranks, and its options."""
    folder, runs = tmp_path_factory.mktemp("straight"), {}

    def run(name):
        words = (*RECIPES[name], *task)
        if name not in runs:
            done = torchrun(2, "-m", *words, "--run-dir", str(folder / name))
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
            runs[name] = folder / name
        return runs[name], words

    return run


def as_killed_after(step, run, copy):
    """A copy of the run with nothing but what it had when it was killed right after this step's checkpoint."""
    shutil.copytree(run, copy)
    for later in range(step + 1, NUM_STEPS + 1):
        shutil.rmtree(copy / f"global_step_{later}")
    (copy / "status.json").write_text(json.dumps(read_status(copy) | {"state": "running", "step": step + 1}))
    return copy


def numbers(run):
    """What the run logged, without times."""
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in read_metrics(run)]


def trainer(run):
    state = json.loads((run / f"global_step_{NUM_STEPS}" / "trainer.json").read_text())
    names = ("prompts", "kl_controller", "constant_groups", "collectors", "best")
    return without_seconds({name: state[name] for name in names})


def samples(run, step):
    return [without_seconds(json.loads(line)) for line in open(run / "samples" / f"step_{step}.jsonl")]


def without_seconds(value):
    """What was written, without how long the environments took."""
    if isinstance(value, dict):
        return {name: without_seconds(it) for name, it in value.items() if name not in ("seconds", "answer_s")}
    return [without_seconds(it) for it in value] if isinstance(value, list) else value


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_resumed_run_is_the_undisturbed_one_to_the_bit(straight, tmp_path, name):
    run, words = straight(name)
    copy = as_killed_after(2, run, tmp_path / "run")
    done = torchrun(2, "-m", *words, "--run-dir", str(copy))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    lines = done.stdout.splitlines()
    [place] = [place for place, line in enumerate(lines) if line.startswith("continuing from ")]
    assert lines[place - 2].endswith("tensors are equal bit for bit") and "step 3 of 4 is next" in lines[place]
    assert lines[place - 1].startswith("engine and trainer compute the same: ")
    assert numbers(copy) == numbers(run)
    assert trainer(copy) == trainer(run)
    files = [path.relative_to(run) for path in run.glob(f"global_step_{NUM_STEPS}/**/*.safetensors")]
    assert len(files) == (8 if name == "ppo" else 4)
    for path in files:
        assert (copy / path).read_bytes() == (run / path).read_bytes(), path
    for step in range(NUM_STEPS + 1):
        assert samples(copy, step) == samples(run, step), step
    states = json.loads((run / "global_step_2" / "trainer.json").read_text())["collectors"]
    if name == "dapo":
        assert sum(len(state["carried"]) for state in states) > 0  # or the test would prove less than it says
    elif name in ("partial", "turns"):
        assert all(state["unfinished"] and state["open_groups"] for state in states)
        is_within = {len(it["spans"]) > 1 for state in states for it in state["unfinished"]}
        assert True in is_within or name == "partial"
    else:
        assert trainer(run)["kl_controller"]["coef"] != 0.05


@pytest.mark.slow
def test_another_number_of_ranks_goes_on_with_the_same_data_and_rollouts(straight, tmp_path):
    run, words = straight("dapo")
    copy = as_killed_after(2, run, tmp_path / "run")
    command = [sys.executable, "-m", *words, "--run-dir", str(copy)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    first, expected = read_metrics(copy)[3], read_metrics(run)[3]
    for metric in ("critic/score/mean", "response_length/mean", "filter_groups/kept", "train/num_gen_batches"):
        assert first[metric] == expected[metric]  # of the policy that was saved: exactly
    for metric in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
        assert first[metric] == pytest.approx(expected[metric], rel=1e-3, abs=1e-6)
    assert trainer(copy)["prompts"] == trainer(run)["prompts"]
