"""The words of a command line: their options and values, and what to write instead of one that is neither."""

import difflib
import math
import re
import types
from collections.abc import Iterable, Sequence
from typing import Any, Union, get_args, get_origin

from lib.config.values import JsonObject
from lib.config.verl_keys import NO_CRITIC, SYNONYMS, VERL_KEYS, verl_hint
from lib.errors import UserError
from lib.secret_values import is_secret_name

MIN_LIKENESS = 0.6  # difflib's own; below it a "nearest" option is a guess, and may be a harmful one such as --force
OPTION_OF_ONE_DASH = r"(?i)-(?!(inf|infinity|nan)$)[a-z]"  # tyro takes it neither for an option nor for a value


def refuse_unknown(argv: list[str], options: dict[str, Any], known: list[str]) -> None:
    """Raises UserError that names every word that is no option of ours and no value: typing errors, verl's words."""
    problems, rest = [], []
    room, empty, in_json = 0.0, "", False  # values the last option still takes; its name while it wants one; its kind
    for word in argv:
        name, equals, _ = word.partition("=")
        if (option := normal(name)) in options:
            room = _most_values(options[option]) - bool(equals)
            empty, in_json = "" if equals or is_boolean(options[option]) else option, options[option] == JsonObject
            continue
        dashes = "--" if word.startswith("--") else "-" if re.match(OPTION_OF_ONE_DASH, word) else ""
        hint = _hint(word, known)
        if hint is None and dashes:
            near = _nearest_option(name, known)
            hint = f"nearest is {near}" if near else "no option is like it"
            spelling = f"{empty}={word}" if empty else "OPTION=VALUE"
            hint += f" (write {spelling} for a value that begins with {dashes})" if empty or not near else ""
        elif hint is None and room < 1:
            hint = verl_hint("--" + word, known)  # a sub-command of verl's, or a key without its dashes
        if hint is not None:
            problems.append(f"{name}: {hint}")
        elif room < 1:
            rest.append("..." if in_json else f"{name}=..." if equals and is_secret_name(name) else word)
        else:
            room -= 1
        room, empty = math.inf if dashes and not equals else room, ""  # an unknown option may take any number of values
    if many := len(problems) + len(rest):
        if rest:
            problems.append(f"{' '.join(rest)!r} belongs to no option (quote values that hold spaces)")
        what = f"{many} unknown options" if many > 1 else "unknown option"
        raise UserError(f"{what}; command line; {', '.join(problems)}; --help and docs/from_verl.md list the options")


def _most_values(hint: Any) -> float:
    """How many words an option of this type takes at most: `None | tuple[float, float]` takes 2."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return max(map(_most_values, parts))
    return 1 if origin is not tuple else math.inf if Ellipsis in parts else len(parts)


def _hint(word: str, known: list[str]) -> str | None:
    """What to write instead of verl's `key=value`, or of an option without its dashes; None: the word is neither."""
    name, equals, _ = word.partition("=")
    if name.startswith("--critic."):  # so begin options of ours, and keys of verl's
        has_critic = any(option.startswith("--critic.") for option in known)
        return None if has_critic else NO_CRITIC
    key = name.lstrip("+~")
    if equals and key not in VERL_KEYS and (ours := normal("--" + key)) in known:
        return f"write {ours}"
    return verl_hint(word, known)


def _nearest_option(name: str, known: list[str]) -> str:
    """The known option most like `name`, by whole name, last part, or another suite's word; empty: none is like it."""
    name = normal(name).lstrip("-")  # dashes would make all names alike
    whole = {option.lstrip("-"): option for option in known}
    last_part = {option.rpartition(".")[2].lstrip("-"): option for option in reversed(known)}
    other_words = {word: option for word, option in SYNONYMS.items() if option in known}
    last = name.rpartition(".")[2]
    candidates = [(name, whole), (last, last_part), (last, other_words)]
    scored = [(_likeness(word, key), options[key]) for word, options in candidates for key in options]
    likeness, option = max(scored, key=lambda entry: entry[0])  # of equals the first: the whole name wins
    return option if likeness >= MIN_LIKENESS else ""


def nearest_word(name: str, names: Iterable[str]) -> str:
    """`; nearest is cosine`, or nothing when none of the names is much like it."""
    near = max(names, key=lambda other: _likeness(name, other))
    return f"; nearest is {near}" if _likeness(name, near) >= MIN_LIKENESS else ""


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def normal(option: str) -> str:
    """`--optim.weight_decay` as `--optim.weight-decay`, as tyro reads it."""
    return option.replace("_", "-") if option.startswith("--") else option


def is_boolean(hint: Any) -> bool:
    """Whether an option of this type is True or False."""
    return bool in (hint, *get_args(hint))


def complete_booleans(argv: Sequence[str], options: dict[str, Any]) -> list[str]:
    """`--debug` as `--debug True`, `--debug=true` as `--debug=True`: tyro itself wants the capital word."""
    completed: list[str] = []
    booleans = {name for name, hint in options.items() if is_boolean(hint)}
    for i, word in enumerate(argv):
        option, equals, value = word.partition("=")
        previous = argv[i - 1] if i else ""
        if equals and normal(option) in booleans:
            completed.append(f"{option}={value.capitalize()}")
        elif normal(previous) in booleans and not word.startswith("--"):
            completed.append(word.capitalize())
        else:
            completed.append(word)
        is_last = i + 1 == len(argv)
        if normal(word) in booleans and (is_last or argv[i + 1].startswith("--")):
            completed.append("True")
    return completed


def values_of(option: str, argv: list[str]) -> list[str]:
    """The words that follow the last mention of an option."""
    found: list[str] = []
    reading = False
    for word in argv:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            reading = normal(name) == option
            found = ([value] if equals else []) if reading else found
        elif reading:
            found.append(word)
    return found


def wants_debug(argv: Sequence[str]) -> bool:
    """What the last --debug says: asked before anything is parsed, since that may fail."""
    return values_of("--debug", complete_booleans(argv, {"--debug": bool}))[:1] == ["True"]
