"""Claims about what the terminal shows while a run goes on: rows of steps, phases that last, tables, the start-up."""

import gc
import itertools
import math
import os
import pty
import re
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lib.dist import SINGLE
from lib.tracking import progress, terminal
from lib.tracking.console import choose_different, format_table, in_words, sample_lines
from lib.tracking.progress import Phase, duration
from lib.tracking.run_folder import open_log
from lib.tracking.startup import StartupTimer
from lib.tracking.step_table import COLUMNS, StepTable
from lib.tracking.terminal import Terminal

ROW = {
    "critic/score/mean": 0.41251, "actor/pg_loss": 0.01234, "actor/grad_norm": 0.84321, "response_length/mean": 11.24,
    "response_length/clip_ratio": 0.03, "reward/constant_group_ratio": 0.25, "timing_s/step": 3.149,
    "timing_s/gen": 1.9, "timing_s/update_actor": 0.6, "timing_s/update_critic": 0.2, "perf/total_num_tokens": 7812.0,
    "actor/entropy": 0.3, "training/rollout_log_probs_diff/mean": 1.2e-7, "perf/cpu_memory_used_gb": 5.0,
}  # fmt: skip


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


# ---- The rows of steps ----


def test_a_row_has_what_is_known_in_its_columns_and_a_dash_for_what_is_not(clock):
    table = StepTable(60)
    clock[0] += 37
    *_, header, row, details = table.lines({"step": 12, **ROW}).splitlines()
    assert header.split() == ["step", *COLUMNS]
    assert row.split() == ["12/60", "0.413", "11.2", "3%", "25%", "0.84", "3.1", "1.9", "0.8", "2,481", "37s", "2m31s"]
    assert details.strip() == "entropy 0.3 | mismatch 1.2e-07 | memory 5.0 GiB"
    ends = [[found.end() for found in re.finditer(r"\S+", line)] for line in (header, row)]
    assert ends[0][1:] == ends[1][1:]  # right-aligned below one another
    assert table.lines({"step": 13, "critic/score/mean": math.nan}).split() == ["13/60", *["-"] * 9, "37s", "0s"]


def test_the_time_that_is_left_follows_from_the_last_ten_steps_with_all_that_came_between(clock):
    table = StepTable(100)
    left = []
    for step in range(1, 21):
        clock[0] += 60 if step <= 10 else 30
        left.append(table.lines({"step": step, **ROW}).splitlines())
    cells = [next(line for line in lines if "/100 " in line).split() for lines in left]
    assert cells[0][-1] == "5m12s"  # of one step its own seconds are known
    assert cells[9][-2:] == ["10m00s", "1h30m"] and cells[19][-2:] == ["15m00s", "40m00s"]


def test_the_header_and_the_second_line_come_every_ten_steps_and_the_header_after_other_lines(clock):
    table = StepTable(40)
    with_header, with_details = [], []
    for step in range(1, 32):
        if step == 15:
            table.interrupted()
        text = table.lines({"step": step, **ROW})
        with_header += [step] * ("elapsed" in text)
        with_details += [step] * ("entropy" in text)
        assert ("a row per step" in text) == (step == 1)
    assert with_header == [1, 11, 15, 21, 31] and with_details == [1, 10, 20, 30]


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_no_line_of_a_step_is_longer_than_80_columns(scale, clock):
    table = StepTable(9999)
    clock[0] += 99 * 86400
    size = {"critic/score/mean": -scale, "response_length/mean": 131072, "actor/grad_norm": scale / 3}
    large = {**ROW, **size, "response_length/clip_ratio": 1, "reward/constant_group_ratio": 1, "timing_s/step": 7200.5}
    large |= {"perf/total_num_tokens": 7e9, "timing_s/gen": 3600.5, "timing_s/update_actor": 3600.5}
    large |= {"critic/vf_loss": 0.123, "critic/vf_explained_var": -0.5, "actor/kl_loss": 1.23e-5}
    lines = table.lines({"step": 9990, **large}).splitlines()
    assert max(map(len, lines)) <= 80, lines
    assert "critic explains -0.50" in lines[-1] + lines[-2] and "KL 1.23e-05" in lines[-1] + lines[-2]


