"""Reward workers that hang, die, lie or cannot start: the others and the trainer go on."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from lib.rewards.scoring import RewardConfig, Scorer
from lib.types import Score
from lib.workers import process
from tests.test_scoring import ROOT, make_rollout, score_all, write

HARMFUL = """
import ctypes, os, signal, sys, time

HOME = os.getcwd()

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "loop":
        while True:
            pass
    if solution_str == "swallow":
        while True:
            try:
                time.sleep(60)
            except BaseException:
                pass
    if solution_str == "ignore signals":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        while True:
            time.sleep(1)
    if solution_str == "exit":
        sys.exit(3)
    if solution_str == "_exit":
        os._exit(4)
    if solution_str == "segfault":
        ctypes.string_at(0)
    if solution_str == "close":
        os.closerange(0, 100)
    if solution_str == "fork":
        if os.fork() == 0:
            return 5.0
        time.sleep(0.5)
    if solution_str == "cwd":
        folder = ground_truth + "/gone"
        os.mkdir(folder)
        os.chdir(folder)
        os.rmdir(folder)
        return 1.0
    if solution_str == "flood":
        for _ in range(200):
            print("x" * 100_000)
            print("y" * 100_000, file=sys.stderr)
            os.write(1, b"z" * 100_000)
    if solution_str == "read":
        assert sys.stdin.read() == ""
    if solution_str == "raise":
        return int("seven")
    if solution_str == "recurse":
        return compute_score(data_source, solution_str, ground_truth, extra_info)
    return float(os.getcwd() == HOME)
"""


def test_every_harmful_response_gets_its_error_and_the_others_their_score(tmp_path):
    expected = {
        "loop": "timed out after 5 s",
        "swallow": "timed out after 5 s",
        "ignore signals": "timed out after 5 s",
        "exit": "SystemExit: 3 [reward.py:",
        "_exit": "the reward worker exited with code 4",
        "segfault": "the reward worker was killed by SIGSEGV",
        "close": "the reward worker exited with code 1",
        "raise": "ValueError: invalid literal for int() with base 10: 'seven' [reward.py:",
        "recurse": "RecursionError: maximum recursion depth exceeded",
    }
    texts = [text for harmful in [*expected, "fork", "cwd", "flood", "read"] for text in ("good", harmful, "good")]
    cfg = RewardConfig(path=write(tmp_path, HARMFUL), num_workers=2, timeout_s=5.0)
    log = tmp_path / "rewards.log"
    scores = score_all(cfg, texts, truth=str(tmp_path), log_path=log)
    for text, score in zip(texts, scores, strict=True):
        if text in expected:
            assert score.score is None and score.error.startswith(expected[text]), (text, score)
        else:
            assert score == Score(score=1.0), text
    assert 0 < log.stat().st_size < 32 * 1024**2  # a flood is cut, and it hurt nobody


def test_five_hung_responses_do_not_block_the_others(tmp_path):
    """While 5 of 6 workers hang, the sixth scores everything else; `collect` cannot return before the hung ones."""
    body = """
    import os, time
    while solution_str == "hang":
        time.sleep(1)
    with open(ground_truth, "a") as file:
        file.write("done\\n")
    return 1
    """
    done = tmp_path / "done"
    cfg = RewardConfig(path=write(tmp_path, body), num_workers=6, timeout_s=600.0)
    scorer = Scorer(cfg, {"mine"})
    for i in range(45):
        scorer.submit(make_rollout(i, truth=str(done)), "hang" if i < 5 else "good")
    wait_for(lambda: done.exists() and done.read_text().count("done") == 40)  # long before the limit
    scorer.close()
    with pytest.raises(RuntimeError, match="before all responses had a score"):
        scorer.collect()


OFFSPRING = """
import os, subprocess, sys, time

SLEEP = ["sleep", "600"]

def compute_score(data_source, solution_str, ground_truth, extra_info):
    child, leader = subprocess.Popen(SLEEP), subprocess.Popen(SLEEP, start_new_session=True)
    code = "import os, sys; os.fork() and os._exit(0); os.setsid(); print(os.getpid(), file=open(sys.argv[1], 'w'), "
    code += "flush=True); os.execvp('sleep', ['sleep', '600'])"
    subprocess.run([sys.executable, "-c", code, ground_truth + "/orphan"])
    while not (os.path.exists(ground_truth + "/orphan") and open(ground_truth + "/orphan").read()):
        time.sleep(0.01)
    with open(ground_truth + "/pids", "w") as file:
        print(os.getpid(), child.pid, leader.pid, open(ground_truth + "/orphan").read(), file=file)
    if solution_str == "hang":
        time.sleep(600)
    if solution_str == "crash":
        os.abort()
    return 1
"""
"""Starts a child, one in a session of its own, and one in a session of its own whose parent has ended."""


@pytest.mark.parametrize("how", ["hang", "crash", "close"])
def test_all_that_a_worker_started_ends_with_it(tmp_path, how):
    cfg = RewardConfig(path=write(tmp_path, OFFSPRING), num_workers=1, timeout_s=5.0 if how == "hang" else 60.0)
    [score] = score_all(cfg, [how], truth=str(tmp_path))
    error = {"hang": "timed out after 5 s", "crash": "the reward worker was killed by SIGABRT", "close": None}[how]
    assert score.error == error
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 4
    for pid in pids:
        wait_for(partial(has_ended, int(pid)))


def has_ended(pid: int) -> bool:
    """Whether the process is gone, or a zombie that nobody reaps."""
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for(condition: Callable[[], bool]) -> None:
    """Returns when the condition holds. 500 s stand for "never": what hangs here does so for longer."""
    end = time.monotonic() + 500
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_workers_and_what_they_started_die_with_a_trainer_that_is_killed(tmp_path):
    pids = tmp_path / "pids"
    trainer = f"""
