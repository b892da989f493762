"""Tools and environments that do what nobody expects of them: it is told to the model, or costs their own episode, at
once, and no other one notices."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lib.errors import UserError
from lib.turns import Observation
from lib.turns.config import TurnsConfig
from lib.turns.worker import MAX_MESSAGES, _WorkerCalls, read_observation
from lib.workers import process
from tests.test_dialogue import CALL, Table, text_of
from tests.test_hub import ROW, ask, call, hub, reply, reset, results

FILE = '''
import asyncio, os, sys, time
from lib.turns import Environment, Observation


def exits(code: int) -> str:
    """Exits.

    Args:
        code: with which
    """
    sys.exit(code)


def interrupted() -> str:
    """Raises what Ctrl-C raises."""
    raise KeyboardInterrupt


def exhausted() -> str:
    """Takes the first of nothing."""
    return next(iter(()))


async def cancelled() -> str:
    """Raises what ends a task."""
    raise asyncio.CancelledError


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no text")


def unspeakable() -> str:
    """Raises what cannot be told."""
    raise Unspeakable


async def async_exits() -> str:
    """Exits."""
    sys.exit(3)


def forks() -> str:
    """Forks, and forgets that it did."""
    os.fork()
    return "forked"


async def async_forks() -> str:
    """The same in the loop of all episodes."""
    os.fork()
    await asyncio.sleep(0.01)
    return "forked"


def hangs() -> str:
    """Hangs."""
    time.sleep(60)


async def async_hangs() -> str:
    """Hangs."""
    await asyncio.sleep(60)


async def slow() -> str:
    """Answers a second later."""
    await asyncio.sleep(1.0)
    return "done"


def generates() -> str:
    """Yields."""
    yield "a"


async def async_generates() -> str:
    """Yields."""
    yield "a"


def addresses() -> list:
    """Returns what has no text of its own."""
    return [object()]


def late() -> str:
    """Raises what a time limit raises."""
    raise TimeoutError("no index")


async def async_late() -> str:
    """Raises what a time limit raises."""
    raise TimeoutError("no index")


RAISING = (
    exits, interrupted, exhausted, cancelled, unspeakable, async_exits, generates, async_generates, addresses, late,
    async_late,
)
TOOLS = (*RAISING, forks, async_forks, hangs, async_hangs, slow)


class Tools(Environment):
    tools = TOOLS


class Counts(Environment):
    """Has tools and a step of its own, as docs/conversations.md says."""

    tools = TOOLS

    async def step(self, reply):
        found = await super().step(reply)
        return Observation(messages=found.messages, done=found.done, metrics={"counted": 1})


class Passes(Environment):
    tools = TOOLS

    def step(self, reply):
        return super().step(reply)


class Late(Environment):
    def step(self, reply):
        raise TimeoutError("no index")

    async def score(self):
        raise TimeoutError("no index")


class Keeps(Environment):
    """Keeps what it has seen, of all episodes of its process."""

    kept = []

    def step(self, reply):
        self.kept.append(b"x" * (300_000_000 if reply.text else 1))
        return Observation(messages=str(len(self.kept)))


class Task(Environment):
    """Ends the loop of all episodes, by a task of its own."""

    async def step(self, reply):
        if reply.text == "exit":
            asyncio.get_running_loop().create_task(self.exit())
        await asyncio.sleep(0.5)
        return Observation(messages="fine")

    async def exit(self):
        sys.exit(3)
'''


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("turns") / "nasty.py"
    file.write_text(FILE)
    return str(file)


def texts(result):
    assert result.error is None, result.error
    return [message["content"] for message in result.value["messages"]]


TEXT = ", expected text or what JSON holds"


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("exits", {"code": 3}, "error: exits: RuntimeError: SystemExit: 3"),
        ("interrupted", {}, "error: interrupted: RuntimeError: KeyboardInterrupt"),
        ("exhausted", {}, "error: exhausted: RuntimeError: StopIteration"),
        ("cancelled", {}, "error: cancelled: RuntimeError: CancelledError"),
        ("unspeakable", {}, "error: unspeakable: Unspeakable"),
        ("async_exits", {}, "error: async_exits: RuntimeError: SystemExit: 3"),
        ("late", {}, "error: late: TimeoutError: no index"),  # not as ours
        ("async_late", {}, "error: async_late: TimeoutError: no index"),
        ("generates", {}, f"error: generates: TypeError: returned generator{TEXT}"),
        ("async_generates", {}, f"error: async_generates: TypeError: returned async_generator{TEXT}"),
        ("addresses", {}, f"error: addresses: TypeError: returned list{TEXT}"),
    ],
)
def test_what_a_tool_must_not_raise_or_return_is_told_and_nobody_else_notices(path, name, arguments, told):
    with hub(path, "Tools") as it:
        for key in ("bad", "other"):
            reset(it, key, "Tools")
        it.call("step", "other", reply(calls=[call("slow")]))
        it.call("step", "bad", reply(calls=[call(name, **arguments)]))
        found = results(it, 2)
        assert texts(found["bad", "step"]) == [told]
        assert (found["bad", "step"].tool_errors, found["bad", "step"].tool_timeouts) == (1, 0)
        assert texts(found["other", "step"]) == ["done"] and it.num_replaced == 0


@pytest.mark.parametrize("kind", ["Counts", "Passes"])
@pytest.mark.parametrize("name", ["hangs", "async_hangs"])
def test_a_tool_that_hangs_below_a_step_of_its_environments_own_is_told_too(path, kind, name):
    with hub(path, kind, timeout_s=1.0) as it:
        reset(it, "a", kind)
        found = ask(it, "step", "a", reply(calls=[call(name), call("slow")]))
        assert texts(found)[0] == f"error: {name} timed out after 1 s" and found.tool_timeouts >= 1
        assert found.value["metrics"] == ({"counted": 1.0} if kind == "Counts" else {})


@pytest.mark.parametrize("verb", ["step", "score"])  # in a thread, and asynchronous
def test_a_time_limit_of_the_environments_own_is_not_told_as_ours(path, verb):
    with hub(path, "Late") as it:
        reset(it, "a", "Late")
        assert ask(it, verb, "a", reply()).error.startswith("TimeoutError: no index [nasty.py:")


def test_a_task_that_ends_the_process_costs_the_episode_that_began_it(path):
    with hub(path, "Task") as it:
        for key in ("bad", "other"):
            reset(it, key, "Task")
        it.call("step", "other", reply())
        it.call("step", "bad", reply("exit"))
        found = results(it, 2)
        assert texts(found["other", "step"]) == ["fine"]
        assert "exited with code" in found["bad", "step"].error


def test_what_a_worker_says_after_its_end_is_nothing(path):
    """Its answer to `close` may lie in the channel behind the one with which it ended."""
    with hub(path, "Tools") as it:
        reset(it, "a", "Tools")
        [worker] = it._workers
        ask(it, "step", "a", reply(calls=[call("hangs")]))
        it.call("close", "a")
        deadline = time.monotonic() + 30
        while worker in list(it._workers):
            assert time.monotonic() < deadline, "the worker that is stuck lives on"
            time.sleep(0.01)
        it._read(worker, {"job": 0, "is_stuck": True, "memory": 1})


def test_a_worker_that_holds_ever_more_memory_is_replaced_behind_its_last_episode(path, monkeypatch):
    assert (process.GROWN_GIB, process.GROWN_TIMES) == (8, 10)
    monkeypatch.setattr(process, "GROWN_GIB", 0.2)
    monkeypatch.setattr(process, "GROWN_TIMES", 2)
    with hub(path, "Keeps") as it:
        for key in ("a", "b"):
            reset(it, key, "Keeps")
        [worker] = it._workers
        assert texts(ask(it, "step", "a", reply())) == ["1"] and it.num_outgrown == 0
        assert texts(ask(it, "step", "a", reply("much"))) == ["2"]
        assert texts(ask(it, "step", "b", reply())) == ["3"] and it.num_outgrown == 1  # with the one that has it
        for key in ("a", "b"):
            it.call("close", key)
        deadline = time.monotonic() + 30
        while worker in list(it._workers):
            assert time.monotonic() < deadline, "the worker that has outgrown lives on"
            time.sleep(0.01)
        reset(it, "c", "Keeps")
        assert texts(ask(it, "step", "c", reply())) == ["1"] and it.num_outgrown == 1


def test_a_defect_of_the_hub_is_raised_and_not_waited_for(path):
    with hub(path, "Tools") as it:
        it.wait_until_started()
        it.call("reset", "a", {"kind": "Nothing", "row": ROW, "seed": 1})
        with pytest.raises(RuntimeError, match="hub") as raised:
            results(it, 1)
        assert isinstance(raised.value.__cause__, KeyError)


NAMES = {"a\ud800": 1, "b\n\tc\x1b": 2, "": 3, "d" * 101: 4}
KEPT = {"a\\ud800": 1, "b c\\x1b": 2, "unnamed": 3, "d" * 97 + "...": 4}


def test_names_of_metrics_become_printable_and_short():
    """A run would end where it writes them."""
    assert read_observation(Observation(metrics=NAMES))["metrics"] == KEPT


def test_names_of_what_tools_measure_become_printable_and_short():
    calls = _WorkerCalls(SimpleNamespace(timeout_s=1.0))
    for name, value in [*NAMES.items(), ("b c\x1b", 5)]:
        calls.measure(name, value)
    assert calls.measured == {**KEPT, "b c\\x1b": 7}


def test_a_name_that_utf8_cannot_hold_is_escaped():
    found = read_observation(Observation(messages=[{"role": "tool", "name": "a\ud800", "content": "b\ud800"}]))
    assert found["messages"] == [{"role": "tool", "name": "a\\ud800", "content": "b\\ud800"}]


def test_of_hundreds_of_calls_in_a_turn_those_that_are_not_made_are_told_at_once(path):
    with Table(path, "slow", max_calls=2) as table:
        rollout = table.begin()
        table.answer()
        rollout, answer = table.play(rollout, CALL % ("slow", "{}") * 250)
        assert answer.score is None and answer.finish_reason is None
        told = [f"<tool_response>\n{it}\n</tool_response>" for it in ("done", "done", f"error: {ONLY_2}")]
        assert "\n".join(told) in text_of(answer) and text_of(answer).count("<tool_response>") == 3
        assert answer.metrics["calls"] == 250 and answer.metrics["bad_calls"] == 248
        made = {"name": "slow", "arguments": {}}
        assert answer.told["calls"] == [made, made, {**made, "error": ONLY_2}]


def test_more_calls_of_a_turn_than_a_step_may_answer_are_refused_at_the_start():
    TurnsConfig(path="x.py", max_calls=MAX_MESSAGES - 1)  # and a message about those that are not made
    with pytest.raises(UserError, match=r"--turns.max-calls.*from 1 to 99"):
        TurnsConfig(path="x.py", max_calls=MAX_MESSAGES)


ONLY_2 = "only 2 calls of a turn are made, 248 more were not"
TWICE = '''

def other() -> str:
    """Answers at once."""


other.__name__ = "slow"


class Both(Environment):
    tools = (slow, other)
'''


@pytest.mark.parametrize("names", [("slow", "other"), ("Both",)])
def test_two_tools_of_one_name_are_told(tmp_path, names):
    (tmp_path / "twice.py").write_text(FILE + TWICE)
    with (
        hub(str(tmp_path / "twice.py"), *names) as it,
        pytest.raises(UserError, match=r"two tools of one name; .*slow"),
    ):
        it.wait_until_started()


def descendants(pid):
    """Of a process, with it."""
    found, parents = [pid], {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = stat.read_text().rsplit(")", 1)
        except OSError:  # it has ended
            continue
        if rest.split()[0] != "Z":
            parents[int(name.split()[0])] = int(rest.split()[1])
    for parent in found:
        found += [child for child, its in parents.items() if its == parent]
    return found


@pytest.mark.parametrize("name", ["forks", "async_forks"])
def test_a_child_that_a_tool_forks_and_forgets_ends_and_takes_nobodys_requests(path, name):
    with hub(path, "Tools") as it:
        for key in range(8):
            reset(it, key, "Tools")
        [worker] = it._workers
        before = len(descendants(worker.process.pid))
        for _ in range(10):
            for key in range(8):
                it.call("step", key, reply(calls=[call(name)]))
            assert all(texts(found) == ["forked"] for found in results(it, 8).values())
        deadline = time.monotonic() + 30
        while len(descendants(worker.process.pid)) > before:
            assert time.monotonic() < deadline, "children live on"
            time.sleep(0.05)
        assert it.num_replaced == 0
