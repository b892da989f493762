"""From rollouts to this rank's batch, its mini-batches (one optimizer step each) and micro-batches (one forward each).

Mini-batches are fixed first, over all ranks, by uid and index; sequences then move between ranks only inside their
mini-batch, so that all ranks compute about as long. Micro-batches only split a rank's share of a mini-batch to fit
memory. So neither the number of ranks nor the token budget changes a gradient. Nothing here shuffles.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lib.dist import World
from lib.errors import WeightSyncError
from lib.types import Batch, Rollout

LINEAR_COST = 24576  # a token costs as much as attention over this many: 12 x hidden size, for a hidden size of 2,048


class _Row(NamedTuple):
    """What every rank knows of every response of the step: enough to plan who trains on it. Sorts by uid and index."""

    uid: int
    index: int
    source: int
    """The rank that has it."""
    place: int
    """Where in that rank's list of rollouts."""
    prompt_len: int
    response_len: int
    truncated: bool
    score: float | None
    has_log_probs: bool
    named_rewards: tuple[float, ...]
    greedy_score: float | None
    num_stale: int
    spans: tuple[int, ...]
    turn_rewards: tuple[tuple[int, float], ...]

    @property
    def total_len(self) -> int:
        return self.prompt_len + self.response_len


def make_batch(
    rollouts: Sequence[Rollout], world: World, *, mini_batch_size: int, reward_keys: Sequence[str] = ()
) -> Batch:
    """This rank's share of the step, on the CPU, sorted by uid and index; mini_batch_ids say which step uses a row.

    `rollouts` are the scored ones that this rank has (none on the ranks that only lend a replica their GPU);
    mini_batch_size counts the responses of all ranks (any number where no rank has one); reward_keys are the
    advantage's. Executed by all ranks together: lengths are gathered, every rank makes the same plan, and token ids and
    log-probs go straight to the rank that trains on them. Raises WeightSyncError where the engine's log-probs are no
    finite numbers.
    """
    gathered = world.gather([_describe(it, world.rank, place, reward_keys) for place, it in enumerate(rollouts)])
    rows = sorted(row for of_rank in gathered for row in of_rank)
    assert len({(row.uid, row.index) for row in rows}) == len(rows), "a response occurs twice"
    costs = [row.total_len * (LINEAR_COST + row.total_len) for row in rows]
    ranks = assign_ranks(costs, mini_batch_size=max(1, mini_batch_size), num_ranks=world.size)

    # through numpy: torch.tensor() takes three times as long for a list
    ids = [torch.from_numpy(np.array(it.sample.prompt_ids + it.response_ids, dtype=np.int64)) for it in rollouts]
    input_ids = _move(ids, rows, ranks, size_of=lambda row: row.total_len, dtype=torch.int64, world=world)
    log_probs = None
    if all(row.has_log_probs for row in rows):
        reported = [torch.from_numpy(np.array(it.rollout_log_probs, dtype=np.float32)) for it in rollouts]
        moved = _move(reported, rows, ranks, size_of=lambda row: row.response_len, dtype=torch.float32, world=world)
        log_probs = _pad(moved, torch.float32)  # (B, T)
        world.agree(lambda: _check_finite(log_probs))

    mine = [(place // mini_batch_size, row) for place, row in enumerate(rows) if ranks[place] == world.rank]
    response_lens = torch.tensor([row.response_len for _, row in mine], dtype=torch.int64)  # (B,)
    valid = torch.tensor([row.score is not None for _, row in mine], dtype=torch.bool)  # (B,)
    is_sampled = _pad([_is_sampled(row.spans) for _, row in mine], torch.bool)  # (B, T)
    named_rewards = torch.tensor([row.named_rewards for _, row in mine], dtype=torch.float32)
    return Batch(
        uids=torch.tensor([row.uid for _, row in mine], dtype=torch.int64),
        indices=torch.tensor([row.index for _, row in mine], dtype=torch.int64),
        mini_batch_ids=torch.tensor([mini_batch_id for mini_batch_id, _ in mine], dtype=torch.int64),
        input_ids=_pad(input_ids, torch.int64),
        prompt_lens=torch.tensor([row.prompt_len for _, row in mine], dtype=torch.int64),
        response_lens=response_lens,
        sampled_lens=is_sampled.sum(-1),
        response_mask=is_sampled & valid[:, None],
        turn_rewards=_turn_rewards([row for _, row in mine], rows, is_sampled),
        num_stale=torch.tensor([row.num_stale for _, row in mine], dtype=torch.int64),
        truncated=torch.tensor([row.truncated for _, row in mine], dtype=torch.bool),
        valid=valid,
        scores=torch.tensor([0.0 if row.score is None else row.score for _, row in mine], dtype=torch.float32),
        named_rewards=named_rewards.view(len(mine), len(reward_keys)) if reward_keys else None,
        greedy_scores=_greedy_scores([row for _, row in mine], rows),
        rollout_log_probs=log_probs,
    )


def iter_mini_batches(batch: Batch, world: World, *, update_epochs: int) -> Iterator[Batch]:
    """This rank's rows of each mini-batch in turn, `update_epochs` times over, in the same order.

    Every rank yields equally often, without rows where it holds none. Executed by all ranks together.
    """
    last = int(batch.mini_batch_ids.max()) if len(batch) else -1
    num_mini_batches = int(world.max(torch.tensor(last))) + 1
    for _ in range(update_epochs):
        for mini_batch_id in range(num_mini_batches):
            yield batch.rows((batch.mini_batch_ids == mini_batch_id).nonzero().flatten())


def iter_micro_batches(mini_batch: Batch, max_tokens_per_gpu: int, world: World) -> Iterator[Batch]:
    """Micro-batches of at most max_tokens_per_gpu tokens, prompts and responses together, equally many on all ranks.

    A rank with fewer rows than micro-batches adds ones with a single, fully masked row: it takes part in the
    collectives of forward and backward and adds exactly nothing. Executed by all ranks together.
    """
    for _, micro_batch in micro_batch_rows(mini_batch, max_tokens_per_gpu, world):
        yield micro_batch


def micro_batch_rows(batch: Batch, max_tokens_per_gpu: int, world: World) -> Iterator[tuple[Tensor, Batch]]:
    """`iter_micro_batches`, with the place in `batch` of every row: (b,) int64, empty for an added micro-batch."""
    lens = batch.total_lens.tolist()
    bins = pack_by_budget(lens, max_tokens_per_gpu)
    num_bins = int(world.max(torch.tensor(len(bins))))
    balanced = partition_by_cost(lens, min(num_bins, len(lens)))
    if all(sum(lens[place] for place in places) <= max_tokens_per_gpu for places in balanced):
        bins = balanced  # the same number of passes, with a lower peak of memory
    for places in bins:
        rows = torch.tensor(sorted(places), dtype=torch.int64)  # (b,)
        yield rows, batch.rows(rows)
    for _ in range(num_bins - len(bins)):
        yield torch.empty(0, dtype=torch.int64), _masked_row(batch)


def balance_stats(batch: Batch, world: World) -> dict[str, float]:
    """global_seqlen/*: tokens per rank, had the step been cut into contiguous equal parts, and as it was balanced.

    min, max, minmax_diff and mean are of the equal parts, in order of uid and index; balanced_min and balanced_max of
    the ranks' actual shares. Executed by all ranks together.
    """
    columns = (batch.uids.tolist(), batch.indices.tolist(), batch.total_lens.tolist())
    gathered = world.gather(list(zip(*columns, strict=True)))
    lens = [length for _, _, length in sorted(row for of_rank in gathered for row in of_rank)]
    borders = [len(lens) * rank // world.size for rank in range(world.size + 1)]
    before = [sum(lens[start:end]) for start, end in pairwise(borders)]
    after = [sum(length for _, _, length in of_rank) for of_rank in gathered]
    return {
        "global_seqlen/min": min(before),
        "global_seqlen/max": max(before),
        "global_seqlen/minmax_diff": max(before) - min(before),
        "global_seqlen/mean": sum(before) / world.size,
        "global_seqlen/balanced_min": min(after),
        "global_seqlen/balanced_max": max(after),
    }


def assign_ranks(costs: Sequence[int], *, mini_batch_size: int, num_ranks: int) -> list[int]:
    """The rank of each response: about equal costs on all ranks in every mini-batch, and so over the step."""
    ranks = [0] * len(costs)
    loads = [0] * num_ranks
    for start in range(0, len(costs), mini_batch_size):
        parts = partition_by_cost(costs[start : start + mini_batch_size], num_ranks)
        lightest_first = sorted(range(num_ranks), key=lambda rank: loads[rank])
        for rank, part in zip(lightest_first, parts, strict=True):  # parts come heaviest first
            for place in part:
                ranks[start + place] = rank
                loads[rank] += costs[start + place]
    return ranks


def partition_by_cost(costs: Sequence[int], k: int) -> list[list[int]]:
    """The items 0 to n - 1 in k parts of about equal cost, heaviest part first; none is empty if n >= k and costs > 0.

    Largest differencing method (Karmarkar and Karp, 1982), for k parts: always merges the two partial solutions whose
    parts differ most, heaviest part of one with lightest of the other. Costs [8, 7, 6, 5, 4], k=2: [[4, 1, 3], [0, 2]]
    """
    empty = (0, [])
    # (minus the largest difference, the smallest item, parts as (cost, items) from heavy to light); items break ties
    solutions = [(-cost, item, [(cost, [item]), *[empty] * (k - 1)]) for item, cost in enumerate(costs)]
    heapq.heapify(solutions)
    while len(solutions) > 1:
        _, item_a, parts_a = heapq.heappop(solutions)
        _, item_b, parts_b = heapq.heappop(solutions)
        pairs = zip(parts_a, reversed(parts_b), strict=True)
        merged = [(cost_a + cost_b, items_a + items_b) for (cost_a, items_a), (cost_b, items_b) in pairs]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(solutions, (merged[-1][0] - merged[0][0], min(item_a, item_b), merged))
    return [items for _, items in solutions[0][2]] if solutions else [[] for _ in range(k)]


def pack_by_budget(lens: Sequence[int], budget: int) -> list[list[int]]:
    """The items 0 to n - 1 in few bins, none longer than the budget: longest item first, into the first bin with room.

    Never more than 11/9 of the fewest possible bins, plus one (first fit decreasing; Johnson, 1973).
    """
    assert max(lens, default=0) <= budget, f"a sequence of {max(lens)} tokens exceeds the budget of {budget}"
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(lens)), key=lambda item: -lens[item]):
        place = next((place for place, left in enumerate(room) if lens[item] <= left), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(budget)
        bins[place].append(item)
        room[place] -= lens[item]
    return bins


def _describe(rollout: Rollout, rank: int, place: int, reward_keys: Sequence[str]) -> _Row:
    score, log_probs = rollout.score, rollout.rollout_log_probs
    assert score is not None, "rollouts are scored before they are batched"
    assert score.score is None or math.isfinite(score.score), f"score {score.score}"
    assert log_probs is None or len(log_probs) == len(rollout.response_ids), "one log-prob per response token"
    assert not rollout.spans or sum(rollout.spans) == len(rollout.response_ids), "spans of another length"
    numbers = score.extras | {"score": score.score}
    return _Row(
        uid=rollout.sample.uid,
        index=rollout.index,
        source=rank,
        place=place,
        prompt_len=len(rollout.sample.prompt_ids),
        response_len=len(rollout.response_ids),
        truncated=rollout.is_truncated,
        score=score.score,
        named_rewards=tuple(0.0 if score.score is None else float(numbers[key]) for key in reward_keys),
        has_log_probs=log_probs is not None,
        greedy_score=rollout.greedy_score,
        num_stale=rollout.num_stale,
        spans=tuple(rollout.spans) or (len(rollout.response_ids),),
        turn_rewards=tuple((place, float(reward)) for place, reward in rollout.turn_rewards),
    )


def _move(
    payloads: Sequence[Tensor],
    rows: Sequence[_Row],
    ranks: Sequence[int],
    *,
    size_of: Callable[[_Row], int],
    dtype: torch.dtype,
    world: World,
) -> list[Tensor]:
    """The payloads of the rows assigned to this rank, in the order of `rows`, fetched from the ranks that have them.

    payloads are this rank's own, by place. Executed by all ranks together.
    """
    moves = list(zip(rows, ranks, strict=True))
    if world.size == 1:
        return [payloads[row.place] for row, _ in moves]
    outgoing = [[row for row, to in moves if to == peer and row.source == world.rank] for peer in range(world.size)]
    incoming = [[row for row, to in moves if to == world.rank and row.source == peer] for peer in range(world.size)]
    sizes_out = [sum(map(size_of, of_peer)) for of_peer in outgoing]
    sizes_in = [sum(map(size_of, of_peer)) for of_peer in incoming]
    sent = torch.cat([torch.empty(0, dtype=dtype), *(payloads[row.place] for peer in outgoing for row in peer)])
    received = torch.empty(sum(sizes_in), dtype=dtype)
    torch_dist.all_to_all_single(received, sent, sizes_in, sizes_out)  # gloo: these tensors are on the CPU
    arrived = [row for of_peer in incoming for row in of_peer]
    pieces = dict(zip(arrived, received.split([size_of(row) for row in arrived]), strict=True))
    return [pieces[row] for row, to in moves if to == world.rank]


def _check_finite(log_probs: Tensor) -> None:
    nonfinite = int((~log_probs.isfinite()).sum())
    if nonfinite:
        raise WeightSyncError(
            f"the engine gave log-probs that are not finite; {nonfinite} sampled tokens; expected finite ones; it "
            "computes NaN or infinity: try --model.dtype float32, and look for overflow in the model's weights"
        )


def _greedy_scores(mine: Sequence[_Row], everywhere: Sequence[_Row]) -> Tensor | None:
    """(B,) the scores of the prompts' greedy responses, 0 where a row has no score; None if scored rows lack them."""
    if any(row.greedy_score is None and row.score is not None for row in everywhere):
        assert all(row.greedy_score is None for row in everywhere), "a greedy score is missing"
        return None
    return torch.tensor([row.greedy_score or 0.0 for row in mine], dtype=torch.float32)


def _is_sampled(spans: Sequence[int]) -> Tensor:
    """(T,) bool, whether the policy chose the token, of lengths sampled and observed in turn."""
    kinds = torch.arange(len(spans)) % 2 == 0
    return kinds.repeat_interleave(torch.tensor(spans, dtype=torch.int64))


def _turn_rewards(mine: Sequence[_Row], everywhere: Sequence[_Row], is_sampled: Tensor) -> Tensor | None:
    """(B, T) float32; None if no row of any rank has one."""
    if not any(row.turn_rewards for row in everywhere):
        return None
    rewards = torch.zeros(is_sampled.shape)
    for place, row in enumerate(mine):
        for position, reward in row.turn_rewards:
            assert is_sampled[place, position], "a turn's reward stands on a token that was observed"
            rewards[place, position] += reward
    return rewards


def _pad(pieces: list[Tensor], dtype: torch.dtype) -> Tensor:
    return pad_sequence(pieces, batch_first=True) if pieces else torch.zeros(0, 0, dtype=dtype)


def _masked_row(batch: Batch) -> Batch:
    """One row of a prompt token and a response token that no policy chose, with the tensors that `batch` has."""
    width = {"input_ids": 2}
    blank = {
        name: None if tensor is None else tensor.new_zeros(1 if tensor.dim() == 1 else (1, width.get(name, 1)))
        for name, tensor in vars(batch).items()
    }
    one = batch.prompt_lens.new_ones(1)
    return Batch(**blank).with_(uids=-one, prompt_lens=one, response_lens=one)
