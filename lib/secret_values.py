"""What is secret, and one function that blanks it in whatever a run writes or says.

Secret are environment variables and keys of free-form options (--reward.kwargs) by a whole word of their name, and
passwords in URLs. This guards against accidents; code that runs as the user reads what the user can read.
"""

import dataclasses
import html
import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from lib.errors import UserError

T = TypeVar("T")

WORDS = {
    *("KEY", "KEYS", "TOKEN", "SECRET", "PASS", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS", "DSN", "AUTH"),
    "PWD",  # beside another word
}
OPEN = {"PWD", "OLDPWD", "SSH_AUTH_SOCK", "GPG_KEY"}
"""Names that are none of a secret."""
MIN_LEN = 8  # characters
URL_PASSWORD = re.compile(r"""(://[^\s/:@"']*):[^\s/"']+@""")
PAIR = re.compile(r"""(["'])([\w.-]+)\1(\s*:\s*)(["'])(.*?)\4""")
BLANK = re.compile(r"\[([\w.-]+)\]")

_of_options: dict[str, str] = {}  # value -> key, as `remember` has found them; a key may stand in several objects


@cache
def is_secret_name(name: str) -> bool:
    """Whether a word of the name, as in API_KEY, api-key or apiKey, says so."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    found = WORDS.intersection(word.upper() for word in words)
    return name not in OPEN and bool(found) and (found != {"PWD"} or len(words) > 1)


def secret_variables() -> dict[str, str]:
    """The environment's secrets."""
    return {name: value for name, value in os.environ.items() if is_secret_name(name) and _can_be_secret(value)}


def environment_without_secrets(handed_over: Sequence[str]) -> dict[str, str]:
    """What a reward worker gets of this process's environment. Raises UserError for a name that is handed over and not
    set."""
    if missing := [name for name in handed_over if name not in os.environ]:
        raise UserError(
            f"no such environment variable; --reward.env {' '.join(handed_over)}; found no {', '.join(missing)} on "
            "this node, expected each to be set; export it, or leave it out"
        )
    withheld = secret_variables().keys() - set(handed_over)
    own = {name: value for name, value in os.environ.items() if name not in withheld}
    return {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"} | own  # hash("x") alike in all workers


def remember(config: T) -> T:
    """The same config; from now on `blank` knows the secrets in its free-form objects."""
    if dataclasses.is_dataclass(config):
        for field in dataclasses.fields(config):
            remember(getattr(config, field.name))
    elif isinstance(config, Mapping):
        _walk(config, None, lambda name, text: _of_options.update({text: name}))
    return config


def blank_keys(value: Any) -> Any:
    """A free-form object with the texts under secret keys blanked, however deep."""
    return _walk(value, None, lambda name, text: f"[{name}]")


def _walk(value: Any, secret: str | None, change: Any) -> Any:
    """`change(key, text)` in place of each text under a secret key."""
    if isinstance(value, Mapping):
        return {key: _walk(entry, key if is_secret_name(str(key)) else secret, change) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_walk(entry, secret, change) for entry in value]
    return change(secret, value) if secret and isinstance(value, str) and _can_be_secret(value) else value


def _can_be_secret(value: str) -> bool:
    """A path is no secret: what its file holds is. Shorter values would blank ordinary words."""
    return len(value) >= MIN_LEN and not os.path.exists(value)


def blank(value: Any) -> Any:
    """A text, or an object as JSON has them, with the values of secrets as [NAME], in its keys too."""
    found = _of_options | {secret: name for name, secret in secret_variables().items()}
    forms = [(form, name) for secret, name in found.items() for form in _forms(secret)]
    return _blank(value, sorted(forms, key=lambda entry: -len(entry[0])))  # one may be part of another


def _forms(secret: str) -> set[str]:
    """As it is, on one line, and as Python, JSON and HTML write it."""
    quoted = (repr(secret), json.dumps(secret), json.dumps(secret, ensure_ascii=False))
    return {secret, html.escape(secret), " ".join(secret.split()), *(text[1:-1] for text in quoted)}


def _blank(value: Any, forms: list[tuple[str, str]]) -> Any:
    if isinstance(value, str):
        for form, name in forms:
            value = value.replace(form, f"[{name}]")
        return URL_PASSWORD.sub(r"\1:[password]@", value) if "://" in value else value
    if isinstance(value, Mapping):
        return {_blank(key, forms): _blank(entry, forms) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_blank(entry, forms) for entry in value]
    return value


def blank_message(text: str) -> str:
    """As `blank`, of a message that may quote an object which could not be read: {"api_key": "..."} too."""

    def without(pair: re.Match[str]) -> str:
        quote, name, colon, other, _ = pair.groups()
        return f"{quote}{name}{quote}{colon}{other}[{name}]{other}" if is_secret_name(name) else pair[0]

    return PAIR.sub(without, blank(text))


def no_json_in_words(text: str) -> str:
    """What a text that holds no JSON object is; never the text: where a shell took its quotes away, no key is found."""
    try:
        return f"JSON of another kind ({type(json.loads(text)).__name__})"
    except ValueError as error:
        hint = " (quote all of it: '{\"name\": ...}')" if '"' not in text else ""
        return text and f"{len(text)} characters that are no JSON, {error}{hint}"


def equal_but_for_blanks(saved: Any, value: Any) -> bool:
    """Whether a saved value is this one, whatever stood where it is blanked."""
    if isinstance(saved, list) and isinstance(value, list):
        return len(saved) == len(value) and all(map(equal_but_for_blanks, saved, value))
    if isinstance(saved, Mapping) and isinstance(value, Mapping):
        return saved.keys() == value.keys() and all(equal_but_for_blanks(saved[key], value[key]) for key in saved)
    if not (isinstance(saved, str) and isinstance(value, str)):
        return saved == value
    parts, end = [], 0
    for found in BLANK.finditer(saved):
        if is_secret_name(found[1]):
            parts += [re.escape(saved[end : found.start()]), ".*"]
            end = found.end()
    return re.fullmatch("".join((*parts, re.escape(saved[end:]))), value, re.DOTALL) is not None


def has_blanks(saved: Any) -> bool:
    """Whether a text in it was blanked."""
    if isinstance(saved, list | tuple):
        return any(map(has_blanks, saved))
    if isinstance(saved, Mapping):
        return any(map(has_blanks, saved.values()))
    return isinstance(saved, str) and any(is_secret_name(found[1]) for found in BLANK.finditer(saved))


class BlankedText(io.TextIOWrapper):
    """A stream of text without secrets, as far as each is written at once."""

    def write(self, text: str) -> int:
        super().write(blank(text))
        return len(text)
