"""The curriculum against a slow, obvious draw from a list of tickets; resumed at any step; whatever the ranks hold."""

import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.algorithms.advantages import ReMaxAdvantage
from lib.algorithms.group_filter import GroupFilterConfig, judge
from lib.data.curriculum import POOLS, WEIGHTS, Curriculum
from lib.data.prompt_stream import PromptStream
from lib.data.prompts import DataConfig
from lib.engine.rollout_config import RolloutConfig
from lib.errors import DamagedCheckpoint, UserError
from tests.checkpoint_worker import NUM_PROMPTS, make_prompts, respond
from tests.test_collector import collectors
from train_grpo import GRPOConfig

VERDICTS = ("kept", "all_right", "all_wrong", "out_of_band", "failed")
POOL_OF = {"kept": "mixed", "all_right": "all_right", "all_wrong": "all_wrong"}


def with_pools(pools, *, seed=0):
    curriculum = Curriculum(len(pools), seed=seed)
    curriculum.restore("".join(str(POOLS.index(pool)) for pool in pools))
    return curriculum


def slow_draw(pools, seed, uid, count, had):
    """The same from a list with a ticket for every unit of weight, made anew for every draw; `had` grows."""
    numbers = np.random.PCG64([seed, uid, 1]).random_raw(count).tolist()
    places = []
    for number in numbers:
        if len(had) == len(pools):
            had.clear()
        tickets = []
        for pool in ("unseen", "mixed", "all_right", "all_wrong"):
            for place in range(len(pools)):
                if pools[place] == pool and place not in had:
                    tickets += [place] * {"unseen": 4, "mixed": 8, "all_right": 1, "all_wrong": 1}[pool]
        places.append(tickets[number % len(tickets)])
        had.add(places[-1])
    return places


@settings(max_examples=60)
@given(
    pools=st.lists(st.sampled_from(POOLS), min_size=1, max_size=30),
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    seed=st.integers(0, 2**63 - 1),
    uid=st.integers(0, 2**40),
)
def test_draws_are_those_of_an_obvious_list_of_tickets(pools, counts, seed, uid):
    curriculum, had = with_pools(pools, seed=seed), set()
    for count in counts:
        drawn = curriculum.draw(uid, count)
        assert drawn == slow_draw(pools, seed, uid, count, had)
        uid += count
    of_pools = {name: value for name, value in curriculum.record([]).items() if "drawn" in name}
    assert sum(of_pools.values()) == sum(counts)


def test_a_prompt_comes_as_often_as_its_weight_says_and_once_a_step():
    pools = [POOLS[place % 4] for place in range(24)]
    curriculum, total = with_pools(pools), 6 * sum(WEIGHTS.values())
    counts = Counter()
    for step in range(8000):
        counts.update(curriculum.draw(step, 1))
        curriculum.record([])
    for place, pool in enumerate(pools):
        share = WEIGHTS[pool] / total
        assert abs(counts[place] - 8000 * share) < 5 * math.sqrt(8000 * share), (place, pool)
    first, second = curriculum.draw(7, 10), curriculum.draw(17, 14)
    assert sorted(first + second) == list(range(24))


