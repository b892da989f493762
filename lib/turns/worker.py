"""The process that holds environments, many episodes at once: started, timed and ended by lib/turns/hub.py.

The user's code runs here and never in the trainer. Synchronous methods and tools run in threads, unless the environment
is `instant`; asynchronous ones in one loop. Python cannot end a thread: one that overruns its time is answered for, and
the process says that it is stuck and is to be replaced.
"""

import asyncio
import contextvars
import inspect
import math
import os
import pickle
import selectors
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from lib.rewards.worker import read_result
from lib.secret_values import remember
from lib.turns.environment import CALLS, Call, Calls, Environment, Observation, OverTime, Reply, Row, as_text
from lib.turns.interactions import Interaction
from lib.turns.loading import describe, load_kinds
from lib.turns.tools import arguments_of
from lib.workers.child import (
    OWN_FILES,
    StartError,
    begin,
    error_in_words,
    memory_bytes,
    print_to,
    read_frame,
    shorten,
    write_frame,
)

OWN_FILES.update((__file__, *map(inspect.getfile, (Calls, Interaction, arguments_of))))
MAX_CHARS = 200_000  # of a message; far above what fits a response
MAX_MESSAGES = 100
MAX_METRICS = 100
MAX_THREADS = 4096  # the hub bounds what runs in them; one is made where none is idle
GRACE_S = 1.0  # by which a step of tools may overrun the limit of each of them


def main(fd: int, parent: int) -> None:
    """Serves requests on descriptor `fd` until the process `parent` closes it, sends END or dies."""
    requests, replies = begin(fd, parent)
    spec = pickle.loads(read_frame(requests))
    remember(spec["kwargs"])
    print_to(spec["log_path"])
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(_Selector())) as runner:
        try:
            kinds = load_kinds(spec)
            about = {name: describe(kind) for name, kind in kinds.items()} if spec["describe"] else {}
            for kind in kinds.values():
                _set_up(kind, spec, runner)
        except StartError as error:
            write_frame(replies, {"start_error": str(error)})
            return
        except BaseException as error:
            message = f"the turns' file cannot be used; --turns.path {spec['path']}; {error_in_words(error)}; mend it"
            write_frame(replies, {"start_error": message})
            return
        write_frame(replies, {"warnings": [], "about": about})
        runner.run(_Server(kinds, spec, requests, replies).serve())


def _set_up(kind: type[Environment], spec: dict[str, Any], runner: asyncio.Runner) -> None:
    """Calls `setup` of an instance; what is asynchronous in it runs in the loop of all episodes, to which what it makes
    there belongs. Raises StartError."""
    kwargs, path = spec["kwargs"], spec["path"]
    try:
        env = kind(**kwargs)
    except BaseException as error:
        raise StartError(
            f"an environment cannot be made; {kind.__name__} of --turns.path {path}; found {error_in_words(error)}, "
            f"expected a constructor that takes {', '.join(kwargs) or 'no arguments'}; mend it, or name what it takes "
            "with --turns.kwargs"
        ) from error
    try:
        if inspect.isawaitable(done := env.setup()):
            runner.run(_awaited(done))
    except BaseException as error:
        raise StartError(
            f"{kind.__name__}.setup() fails; --turns.path {path}; found {error_in_words(error)}, expected it to "
            "return; mend the file"
        ) from error


# ---- Serving ----


