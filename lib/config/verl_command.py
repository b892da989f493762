"""A whole verl command as the command of ours that learns the same: values converted, what has no counterpart named.

The rows of verl_keys.txt say which key is which option, what verl does where nothing is said, and which keys change
what is learned. What takes more than a row (another unit, several keys for one option) is a function in
verl_subjects.py. A key that changes what is learned is converted, or the command is refused for it.
"""

import copy
import dataclasses
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

from lib.config.verl_conversion import FALSE, TRUE, Conversion
from lib.config.verl_keys import ANY, VERL_DEFAULTS, VERL_KEYS, row_of
from lib.config.verl_subjects import SUBJECTS, launcher
from lib.config.verl_words import entries, read_command
from lib.config.words import nearest_word
from lib.errors import UserError, printable
from lib.secret_values import blank_message, is_secret_name

OF_ONE_SCRIPT = ("--advantage", "--critic")


def refuse_verl_command(
    argv: Sequence[str],
    make_default: Callable[[], Any],
    options_of: Callable[[Any], dict[str, Any]],
    parse: Callable[[Any, list[str]], Any],
    *,
    show: bool,
) -> None:
    """Raises UserError if argv is a whole verl command, after printing the command of ours (with `show`).

    Of the script: its config without a command line, the type of each option of a config, and what reads a command
    line. Nothing happens in a script that does not train.
    """
    given = read_command(argv)
    if given is None or "--prompts-per-step" not in options_of(default := make_default()):
        return
    lines, conversion = convert(given, default, options_of(default), lambda words: parse(default, words))
    if show:
        text = "\n".join(lines)
        if (shown := blank_message(text)) != text:
            shown += "\n# [NAME] stands for a secret, which is not shown: write it in its place."
        print(printable(shown), flush=True)
    if conversion.refused:
        raise UserError(
            "a verl command that cannot be converted as it stands; command line; found "
            f"{len(conversion.refused)} of its {len(conversion.given)} keys refused, each on a line above with its "
            "reason; mend them, and paste it again"
        )
    raise UserError(
        f"a verl command, so nothing is run; command line; found {len(conversion.given)} keys of verl's, expected "
        "options; paste the command that stands above"
    )


def convert(
    given: dict[str, str], config: Any, options: dict[str, Any], parse: Callable[[list[str]], Any]
) -> tuple[list[str], Conversion]:
    """The lines to print for a verl command's keys, a command of ours unless it is refused, and what became of each."""
    plug_ins = {
        field.name: field.metadata["plug_ins"] for field in dataclasses.fields(config) if "plug_ins" in field.metadata
    }
    conversion = Conversion(given, options, dict(_defaults_of(config, "--")), plug_ins)
    for subject in SUBJECTS:
        subject(conversion)
    _convert_rows(conversion)
    defaults = _our_defaults(conversion, config)
    _leave_out_foreign(conversion, defaults)
    launch, script = launcher(conversion)
    plain = {"train_grpo.py": "grpo", "train_ppo.py": "gae"}[script]
    defaults |= {"--advantage": (plain,), "--loss": ("vanilla",), "--correction": ("auto",)}
    equal = {option for option, words in conversion.options.items() if _same(words, defaults.get(option))}
    unknown = {option for option in conversion.unsaid if option not in defaults}  # a critic's, in train_grpo.py
    ours = {o: w for o, w in conversion.options.items() if o not in equal | unknown}
    if not conversion.refused:
        has_critic = "--critic.warmup-steps" in options
        is_this_script = has_critic == (script == "train_ppo.py")
        _check(conversion, ours if is_this_script else _for_the_other(ours, has_critic), parse)
    if conversion.refused:
        return _refusal(conversion), conversion
    command = [*conversion.before, *_command(launch, script, ours, list(options))]
    return [*command, "", *_remarks(conversion, ours, equal)], conversion


