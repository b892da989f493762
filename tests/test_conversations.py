"""Episodes of several turns in a real engine: ids are appended to, times of answers change nothing else."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from lib.engine.conversations import _Turns
from tests.conversations_worker import LATENCIES, MAX_LEN, OBSERVED, PER_PROMPT, STOP_IDS, TURNS, UNFINISHED
from tests.prefork import prefork
from tests.tiny import make_model

LAYOUTS = {"1 rank": (1, 1), "tensor parallel 2": (2, 2)}


@pytest.fixture(scope="module", params=LAYOUTS)
def found(request, tmp_path_factory):
    """What each rank found."""
    num_ranks, tp_size = LAYOUTS[request.param]
    folder = tmp_path_factory.mktemp("conversations")
    model, out = make_model(folder / "model"), folder / "found"
    done = prefork(num_ranks, "-m", "tests.conversations_worker", str(model), str(out), str(tp_size), vllm=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    ranks = [torch.load(f"{out}.{rank}") for rank in range(num_ranks)]
    assert all(rank == ranks[0] for rank in ranks)  # all ranks of a replica see the same
    return ranks[0]


def test_ids_are_only_appended_to_and_spans_say_who_wrote_them(found):
    episodes = found["step none"]
    assert len(episodes) == 6 * PER_PROMPT
    several = [spans for _, _, spans, _, _, _ in episodes.values() if len(spans) > 1]
    assert len(several) > 6
    for ids, log_probs, spans, finish_reason, rewards, _ in episodes.values():
        assert sum(spans) == len(ids) == len(log_probs) <= MAX_LEN and len(spans) % 2 == 1
        assert set(spans[1::2]) <= {OBSERVED} and len(spans) <= 2 * TURNS - 1
        ends, place = [], 0
        for number, length in enumerate(spans):
            place += length
            if number % 2:
                assert log_probs[place - length : place] == [0.0] * OBSERVED
            else:
                ends.append(place - 1)
                assert all(value < 0 for value in log_probs[place - length : place])
        assert (finish_reason == "stop") == (len(spans) == 2 * TURNS - 1 and ids[-1] in STOP_IDS)
        assert all(ids[end] in STOP_IDS for end in ends[:-1])  # a turn's end was sampled
        answered = ends if finish_reason == "stop" else [end for end, _ in rewards]
        assert rewards == [(end, float(turn)) for turn, end in enumerate(answered)] and set(answered) <= set(ends)


@pytest.mark.parametrize("join", ["step", "round"])
def test_times_of_answers_change_not_a_bit(found, join):
    assert all(found[f"{join} {name}"] == found[f"{join} none"] for name in LATENCIES)


def test_answers_on_arrival_change_no_ids_and_log_probs_by_rounding_alone(found):
    for name in LATENCIES:
        for key, (ids, log_probs, *rest, _) in found[f"arrival {name}"].items():
            expected_ids, expected, *others, _ = found["step none"][key]
            assert (ids, *rest) == (expected_ids, *others)
            assert torch.allclose(torch.tensor(log_probs), torch.tensor(expected), rtol=0, atol=2e-5)


def test_a_turn_that_is_cut_off_ends_its_episode(found):
    reasons = {(finish_reason, len(spans) > 1) for _, _, spans, finish_reason, _, _ in found["short turns"].values()}
    assert ("length", False) in reasons
    for ids, _, spans, finish_reason, _, _ in found["short turns"].values():
        assert max(spans[::2]) <= 3 and (finish_reason == "length" or ids[-1] in STOP_IDS)


def test_an_episode_of_one_turn_is_what_generate_samples(found):
    for key, (ids, log_probs, spans, finish_reason, _, _) in found["one turn"].items():
        expected = found["generate"][key]
        assert ids == expected[0] and spans == [len(ids)] and finish_reason == expected[3]
        assert torch.allclose(torch.tensor(log_probs), torch.tensor(expected[1]), rtol=0, atol=2e-5)


def test_an_interrupted_episode_goes_on_with_what_it_has(found):
    rounds, whole = found["partly"], found["step none"]
    reasons = {reason for episodes in rounds for _, _, _, reason, _, _ in episodes.values()}
    assert {"unfinished", "waiting", "stop"} <= reasons and len(rounds) > 2
    for before, after in pairwise(rounds):
        for key, (ids, log_probs, spans, finish_reason, rewards, _) in before.items():
            assert (key in after) == (finish_reason in UNFINISHED)
            if key in after:
                assert after[key][0][: len(ids)] == ids and after[key][1][: len(ids)] == log_probs
                assert after[key][4][: len(rewards)] == rewards and sum(spans) == len(ids)
    for key in whole:
        ids, log_probs, spans, finish_reason, rewards, _ = next(it[key] for it in reversed(rounds) if key in it)
        assert sum(spans) == len(ids) == len(log_probs) <= MAX_LEN and set(spans[1::2]) <= {OBSERVED}
        assert (finish_reason == "stop") == (len(spans) == 2 * TURNS - 1 and ids[-1] in STOP_IDS)
        assert len(rewards) in (len(spans) // 2, len(spans) // 2 + 1)
    uninterrupted = {key for key, episode in rounds[0].items() if episode[3] in ("stop", "length")}
    assert uninterrupted and all(rounds[0][key][0] == whole[key][0] for key in uninterrupted)


def test_a_stop_drops_what_waits_and_the_engine_goes_on(found):
    assert "while episodes were going on" in found["stopped"]
    assert {key: value[0] for key, value in found["after"].items()} == {
        key: value[0] for key, value in found["generate"].items()
    }


@pytest.mark.parametrize(
    ("running", "waiting", "steps"), [(15, 1, 15), (100, 1, 16), (8, 8, 8), (1, 15, 1), (1, 100, 1), (0, 4, 1)]
)
def test_the_more_episodes_wait_the_sooner_their_answers_are_looked_for(running, waiting, steps):
    looks = []

    class Silent:
        def take(self, *, wait_s):
            looks.append(wait_s)
            return []

    replica = SimpleNamespace(is_leader=True, of_leader=list)
    turns = _Turns(replica, None, Silent(), max_turn_len=None, stream="train")
    turns.running, turns.waiting = dict.fromkeys(range(running)), dict.fromkeys(range(waiting))
    for number in range(1, 3 * steps + 1):
        turns.collect("arrival")
        assert len(looks) == number // steps
    assert {bool(it) for it in looks} == {not running}  # with nothing else to do it waits for one