class _Server:
    """The episodes of this process, and their calls."""

    def __init__(self, kinds: dict[str, type[Environment]], spec: dict[str, Any], requests: Any, replies: Any) -> None:
        self.kinds, self.timeout_s, self.kwargs = kinds, spec["timeout_s"], spec["kwargs"]
        self.requests, self.replies = requests, replies
        self.episodes: dict[Any, Environment] = {}
        self.threads = ThreadPoolExecutor(MAX_THREADS, "turns")
        self.num_stuck = 0
        """Calls that overran their time in a thread that goes on."""

    async def serve(self) -> None:
        """Until the channel closes."""
        loop, closed = asyncio.get_running_loop(), asyncio.Event()
        buffer, tasks = bytearray(), set()

        def read() -> None:
            data = os.read(self.requests.fileno(), 1 << 16)
            if not data:
                closed.set()
                return
            buffer.extend(data)
            while len(buffer) >= 8 and len(buffer) >= (end := 8 + struct.unpack(">Q", buffer[:8])[0]):
                request = pickle.loads(bytes(buffer[8:end]))
                del buffer[:end]
                task = loop.create_task(self.answer(*request))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

        loop.add_reader(self.requests.fileno(), read)
        await closed.wait()
        os._exit(0)  # threads that never end would keep the process

    async def answer(self, job: int, verb: str, key: Any, payload: Any) -> None:
        """Does what was asked, and says what became of it; never raises."""
        calls, start = _WorkerCalls(self), time.monotonic()
        CALLS.set(calls)
        value, error = None, None
        try:
            value = await getattr(self, f"_{verb}")(key, payload, calls)
        except OverTime:
            error = f"{verb} timed out after {self.timeout_s:g} s"
        except BaseException as problem:
            if asyncio.current_task().cancelling():  # the loop ends, by a task of another episode's
                os._exit(1)
            error = error_in_words(problem)
        write_frame(self.replies, {
            "job": job, "value": value, "error": error, "is_stuck": self.num_stuck > 0, "memory": memory_bytes(),
            "seconds": time.monotonic() - start, "bad_calls": calls.bad, "tool_errors": calls.errors,
            "tool_timeouts": calls.timeouts, "notes": [error_in_words(problem) for problem in calls.notes[:3]],
        })  # fmt: skip

    async def _reset(self, key: Any, payload: dict[str, Any], calls: "_WorkerCalls") -> dict[str, Any]:
        env, row = self.kinds[payload["kind"]](**self.kwargs), Row(**payload["row"])
        env.bind_tools(row.extra_info)
        self.episodes[key] = env
        found = await calls.run(env.reset, row, payload["seed"], instant=env.instant)
        return read_observation(Observation() if found is None else found)

    async def _step(self, key: Any, payload: dict[str, Any], calls: "_WorkerCalls") -> dict[str, Any]:
        env = self.episodes[key]
        reply = Reply(**{**payload, "calls": [Call(**call) for call in payload["calls"]]})
        grace_s = GRACE_S if env.bound else 0.0
        found = read_observation(await calls.run(env.step, reply, instant=env.instant, grace_s=grace_s))
        given = {name: values for name, values in calls.given.items() if values}
        return {
            **found, "metrics": {**dict([*calls.measured.items()][:MAX_METRICS]), **found["metrics"]}, "given": given,
        }  # fmt: skip

    async def _score(self, key: Any, payload: None, calls: "_WorkerCalls") -> dict[str, Any] | None:
        env = self.episodes[key]
        value = await calls.run(env.score, instant=env.instant)
        if value is None:
            return None
        score, extras = read_result(value)
        return {"score": score, "extras": extras}

    async def _close(self, key: Any, payload: None, calls: "_WorkerCalls") -> None:
        env = self.episodes.pop(key, None)
        if env is None:
            return
        ends = {f"the tool {name} is not released": partial(tool.release, calls) for name, tool in env.bound.items()}
        if type(env).close is not Environment.close:
            ends[f"{type(env).__name__}.close fails"] = partial(calls.run, env.close, instant=env.instant)
        for what, end in ends.items():
            try:
                await end()
            except Exception as error:  # nobody waits for an answer
                print(f"{what}: {error_in_words(error)}")


class _WorkerCalls(Calls):
    """Runs functions within the time limit: synchronous ones in a thread, unless they are instant."""

    def __init__(self, server: _Server) -> None:
        super().__init__()
        self.server, self.timeout_s = server, server.timeout_s

    def measure(self, name: str, value: Any) -> None:
        """As the base class, under a name that a run can write."""
        super().measure(_metric_name(name), value)

    async def run(self, function: Callable, *args: Any, instant: bool = False, grace_s: float = 0.0) -> Any:
        limit_s = self.timeout_s + grace_s
        if instant or inspect.iscoroutinefunction(function):
            result = _called(function, args)
        else:
            context = contextvars.copy_context()
            future = self.server.threads.submit(context.run, _called, function, args)
            try:
                result = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), limit_s)
            except (TimeoutError, asyncio.CancelledError) as error:  # its own limit, or that of what called it
                if not future.done():
                    self.server.num_stuck += 1
                if isinstance(error, asyncio.CancelledError):
                    raise
                if not future.done():
                    raise OverTime from None
                result = future.result()  # what the function itself raised, a TimeoutError of its own
        if not inspect.isawaitable(result):
            return result
        task = asyncio.ensure_future(_awaited(result))  # of its own: user code that cancels it ends nothing else
        try:
            return await asyncio.wait_for(task, limit_s)
        except TimeoutError:
            if task.cancelled():  # else it raised that itself
                raise OverTime from None
            raise


