"""`--help` and `--help SECTION`: every option with its sentence and default, in lines that fit the terminal."""

import ast
import dataclasses
import inspect
import json
import os
import re
import shutil
import sys
import textwrap
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from lib.config.values import JsonObject
from lib.config.verl_keys import SYNONYMS
from lib.config.words import nearest_word, normal
from lib.errors import UserError
from lib.secret_values import blank

FIRST = ("model", "data")
"""Sections that come first, since a run needs them."""
GENERAL = "run"
"""Section of the options that have none."""
MAX_WIDTH = 100  # columns; longer lines are tiring to read


@dataclasses.dataclass(frozen=True)
class Option:
    """What help says of an option."""

    name: str
    values: str
    text: str
    default: str


@dataclasses.dataclass(frozen=True)
class Section:
    """The options of a section, below the first sentence of its dataclass."""

    name: str
    text: str
    options: Sequence[Option]


def wanted_section(argv: Sequence[str]) -> str | None:
    """What `--help` or `-h` asks for: a section's name, "" for everything, None without it."""
    for place, word in enumerate(argv):
        flag, _, section = word.partition("=")
        if flag in ("--help", "-h"):
            following = argv[place + 1 : place + 2]
            return section or next((after for after in following if not after.startswith("-")), "")
    return None


def help_text(config: Any, plug_ins: Mapping[str, dataclasses.Field], wanted: str, *, width: int | None = None) -> str:
    """The help of a config's options: of all, of a section, or of those whose names begin like `wanted`.

    `width`: columns, the terminal's unless given. Raises UserError for what is neither a section nor an option.
    """
    width = min(MAX_WIDTH, width or shutil.get_terminal_size().columns) - 1  # some terminals wrap a full line
    sections = _sections(config, plug_ins)
    names = [section.name for section in sections]
    prefix = normal(f"--{wanted.lstrip('-')}")
    chosen = [section for section in sections if not wanted or f"--{section.name}" == prefix]
    if not chosen:
        found = [
            dataclasses.replace(section, options=[
                option for option in section.options if option.name == prefix or option.name.startswith(f"{prefix}.")
            ])
            for section in sections
        ]  # fmt: skip
        chosen = [section for section in found if section.options]
    if not chosen:
        near = nearest_word(prefix[2:], names) or _options_with(prefix[2:], sections)
        raise UserError(
            f"no section of options is called {wanted!r}; --help {wanted}; expected one of {', '.join(names)}, or an "
            f"option{near}; see --help"
        )
    parts = [] if wanted else [_head(config, names, width)]
    return "\n\n".join([*parts, *(_paragraphs(section, width) for section in chosen)])


def _head(config: Any, names: Sequence[str], width: int) -> str:
    program = os.path.basename(sys.argv[0])
    lines = [
        f"usage: {program} [--help [SECTION]] [--OPTION VALUE ...]",
        "",
        *_fill(_first_paragraph(config), width),
        "",
        *_fill("A bare True/False option means True; the last of equal options counts.", width),
        *_fill(f"--help SECTION shows one of: {', '.join(names)}", width),
    ]
    return "\n".join(lines)


def _paragraphs(section: Section, width: int) -> str:
    lines = _fill(f"{section.name.upper()}: {section.text}" if section.text else section.name.upper(), width)
    for option in section.options:
        lines += _fill(f"{option.name} {option.values}", width, indent=2, more=10)
        lines += _fill(f"{option.text} (default: {option.default})".strip(), width, indent=6)
    return "\n".join(lines)


def _fill(text: str, width: int, *, indent: int = 0, more: int | None = None) -> list[str]:
    """The text in lines that fit; no word is broken."""
    rest = " " * (indent if more is None else more)
    return textwrap.wrap(
        text, width, initial_indent=" " * indent, subsequent_indent=rest, break_on_hyphens=False, break_long_words=False
    )


