"""A verl command on its way to ours: what it says, what ours will say, and what is told or refused."""

from collections.abc import Callable, Iterable
from typing import Any

from lib.config.verl_keys import VERL_DEFAULTS
from lib.config.verl_words import unquoted

TRUE, FALSE = ("true",), ("false", "null", "none")


class Conversion:
    """verl's keys and what became of each: converted, below the command with the reason, or refused."""

    def __init__(
        self,
        given: dict[str, str],
        types: dict[str, Any],
        defaults: dict[str, tuple[str, ...]],
        plug_ins: dict[str, dict[str, Callable]],
    ) -> None:
        self.given = given  # key -> value as text
        self.types, self.defaults = types, defaults  # of our options, as the script has them without a command line
        self.plug_ins = plug_ins  # loss -> {name: what makes it}
        self.options: dict[str, tuple[str, ...]] = {}  # ours -> its words
        self.unsaid: set[str] = set()  # options that hold a default of verl's, which the command did not say
        self.converted: set[str] = set()
        self.below: dict[str, str] = {}  # key of the command -> why it has no place in ours
        self.before: list[str] = []  # lines of the shell's that stand above our command
        self.notes: list[str] = []  # what a user of verl would not expect of ours
        self.refused: dict[str, str] = {}
        self.done: set[str] = set()  # keys, of the command or not, that need no further look

    def value(self, key: str, default: str | None = None) -> str:
        """What the command says of a key, or verl's default; a default that is a key has that key's value."""
        if key not in self.given:
            text = VERL_DEFAULTS[key] if default is None else default
            return self.value(text) if text in VERL_DEFAULTS else text
        if text := unquoted(self.given[key]):
            return text
        self.refuse(key, "it has no value: an empty variable?")
        return VERL_DEFAULTS[key]

    def holds(self, key: str, default: str | None = None) -> bool:
        """Whether a key is True. Refused where that cannot be seen."""
        text = self.value(key, default)
        if text.lower() not in TRUE + FALSE:
            self.refuse(key, "True or False is needed here")
        return text.lower() in TRUE

    def number(self, key: str, default: str | None = None, *, of_shell: bool = False) -> float | None:
        """A key's number, None for null. What a shell would put in (`$N`) is None with `of_shell`, else refused."""
        text = self.value(key, default)
        if text == "null" or (of_shell and "$" in text):
            return None
        try:
            return float(text)
        except ValueError:
            self.refuse(key, "a number is needed here")
            return None

    def put(self, option: str, words: str | Iterable[str], *keys: str) -> None:
        """Our option with its words, which say what these keys do. Refused where another key says otherwise."""
        words = (words,) if isinstance(words, str) else tuple(words)
        said = [key for key in keys if key in self.given]
        if option in self.options and self.options[option] != words and said:
            self.refuse(said[0], f"another key has set {option} to {' '.join(self.options[option])}: keep one of them")
        self.options.setdefault(option, words)
        if not said:
            self.unsaid.add(option)
        self.converted.update(said)
        self.done.update(keys)

    def drop(self, why: str, *keys: str) -> None:
        """Those of these keys that the command has, and that nothing has converted, have no place in ours."""
        taken = self.converted | self.below.keys() | self.refused.keys()
        self.below.update({key: why for key in keys if key in self.given and key not in taken})
        self.done.update(keys)

    def refuse(self, key: str, why: str) -> None:
        """The command cannot be converted, because of this key."""
        self.refused.setdefault(key, why)
        self.done.add(key)

    def chosen(self, plug_in: str, name: str, key: str) -> Any:
        """The object that --PLUG_IN NAME makes; refused, and None, where there is none of that name."""
        table = self.plug_ins[plug_in]
        if name not in table:
            self.refuse(key, f"no --{plug_in} of that name; there are {', '.join(table)}; an own one is a recipe")
            return None
        return table[name]()
