"""Dynamic sampling's decisions: verdicts by hand and by a slow loop, whole steps, shrunken ones, none; whole runs."""

import math
import statistics
from itertools import chain

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lib.algorithms.group_filter import (
    GroupFilterConfig,
    StepGroups,
    goes_on,
    judge,
    metric_values,
    shortage,
    step_groups,
)
from lib.errors import UserError
from lib.types import Rollout, Sample, Score

CFG = GroupFilterConfig(enable=True)
NAN, INF = math.nan, math.inf


def rollouts(*scores):
    sample = Sample(uid=0, prompt_ids=[1], data_source="", ground_truth="", extra_info={})
    rest = dict(response_ids=[1], rollout_log_probs=None, finish_reason="stop")
    return [Rollout(sample=sample, index=i, score=score, **rest) for i, score in enumerate(scores)]


# ---- Verdicts ----


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 0, 0, 0], "kept"), ([1, 1, 1, 1], "all_right"), ([0, 0, 0, 0], "all_wrong"), ([-1, -1], "all_wrong"),
        ([0.1] * 7, "all_right"), ([1, None, 0, None], "kept"), ([1, None, None], "failed"), ([None, None], "failed"),
        ([1, 1, None], "all_right"), ([0], "failed"), ([], "failed"),
    ],
)  # fmt: skip
def test_verdicts_of_known_groups(values, expected):
    assert judge(values, CFG) == expected


def test_the_band_keeps_its_bounds_and_is_about_groups_that_differ():
    cfg = GroupFilterConfig(low=0.25, high=0.5)
    found = [judge([1] * k + [0] * (8 - k), cfg) for k in range(9)]
    assert found == ["all_wrong", "out_of_band", "kept", "kept", "kept", *["out_of_band"] * 3, "all_right"]


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.lists(st.none() | st.sampled_from([-1.0, 0.0, 0.1, 0.5, 1.0]), max_size=8), st.floats(-1, 1), st.floats(0, 1))
def test_a_group_is_kept_if_its_population_std_is_above_0_and_its_mean_in_the_band(values, low, width):
    valid = [value for value in values if value is not None]
    verdict = judge(values, GroupFilterConfig(low=low, high=low + width))
    if len(valid) < 2:
        assert verdict == "failed"
    elif statistics.pstdev(valid) == 0:
        assert verdict == ("all_right" if valid[0] > 0 else "all_wrong")
    else:
        mean = statistics.fmean(valid)
        assert verdict == ("kept" if low <= mean <= low + width else "out_of_band")
    assert judge(values[::-1], GroupFilterConfig(low=low, high=low + width)) == verdict


def test_the_metric_is_the_score_or_what_the_reward_returns_beside_it():
    group = rollouts(
        Score(score=0.5, extras={"acc": True, "pred": "7"}), Score(score=None), Score(score=1.0, extras={"acc": 0.0}),
        Score(score=2.0, extras={"acc": NAN}),
    )  # fmt: skip
    assert metric_values(group, "score") == [0.5, None, 1.0, 2.0]
    assert metric_values(group, "acc") == [1.0, None, 0.0, None]
    for metric in ("pred", "accuracy"):
        with pytest.raises(UserError, match=f"{metric}.*--filter-groups.metric.*acc") as caught:
            metric_values(group, metric)
        assert len(str(caught.value).split("; ")) == 4


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"low": NAN}, "filter-groups.low"), ({"low": INF}, "filter-groups.low"), ({"high": NAN}, "filter-groups.high"),
        ({"low": 0.6, "high": 0.5}, "at least --filter-groups.low"), ({"max_rounds": 0}, "filter-groups.max-rounds"),
        ({"metric": ""}, "filter-groups.metric"),
    ],
)  # fmt: skip
def test_bad_numbers_are_refused(options, part):
    with pytest.raises(UserError, match=part):
        GroupFilterConfig(**options)


def test_the_filter_is_told_in_words():
    assert CFG.in_words(4) == (
        "rounds of sampling, 10 at most, until 4 groups differ in score; groups beyond those train in the next step"
    )
    words = GroupFilterConfig(enable=True, metric="acc", low=0.2, keep_surplus=False).in_words(4)
    assert "differ in acc, their mean from 0.2 to inf; groups beyond those are dropped" in words


# ---- Rounds ----


def test_sampling_goes_on_until_the_sum_suffices_or_the_rounds_are_used_up():
    assert goes_on([3, 0], target=4, rounds=1, cfg=CFG)
    assert not goes_on([4, 0], target=4, rounds=1, cfg=CFG)
    assert not goes_on([0, 5], target=4, rounds=1, cfg=CFG)
    assert not goes_on([2, 2], target=4, rounds=1, cfg=CFG)
    assert not goes_on([0, 0], target=4, rounds=10, cfg=CFG)
    assert goes_on([0, 0], target=4, rounds=9, cfg=CFG)


# ---- The groups of a step ----


def of(kept_by_rank, *, target=8, n=4, mini_batch_size=16, num_ranks=2):
    return step_groups(kept_by_rank, target=target, n=n, mini_batch_size=mini_batch_size, num_ranks=num_ranks)


