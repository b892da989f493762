"""Messages to token ids under a model's chat template: with a fixed date, and with text that spells control tokens.

A template such as Llama 3's prints the date by `strftime_now`. Here that is the date the caller gives, so that the
prompts of a run are the same on every rank and on every day.

A message may spell a control token, such as <|im_end|>, which the tokenizer cannot tell from the template's own.
`--data.control-tokens split` makes ordinary text of it: each such text becomes one private character before the
template is rendered, what is then left of control tokens is the template's, and the text between these is encoded with
the private characters put back, as the tokenizers library does between special tokens. Rendering and encoding are
checked against the template and the tokenizer themselves; what differs is refused.
"""

import re
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ControlTokens = Literal["keep", "split", "error"]
FIRST_PRIVATE = 0xF0000  # Unicode's Supplementary Private Use Area-A, 65,534 characters


class CannotSplit(Exception):
    """The template or the tokenizer does not allow what --data.control-tokens split promises; says why."""


class ChatTemplate:
    """A tokenizer's chat template on one date."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", variables: dict[str, Any] | None = None, *, date: str | None = None
    ) -> None:
        """`variables`: for the template. `date`: as `first_date` gives it; None: now."""
        self.tokenizer = tokenizer
        self.printed_dates: set[str] = set()
        """What templates have printed of the date."""
        self.date = date or first_date()
        self._variables = {**(variables or {}), "strftime_now": self._strftime_now}

    def encode(
        self, conversations: list[list[dict]], *, tools: Sequence[dict] = (), split: bool = False
    ) -> list[np.ndarray]:
        """int32 ids of each conversation, up to where the assistant begins. Raises what the template raises.

        `tools`: schemas, of which the prompt tells. `split`: text that spells a control token is ordinary text; raises
        CannotSplit.
        """
        encoded = self.tokenizer.apply_chat_template(
            conversations, tools=list(tools) or None, add_generation_prompt=True, tokenize=True, return_dict=True,
            **self._variables,
        )["input_ids"]  # fmt: skip
        for place, messages in enumerate(conversations if split else ()):
            if self.spelled([*messages, *tools]):
                encoded[place] = self._encode_split(messages, tools)
        return [np.array(ids, dtype=np.int32) for ids in encoded]

    def spelled(self, messages: list[dict]) -> list[str]:
        """The control tokens that the texts of these messages, or schemas of tools, spell, in order."""
        return [found for text in _texts(messages) for found in self._control.findall(text)]

    def _strftime_now(self, format: str) -> str:
        text = datetime.fromisoformat(self.date).strftime(format)
        self.printed_dates.add(text)
        return text

    # ---- Control tokens ----

    @cached_property
    def _private(self) -> dict[str, str]:
        """{control token: its private character}."""
        added = self.tokenizer.added_tokens_decoder.values()
        names = {token.content for token in added if token.special} | set(self.tokenizer.all_special_tokens)
        return {name: chr(FIRST_PRIVATE + place) for place, name in enumerate(sorted(names - {""}))}

    @cached_property
    def _control_ids(self) -> set[int]:
        return set(self.tokenizer.convert_tokens_to_ids(list(self._private)))

    @cached_property
    def _control(self) -> re.Pattern[str]:
        """Any control token, the longest where one begins like another, as the tokenizers library takes it."""
        names = sorted(self._private, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, names))})" if names else r"(?!)")

    def _encode_split(self, messages: list[dict], tools: Sequence[dict]) -> list[int]:
        plain = self.render(messages, tools=tools)
        masked = self.render(self.mask(messages), tools=self.mask(list(tools)))
        if plain.translate(self._public) != plain:
            raise CannotSplit("the prompt has characters of a private use area, which are needed here")
        if masked.translate(self._public) != plain:
            raise CannotSplit("the chat template changes such a text, or decides by it")
        return self.encode_masked(masked)

    @cached_property
    def _public(self) -> dict[int, str]:
        return {ord(character): name for name, character in self._private.items()}

    @cached_property
    def _replaced(self) -> dict[int, str]:
        return dict.fromkeys(self._public, "\ufffd")

    def mask(self, messages: list[dict]) -> list[dict]:
        """The messages, or schemas of tools, with a private character for each control token that their texts spell.
        Such characters of their own, which would be taken for that, become U+FFFD."""

        def change(text: str) -> str:
            return self._control.sub(lambda found: self._private[found[0]], text.translate(self._replaced))

        return _map_texts(messages, change)

    def unmask(self, text: str) -> str:
        """The text with the control tokens spelled again."""
        return text.translate(self._public)

    def without_control(self, text: str) -> str:
        """The text without the control tokens in it."""
        return self._control.sub("", text)

    def encode_text(self, text: str) -> list[int]:
        """The ids of ordinary text, which what spells a control token is too."""
        return self._encode_text(text, split=True)

    def encode_masked(self, masked: str) -> list[int]:
        """The ids of a rendered text, in which control tokens are the template's and private characters the names of
        those that a message spelled: ordinary text. Raises CannotSplit."""
        pieces = self._control.split(masked)  # ordinary text and the template's control tokens, in turn
        expected = self._encode_text(masked)
        if self.unmask(masked) == masked:
            return expected
        ids = self._encode_pieces([self.unmask(piece) for piece in pieces])
        if self._encode_pieces(pieces) != expected or self._controls_in(ids) != self._controls_in(expected):
            raise CannotSplit("the tokenizer does not encode text between control tokens by itself")
        return ids

    def _controls_in(self, ids: list[int]) -> list[int]:
        return [token for token in ids if token in self._control_ids]

    def render(self, messages: list[dict], *, tools: Sequence[dict] = (), answer_follows: bool = True) -> str:
        """The text of a conversation, up to where the assistant begins if an answer of its follows. Raises what the
        template raises."""
        return self.tokenizer.apply_chat_template(
            messages, tools=list(tools) or None, add_generation_prompt=answer_follows, tokenize=False,
            **self._variables,
        )  # fmt: skip

    def _encode_text(self, text: str, *, split: bool = False) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=split)["input_ids"]

    def _encode_pieces(self, pieces: list[str]) -> list[int]:
        encoded = (self._encode_text(piece, split=place % 2 == 0) for place, piece in enumerate(pieces) if piece)
        return [token for ids in encoded for token in ids]


def _texts(value: Any) -> Iterable[str]:
    """Every text of messages at any depth, but for the names of fields and the role."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        inside = value if isinstance(value, list) else [item for name, item in value.items() if name != "role"]
        for item in inside:
            yield from _texts(item)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The messages with every text that `_texts` gives changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_texts(item, change) for item in value]
    if isinstance(value, dict):
        return {name: item if name == "role" else _map_texts(item, change) for name, item in value.items()}
    return value


# ---- The date ----


def first_date(*kept: Any) -> str:
    """The first of these that is a date and time in ISO form, to the second; now, where none is."""
    for text in kept:
        with suppress(ValueError, TypeError):
            return datetime.fromisoformat(text).isoformat(timespec="seconds")
    return datetime.now().isoformat(timespec="seconds")


# ---- What went wrong ----


def template_line(error: BaseException) -> str:
    """`template line 12`: where Jinja was when it failed."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
    return f"template line {line}" if line else "template line unknown"


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
