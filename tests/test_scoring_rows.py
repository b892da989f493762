"""Functions that score many responses in one call, compute_scores(rows): every fault costs only its own response."""

from contextlib import closing
from functools import partial

import pytest

from lib.dist import SINGLE
from lib.errors import RewardError, UserError
from lib.rewards.scoring import RewardConfig, Scorer, check_error_rate
from lib.rewards.trial import check_reward
from lib.types import Score
from tests.test_scoring import make_rollout, rows, score_all, write
from tests.test_scoring_failures import OFFSPRING, has_ended, wait_for

ROWS = "def compute_scores(rows):\n"
SLOW_START = "import time\ntime.sleep(0.3)\n"
"""All responses of a test wait when the first worker is free: one call gets them, up to --reward.batch-size."""


def score(folder, body, texts, **options):
    options = {"num_workers": 1, **options}
    with closing(Scorer(RewardConfig(path=write(folder, SLOW_START + body), **options), {"mine"})) as scorer:
        for i, text in enumerate(texts):
            scorer.submit(make_rollout(i, truth=str(i)), text)
        return [rollout.score for rollout in scorer.collect()], scorer


def numbers(scores):
    return [each.score for each in scores]


# ---- What comes back ----


def test_rows_are_what_was_submitted_and_scores_go_to_their_responses(tmp_path):
    body = (
        ROWS
        + """
    assert [sorted(row) for row in rows] == [["data_source", "extra_info", "ground_truth", "solution_str"]] * len(rows)
    assert all(row["data_source"] == "mine" for row in rows)
    assert all(row["extra_info"] == {"place": int(row["ground_truth"])} for row in rows)
    return [{"score": len(row["solution_str"]), "rows": len(rows), "text": row["solution_str"]} for row in rows]
"""
    )
    texts = ["x" * (i * 7 % 20) for i in range(20)]
    scores, scorer = score(tmp_path, body, texts, batch_size=8)
    assert numbers(scores) == [len(text) for text in texts]
    assert [each.extras["text"] for each in scores] == texts
    assert [each.extras["rows"] for each in scores] == [8] * 16 + [4] * 4
    assert (scorer.function, scorer.takes_rows, scorer.num_failed_calls) == ("compute_scores", True, 0)
    for options in (dict(batch_size=1), dict(batch_size=3, num_workers=3), dict(batch_size=64)):
        assert numbers(score(tmp_path, body, texts, **options)[0]) == numbers(scores)


def test_one_number_none_and_a_dict_are_taken_of_each_row_as_of_a_single_response(tmp_path):
    body = (
        "import torch\n"
        + ROWS
        + """
    return [3, None, {"score": 0.5, "pred": "7"}, True, torch.tensor(2.0)]
"""
    )
    scores, _ = score(tmp_path, body, ["a", "b", "c", "d", "e"])
    expected = [Score(score=3.0), Score(score=None), Score(score=0.5, extras={"pred": "7"}), Score(score=1.0)]
    assert scores == [*expected, Score(score=2.0)]
    for values in ("tuple(range(5))", "numpy.arange(5)"):
        assert numbers(score(tmp_path, f"import numpy\n{ROWS}    return {values}", "abcde")[0]) == [0, 1, 2, 3, 4]


def test_a_row_without_a_finite_number_fails_alone(tmp_path):
    body = (
        ROWS
        + """
    return [{"nan": float("nan"), "text": "high", "far": 1e39, "none": {}}.get(row["solution_str"], 1) for row in rows]
"""
    )
    scores, scorer = score(tmp_path, body, ["good", "nan", "text", "far", "none", "good"])
    assert numbers(scores) == [1, None, None, None, None, 1] and scorer.num_failed_calls == 0
    errors = ["returned nan", "returned 'high' (str)", "returned 1e+39", "without the key 'score'"]
    assert all(text in each.error for text, each in zip(errors, scores[1:5], strict=True))


def test_a_coroutine_and_keyword_arguments(tmp_path):
    body = """
import asyncio
async def compute_scores(rows, bonus):
    await asyncio.sleep(0.01)
    return [len(row["solution_str"]) + bonus for row in rows]
"""
    assert numbers(score(tmp_path, body, ["a", "bb"], kwargs={"bonus": 0.5})[0]) == [1.5, 2.5]


