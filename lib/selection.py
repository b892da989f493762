"""Which tokens of a mini-batch a loss treats apart: chosen over all ranks, by what no split of the rows can change.

A choice ranks tokens by a priority and breaks ties by a hash of the token's place in the stream. Ranks meet twice: to
add up three sums, and to compare the best few candidates of each.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from lib.dist import World
from lib.types import Batch

UNITS = 2**20


class Candidate(NamedTuple):
    """A token that may be chosen. Sorts by priority, then at random; the rest tells it from all other tokens."""

    priority: float
    """Lowest first."""
    hash: int
    uid: int
    index: int
    position: int


def token_sums(batch: Batch) -> Tensor:
    """(3,) int64: number of this rank's response tokens, sums of their advantages and old log-probs in units of 2^-20.

    Integers, because their sum does not depend on the order of addition, and so not on the ranks.
    """
    assert batch.old_log_probs is not None and batch.advantages is not None, "computed before the update"
    mask = batch.response_mask
    columns = (batch.advantages[mask], batch.old_log_probs[mask])
    return torch.stack([mask.sum(), *((column.double() * UNITS).round().long().sum() for column in columns)])


def covariances(batch: Batch, sums: Tensor) -> Tensor:
    """(A - mean A) x (log p_old - mean log p_old) per token, (B, T) float64, anything outside response_mask.

    `sums` are the `token_sums` of all ranks, added. Its mean over a batch is what drives the change of entropy
    (arXiv:2505.22617).
    """
    assert batch.old_log_probs is not None and batch.advantages is not None, "computed before the update"
    mean_advantage, mean_log_prob = sums[1:].double() / (sums[0].clamp(min=1) * UNITS)
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
    k = max(1, int(ratio * int(sums[0])))
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
