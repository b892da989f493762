"""verl's multi-turn rollouts as our section turns: the limits, and the tools and interactions that its files name."""

import ast
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from lib.config.verl_conversion import Conversion
from lib.config.verl_yaml import read_text, read_yaml
from lib.secret_values import remember

ROLLOUT = "actor_rollout_ref.rollout."
TURNS = ROLLOUT + "multi_turn."
TOOLS, FUNCTIONS, INTERACTIONS = (
    TURNS + key for key in ("tool_config_path", "function_tool_path", "interaction_config_path")
)
ASSISTANT, USER = TURNS + "max_assistant_turns", TURNS + "max_user_turns"
CALLS, LENGTH, FORMAT = (TURNS + key for key in ("max_parallel_calls", "max_tool_response_length", "format"))
FORMATS = {"hermes": "hermes", "qwen": "hermes", "qwen25": "hermes", "qwen3_coder": "qwen3-coder"}
CHARACTERS = 4  # of a token, about
FILE = "verl_turns.py"
"""Which the printed command writes: it imports the classes that verl's YAML files name."""


def turns(conversion: Conversion) -> None:
    """What answers the model, and its limits; without tools and interactions verl's episodes are one turn."""
    sources = [key for key in (TOOLS, FUNCTIONS, INTERACTIONS) if conversion.value(key) != "null"]
    if sources:
        (_functions if FUNCTIONS in sources else _classes)(conversion, sources)
        _limits(conversion, has_tools=sources != [INTERACTIONS])
        conversion.converted.update({TURNS + "enable"} & conversion.given.keys())
        conversion.notes += [
            "verl gives rows without agent_name one turn, unless default_agent_loop is tool_agent; here all but those "
            "with agent_name single_turn_agent are answered."
        ]
    keys = (TURNS + "enable", TOOLS, FUNCTIONS, INTERACTIONS, ASSISTANT, USER, CALLS, LENGTH, FORMAT)
    conversion.drop("without tools and interactions an episode is one turn, in verl too", *keys)


def _limits(conversion: Conversion, *, has_tools: bool) -> None:
    """verl's user answers each turn but the last; its null is no limit, which as many turns as tokens are."""
    tokens = conversion.value("data.max_response_length")
    assistant, user = conversion.number(ASSISTANT), conversion.number(USER)
    limits = [int(limit) + more for limit, more in ((assistant, 0), (user, 1)) if limit]
    conversion.put("--turns.max-turns", str(min(limits)) if limits else tokens, ASSISTANT, USER)
    if not has_tools:
        conversion.put("--turns.max-observation-len", tokens)  # verl cuts what tools say, and nobody else
        conversion.drop("an interaction calls no tool", CALLS, LENGTH, FORMAT)
        return
    calls, length = conversion.number(CALLS) or 1, conversion.number(LENGTH) or 0
    conversion.put("--turns.max-calls", str(int(calls)), CALLS)
    most = max(1, math.ceil(calls * length / CHARACTERS))
    conversion.put("--turns.max-observation-len", str(most), LENGTH)
    conversion.notes.append(
        f"verl cuts what each tool says to {length:g} characters; ours all that a turn's tools say to {most} tokens "
        "(--turns.max-observation-len)."
    )
    name = conversion.value(FORMAT)
    if name not in FORMATS:
        conversion.refuse(FORMAT, f"no --turns.format of that name; there are {', '.join(FORMATS)}")
    conversion.put("--turns.format", FORMATS.get(name, name), FORMAT)


def _functions(conversion: Conversion, sources: list[str]) -> None:
    """The functions of a file that verl's decorator marks."""
    path = conversion.value(FUNCTIONS)
    if len(sources) > 1:
        conversion.refuse(FUNCTIONS, f"tools of several files: {_by_hand('imports all of them')}")
        return
    try:
        names = _decorated(ast.parse(read_text(path)))
    except (SyntaxError, ValueError) as error:
        conversion.refuse(FUNCTIONS, f"{error}: mend it, or {_by_hand('has the functions')}")
        return
    conversion.put("--turns.path", path, FUNCTIONS)
    conversion.put("--turns.name", names, FUNCTIONS)


def _decorated(tree: ast.Module) -> list[str]:
    """Raises ValueError where there is none, or one whose decorator has arguments: another name, or a schema."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    marks = [(node.name, ast.unparse(mark)) for node in functions for mark in node.decorator_list]
    marks = [(name, mark) for name, mark in marks if re.match(r"(\w+\.)*function_tool\b", mark)]
    if not marks or any(mark.endswith(")") and not mark.endswith("()") for _, mark in marks):
        raise ValueError("expected functions below @function_tool, without arguments of its own")
    return [name for name, _ in marks]


def _classes(conversion: Conversion, sources: list[str]) -> None:
    """The classes of both YAML files, in a file that imports them, and what each is made with."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for key in sources:
        try:
            content = read_yaml(conversion.value(key))
            for module, name, options in _entries(content, "tools" if key == TOOLS else "interaction"):
                if name in found:
                    raise ValueError(f"two of its entries have a class {name}: derive one of another name")
                found[name] = module, options
        except ValueError as error:
            conversion.refuse(key, f"{error}: mend it, or {_by_hand('imports its classes')}")
            return
    kwargs = remember({name: options for name, (_, options) in found.items()})
    # As text a $ of JSON is no variable of the shell's.
    conversion.put("--turns.kwargs", json.dumps(kwargs).replace("$", "\\u0024"), *sources)
    conversion.put("--turns.path", FILE, *sources)
    conversion.put("--turns.name", [*found], *sources)
    lines = [f"from {module} import {name}" for name, (module, _) in found.items()]
    conversion.before.append(f"printf '%s\\n' {' '.join(map(shlex.quote, lines))} > {FILE}")
    modules = ", ".join(dict.fromkeys(module for module, _ in found.values()))
    conversion.notes.append(f"{FILE} imports {modules}: installed, or below the folder where the run starts.")


def _entries(content: Mapping[str, Any], field: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Module, class, and what it is made with, of each tool or interaction. Raises ValueError."""
    entries = content.get(field)
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries or [None]):
        raise ValueError(f"it has no list {field}, of objects with class_name")
    for entry in entries:
        module, _, name = str(entry.get("class_name")).rpartition(".")
        if not re.fullmatch(r"[A-Za-z_][\w.]*", module) or not name.isidentifier():
            raise ValueError(f"class_name is {str(entry.get('class_name'))[:80]!r}, expected module.Class")
        config = dict(entry.get("config") or {})
        if field == "tools":
            if (kind := config.get("type", "native")) != "native":
                raise ValueError(f"the tool {name} is of the type {kind}, expected native")
            yield module, name, {"config": config, "tool_schema": entry.get("tool_schema")}
        else:  # a name in its config counts for nothing in verl
            named = {"name": entry["name"]} if entry.get("name") else {}
            yield module, name, {"config": {key: it for key, it in config.items() if key != "name"} | named}


def _by_hand(what: str) -> str:
    return (
        f"leave it out, write a file that {what}, and give our command --turns.path FILE --turns.name NAME, and "
        '--turns.kwargs \'{"NAME": {"config": {...}, "tool_schema": {...}}}\' for a class'
    )
