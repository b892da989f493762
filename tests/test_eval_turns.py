"""eval.py with turns: the episodes of a validation, from any ranks, killed or not; what its output has of them."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from lib.evaluation.any_model import state_of_turns
from lib.evaluation.episodes import EPISODE_COLUMNS
from lib.evaluation.inputs import COLUMNS, parts_folder
from lib.tracking.run_folder import read_metrics
from lib.turns.config import TurnsConfig
from lib.turns.start import Turns, find_kinds
from tests.ranks import LIMIT_S, ROOT, torchrun
from tests.test_eval import finished_uids, killed_after, outputs, start

GAME = """
import re
from lib.turns import Environment, Observation


class Parity(Environment):
    instant = True

    def reset(self, row, seed):
        self.answer, self.tries, self.is_right = int(row.ground_truth), 0, False
        return Observation(messages="even or odd?") if self.answer % 3 == 0 else None

    def step(self, reply):
        self.tries += 1
        digits = re.findall(r"\\d", reply.text)[-1:]
        self.is_right = bool(digits) and (int(digits[0]) - self.answer) % 2 == 0
        if self.is_right:
            return Observation(done=True, metrics={"tries": self.tries})
        return Observation(messages="no", reward=-0.01)

    def score(self):
        return {"score": 1.0 / self.tries if self.is_right else 0.0, "acc": self.is_right}


class Breaks(Parity):
    def step(self, reply):
        if reply.turn == 1 and self.answer % 4 < 2:
            raise OSError("the game is gone")
        return super().step(reply)
