"""What a row says of its tools, in verl's fields of extra_info: which it has, and what they are given.

    tool_selection     [TOOL, ...]: the row has only these; none, or an empty list: all
    tools_kwargs       {TOOL: {create_kwargs: {NAME: VALUE}}}
    interaction_kwargs {name: ENVIRONMENT, and what it is given}

An object may be JSON as text, at every depth. Files of Arrow's have one type for all rows: what one row has, all others
have as null, at every depth. For workers too: the standard library alone.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

UNIFIED = ("tools_kwargs", "interaction_kwargs")


def without_nulls(extra_info: Mapping[str, Any]) -> dict[str, Any]:
    """The extra_info without what is null in these two fields, or holds nothing but nulls."""
    kept = {name: _kept(extra_info[name]) for name in UNIFIED if name in extra_info}
    return {name: kept.get(name, it) for name, it in extra_info.items() if name not in kept or kept[name] is not None}


def _kept(value: Any) -> Any:
    if isinstance(value, list):
        return [_kept(it) for it in value]
    if not isinstance(value, Mapping):
        return value
    kept = {name: it for name, entry in value.items() if (it := _kept(entry)) is not None}
    return kept if kept or not value else None


def create_kwargs(extra_info: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """{tool: what the row gives it}, of an extra_info without nulls. Raises TypeError for other shapes."""
    given = _object(extra_info.get("tools_kwargs"), "tools_kwargs")
    return {
        tool: _object(_object(it, f"tools_kwargs.{tool}").get("create_kwargs"), f"tools_kwargs.{tool}.create_kwargs")
        for tool, it in given.items()
    }


def selection(extra_info: Mapping[str, Any]) -> tuple[str, ...]:
    """The tools that the row has; none: all. Raises TypeError for another shape."""
    found = extra_info.get("tool_selection")
    names = [] if found is None else [it for it in found if it is not None] if isinstance(found, list) else [found]
    if not isinstance(found, list | None) or not all(isinstance(it, str) for it in names):
        raise TypeError(f"tool_selection {_short(found)}, expected a list of names")
    return tuple(dict.fromkeys(names))


def interaction(extra_info: Mapping[str, Any]) -> Any:
    """The name of the environment in interaction_kwargs; None: it names none. Raises TypeError for another shape."""
    return interaction_kwargs(extra_info).get("name")


def interaction_kwargs(extra_info: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the row gives an environment of verl's shape. Raises TypeError for another shape."""
    return _object(extra_info.get("interaction_kwargs"), "interaction_kwargs")


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not isinstance(value, Mapping | None):
        raise TypeError(f"{name} {_short(value)}, expected an object")
    return value or {}


def _short(value: Any) -> str:
    return repr(value)[:80]
