"""Group advantages: hand-worked numbers, a slow loop, exact zeros. Ranks: see test_batching.py."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.advantages import ADVANTAGES, GroupAdvantage, group_advantages
from lib.dist import SINGLE
from lib.types import Batch


def advantages(scores, uids, valid=None, *, norm_by_std=True, dtype=torch.float64):
    valid = [True] * len(scores) if valid is None else valid
    return group_advantages(
        torch.tensor(scores, dtype=dtype), torch.tensor(uids), torch.tensor(valid), norm_by_std=norm_by_std
    ).tolist()


def slow(scores, uids, valid, norm_by_std):
    """The definition, row by row, in Python floats."""
    result = []
    for score, uid, ok in zip(scores, uids, valid, strict=True):
        group = [s for s, u, v in zip(scores, uids, valid, strict=True) if u == uid and v]
        if not ok or len(group) < 2 or max(group) == min(group):
            result.append(0.0)
        else:
            scale = statistics.stdev(group) + 1e-6 if norm_by_std else 1.0
            result.append((score - statistics.fmean(group)) / scale)
    return result


def batch_of(scores, uids, valid, response_lens):
    rows = len(scores)
    lens = torch.tensor(response_lens)
    mask = (torch.arange(max(response_lens)) < lens[:, None]) & torch.tensor(valid)[:, None]
    return Batch(
        uids=torch.tensor(uids), indices=torch.arange(rows), mini_batch_ids=torch.zeros(rows, dtype=torch.int64),
        input_ids=torch.zeros(rows, 1 + max(response_lens), dtype=torch.int64),
        prompt_lens=torch.ones(rows, dtype=torch.int64), response_lens=lens, response_mask=mask,
        truncated=torch.zeros(rows, dtype=torch.bool), valid=torch.tensor(valid), scores=torch.tensor(scores),
    )  # fmt: skip


def test_known_answers_of_one_success_in_four():
    assert advantages([1, 0, 0, 0], [5] * 4) == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)
    assert advantages([1, 0, 0, 0], [5] * 4, norm_by_std=False) == [0.75, -0.25, -0.25, -0.25]


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    st.floats(-1e6, 1e6, width=32), st.integers(2, 64), st.booleans(), st.sampled_from([torch.float32, torch.float64])
)
def test_a_group_of_equal_scores_gets_exactly_zero(score, n, norm_by_std, dtype):
    assert advantages([score] * n, [0] * n, norm_by_std=norm_by_std, dtype=dtype) == [0.0] * n


def test_seven_tenths_get_exactly_zero_though_their_float32_std_does_not():
    scores = torch.full((7,), 0.1)
    assert (scores - scores.mean()).abs().max() > 0  # the trap is real
    assert advantages([0.1] * 7, [0] * 7, dtype=torch.float32) == [0.0] * 7


def test_groups_are_keyed_by_uid_wherever_their_rows_are():
    assert advantages([1, 5, 0, 5, 0, 5, 0, 9], [7, 3, 7, 3, 7, 3, 7, 3], norm_by_std=False) == [
        0.75, -1, -0.25, -1, -0.25, -1, -0.25, 3,
    ]  # fmt: skip


def test_excluded_rows_leave_the_statistics_and_get_zero():
    result = advantages([1, 0, 99, 0, 0], [4] * 5, [True, True, False, True, True])
    assert result == pytest.approx([1.5, -0.5, 0, -0.5, -0.5], rel=1e-5)


def test_a_group_with_fewer_than_two_valid_rows_gets_zero():
    assert advantages([1, 2, 3, 4], [0, 0, 0, 1], [True, False, False, True]) == [0, 0, 0, 0]


rows_of_groups = st.lists(
    st.tuples(st.sampled_from([-1.0, 0.0, 0.1, 0.5, 1.0]), st.integers(0, 3), st.booleans()), min_size=1, max_size=24
)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(rows_of_groups, st.booleans(), st.randoms(use_true_random=False))
def test_advantages_match_a_slow_loop_move_with_their_rows_and_ignore_a_shift(rows, norm_by_std, random):
    result = advantages(*zip(*rows, strict=True), norm_by_std=norm_by_std)
    assert result == pytest.approx(slow(*zip(*rows, strict=True), norm_by_std), abs=1e-9)
    order = random.sample(range(len(rows)), len(rows))
    moved = advantages(*zip(*(rows[i] for i in order), strict=True), norm_by_std=norm_by_std)
    assert moved == pytest.approx([result[i] for i in order], abs=1e-9)
    shifted = advantages(*zip(*((s + 8, u, v) for s, u, v in rows), strict=True), norm_by_std=norm_by_std)
    assert shifted == pytest.approx(result, abs=1e-9)
    for uid in range(4):
        assert math.fsum(a for a, (_, u, _) in zip(result, rows, strict=True) if u == uid) == pytest.approx(0, abs=1e-9)


def test_every_token_of_a_response_carries_its_advantage_and_nothing_else_does():
    batch = batch_of([1.0, 0.0, 0.0, 7.0, 0.0], [2, 2, 2, 2, 2], [True, True, True, False, True], [3, 1, 0, 3, 2])
    result, returns = GroupAdvantage(norm_by_std=False)(batch, SINGLE)
    assert result.dtype == torch.float32
    assert result.tolist() == [[0.75] * 3, [-0.25, 0, 0], [0] * 3, [0] * 3, [-0.25, -0.25, 0]]
    assert torch.equal(result, returns)


def test_scores_far_from_zero_keep_their_differences():
    scores = torch.tensor([1000.1, 1000.2, 1000.3, 1000.7]).tolist()  # as float32 holds them
    batch = batch_of(scores, [0] * 4, [True] * 4, [1] * 4)
    expected = slow(scores, [0] * 4, [True] * 4, True)
    assert GroupAdvantage()(batch, SINGLE)[0].flatten().tolist() == pytest.approx(expected, rel=2e-7)


def test_the_table_offers_grpo_which_needs_groups():
    assert ADVANTAGES["grpo"]() == GroupAdvantage(norm_by_std=True)
    assert GroupAdvantage.needs_group
