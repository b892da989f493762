"""What people look at: tables and samples for the terminal, TensorBoard, the learning curve."""

import io
import re
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from lib.pages.samples import call_in_words, counted

T = TypeVar("T")

VALIDATION_NAME = re.compile(r"val-core/(.+)/([^/]+)/((?:mean|best|maj)@\d+|greedy)(?:/mean)?")
"""A core validation metric: source, variable, statistic."""

NUM_LINES = 8  # of an episode on the terminal

# ---- What the terminal shows ----


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The rows in aligned columns under their header: the first column to the left, the others to the right."""
    first, *others = (max(len(row[column]) for row in (header, *rows)) for column in range(len(header)))
    lines = (header, ["-" * width for width in (first, *others)], *rows)
    aligned = (
        [line[0].ljust(first), *(cell.rjust(width) for cell, width in zip(line[1:], others, strict=True))]
        for line in lines
    )
    return "\n".join("  " + "  ".join(cells) for cells in aligned)


def validation_values(history: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Per core validation metric (without the /std ones): its steps and values."""
    values: dict[str, list[tuple[int, float]]] = {}
    for row in history:
        for name, value in row.items():
            if VALIDATION_NAME.fullmatch(name):
                values.setdefault(name, []).append((row["step"], value))
    return values


def validation_table(history: Sequence[Mapping[str, Any]]) -> str:
    """The newest validation; where it is not the first one, with what has changed since that."""
    rows = []
    for name, values in validation_values(history).items():
        source, variable, metric = VALIDATION_NAME.fullmatch(name).groups()
        change = f"{values[-1][1] - values[0][1]:+.3f} since step {values[0][0]}" if len(values) > 1 else ""
        rows.append((source, f"{variable}/{metric}", f"{values[-1][1]:.3f}", change))
    header = ("source", "metric", "value", "change")
    if not any(change for *_, change in rows):
        header, rows = header[:-1], [row[:-1] for row in rows]
    return f"validation at step {history[-1]['step']}\n{format_table(header, rows)}"


def in_words(name: str, values: Sequence[tuple[int, float]]) -> str:
    """What came of a validation metric: its first and last value, or the only one."""
    (first_step, first), (last_step, last) = values[0], values[-1]
    if len(values) == 1:
        return f"{name}: {last:.3f} (step {last_step}, the only validation)"
    return f"{name}: {first:.3f} (step {first_step}) -> {last:.3f} (step {last_step})"


def sample_lines(row: Mapping[str, Any], *, width: int) -> str:
    """A prompt with its source, and below it the response with its score, each shortened to a line; an episode's turns,
    calls and observations a line each."""
    prompt, response = " ".join(str(row["prompt"]).split()), repr(str(row["response"]))[1:-1]
    verdict = f"  (score {row['score']}, expected {shorten(str(row['ground_truth']), 30)}, {row['finish_reason']})"
    source = f"  {shorten(str(row['data_source']), 30)} | "
    if "turns" in row:
        lines = [f"    {shorten(line, width - 4)}" for line in _turn_lines(row["turns"])]
        told = f"    = {counted(row['num_turns'] // 2, 'turn')}{verdict}"
        return "\n".join([f"{source}{shorten(prompt, width - len(source))}", *lines, told])
    return (
        f"{source}{shorten(prompt, width - len(source))}\n"
        f"    -> {shorten(response, max(20, width - 7 - len(verdict)))}{verdict}"
    )


def _turn_lines(turns: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was sampled behind an arrow, what was observed behind its role; of many the first and the last lines."""
    lines = []
    for turn in turns:
        text = repr(str(turn["content"]))[1:-1]
        if turn["role"] == "assistant":
            lines.append(f"-> {text}")
            for call in turn.get("calls", ()):
                lines.append(f"   calls {call_in_words(call)}{': ' + call['error'] if 'error' in call else ''}")
        else:
            lines.append(f"   {turn['role']}: {text}")
    left_out = len(lines) - NUM_LINES
    half = NUM_LINES // 2
    return lines if left_out <= 0 else [*lines[:half], f"   ... {left_out} lines ...", *lines[-half:]]


def choose_different(rows: Sequence[T], count: int, *, source_and_prompt: Callable[[T], tuple[Any, Any]]) -> list[T]:
    """Up to `count` rows, no two of one prompt, of as many sources as there are; the first ones of each."""
    by_source: dict[Any, dict[Any, T]] = {}
    for row in rows:
        source, prompt = source_and_prompt(row)
        by_source.setdefault(source, {}).setdefault(prompt, row)
    in_turn = zip_longest(*(of_source.values() for of_source in by_source.values()))
    return [row for turn in in_turn for row in turn if row is not None][:count]


def shorten(text: str, width: int) -> str:
    """The text, its middle left out when it is longer than `width`."""
    return text if len(text) <= width else f"{text[: width // 2 - 2]} ... {text[-(width // 2 - 3) :]}"


def plot_learning_curve(history: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws validation scores per source (top) and the training reward (bottom) by step, from metrics.jsonl's rows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True}
    with pyplot.rc_context({**style, "grid.alpha": 0.25, "legend.frameon": False}):
        figure, (top, bottom) = pyplot.subplots(2, sharex=True, figsize=(8, 6), height_ratios=(3, 2), layout="tight")
        dashes = cycle(("-", "--", ":", "-."))  # so that of two equal lines both are seen
        for name, values in validation_values(history).items():
            source, variable, metric = VALIDATION_NAME.fullmatch(name).groups()
            ends = [f"{value:.3f}" for _, value in (values[0], values[-1])[-len(values) :]]  # one, where there is one
            label = f"{source}: {variable}/{metric}  {' to '.join(ends)}"
            top.plot(*zip(*values, strict=True), marker="o", markersize=5, linewidth=2, label=label, ls=next(dashes))
        rewards = [(row["step"], row["critic/score/mean"]) for row in history if "critic/score/mean" in row]
        if rewards:
            steps, values = zip(*rewards, strict=True)
            window = max(2, len(values) // 20)
            means = [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]
            bottom.plot(steps, values, color="tab:gray", alpha=0.35, linewidth=1, label="each step")
            bottom.plot(steps, means, color="tab:green", linewidth=2, label=f"mean of the last {window} steps")
        top.set(title=f"Learning curve of {path.parent.name}", ylabel="validation")
        bottom.set(xlabel="step", ylabel="training reward")
        for axes in (top, bottom):
            if axes.lines:
                axes.legend(loc="best")
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


def tensorboard_record(**event: Any) -> bytes:
    """An event, by the fields of its protocol buffer, as it is in TensorBoard's files. It can be appended like a line.

    SummaryWriter writes in a thread of its own, which ends with the first write that fails.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    record = io.BytesIO()
    RecordWriter(record).write(Event(wall_time=time.time(), **event).SerializeToString())
    return record.getvalue()
