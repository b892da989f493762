"""The process that runs reward functions, one call at a time: started, timed and ended by lib/rewards/scoring.py.

The user's file is compiled and run here, and never in the trainer (lib/workers/child.py).
"""

import importlib
import inspect
import math
import os
import pickle
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from lib.secret_values import remember
from lib.workers.child import (
    OWN_FILES,
    CappedFile,
    StartError,
    begin,
    error_in_words,
    import_file,
    memory_bytes,
    print_to,
    read_frame,
    shorten,
    write_frame,
)

OWN_FILES.add(__file__)
MODULE = "reward_file"  # name under which the user's file is imported; not __main__, so a recipe does not start a run
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
ROWS = "rows"  # a function with this parameter scores many responses in one call, each a dict of ARGUMENTS
OF_ROWS = "compute_scores"  # and is found without --reward.name under this one
MOST = 3.4e38  # what float32 holds
MAX_TEXT = 10_000  # characters kept of a string that a reward function returns
MAX_KEYS, MAX_KEY_LEN = 1000, 100  # of a dict that it returns; keys name metrics, and may be text of the model
PAGE = os.sysconf("SC_PAGE_SIZE")


def main(fd: int, parent: int) -> None:
    """Serves requests on descriptor `fd` until the process `parent` closes it, sends END or dies."""
    requests, replies = begin(fd, parent)
    spec = pickle.loads(read_frame(requests))
    remember(spec["kwargs"])
    output = print_to(spec["log_path"])
    try:
        graders = _load(spec)
    except StartError as error:
        write_frame(replies, {"start_error": str(error)})
        return
    own = graders.get(None)
    function = own and getattr(own.function, "__name__", spec["name"])
    takes_rows = own is not None and own.takes_rows
    write_frame(replies, {"warnings": _import_warnings(output), "function": function, "takes_rows": takes_rows})
    score = _Scoring(graders, spec["kwargs"])
    own_pid, home = os.getpid(), os.getcwd()
    while (request := read_frame(requests)) is not None:
        job, seed, rows = pickle.loads(request)
        _seed_generators(seed)
        reply = score([pickle.loads(row) for row in rows])
        if os.getpid() != own_pid:  # a child that the reward function forked and forgot
            os._exit(1)
        write_frame(replies, {"job": job, "memory": memory_bytes(), **reply})
        with suppress(OSError):
            os.chdir(home)


def _seed_generators(seed: int) -> None:
    """The same response gets the same random numbers, whichever worker scores it; in a call of many rows the first."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


# ---- Loading ----


class Grader(NamedTuple):
    """What scores, and how it is called."""

    function: Callable
    write_answer: Callable | None
    """Ground truth -> a response that is right; None: there is no such function."""
    takes_rows: bool = False


def _load(spec: dict[str, Any]) -> dict[str | None, Grader]:
    """{data source: grader}; for the user's file {None: grader}, for any data source."""
    if spec["path"] is not None:
        function, takes_rows = _load_file(spec)
        return {None: Grader(function, _answer_writer(sys.modules[MODULE]), takes_rows)}
    return {source: _load_grader(source, module, spec["kwargs"]) for source, module in spec["graders"].items()}


def _answer_writer(module: Any) -> Callable | None:
    found = getattr(module, "write_answer", None)
    return found if callable(found) else None


def _load_file(spec: dict[str, Any]) -> tuple[Callable, bool]:
    """The function, and whether it takes rows."""
    path, name = spec["path"], spec["name"]
    module = import_file(path, spec["source"], MODULE, what="the reward file", flag="--reward.path")
    if name == "compute_score" and callable(getattr(module, OF_ROWS, None)):
        name = OF_ROWS
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, entry in vars(module).items() if inspect.isfunction(entry) and entry.__module__ == MODULE]
        raise StartError(
            f"the reward file has no function {name}; --reward.path {path}; found {', '.join(own) or 'no function'}, "
            f"expected {name}; name the function with --reward.name"
        )
    takes_rows = name == OF_ROWS or ROWS in _parameters(function)
    wanted = ((ROWS,) if takes_rows else ARGUMENTS) + tuple(spec["kwargs"])
    _check_signature(function, wanted, f"--reward.path {path} --reward.name {name}")
    return function, takes_rows


def _parameters(function: Callable) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except ValueError:  # written in C, without a signature
        return ()


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
    return Grader(function, _answer_writer(sys.modules[module]))


