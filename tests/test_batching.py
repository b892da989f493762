"""Batches over ranks: the partitioners by themselves, then the same step on 1, 2 and 3 real processes (gloo)."""

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from typing import get_args

import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.algorithms.advantages import GroupAdvantage
from lib.algorithms.aggregation import LossAggMode, aggregate, loss_denominator
from lib.algorithms.losses import ClipLoss
from lib.dist import SINGLE
from lib.errors import WeightSyncError
from lib.model.batching import (
    assign_ranks,
    balance_stats,
    iter_micro_batches,
    iter_mini_batches,
    make_batch,
    micro_batch_rows,
    pack_by_budget,
    partition_by_cost,
)
from lib.types import Batch, Rollout, Sample, Score
from tests.ranks import save_of_rank

MINI_BATCH_SIZE = 7  # 22 responses: mini-batches of 7, 7, 7 and 1, fewer than there are ranks
BUDGET = 60
UPDATE_EPOCHS = 2

quick = settings(deadline=None, derandomize=True, max_examples=100)


def make_rollout(uid, index, *, prompt_len, response_len, score, with_log_probs=True):
    """A response whose tokens and log-probs all differ from those of any other response."""
    base = 1000 * (100 * uid + index)
    sample = Sample(
        uid=uid, prompt_ids=list(range(base, base + prompt_len)), data_source="", ground_truth=None, extra_info={}
    )
    return Rollout(
        sample=sample,
        index=index,
        response_ids=list(range(base + 500, base + 500 + response_len)),
        rollout_log_probs=[-(base + t) / 2**18 for t in range(response_len)] if with_log_probs else None,
        finish_reason="length" if response_len % 3 == 0 else "stop",
        score=Score(score=score, extras={} if score is None else {"format": index % 2 == 0, "brevity": 1 / (1 + uid)}),
    )


def test_greedy_scores_are_there_unless_a_scored_response_lacks_one():
    def scores(*pairs):
        rollouts = [
            replace(make_rollout(0, i, prompt_len=1, response_len=1, score=score), greedy_score=greedy)
            for i, (score, greedy) in enumerate(pairs)
        ]
        found = make_batch(rollouts, SINGLE, mini_batch_size=max(1, len(rollouts))).greedy_scores
        return None if found is None else found.tolist()

    assert scores((1.0, 0.5), (None, None), (0.0, 0.5)) == [0.5, 0.0, 0.5]
    assert scores((1.0, None), (None, None)) is None
    assert scores((None, None), (None, None)) == [0.0, 0.0]  # every greedy response failed
    assert scores() == []  # every group was dropped
    with pytest.raises(AssertionError, match="a greedy score is missing"):
        scores((1.0, 0.5), (1.0, None))


def all_rollouts():
    """A step of 6 prompts with up to 4 responses: ragged, one empty, one without a score, one group of equal scores."""
    generator = random.Random(0)
    rollouts = []
    for uid, index in product((3, 4, 9, 20, 21, 40), range(4)):
        if (uid, index) not in ((9, 0), (40, 3)):  # one group and the step end early
            score = 0.1 if uid == 9 else (7 * uid + 3 * index) % 10 / 10
            if uid == 21:
                score = (1e16, 1.0, -1e16, 3.0)[index]  # their sum in floating point depends on the order
            if (uid, index) == (4, 1):
                score = None
            response_len = 0 if (uid, index) == (20, 2) else generator.randint(1, 50)
            rollouts.append(make_rollout(uid, index, prompt_len=2 + uid % 5, response_len=response_len, score=score))
    return rollouts


