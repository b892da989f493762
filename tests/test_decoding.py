"""Our short cuts beside vLLM's own schedulers, step by step; tests/decoding_worker.py drives both."""

import json
import subprocess
import sys

import pytest

from tests.ranks import LIMIT_S, ROOT
from tests.tiny import make_model


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """{case: what came out without and with short cuts}."""
    folder = tmp_path_factory.mktemp("decoding")
    make_model(folder / "model")
    command = [sys.executable, "-m", "tests.decoding_worker", str(folder / "model"), str(folder / "out.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((folder / "out.json").read_text())


def test_short_cuts_send_the_same_steps_and_end_in_the_same_state(found):
    assert len(found) == 24
    for case, (plain, short) in found.items():
        for name in plain.keys() - {"calls"}:
            assert short[name] == plain[name], (case, name)


def test_what_was_sampled_is_told_at_a_responses_end_or_when_asked(found):
    for case, (plain, short) in found.items():
        assert len(plain["tokens"]) > 25 and max(map(len, plain["tokens"].values())) > 50, case
        # A first token, the rest with the last one, and what goes on or was preempted in between.
        most = 2 * len(short["tokens"]) + len(short["states"]) + 12 * (1 + short["preempted"])
        assert short["calls"] <= most < plain["calls"], case


def test_the_cases_preempt_stop_and_go_on(found):
    ended = [short["ends"] for _, short in found.values()]
    assert {end for ends in ended for end, _ in ends.values()} == {"stop", "length"}
    assert {reason for ends in ended for _, reason in ends.values()} >= {3, 5, None}
    for ahead in ("ahead False", "ahead True"):
        assert any(short["preempted"] > 5 for case, (_, short) in found.items() if case.startswith(ahead))
        assert any(len(short["states"]) > 5 for case, (_, short) in found.items() if case.startswith(ahead))
