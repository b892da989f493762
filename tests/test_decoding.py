"""Our short cuts beside vLLM's own schedulers, step by step; tests/decoding_worker.py drives both."""

import json
import subprocess
import sys

import pytest

from tests.ranks import LIMIT_S, ROOT
from tests.tiny import make_model

NUM_SEEDS = 40


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """{case: what came out without and with short cuts}."""
    folder = tmp_path_factory.mktemp("decoding")
    make_model(folder / "model")
    words = [str(folder / "model"), str(folder / "out.json"), str(NUM_SEEDS)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.decoding_worker", *words], cwd=ROOT, capture_output=True, text=True,
        timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((folder / "out.json").read_text())


def test_short_cuts_send_the_same_steps_and_leave_the_same_state_after_each(found):
    assert len(found) == 2 * NUM_SEEDS
    for case, (plain, short) in found.items():
        for name in plain.keys() - {"calls"}:
            assert short[name] == plain[name], (case, name)


def test_what_was_sampled_is_mostly_told_at_a_responses_end(found):
    plain, short = (sum(both[place]["calls"] for both in found.values()) for place in (0, 1))
    assert short < plain / 4  # vLLM tells of every token


def test_the_cases_preempt_stop_and_go_on(found):
    ends = [end for _, short in found.values() for end, _ in short["ends"].values()]
    reasons = [reason for _, short in found.values() for _, reason in short["ends"].values()]
    assert min(ends.count("stop"), ends.count("length"), reasons.count(3), reasons.count(5)) > 10
    for ahead in ("ahead False", "ahead True"):
        cases = [short for case, (_, short) in found.items() if case.endswith(ahead)]
        assert sum(short["preempted"] for short in cases) > 20 and sum(short["aborted"] for short in cases) > 100
