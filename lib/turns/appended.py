"""The ids that follow a sampled turn: what the chat template puts between it and the next one, with the observation.

An episode's ids are only ever appended to. What was sampled stays as it was sampled, its last id too, and what follows
is what the template writes behind the end of an assistant's turn. Templates that write something else there once
another turn follows cannot be appended to; those that would take something away from earlier turns, such as thinking,
are told, and appended to all the same.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lib.data.chat_template import CannotSplit, ChatTemplate, first_line
from lib.errors import UserError

SAID, THOUGHT, ARGUMENT = "lockstep said", "lockstep thought", "lockstep argument"  # to be found in what is rendered
OBSERVED = "lockstep observed {}."
ASKED = {"role": "user", "content": "lockstep asked"}
TRIALS = (
    "42", "", " led and followed by spaces ", "two\nlines\n", "\n\n", 'a "quoted" \\ word', "it's {{ x }} {% y %}",
    "<b>&amp;</b>", "é ü 漢字 🙂", "</tool_response>", "[1, 2, 3]", '{"a": 1.5, "b": null}', "\tindented", "a\r\nb",
    "Traceback (most recent call last):", "0", "None", "- a\n- b", "x" * 300, "<think>no</think>",
)  # fmt: skip
"""Observations with which a way to make ids is compared with the template's own."""
MOST_FRAMES = 512  # kinds of observations: a model that invents names of tools would have each of them tried for ms


class CannotAppend(Exception):
    """Why the template cannot be appended to."""


class Appender:
    """What a chat template appends to a turn that ended with one of `stop_ids`."""

    def __init__(self, template: ChatTemplate, stop_ids: Sequence[int]) -> None:
        self.template = template
        self._ends = [template.tokenizer.convert_ids_to_tokens(stop_id) for stop_id in stop_ids]
        self._frames: dict[tuple, list[str] | None] = {}  # of a kind of observation; None: rendered each time
        self.notes: set[str] = set()
        """What is to be known about the template."""

    def ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """What follows a turn, up to where the next one begins; text that spells a control token is ordinary text.

        Raises CannotAppend, CannotSplit, or what the template raises.
        """
        masked = self.template.mask([dict(message) for message in messages])
        kind = tuple((message["role"], message.get("name")) for message in masked)
        if kind not in self._frames and len(self._frames) < MOST_FRAMES:
            self._frames[kind] = self._find_frame(masked)
        frame = self._frames.get(kind)
        text = self._rendered(masked) if frame is None else _filled(frame, masked)
        return self.template.encode_masked(text)

    def check(self, roles: Sequence[str]) -> None:
        """Tries observations of these roles. Raises UserError, which names what the template does."""
        for role in roles:
            message = {"role": role, "content": TRIALS[0], **({"name": "tool"} if role == "tool" else {})}
            try:
                self.ids([message])
                self._check_control(message)
            except (CannotAppend, CannotSplit) as error:
                raise UserError(
                    f"the chat template cannot be appended to; {self._where}, a message of the role {role}; found that "
                    f"{error}, expected the same text behind a turn whether or not another follows; use a model whose "
                    "template allows it, or a template of its family for training"
                ) from error
            except Exception as error:
                raise UserError(
                    f"the chat template refuses an observation; {self._where}, a message of the role {role}; found "
                    f"{first_line(error)}; let the environment answer as another role, or use a model whose template "
                    "has this one"
                ) from error

    @property
    def _where(self) -> str:
        return f"--model.path {self.template.tokenizer.name_or_path}"

    def _check_control(self, message: dict[str, Any]) -> None:
        for end in self._ends:
            ids = self.ids([{**message, "content": f"a {end} b"}])
            plain = self.ids([{**message, "content": "a b"}])
            stops = set(self.template.tokenizer.convert_tokens_to_ids(self._ends))
            if sum(token in stops for token in ids) != sum(token in stops for token in plain):
                raise CannotAppend(f"an observation that spells {end} becomes that token")

    def _rendered(self, messages: list[dict[str, Any]]) -> str:
        """What the template writes behind the turn, with these messages."""
        asked = [{**ASKED}, _turn(messages)]
        before = self.template.render(asked, answer_follows=False)
        after = self.template.render([*asked, *messages])
        end, ended = self._end_of_turn(after), self._end_of_turn(before)
        if end[0] != ended[0]:
            raise CannotAppend(f"a turn that ends with {ended[0]} ends with {end[0]} once another follows")
        return after[end[1] :]

    def _end_of_turn(self, text: str) -> tuple[str, int]:
        """The token that ends the assistant's turn, and where the text behind it begins."""
        place = max(text.rfind(it) for it in (SAID, ARGUMENT))
        if place < 0:
            raise CannotAppend("it leaves out what the assistant said")
        found = [(at, end) for end in self._ends if (at := text.find(end, place)) >= 0]
        if not found:
            raise CannotAppend(f"an assistant's turn ends with none of {', '.join(self._ends)}, where responses end")
        at, end = min(found)
        return end, at + len(end)

    def _find_frame(self, messages: list[dict[str, Any]]) -> list[str] | None:
        """The text around the contents of such messages, where it is the same for all contents."""
        marks = [OBSERVED.format(place) for place in range(len(messages))]
        text = self._rendered([{**it, "content": mark} for it, mark in zip(messages, marks, strict=True)])
        self._note_thinking(messages)
        frame, rest = [], text
        for mark in marks:
            piece, found, rest = rest.partition(mark)
            frame.append(piece)
            if not found or mark in rest:
                return None
        frame.append(rest)
        trials = [[{**it, "content": trial} for it in messages] for trial in TRIALS]
        return frame if all(_filled(frame, trial) == self._rendered(trial) for trial in trials) else None

    def _note_thinking(self, messages: list[dict[str, Any]]) -> None:
        thinking = {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\n{SAID}"}
        asked = [{**ASKED}, thinking | {name: it for name, it in _turn(messages).items() if name == "tool_calls"}]
        before = self.template.render(asked, answer_follows=False)
        if THOUGHT in before and THOUGHT not in self.template.render([*asked, *messages]):
            self.notes.add(
                "the chat template strips the thinking of earlier turns; here it stays: ids are only ever appended"
            )


def _turn(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """An assistant's turn that such messages may answer."""
    names = [message.get("name") or "tool" for message in messages if message["role"] == "tool"]
    calls = [
        {"type": "function", "id": f"call{place:05}", "function": {"name": name, "arguments": {"x": ARGUMENT}}}
        for place, name in enumerate(names)
    ]
    return {"role": "assistant", "content": SAID, **({"tool_calls": calls} if calls else {})}


def _filled(frame: list[str], messages: list[dict[str, Any]]) -> str:
    contents = [message["content"] for message in messages]
    return "".join(piece + content for piece, content in zip(frame, [*contents, ""], strict=True))


def without_thinking(text: str) -> str:
    """The text behind the last thinking; empty where that does not end."""
    return re.sub(r"(?s)^.*</think>", "", text) if "</think>" in text else text.partition("<think>")[0]
