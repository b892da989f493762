"""The process that runs reward functions, one response at a time: started, timed and ended by lib/rewards/scoring.py.

Imports little but the standard library, so that it starts in milliseconds, and never the trainer: the user's file is
compiled and run here. Requests are pickled (the trainer's own data), replies are JSON (nothing the reward code returns
is unpickled in the trainer), both on a descriptor of their own, so prints cannot disturb them. It is no sandbox: the
reward file is the operator's code.
"""

import importlib
import inspect
import io
import json
import math
import os
import pickle
import random
import signal
import struct
import sys
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO

from lib.errors import printable
from lib.rewards.keeper import fork_behind_keeper
from lib.secret_values import BlankedText, blank, remember

MODULE = "reward_file"  # name under which the user's file is imported; not __main__, so a recipe does not start a run
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
LOG_LIMIT = 4 * 1024**2  # bytes of prints kept per worker process
MOST = 3.4e38  # what float32 holds
MAX_TEXT = 10_000  # characters kept of a string that a reward function returns
MAX_KEYS, MAX_KEY_LEN = 1000, 100  # of a dict that it returns; keys name metrics, and may be text of the model
PAGE = os.sysconf("SC_PAGE_SIZE")


class StartError(Exception):
    """The reward function cannot be used at all; the text is a finished message."""


def main(fd: int, parent: int) -> None:
    """Serves requests on descriptor `fd` until the process `parent` closes it, sends END or dies."""
    fork_behind_keeper(fd, parent)
    _outlive_requests_to_stop()
    os.set_inheritable(fd, False)
    requests, replies = os.fdopen(fd, "rb"), os.fdopen(fd, "wb", closefd=False)
    spec = pickle.loads(read_frame(requests))
    output = _CappedFile(spec["log_path"])
    remember(spec["kwargs"])
    sys.stdout = sys.stderr = BlankedText(io.BufferedWriter(output), line_buffering=True, errors="backslashreplace")
    try:
        graders = _load(spec)
    except StartError as error:
        write_frame(replies, {"start_error": str(error)})
        return
    write_frame(replies, {"warnings": _import_warnings(output)})
    score = _Scoring(graders, spec["kwargs"])
    own_pid, home = os.getpid(), os.getcwd()
    while (request := read_frame(requests)) is not None:
        job, seed, arguments = pickle.loads(request)
        _seed_generators(seed)
        reply = score(arguments)
        if os.getpid() != own_pid:  # a child that the reward function forked and forgot
            os._exit(1)
        write_frame(replies, {"job": job, "memory": _memory_bytes(), **reply})
        with suppress(OSError):
            os.chdir(home)


def frame(payload: bytes) -> bytes:
    """The payload behind its length in 8 bytes."""
    return struct.pack(">Q", len(payload)) + payload


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next payload; None at the end of the stream."""
    head = stream.read(8)
    return stream.read(struct.unpack(">Q", head)[0]) if len(head) == 8 else None


def write_frame(stream: BinaryIO, message: dict) -> None:
    """Sends one reply."""
    stream.write(frame(json.dumps(message).encode()))
    stream.flush()


def _memory_bytes() -> int:
    """What this process holds alone, without files that it maps; 0 where the system does not say."""
    with suppress(OSError), open("/proc/self/statm") as file:
        resident, shared = map(int, file.read().split()[1:3])
        return (resident - shared) * PAGE
    return 0


def _outlive_requests_to_stop() -> None:
    """Keeps signals that a scheduler sends to all processes of a job from ending this one: the trainer decides.

    Handlers, since programs that the reward function starts would inherit signals that are ignored. Its forks get the
    usual ones back, and signals wait meanwhile: one that the reward function sends to end its child is not lost.
    """
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    usual = {number: signal.getsignal(number) for number in numbers}

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    def reset() -> None:
        for number, handler in usual.items():
            signal.signal(number, handler)
        unblock()

    for number in numbers:
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, numbers), after_in_parent=unblock, after_in_child=reset
    )


def _seed_generators(seed: int) -> None:
    """The same response gets the same random numbers, whichever worker scores it."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


