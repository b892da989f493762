"""What a worker makes of the user's file: environments by name, and what the trainer needs to know of them."""

import functools
import inspect
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lib.turns.environment import Environment
from lib.turns.interactions import Interaction, interaction_name, is_interaction
from lib.turns.tools import arguments_of, is_class_tool, make_tool, schema_of
from lib.workers.child import OWN_FILES, StartError, error_in_words, import_file

OWN_FILES.add(__file__)
MODULE = "turns_file"


def load_kinds(spec: dict[str, Any]) -> dict[str, type[Environment]]:
    """{name: class} of the environments in the user's file; functions and classes of tools that are named become the
    tools of one, and of those of verl's shape. Takes from `spec["kwargs"]` what classes of verl's shapes are made with.
    Raises StartError."""
    module = import_file(spec["path"], spec["source"], MODULE, what="the turns' file", flag="--turns.path")
    known = {name: it for name, it in vars(module).items() if any(is_one(it) for is_one in _KINDS)}
    names, kwargs = spec["names"], spec["kwargs"]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        own = [name for name, it in known.items() if getattr(it, "__module__", None) == MODULE and name[:1] != "_"]
        own += [f"{name}, a {type(vars(module)[name]).__name__}" for name in unknown if name in vars(module)]
        found = ", ".join(own) or "no class of Environment, no function and no class of tools"
        raise StartError(
            f"the turns' file has no such environment or tool; --turns.path {spec['path']}; found {found}, expected "
            f"{', '.join(unknown) or 'a name'}; name a class, or functions, with --turns.name"
        )
    chosen = {name: known[name] for name in names if _is_environment(known[name])}
    has_own = bool(chosen)
    if tools := tuple(known[name] for name in names if _is_tool(known[name])):
        if "tools" in chosen:
            raise StartError(
                f"two environments of one name; tools of --turns.path {spec['path']}; found a class and, beside it, "
                f"{', '.join(name for name in names if _is_tool(known[name]))}, whose environment has that name, "
                "expected each name once; give the class another one"
            )
        chosen["tools"] = type("tools", (_Tools,), {"tools": tools})
    for name, kind in chosen.items():
        if not isinstance(kind.tools, list | tuple):
            raise StartError(
                f"tools of another shape; {name}.tools of --turns.path {spec['path']}; found "
                f"{type(kind.tools).__name__}, expected a tuple; write tools = (f,), for none tools = ()"
            )
        kind.tools = [_made(tool, kwargs, spec["path"]) if inspect.isclass(tool) else tool for tool in kind.tools]
    made = {type(tool).__name__ for kind in chosen.values() for tool in kind.tools if is_class_tool(tool)}
    shared = chosen["tools"].tools if tools else ()
    for kind in [known[name] for name in names if is_interaction(known[name])]:
        _add_interaction(chosen, kind, shared, kwargs, spec["path"])
        made.add(kind.__name__)
    for name in made:
        kwargs.pop(name, None)
    if kwargs and not has_own:
        raise StartError(
            f"keyword arguments of no class; --turns.kwargs; found {', '.join(kwargs)}, expected names of classes "
            "that --turns.name names; leave them out"
        )
    return chosen


def _add_interaction(
    chosen: dict[str, type[Environment]], kind: type, tools: Sequence[Any], kwargs: dict[str, Any], path: str
) -> None:
    """Makes an environment of a class of verl's shape, by the name that rows ask for. Raises StartError."""
    name = interaction_name(kind, kwargs.get(kind.__name__, {}))
    if name in chosen:
        raise StartError(
            f"two environments of one name; {kind.__name__} of --turns.path {path}; found {name} twice, expected each "
            f'name once; give it another: --turns.kwargs \'{{"{kind.__name__}": {{"config": {{"name": ...}}}}}}\''
        )
    made = _made(kind, kwargs | {kind.__name__: _named(kind, kwargs.get(kind.__name__, {}), name)}, path)
    chosen[name] = type(name, (Interaction,), {"tools": tools, "interaction": made})


