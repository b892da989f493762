"""Tokens chosen over the whole mini-batch: the same ones however the rows lie on ranks, and those of a slow loop."""

import math
from fractions import Fraction

import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.algorithms.losses import ClipCovLoss, KLCovLoss
from lib.algorithms.selection import (
    best_candidates,
    choose,
    covariances,
    exact_sum,
    mark,
    select_by_covariance,
    token_hashes,
    token_sums,
)
from lib.dist import SINGLE
from lib.types import Batch
from tests.ranks import save_of_rank
from tests.test_losses import batch_of

BETWEEN = (-0.2, 1.5)
KINDS = pytest.mark.parametrize("between", [None, BETWEEN], ids=["highest", "drawn"])


def step_batch(seed, rows=9, steps=7, levels=None, scale=1.0):
    """A ragged mini-batch with holes, an excluded row, one advantage per row; few different values make ties."""
    generator = torch.Generator().manual_seed(seed)
    lens = torch.randint(0, steps + 1, (rows, 1), generator=generator)
    mask = (torch.arange(steps) < lens) & (torch.rand(rows, steps, generator=generator) < 0.8)
    mask[1] = False
    log_probs, advantages = torch.randn(2, rows, steps, generator=generator)
    if levels:
        log_probs, advantages = (torch.round(x * levels) / levels for x in (log_probs, advantages))
    advantages = scale * advantages[:, :1].expand(rows, steps)
    poison = torch.where(mask, 0.0, math.nan)
    batch = batch_of(mask, advantages=advantages + poison, old_log_probs=log_probs - 3 + poison)
    return batch.with_(uids=torch.arange(rows) // 3 + 2**40, indices=torch.arange(rows) % 3)


def places(batch, selected):
    return {(int(batch.uids[r]), int(batch.indices[r]), s) for r, s in selected.nonzero().tolist()}


def select_over(parts, ratio, between):
    """What `select_by_covariance` does on every rank, without processes."""
    sums = sum(token_sums(part) for part in parts)
    k = max(1, int(ratio * int(sums[0, 0])))
    found = []
    for part in parts:
        cov = covariances(part, sums)
        eligible, priorities = part.response_mask, -cov
        if between is not None:
            eligible = eligible & (cov > between[0]) & (cov < between[1])
            priorities = torch.zeros_like(cov)
        found.append(best_candidates(part, priorities, eligible, k))
        assert len(found[-1]) <= k  # all that a rank sends
    return set().union(*(places(part, mark(part, choose(found, k))) for part in parts))


def mix(number):
    """SplitMix64 in Python's integers."""
    number = (number + 0x9E3779B97F4A7C15) % 2**64
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
    return number ^ number >> 31


def slow_hash(uid, index, position):
    number = mix((mix((mix(uid) + index) % 2**64) + position) % 2**64)
    return number - 2**64 if number >= 2**63 else number


def slow_selection(batch, ratio, between):
    """The definition, token by token, with exact sums."""
    tokens = [
        (int(batch.uids[r]), int(batch.indices[r]), s, batch.advantages[r, s].item(), batch.old_log_probs[r, s].item())
        for r, s in batch.response_mask.nonzero().tolist()
    ]
    if not tokens:
        return set()
    means = [float(sum(Fraction(token[i]) for token in tokens) / len(tokens)) for i in (3, 4)]
    keys = []
    for uid, index, position, advantage, log_prob in tokens:
        cov = (advantage - means[0]) * (log_prob - means[1])
        if between is None:
            keys.append((-cov, slow_hash(uid, index, position), uid, index, position))
        elif between[0] < cov < between[1]:
            keys.append((slow_hash(uid, index, position), uid, index, position))
    return {key[-3:] for key in sorted(keys)[: max(1, math.floor(ratio * len(tokens)))]}


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1e14, 1e37])
@KINDS
def test_selection_matches_a_slow_loop_whatever_the_size_of_advantages(scale, between):
    """A sum of fixed digits loses small ones, and overflows with large ones."""
    for seed in range(6):
        batch = step_batch(seed, scale=scale)
        bounds = between and (between[0] * scale, between[1] * scale)
        selected = select_by_covariance(batch, SINGLE, ratio=0.3, between=bounds)
        assert places(batch, selected) == slow_selection(batch, 0.3, bounds) != set()
        parts = [batch.rows(torch.arange(start, 9, 2).flip(0)) for start in (0, 1)]
        assert select_over(parts, 0.3, bounds) == places(batch, selected)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40))
def test_a_sum_is_exact(numbers):
    limbs = exact_sum(torch.tensor(numbers, dtype=torch.float32)).tolist()
    assert Fraction(sum(limb << 32 * k for k, limb in enumerate(limbs)), 2**149) == sum(map(Fraction, numbers))