def test_durations_have_two_units():
    expected = {0: "0s", 59.6: "1m00s", 160: "2m40s", 3599: "59m59s", 11100: "3h05m", 187200: "2d04h"}
    assert {seconds: duration(seconds) for seconds in expected} == expected


# ---- What lasts ----


def test_a_phase_says_that_it_goes_on_after_30_s_of_silence_then_after_1_2_5_and_5_minutes(clock):
    phase, said_at, lines = Phase("sampling", 40, None), clock[0], []
    for _ in range(25 * 60):
        clock[0] += 1
        if phase.is_due(clock[0], said_at=said_at):
            said_at = clock[0]
            lines.append(clock[0] - 1000)
    assert lines == list(itertools.accumulate((30, 60, 120, 300, 300, 300, 300)))


def test_the_words_of_a_phase_are_how_much_is_done_or_what_its_log_got_last(tmp_path, clock):
    counted = Phase("step 3/60: sampling", 32, None)
    counted.advance()
    counted.advance(7)
    clock[0] += 41
    assert counted.line(clock[0], width=100) == "  step 3/60: sampling 8/32, 41s"
    assert counted.bar(clock[0], width=100) == "  step 3/60: sampling 8/32, 41s [#####...............]"
    assert len(counted.bar(clock[0], width=40)) == 40
    log = tmp_path / "log"
    log.write_text("INFO 11-24 03:00:00 [loader.py:12] of an earlier phase\n")
    uncounted = Phase("start: build the engine", 0, log)
    assert uncounted.line(clock[0], width=100) == "  start: build the engine, 0s"
    log.write_text(f"{log.read_text()}INFO 11-24 03:00:09 [runner.py:7] Capturing 40%\rCapturing 50%\n\n")
    assert uncounted.line(clock[0], width=100) == "  start: build the engine, 0s: Capturing 50%"
    with open(log, "a") as file:
        file.write("(Worker pid=1) INFO 11-24 03:00:09 [runner.py:7] Warming up\n  start: build the engine, 30s\n")
    assert uncounted.line(clock[0], width=100) == "  start: build the engine, 0s: Warming up"


def read_until(file: int, pattern: str) -> str:
    """What comes out of a terminal, up to and with what the pattern matches, or some more."""
    found = ""
    while not re.search(pattern, found):
        found += os.read(file, 4096).decode()
    return found


@contextmanager
def screen() -> Iterator[tuple[Terminal, int]]:
    """A Terminal of 80 columns, and the descriptor to read from what it shows."""
    main, other = pty.openpty()
    termios.tcsetwinsize(other, (24, 80))
    saved = os.dup(1)
    os.dup2(other, 1)
    shown = Terminal(SINGLE, None)
    os.dup2(saved, 1)
    yield shown, main
    for descriptor in (main, other, saved):
        os.close(descriptor)


def test_a_terminal_shows_a_bar_of_the_inner_phase_that_moves_without_the_main_thread_and_is_cleared(monkeypatch):
    monkeypatch.setattr(terminal, "BAR_S", 0.01)
    with screen() as (shown, file):
        assert shown.width == 80
        with shown.progress("outer"), shown.progress("inner", 4) as advance:
            read_until(file, r"inner 0/4, \d+s \[\.{20}\]")
            advance()
            read_until(file, r"inner 1/4, \d+s \[#####\.{15}\]")
            shown.say("a line between")
            rest = read_until(file, r"\r\x1b\[Ka line between") + read_until(file, r"(?s)(inner 1/4.*){9}")
            assert "outer" not in rest
        shown.say("the end")
        assert read_until(file, "the end").rstrip().endswith("\r\x1b[K\r\x1b[Kthe end")
        with pytest.raises(KeyError), shown.progress("of an error", 2):
            read_until(file, "of an error 0/2")
            raise KeyError
        shown.say("after it")
        assert read_until(file, "after it").rstrip().endswith("\r\x1b[Kafter it")


