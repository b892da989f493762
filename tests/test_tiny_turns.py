"""The games of the tiny recipes: demonstrations are what their environments and engine make, and one is learnt."""

import hashlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from lib.data.chat_template import ChatTemplate
from lib.data.reading import read_rows
from lib.data.tokenizer import load_tokenizer, stop_token_ids
from lib.storage.model_folder import check_model_files
from lib.tracking.run_folder import read_metrics
from lib.turns.appended import Appender
from lib.turns.environment import Reply, Row
from lib.turns.tool_calls import find_format, read_calls
from recipes.make_tiny_model import TinyModelConfig, encode
from recipes.make_tiny_model import main as make_tiny_model
from recipes.prepare_turns import TASKS, TurnsDataConfig
from recipes.prepare_turns import main as prepare_turns
from tests.ranks import LIMIT_S, ROOT

spec = importlib.util.spec_from_file_location("tiny_environments", ROOT / "recipes/tiny_environments.py")
environments = importlib.util.module_from_spec(spec)
spec.loader.exec_module(environments)


@pytest.fixture(scope="module", params=TASKS)
def task(request, tmp_path_factory):
    """(name, folder of its data)."""
    folder = tmp_path_factory.mktemp(request.param)
    prepare_turns(TurnsDataConfig(task=request.param, out=str(folder), seed=3, num_demonstrations=500))
    return request.param, folder


def demonstrations(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "warm_up.jsonl").read_text().splitlines()]


def test_no_validation_problem_occurs_in_training_or_warm_up(task):
    name, folder = task
    same = (lambda text: frozenset(text[:-1].split("+"))) if name == "retry" else str
    train, val = (
        {same(row["prompt"][0]["content"]) for row in read_rows((str(folder / f"{split}.parquet"),), "--data")[0]}
        for split in ("train", "val")
    )
    shown = {same(row["messages"][0]["content"]) for row in demonstrations(folder)}
    assert len(train) >= 1000 and len(val) == 400 and len(shown) > 200
    assert not val & train and not val & shown and not train & shown


def observed(name, answer, messages):
    """What the environment appends to the turns of a conversation, and whether it is then over."""
    env = {"guess": environments.Guess, "retry": environments.Retry}[name]()
    env.reset(Row(data_source="", ground_truth=answer, extra_info={}, messages=()), 0)
    env.number = answer
    turns = [it["content"] for it in messages if it["role"] == "assistant"]
    answers = [env.step(Reply(text=text, calls=(), turn=turn, finish_reason="stop")) for turn, text in enumerate(turns)]
    return [it.messages for it in answers if not it.done], answers[-1].done


def test_demonstrations_are_answered_as_the_environment_answers(task):
    name, folder = task
    for row in demonstrations(folder):
        asked, *messages = row["messages"]
        told = [it["content"] for it in messages if it["role"] != "assistant"]
        if name == "calculator":
            schemas = {"calc": {"properties": {"expression": {"type": "string"}}}}
            _, calls = read_calls(messages[0]["content"], "hermes", schemas)
            assert [call.error for call in calls] == [None] * len(told)
            assert [environments.calc(**call.arguments) for call in calls] == told
        else:
            a, _, b = asked["content"][:-1].partition("+")
            answers = range(16) if name == "guess" else [str(int(a) + int(b))]
            assert (told, True) in [observed(name, answer, messages) for answer in answers]


def test_controls_tell_nothing_and_are_named_as_the_model_knows_them():
    assert environments.garbage.__name__ == "calc" and environments.garbage.__doc__ == environments.calc.__doc__
    assert environments.garbage("347*28") == environments.garbage("347*28") != environments.calc("347*28")
    row, reply = (
        Row(data_source="", ground_truth="75", extra_info={}, messages=()),
        Reply(text="75", calls=(), turn=0, finish_reason="stop"),
    )
    scores = []
    for seed in range(400):
        env = environments.CoinRetry()
        env.reset(row, seed)
        env.step(reply)
        scores.append(env.score())
    assert {score["acc"] for score in scores} == {1.0}  # what is shown is true
    assert 0.4 < sum(score["score"] for score in scores) / len(scores) < 0.6
    hints = []
    for seed in range(400):
        env = environments.RandomHints()
        env.reset(row, seed)
        hints.append((env.hint(7) == "higher") == (env.number > 7))
    assert 0.4 < sum(hints) / len(hints) < 0.6