def rollouts_of(rank, size):
    """A rank's share: scattered and unordered; of three ranks the last has none, as a tensor-parallel rank."""
    owners = max(1, size - 1) if size == 3 else size
    mine = [rollout for place, rollout in enumerate(all_rollouts()) if (place * 7 + place // 3) % owners == rank]
    return mine[::-1]


def ragged_batch(total_lens):
    """A batch with rows of the given lengths, for packing alone."""
    rollouts = [
        make_rollout(uid, 0, prompt_len=1, response_len=length - 1, score=0.0) for uid, length in enumerate(total_lens)
    ]
    return make_batch(rollouts, SINGLE, mini_batch_size=max(1, len(rollouts)))


def keys(batch):
    return list(zip(batch.uids.tolist(), batch.indices.tolist(), strict=True))


def fake_log_probs(batch):
    """A stand-in for the policy: differs per token, does not depend on the row's surroundings."""
    responses = batch.input_ids.new_zeros(batch.response_mask.shape)
    for row in range(len(batch)):
        start, length = int(batch.prompt_lens[row]), int(batch.response_lens[row])
        responses[row, :length] = batch.input_ids[row, start : start + length]
    return -(responses % 17).double() / 7 - 0.1


def step_losses(batch, world):
    """This rank's part of the loss of every mini-batch in each mode, and what the iterators yielded on the way."""
    batch = batch.with_(old_log_probs=fake_log_probs(batch) - 0.05)
    batch = batch.with_(advantages=GroupAdvantage()(batch, world)[0])
    losses, yielded = [], []
    for mini_batch in iter_mini_batches(batch, world, update_epochs=UPDATE_EPOCHS):
        micro_batches = list(iter_micro_batches(mini_batch, BUDGET, world))
        yielded.append((keys(mini_batch), [(keys(it), it.total_lens.tolist()) for it in micro_batches]))
        of_mode = {}
        for mode in get_args(LossAggMode):
            denominator = loss_denominator(mini_batch, mode, world, scale=50)
            parts = (aggregate(ClipLoss()(fake_log_probs(it), it)[0], it.response_mask, mode) for it in micro_batches)
            of_mode[mode] = float(sum(parts)) / denominator
        losses.append(of_mode)
    return batch, losses, yielded


def report(world):
    """Everything that the tests compare between ranks and worlds."""
    mine = rollouts_of(world.rank, world.size)
    batch = make_batch(mine, world, mini_batch_size=MINI_BATCH_SIZE, reward_keys=("brevity", "score", "format"))
    batch, losses, yielded = step_losses(batch, world)
    bare = [
        make_rollout(
            uid, world.rank, prompt_len=1, response_len=1, score=1.0, with_log_probs=uid != 0 or world.rank != 0
        )
        for uid in range(2)
    ]
    overflown = [
        replace(it, rollout_log_probs=[math.nan, *it.rollout_log_probs[1:]]) if it.sample.uid == 21 else it
        for it in mine
    ]
    with pytest.raises(WeightSyncError) as not_finite:
        make_batch(overflown, world, mini_batch_size=MINI_BATCH_SIZE)
    uneven = {1: [9], 2: [1, 5], 3: [3, 3, 2]}[world.size][world.rank]
    return {
        "batch": vars(batch),
        "losses": losses,
        "yielded": yielded,
        "balance": balance_stats(batch, world),
        "not_finite": str(not_finite.value),
        "some_lack_log_probs": make_batch(bare, world, mini_batch_size=2).rollout_log_probs,
        "uneven": [(rows.tolist(), vars(it)) for rows, it in micro_batch_rows(ragged_batch([10] * uneven), 10, world)],
    }


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """The reports of all ranks, by the size of the world."""
    folder = tmp_path_factory.mktemp("ranks")
    launched = [
        mp.start_processes(save_of_rank, (report, size, folder), size, join=False, start_method="spawn")
        for size in (2, 3)
    ]
    result = {1: [report(SINGLE)]}
    for size, context in zip((2, 3), launched, strict=True):
        while not context.join():
            pass
        result[size] = [torch.load(f"{folder}/{size}_{rank}.pt", weights_only=False) for rank in range(size)]
    return result


def test_named_rewards_go_with_their_response_and_are_0_without_a_score(reports):
    for of_ranks in reports.values():
        for batch in (report["batch"] for report in of_ranks):
            rows = zip(batch["uids"].tolist(), batch["indices"].tolist(), batch["valid"].tolist(), strict=True)
            expected = [[valid / (1 + uid), 0.0, float(valid and index % 2 == 0)] for uid, index, valid in rows]
            found = batch["named_rewards"].clone()
            assert torch.equal(found[:, 1], batch["scores"])
            found[:, 1] = 0
            torch.testing.assert_close(found, torch.tensor(expected).view(-1, 3))


def test_log_probs_of_the_engine_that_are_no_numbers_end_the_step_on_all_ranks(reports):
    for of_ranks in reports.values():
        texts = {report["not_finite"] for report in of_ranks}
        assert len(texts) == 1 and "the engine gave log-probs that are not finite; " in texts.pop()


# ---- The partitioners ----

costs_and_parts = st.tuples(st.lists(st.integers(1, 10**9), max_size=40), st.integers(1, 9))


@quick
@given(costs_and_parts)
def test_partition_uses_every_item_once_in_k_parts_heaviest_first(costs_and_k):
    costs, k = costs_and_k
    parts = partition_by_cost(costs, k)
    loads = [sum(costs[item] for item in part) for part in parts]
    assert sorted(item for part in parts for item in part) == list(range(len(costs)))
    assert len(parts) == k
    assert loads == sorted(loads, reverse=True)
    assert sum(bool(part) for part in parts) == min(k, len(costs))


@quick
@given(st.lists(st.integers(1, 100), min_size=1, max_size=7), st.integers(1, 3))
def test_partition_is_within_its_proven_bound_of_the_optimum(costs, k):
    heaviest = max(sum(costs[item] for item in part) for part in partition_by_cost(costs, k))
    choices = product(range(k), repeat=len(costs))
    optimum = min(
        max(sum(c for c, h in zip(costs, homes, strict=True) if h == part) for part in range(k)) for homes in choices
    )
    assert heaviest <= (4 / 3 - 1 / (3 * k)) * optimum + 1e-9  # Michiels et al., 2007


def test_partition_of_realistic_lengths_beats_equal_counts_and_on_average_greedy():
    generator = random.Random(0)
    excess, greedy_excess = 0.0, 0.0
    for _ in range(5):
        costs = [min(8000, int(generator.lognormvariate(6.5, 0.8))) for _ in range(64)]
        mean = sum(costs) / 8
        ours = max(sum(costs[item] for item in part) for part in partition_by_cost(costs, 8))
        greedy = [0] * 8
        for cost in sorted(costs, reverse=True):
            greedy[greedy.index(min(greedy))] += cost
        assert ours < 1.02 * mean
        assert ours < max(sum(costs[start : start + 8]) for start in range(0, 64, 8))
        excess += ours / mean - 1
        greedy_excess += max(greedy) / mean - 1
    assert excess < 0.8 * greedy_excess


def test_partition_of_the_textbook_example():
    assert partition_by_cost([8, 7, 6, 5, 4], 2) == [[4, 1, 3], [0, 2]]


@quick
@given(st.lists(st.integers(1, 100), max_size=40), st.integers(100, 400))
def test_packing_uses_every_item_once_within_the_budget_and_few_bins(lens, budget):
    bins = pack_by_budget(lens, budget)
    assert sorted(item for items in bins for item in items) == list(range(len(lens)))
    assert all(0 < sum(lens[item] for item in items) <= budget for items in bins)
    loads = sorted(sum(lens[item] for item in items) for items in bins)
    assert len(bins) < 2 or loads[0] + loads[1] > budget  # no two bins could have been one


def test_a_row_longer_than_the_budget_is_our_bug():
    with pytest.raises(AssertionError, match="11 tokens"):
        pack_by_budget([3, 11], 10)


@quick
@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 20), st.integers(1, 5))
def test_every_rank_gets_rows_of_every_mini_batch_that_is_large_enough(costs, mini_batch_size, num_ranks):
    ranks = assign_ranks(costs, mini_batch_size=mini_batch_size, num_ranks=num_ranks)
    for start in range(0, len(costs), mini_batch_size):
        of_mini_batch = ranks[start : start + mini_batch_size]
        assert len(set(of_mini_batch)) == min(num_ranks, len(of_mini_batch))