def _convert_rows(conversion: Conversion) -> None:
    """What no subject has taken, row by row: first what the command says, then what verl does without a word."""
    for key in [key for key in conversion.given if key not in conversion.done]:
        bare = key.lstrip("~")
        row = row_of(bare)
        option, note = VERL_KEYS[row] if row else ("", "")
        if row is None or (option and row != bare):
            near = nearest_word(bare, [known for known in VERL_KEYS if "*" not in known])
            why = "not known here, so it may change what is learned: leave it out if it does not"
            conversion.refuse(key, why + near)
        elif VERL_DEFAULTS[row] == ANY and (not option or key != bare):
            conversion.drop(note or f"verl's default is {option}'s", key)
        elif key != bare:
            conversion.refuse(key, "a key is taken away that changes what is learned: give it a value instead")
        elif option:
            value = conversion.value(key)
            if value == "null" and conversion.types.get(option) in (str, int, float):  # as if it had not been said
                value = VERL_DEFAULTS[key]
            conversion.put(option, _words(conversion, option, value), key)
        else:
            allowed = [conversion.value(word) if word in VERL_KEYS else word for word in _allowed(row)]
            value = conversion.value(key)
            if any(_same((value,), (word,)) or (value == "null" and word in ("{}", "False")) for word in allowed):
                conversion.drop(note, key)
            else:
                conversion.refuse(key, f"{note}; taken with {' or '.join(allowed)} alone")
    for key, (option, _) in VERL_KEYS.items():
        default = VERL_DEFAULTS[key]
        if option and default != ANY and key not in conversion.done and option not in conversion.options:
            conversion.put(option, _words(conversion, option, conversion.value(key)))


def _allowed(row: str) -> list[str]:
    return VERL_DEFAULTS[row].split(" or ")


def _words(conversion: Conversion, option: str, text: str) -> tuple[str, ...]:
    """A value as the words that follow our option: True for true, a b for [a, b], None for null and for -1 rows."""
    if str(conversion.types.get(option)).startswith("tuple") or text.startswith("["):
        return tuple(entries(text))
    if option.endswith("max-samples") and text == "-1":
        return ("None",)
    if text.lower() in ("true", "false"):
        return (text.capitalize(),)
    return ("None",) if text in ("null", "None") else (text,)


def _our_defaults(conversion: Conversion, config: Any) -> dict[str, tuple[str, ...]]:
    """{option: its words without a command line}, those of the chosen loss and so on among them."""
    config = copy.copy(config)  # not dataclasses.replace, whose checks would see what fits together in no script
    for name, table in conversion.plug_ins.items():
        words = conversion.options.get(f"--{name}")
        if words and words[0] in table:
            object.__setattr__(config, name, table[words[0]]())
    return dict(_defaults_of(config, "--"))


def _defaults_of(config: Any, prefix: str) -> Iterable[tuple[str, tuple[str, ...]]]:
    for field in dataclasses.fields(config):
        value, option = getattr(config, field.name), prefix + field.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            yield from _defaults_of(value, option + ".")
        else:
            yield option, tuple(map(str, value)) if isinstance(value, tuple) else (str(value),)


def _leave_out_foreign(conversion: Conversion, defaults: dict[str, tuple[str, ...]]) -> None:
    """Options that the chosen advantage or loss has not: verl's does not read their keys either."""
    for option in [option for option in conversion.options if option not in defaults]:
        section = option.partition(".")[0]
        if section in ("--advantage", "--loss") and section != option:
            del conversion.options[option]
            chosen = " ".join(conversion.options.get(section, ()))
            for key in conversion.given:
                if VERL_KEYS.get(key, ("",))[0] == option:
                    conversion.converted.discard(key)
                    conversion.drop(f"{chosen} does not read it, neither verl's nor ours", key)


def _same(words: tuple[str, ...], others: tuple[str, ...] | None) -> bool:
    """Whether two lists of words say the same: 1e-6 and 1.0e-06, true and True."""
    if others is None or len(words) != len(others):
        return False
    return all(map(_same_word, words, others))