@pytest.mark.parametrize(
    ("kept_by_rank", "options", "expected"),
    [
        # enough: the smallest uids of all ranks, whoever has them
        ([[9, 1, 4], [2, 8, 5, 6, 7, 3]], {}, (8, 1, 16)),
        ([[], list(range(1, 11))], {}, (8, 2, 16)),
        # five of eight groups: 20 responses in the same two mini-batches
        ([[1, 2], [3, 4, 5]], {}, (5, 0, 10)),
        # n = 3, four mini-batches: only multiples of four groups make equal ones
        ([[1, 2, 3], [4, 5, 6, 7]], {"n": 3, "mini_batch_size": 6}, (4, 3, 3)),
        ([[1, 2], [3]], {"n": 3, "mini_batch_size": 6}, (3, 0, 3)),  # too few for four: three of them
        # one group of four for three ranks: one mini-batch
        ([[1], [], []], {"num_ranks": 3}, (1, 0, 4)),
        # four responses, five ranks: nothing
        ([[1], [], [], [], []], {"num_ranks": 5}, (0, 1, 0)),
        ([[], []], {}, (0, 0, 0)),
    ],
)
def test_known_steps(kept_by_rank, options, expected):
    groups = of(kept_by_rank, **options)
    assert (len(groups.uids), len(groups.surplus), groups.mini_batch_size) == expected
    assert (*groups.uids, *groups.surplus) == tuple(sorted(chain(*kept_by_rank)))


shapes = st.tuples(st.integers(1, 12), st.integers(2, 9), st.integers(0, 99), st.integers(1, 6))


@settings(deadline=None, derandomize=True, max_examples=200)
@given(shapes, st.sets(st.integers(0, 99), max_size=30), st.randoms(use_true_random=False))
def test_a_step_takes_the_oldest_groups_into_equal_mini_batches_with_a_response_for_every_rank(shape, uids, random):
    target, n, choice, num_ranks = shape
    divisors = [d for d in range(num_ranks, target * n + 1) if target * n % d == 0]  # what check_launch lets through
    assume(divisors)
    mini_batch_size = divisors[choice % len(divisors)]
    by_rank = [[] for _ in range(num_ranks)]
    for uid in random.sample(sorted(uids), len(uids)):
        random.choice(by_rank).append(uid)
    groups = of(by_rank, target=target, n=n, mini_batch_size=mini_batch_size, num_ranks=num_ranks)
    assert (*groups.uids, *groups.surplus) == tuple(sorted(uids))
    assert len(groups.uids) <= target
    whole, size = target * n // mini_batch_size, groups.mini_batch_size
    if len(uids) >= target:
        assert len(groups.uids) == target and size == mini_batch_size
    # No more mini-batches would do, and no more groups for as many.
    for number in range(whole, 0, -1):
        fitting = [k for k in range(min(target, len(uids)) + 1) if k * n % number == 0 and k * n // number >= num_ranks]
        if fitting:
            assert (len(groups.uids), size) == (max(fitting), max(fitting) * n // number)
            break
    else:
        assert groups.uids == () and size == 0, "skipped only when nothing fits"


def test_a_shortage_is_told_and_a_full_step_is_not():
    counts = {"kept": 3, "all_right": 20, "all_wrong": 0, "out_of_band": 1, "failed": 0}
    short = StepGroups(uids=(1, 2), surplus=(3,), mini_batch_size=8)
    text = shortage(short, target=8, rounds=10, counts=counts, keep_surplus=True)
    assert "3 of 8 groups" in text and "10 round" in text and "20 all right, 1 out of band)" in text
    assert text.count("trains on 2, 1 left for the next step; ") == 1
    assert "trains on 2, 1 dropped; " in shortage(short, target=8, rounds=10, counts=counts, keep_surplus=False)
    same = shortage(short, target=8, rounds=10, counts=dict(reversed(counts.items())), keep_surplus=True)
    assert same == text, "the order of the reasons is always the same"
    skipped = StepGroups(uids=(), surplus=(), mini_batch_size=0)
    assert "it is skipped" in shortage(skipped, target=8, rounds=10, counts=dict.fromkeys(counts, 0), keep_surplus=True)
    assert shortage(short, target=2, rounds=1, counts=counts, keep_surplus=True) is None


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.lists(st.lists(st.booleans(), min_size=60, max_size=60), min_size=1, max_size=3), st.booleans())
def test_simulated_runs_end_every_step_and_lose_no_group(signals, keep_surplus):
    """Rank r draws prompts r, r + R, ...; one rank may never see a signal. Surplus comes back, oldest first."""
    num_ranks, target, cfg = len(signals), 4, GroupFilterConfig(max_rounds=3, keep_surplus=keep_surplus)
    next_draw, pools, trained, wasted = 0, [[] for _ in signals], [], []
    for _ in range(4):
        rounds = 0
        while rounds == 0 or goes_on([len(pool) for pool in pools], target=target, rounds=rounds, cfg=cfg):
            for rank, pool in enumerate(pools):
                pool += [uid for uid in (next_draw * num_ranks + rank,) if signals[rank][next_draw]]
            next_draw, rounds = next_draw + 1, rounds + 1
        assert rounds <= cfg.max_rounds
        groups = step_groups(pools, target=target, n=4, mini_batch_size=8, num_ranks=num_ranks)
        trained += groups.uids
        wasted += [] if keep_surplus else groups.surplus
        pools = [[uid for uid in pool if uid in groups.surplus and keep_surplus] for pool in pools]
    with_signal = {d * num_ranks + r for r, of_rank in enumerate(signals) for d in range(next_draw) if of_rank[d]}
    left = [uid for pool in pools for uid in pool]
    assert sorted([*trained, *wasted, *left]) == sorted(with_signal)
    assert trained == sorted(trained)