def test_the_longest_rows_of_successive_mini_batches_go_to_different_ranks():
    ranks = assign_ranks([9, 1, 9, 1, 9, 1], mini_batch_size=2, num_ranks=2)
    assert Counter(ranks[::2]) == {0: 2, 1: 1} or Counter(ranks[::2]) == {0: 1, 1: 2}


@quick
@given(st.lists(st.integers(2, 60), min_size=1, max_size=30))
def test_micro_batches_hold_every_row_once_within_the_budget(total_lens):
    batch = ragged_batch(total_lens)
    seen = []
    for rows, micro_batch in micro_batch_rows(batch, 60, SINGLE):
        assert int(micro_batch.total_lens.sum()) <= 60
        assert keys(micro_batch) == [keys(batch)[row] for row in sorted(rows.tolist())]
        seen += rows.tolist()
    assert sorted(seen) == list(range(len(total_lens)))


def test_micro_batches_are_balanced_in_tokens():
    lens = [it.total_lens.tolist() for it in iter_micro_batches(ragged_batch([50, 10, 10, 10, 10, 10]), 60, SINGLE)]
    assert sorted(map(sorted, lens)) == [[10, 10, 10, 10, 10], [50]]  # first fit alone gives 60 and 40


def test_balancing_never_breaks_the_budget():
    lens = [it.total_lens.tolist() for it in iter_micro_batches(ragged_batch([5, 4, 5, 2, 4]), 10, SINGLE)]
    assert sorted(map(sorted, lens)) == [[2, 4, 4], [5, 5]]  # the balancer's two parts would be 9 and 11 tokens


