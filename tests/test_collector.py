"""What a Collector decides without an engine: who goes on with which responses after a restart, which groups train."""

import json
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from lib.algorithms.group_filter import GroupFilterConfig
from lib.data.prompt_stream import PromptStream
from lib.dist import SINGLE, World
from lib.engine.rollout_config import RolloutConfig
from lib.rewards.scoring import RewardConfig
from lib.rollouts.collector import Collector
from lib.tracking.metrics import Metrics
from lib.types import Score
from tests.checkpoint_worker import make_prompts, respond

LAYOUTS = ((1, 1), (2, 1), (2, 2), (4, 2), (3, 1), (4, 1))
"""Ranks, and ranks of a replica."""
PROMPTS = PromptStream(make_prompts(), seed=0)


def collectors(num_ranks, tp_size, *, mask_truncated=False):
    """A collector of every rank."""
    return [
        Collector(
            None, None, PROMPTS, None, rollout=RolloutConfig(tensor_model_parallel_size=tp_size), reward=RewardConfig(),
            filter_groups=GroupFilterConfig(enable=True), prompts_per_step=4, mini_batch_size=8, with_greedy=False,
            mask_truncated=mask_truncated, run=None, stopper=None,
            world=World(rank=rank, size=num_ranks, device=torch.device("cpu")),
        )
        for rank in range(num_ranks)
    ]  # fmt: skip


def in_the_middle(num_ranks, tp_size):
    """Collectors whose step left whole groups, and groups of 3 of which none, one or two responses have ended."""
    found = collectors(num_ranks, tp_size)
    for uid in range(40):
        first = 7 * uid // 3 % (num_ranks // tp_size) * tp_size  # of a replica's ranks
        group, num_ended = [respond(PROMPTS.sample(uid), index) for index in range(3)], uid % 4
        if num_ended == 3:
            found[first].carried.append([replace(r, num_stale=len(r.response_ids), greedy_score=0.1) for r in group])
            continue
        if num_ended:
            found[first].open_groups[uid] = group[:num_ended]
        unfinished = [replace(r, finish_reason="unfinished", score=None, num_continued=1) for r in group[num_ended:]]
        for collector in found[first : first + tp_size]:
            collector.unfinished += unfinished
    for collector in found:
        collector._share_kept = 0.3
    return found


def place(rollout):
    return rollout.sample.uid, rollout.index


def held(found, tp_size):
    """All that the ranks hold together, in order, after a look at who holds it."""
    leaders = found[::tp_size]
    for collector in found:
        leader = leaders[collector.world.rank // tp_size]
        assert collector.unfinished == leader.unfinished and (collector is leader or not collector.open_groups)
    uids = [{r.sample.uid for r in leader.unfinished} for leader in leaders]
    assert sum(map(len, uids)) == len(set().union(*uids)), "two replicas go on with the same group"
    for leader in leaders:
        assert leader.open_groups.keys() <= {r.sample.uid for r in leader.unfinished}, "a group is torn"
        assert all(r.sample.uid == uid for uid, group in leader.open_groups.items() for r in group)
    unfinished = [r for leader in leaders for r in leader.unfinished]
    opened = [r for leader in leaders for group in leader.open_groups.values() for r in group]
    carried = [group for collector in found for group in collector.carried]
    return sorted(unfinished, key=place), sorted(opened, key=place), sorted(carried, key=lambda group: place(group[0]))


@pytest.mark.parametrize(("before", "after"), list(product(LAYOUTS, LAYOUTS)))
def test_any_number_of_ranks_goes_on_with_every_response_once_and_with_whole_groups(before, after):
    old, new = in_the_middle(*before), collectors(*after)
    states = json.loads(json.dumps([collector.state() for collector in old]))
    for collector in new:
        collector.restore(states)
    assert held(new, after[1]) == held(old, before[1]) and all(held(old, before[1]))
    assert {collector._share_kept for collector in new} == {0.3}
    if before == after:
        assert [collector.unfinished for collector in new] == [collector.unfinished for collector in old]
        assert [collector.open_groups for collector in new] == [collector.open_groups for collector in old]


@pytest.mark.parametrize(
    ("scores", "error", "told"),
    [
        ((None, None), None, "the reward function returned None 2 times"),
        ((None, None), "no level", "2 rewards or environments failed"),
        ((None, 0.0), None, None),
    ],
)
def test_a_step_without_any_score_is_told(scores, error, told):
    [collector] = collectors(1, 1)
    collector.reward = replace(collector.reward, max_error_rate=1.0)
    group = [
        replace(respond(PROMPTS.sample(0), i), score=Score(score=score, error=error)) for i, score in enumerate(scores)
    ]
    said = []
    collector.filter_groups, collector.run = GroupFilterConfig(), SimpleNamespace(say=said.append)
    collector.sampler = SimpleNamespace(metrics=lambda rollouts: {})
    collector.scorer = SimpleNamespace(num_outgrown=0, num_failed_calls=0, call_error=None)
    collector._sample = lambda num_prompts, metrics, label: [group]
    collector.collect(Metrics(SINGLE), label="step 1/2")
    line = f"step 1/2: warning: no response has a score, so nothing is learned; {told}"
    assert len(said) == (told is not None) and all(it.startswith(line) for it in said)


@pytest.mark.parametrize(
    ("responses", "masked", "otherwise"),
    [
        (((1, "length"), (0, "stop"), (0, "stop")), "all_wrong", "kept"),
        (((1, "stop"), (1, "stop"), (0, "length")), "all_right", "kept"),
        (((1, "stop"), (0, "length"), (0, "length")), "failed", "kept"),
        (((1, "stop"), (0, "stop"), (0, "length")), "kept", "kept"),
    ],
)
def test_a_response_cut_off_at_the_limit_is_no_signal_where_it_does_not_train(responses, masked, otherwise):
    group = [
        replace(respond(PROMPTS.sample(0), index), score=Score(score=score), finish_reason=reason)
        for index, (score, reason) in enumerate(responses)
    ]
    for mask_truncated, expected in ((True, masked), (False, otherwise)):
        [collector] = collectors(1, 1, mask_truncated=mask_truncated)
        assert collector._judge(group) == expected