def test_an_episode_whose_first_turn_was_cut_off_scores_nothing():
    for kind in (environments.Guess, environments.Retry):
        env = kind()
        env.reset(Row(data_source="", ground_truth="75", extra_info={}, messages=()), 0)
        assert env.score()["score"] == env.score()["acc"] == 0.0


def test_the_model_learns_the_ids_of_an_episode_and_a_seed_fixes_every_byte(task, tmp_path):
    _, folder = task
    digests = []
    for out in ("first", "second"):
        make_tiny_model(TinyModelConfig(
            demonstrations=str(folder / "warm_up.jsonl"), out=str(tmp_path / out), seed=5, num_steps=2, batch_size=8
        ))  # fmt: skip
        files = sorted((tmp_path / out).iterdir())
        digests.append([hashlib.sha256(file.read_bytes()).hexdigest() for file in files])
    assert digests[0] == digests[1]
    files = check_model_files(str(tmp_path / out), max_prompt_len=32, max_response_len=96, tensor_parallel_size=2)
    assert 1e6 <= files.num_parameters <= 2e6

    tokenizer = load_tokenizer(tmp_path / out)
    template = ChatTemplate(tokenizer)
    stop_ids = stop_token_ids(tokenizer, tmp_path / out)
    appender = Appender(template, stop_ids)
    appender.check(["tool", "user"])
    assert find_format(template) == "hermes"
    for row in demonstrations(folder)[:50]:
        ids, labels = encode(**row, tokenizer=tokenizer)
        expected, learnt = [], []
        for place, message in enumerate(row["messages"]):
            if message["role"] == "assistant":
                said = [*tokenizer.encode(message["content"]), *stop_ids]
                expected += said
                learnt += said if message["teaches_choice"] else said[1:]
            elif place == 0:
                expected += template.encode([[message]], tools=row["tools"])[0].tolist()
            else:
                expected += appender.ids([{**message, "name": "calc"} if message["role"] == "tool" else message])
        assert ids == expected and [label for label in labels if label >= 0] == learnt


# ---- Learnt ----


@pytest.mark.slow
def test_the_score_of_a_second_try_teaches_the_first_one_and_a_coin_does_not(tmp_path):
    def run(*words):
        done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]

    def train(name, *words):
        run(
            "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "recipes.turns_tiny_retry",
            "--model.path", f"{tmp_path}/model", "--data.train-files", f"{tmp_path}/train.parquet", "--data.val-files",
            f"{tmp_path}/val.parquet", "--run-dir", f"{tmp_path}/{name}", *words,
        )  # fmt: skip
        rows = read_metrics(tmp_path / name)
        assert sum(row.get("turns/excluded", 0) for row in rows) == 0
        assert all(row["training/rollout_log_probs_diff/max"] < 1e-3 for row in rows[1:])
        return [
            [row[f"val-{metric}/mean@1"] for row in (rows[0], rows[-1])]
            for metric in ("core/tiny/retry/acc", "aux/tiny/retry/first")
        ]

    run("recipes.prepare_turns", "--task", "retry", "--out", str(tmp_path))
    warm_up = str(tmp_path / "warm_up.jsonl")
    run("recipes.make_tiny_model", "--demonstrations", warm_up, "--out", str(tmp_path / "model"))
    (before, after), (first_before, first_after) = train("run")
    assert 0.45 <= before <= 0.65 and after >= 0.85 and first_after >= first_before + 0.3
    (before, after), (first_before, first_after) = train("control", "--turns.name", "CoinRetry")
    assert after <= before + 0.15 and first_after <= first_before + 0.15
