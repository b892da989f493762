"""A response in spans, sampled and observed in turn: what trains, what is rewarded, what is counted."""

from dataclasses import replace

import pytest
import torch

from lib.algorithms.advantages import GAEAdvantage, GroupAdvantage, gae
from lib.algorithms.shaping import make_token_level_rewards, response_rewards
from lib.algorithms.step_metrics import data_metrics
from lib.dist import SINGLE
from lib.model.batching import make_batch
from lib.rewards.trial import OF_EPISODE
from lib.rollouts.collector import _from_json, _to_json
from lib.tracking.metrics import Metrics
from lib.turns.conversations import of_episodes
from lib.types import Rollout, Sample, Score


def episode(index, spans, *, turn_rewards=(), score=1.0, uid=0):
    """Ids count up, so that every place is known by its id."""
    length = sum(spans)
    sample = Sample(uid=uid, prompt_ids=[7, 8, 9], data_source="test", ground_truth="", extra_info={})
    return Rollout(
        sample=sample, index=index, response_ids=list(range(100, 100 + length)), rollout_log_probs=[-0.5] * length,
        finish_reason="stop", score=Score(score=score), spans=list(spans), turn_rewards=list(turn_rewards),
    )  # fmt: skip


def batch_of(*episodes):
    return make_batch(episodes, SINGLE, mini_batch_size=len(episodes))


def test_what_was_observed_is_no_action():
    batch = batch_of(episode(0, [2, 3, 1]), episode(1, [4]), episode(2, [1, 1, 1, 2]), episode(3, [0, 2, 1]))
    expected = [[1, 1, 0, 0, 0, 1], [1, 1, 1, 1, 0, 0], [1, 0, 1, 0, 0, 0], [0, 0, 1, 0, 0, 0]]
    assert batch.response_mask.int().tolist() == expected
    assert batch.num_sampled.tolist() == [3, 4, 2, 1] and batch.response_lens.tolist() == [6, 4, 5, 3]
    assert batch.input_ids[0].tolist() == [7, 8, 9, 100, 101, 102, 103, 104, 105]
    assert episode(0, [2, 3, 1]).sampled_ids == [100, 101, 105]


def test_turns_are_counted_as_verl_counts_them():
    """The prompt, and each turn of the model and each answer between two: verl's user_turns + assistant_turns + 1."""
    for spans in ([], [4], [2, 3, 1], [0, 2, 1], [1, 1] * 50 + [1]):
        user_turns = assistant_turns = 0
        for place in range(len(spans) or 1):
            assistant_turns, user_turns = assistant_turns + (place % 2 == 0), user_turns + place % 2
        counted = episode(0, spans).num_turns
        assert counted == user_turns + assistant_turns + 1
        metrics = of_episodes([(counted, "stop", {})])
        assert (metrics["num_turns/mean"], metrics["turns/per_episode"]) == (counted, assistant_turns)
    assert OF_EPISODE["num_turns"] == episode(0, []).num_turns == 2  # what the trial tells, of one turn


def test_the_score_stands_on_the_last_sampled_token_and_turns_rewards_on_their_own():
    batch = batch_of(episode(0, [2, 3, 1, 2], turn_rewards=[(1, 0.25), (5, 0.5)]), episode(1, [3], score=2.0))
    assert make_token_level_rewards(batch).tolist() == [[0, 0.25, 0, 0, 0, 1.5, 0, 0], [0, 0, 2, 0, 0, 0, 0, 0]]
    assert response_rewards(batch).tolist() == [1.75, 2.0]
    excluded = batch_of(episode(0, [2, 1], turn_rewards=[(1, 0.25)], score=None), episode(1, [3]))
    assert response_rewards(excluded).tolist() == [0.0, 1.0]  # nothing of a response without a score


def test_a_turns_reward_moves_the_advantage_of_its_group():
    with_rewards = batch_of(episode(0, [2, 1, 1], turn_rewards=[(1, 1.0)]), episode(1, [2, 1, 1]))
    without = batch_of(episode(0, [2, 1, 1]), episode(1, [2, 1, 1]))
    advantage = GroupAdvantage()
    assert advantage(without, SINGLE)[0].eq(0).all()
    better, worse = advantage(with_rewards, SINGLE)[0]
    assert better[0] > 0 > worse[0] and better[2] == 0 == worse[2]


def test_returns_and_values_skip_what_was_observed():
    """GAE of a row with holes is GAE of the row without them."""
    batch = batch_of(episode(0, [2, 3, 2], turn_rewards=[(1, 0.5)]), episode(1, [4], score=0.0))
    values = torch.linspace(-1, 1, batch.response_mask.numel()).view(batch.response_mask.shape)
    rewards = make_token_level_rewards(batch).double()
    found = gae(rewards, values.double(), batch.response_mask, gamma=0.9, lam=0.8)
    kept = batch.response_mask[0]
    compressed = gae(
        rewards[:1, kept], values[:1, kept].double(), torch.ones(1, int(kept.sum()), dtype=torch.bool), gamma=0.9,
        lam=0.8,
    )  # fmt: skip
    assert torch.allclose(found[0, kept], compressed[0]) and found[0, ~kept].eq(0).all()
    advantages, returns = GAEAdvantage()(batch.with_(values=values), SINGLE)
    assert advantages[~batch.response_mask].eq(0).all() and returns[~batch.response_mask].eq(0).all()


def test_lengths_count_what_was_sampled():
    metrics = Metrics(SINGLE)
    data_metrics(batch_of(episode(0, [2, 30, 1]), episode(1, [5])), metrics, max_prompt_len=9)
    found = metrics.reduce()
    assert (found["response_length/mean"], found["response_length/max"]) == (4.0, 5.0)


def test_spans_that_do_not_add_up_and_rewards_of_observations_are_defects():
    with pytest.raises(AssertionError, match="spans of another length"):
        batch_of(replace(episode(0, [2, 1]), spans=[2, 2]))
    with pytest.raises(AssertionError, match="on a token that was observed"):
        batch_of(episode(0, [2, 3, 1], turn_rewards=[(3, 1.0)]))


def test_an_interrupted_episode_survives_a_checkpoint():
    import json

    whole = episode(0, [2, 3, 1], turn_rewards=[(1, 0.5)])

    class Stream:
        def sample(self, uid):
            return whole.sample

    entry = json.loads(json.dumps(_to_json(whole)))
    entry.pop("place")
    again = _from_json(entry, Stream())
    assert again.spans == whole.spans and again.turn_rewards == [[1, 0.5]] and again.is_sampled == whole.is_sampled
    old = {name: value for name, value in entry.items() if name not in ("spans", "turn_rewards")}
    assert _from_json(old, Stream()).spans == []  # of a checkpoint of before
