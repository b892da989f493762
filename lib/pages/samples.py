"""Responses as a page shows them: side by side below their prompt, token by token under a mouse or a finger."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lib.pages.page import cut, escape

Row = Mapping[str, Any]
"""A shown sample, as lib/tracking/run.py's `save_tokens` describes it."""


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
    advantages = [value for value in row["advantages"] or () if value is not None]
    if advantages:
        told.append(f"advantage {math.fsum(advantages) / len(advantages):.3g}")
    if row["error"]:
        told.append(cut(str(row["error"]), 200))
    kind = "" if row["score"] is None else ' class="good"' if row["score"] > 0 else ' class="bad"'
    return (
        f"<p><b>{escape(name)}</b> <span{kind}>{escape(score)}</span> <small>{escape(', '.join(told))}</small></p>"
        f"<pre>{_tokens(row)}</pre>"
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
