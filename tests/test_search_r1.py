"""The grader of Search-R1's questions: worked by hand, and on verl's rows in a worker."""

import pytest

from lib.errors import UserError
from lib.rewards.scoring import GRADERS, RewardConfig
from lib.rewards.search_r1 import SOURCES, compute_score, write_answer
from lib.rewards.trial import check_reward, rows_to_answer
from tests.test_kinds import EACH_FILE, read, search_r1_row


def grade(text, truth=("United States of America", "the U.S.A.")):
    return compute_score("searchR1_nq", text, {"target": list(truth)}, {})["score"]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("so <answer>United States of America</answer>", 1),
        ("<answer>\n  united   states of America! \n</answer> ok", 1),
        ("<answer>USA</answer>", 1),  # as "the U.S.A."
        ("<answer>A U.S.A</answer>", 1),
        ("<answer>the United States</answer>", 0),  # not a part of it
        ("<answer>USA</answer> no, <answer>UK</answer>", 0),  # the last one counts
        ("<answer>UK</answer> no, <answer>USA</answer>", 1),
        ("USA", 0),
        ("<answer>USA", 0),
        ("<answer></answer>", 0),
        ("", 0),
        ("<answer>USA</answer>" * 10, 1),
        ("<answer>USA</answer>" * 11, 0.25),
        ("<answer>UK</answer>" * 11, 0),
    ],
)
def test_answers_score_as_worked_by_hand(text, score):
    assert grade(text) == score


@pytest.mark.parametrize("truth", [None, {}, {"target": None}, {"target": []}, {"target": ["", "the"]}, 7, "  "])
def test_a_ground_truth_without_an_answer_is_an_error_and_not_0(truth):
    for call in (lambda: compute_score("searchR1_nq", "<answer></answer>", truth, {}), lambda: write_answer(truth)):
        with pytest.raises((ValueError, TypeError)):
            call()


def test_one_answer_needs_no_list_around_it():
    for truth in ("Paris", ["Lyon", "Paris"], {"target": "Paris"}):
        assert compute_score("searchR1_nq", "<answer>paris</answer>", truth, {})["acc"]


@EACH_FILE
def test_verls_rows_are_graded_by_it(tmp_path, kind):
    rows = read(tmp_path, kind, [search_r1_row(i) for i in range(3)])
    samples = {rows.where(0): rows.sample(0, uid=0)}
    line = check_reward(
        RewardConfig(), rows.data_sources(), samples, to_answer=rows_to_answer(RewardConfig(), rows, None)
    )
    assert line == "reward: lib.rewards.search_r1 for searchR1_nq"
    assert all(GRADERS[source] == "lib.rewards.search_r1" for source in SOURCES)
    bad = read(
        tmp_path, kind, [{**search_r1_row(i), "reward_model": {"ground_truth": {"target": [""]}}} for i in range(2)]
    )
    with pytest.raises(UserError, match=r"no ground truth can be answered.*has no answer, expected"):
        check_reward(RewardConfig(), bad.data_sources(), {}, to_answer=rows_to_answer(RewardConfig(), bad, None))