"""
NUM_PROMPTS = 16
OF_A_LAUNCH = ("turns/cached_prompt_ratio", "turns/tool_latency_s/", "turns/waiting_share")
"""Metrics of a validation that say how it sampled, not what."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A file of environments, data, and a run of one step that was validated after it."""
    folder = tmp_path_factory.mktemp("eval_turns")
    data, model = str(folder / "data"), str(folder / "model")
    made = ("make_tiny_model", "--data", data, "--out", model, "--num-steps", "80")
    for name, *more in (("prepare_arithmetic", "--out", data), made):
        subprocess.run([sys.executable, "-m", f"recipes.{name}", *more], cwd=ROOT, check=True, timeout=LIMIT_S)
    (folder / "game.py").write_text(GAME)
    done = start(
        "-m", "recipes.grpo_tiny_arithmetic", "--model.path", model, "--data.train-files", f"{data}/train.parquet",
        "--data.val-files", f"{data}/val.parquet", "--data.train-max-samples", "40", "--data.val-max-samples",
        str(NUM_PROMPTS), "--prompts-per-step", "8", "--mini-batch-size", "64", "--num-steps", "1",
        "--rollout.max-response-len", "60", "--turns.path", str(folder / "game.py"), "--turns.name", "Parity",
        "--turns.num-workers", "1", "--turns.max-turns", "3", "--eval.n", "2", "--eval.temperature", "1.0",
        "--eval.before-train", "False", "--checkpoint.every", "1", "--run-dir", str(folder / "run"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return folder


def words(folder, output, *more):
    return (
        "eval.py", "--model.path", str(folder / "run"), "--data.files", str(folder / "data" / "val.parquet"),
        "--data.max-samples", str(NUM_PROMPTS), "--output", str(folder / output), "--rollout.n", "2",
        "--rollout.temperature", "1.0", *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def one_process(folder):
    done = start(*words(folder, "one.parquet"))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    rows = pq.read_table(folder / "one.parquet").to_pylist()
    return SimpleNamespace(stdout=done.stdout, rows=rows, summary=summary_of(folder / "one.json")["overall"])


def summary_of(path):
    return json.loads(path.read_text())["summary"]


def test_an_evaluation_gives_the_episodes_of_the_validation(folder, one_process):
    assert "--turns.name Parity --turns.num-workers 1 --turns.max-turns 3" in one_process.stdout
    assert "has changed since" not in one_process.stdout and "reward: the environments score" in one_process.stdout
    lines = (folder / "run" / "samples" / "step_1.jsonl").read_text().splitlines()
    validated = [json.loads(line) for line in lines]
    assert len(validated) == 2 * NUM_PROMPTS and {row["finish_reason"] for row in validated} > {"turns"}
    found = [entry for row in one_process.rows for entry in entries(row)]
    for entry, row in zip(found, validated, strict=True):
        assert (entry["scores"], entry["finish_reasons"]) == (row["score"], row["finish_reason"])
        said = [turn["content"] for turn in entry["turns"] if turn["role"] == "assistant"]
        between = "<|im_end|>\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"
        assert between.join(said) == row["response"].removesuffix("<|im_end|>")
    [metrics] = read_metrics(folder / "run")
    assert one_process.summary["mean@2"]["value"] == metrics["val-core/arithmetic/acc/mean@2"]
    names = [name.removeprefix("val-aux/") for name in metrics if name.startswith(("val-aux/turns", "val-aux/num_t"))]
    kept = [name for name in names if not name.startswith(OF_A_LAUNCH)]
    assert {name: one_process.summary[name] for name in kept} == {name: metrics[f"val-aux/{name}"] for name in kept}
    assert {"turns/tries", "turns/excluded", "num_turns/mean"} <= {*kept} and metrics["val-aux/num_turns/mean"] > 2


def entries(row):
    """Of each response, {column: its entry}."""
    names = [name for name in (*COLUMNS, *EPISODE_COLUMNS) if name in row]
    return [dict(zip(names, values, strict=True)) for values in zip(*(row[name] for name in names), strict=True)]


def test_the_output_has_each_conversation_with_its_roles(one_process):
    for row in one_process.rows:
        for entry in entries(row):
            roles = [turn["role"] for turn in entry["turns"]]
            num_turns = roles.count("assistant")
            assert entry["num_turns"] == 2 * num_turns  # as verl counts
            begins = ["user"] * (int(row["reward_model"]["ground_truth"]) % 3 == 0)
            assert roles == [*begins, *["assistant", "user"] * (num_turns - 1), "assistant"]
            observed = [turn["content"] for turn in entry["turns"] if turn["role"] == "user"]
            assert observed == ["even or odd?" for _ in begins] + ["no"] * (num_turns - 1)
            said = [turn["content"] for turn in entry["turns"] if turn["role"] == "assistant"]
            assert entry["responses"] == "\n".join(said) and entry["tool_calls"] == 0
            num_wrong = num_turns - (entry["scores"] > 0)
            assert entry["finish_reasons"] == "length" or entry["turn_rewards"] == [-0.01] * num_wrong
            assert set(json.loads(entry["turn_metrics"])) >= {"calls", "bad_calls"} or num_turns == 1


def test_killed_replicas_go_on_and_give_the_bytes_of_one_process(folder, one_process):
    parts, command = parts_folder(folder / "two.parquet"), words(folder, "two.parquet", "--rollout.max-num-seqs", "2")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    killed_after([*launcher, *command], parts, num_groups=3, delay_s=0.0)
    num_finished = len(finished_uids(parts))
    assert 3 <= num_finished < NUM_PROMPTS
    done = torchrun(2, *command)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert f"{num_finished} of {NUM_PROMPTS} prompts are finished already" in done.stdout
    assert outputs(folder, "two.parquet")[:2] == outputs(folder, "one.parquet")[:2]


@pytest.mark.slow
def test_a_tensor_parallel_engine_gives_the_same_episodes(folder, one_process):
    done = torchrun(2, *words(folder, "tp.parquet", "--rollout.tensor-model-parallel-size", "2"))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert pq.read_table(folder / "tp.parquet").to_pylist() == one_process.rows


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    assert solution_str.count("\\n") == extra_info["num_turns"] // 2 - 1 and extra_info["tool_calls"] == 0
    return {"score": extra_info["num_turns"], "pred": extra_info["reply"], "sum": sum(extra_info["turn_rewards"])}
"""


def test_an_episode_whose_environment_fails_is_excluded_and_counted(folder, one_process):
    command = words(folder, "fails.parquet", "--turns.path", str(folder / "game.py"), "--turns.name", "Breaks",
                    "--turns.max-turns", "3")  # fmt: skip
    done = start(*command)
    assert done.returncode == 4 and "Breaks.step: OSError: the game is gone" in done.stderr, done.stdout + done.stderr
    done = start(*command, "--reward.max-error-rate", "1")  # its responses were kept
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = [entry for row in pq.read_table(folder / "fails.parquet").to_pylist() for entry in entries(row)]
    expected = [entry for row in one_process.rows for entry in entries(row)]
    for entry, other in zip(found, expected, strict=True):
        if entry["finish_reasons"] == "error":
            num_kept = len(other["turns"]) - (other["num_turns"] - 4)  # up to the second turn, which it answered
            assert entry["scores"] is None and entry["turns"] == other["turns"][:num_kept]
        else:
            assert entry["turns"] == other["turns"] and entry["scores"] == other["scores"]
    num_excluded = sum(entry["finish_reasons"] == "error" for entry in found)
    summary = summary_of(folder / "fails.json")["overall"]
    assert summary["turns/excluded"] == summary["num_unscored"] == num_excluded > 0
    told = f"warning: {num_excluded} episodes are excluded, since their environments failed; {num_excluded} times: "
    assert f"{told}Breaks.step: OSError: the game is gone" in done.stdout

    (folder / "reward.py").write_text(REWARD)  # what is excluded stays so, whoever scores
    again = start(
        "eval.py", "--score-only", "--data.files", str(folder / "fails.parquet"), "--output",
        str(folder / "again.parquet"), "--reward.path", str(folder / "reward.py"), "--reward.max-error-rate", "1",
    )  # fmt: skip
    assert again.returncode == 0, again.stdout + again.stderr[-3000:]
    rescored = [entry for row in pq.read_table(folder / "again.parquet").to_pylist() for entry in entries(row)]
    for entry, before in zip(rescored, found, strict=True):
        assert {name: entry[name] for name in EPISODE_COLUMNS} == {name: before[name] for name in EPISODE_COLUMNS}
        assert entry["scores"] == (None if before["finish_reasons"] == "error" else before["num_turns"])
        assert entry["predictions"] in (None, before["turns"][-1]["content"])
    assert summary_of(folder / "again.json")["overall"]["turns/excluded"] == num_excluded


AS_THE_GAME = """
import re


def compute_score(data_source, solution_str, ground_truth, extra_info):
    digits = re.findall(r"\\d", extra_info["reply"])[-1:]
    is_right = bool(digits) and (int(digits[0]) - int(ground_truth)) % 2 == 0
    return 2 / extra_info["num_turns"] if is_right else 0.0
"""


def test_a_steps_rollouts_are_scored_again_as_in_training(folder):
    (folder / "as_the_game.py").write_text(AS_THE_GAME)
    file = folder / "run" / "rollouts" / "step_1.parquet"
    done = start(
        "eval.py", "--score-only", "--data.files", str(file), "--output", str(folder / "of_step_1.parquet"),
        "--reward.path", str(folder / "as_the_game.py"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    before, after = (pq.read_table(it).to_pylist() for it in (file, folder / "of_step_1.parquet"))
    assert [row["scores"] for row in after] == [row["scores"] for row in before]
    assert {0.5, 1.0} <= {score for row in after for score in row["scores"]}  # some at once, some after a "no"
    roles = {turn["role"] for row in after for turns in row["turns"] for turn in turns}
    assert roles == {"assistant", "user"}


def test_responses_follow_from_the_file_that_answers_and_not_from_how_many_workers_do(tmp_path):
    def state(source, **options):
        (tmp_path / "game.py").write_text(source)
        cfg = TurnsConfig(path=str(tmp_path / "game.py"), name=("Parity",), **options)
        return state_of_turns(Turns(cfg=cfg, kinds=find_kinds(cfg, {}), format=None, notes=()))

    first = state(GAME)
    assert first == state(GAME, num_workers=1, join="round", timeout_s=3.0)
    different = {name for name, value in state(GAME + "\n", max_turns=2).items() if first[name] != value}
    assert different == {"--turns.max-turns", "turns' file"}
