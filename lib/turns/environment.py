"""What answers a model between its turns: an `Environment`, or tools. For the user's file, which workers import: the
standard library alone.

    class Search(Environment):                      def calculate(expression: str) -> str:
        def setup(self): ...                            '''Evaluates arithmetic.
        def reset(self, row, seed): ...
        def step(self, reply): ...                      Args:
        def score(self): ...                                expression: such as 2 * (3 + 4)
        def close(self): ...                            '''
Any method, and any tool, may be `async`. An instance answers one episode. Methods below `@tool` are its tools.
"""

import asyncio
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lib.turns.tools import ClassTool, FunctionTool, bind


@dataclass(frozen=True, kw_only=True)
class Row:
    """The dataset's row that an episode begins from."""

    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]]
    """The prompt."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A tool call that the model wrote."""

    name: str
    arguments: Mapping[str, Any]
    error: str | None = None
    """Why it is none: text that is not JSON, an unknown tool; the model is told so."""
    count: int = 1
    """How many it stands for: those beyond --turns.max-calls are one, with an error."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A turn of the model's."""

    text: str
    """What it sampled, without control tokens and calls."""
    calls: Sequence[Call]
    turn: int
    """0 for the first."""
    finish_reason: str
    """`stop`: the model ended it. A turn that is cut off ends the episode, and no `step` is asked about it."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What the environment answers. Text stands for one message of the user."""

    messages: str | Sequence[Mapping[str, Any]] = ()
    """Of the roles tool and user, to be appended; empty: none."""
    done: bool = False
    """Whether the episode ends with the turn that this answers; messages are not appended then."""
    reward: float | None = None
    """Of that turn; None: none."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means over a step's episodes become turns/NAME."""


def tool(method: Callable) -> Callable:
    """Marks a method of an `Environment`, with type hints and a docstring, as one of its tools: what it keeps on `self`
    is its episode's alone. Calls of one turn run side by side."""
    getattr(method, "__func__", method).is_tool = True  # of a static or class method, that may stand above or below
    return method


class Environment:
    """What an episode's model talks to. Derive from it, and write `reset` and `step`, or give it `tools`."""

    instant: ClassVar[bool] = False
    """Whether `step` answers within a millisecond: then it is asked in the same step of the engine, in no thread."""
    replayable: ClassVar[bool] = True
    """Whether the same row, seed and replies give the same answers: then an interrupted episode goes on. Else no step
    leaves it to the next one, and where its worker is lost it has failed."""
    tools: ClassVar[Sequence[Callable]] = ()
    """Functions with type hints and docstrings that `step` calls, or objects of the shape of verl's BaseTool."""
    tool_methods: ClassVar[tuple[str, ...]] = ()
    """Names of its methods below `@tool`, which are tools too; set as the class is made."""
    bound: Mapping[str, FunctionTool | ClassTool] | None = None
    """By name, the tools that the row has, with what it gives them; set by the worker."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        methods = [item for base in reversed(cls.__mro__) for item in vars(base).items()]  # of all that it derives from
        marked = (name for name, it in methods if getattr(getattr(it, "__func__", it), "is_tool", False))
        cls.tool_methods = tuple(dict.fromkeys(marked))

    @classmethod
    def described_tools(cls) -> list[Any]:
        """All its tools, as far as they can be described without an episode: methods are bound to the class."""
        return [*cls.tools, *(inspect.getattr_static(cls, name).__get__(cls) for name in cls.tool_methods)]

    def bind_tools(self, extra_info: Mapping[str, Any]) -> None:
        """Gives the episode the tools that its row has. Raises TypeError for fields of another shape."""
        self.bound = bind([*self.tools, *(getattr(self, name) for name in self.tool_methods)], extra_info)

    def setup(self) -> None:
        """Once per worker process, of an instance that answers no episode: what all share, kept on the class."""

    def reset(self, row: Row, seed: int) -> Observation | None:
        """Before the first turn; messages are appended to the prompt. `seed` is equal for all episodes of a prompt."""

    async def step(self, reply: Reply) -> Observation:
        """After every turn: by default the answers of the tools that it calls, at once; done where it calls none."""
        if not reply.calls:
            return Observation(done=True)
        answers = await asyncio.gather(*(self.call(call) for call in reply.calls))
        names = (call.name for call in reply.calls)
        return Observation(
            messages=[
                {"role": "tool", "name": name, "content": text} for name, text in zip(names, answers, strict=True)
            ]
        )

    def score(self) -> float | Mapping[str, Any] | None:
        """After the last turn: a score as a reward function gives it; None: the reward function scores. No `step` came
        before it where the first turn was cut off."""
        return None

    def close(self) -> None:
        """At the episode's end, unless its worker was lost before: what it holds is given back."""

    async def call(self, call: Call) -> str:
        """What a tool answers, as text. What goes wrong is text too: the model is told."""
        calls = CALLS.get()
        if self.bound is None:
            self.bind_tools({})
        known = self.bound
        error = call.error
        if error is None and call.name not in known:
            error = f"there is no tool {call.name!r}; there are {', '.join(known) or 'none'}"
        if error is None:
            try:
                known[call.name].check(call.arguments)
            except TypeError as problem:
                error = f"{call.name}: {problem}"
        if error is not None:
            calls.bad += call.count
            return f"error: {error}"
        try:
            return as_text(await known[call.name].answer(call.arguments, calls))
        except OverTime:
            calls.timeouts += 1
            return f"error: {call.name} timed out after {calls.timeout_s:g} s"
        except Exception as problem:
            calls.errors += 1
            calls.notes.append(problem)
            text = type(problem).__name__
            with suppress(Exception):  # of its own __str__
                text += f": {str(problem)[:300]}"
            return f"error: {call.name}: {text}"


class OverTime(TimeoutError):
    """The time limit of --turns.timeout-s is over; what the user's code raises itself is a TimeoutError alone."""


class Calls:
    """How the tools of a turn are run, and what became of it."""

    timeout_s = math.inf

    def __init__(self) -> None:
        self.bad = self.errors = self.timeouts = 0
        self.notes: list[Exception] = []
        """What tools raised."""
        self.measured: dict[str, float] = {}
        """Sums of what they measured."""
        self.given: dict[str, list[float]] = {"tool_rewards": [], "turn_scores": []}
        """What a reward function is told of classes of verl's shapes: each number, in order."""

    async def run(self, function: Callable, *args: Any) -> Any:
        """The result of a function, sync or async. Raises what it raises, and OverTime."""
        result = function(*args)
        return await result if inspect.isawaitable(result) else result

    def measure(self, name: str, value: Any) -> None:
        """Adds to a sum, where the value is a finite number."""
        if isinstance(value, int | float) and math.isfinite(value):
            self.measured[name] = self.measured.get(name, 0.0) + float(value)

    def measure_given(self, name: str, value: Any) -> None:
        """A tool_reward or turn_score: measured, and kept for the reward function."""
        self.measure(name, value)
        if isinstance(value, int | float) and math.isfinite(value):
            self.given[name + "s"].append(float(value))


CALLS: ContextVar[Calls] = ContextVar("calls", default=Calls())  # noqa: B039 (outside a worker nobody counts)
"""Of the turn that is being answered."""


def as_text(value: Any) -> str:
    """What a tool returned, for the model: text as it is, anything else as JSON where that can be. Raises TypeError for
    what says nothing of itself but where it lies in memory, such as a generator: that is otherwise in each run."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode(errors="backslashreplace")
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)
    if re.search(r" at 0x[0-9a-fA-F]+>", text):
        raise TypeError(f"returned {type(value).__name__}, expected text or what JSON holds")
    return text
