"""The words of a verl command as Hydra reads them: `key=value`, `+key=value`, `++key=value`, `~key`, quotes, lists."""

import json
import re
import shlex
from collections.abc import Sequence
from typing import Any

START = "verl.trainer.main_ppo"
OWN_ROOT = re.compile(r"[+~]*(actor_rollout_ref|algorithm|trainer)\.")  # of these, ours have no option
KEY = re.compile(r"(\+{0,2}[A-Za-z_][\w.@/-]*=.*|~[A-Za-z_][\w.]*(=.*)?)", re.DOTALL)
YAML_OPTION = re.compile(r"(--config-(name|path|dir)|-cn|-cp|-cd)(=.*)?")
FURTHER_WORDS = ("$@", "$*")
WORDS = {"none": None, "null": None, "true": True, "false": False}


def read_command(argv: Sequence[str]) -> dict[str, str] | None:
    """{key: value as text} of a whole verl command, `~key` with its ~; None where the words are something else.

    A command is what stood behind `python3 -m verl.trainer.main_ppo`, as the shell has split it, or all of it in one
    pair of quotes: then what the shell would have put in (`$HOME`) is left as it is. Of equal keys the last counts.
    """
    words = list(argv)
    if len(words) == 1 and len(pasted := _split(words[0])) > 1:
        words = pasted
    words = words[words.index(START) + 1 :] if START in words else words
    given: dict[str, str] = {}
    rest = iter(word for word in words if word.strip() and word not in FURTHER_WORDS)
    for word in rest:
        if option := YAML_OPTION.fullmatch(word):
            given[option[1]] = option[3][1:] if option[3] else next(rest, "")
        elif KEY.fullmatch(word):
            key, _, value = word.partition("=")
            given[key.lstrip("+")] = value
        else:
            return None
    return given if len(given) > 1 and any(map(OWN_ROOT.match, given)) else None


def _split(text: str) -> list[str]:
    """The words of a text as a shell splits it, without putting in any variable; one where it cannot."""
    try:
        return shlex.split(text.replace("\\\n", " "))
    except ValueError:  # a quote that does not end
        return [text]


def unquoted(text: str) -> str:
    """The text without the quotes around all of it."""
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def entries(text: str) -> list[str]:
    """The entries of a list: `["console", "wandb"]`, `[console,wandb]`; a value alone is a list of one."""
    text = unquoted(text)
    if text.startswith("[") and text.endswith("]"):
        return [unquoted(entry) for entry in _parts(text[1:-1])]
    return [] if text == "null" else [text]


def as_json(text: str) -> Any:
    """A value as JSON has it: `{strict: True, bounds: [1, 2]}`, `False`, `0.5`, `medium`."""
    bare = text.strip()
    if bare.startswith("{") and bare.endswith("}"):
        pairs = (part.partition(":") for part in _parts(bare[1:-1]))
        return {unquoted(key): as_json(value) for key, _, value in pairs}
    if bare.startswith("[") and bare.endswith("]"):
        return [as_json(entry) for entry in _parts(bare[1:-1])]
    if bare.lower() in WORDS:
        return WORDS[bare.lower()]
    try:
        return json.loads(bare)
    except ValueError:
        return unquoted(bare)


def _parts(text: str) -> list[str]:
    """What stands between the commas that are inside neither quotes nor brackets."""
    parts, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        else:
            depth += (sign in "[{") - (sign in "]}")
        if sign == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts if part.strip()]
