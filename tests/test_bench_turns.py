"""The benchmark of conversations on a tiny model under torchrun, and its simulation against schedules by hand."""

import json
import math

import pytest

from recipes.bench_turns import WORKLOADS, simulated_seconds
from tests.ranks import torchrun

TINY = WORKLOADS["tiny"]
ROWS = (
    "single", "l0_arrival threads", "l0_arrival loop", "l0_step instant", "l1_arrival threads", "l1_arrival loop",
    "l1_round threads", "l1_serial threads", "l2_arrival threads", "l2_arrival loop",
)  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the run printed, and its figures."""
    out = tmp_path_factory.mktemp("bench") / "figures.json"
    rows = dict.fromkeys(row.partition(" ")[0] for row in ROWS)
    done = torchrun(1, "-m", "recipes.bench_turns", "--workload", "tiny", "--rows", *rows, "--out", str(out))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout, json.loads(out.read_text())


def test_every_row_has_all_tokens_and_the_file_is_what_was_printed(found):
    printed, figures = found
    assert json.loads(printed.strip().splitlines()[-1]) == figures
    assert set(figures["rows"]) == set(ROWS)
    episodes = TINY.prompts * TINY.n
    for name, row in figures["rows"].items():
        assert row["step_s"] + row["waited_s"] < row["wall_s"], name
        if not name.startswith("l2"):
            assert (row["tokens"], row["excluded"]) == (episodes * TINY.turns * TINY.turn_len, 0), name
        if name != "single" and not name.startswith("l2"):  # 128 tokens a block on a CPU: whole ones alone are found
            befores = [
                TINY.prompt_len + turn * (TINY.turn_len + TINY.observed_len) + TINY.turn_len for turn in range(3)
            ]
            assert row["earlier_tokens"] == episodes * sum(befores)
            assert row["cached_tokens"] == episodes * sum(before // 128 * 128 for before in befores)


def test_bars_follow_from_the_rows(found):
    _, figures = found
    rows, bars = figures["rows"], figures["bars"]
    single, l0, l1, l2 = (rows[name] for name in ("single", *(f"l{level}_arrival loop" for level in range(3))))
    assert bars["L0 loop: tokens/s against single-turn"] == pytest.approx(single["wall_s"] / l0["wall_s"])
    assert bars["L1 loop: wall against simulated"] == pytest.approx(l1["wall_s"] / figures["simulated_s"])
    assert bars["L2 loop: seconds beyond L1"] == pytest.approx(l2["wall_s"] - l1["wall_s"])
    assert (
        l2["wall_s"] > TINY.timeout_s and l2["excluded"] == 1 and bars["L2 loop: excluded beyond those that hang"] == 0
    )
    assert rows["l1_serial threads"]["waited_s"] > rows["l1_round threads"]["waited_s"]


def test_the_simulation_is_the_schedule_by_hand():
    def step_s(size: int) -> float:
        return 1.0 + size

    assert simulated_seconds([[]], 5, step_s) == 5 * 2.0
    assert simulated_seconds([[7.0]], 5, step_s) == 10.0 + 7.0 + 10.0
    # Two of 2 tokens to 6.0; the first goes on at once to 10.0; the second's answer is there in its step.
    assert simulated_seconds([[0.0], [3.0]], 2, step_s) == 6.0 + 2 * 2.0 + 2 * 2.0
    assert simulated_seconds([[0.0], [1.5]], 2, step_s) == 6.0 + 2.0 + 3.0 + 2.0
    assert math.isclose(simulated_seconds([[0.0]] * 4, 3, lambda size: 0.1), 0.6)