def test_a_file_gets_a_line_of_what_lasts_and_its_log_too(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(progress, "SILENCE_S", 0.05)
    monkeypatch.setattr(terminal, "LOOK_S", 0.01)
    log = open_log(tmp_path / "log")
    shown = Terminal(SINGLE, log)
    with shown.progress("long", 3) as advance:
        advance()
        while "long" not in (tmp_path / "log").read_text():
            time.sleep(0.01)
    shown.restore()
    lines = capfd.readouterr().out.splitlines()
    assert re.fullmatch(r"  long 1/3, \d+s", lines[0])


# ---- Samples and words ----


def test_samples_are_of_different_prompts_and_of_all_sources_in_turn():
    rows = [("a", 1), ("a", 1), ("a", 2), ("a", 3), ("b", 4), ("c", 5), ("c", 6)]
    assert choose_different(rows, 4, source_and_prompt=lambda row: row) == [("a", 1), ("b", 4), ("c", 5), ("a", 2)]
    assert choose_different(rows[:2], 4, source_and_prompt=lambda row: row) == [("a", 1)]


@pytest.mark.parametrize("width", [40, 80, 160])
def test_a_sample_takes_two_lines_that_fit(width):
    row = {"data_source": "maths", "prompt": "a\nlong " * 40, "response": "b\n" * 90, "ground_truth": 7, "score": 1.0}
    first, second = sample_lines({**row, "finish_reason": "stop"}, width=width).splitlines()
    assert first.startswith("  maths | a long a") and second.endswith("(score 1.0, expected 7, stop)")
    assert len(first) <= width and len(second) <= max(width, 7 + 20 + 36)


def test_a_validation_is_not_compared_with_itself():
    assert in_words("val", [(60, 0.5)]) == "val: 0.500 (step 60, the only validation)"
    assert in_words("val", [(0, 0.25), (60, 0.5)]) == "val: 0.250 (step 0) -> 0.500 (step 60)"


def test_tables_are_aligned():
    assert format_table(("name", "s"), [("a", "10.0"), ("longer", "2.5")]) == (
        "  name       s\n  ------  ----\n  a       10.0\n  longer   2.5"
    )


def age_s() -> float | None:
    """Seconds since this process started, as `ps` knows them; None where there is no `ps`."""
    done = subprocess.run("ps -o etimes= -p $PPID", shell=True, capture_output=True, text=True)
    return float(done.stdout) if done.returncode == 0 else None


def test_start_up_phases_add_up_to_the_time_since_the_launch():
    earlier = age_s()
    timer = StartupTimer()
    later = age_s()
    with timer.phase("load"):
        assert not gc.isenabled()
    *rows, last = timer.table().splitlines()
    assert gc.isenabled()
    seconds = {row.split("  ")[1]: float(row.split()[-1]) for row in rows[2:]}
    assert list(seconds) == ["launch and imports", "load", "other"]
    assert last.startswith("  launch -> first step: ") and last.endswith(" s")
    assert sum(seconds.values()) == pytest.approx(float(last.split()[-2]), abs=0.2)
    if earlier is not None and later is not None:
        assert earlier - 1 <= seconds["launch and imports"] <= later + 2  # they are rounded down to seconds


def test_what_a_run_is_fits_a_terminal_and_stays_whole_in_a_file(tmp_path):
    long = (
        "mini-batch   about 128 responses a rank in 1 micro-batch(es) of at most 8192 tokens (a response: at most 44)"
    )
    path = "warning: " + "x" * 120 + " is a long word"
    with screen() as (shown, _):
        lines = shown.fitted(f"{long}\nshort\n{path}").split("\n")
        assert lines[0].startswith("mini-batch   about 128") and lines[1].startswith(" " * 13 + "tokens")
        assert max(map(len, lines[:3])) <= 80 and "short" in lines
        assert " ".join(" ".join(lines).split()) == " ".join(f"{long} short {path}".split())  # not a word is lost
    with open(tmp_path / "file", "w") as file:
        shown = Terminal(SINGLE, None)
        shown.console = file
        assert shown.fitted(long) == long
