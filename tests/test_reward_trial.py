"""What the trial before a run finds: rewards that nobody can earn, reward files that never import."""

import os
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lib.data.prompts import DataConfig
from lib.data.reading import read_rows
from lib.data.rows import Rows
from lib.errors import RewardError, UserError
from lib.evaluation import scores
from lib.evaluation.inputs import EvalDataConfig
from lib.launch import checks
from lib.launch.train_config import TrainConfig
from lib.rewards import trial as reward_trial
from lib.rewards.scoring import RewardConfig
from lib.turns.hub import About
from lib.turns.kinds import Kinds
from tests.test_kinds import row, save
from tests.test_scoring import HEAD, score_all, write

SOURCES = ("arithmetic", "openai/gsm8k", "lighteval/MATH")


def read(folder: Path, truths: pa.Array, source: str = "openai/gsm8k", *, style: str = "rule") -> Rows:
    """The rows of a parquet file with these ground truths."""
    prompts = pa.array([[{"role": "user", "content": f"What is {i}?"}] for i in range(len(truths))])
    model = pa.StructArray.from_arrays([truths, pa.array([style] * len(truths))], names=["ground_truth", "style"])
    columns = {"prompt": prompts, "data_source": pa.array([source] * len(truths)), "reward_model": model}
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    return read_rows((str(folder / "rows.parquet"),), "--data.train-files")[0]


def trials(cfg: RewardConfig, rows: Rows, limit: int | None = None, kinds: Kinds | None = None) -> list:
    """The trial as eval.py makes it, and as training does for either split."""
    train = TrainConfig(reward=cfg, data=DataConfig(train_max_samples=limit, val_max_samples=limit))
    none = Rows(tables=(), sources=(), answer_kinds=())
    return [
        partial(scores.try_reward, cfg, EvalDataConfig(max_samples=limit), rows, kinds),
        partial(checks.try_reward, train, rows, none, kinds),
        partial(checks.try_reward, train, none, rows, kinds),
    ]


# ---- Answers to ground truths ----


@pytest.mark.parametrize(
    "truths",
    [pa.array(["72", "-5"]), pa.array([72, 5]), pa.array([72.0, 5.0]), pa.array(["1,200", "7"]), pa.array([1e16])],
    ids=lambda truths: str(truths.to_pylist()),
)
def test_ground_truths_that_are_numbers_in_any_form_can_be_answered(tmp_path, truths):
    rows = read(tmp_path, truths)
    for trial in trials(RewardConfig(), rows)[:2]:
        assert trial() == "reward: lib.rewards.gsm8k for openai/gsm8k"
    [score] = score_all(RewardConfig(num_workers=1), ["so #### 72"], source="openai/gsm8k", truth=72.0)
    assert score.score == 1.0


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("truths", [pa.array(["nan"] * 30), pa.array([None] * 3, pa.float64())], ids=["nan", "null"])
def test_ground_truths_that_nobody_can_answer_are_refused_before_anything_is_loaded(tmp_path, source, truths):
    rows = read(tmp_path, truths, source, style="model" if truths[0].as_py() is None else "rule")
    for trial in trials(RewardConfig(), rows):
        with pytest.raises((UserError, RewardError)) as caught:
            trial()
        words = ["rows.parquet row 0", "ground truth", repr(truths[0].as_py())]
        words += [] if source == SOURCES[2] else ["every reward would be 0", "--reward.path FILE"]
        assert all(word in str(caught.value) for word in words), caught.value


def test_rows_that_differ_are_accepted_when_one_of_those_asked_can_be_answered(tmp_path):
    truths = pa.array(["about 7"] * 15 + ["7"] + ["unknown"] * 24)
    for trial in trials(RewardConfig(), read(tmp_path, truths)):
        with pytest.raises(UserError, match="and 19 more rows"):  # every second row, and the 16th is none of these
            trial()
    truths = pa.array(["about 7"] * 14 + ["7"] + ["unknown"] * 25)
    for trial in trials(RewardConfig(), read(tmp_path, truths)):
        assert trial() == "reward: lib.rewards.gsm8k for openai/gsm8k"
    with pytest.raises(UserError, match="and 13 more rows"):
        trials(RewardConfig(), read(tmp_path, truths), limit=14)[0]()


