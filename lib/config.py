"""From the command line to a frozen config, and from a config to JSON.

A config is a frozen, keyword-only dataclass made of other such dataclasses; the docstring under a field is its --help
text. Recipes and scripts call `main(parse_cli(config))`; `main` runs its body inside `reporting_errors`, and a config
that a recipe gets wrong at import ends alike. An option given twice takes its last value, so a shell script may end in
"$@". There are no config files: a recipe is Python.
"""

import copy
import dataclasses
import difflib
import hashlib
import inspect
import json
import math
import os
import re
import signal
import stat
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, TextIO, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro

from lib.errors import LaunchError, LockstepError, RankKilled, Stopped, UserError, error_line, printable
from lib.secret_values import blank_keys, blank_message, is_secret_name, no_json_in_words, remember
from lib.verl_keys import NO_CRITIC, SYNONYMS, VERL_KEYS, verl_hint

T = TypeVar("T")

MIN_LIKENESS = 0.6  # difflib's own; below it a "nearest" option is a guess, and may be a harmful one such as --force
OPTION_OF_ONE_DASH = r"(?i)-(?!(inf|infinity|nan)$)[a-z]"  # to tyro it is none, but no value either
LEAVE_TIMEOUT_S = 15.0  # for ranks that are slow to fail in the same way, while they import

REQUIRED: Any = tyro.MISSING
"""Default of a field that the command line or a recipe must set: `path: str = REQUIRED`."""


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
    with reporting_errors(debug=_wants_debug(argv)):
        return remember(parse_args(default, argv))


def _wants_debug(argv: Sequence[str]) -> bool:
    """What the last --debug says: asked before anything is parsed, since that may fail."""
    return _values("--debug", _complete_booleans(argv, {"--debug": bool}))[:1] == ["True"]


