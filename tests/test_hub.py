"""Environments in worker processes: answers, tools, time limits, and what becomes of episodes whose worker is lost."""

import os
import re
import selectors
import socket
import time
from collections import Counter
from contextlib import closing

import pytest

from lib.errors import UserError
from lib.turns.config import TurnsConfig
from lib.turns.hub import Hub
from lib.workers.child import frame
from lib.workers.pool import WorkerPool
from lib.workers.process import WorkerProcess

FILE = '''
import asyncio, os, random, time
from lib.turns import Environment, Observation


class Guess(Environment):
    """Says higher or lower."""

    def reset(self, row, seed):
        self.secret, self.turns = random.Random(seed).randrange(100), 0
        return Observation(messages=f"from 0 to {row.ground_truth}")

    def step(self, reply):
        self.turns += 1
        if reply.text == "exit":
            os._exit(3)
        if reply.text == "raise":
            raise ValueError("no number")
        if reply.text == "hang":
            time.sleep(60)
        if reply.text == "block":
            while True:
                pass
        if reply.text == "slow":
            time.sleep(0.3)
        if reply.text == "wrong":
            return 7
        if reply.text == "role":
            return Observation(messages=[{"role": "system", "content": "obey"}])
        if reply.text == "end":
            return Observation(done=True, reward=float(self.turns), metrics={"turns": self.turns, "odd": float("nan")})
        return Observation(messages=f"{self.turns}: {self.secret}", reward=0.5)

    def score(self):
        return {"score": self.turns, "extra": "x"} if self.turns else None


class Instant(Guess):
    instant = True


class Once(Guess):
    replayable = False


class Waits(Environment):
    async def step(self, reply):
        if reply.text == "hang":
            await asyncio.sleep(60)
        await asyncio.sleep(0.2)
        return "done"


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: the first
        b: the second
    """
    return a + b


def fails(text: str) -> str:
    """Fails.

    Args:
        text: anything
    """
    raise RuntimeError("tool of no use")


def hangs() -> str:
    """Hangs."""
    time.sleep(60)


async def large() -> bytes:
    """Returns 10 MB."""
    return b"x" * 10_000_000
'''
ROW = {"data_source": "test", "ground_truth": "99", "extra_info": {}, "messages": []}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("turns") / "turns.py"
    file.write_text(FILE)
    return str(file)


def hub(path, *names, **options):
    made = Hub(TurnsConfig(path=path, name=names, **{"num_workers": 1, "timeout_s": 2.0, **options}))
    return closing(made)


def reply(text="", calls=(), turn=0):
    return {"text": text, "calls": list(calls), "turn": turn, "finish_reason": "stop"}


def call(name, **arguments):
    return {"name": name, "arguments": arguments}


def results(of, count, limit_s=60.0):
    """{(episode, verb): result} of so many results; in the order in which they came."""
    found, end = [], time.monotonic() + limit_s
    while len(found) < count and time.monotonic() < end:
        found += of.take(wait_s=0.2)
    assert len(found) == count, found
    return {(it.key, it.verb): it for it in found}


def ask(of, verb, key, payload=None):
    of.call(verb, key, payload)
    return results(of, 1)[key, verb]


def reset(of, key, kind="Guess", seed=1):
    return ask(of, "reset", key, {"kind": kind, "row": ROW, "seed": seed})


def test_an_episode_is_reset_stepped_and_scored(path):
    with hub(path, "Guess") as it:
        it.wait_until_started()
        assert not it.about["Guess"].instant and it.about["Guess"].replayable and it.about["Guess"].tools == []
        first = reset(it, "a").value
        assert first == {
            "messages": [{"role": "user", "content": "from 0 to 99"}], "done": False, "reward": None, "metrics": {},
        }  # fmt: skip
        assert ask(it, "step", "a", reply("5")).value["reward"] == 0.5
        ended = ask(it, "step", "a", reply("end")).value
        assert ended == {"messages": [], "done": True, "reward": 2.0, "metrics": {"turns": 2.0}, "given": {}}
        assert ask(it, "score", "a").value == {"score": 2.0, "extras": {"extra": "x"}}
        it.call("close", "a")
        assert reset(it, "a").error is None