ENDS = (SystemExit, KeyboardInterrupt, StopIteration)
"""What would end the loop of all episodes, or never arrive there: of the user's code they are errors like others."""


def _called(function: Callable, args: Sequence[Any]) -> Any:
    """What the user's function returns. Raises what it raises; RuntimeError instead of `ENDS`."""
    own_pid = os.getpid()
    try:
        return function(*args)
    except ENDS as error:
        raise _as_error(error) from None
    finally:
        _end_child(own_pid)


async def _awaited(result: Any) -> Any:
    """The same of what is to be awaited; RuntimeError too where it is cancelled by nobody."""
    own_pid = os.getpid()
    try:
        return await result
    except ENDS as error:
        raise _as_error(error) from None
    except asyncio.CancelledError as error:
        if asyncio.current_task().cancelling():  # by its time limit
            raise
        raise _as_error(error) from None
    finally:
        _end_child(own_pid)


def _as_error(error: BaseException) -> RuntimeError:
    text = ": ".join(filter(None, (type(error).__name__, str(error))))
    return RuntimeError(text).with_traceback(error.__traceback__)


def _end_child(own_pid: int) -> None:
    """Ends a child that the user's code forked and forgot."""
    if os.getpid() != own_pid:
        os._exit(1)


class _Selector(selectors.DefaultSelector):
    """What the loop waits with. A child that shares it, forked by the user's code, must not read what is not its."""

    def __init__(self) -> None:
        super().__init__()
        self.own_pid = os.getpid()

    def select(self, timeout: float | None = None) -> Any:
        """As the base class."""
        _end_child(self.own_pid)
        return super().select(timeout)


# ---- What an environment returned ----


def read_observation(value: Any) -> dict[str, Any]:
    """An `Observation` as JSON: messages with text of at most 200,000 characters each. Text stands for a message of the
    user. Raises TypeError or ValueError for anything else."""
    if isinstance(value, str):
        value = Observation(messages=value)
    if not isinstance(value, Observation):
        raise TypeError(f"returned {type(value).__name__}, expected an Observation")
    messages = [{"role": "user", "content": value.messages}] if isinstance(value.messages, str) else [*value.messages]
    if len(messages) > MAX_MESSAGES:
        raise ValueError(f"returned {len(messages)} messages, expected at most {MAX_MESSAGES}")
    reward, _ = (None, {}) if value.reward is None else read_result(value.reward)
    if not isinstance(value.metrics, Mapping):
        raise TypeError(f"returned metrics of {type(value.metrics).__name__}, expected a mapping")
    metrics = {}
    for name, number in [*value.metrics.items()][:MAX_METRICS]:
        with suppress(TypeError, ValueError):
            if math.isfinite(float(number)):
                metrics[_metric_name(name)] = float(number)
    return {
        "messages": [_message(it) for it in messages],
        "done": bool(value.done),
        "reward": reward,
        "metrics": metrics,
    }


def _metric_name(name: Any) -> str:
    """As names of what a reward function returns: short, and what a terminal and a file can hold."""
    return shorten(str(name), 100) or "unnamed"


def _message(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping) or value.get("role") not in ("tool", "user"):
        role = value.get("role") if isinstance(value, Mapping) else type(value).__name__
        raise ValueError(f"returned a message of the role {role!r}, expected tool or user")
    message = {"role": value["role"], "content": _utf8(as_text(value.get("content", ""))[:MAX_CHARS])}
    return message | ({"name": _utf8(str(value.get("name") or "tool")[:100])} if value["role"] == "tool" else {})


def _utf8(text: str) -> str:
    """The text, what UTF-8 cannot hold (halves of surrogate pairs) as escapes."""
    return text.encode(errors="backslashreplace").decode()