def _named(kind: type, options: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What it is made with; its config, if it takes one, has its name, as in verl."""
    takes = arguments_of(kind)
    if takes is not None and "config" not in takes:
        return dict(options)
    return {**options, "config": {**(options.get("config") or {}), "name": name}}


class _Tools(Environment):
    """The environment of tools alone; keyword arguments are those of classes beside it."""

    def __init__(self, **kwargs: Any) -> None:
        pass


def _is_environment(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Environment) and value is not Environment


def _is_tool(value: Any) -> bool:
    """Whether it is a function, also one of functools.cache, or a class of tools."""
    return inspect.isroutine(value) or (inspect.isclass(value) and is_class_tool(value))


_KINDS = (_is_environment, _is_tool, is_interaction)


def _made(kind: type, kwargs: dict[str, Any], path: str) -> Any:
    """The object of a class of verl's shape that this process has. Raises StartError."""
    try:
        return make_tool(kind, kwargs.get(kind.__name__, {}))
    except Exception as error:
        what, takes = ("a tool", "config and tool_schema") if is_class_tool(kind) else ("an interaction", "config")
        example = ", ".join(f'"{name}": {{...}}' for name in takes.split(" and "))
        raise StartError(
            f"{what} cannot be made; {kind.__name__} of --turns.path {path}; found {error_in_words(error)}, expected a "
            f"constructor that takes {takes}, or nothing; give them as --turns.kwargs "
            f"'{{\"{kind.__name__}\": {{{example}}}}}'"
        ) from error


def describe(kind: type[Environment]) -> dict[str, Any]:
    """What the trainer needs to know of an environment: its flags, and its tools as chat templates take them. Raises
    StartError for a tool that does not say what its arguments are."""
    tools = kind.described_tools()
    schemas = [_schema(tool) for tool in tools]
    names = Counter(schema["function"]["name"] for schema in schemas)
    if twice := [name for name, count in names.items() if count > 1]:
        raise StartError(
            f"two tools of one name; {kind.__name__} of --turns.path; found {', '.join(twice)} more than once, "
            "expected a name of its own for each, by which the model calls it; rename one, or leave it out"
        )
    takes = [None if is_class_tool(tool) else arguments_of(tool) for tool in tools]
    scores = kind.score is not Environment.score
    own = [it for name in ("reset", "step", "score") if (it := getattr(kind, name)) is not getattr(Environment, name)]
    own += [tool.execute if is_class_tool(tool) else tool for tool in tools]
    own += [kind.interaction.generate_response] if issubclass(kind, Interaction) else []
    return {
        "instant": kind.instant, "replayable": kind.replayable, "scores": scores, "tools": schemas,
        "in_threads": not kind.instant and not all(map(inspect.iscoroutinefunction, own)),
        "takes": {schema["function"]["name"]: it for schema, it in zip(schemas, takes, strict=True)},
        "is_user": issubclass(kind, Interaction),
    }  # fmt: skip


def _schema(tool: Any) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    name = getattr(tool, "__name__", type(tool).__name__)
    try:
        if not is_class_tool(tool):
            return get_json_schema(_named_arguments(tool))
        schema = json.loads(json.dumps(schema_of(tool)))
        if not isinstance(schema["function"]["name"], str) or not isinstance(schema["function"]["parameters"], dict):
            raise ValueError(f"its schema is {str(schema)[:200]}")
        return schema
    except StartError:
        raise
    except Exception as error:  # of transformers its own kinds, for each thing that is missing
        expected = (
            'a tool_schema {"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}'
            if is_class_tool(tool)
            else "type hints and a docstring with a line for each argument below Args:"
        )
        raise StartError(
            f"a tool does not say what it takes; {name}; found {' '.join(str(error).split())[:300]}, expected "
            f"{expected}; write them: the model reads them"
        ) from error


def _named_arguments(tool: Callable) -> Callable:
    """A function without its **NAME, which stands for no argument of that name. Raises StartError for arguments that
    cannot be given by name, as calls give all of them."""
    name, signature = tool.__name__, inspect.signature(tool)
    if any(it.kind in (it.POSITIONAL_ONLY, it.VAR_POSITIONAL) for it in signature.parameters.values()):
        raise StartError(
            f"a tool's arguments cannot be given by name; {name} of --turns.path; found {signature}, expected neither "
            "/ nor *NAME, since the model gives each by its name; take it out"
        )
    kept = {it.name: it for it in signature.parameters.values() if it.kind != it.VAR_KEYWORD}
    shown, hints = functools.wraps(tool)(lambda: None), getattr(tool, "__annotations__", {})
    shown.__signature__ = signature.replace(parameters=[*kept.values()])
    shown.__annotations__ = {name: hint for name, hint in hints.items() if name in (*kept, "return")}
    return shown
