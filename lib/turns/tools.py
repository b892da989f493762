"""The tools of an episode: functions, and classes of the shape of verl's BaseTool. For workers: the standard library
alone.

    class Retriever:
        def __init__(self, config, tool_schema): ...            what --turns.kwargs '{"Retriever": {...}}' gives
        def get_openai_tool_schema(self): ...                   or the attribute tool_schema
        def create(self, instance_id=None, **kwargs): ...       with tools_kwargs.NAME.create_kwargs of the row
        def execute(self, instance_id, parameters): ...         what the model is told, reward, metrics
        def release(self, instance_id): ...
Each of the last three may be async. A worker process has one object of the class. `create` is called once per episode,
before the tool is used first, and `release` at its end; verl calls both around every call. As in verl, rewards of tools
are measured, told to the reward function and added to no reward; `calc_reward` is never called.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from lib.turns.row_tools import create_kwargs, selection


class Runner(Protocol):
    """How functions are run in time, and where they report."""

    async def run(self, function: Callable, *args: Any) -> Any:
        """What the function returns, sync or async. Raises what it raises, and OverTime."""

    def measure(self, name: str, value: Any) -> None:
        """Adds to a sum of the turn's, where the value is a finite number."""

    def measure_given(self, name: str, value: Any) -> None:
        """The same, and the reward function is told."""


class FunctionTool:
    """A function, with arguments that the row gives."""

    def __init__(self, function: Callable, given: Mapping[str, Any]) -> None:
        takes = arguments_of(function)
        self.function = function
        self.given = {name: it for name, it in given.items() if takes is None or name in takes}

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raises TypeError for what the function does not take."""
        inspect.signature(self.function).bind(**{**arguments, **self.given})

    async def answer(self, arguments: Mapping[str, Any], runner: Runner) -> Any:
        """What it returns."""
        return await runner.run(partial(self.function, **{**arguments, **self.given}))

    async def release(self, runner: Runner) -> None:
        """Nothing is kept."""


class ClassTool:
    """An instance that an object of verl's shape keeps for an episode."""

    def __init__(self, tool: Any, given: Mapping[str, Any]) -> None:
        self.tool, self.given = tool, given
        self._lock = asyncio.Lock()  # calls of one turn run side by side
        self._instances: list[Any] = []  # one, once it is created

    def check(self, arguments: Mapping[str, Any]) -> None:
        """It checks its arguments itself."""

    async def answer(self, arguments: Mapping[str, Any], runner: Runner) -> Any:
        """The text of what `execute` returns. Raises ValueError for a picture or video."""
        value = await runner.run(partial(self._create_and_execute, dict(arguments), runner))
        response, reward, metrics = (*value, None, None)[:3] if isinstance(value, tuple) else (value, None, None)
        if getattr(response, "image", None) or getattr(response, "video", None):
            raise ValueError("it returned a picture or video, expected text")
        runner.measure_given("tool_reward", reward)
        for name, number in metrics.items() if isinstance(metrics, Mapping) else ():
            runner.measure(str(name), number)
        return (response.text or "") if hasattr(response, "text") else response

    async def release(self, runner: Runner) -> None:
        """Ends the instance, if there is one."""
        async with self._lock:
            while self._instances:
                await runner.run(partial(self.tool.release, self._instances.pop()))

    async def _create_and_execute(self, arguments: dict[str, Any], runner: Runner) -> Any:
        async with self._lock:
            if not self._instances:
                made = await runner.run(partial(self.tool.create, **self._for_create()))
                self._instances.append(made[0] if isinstance(made, tuple) else made)
        return await runner.run(partial(self.tool.execute, self._instances[0], arguments))

    def _for_create(self) -> dict[str, Any]:
        """What the row gives: each argument by its name, and all of them as `create_kwargs`, as verl does."""
        takes = arguments_of(self.tool.create)
        if takes is None:
            return {**self.given, "create_kwargs": dict(self.given)}
        if "create_kwargs" in takes:
            return {**{name: it for name, it in self.given.items() if name in takes}, "create_kwargs": dict(self.given)}
        return dict(self.given)


def bind(tools: Sequence[Any], extra_info: Mapping[str, Any]) -> dict[str, FunctionTool | ClassTool]:
    """{name: tool} of a row that has these, or some of them. Raises TypeError for fields of another shape."""
    if not tools:
        return {}
    known, given = {name_of(tool): tool for tool in tools}, create_kwargs(extra_info)
    names = [name for name in selection(extra_info) or known if name in known]
    return {
        name: (ClassTool if is_class_tool(known[name]) else FunctionTool)(known[name], given.get(name, {}))
        for name in names
    }


# ---- What a tool says of itself ----


def is_class_tool(tool: Any) -> bool:
    """Whether it is a class of verl's shape, or an object of one."""
    return all(callable(getattr(tool, name, None)) for name in ("create", "execute", "release"))


def arguments_of(function: Callable) -> list[str] | None:
    """The arguments that can be given by name; None: any."""
    parameters = inspect.signature(function).parameters.values()
    if any(it.kind == it.VAR_KEYWORD for it in parameters):
        return None
    return [it.name for it in parameters if it.kind in (it.POSITIONAL_OR_KEYWORD, it.KEYWORD_ONLY)]


def make_tool(kind: type, options: Mapping[str, Any]) -> Any:
    """An object of a class of verl's shape, with what its constructor takes of config and tool_schema."""
    takes = arguments_of(kind)
    usual = {name: it for name, it in (("config", {}), ("tool_schema", None)) if takes is None or name in takes}
    return kind(**{name: Schema(it) if isinstance(it, dict) else it for name, it in {**usual, **options}.items()})


class Schema(dict):
    """A JSON object whose entries are attributes too, as verl's tools read a schema."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return Schema(self[name]) if isinstance(self[name], dict) else self[name]

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """As pydantic's models, which verl's are."""
        return dict(self)


def schema_of(tool: Any) -> Any:
    """What an object of verl's shape says of itself, for chat templates."""
    schema = getattr(tool, "tool_schema", None)
    schema = tool.get_openai_tool_schema() if schema is None else schema
    dump = getattr(schema, "model_dump", None)
    return schema if dump is None else dump(exclude_unset=True, exclude_none=True)


def name_of(tool: Any) -> str:
    """By which the model calls it."""
    return schema_of(tool)["function"]["name"] if is_class_tool(tool) else tool.__name__
