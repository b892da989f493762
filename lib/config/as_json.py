"""A config as JSON, and its hash."""

import dataclasses
import hashlib
import inspect
import json
import math
import os
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lib.errors import LockstepError
from lib.secret_values import blank_keys


def to_json(config: Any) -> dict[str, Any]:
    """The config as nested dicts that `json` can write: tuples as lists, functions as "file:name", inf as "inf".

    An object in a plug-in field becomes {"name": its class, **its fields}; secrets in free-form objects are blanked.
    """
    fields = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        fields[field.name] = _to_json(value)
        if "plug_ins" in field.metadata and dataclasses.is_dataclass(value):
            fields[field.name] = {"name": type(value).__name__, **fields[field.name]}
    return fields


def _to_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_json(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return blank_keys({str(key): _to_json(entry) for key, entry in value.items()})
    if isinstance(value, list | tuple):
        return [_to_json(entry) for entry in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, types.FunctionType | type):
        return f"{os.path.relpath(inspect.getfile(value))}:{value.__qualname__}"
    raise TypeError(f"a config holds {value!r}, which has no JSON form")


def defaults_of(config: Any) -> dict[str, Any]:
    """The JSON of a config of this class that sets nothing; empty where there is none, as of a recipe's own class."""
    try:
        return to_json(type(config)())
    except (TypeError, ValueError, LockstepError):
        return {}


def config_hash(config: Any) -> str:
    """16 hexadecimal digits, equal for equal configs: ranks compare it to find out that they were started alike."""
    text = json.dumps(to_json(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
