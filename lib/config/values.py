"""What options hold: JSON, paths that are looked at, and numbers that a message proposes."""

import json
import math
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from lib.errors import UserError


def _read_json_object(words: list[str]) -> dict[str, Any]:
    value = json.loads(words[0])
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


JsonObject = Annotated[
    dict[str, Any],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=_read_json_object,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [json.dumps(value)],
    ),
]
"""Type of a field written as JSON on the command line: `--data.chat-template-kwargs '{"enable_thinking": false}'`."""


def resolve_path(path: str, option: str) -> Path:
    """The absolute path that an option names, `~` expanded, whether or not it is there.

    Raises UserError where it cannot be looked at (too long, a loop of links, no permission, no such home), and for a
    folder that may not be read.
    """
    try:
        absolute = Path(path).expanduser().absolute()
        is_folder = stat.S_ISDIR(absolute.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return absolute
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"{option} cannot be opened; {path}; found {error}; give another path") from error
    if is_folder and not os.access(absolute, os.R_OK | os.X_OK):
        raise UserError(f"{option} may not be read; {absolute}; found no permission; change it, or the folder")
    return absolute


def nearest_divisors(total: int, wanted: int, *, count: int = 3) -> list[int]:
    """Up to `count` divisors of `total` nearest to `wanted`, ascending: 128, 96 -> [32, 64, 128]."""
    small = [d for d in range(1, math.isqrt(total) + 1) if total % d == 0]
    divisors = sorted({*small, *(total // d for d in small)})
    return sorted(sorted(divisors, key=lambda d: abs(d - wanted))[:count])


def either(values: Sequence[Any]) -> str:
    """[32, 64, 128] as "32, 64 or 128"."""
    words = [str(value) for value in values]
    return " or ".join(part for part in (", ".join(words[:-1]), words[-1]) if part) if words else "none"