import time
from tests.test_scoring import RewardConfig, Scorer, make_rollout
scorer = Scorer(RewardConfig(path={write(tmp_path, OFFSPRING)!r}, num_workers=2, timeout_s=600.0), {{"mine"}})
scorer.submit(make_rollout(truth={str(tmp_path)!r}), "hang")
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", trainer], cwd=ROOT)
    wait_for(lambda: pids.exists() and pids.read_text().endswith("\n"))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    for pid in pids.read_text().split():
        wait_for(partial(has_ended, int(pid)))


LEAK = """
held = []
def compute_score(data_source, solution_str, ground_truth, extra_info):
    held.append(b"x" * int(solution_str) * 2**20)
    return {"score": len(held)}
"""


def score_with_leak(folder: Path, mib: list[int], **options) -> tuple[list[float], int]:
    """The scores of responses that leak so many MiB each, which count since their worker's start; workers replaced."""
    cfg = RewardConfig(path=write(folder, LEAK), num_workers=1, **options)
    with closing(Scorer(cfg, {"mine"})) as scorer:
        for i, size in enumerate(mib):
            scorer.submit(make_rollout(i), str(size))
        return [rollout.score.score for rollout in scorer.collect()], scorer.num_outgrown


def test_a_worker_that_leaks_is_replaced_and_no_score_is_lost(tmp_path):
    scores, num_replaced = score_with_leak(tmp_path, [50] * 7, max_memory_gib=0.13)
    assert scores == [1, 2, 3, 1, 2, 3, 1] and num_replaced == 2
    assert score_with_leak(tmp_path, [50] * 7) == ([1, 2, 3, 4, 5, 6, 7], 0)


def test_without_a_limit_a_worker_is_replaced_beyond_8_gib_and_ten_times_its_first_memory(tmp_path, monkeypatch):
    assert (process.GROWN_GIB, process.GROWN_TIMES) == (8, 10)
    monkeypatch.setattr(process, "GROWN_GIB", 0.13)
    assert score_with_leak(tmp_path, [150, 0, 0]) == ([1, 2, 3], 0)  # what the first response loads is no leak
    scores, num_replaced = score_with_leak(tmp_path, [0] + [100] * 5)
    assert scores[:3] == [1, 2, 3] and num_replaced == 1 and sorted(scores) != [1, 2, 3, 4, 5, 6]


def test_function_cannot_change_the_trainers_data_or_the_next_response(tmp_path):
    body = """
    ground_truth.append(1)
    extra_info.clear()
    return len(ground_truth)
    """
    truth = ["a"]
    scores = score_all(RewardConfig(path=write(tmp_path, body), num_workers=1), ["x"] * 3, truth=truth)
    assert [score.score for score in scores] == [2.0, 2.0, 2.0] and truth == ["a"]


def test_all_workers_of_a_run_use_the_file_as_it_was_at_the_start(tmp_path):
    path = write(tmp_path, "import os\nif solution_str == 'die':\n    os._exit(1)\nreturn 1")
    with closing(Scorer(RewardConfig(path=path, num_workers=1), {"mine"})) as scorer:
        write(tmp_path, "return 2")
        for i, text in enumerate(["a", "die", "b"]):
            scorer.submit(make_rollout(i), text)
        assert [rollout.score.score for rollout in scorer.collect()] == [1.0, None, 1.0]


def test_workers_that_cannot_start_fail_the_responses_instead_of_hanging(tmp_path):
    path = write(tmp_path, "import os\nos._exit(9)\ndef compute_score(): pass")
    scores = score_all(RewardConfig(path=path, num_workers=2), ["a", "b"])
    assert [score.score for score in scores] == [None, None]
    assert all(f"--reward.path {path}; found that the reward worker exited with code 9" in s.error for s in scores)


def test_data_that_cannot_be_sent_is_an_error_of_its_response(tmp_path):
    cfg = RewardConfig(path=write(tmp_path, "return 1"), num_workers=1)
    with closing(Scorer(cfg, {"mine"})) as scorer:
        scorer.submit(make_rollout(0, truth=threading.Lock()), "x")
        scorer.submit(make_rollout(1), "x")
        first, second = scorer.collect()
    assert first.score.error.startswith("cannot be sent to a worker: ") and second.score.score == 1.0


BOMBS = [
    r"\boxed{9^{9^{9^9}}}",
    r"\boxed{100000000!}",
    r"\boxed{10^{10^{10}}}",
    "$" + "(" * 400 + "1" + ")" * 400 + "$",
]


def test_math_answers_that_hang_sympy_cost_only_themselves():
    """200 answers, 4 of them bombs; each bomb may hang (no score) or be answered (wrong), the others are right."""
    texts = [BOMBS[i // 50] if i % 50 == 25 else rf"\boxed{{{i} + {i % 3}}}" for i in range(200)]
    cfg = RewardConfig(num_workers=2, timeout_s=5.0)
    sources = {"lighteval/MATH"}
    with closing(Scorer(cfg, sources)) as scorer:
        for i, text in enumerate(texts):
            scorer.submit(make_rollout(i, source="lighteval/MATH", truth=str(i + 1)), text)
        scores = [rollout.score for rollout in scorer.collect()]
    for i, (text, score) in enumerate(zip(texts, scores, strict=True)):
        if text in BOMBS:
            assert score.score == 0.0 or score.error.startswith("timed out") or "SIGKILL" in score.error
        else:
            assert score.score == float(i % 3 == 1), (i, score)
    assert any(score.error for score in scores)  # at least one bomb did hang, or this test shows nothing