def test_numbers_that_the_advantage_asks_for_are_asked_of_each_row(tmp_path):
    path = write(tmp_path, ROWS + "    return [{'score': 1, 'len': 2}, {'score': 1}]")
    with closing(Scorer(RewardConfig(path=path, num_workers=1), {"mine"}, reward_keys=("score", "len"))) as scorer:
        for i in range(2):
            scorer.submit(make_rollout(i), "x")
        scored = [rollout.score for rollout in scorer.collect()]
    assert numbers(scored) == [1.0, None] and "'len'" in scored[1].error


# ---- Calls that fail ----


HARM = """
import os, time
def compute_scores(rows):
    texts = [row["solution_str"] for row in rows]
    with open(LOG, "a") as file:
        print(len(texts), file=file)
    if "raise" in texts:
        return int("seven")
    if "exit" in texts:
        raise SystemExit(3)
    if "die" in texts:
        os._exit(4)
    if "abort" in texts:
        os.abort()
    while "hang" in texts:
        time.sleep(1)
    return [1] * len(rows)
"""


@pytest.mark.parametrize(
    ("harm", "error"),
    [
        ("raise", "ValueError: invalid literal for int() with base 10: 'seven' [reward.py:"),
        ("exit", "SystemExit: 3 [reward.py:"),
        ("die", "the reward worker exited with code 4"),
        ("abort", "the reward worker was killed by SIGABRT"),
        ("hang", "timed out after 3 s"),
    ],
)
def test_a_call_that_fails_is_made_again_row_by_row_once(tmp_path, harm, error):
    log = tmp_path / "calls"
    texts = ["good", "good", harm, "good", "good", "good"]
    scores, scorer = score(tmp_path, f"LOG = {str(log)!r}\n{HARM}", texts, batch_size=4, timeout_s=3.0)
    assert numbers(scores) == [1, 1, None, 1, 1, 1]
    assert scores[2].error.startswith(error), scores[2].error
    assert log.read_text().split() == ["4", "1", "1", "1", "1", "2"]
    assert scorer.num_failed_calls == 1 and scorer.call_error.startswith(error)


def test_a_function_that_fails_on_many_rows_alone_gives_scores_and_is_counted(tmp_path):
    body = ROWS + "    assert len(rows) == 1, 'one at a time'\n    return [1]\n"
    scores, scorer = score(tmp_path, body, "abcdef", batch_size=3)
    assert numbers(scores) == [1] * 6 and scorer.num_failed_calls == 2
    assert scorer.call_error.startswith("AssertionError: one at a time [reward.py:")


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        ("[1] * (len(rows) - 1)", "TypeError: returned 2 scores for 3 rows, expected one per row"),
        ("[1] * (len(rows) + 1)", "TypeError: returned 4 scores for 3 rows, expected one per row"),
        ("[1]", "TypeError: returned 1 scores for 3 rows, expected one per row"),  # right for each row alone
        ("[]", "TypeError: returned 0 scores for 3 rows, expected one per row"),
        ("1.0", "TypeError: returned 1.0 (float), expected a list with a score per row"),
        ("None", "TypeError: returned None (NoneType), expected a list with a score per row"),
        ("'abc'", "TypeError: returned 'abc' (str), expected a list with a score per row"),
        ("{1: 1, 2: 2, 3: 3}", "TypeError: returned {1: 1, 2: 2, 3: 3} (dict), expected a list with a score per row"),
        ("(1 for row in rows)", "(generator), expected a list with a score per row"),
        ("rows.clear() or [1]", "TypeError: returned 1 scores for 3 rows"),
    ],
)
def test_a_wrong_length_is_an_error_of_all_rows_and_no_other_call_hides_it(tmp_path, returned, error):
    scores, scorer = score(tmp_path, ROWS + f"    return {returned}\n", "abc")
    assert numbers(scores) == [None] * 3 and scorer.num_failed_calls == 0
    assert all(error in each.error for each in scores), scores[0].error
    with pytest.raises(RewardError, match="scoring failed for 3 of the step's 3 responses"):
        check_error_rate([make_rollout(score=each) for each in scores], RewardConfig(), SINGLE)


def test_rows_that_cannot_be_sent_fail_alone(tmp_path):
    import threading

    path = write(tmp_path, SLOW_START + ROWS + "    return [len(rows)] * len(rows)")
    with closing(Scorer(RewardConfig(path=path, num_workers=1), {"mine"})) as scorer:
        for i, truth in enumerate(("7", threading.Lock(), "8", threading.Lock())):
            scorer.submit(make_rollout(i, truth=truth), "x")
        scored = [rollout.score for rollout in scorer.collect()]
    assert numbers(scored) == [2, None, 2, None]
    assert scored[1].error.startswith("cannot be sent to a worker: ")


