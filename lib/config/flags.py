"""From the command line to a frozen config.

A config is a frozen, keyword-only dataclass made of other such dataclasses; the docstring under a field is its --help
text. Recipes and scripts call `main(parse_cli(config))`; `main` runs its body inside `reporting_errors`, and a config
that a recipe gets wrong at import ends alike. An option given twice takes its last value, so a shell script may end in
"$@". There are no config files: a recipe is Python.
"""

import copy
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, get_args, get_type_hints

import tyro

from lib.config.help import help_text, wanted_section
from lib.config.reporting import is_first_rank, reporting_errors
from lib.config.verl_command import refuse_verl_command
from lib.config.words import complete_booleans, nearest_word, normal, refuse_unknown, values_of, wants_debug
from lib.errors import UserError
from lib.secret_values import no_json_in_words, remember

T = TypeVar("T")


REQUIRED: Any = tyro.MISSING
"""Default of a field that the command line or a recipe must set: `path: str = REQUIRED`."""


def plug_in(table: Mapping[str, Callable[[], Any]], name: str) -> Any:
    """A dataclass field that holds `table[name]()`; `--FIELD OTHER` puts `table["OTHER"]()` there before parsing.

    For fields of the top-level config only: `loss: PolicyLoss = plug_in(LOSSES, "vanilla")`. A recipe may set the field
    to an object of its own class, outside the table. Either way the object's fields are options: `--loss.clip-low`.
    """
    return dataclasses.field(default_factory=table[name], metadata={"plug_ins": table})


# ---- Command line ----


def parse_cli(default: T, argv: Sequence[str] | None = None) -> T:
    """The config `default` with the command line's values; on bad input prints one line and exits with code 2."""
    argv = sys.argv[1:] if argv is None else list(argv)
    with reporting_errors(debug=wants_debug(argv)):
        try:
            return remember(parse_args(default, argv))
        except BrokenPipeError as error:  # --help | head
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what Python writes at its end has nowhere to go either
            raise SystemExit(0) from error


def parse_args(default: T, argv: Sequence[str]) -> T:
    """The config `default` with the values of argv. Raises UserError; --help prints on rank 0 and exits with code 0."""
    refuse_verl_command(argv, type(default), _options, parse_args, show=is_first_rank())
    section = wanted_section(argv)
    plug_ins = _plug_ins(default)
    default, argv = _put_plug_ins(default, list(argv), plug_ins)
    options = _options(default)
    if section is not None:
        text = help_text(default, plug_ins, section)
        if is_first_rank():
            print(text, flush=True)
        raise SystemExit(0)
    refuse_unknown(argv, options, option_names(default))
    argv = complete_booleans(argv, options)

    with _one_line_errors(argv):
        config = tyro.cli(
            type(default),
            default=default,
            args=argv,
            prog=os.path.basename(sys.argv[0]),
            console_outputs=is_first_rank(),
            config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
        )
    _check_said(config, argv)
    return config


def _check_said(config: Any, argv: list[str]) -> None:
    """Lets a section that has `check_said` see the words that were said of its fields: {field: words}."""
    for field in dataclasses.fields(config):
        section = getattr(config, field.name)
        if hasattr(section, "check_said"):
            names = [each.name for each in dataclasses.fields(section)]
            words = {name: values_of(f"--{field.name}.{name}", argv) for name in names}
            section.check_said({name: found for name, found in words.items() if found})


def option_names(config: Any) -> list[str]:
    """Every option that a command line for this config may hold, as `--help` shows them."""
    return [*_options(config), *_plug_ins(config)]


def _plug_ins(config: Any) -> dict[str, dataclasses.Field]:
    """{`--loss`: its field} for every plug-in."""
    fields = (field for field in dataclasses.fields(config) if "plug_ins" in field.metadata)
    return {f"--{field.name.replace('_', '-')}": field for field in fields}


def _put_plug_ins(default: T, argv: list[str], plug_ins: dict[str, dataclasses.Field]) -> tuple[T, list[str]]:
    """The default with the objects that `--loss NAME` and the like name, and the rest of the command line.

    An object that already is of the named class stays as it is: a recipe's values outlive `--loss vanilla`. A name that
    stands for values of a class (`functools.partial`) puts these values there.
    """
    chosen = copy.copy(default)  # not dataclasses.replace: its checks would see a config that is not complete yet
    rest = []
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if normal(flag) not in plug_ins:
            rest.append(word)
            continue
        field = plug_ins[normal(flag)]
        table = field.metadata["plug_ins"]
        name = value if equals else next(words, "")
        if name not in table:
            raise UserError(
                f"unknown {field.name} {name!r}; {normal(flag)}; expected one of {', '.join(table)}"
                f"{nearest_word(name, table)}; see --help"
            )
        if table[name] is not type(getattr(chosen, field.name)):
            object.__setattr__(chosen, field.name, table[name]())
    return chosen, rest


def _options(config: Any, prefix: str = "--") -> dict[str, Any]:
    """{option: its type} for every option of a config, sections and plug-ins included."""
    options = {}
    hints = get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name.replace("_", "-")
        if tyro.conf.Suppress in get_args(hints[field.name]):
            continue
        if dataclasses.is_dataclass(value):
            options.update(_options(value, name + "."))
        elif "plug_ins" not in field.metadata:  # a plug-in may be None, or a function: then it has no options
            options[name] = hints[field.name]
    return options


@contextmanager
def _one_line_errors(argv: list[str]) -> Iterator[None]:
    """Turns tyro's refusals into UserError. A tyro without these private names prints boxes of its own."""
    try:
        from tyro import _errors as errors

        on_parse_error = errors.on_parse_error
    except (ImportError, AttributeError):
        yield
        return

    def refuse(event: Any) -> None:
        raise UserError(_explain(event, argv, errors))

    with on_parse_error(refuse):
        yield


def _explain(event: Any, argv: list[str], errors: Any) -> str:
    """tyro's refusal as a message of ours; `errors` is its module."""
    if isinstance(event, errors.MissingArgs):
        missing = ", ".join(context.arg.display_name() for context in event.missing_arguments)
        return f"missing {missing}; command line; found no value, expected one; give it, or see --help"
    if isinstance(event, errors.UnrecognizedArgs):
        words = " ".join(event.tokens)
        return f"{words!r} belongs to no option; command line; expected --option value; quote values that hold spaces"
    assert isinstance(event, errors.InstantiationFailure | errors.BadValue | errors.InvalidChoice), event
    argument, name = event.argument, event.argument.display_name()
    shown = no_json_in_words if argument.lowered.metavar == "JSON" else str
    found = shown(" ".join(values_of(name, argv))) or "no value"
    if isinstance(event, errors.InvalidChoice):
        expected = "one of " + ", ".join(event.choices)
        nearest = nearest_word(event.value, event.choices)
    else:
        expected, nearest = _in_words(str(argument.lowered.metavar)), ""
    return f"wrong value for {name}; command line; found {found}, expected {expected}{nearest}; see --help"


def _in_words(metavar: str) -> str:
    names = {"{None}|": "None or ", "FLOAT": "a number", "INT": "an integer", "STR": "text", "JSON": "a JSON object"}
    for name, words in names.items():
        metavar = metavar.replace(name, words)
    return metavar.replace("a number a number", "two numbers")
