"""Rewards per token: where the score lands, DAPO's length penalty, and truncated responses left out."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.algorithms.advantages import GroupAdvantage
from lib.algorithms.aggregation import loss_denominator
from lib.algorithms.shaping import (
    OverlongConfig,
    make_token_level_rewards,
    mask_truncated,
    overlong_penalty,
    response_rewards,
    shape_rewards,
    token_rewards,
)
from lib.dist import SINGLE
from lib.errors import UserError
from tests.test_advantages import batch_of, make_batch, random_step

quick = settings(deadline=None, derandomize=True, max_examples=100)


def test_the_score_lands_on_the_last_token_that_the_policy_chose():
    mask = torch.tensor([[True, True, False], [True, False, True], [False] * 3, [False, True, False]])
    batch = make_batch(torch.tensor([2.0, 3.0, 4.0, 5.0]), torch.arange(4), torch.ones(4, dtype=torch.bool), mask)
    assert make_token_level_rewards(batch).tolist() == [[0, 2, 0], [0, 0, 3], [0, 0, 0], [0, 5, 0]]
    penalty = torch.tensor([0.5, 0.0, 1.0, 7.0])
    assert make_token_level_rewards(batch, penalty=penalty).sum(-1).tolist() == [1.5, 3, 0, -2]


def test_rewards_are_read_from_the_scores_or_from_the_tokens():
    batch = batch_of([1, 2, 3], [0, 0, 0], None, [2, 1, 0])
    assert response_rewards(batch).tolist() == [1, 2, 3]
    assert token_rewards(batch).tolist() == [[0, 1], [2, 0], [0, 0]]
    batch = batch.with_(token_level_rewards=torch.tensor([[0.25, 0.5], [-1.0, math.nan], [math.nan, math.inf]]))
    assert response_rewards(batch).tolist() == [0.75, -1, 3]  # a response without a token keeps its score
    assert token_rewards(batch).tolist() == [[0.25, 0.5], [-1, 0], [0, 0]]


def test_known_answers_of_the_length_penalty():
    # limit 20, the last 4 tokens penalised: free up to 16, then 1 / 4 a token
    lens = torch.tensor([0, 1, 16, 17, 18, 20])
    assert overlong_penalty(lens, 20, buffer_len=4, factor=1.0).tolist() == [0, 0, 0, 0.25, 0.5, 1]
    assert overlong_penalty(lens, 20, buffer_len=4, factor=2.0).tolist() == [0, 0, 0, 0.5, 1, 2]
    assert overlong_penalty(lens, 20, buffer_len=0, factor=1.0).tolist() == [0] * 6
    assert overlong_penalty(lens, 20, buffer_len=20, factor=1.0).tolist() == pytest.approx((lens / 20).tolist())


@quick
@given(st.lists(st.integers(0, 50), max_size=9), st.integers(1, 50), st.floats(0, 8))
def test_the_length_penalty_is_that_of_dapo(lens, buffer_len, factor):
    penalty = overlong_penalty(torch.tensor(lens, dtype=torch.int64), 50, buffer_len=buffer_len, factor=factor)
    expected = [-min(-(length - (50 - buffer_len)) / buffer_len * factor, 0) for length in lens]
    assert penalty.dtype == torch.float32 and penalty.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-30)


def test_shaping_leaves_the_scores_to_the_metrics_and_counts_all_response_tokens():
    batch = batch_of([1, 1], [0, 0], None, [8, 10])
    batch = batch.with_(
        response_mask=batch.response_mask & (torch.arange(10) != 5), response_lens=torch.tensor([8, 10])
    )
    shaped = shape_rewards(batch, OverlongConfig(buffer_len=4), max_response_len=10)
    assert torch.equal(shaped.scores, batch.scores)
    assert response_rewards(shaped).tolist() == [0.5, 0]
    assert GroupAdvantage(norm_by_std=False)(shaped, SINGLE)[0][:, 0].tolist() == [0.25, -0.25]


def test_without_options_shaping_changes_no_advantage():
    batch = random_step(1, with_kl=False).with_(token_level_rewards=None)
    shaped = shape_rewards(batch, OverlongConfig(), max_response_len=6)
    assert torch.equal(GroupAdvantage()(shaped, SINGLE)[0], GroupAdvantage()(batch, SINGLE)[0])


def test_masked_truncated_responses_leave_statistics_and_denominators():
    batch = batch_of([1, 0, 7], [0, 0, 0], None, [2, 3, 3]).with_(truncated=torch.tensor([False, False, True]))
    masked = shape_rewards(batch, OverlongConfig(mask_truncated=True), max_response_len=3)
    assert masked.valid.tolist() == [True, True, False]
    assert masked.response_mask.any(-1).tolist() == [True, True, False]
    assert batch.valid.all() and batch.response_mask[2].any()  # the input is left alone
    assert masked.scores.tolist() == [1, 0, 7]
    advantages = GroupAdvantage(norm_by_std=False)(masked, SINGLE)[0]
    assert advantages.tolist() == [[0.5, 0.5, 0], [-0.5] * 3, [0] * 3]
    assert loss_denominator(masked, "token-mean", SINGLE, scale=3) == 5
    assert loss_denominator(masked, "seq-mean-token-mean", SINGLE, scale=3) == 2
    assert torch.equal(mask_truncated(batch).response_mask, masked.response_mask)


@pytest.mark.parametrize(
    ("field", "value"), [("buffer_len", -1), ("factor", -0.5), ("factor", math.inf), ("factor", math.nan)]
)
def test_impossible_shaping_is_refused(field, value):
    flag = field.replace("_", "-")
    with pytest.raises(UserError, match=rf"--overlong.{flag} is out of range.*found {value}.*expected .*change"):
        OverlongConfig(**{field: value})