def test_what_a_call_started_ends_with_it(tmp_path):
    body = OFFSPRING + ROWS + "    return [compute_score(**row) for row in rows]\n"
    path = write(tmp_path, body)
    [alone] = score_all(RewardConfig(path=path, num_workers=1, timeout_s=5.0), ["hang"], truth=str(tmp_path))
    assert alone.error == "timed out after 5 s"
    for pid in (tmp_path / "pids").read_text().split():
        wait_for(partial(has_ended, int(pid)))


def test_a_worker_that_leaks_is_replaced_between_calls(tmp_path):
    body = "held = []\n" + ROWS + "    held.append(b'x' * 100 * 2**20)\n    return [len(held)] * len(rows)\n"
    scores, scorer = score(tmp_path, body, "abcdef", batch_size=2, max_memory_gib=0.13)
    assert numbers(scores) == [1, 1, 2, 2, 1, 1] and scorer.num_outgrown == 1


def test_workers_that_never_start_fail_all_rows(tmp_path):
    path = write(tmp_path, "import os\nos._exit(9)\ndef compute_scores(rows): pass")
    assert numbers(score_all(RewardConfig(path=path, num_workers=2), ["a", "b", "c"])) == [None] * 3


# ---- Which function, and the trial before a run ----


def test_which_function_is_taken_is_said_in_the_first_line(tmp_path):
    both = "def compute_score(**row): return 1\n" + ROWS + "    return [2] * len(rows)\n"
    mine = "def judge(rows, scale=1): return [3 * scale] * len(rows)\ndef single(**row): return 4\n"
    for body, options, name, number in (
        (both, {}, "compute_scores", 2),
        (both, {"name": "compute_scores"}, "compute_scores", 2),
        (mine, {"name": "judge", "kwargs": {"scale": 2}}, "judge", 6),
        (both + mine, {"name": "judge"}, "judge", 3),
        (both + mine, {"name": "single"}, "single", 4),
        ("def compute_scores(**given): return [5] * len(given['rows'])\n", {}, "compute_scores", 5),
    ):
        cfg = RewardConfig(path=write(tmp_path, body), batch_size=32, **options)
        line = check_reward(cfg, {"mine"}, rows("7", "8"))
        assert f"reward: {name} in " in line and (", up to 32 rows a call" in line) == (name != "single"), line
        assert numbers(score_all(cfg, ["a", "b"])) == [number] * 2


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("def compute_scores(texts): pass", ["takes other arguments", "compute_scores(texts)", "keywords rows"]),
        ("def compute_scores(rows, more): pass", ["takes other arguments", "'more'"]),
        (ROWS + "    return [1]", ["failed on a trial", "compute_scores in", "returned 1 scores for 3 rows"]),
        (ROWS + "    return [float('nan')] * len(rows)", ["failed on a trial", "row 0", "returned nan"]),
        (
            ROWS + "    return [int(row['solution_str']) for row in rows]",
            ["failed on a trial", "response ''", "ValueE"],
        ),
        (ROWS + "    import time\n    time.sleep(60)", ["failed on a trial", "timed out after 1 s"]),
        (ROWS + "    return [1] if len(rows) == 1 else 1 / 0", ["call with 3 rows, and on none", "ZeroDivisionError"]),
    ],
)
def test_broken_functions_of_rows_are_found_on_the_trial(tmp_path, body, words):
    with pytest.raises(RewardError) as caught:
        check_reward(RewardConfig(path=write(tmp_path, body), timeout_s=1.0), {"mine"}, rows("7", "8", "9"))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_answers_are_tried_row_by_row(tmp_path):
    body = ROWS + "    return [float(row['solution_str'] == 'it is ' + row['ground_truth']) for row in rows]\n"
    for says, refused in (("it is", False), ("is", True)):
        path = write(tmp_path, body + f"def write_answer(ground_truth): return '{says} ' + ground_truth\n")
        check = partial(check_reward, RewardConfig(path=path), {"mine"}, rows("7"), to_answer=[rows("7", "8")])
        if refused:
            with pytest.raises(RewardError, match="'is 7' scores no more than an empty response"):
                check()
        else:
            assert check().startswith("reward: compute_scores in ")


def test_options_out_of_range_are_refused():
    for options in (dict(batch_size=0), dict(batch_size=2**16 + 1), dict(kwargs={"rows": 1})):
        with pytest.raises(UserError, match=r"--reward\."):
            RewardConfig(**options)