def _same_word(word: str, other: str) -> bool:
    try:
        return float(word) == float(other)
    except ValueError:
        return word.lower() == other.lower() if word.lower() in TRUE + FALSE else word == other


def _for_the_other(ours: dict[str, tuple[str, ...]], has_critic: bool) -> dict[str, tuple[str, ...]]:
    """What of one script's command the other's parser can check, with an advantage that asks for no group."""
    shared = {option: words for option, words in ours.items() if option.partition(".")[0] not in OF_ONE_SCRIPT}
    return shared | ({} if has_critic else {"--advantage": ("reinforce_plus_plus",)})


def _check(conversion: Conversion, ours: dict[str, tuple[str, ...]], parse: Callable[[list[str]], Any]) -> None:
    """Lets our own parser read the command; what it does not take is refused, with its words."""
    known: list[str] = []
    for option, words in ours.items():
        if not any("$" in word for word in words):
            known += [option, *words]
        elif str not in (conversion.types.get(option), *get_args(conversion.types.get(option))):
            return  # a number that the shell knows alone; of a text, as a path is, nothing is asked here
    try:
        parse(known)
    except UserError as error:
        conversion.refuse("the whole", f"our command would not be taken: {error}")


# ---- What is printed ----


def _command(launch: str, script: str, ours: dict[str, tuple[str, ...]], order: list[str]) -> list[str]:
    """The command, an option a line, in the order of --help; a plug-in's name before its own options."""

    def place(option: str) -> float:
        section, dot, _ = option.partition(".")
        own = [i for i, other in enumerate(order) if other.startswith(section + ".")]
        return order.index(option) if option in order else min(own, default=len(order)) - 0.5 + 0.1 * bool(dot)

    lines = [f"{launch} {script}"]
    lines += ["    " + " ".join([option, *map(_quoted, ours[option])]) for option in sorted(ours, key=place)]
    return [line + " \\" for line in lines[:-1]] + lines[-1:]


def _quoted(word: str) -> str:
    """The word as a shell takes it; its variables stay variables."""
    if "$" not in word:
        return shlex.quote(word)
    return word if re.fullmatch(r"[\w./:${}+-]+", word) else '"' + re.sub(r'(["`\\])', r"\\\1", word) + '"'


def _remarks(conversion: Conversion, ours: dict[str, tuple[str, ...]], equal: set[str]) -> list[str]:
    """Comments below the command, so that all of it may be pasted."""
    lines = []
    if conversion.value("trainer.nnodes", "1") != "1":
        lines.append("# Start it on every node, with HEAD_NODE set to the name of the first.")
    if unsaid := [" ".join([option, *ours[option]]) for option in ours if option in conversion.unsaid]:
        lines.append(f"# verl's defaults, written out because ours differ: {', '.join(unsaid)}")
    said = [" ".join([o, *map(_quoted, conversion.options[o])]) for o in conversion.options if o in equal]
    if said := [text for text in said if text.split()[0] not in conversion.unsaid]:
        lines.append(f"# Left out, being our defaults: {', '.join(said)}")
    lines += [f"# {note}" for note in conversion.notes]
    if conversion.below:
        lines.append("# Without a counterpart, none of which changes what is learned:")
        lines += [f"#   {_pasted(conversion, key)}: {why}" for key, why in conversion.below.items()]
    return lines


def _refusal(conversion: Conversion) -> list[str]:
    return [f"refused: {_pasted(conversion, key)}: {why}" for key, why in conversion.refused.items()]


def _pasted(conversion: Conversion, key: str) -> str:
    """A key as the command has it; a secret's value is not shown, nor the end of a long one."""
    if key not in conversion.given or key.startswith("~"):
        return key
    value = conversion.given[key]
    value = value if len(value) <= 200 else value[:200] + "..."
    is_secret = is_secret_name(key) and not value.isdigit()  # log_prob_max_token_len is none
    return f"{key}={'...' if is_secret else value}"