class _CappedFile(io.RawIOBase):
    """A file that keeps the first LOG_LIMIT bytes and drops the rest: prints must not fill the disk."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "ab", buffering=0)  # noqa: SIM115 (open as long as the process lives)
        self.num_written = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1  # for code that asks; the descriptor itself leads to /dev/null

    def write(self, data: Any) -> int:
        kept = bytes(data)[: max(0, LOG_LIMIT - self.num_written)]
        with suppress(OSError):  # a full disk
            self.file.write(kept)
        self.num_written += len(data)
        return len(data)


# ---- Loading ----


Grader = tuple[Callable, Callable | None]
"""The function that scores, and, where there is one, `write_answer`: ground truth -> a response that is right."""


def _load(spec: dict[str, Any]) -> dict[str | None, Grader]:
    """{data source: grader}; for the user's file {None: grader}, for any data source."""
    if spec["path"] is not None:
        function = _load_file(spec)
        return {None: (function, _answer_writer(sys.modules[MODULE]))}
    return {source: _load_grader(source, module, spec["kwargs"]) for source, module in spec["graders"].items()}


def _answer_writer(module: Any) -> Callable | None:
    found = getattr(module, "write_answer", None)
    return found if callable(found) else None


def _load_file(spec: dict[str, Any]) -> Callable:
    path, name = spec["path"], spec["name"]
    module = types.ModuleType(MODULE)
    module.__file__ = path
    sys.modules[MODULE] = module
    # Last, because a neighbour called types.py must not hide the standard library's.
    sys.path += [os.path.dirname(path), os.getcwd()]
    try:
        # From the trainer's copy of the source: all workers of a run, also later ones, run the same code.
        exec(compile(spec["source"], path, "exec"), module.__dict__)
    except BaseException as error:
        raise StartError(
            f"the reward file does not import; --reward.path {path}; {error_in_words(error)}; mend the file: it is "
            f"imported in a worker process with {sys.executable}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, entry in vars(module).items() if inspect.isfunction(entry) and entry.__module__ == MODULE]
        raise StartError(
            f"the reward file has no function {name}; --reward.path {path}; found {', '.join(own) or 'no function'}, "
            f"expected {name}; name the function with --reward.name"
        )
    _check_signature(function, spec["kwargs"], f"--reward.path {path} --reward.name {name}")
    return function


def _load_grader(data_source: str, module: str, kwargs: dict[str, Any]) -> Grader:
    """A built-in grader, after a first call: its imports must not count against a response's time limit."""
    where = f"data source {data_source}"
    try:
        function = importlib.import_module(module).compute_score
        known = [name for name in inspect.signature(function).parameters if name not in ARGUMENTS]
        if unknown := set(kwargs) - set(known):
            raise StartError(
                f"the built-in grader {module} does not take these keywords; --reward.kwargs, {where}; found "
                f"{', '.join(sorted(unknown))}, expected {' or '.join(known) or 'none'}; leave them out"
            )
        function(data_source=data_source, solution_str="0", ground_truth="0", extra_info={}, **kwargs)
    except StartError:
        raise
    except Exception as error:
        raise StartError(
            f"the built-in grader {module} does not run; {where}; {error_in_words(error)}; expected it to grade the "
            "response '0'; check --reward.kwargs, and install what requirements.txt names"
        ) from error
    return function, _answer_writer(sys.modules[module])


def _check_signature(function: Callable, kwargs: dict[str, Any], where: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C, without one
        return
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS), **kwargs)
    except TypeError as error:
        wanted = ", ".join((*ARGUMENTS, *kwargs))
        name = getattr(function, "__name__", "the function")
        raise StartError(
            f"the reward function takes other arguments ({error}); {where}; found {name}{signature}, expected the "
            f"keywords {wanted}; write it as def {name}({wanted}), or set --reward.name or --reward.kwargs"
        ) from None


def _import_warnings(output: _CappedFile) -> list[str]:
    warnings = []
    if output.num_written:
        warnings.append(f"importing it printed {output.num_written} bytes (they go to the reward log)")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        warnings.append("importing it started CUDA: every worker takes GPU memory")
    return warnings


# ---- Scoring ----


