"""The YAML files that a verl command names: its own configuration (--config-name), read as if its keys stood in the
command, and what other subjects read."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lib.config.verl_conversion import Conversion
from lib.config.verl_words import unquoted

FOLDERS = ("--config-path", "-cp", "--config-dir", "-cd")
NAMES = ("--config-name", "-cn")
OF_VERL = ["ppo_trainer", "_self_"]
"""The list `defaults` of a YAML whose keys stand over verl's own."""


def own_yaml(conversion: Conversion) -> None:
    """A YAML of one's own over verl's, whose keys count where the command has not the same; verl's own one for FSDP
    holds verl's defaults."""
    keys = [key for key in conversion.given if key.startswith("-")]
    names, folders = ([key for key in keys if key in of] for of in (NAMES, FOLDERS))
    name = unquoted(conversion.given[names[-1]]).removesuffix(".yaml") if names else "ppo_trainer"
    if name == "ppo_trainer":
        conversion.drop("not needed: there is no YAML, and verl's own holds its defaults", *keys)
        return
    folder = unquoted(conversion.given[folders[0]]) if len(folders) == 1 else ""
    path, key = os.path.join(folder, name + ".yaml"), names[-1]
    if not folder or (folders[0] in FOLDERS[:2] and not os.path.isabs(_expanded(folder))):
        _refuse_unread(conversion, key, "its folder is not said: give it whole, as one --config-path=/...")
        return
    try:
        content = read_yaml(path)
        if content.get("defaults") != OF_VERL:
            raise ValueError(f"its defaults are {content.get('defaults')}, expected {OF_VERL}")
    except ValueError as error:
        _refuse_unread(conversion, key, f"{path}: {error}")
        return
    found = dict(_leaves({name: it for name, it in content.items() if name != "defaults"}, ""))
    conversion.given = found | conversion.given
    conversion.drop(f"not needed: the {len(found)} keys of {path} are read as if they stood in the command", *keys)


def _refuse_unread(conversion: Conversion, key: str, why: str) -> None:
    conversion.refuse(
        key,
        f"a YAML may hold keys that change what is learned, and this one is not read ({why}): mend that, or write them "
        "into the command, and leave it out",
    )


def _leaves(content: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """{key: value as a command has it} of nested keys."""
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else "null" if value is None else json.dumps(value)
            yield f"{prefix}{name}", text


def read_yaml(path: str) -> Mapping[str, Any]:
    """What a file holds, whose path may have variables of the environment. Raises ValueError."""
    import yaml

    try:
        content = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise ValueError(f"it is no YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(content, Mapping):
        raise ValueError("it holds no keys")
    if "${" in json.dumps(content, default=str):
        raise ValueError("it refers to other keys, ${...}: write their values")
    return content


def read_text(path: str) -> str:
    """A file's text, whose path may have variables of the environment. Raises ValueError."""
    file = Path(_expanded(unquoted(path)))
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        unset = ": a variable of its path is not set here" if "$" in str(file) else ""
        raise ValueError(f"it cannot be read ({getattr(error, 'strerror', None) or error}){unset}") from None


def _expanded(path: str) -> str:
    return os.path.expanduser(os.path.expandvars(path))