def test_a_reward_file_is_asked_for_answers_only_if_it_writes_any(tmp_path):
    rows = read(tmp_path, pa.array(["seven", "eight"]), "mine")
    scores = HEAD + "    return {'score': (solution_str == 'it is ' + ground_truth) - LEAST}\n"
    for least in (0, 1):  # right is 1 and wrong 0, or right is 0 and wrong -1
        body = scores.replace("LEAST", str(least))
        for write_answer, refused in (
            ("", None),
            ("write_answer = 'no function'", None),
            ("def write_answer(ground_truth): return f'it is {ground_truth}'", None),
            ("def write_answer(ground_truth): return f'is {ground_truth}'", "'is seven' scores no more than an empty"),
            ("def write_answer(ground_truth): return int(ground_truth)", "ValueError: invalid literal for int"),
        ):
            cfg = RewardConfig(path=write(tmp_path, body + write_answer))
            if refused is None:
                assert trials(cfg, rows)[0]().startswith("reward: compute_score in ")
            else:
                with pytest.raises(RewardError, match=refused):
                    trials(cfg, rows)[0]()


# ---- Files that never import ----


def test_a_reward_file_that_hangs_on_import_is_told_in_one_line(tmp_path, monkeypatch):
    assert reward_trial.IMPORT_LIMIT_S <= 12  # of 20 s from the launch, whose imports take some
    monkeypatch.setattr(reward_trial, "IMPORT_LIMIT_S", 2.0)
    rows = read(tmp_path, pa.array(["7"]), "mine")
    path = write(tmp_path, "import time\nwhile True:\n    time.sleep(1)\n" + HEAD + "    return 1")
    with pytest.raises(RewardError) as caught:
        trials(RewardConfig(path=path, timeout_s=1.0), rows)[0]()
    assert "it took over 2 s (a longer --reward.timeout-s allows more)" in str(caught.value)
    assert f"--reward.path {path}" in str(caught.value) and "\n" not in str(caught.value)


def test_a_pipe_as_reward_file_is_refused_and_not_read(tmp_path):
    rows = read(tmp_path, pa.array(["7"]), "mine")
    os.mkfifo(tmp_path / "reward.py")
    with pytest.raises(UserError, match=r"not a regular file; --reward\.path"):
        trials(RewardConfig(path=str(tmp_path / "reward.py")), rows)[0]()


# ---- Rows that no environment answers ----


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_row_without_an_environment_is_refused_where_only_environments_score(tmp_path, kind):
    game = About(instant=True, replayable=True, scores=True, tools=[])
    none, given = RewardConfig(), RewardConfig(path=write(tmp_path, HEAD + "    return 1"))

    def found(last, cfg=none, limit=None):
        rows = read_rows((save(tmp_path, kind, [row(0), row(1), row(2, agent_name=last)]),), "--data.train-files")[0]
        return rows.where(2), trials(cfg, rows, limit, Kinds({"Game": game}))

    for last, limit in ((None, None), ("Game", None), ("single_turn_agent", 2)):
        for trial in found(last, limit=limit)[1]:
            assert trial() == "reward: the environments score"
    where, refused = found("single_turn_agent")
    for trial in refused:
        with pytest.raises(UserError) as caught:
            trial()
        assert str(caught.value) == (
            f"a row that nothing scores; {where}, column 'agent_name'; found 'single_turn_agent', which no environment "
            "answers, expected Game: only environments score; change the row, or give a reward function with "
            "--reward.path FILE"
        )
    for trial in found("Gone")[1]:
        with pytest.raises(UserError, match=f"environment that is not there; {where}; found agent_name 'Gone'"):
            trial()
    for trial in found("single_turn_agent", given)[1]:
        assert trial().startswith("reward: compute_score in ")