def _sections(config: Any, plug_ins: Mapping[str, dataclasses.Field]) -> list[Section]:
    """Every section with options, those of `FIRST` first, then those without a section of their own."""
    own: list[Option] = []
    sections: list[Section] = []
    texts = field_texts(type(config))
    for field, hint in _fields(config):
        value, flag = getattr(config, field.name), f"--{field.name.replace('_', '-')}"
        options = []
        if flag in plug_ins:
            table = plug_ins[flag].metadata["plug_ins"]
            named = (name for name, make in table.items() if make is type(value) or make() == value)
            default = next(named, type(value).__name__)
            options.append(Option(flag, "NAME", f"One of {', '.join(table)}; the options below are its own.", default))
        if dataclasses.is_dataclass(value):
            options += _options_of(value, flag)
            sections.append(Section(field.name.replace("_", "-"), _first_paragraph(value), options))
        elif options:
            sections.append(Section(field.name.replace("_", "-"), "", options))
        else:
            own.append(Option(flag, _values(hint), texts.get(field.name, ""), _shown(value)))
    first = sorted((section for section in sections if section.name in FIRST), key=lambda each: FIRST.index(each.name))
    general = [Section(GENERAL, "What is not of a section.", own)] if own else []
    return [*first, *general, *(section for section in sections if section.name not in FIRST)]


def _options_of(config: Any, prefix: str) -> list[Option]:
    texts, options = field_texts(type(config)), []
    for field, hint in _fields(config):
        value, name = getattr(config, field.name), f"{prefix}.{field.name.replace('_', '-')}"
        if dataclasses.is_dataclass(value):
            options += _options_of(value, name)
        else:
            options.append(Option(name, _values(hint), texts.get(field.name, ""), _shown(value)))
    return options


def _fields(config: Any) -> list[tuple[dataclasses.Field, Any]]:
    hints = get_type_hints(type(config), include_extras=True)
    fields = [(field, hints[field.name]) for field in dataclasses.fields(config)]
    return [(field, hint) for field, hint in fields if tyro.conf.Suppress not in get_args(hint)]


def field_texts(cls: type) -> dict[str, str]:
    """{field: the docstring under it, on one line} of a dataclass and those that it derives from."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        try:
            [node] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError, SyntaxError):  # typed in, or built in
            continue
        for field, below in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                texts[field.target.id] = " ".join(str(below.value.value).split()) if is_text else ""
    return texts


def _first_paragraph(config: Any) -> str:
    return " ".join((inspect.getdoc(config) or "").partition("\n\n")[0].split())


def _values(hint: Any) -> str:
    """What an option takes: INT, FLOAT FLOAT, TEXT ..., auto | off."""
    if hint == JsonObject:
        return "JSON"
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " | ".join(_values(part) for part in sorted(parts, key=lambda part: part is types.NoneType))
    if origin is Literal:
        return " | ".join(map(str, parts))
    if origin is tuple:
        return f"[{_values(parts[0])} ...]" if Ellipsis in parts else " ".join(map(_values, parts))
    if origin is not None and parts:  # Annotated
        return _values(parts[0])
    names = {int: "INT", float: "FLOAT", str: "TEXT", bool: "True | False", types.NoneType: "None"}
    return names.get(hint, getattr(hint, "__name__", "VALUE"))


def _shown(value: Any) -> str:
    """A default as one would write it."""
    if value is tyro.MISSING:
        return "none, it must be given"
    if isinstance(value, dict):
        return blank(json.dumps(value))
    if isinstance(value, list | tuple):
        return blank(" ".join(map(str, value))) if value else "none"
    return blank(str(value)) if value != "" else "none"


def _options_with(word: str, sections: Sequence[Section]) -> str:
    """`; options with it: --kl-reward.coef ...`, or what the word of another suite is called here, or nothing."""
    names = [option.name for section in sections for option in section.options]
    found = [name for name in names if word in re.split(r"[.-]+", name)]
    found += [SYNONYMS[word]] if SYNONYMS.get(word) in names else []
    return f"; options of that name: {' '.join(found[:6])}" if found else ""
