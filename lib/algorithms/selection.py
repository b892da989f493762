"""Which tokens of a mini-batch a loss treats apart: chosen over all ranks, by what no split of the rows can change.

A choice ranks tokens by a priority and breaks ties by a hash of the token's place in the stream. Ranks meet twice: to
add up three sums, and to compare the best few candidates of each.
"""

from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from lib.dist import World
from lib.types import Batch

LIMBS = 9  # of 32 bits: any float32 is a whole number of 2^-149 below 2^278


class Candidate(NamedTuple):
    """A token that may be chosen. Sorts by priority, then at random; the rest tells it from all other tokens."""

    priority: float
    """Lowest first."""
    hash: int
    uid: int
    index: int
    position: int


def token_sums(batch: Batch) -> Tensor:
    """(3, LIMBS) int64: this rank's response tokens, counted in the first place, and `exact_sum` of their advantages
    and of their old log-probs. Added over ranks, they are those of the whole mini-batch."""
    assert batch.old_log_probs is not None and batch.advantages is not None, "computed before the update"
    mask = batch.response_mask
    count = torch.zeros(LIMBS, dtype=torch.int64, device=mask.device)
    count[0] = mask.sum()
    return torch.stack([count, *(exact_sum(column[mask]) for column in (batch.advantages, batch.old_log_probs))])


def exact_sum(values: Tensor) -> Tensor:
    """(LIMBS,) int64, the sum of numbers (N,) as float32: sum over k of limb k x 2^(32 k), in units of 2^-149.

    Nothing is rounded, so it depends neither on the order of addition nor on the ranks. Room for 2^31 numbers.
    """
    bits = values.float().view(torch.int32).long()
    exponents, digits = (bits >> 23) & 0xFF, bits & 0x7FFFFF  # (N,) each, of a float32
    shifts = (exponents - 1).clamp(min=0)  # the smallest numbers have exponent 0, and no leading 1
    digits = torch.where(exponents > 0, digits + 2**23, digits) << shifts % 32  # below 2^55
    signs = torch.where(bits < 0, -1, 1)
    limbs = torch.zeros(LIMBS, dtype=torch.int64, device=values.device)
    limbs.index_add_(0, shifts // 32, signs * (digits & 0xFFFFFFFF))
    return limbs.index_add_(0, shifts // 32 + 1, signs * (digits >> 32))


def covariances(batch: Batch, sums: Tensor) -> Tensor:
    """(A - mean A) x (log p_old - mean log p_old) per token, (B, T) float64, anything outside response_mask.

    `sums` are the `token_sums` of all ranks, added. Its mean over a batch is what drives the change of entropy
    (arXiv:2505.22617).
    """
    assert batch.old_log_probs is not None and batch.advantages is not None, "computed before the update"
    (count, *_), *columns = sums.tolist()
    units = max(count, 1) << 149
    mean_advantage, mean_log_prob = (
        float(Fraction(sum(limb << 32 * k for k, limb in enumerate(limbs)), units)) for limbs in columns
    )
    return (batch.advantages.double() - mean_advantage) * (batch.old_log_probs.double() - mean_log_prob)


def best_candidates(batch: Batch, priorities: Tensor, eligible: Tensor, k: int) -> list[Candidate]:
    """This rank's first k of the eligible tokens, fewer where fewer are; priorities and eligible are (B, T)."""
    hashes = token_hashes(batch.uids, batch.indices, eligible.shape[1])
    rows, positions = eligible.nonzero(as_tuple=True)  # (E,), (E,)
    order = hashes[rows, positions].argsort(stable=True)
    order = order[priorities[rows, positions][order].argsort(stable=True)][:k]  # by priority, ties still by hash
    rows, positions = rows[order], positions[order]
    columns = (priorities[rows, positions], hashes[rows, positions], batch.uids[rows], batch.indices[rows], positions)
    return [Candidate(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def choose(parts: Iterable[list[Candidate]], k: int) -> set[tuple[int, int, int]]:
    """(uid, index, position) of the first k of all ranks' candidates."""
    return {candidate[2:] for candidate in sorted(candidate for part in parts for candidate in part)[:k]}


def mark(batch: Batch, chosen: set[tuple[int, int, int]]) -> Tensor:
    """(B, T) bool, True at the chosen tokens that are among these rows."""
    row_of = {key: row for row, key in enumerate(zip(batch.uids.tolist(), batch.indices.tolist(), strict=True))}
    selected = torch.zeros_like(batch.response_mask)
    for uid, index, position in chosen:
        if (row := row_of.get((uid, index))) is not None:
            selected[row, position] = True
    return selected


def select_by_covariance(
    batch: Batch, world: World, *, ratio: float, between: tuple[float, float] | None = None
) -> Tensor:
    """max(1, floor(ratio x response tokens of all ranks)) tokens of the mini-batch: (B, T) bool of this rank's rows.

    Those of highest covariance; or, with `between`, any whose covariance lies strictly between the two numbers, drawn
    at random (all of them where there are fewer). Executed by all ranks together.
    """
    sums = world.sum(token_sums(batch))
    k = max(1, int(ratio * int(sums[0, 0])))
    cov = covariances(batch, sums)  # (B, T)
    if between is None:
        candidates = best_candidates(batch, -cov, batch.response_mask, k)
    else:
        eligible = batch.response_mask & (between[0] < cov) & (cov < between[1])
        candidates = best_candidates(batch, torch.zeros_like(cov), eligible, k)
    return mark(batch, choose(world.gather(candidates), k))


def token_hashes(uids: Tensor, indices: Tensor, num_positions: int) -> Tensor:
    """A number per token that looks random and depends on uid, index and position alone: (B, num_positions) int64."""
    positions = torch.arange(num_positions, device=uids.device)  # (T,)
    return _mix(_mix(_mix(uids) + indices)[:, None] + positions)  # (B, T)


def _mix(numbers: Tensor) -> Tensor:
    """A bijection of int64 that scatters neighbours: a step of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    numbers = numbers - 0x61C8864680B583EB  # adds 0x9E3779B97F4A7C15 modulo 2^64
    numbers = (numbers ^ _shift_right(numbers, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    numbers = (numbers ^ _shift_right(numbers, 27)) * (0x94D049BB133111EB - 2**64)
    return numbers ^ _shift_right(numbers, 31)


def _shift_right(numbers: Tensor, bits: int) -> Tensor:
    return (numbers >> bits) & (2 ** (64 - bits) - 1)  # torch's own shift repeats the sign bit
