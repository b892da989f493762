"""Responses as a page shows them: side by side below their prompt, token by token under a mouse or a finger.

An episode is shown turn by turn: what was sampled as a response is, then its calls, then, indented behind a line of its
own colour, what was observed.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lib.pages.page import cut, escape

Row = Mapping[str, Any]
"""A shown sample, as lib/rollouts/shown_samples.py describes it."""
TURNS_STYLE = """.turn { border-left: 3px solid var(--c0); padding-left: .6rem; margin: .5rem 0 }
.observed { border-left: 3px dashed var(--c1); padding-left: .6rem; margin: .5rem 0 .5rem 1.2rem }
.observed pre { background: none; border: 1px dashed var(--rule) }
.call { font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; margin: .2rem 0 }
"""
MESSAGES = 24  # of a conversation without tokens; the first and the last
SLOW_S = 1.0  # an answer that took longer stands out


def side_by_side(columns: Sequence[str]) -> str:
    """Columns of HTML beside one another; a narrow screen scrolls."""
    return f'<div class="row">{"".join(f"<section>{column}</section>" for column in columns)}</div>'


def prompt_box(row: Row) -> str:
    """What was asked, where it is from, and what is expected."""
    told = f"{row['data_source']}, prompt {row['uid']}; expected {cut(str(row['ground_truth']), 200)}"
    return f'<p class="note">{escape(told)}</p><pre>{escape(cut(str(row["prompt"])))}</pre>'


def response_box(name: str, row: Row | None) -> str:
    """A response below its name, with its score and what came of it; None: there is none."""
    if row is None:
        return f'<p><b>{escape(name)}</b></p><p class="note">no response</p>'
    score = "no score" if row["score"] is None else f"score {row['score']:g}"
    told = [f"{row['num_tokens']} tokens", str(row["finish_reason"])]
    pieces = [turn for turn in row["turns"] if "first" in turn] if "turns" in row else [row]
    if "turns" in row:
        told.insert(0, counted(row["num_turns"] // 2, "turn"))
    advantages = [value for piece in pieces for value in piece["advantages"] or () if value is not None]
    if advantages:
        told.append(f"advantage {math.fsum(advantages) / len(advantages):.3g}")
    if row["error"]:
        told.append(cut(str(row["error"]), 200))
    kind = "" if row["score"] is None else ' class="good"' if row["score"] > 0 else ' class="bad"'
    return (
        f"<p><b>{escape(name)}</b> <span{kind}>{escape(score)}</span> <small>{escape(', '.join(told))}</small></p>"
        f"{_turns(row) if 'turns' in row else f'<pre>{_tokens(row)}</pre>'}"
    )


def conversation_box(messages: Sequence[Mapping[str, Any]]) -> str:
    """Messages {role, content, name} of which nothing else is known, the model's turns numbered; of many the ends."""
    boxes, number = [], 0
    for message in messages:
        if message["role"] == "assistant":
            number += 1
            name, text = f"<b>turn {number}</b> assistant", escape(cut(message["content"]))
            boxes.append(f'<div class="turn"><small>{name}</small><pre>{text}</pre></div>')
        else:
            boxes.append(_observed(message))
    if len(boxes) > MESSAGES:
        note = f'<p class="note">... {counted(len(boxes) - MESSAGES, "message")} left out ...</p>'
        boxes = [*boxes[: MESSAGES // 2], note, *boxes[-MESSAGES // 2 :]]
    return "".join(boxes)


def style_of(rows: Iterable[Row]) -> str:
    """What a page's style has beside its own to show these; nothing where none is an episode."""
    return TURNS_STYLE if any("turns" in row for row in rows) else ""


def counted(count: int, what: str) -> str:
    """As 1 turn, 2 turns."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def call_in_words(call: Mapping[str, Any]) -> str:
    """As Python writes a call, its arguments as JSON."""
    given = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call["arguments"].items())
    return f"{call['name'] or '?'}({given})"


def _turns(row: Row) -> str:
    """An episode's entries, the model's turns numbered."""
    parts, number = [], 0
    for entry in row["turns"]:
        if entry["role"] == "assistant":
            number += 1
            parts.append(_sampled(f"turn {number}", entry))
        elif entry["role"] == "left out":
            parts.append(f'<p class="note">... {counted(entry["count"], "message")} left out ...</p>')
            number = row["num_turns"] // 2 - sum(it["role"] == "assistant" for it in row["turns"]) + number
        else:
            parts.append(_observed(entry))
    return "".join(parts)


def _sampled(name: str, turn: Row) -> str:
    told = [f"assistant, {counted(turn['num_tokens'], 'token')}"]
    if "reward" in turn:
        told.append(f"reward {turn['reward']:g}")
    if "answer_s" in turn:
        told.append(f"answered in {seconds_in_words(turn['answer_s'])}")
    slow = ' class="bad"' if turn.get("answer_s", 0) > SLOW_S else ""
    calls = "".join(_call(call) for call in turn["calls"])
    return (
        f'<div class="turn"><small><b>{escape(name)}</b> <span{slow}>{escape(", ".join(told))}</span></small>'
        f"<pre>{_tokens(turn)}</pre>{calls}</div>"
    )


def seconds_in_words(seconds: float) -> str:
    """Two digits of them, in ms below a tenth of one."""
    return f"{seconds:.2g} s" if seconds >= 0.1 else f"{1000 * seconds:.2g} ms"


def _call(call: Mapping[str, Any]) -> str:
    error = f' <span class="bad">not made: {escape(cut(str(call["error"]), 300))}</span>' if "error" in call else ""
    return f'<p class="call">calls {escape(cut(call_in_words(call), 1000))}{error}</p>'


def _observed(entry: Row) -> str:
    """What a tool or the user said; what our own words call an error stands out."""
    name = f" {entry['name']}" if entry.get("name") else ""
    bad = ' class="bad"' if entry["role"] == "tool" and entry["content"].startswith("error: ") else ""
    return (
        f'<div class="observed"><small>observed, {escape(entry["role"] + name)}</small>'
        f"<pre{bad}>{escape(cut(entry['content']))}</pre></div>"
    )


def _tokens(row: Row) -> str:
    """The response's tokens; where its middle is left out, in two parts."""
    if row["left_out"] is None:
        return _part(row, 0, len(row["texts"]), first=0)
    place, count = row["left_out"]
    note = f'<span class="note">\n... {count} tokens left out ...\n</span>'
    return _part(row, 0, place, first=0) + note + _part(row, place, len(row["texts"]), first=place + count)


def _part(row: Row, begin: int, end: int, *, first: int) -> str:
    """Tokens `begin` to `end` of those that are kept; `first` is the place of the first one in the response."""
    log_probs = row["log_probs"] and [float(value) for value in row["log_probs"][begin:end]]  # infinity is text in JSON
    advantages = row["advantages"] and row["advantages"][begin:end]
    spans = []
    for at, text in enumerate(row["texts"][begin:end]):
        shade = _shade(log_probs[at]) if log_probs else ""
        spans.append(f"<i{shade}>{escape(text)}</i>")
    told = ""
    if log_probs:
        told += f' data-log-probs="{",".join(f"{value:.3g}" for value in log_probs)}"'
    if advantages:
        texts = ["none" if value is None else f"{value:.3g}" for value in advantages]
        told += f' data-advantages="{texts[0] if len(set(texts)) == 1 else ",".join(texts)}"'
    return f'<span class="tokens" data-first="{first}"{told}>{"".join(spans)}</span>'


def _shade(log_prob: float) -> str:
    """The class of a token that was not likely: below 1/2, 1/10, 1/100."""
    for name, limit in (("p3", 0.01), ("p2", 0.1), ("p1", 0.5)):
        if log_prob < math.log(limit):
            return f' class="{name}"'
    return ""


def read_rows(data: bytes) -> list[dict[str, Any]]:
    """The rows of a tokens/step_N.jsonl, without a last line cut short by a crash."""
    return [json.loads(line) for line in data.split(b"\n")[:-1] if line.strip()]