def parse_args(default: T, argv: Sequence[str]) -> T:
    """The config `default` with the values of argv. Raises UserError; --help prints on rank 0 and exits with code 0."""
    plug_ins = _plug_ins(default)
    default, argv = _put_plug_ins(default, list(argv), plug_ins)
    options = _options(default)
    if "--help" not in argv and "-h" not in argv:
        _refuse_unknown(argv, options, option_names(default))
    argv = _complete_booleans(argv, options)

    def refuse(event: tyro._errors.ParseErrorEvent) -> None:
        raise UserError(_explain(event, argv))

    with tyro._errors.on_parse_error(refuse):  # the reason for tyro's exact pin: without it, boxes of several lines
        return tyro.cli(
            type(default),
            default=default,
            args=argv,
            prog=os.path.basename(sys.argv[0]),
            description=_describe(default, plug_ins),
            console_outputs=_is_first_rank(),
            config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
        )


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
        if _normal(flag) not in plug_ins:
            rest.append(word)
            continue
        field = plug_ins[_normal(flag)]
        table = field.metadata["plug_ins"]
        name = value if equals else next(words, "")
        if name not in table:
            raise UserError(
                f"unknown {field.name} {name!r}; {_normal(flag)}; expected one of {', '.join(table)}"
                f"{_nearest(name, table)}; see --help"
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


def _refuse_unknown(argv: list[str], options: dict[str, Any], known: list[str]) -> None:
    """Raises UserError that names every word that is no option of ours and no value: typing errors, verl's words."""
    problems, rest = [], []
    room, empty, in_json = 0.0, "", False  # values the last option still takes; its name while it wants one; its kind
    for word in argv:
        name, equals, _ = word.partition("=")
        if (option := _normal(name)) in options:
            room = _most_values(options[option]) - bool(equals)
            empty, in_json = "" if equals or _is_boolean(options[option]) else option, options[option] == JsonObject
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
    if equals and key not in VERL_KEYS and (ours := _normal("--" + key)) in known:
        return f"write {ours}"
    return verl_hint(word, known)


def _nearest_option(name: str, known: list[str]) -> str:
    """The known option most like `name`, by whole name, last part, or another suite's word; empty: none is like it."""
    name = _normal(name).lstrip("-")  # dashes would make all names alike
    whole = {option.lstrip("-"): option for option in known}
    last_part = {option.rpartition(".")[2].lstrip("-"): option for option in reversed(known)}
    other_words = {word: option for word, option in SYNONYMS.items() if option in known}
    last = name.rpartition(".")[2]
    candidates = [(name, whole), (last, last_part), (last, other_words)]
    scored = [(_likeness(word, key), options[key]) for word, options in candidates for key in options]
    likeness, option = max(scored, key=lambda entry: entry[0])  # of equals the first: the whole name wins
    return option if likeness >= MIN_LIKENESS else ""


def _nearest(name: str, names: Iterable[str]) -> str:
    """`; nearest is cosine`, or nothing when none of the names is much like it."""
    near = max(names, key=lambda other: _likeness(name, other))
    return f"; nearest is {near}" if _likeness(name, near) >= MIN_LIKENESS else ""


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def _normal(option: str) -> str:
    """`--optim.weight_decay` as `--optim.weight-decay`, as tyro reads it."""
    return option.replace("_", "-") if option.startswith("--") else option


def _is_boolean(hint: Any) -> bool:
    return bool in (hint, *get_args(hint))


def _complete_booleans(argv: Sequence[str], options: dict[str, Any]) -> list[str]:
    """`--debug` as `--debug True`, `--debug=true` as `--debug=True`: tyro itself wants the capital word."""
    completed: list[str] = []
    booleans = {name for name, hint in options.items() if _is_boolean(hint)}
    for i, word in enumerate(argv):
        option, equals, value = word.partition("=")
        previous = argv[i - 1] if i else ""
        if equals and _normal(option) in booleans:
            completed.append(f"{option}={value.capitalize()}")
        elif _normal(previous) in booleans and not word.startswith("--"):
            completed.append(word.capitalize())
        else:
            completed.append(word)
        is_last = i + 1 == len(argv)
        if _normal(word) in booleans and (is_last or argv[i + 1].startswith("--")):
            completed.append("True")
    return completed


def _explain(event: tyro._errors.ParseErrorEvent, argv: list[str]) -> str:
    """tyro's refusal as a message of ours."""
    errors = tyro._errors
    if isinstance(event, errors.MissingArgs):
        missing = ", ".join(context.arg.display_name() for context in event.missing_arguments)
        return f"missing {missing}; command line; found no value, expected one; give it, or see --help"
    if isinstance(event, errors.UnrecognizedArgs):
        words = " ".join(event.tokens)
        return f"{words!r} belongs to no option; command line; expected --option value; quote values that hold spaces"
    assert isinstance(event, errors.InstantiationFailure | errors.BadValue | errors.InvalidChoice), event
    argument, name = event.argument, event.argument.display_name()
    shown = no_json_in_words if argument.lowered.metavar == "JSON" else str
    found = shown(" ".join(_values(name, argv))) or "no value"
    if isinstance(event, errors.InvalidChoice):
        expected = "one of " + ", ".join(event.choices)
        nearest = _nearest(event.value, event.choices)
    else:
        expected, nearest = _in_words(str(argument.lowered.metavar)), ""
    return f"wrong value for {name}; command line; found {found}, expected {expected}{nearest}; see --help"


def _values(option: str, argv: list[str]) -> list[str]:
    """The words that follow the last mention of an option."""
    found: list[str] = []
    reading = False
    for word in argv:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            reading = _normal(name) == option
            found = ([value] if equals else []) if reading else found
        elif reading:
            found.append(word)
    return found


def _in_words(metavar: str) -> str:
    names = {"{None}|": "None or ", "FLOAT": "a number", "INT": "an integer", "STR": "text", "JSON": "a JSON object"}
    for name, words in names.items():
        metavar = metavar.replace(name, words)
    return metavar.replace("a number a number", "two numbers")


def _describe(default: Any, plug_ins: dict[str, dataclasses.Field]) -> str:
    """The text above the options: the config's docstring, and the names that each plug-in option takes."""
    lines = [
        inspect.getdoc(default) or "",
        "",
        "A bare True/False option means True; the last of equal options counts.",
    ]
    for flag, field in plug_ins.items():
        table, current = field.metadata["plug_ins"], getattr(default, field.name)
        named = (name for name, make in table.items() if make is type(current) or make() == current)
        name = next(named, type(current).__name__)
        lines.append(f"{flag} NAME: one of {', '.join(table)} (default: {name}); see '{field.name} options'.")
    return "\n".join(lines)


# ---- Errors ----


@contextmanager
def reporting_errors(*, debug: bool = False) -> Iterator[None]:
    """Ends the process as the contract says: rank 0 prints one line, and every rank exits with the error's code.

    Writes to the standard error stream as it is on entry, even if file descriptor 2 is moved to a log file inside.
    With `debug`, and for any exception that is a bug of ours (exit code 1), every rank prints its traceback.
    """
    terminal = _copy_of_stderr()

    def tell(text: str) -> None:
        with suppress(OSError):  # into a file on a full disk: the exit code must still be the error's
            print(printable(blank_message(text)), file=terminal, flush=True)

    try:
        yield
    except RankKilled as error:  # it is told; nobody waits for a rank that cannot come
        raise SystemExit(error.code) from error
    except LockstepError as error:
        if debug:
            tell(traceback.format_exc())
        told = _is_first_rank() or (isinstance(error, LaunchError) and not _under_torchrun())
        if told:
            tell(error_line(error))
        if not _leave_together() and not told:  # this rank failed alone: nobody else will say why
            tell(error_line(error))
        raise SystemExit(error.code) from error
    except Stopped as error:  # all ranks raise it together, and the run has said why
        _leave_together()
        raise SystemExit(error.code) from error
    except KeyboardInterrupt as error:
        raise SystemExit(130) from error
    except Exception as error:
        tell(traceback.format_exc())
        raise SystemExit(1) from error
    finally:
        if terminal is not sys.stderr:
            with suppress(OSError):
                terminal.close()


def _end_by_the_contract(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """For `sys.excepthook`: a LockstepError outside `reporting_errors`, as a recipe's config raises it at import."""
    if isinstance(error, LockstepError) and not hasattr(sys, "ps1"):  # at a prompt, Python must not end
        with reporting_errors(debug=_wants_debug(sys.argv)):
            raise error
    _previous_hook(kind, error, trace)


_previous_hook, sys.excepthook = sys.excepthook, _end_by_the_contract


def _copy_of_stderr() -> TextIO:
    try:
        return os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1, errors="backslashreplace")
    except OSError:  # a stream without a file descriptor, as in a notebook
        return sys.stderr


def _leave_together() -> bool:
    """Waits until all of torchrun's ranks come here; False when rank 0 has not come after some seconds.

    torchrun kills the other ranks as soon as one has ended: without the wait, rank 0 could die before it has printed
    the error, and ranks would end with the signal's code instead of the error's.
    """
    import torch.distributed as torch_dist

    size = int(os.environ["WORLD_SIZE"]) if _under_torchrun() else 1
    if size > 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        present, first = f"lockstep/{attempt}/leaving", f"lockstep/{attempt}/rank_0_leaving"
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        try:
            store = torch_dist.TCPStore(  # torchrun's own; it outlives the ranks
                os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=LEAVE_TIMEOUT_S)
            )
            store.add(first, int(_is_first_rank()))
            store.add(present, 1)
            while store.add(present, 0) < size:
                if time.monotonic() > deadline:
                    return store.add(first, 0) > 0
                time.sleep(0.05)
        except RuntimeError:  # no such store: torchrun itself is ending
            return True
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()  # all ranks are here; NCCL complains when the process ends without it
    return True


def _under_torchrun() -> bool:
    return "TORCHELASTIC_RESTART_COUNT" in os.environ


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


# ---- JSON ----


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


def config_hash(config: Any) -> str:
    """16 hexadecimal digits, equal for equal configs: ranks compare it to find out that they were started alike."""
    text = json.dumps(to_json(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---- Paths and numbers ----


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