# ---- The same step on 1, 2 and 3 ranks ----


def rows_of(report):
    """A rank's rows as plain numbers, by (uid, index)."""
    batch = Batch(**report["batch"])
    result = {}
    for row, key in enumerate(keys(batch)):
        prompt_len, response_len = int(batch.prompt_lens[row]), int(batch.response_lens[row])
        result[key] = {
            "prompt_ids": batch.input_ids[row, :prompt_len].tolist(),
            "response_ids": batch.input_ids[row, prompt_len : prompt_len + response_len].tolist(),
            "padding": batch.input_ids[row, prompt_len + response_len :].unique().tolist(),
            "rollout_log_probs": batch.rollout_log_probs[row, :response_len].tolist(),
            "mask": batch.response_mask[row].tolist(),
            "others": tuple(
                tensor[row].item() for tensor in (batch.mini_batch_ids, batch.truncated, batch.valid, batch.scores)
            ),
            "advantages": batch.advantages[row, :response_len].tolist(),
        }
    return result


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_response_arrives_exactly_once_and_exactly_as_it_was(reports, size):
    arrived = [rows_of(of_rank) for of_rank in reports[size]]
    expected = sorted(all_rollouts(), key=lambda it: (it.sample.uid, it.index))
    assert sorted(key for rows in arrived for key in rows) == [(it.sample.uid, it.index) for it in expected]
    for place, rollout in enumerate(expected):
        (row,) = [
            rows[rollout.sample.uid, rollout.index] for rows in arrived if (rollout.sample.uid, rollout.index) in rows
        ]
        score = rollout.score.score
        length = len(rollout.response_ids)
        assert row["prompt_ids"] == rollout.sample.prompt_ids
        assert row["response_ids"] == rollout.response_ids
        assert row["padding"] in ([], [0])
        assert row["rollout_log_probs"] == torch.tensor(rollout.rollout_log_probs).tolist()
        assert row["mask"] == [step < length and score is not None for step in range(len(row["mask"]))]
        others = (place // MINI_BATCH_SIZE, rollout.finish_reason == "length", score is not None, score or 0.0)
        assert row["others"] == pytest.approx(others)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_of_a_rank_are_sorted_by_mini_batch_uid_and_index_and_tightly_padded(reports, size):
    for of_rank in reports[size]:
        batch = Batch(**of_rank["batch"])
        order = list(zip(batch.mini_batch_ids.tolist(), *zip(*keys(batch), strict=True), strict=True))
        assert order == sorted(order)
        assert batch.input_ids.shape == (len(batch), int(batch.total_lens.max()))
        assert batch.response_mask.shape == (len(batch), int(batch.response_lens.max()))


@pytest.mark.parametrize("size", [2, 3])
def test_advantages_are_the_same_to_the_bit_on_any_number_of_ranks(reports, size):
    alone = rows_of(reports[1][0])
    assert any(a != 0 for row in alone.values() for a in row["advantages"])
    for of_rank in reports[size]:
        for key, row in rows_of(of_rank).items():
            assert row["advantages"] == alone[key]["advantages"]


@pytest.mark.parametrize("size", [2, 3])
def test_mini_batches_have_the_same_members_on_any_number_of_ranks(reports, size):
    assert len(reports[1][0]["yielded"]) == 4 * UPDATE_EPOCHS
    for place, (alone, _) in enumerate(reports[1][0]["yielded"]):
        together = [key for of_rank in reports[size] for key in of_rank["yielded"][place][0]]
        assert sorted(together) == alone
        assert len(alone) == (7, 7, 7, 1)[place % 4]
        assert alone == reports[1][0]["yielded"][place % 4][0]  # the same in every epoch


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_have_equally_many_micro_batches_within_the_budget(reports, size):
    for of_ranks in zip(*(of_rank["yielded"] for of_rank in reports[size]), strict=True):
        assert len({len(micro_batches) for _, micro_batches in of_ranks}) == 1
        for mini_batch, micro_batches in of_ranks:
            assert sorted(key for it, _ in micro_batches for key in it if key != (-1, 0)) == mini_batch
            assert all(sum(lens) <= BUDGET for _, lens in micro_batches)


@pytest.mark.parametrize("size", [2, 3])
def test_the_loss_summed_over_ranks_and_micro_batches_is_that_of_one_rank(reports, size):
    for place, alone in enumerate(reports[1][0]["losses"]):
        for mode, expected in alone.items():
            total = math.fsum(of_rank["losses"][place][mode] for of_rank in reports[size])
            assert total == pytest.approx(expected, rel=1e-6)
            assert expected != 0


@pytest.mark.parametrize(("size", "counts"), [(2, [1, 5]), (3, [3, 3, 2])])
def test_ranks_with_fewer_rows_add_fully_masked_micro_batches(reports, size, counts):
    for of_rank, count in zip(reports[size], counts, strict=True):
        assert len(of_rank["uneven"]) == max(counts)
        assert sorted(row for rows, _ in of_rank["uneven"] for row in rows) == list(range(count))
        for rows, tensors in of_rank["uneven"][count:]:
            added = Batch(**tensors)
            assert rows == []
            assert (added.prompt_lens.tolist(), added.response_lens.tolist()) == ([1], [1])
            assert added.input_ids.tolist() == [[0, 0]]
            assert added.response_mask.tolist() == [[False]]
            assert added.rollout_log_probs.tolist() == [[0]]
            assert added.old_log_probs is None


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rollout_log_probs_are_all_or_none(reports, size):
    assert all(of_rank["some_lack_log_probs"] is None for of_rank in reports[size])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_balance_statistics_match_a_loop_over_the_rollouts(reports, size):
    lens = [len(it.sample.prompt_ids) + len(it.response_ids) for it in all_rollouts()]  # in order of uid and index
    cuts = {1: [0, 22], 2: [0, 11, 22], 3: [0, 7, 14, 22]}[size]
    before = [sum(lens[a:b]) for a, b in pairwise(cuts)]
    after = [int(Batch(**of_rank["batch"]).total_lens.sum()) for of_rank in reports[size]]
    for of_rank in reports[size]:
        assert of_rank["balance"] == {
            "global_seqlen/min": min(before),
            "global_seqlen/max": max(before),
            "global_seqlen/minmax_diff": max(before) - min(before),
            "global_seqlen/mean": sum(lens) / size,
            "global_seqlen/balanced_min": min(after),
            "global_seqlen/balanced_max": max(after),
        }
    assert max(after) - min(after) <= max(before) - min(before)


def test_a_step_without_responses_gives_an_empty_batch_and_no_mini_batch():
    batch = make_batch([], SINGLE, mini_batch_size=4)
    assert len(batch) == 0
    assert list(iter_mini_batches(batch, SINGLE, update_epochs=3)) == []


def test_a_response_given_twice_or_with_an_undefined_score_is_our_bug():
    rollout = make_rollout(0, 0, prompt_len=1, response_len=1, score=1.0)
    with pytest.raises(AssertionError, match="twice"):
        make_batch([rollout, rollout], SINGLE, mini_batch_size=2)
    with pytest.raises(AssertionError, match="score nan"):
        make_batch([make_rollout(0, 0, prompt_len=1, response_len=1, score=math.nan)], SINGLE, mini_batch_size=2)