@KINDS
@pytest.mark.parametrize("levels", [None, 1])
@pytest.mark.parametrize("ratio", [1e-4, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("seed", range(4))
def test_selection_matches_a_slow_loop(seed, ratio, levels, between):
    batch = step_batch(seed, levels=levels)
    selected = select_by_covariance(batch, SINGLE, ratio=ratio, between=between)
    assert selected.dtype == torch.bool and selected.shape == batch.response_mask.shape
    assert places(batch, selected) == slow_selection(batch, ratio, between)
    assert not (selected & ~batch.response_mask).any()


def test_known_answers_of_a_selection():
    # Means: A 0.5, log p -2. Covariances: 0.5 x (1, 0, 1) and -0.5 x (-1, 0, -1) = (0.5, 0, 0.5) twice.
    mask = torch.ones(2, 3, dtype=torch.bool)
    advantages = torch.tensor([[1.0], [0.0]]).expand(2, 3)
    log_probs = torch.tensor([[-1.0, -2.0, -1.0], [-3.0, -2.0, -3.0]])
    batch = batch_of(mask, advantages=advantages, old_log_probs=log_probs)
    assert covariances(batch, token_sums(batch)).tolist() == [[0.5, 0, 0.5], [0.5, 0, 0.5]]
    highest = select_by_covariance(batch, SINGLE, ratio=4 / 6)
    assert highest.tolist() == [[True, False, True], [True, False, True]]
    assert select_by_covariance(batch, SINGLE, ratio=0.01).sum() == 1
    assert (select_by_covariance(batch, SINGLE, ratio=3 / 6) & highest).sum() == 3  # a tie, cut by the hash
    drawn = select_by_covariance(batch, SINGLE, ratio=0.99, between=(-0.1, 0.5))  # fewer are eligible than asked for
    assert drawn.tolist() == [[False, True, False], [False, True, False]]
    assert select_by_covariance(batch, SINGLE, ratio=0.5, between=(0.5, 9.0)).sum() == 0


def test_the_losses_select_once_per_mini_batch_what_their_knobs_say():
    batch = step_batch(seed=2)
    clip_cov = ClipCovLoss(clip_cov_ratio=0.3, clip_cov_lb=BETWEEN[0], clip_cov_ub=BETWEEN[1])
    for loss, between in ((clip_cov, BETWEEN), (KLCovLoss(kl_cov_ratio=0.3), None)):
        assert places(batch, loss.prepare(batch, SINGLE).selected) == slow_selection(batch, 0.3, between) != set()
    assert batch.selected is None


@settings(deadline=None, derandomize=True, max_examples=120)
@given(
    st.integers(0, 2**20),
    st.sampled_from([0.01, 0.2, 0.6]),
    st.sampled_from([None, BETWEEN]),
    st.sampled_from([None, 1, 2]),
    st.lists(st.integers(0, 3), min_size=9, max_size=9),
    st.permutations(range(9)),
)
def test_selection_is_the_same_however_rows_are_spread_over_ranks(seed, ratio, between, levels, homes, order):
    batch = step_batch(seed, levels=levels)
    parts = [batch.rows(torch.tensor([r for r in order if homes[r] == rank], dtype=torch.int64)) for rank in range(4)]
    expected = places(batch, select_by_covariance(batch, SINGLE, ratio=ratio, between=between))
    assert select_over(parts, ratio, between) == expected
    sums = sum(token_sums(part) for part in parts)
    assert sums.dtype == torch.int64, "floating-point sums would depend on their order"
    assert torch.equal(sums, token_sums(batch))


def test_hashes_are_those_of_the_definition_and_do_not_depend_on_padding():
    uids, indices = torch.tensor([0, 1, 2**40, 7]), torch.tensor([0, 5, 3, 0])
    hashes = token_hashes(uids, indices, 6)
    expected = [
        [slow_hash(uid, index, t) for t in range(6)] for uid, index in zip(uids.tolist(), indices.tolist(), strict=True)
    ]
    assert hashes.tolist() == expected
    assert torch.equal(token_hashes(uids[2:], indices[2:], 9)[:, :6], hashes[2:])


def test_tokens_are_drawn_evenly():
    """Of 200 x 50 equal tokens a tenth, by place in the response and by row: counts within 5 standard deviations."""
    mask = torch.ones(200, 50, dtype=torch.bool)
    batch = batch_of(mask, advantages=torch.zeros(200, 50), old_log_probs=torch.zeros(200, 50))
    batch = batch.with_(uids=torch.arange(200) // 8, indices=torch.arange(200) % 8)
    drawn = select_by_covariance(batch, SINGLE, ratio=0.1, between=(-1.0, 1.0))
    assert drawn.sum() == 1000
    for dim, share in ((0, 200), (1, 50)):
        counts = drawn.sum(dim).double()
        assert (counts - share * 0.1).abs().max() < 5 * math.sqrt(share * 0.1 * 0.9)
        assert counts.var() > share * 0.1 * 0.9 / 2  # and not suspiciously evenly


# ---- Two real processes (gloo) ----


LOSSES = (
    ClipCovLoss(clip_cov_ratio=0.2, clip_cov_lb=BETWEEN[0], clip_cov_ub=BETWEEN[1]),
    KLCovLoss(kl_cov_ratio=0.2),
)


def share(rank):
    """A rank's rows of one mini-batch, not in order."""
    return step_batch(seed=5).rows(torch.tensor([r for r in reversed(range(9)) if (r * 5 + r // 2) % 2 == rank]))


def selected(world):
    return [vars(loss.prepare(share(world.rank), world)) for loss in LOSSES]


def test_two_processes_select_what_one_does(tmp_path):
    mp.start_processes(save_of_rank, (selected, 2, tmp_path), 2, start_method="spawn")
    reports = [torch.load(tmp_path / f"2_{rank}.pt", weights_only=False) for rank in range(2)]
    whole = step_batch(seed=5)
    for which, loss in enumerate(LOSSES):
        parts = [Batch(**report[which]) for report in reports]
        expected = places(whole, loss.prepare(whole, SINGLE).selected)
        found = [places(part, part.selected) for part in parts]
        assert found[0] | found[1] == expected
        assert found[0] and found[1], "both ranks hold some"