def test_the_same_seed_gives_the_same_task_in_any_worker(path):
    with hub(path, "Guess", num_workers=3) as it:
        for key in range(9):
            it.call("reset", key, {"kind": "Guess", "row": ROW, "seed": key // 3})
        results(it, 9)
        for key in range(9):
            it.call("step", key, reply("5"))
        said = {key: result.value["messages"][0]["content"] for (key, _), result in results(it, 9).items()}
        assert len({said[0], said[3], said[6]}) == 3
        assert all(said[key] == said[key - key % 3] for key in said)


def test_what_an_environment_does_wrong_is_an_error_of_its_episode_alone(path):
    with hub(path, "Guess") as it:
        for key in ("raise", "wrong", "role", "good"):
            it.call("reset", key, {"kind": "Guess", "row": ROW, "seed": 1})
        results(it, 4)
        for key in ("raise", "wrong", "role", "good"):
            it.call("step", key, reply(key))
        found = {key: result for (key, _), result in results(it, 4).items()}
        assert found["raise"].error.startswith("ValueError: no number [turns.py:")
        assert "returned int, expected an Observation" in found["wrong"].error
        assert "of the role 'system', expected tool or user" in found["role"].error
        assert found["good"].error is None and it.num_replaced == 0


@pytest.mark.parametrize("kind", ["Guess", "Instant"])
@pytest.mark.parametrize("how", ["exit", "block", "hang"])
def test_a_lost_worker_costs_only_the_episode_that_lost_it(path, kind, how):
    if (kind, how) == ("Instant", "hang"):
        pytest.skip("the same as block: nothing else runs meanwhile")
    with hub(path, kind) as it:
        for key in ("bad", "idle", "busy"):
            reset(it, key, kind)
        before = {key: ask(it, "step", key, reply("5")).value for key in ("idle", "busy")}
        it.call("step", "busy", reply("slow"))
        it.call("step", "bad", reply(how))
        found = results(it, 2)
        assert found["bad", "step"].error and found["busy", "step"].error is None
        after = {key: ask(it, "step", key, reply("5")) for key in ("idle", "busy")}
        assert after["idle"].value["messages"][0]["content"] == "2" + before["idle"]["messages"][0]["content"][1:]
        assert after["busy"].value["messages"][0]["content"][0] == "3"  # its replies were made again
        # A process that ends does not say by whose call: each call in it is made again, alone.
        assert after["idle"].was_replayed == (
            how == "exit" or kind == "Instant"
        )  # a thread that hangs leaves the others where they are
        assert it.num_replaced == (2 if how == "exit" else 1)
        assert ask(it, "step", "bad", reply("5")).error  # over for good


def test_of_many_calls_in_a_process_that_ends_only_those_that_end_it_fail(path):
    with hub(path, "Guess", num_workers=1) as it:
        for key in range(8):
            it.call("reset", key, {"kind": "Guess", "row": ROW, "seed": key})
        results(it, 8)
        for key in range(8):
            it.call("step", key, reply("exit" if key in (3, 5) else "slow"))
        found = {key: result for (key, _), result in results(it, 8).items()}
        assert {key for key, result in found.items() if result.error} == {3, 5}
        for key in (0, 4, 7):
            assert ask(it, "step", key, reply("5")).value["messages"][0]["content"].startswith("2: ")


def test_turns_that_wait_for_a_thread_have_their_whole_time(path):
    with hub(path, "Guess", "Waits", concurrency=1) as made:
        for key in range(10):
            reset(made, key)
        start = time.monotonic()
        for key in range(10):
            made.call("step", key, reply("slow"))
        assert {it.error for it in results(made, 10).values()} == {None} and made.num_replaced == 0
        assert time.monotonic() - start >= 10 * 0.3  # one after the other: longer than the limit of each
        assert made.about["Guess"].in_threads and not made.about["Waits"].in_threads


def test_an_environment_that_cannot_be_replayed_fails_when_its_worker_is_lost(path):
    with hub(path, "Once") as it:
        for key in ("bad", "idle"):
            reset(it, key, "Once")
        ask(it, "step", "idle", reply("5"))
        lost = ask(it, "step", "bad", reply("exit")).error
        assert "exited with code 3, and its environment cannot be replayed" in lost
        assert "cannot be replayed" in ask(it, "step", "idle", reply("5")).error


def test_asynchronous_methods_run_side_by_side_within_their_limit(path):
    with hub(path, "Waits") as it:
        keys = [*range(20), "late"]
        for key in keys:
            it.call("reset", key, {"kind": "Waits", "row": ROW, "seed": 1})
        results(it, 21)
        begin = time.monotonic()
        for key in keys:
            it.call("step", key, reply("hang" if key == "late" else ""))
        found = results(it, 21)
        assert time.monotonic() - begin < 4.0  # of 20 x 0.2 s and a limit of 2 s
        assert found["late", "step"].error == "step timed out after 2 s" and it.num_replaced == 0
        assert all(found[key, "step"].value["messages"][0]["content"] == "done" for key in range(20))


def test_tools_answer_at_once_and_what_goes_wrong_is_told_and_counted(path):
    with hub(path, "add", "fails", "large") as it:
        it.wait_until_started()
        assert [tool["function"]["name"] for tool in it.about["tools"].tools] == ["add", "fails", "large"]
        reset(it, "a", "tools")
        calls = [call("add", a=1, b=2), call("fails", text="x"), call("large"), call("no"), call("add", a=1)]
        found = ask(it, "step", "a", reply(calls=calls))
        texts = [message["content"] for message in found.value["messages"]]
        assert texts[0] == "3" and texts[1] == "error: fails: RuntimeError: tool of no use"
        assert texts[2] == "x" * 200_000 and texts[3].startswith("error: there is no tool 'no'")
        assert "missing a required argument: 'b'" in texts[4]
        assert (found.bad_calls, found.tool_errors, found.tool_timeouts) == (2, 1, 0)
        assert "tool of no use" in found.notes[0] and not found.value["done"]
        assert ask(it, "step", "a", reply("42")).value["done"]


def test_a_call_that_cannot_be_sent_costs_its_episode_alone(path):
    with hub(path, "add") as it:
        for key in ("bad", "good"):
            reset(it, key, "tools")
        found = ask(it, "step", "bad", reply(calls=[call("add", a=lambda: 1, b=2)]))
        assert "the call cannot be sent: " in found.error and "lambda" in found.error
        answered = ask(it, "step", "good", reply(calls=[call("add", a=1, b=2)]))
        assert answered.value["messages"][0]["content"] == "3" and it.num_replaced == 0


def test_a_tool_that_hangs_is_told_to_the_model_and_its_worker_replaced(path):
    with hub(path, "add", "hangs") as it:
        for key in ("a", "b"):
            reset(it, key, "tools")
        begin = time.monotonic()
        found = ask(it, "step", "a", reply(calls=[call("hangs"), call("add", a=1, b=2)]))
        assert time.monotonic() - begin < 4.0
        texts = [message["content"] for message in found.value["messages"]]
        assert texts == ["error: hangs timed out after 2 s", "3"] and found.tool_timeouts == 1
        assert ask(it, "step", "b", reply(calls=[call("add", a=2, b=2)])).value["messages"][0]["content"] == "4"
        time.sleep(3.0)  # a replay would hang again
        assert ask(it, "step", "a", reply(calls=[call("add", a=3, b=3)])).value["messages"][0]["content"] == "6"
        assert it.num_replaced == 1
        for key in ("a", "b"):
            it.call("close", key)
        deadline = time.monotonic() + 30
        while any(worker.is_stuck for worker in list(it._workers)):
            assert time.monotonic() < deadline, "the worker that is stuck lives on"
            time.sleep(0.01)


ASYNC = """
import asyncio
from lib.turns import Environment, Observation


class Asks(Environment):
    def __init__(self, word="none"):
        self.word = word

    async def setup(self):
        await asyncio.sleep(0.01)
        Asks.loop, Asks.shared = asyncio.get_running_loop(), asyncio.create_task(self.answer())

    async def answer(self):
        await asyncio.sleep(0.01)
        return self.word

    async def step(self, reply):
        return Observation(messages=f"{await self.shared} {self.loop is asyncio.get_running_loop()}")
"""


def test_an_asynchronous_setup_runs_in_the_loop_of_the_episodes(tmp_path):
    (tmp_path / "asks.py").write_text(ASYNC)
    with hub(str(tmp_path / "asks.py"), "Asks", kwargs={"word": "yes"}) as it:
        assert reset(it, "a", "Asks").error is None
        assert ask(it, "step", "a", reply()).value["messages"][0]["content"] == "yes True"


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_setup_that_fails_is_told(tmp_path, kind):
    text = f"from lib.turns import Environment\nclass E(Environment):\n    {kind} setup(self):\n        1 / 0\n"
    (tmp_path / "bad.py").write_text(text)
    expected = (
        f"E.setup() fails; --turns.path {tmp_path}/bad.py; found ZeroDivisionError: division by zero [bad.py:4 in "
        "setup: 1 / 0], expected it to return; mend the file"
    )
    with hub(str(tmp_path / "bad.py"), "E") as it, pytest.raises(UserError, match=re.escape(expected)):
        it.wait_until_started()


def test_a_file_that_cannot_be_used_is_told(tmp_path):
    for text, names, expected in (
        ("x = (", ("Guess",), "the turns' file does not import"),
        (FILE, ("Missing",), "no such environment or tool; .*found Guess, Instant, Once, Waits, add"),
        (FILE, (), "no such environment or tool"),
        ("def bare(x):\n    return x\n", ("bare",), "a tool does not say what it takes; bare"),
        ("import os\nos._exit(1)\n", ("E",), "ended before it was ready"),
    ):  # fmt: skip
        (tmp_path / "bad.py").write_text(text)
        with hub(str(tmp_path / "bad.py"), *names) as it, pytest.raises(UserError, match=expected):
            it.wait_until_started()
    with pytest.raises(UserError, match=r"--turns.path"):
        Hub(TurnsConfig(path=str(tmp_path / "none.py"), name=("E",)))
    with pytest.raises(UserError, match="environments without their file"):
        TurnsConfig(name=("E",))


def test_no_process_is_left(path):
    with hub(path, "Guess", num_workers=2) as it:
        it.wait_until_started()
        reset(it, "a")
        it.call("step", "a", reply("hang"))
        pids = [worker.process.pid for worker in it._workers]
    time.sleep(0.1)
    alive = Counter(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert alive[True] == 0


class Forwarding(WorkerPool):
    """Posts what one worker says to the other one."""

    _make_worker = _cannot_start = _assign = _lose = _expire = None

    def __init__(self):
        super().__init__("forwarding", 2)
        self._workers, self.ends = [], []
        for _ in range(2):
            worker, (ours, end) = object.__new__(WorkerProcess), socket.socketpair()
            worker.channel, worker.outgoing, worker.incoming = ours, bytearray(), bytearray()
            ours.setblocking(False)
            end.setblocking(False)
            self._workers.append(worker)
            self._selector.register(ours, selectors.EVENT_READ, worker)
            self.ends.append(end)

    def _read(self, worker, message):
        self._post(self._workers[1], frame(str(message).encode()))


def test_what_an_answer_sets_going_is_sent_before_another_workers_end_is_waited_for():
    """That may take seconds, in which the time limit of what was not sent would run."""
    pool = Forwarding()
    pool.ends[0].send(frame(b"1") + frame(b"2"))
    pool._talk(pool._workers[0], selectors.EVENT_READ)
    assert pool.ends[1].recv(100) == frame(b"1") + frame(b"2")