class _Scoring:
    """Calls the function of a request's data source and puts what it did into a reply."""

    def __init__(self, graders: dict[str | None, Grader], kwargs: dict[str, Any]) -> None:
        self.graders = graders
        self.kwargs = kwargs
        self.runner: Any = None  # one event loop for the process: clients that a function keeps stay usable

    def __call__(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """{score, extras, error} for one response; never raises. Without a response, see `_try_answer`."""
        source = arguments["data_source"]
        try:
            grader = self.graders.get(None) or self.graders.get(source)
            if grader is None:
                raise LookupError(f"no grader for data source {source!r}")
            act = self._score if arguments["solution_str"] is not None else self._try_answer
            score, extras = act(grader, arguments)
        except BaseException as error:  # also sys.exit: the text tells more than a dead worker
            return {"score": None, "extras": {}, "error": error_in_words(error)}
        return {"score": score, "extras": extras, "error": None}

    def _score(self, grader: Grader, arguments: dict[str, Any]) -> tuple[float | None, dict]:
        value = grader[0](**arguments, **self.kwargs)
        return read_result(self._wait_for(value) if inspect.isawaitable(value) else value)

    def _try_answer(self, grader: Grader, arguments: dict[str, Any]) -> tuple[float | None, dict]:
        """(1 if the answer that the grader writes itself scores more than an empty response, else 0; {answer: it});
        (None, {}) where the grader writes none."""
        if grader[1] is None:
            return None, {}
        answer = str(grader[1](arguments["ground_truth"]))
        scores = [self._score(grader, {**arguments, "solution_str": text})[0] for text in (answer, "")]
        best, least = (-math.inf if score is None else score for score in scores)
        return float(best > least), {"answer": answer[:MAX_TEXT]}

    def _wait_for(self, awaitable: Any) -> Any:
        import asyncio

        async def wait() -> Any:
            return await awaitable

        self.runner = self.runner or asyncio.Runner()
        return self.runner.run(wait())


def read_result(value: Any) -> tuple[float | None, dict[str, float | str | bool]]:
    """(score, extras) from what a reward function returned: a number, None (declined), or a dict with key `score`.

    Numbers are Python's, numpy's or torch's, of one element. Extras that are neither finite numbers, bools nor strings
    are left out; keys become printable and short; halves of surrogate pairs, which no file holds, become escapes.
    Raises TypeError or ValueError for anything else.
    """
    if not isinstance(value, dict):
        return _read_number(value), {}
    if len(value) > MAX_KEYS:
        raise ValueError(f"returned a dict with {len(value)} keys, expected at most {MAX_KEYS}")
    if "score" not in value:
        found = _shorten(", ".join(map(str, value)), 200)
        raise TypeError(f"returned a dict without the key 'score'; found {found or 'no keys'}")
    extras: dict[str, float | str | bool] = {}
    for key, entry in value.items():
        name = _shorten(str(key), MAX_KEY_LEN)
        if isinstance(entry, bool):
            extras[name] = entry
        elif isinstance(entry, str):
            extras[name] = str(entry)[:MAX_TEXT].encode(errors="backslashreplace").decode()
        elif entry is not None:
            with suppress(TypeError, ValueError):
                extras[name] = _read_number(entry)
    extras.pop("score", None)
    return _read_number(value["score"]), extras


def _read_number(value: Any) -> float | None:
    if value is None:
        return None
    try:
        number = float("nan") if isinstance(value, str | bytes | bytearray) else float(value)
    except Exception:  # each library has its own for a value that is no single number
        number = math.nan
    if not abs(number) <= MOST:  # also when NaN
        raise ValueError(f"returned {_shorten(repr(value), 80)} ({type(value).__name__}), expected a finite number")
    return number


def error_in_words(error: BaseException) -> str:
    """The error and where user code raised it: `ValueError: no digits [reward.py:12 in compute_score: int(text)]`."""
    frames = [
        f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}: {_shorten(frame.line or '', 80)}"
        for frame in traceback.extract_tb(error.__traceback__, limit=-8)
        if frame.filename != __file__ and not frame.filename.startswith("<frozen") and "/asyncio/" not in frame.filename
    ]
    text = _shorten(blank(" ".join(traceback.format_exception_only(error))), 300)  # while secrets are whole
    return f"{text} [{' > '.join(frames[-3:])}]" if frames else text


def _shorten(text: str, limit: int) -> str:
    text = " ".join(text.split())
    return printable(text if len(text) <= limit else text[: limit - 3] + "...")