def test_a_verdict_puts_a_prompt_into_its_pool_and_the_latest_counts_whoever_tells_it():
    verdicts = [(uid, uid * 7 % 10, VERDICTS[(uid + uid // 10) % 5]) for uid in range(3, 40)]
    pools = ["unseen"] * 10
    for _, place, verdict in verdicts:
        pools[place] = POOL_OF.get(verdict, pools[place])
    for order in (verdicts, verdicts[::-1], verdicts[1::2] + verdicts[::2]):
        curriculum = Curriculum(10, seed=0)
        metrics = curriculum.record(order)
        assert curriculum.state() == with_pools(pools).state()
        assert {pool: metrics[f"curriculum/{pool}"] for pool in POOLS} == {p: pools.count(p) for p in POOLS}
    assert {*POOL_OF.values()} <= {*pools}


# ---- Steps of a policy ----


def run_step(stream, step):
    """Draws in two rounds, and verdicts that depend on the prompt and the step."""
    samples = stream.next(4) + stream.next(3)
    verdicts = [(s.uid, s.place, VERDICTS[(s.place * 3 + step // 2) % 5]) for s in samples]
    return samples, stream.curriculum.record(verdicts)


@pytest.mark.parametrize("seed", [0, 2**62 + 1])
def test_a_stream_restored_at_any_step_goes_on_to_the_bit(seed):
    def new():
        return PromptStream(make_prompts(), seed=seed, curriculum=True)

    whole, states, expected = new(), [], []
    for step in range(12):
        states.append(json.loads(json.dumps(whole.state())))
        expected.append(run_step(whole, step))
    assert [s.uid for samples, _ in expected for s in samples] == list(range(84))
    for start, state in enumerate(states):
        stream = new()
        stream.next(start)  # a used stream restores as well as a new one
        stream.restore(state)
        assert [run_step(stream, step) for step in range(start, 12)] == expected[start:]
        assert stream.state() == whole.state()
    assert len({tuple(s.place for s in samples) for samples, _ in expected}) > 8


def test_pools_of_another_form_are_refused_and_a_branch_without_any_begins_unseen():
    stream = PromptStream(make_prompts(), seed=0, curriculum=True)
    run_step(stream, 0)
    state = stream.state()
    for wrong in ("01", "0123456789", "ab" * 5):
        with pytest.raises(
            DamagedCheckpoint, match=r"; trainer\.json; found .*, expected a digit .* each of 10 prompts"
        ):
            PromptStream(make_prompts(), seed=0, curriculum=True).restore(state | {"curriculum": wrong})
    for has_pools, wants_them in ((False, True), (True, False)):
        other = PromptStream(make_prompts(), seed=0, curriculum=wants_them)
        other.restore({name: value for name, value in state.items() if has_pools or name != "curriculum"})
        assert other.num_drawn == 7 and other.state().get("curriculum") == ("0" * 10 if wants_them else None)


def test_left_over_responses_come_back_with_their_prompts():
    stream = PromptStream(make_prompts(), seed=0, curriculum=True)
    [old], [new] = collectors(1, 1), collectors(1, 1)
    old.prompts = stream
    groups = [[respond(sample, index) for index in range(3)] for sample in stream.next(NUM_PROMPTS - 1)]
    old.carried, old.open_groups = groups[:3], {group[0].sample.uid: group[:1] for group in groups[3:6]}
    old.unfinished = [replace(r, finish_reason="unfinished", score=None) for group in groups[3:9] for r in group[1:]]
    state, collector = json.loads(json.dumps((stream.state(), old.state())))
    new.prompts = PromptStream(make_prompts(), seed=0, curriculum=True)
    new.prompts.restore(state)
    new.restore([collector])
    assert (new.carried, new.open_groups, new.unfinished) == (old.carried, old.open_groups, old.unfinished)
    assert [r.sample.place for r in new.unfinished] != [r.sample.uid for r in new.unfinished]
    assert all(len(r.sample.prompt_ids) == 1 + r.sample.place for r in new.unfinished)


def mixed_share(curriculum, rates, *, steps, count, n=4):
    """Share of mixed groups among those that a policy with these rates of success draws."""
    stream, verdicts = PromptStream(rates, seed=3, curriculum=curriculum), []
    answers = np.random.Generator(np.random.PCG64(5))
    for _ in range(steps):
        samples = stream.next(count)
        told = [
            (s.uid, s.place, judge((answers.random(n) < s.ground_truth).astype(float).tolist(), GroupFilterConfig()))
            for s in samples
        ]
        if curriculum:
            stream.curriculum.record(told)
        verdicts += [verdict for _, _, verdict in told]
    return verdicts.count("kept") / len(verdicts)


def test_more_of_what_is_drawn_is_mixed_than_in_epochs():
    """Rates of success of 0, 1 and 1/2, a third of the prompts each: of the last, 7 of 8 groups of 4 are mixed."""
    prompts = make_prompts(answers=[0.0, 1.0, 0.5] * 40)
    uniform, drawn = (mixed_share(curriculum, prompts, steps=30, count=16) for curriculum in (False, True))
    assert uniform == pytest.approx(7 / 24, abs=0.04) and drawn > 1.7 * uniform


# ---- What does not fit ----


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (lambda: DataConfig(curriculum=True, shuffle=False), "--data.curriculum True and --data.shuffle False"),
        (lambda: GRPOConfig(data=DataConfig(curriculum=True), rollout=RolloutConfig(n=1), advantage=ReMaxAdvantage()),
         "--rollout.n 1 is too small for a curriculum"),
        (lambda: GRPOConfig(data=DataConfig(curriculum=True), filter_groups=GroupFilterConfig(enable=True, high=0.9)),
         "--filter-groups.high 0.9"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_named(words, told):
    with pytest.raises(UserError, match=r".+; .+; .+; .+") as refused:
        words()
    assert told in str(refused.value)