def _check_signature(function: Callable, wanted: tuple[str, ...], where: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C, without one
        return
    try:
        signature.bind(**dict.fromkeys(wanted))
    except TypeError as error:
        listed = ", ".join(wanted)
        name = getattr(function, "__name__", "the function")
        raise StartError(
            f"the reward function takes other arguments ({error}); {where}; found {name}{signature}, expected the "
            f"keywords {listed}; write it as def {name}({listed}), or as def {name}({ROWS}) for many at once, or set "
            "--reward.name or --reward.kwargs"
        ) from None


def _import_warnings(output: CappedFile) -> list[str]:
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

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """{scores: {score, extras, error} of each row, failed: why the call as a whole did, or None}; never raises.

        A row without a response: see `_try_answer`.
        """
        if len(rows) == 1:
            return {"scores": [self._reply(lambda: self._score_one(rows[0]))], "failed": None}
        num_rows = len(rows)  # the function may change its list
        try:
            values = self._call(self.graders[None], rows=rows)
            fault = _shape_fault(values, num_rows)
            values = [] if fault else list(values)
        except BaseException as error:  # also sys.exit: the text tells more than a dead worker
            return {"scores": [], "failed": error_in_words(error)}
        if fault:  # of the function, not of one row: another call could hide it
            return {"scores": [_failed(TypeError(fault))] * num_rows, "failed": None}
        return {"scores": [self._reply(partial(read_result, value)) for value in values], "failed": None}

    def _reply(self, score: Callable[[], tuple[float | None, dict]]) -> dict[str, Any]:
        try:
            number, extras = score()
        except BaseException as error:
            return _failed(error)
        return {"score": number, "extras": extras, "error": None}

    def _score_one(self, arguments: dict[str, Any]) -> tuple[float | None, dict]:
        source = arguments["data_source"]
        grader = self.graders.get(None) or self.graders.get(source)
        if grader is None:
            raise LookupError(f"no grader for data source {source!r}")
        act = self._score if arguments["solution_str"] is not None else self._try_answer
        return act(grader, arguments)

    def _score(self, grader: Grader, arguments: dict[str, Any]) -> tuple[float | None, dict]:
        if not grader.takes_rows:
            return read_result(self._call(grader, **arguments))
        values = self._call(grader, rows=[arguments])
        if fault := _shape_fault(values, 1):
            raise TypeError(fault)
        return read_result(next(iter(values)))

    def _call(self, grader: Grader, **arguments: Any) -> Any:
        value = grader.function(**arguments, **self.kwargs)
        return self._wait_for(value) if inspect.isawaitable(value) else value

    def _try_answer(self, grader: Grader, arguments: dict[str, Any]) -> tuple[float | None, dict]:
        """(1 if the answer that the grader writes itself scores more than an empty response, else 0; {answer: it});
        (None, {}) where the grader writes none."""
        if grader.write_answer is None:
            return None, {}
        answer = str(grader.write_answer(arguments["ground_truth"]))
        scores = [self._score(grader, {**arguments, "solution_str": text})[0] for text in (answer, "")]
        best, least = (-math.inf if score is None else score for score in scores)
        return float(best > least), {"answer": answer[:MAX_TEXT]}

    def _wait_for(self, awaitable: Any) -> Any:
        import asyncio

        async def wait() -> Any:
            return await awaitable

        self.runner = self.runner or asyncio.Runner()
        return self.runner.run(wait())


def _shape_fault(values: Any, num_rows: int) -> str | None:
    """Why what a function of rows returned is not a score per row; None: it is."""
    if isinstance(values, str | bytes | dict) or not hasattr(values, "__len__"):
        found = shorten(repr(values), 80)
        return f"returned {found} ({type(values).__name__}), expected a list with a score per row"
    if len(values) != num_rows:
        return f"returned {len(values)} scores for {num_rows} rows, expected one per row"
    return None


def _failed(error: BaseException) -> dict[str, Any]:
    return {"score": None, "extras": {}, "error": error_in_words(error)}


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
        found = shorten(", ".join(map(str, value)), 200)
        raise TypeError(f"returned a dict without the key 'score'; found {found or 'no keys'}")
    extras: dict[str, float | str | bool] = {}
    for key, entry in value.items():
        name = shorten(str(key), MAX_KEY_LEN)
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
        raise ValueError(f"returned {shorten(repr(value), 80)} ({type(value).__name__}), expected a finite number")
    return number
