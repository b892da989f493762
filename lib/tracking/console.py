"""What people look at: lines and tables for the terminal, TensorBoard, the learning curve, and the start-up times."""

import io
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

VALIDATION_NAME = re.compile(r"val-core/(.+)/([^/]+)/((?:mean|best|maj)@\d+|greedy)(?:/mean)?")
"""A core validation metric: source, variable, statistic."""

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


def training_line(row: Mapping[str, float], num_steps: int) -> str:
    """`step 12/60 | reward 0.413 | grad norm 0.84 | length 11.2 | 3.1 s | 1,240 tok/s per rank`, as far as known."""
    parts = [f"step {row['step']}/{num_steps}"]
    for name, form in (
        ("critic/score/mean", "reward {:.3f}"),
        ("actor/pg_loss", "loss {:+.4f}"),
        ("actor/grad_norm", "grad norm {:.3g}"),
        ("critic/vf_explained_var", "critic explains {:.2f}"),
        ("response_length/mean", "length {:.1f}"),
        ("timing_s/step", "{:.1f} s"),
        ("perf/throughput", "{:,.0f} tok/s per rank"),
    ):
        if name in row:
            parts.append(form.format(row[name]))
    return " | ".join(parts)


def validation_values(history: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Per core validation metric (without the /std ones): its steps and values."""
    values: dict[str, list[tuple[int, float]]] = {}
    for row in history:
        for name, value in row.items():
            if VALIDATION_NAME.fullmatch(name):
                values.setdefault(name, []).append((row["step"], value))
    return values


def validation_table(history: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for name, values in validation_values(history).items():
        source, variable, metric = VALIDATION_NAME.fullmatch(name).groups()
        change = f"{values[-1][1] - values[0][1]:+.3f}" if len(values) > 1 else ""
        rows.append((source, f"{variable}/{metric}", f"{values[-1][1]:.3f}", change))
    header = ("source", "metric", "value", "change since start")
    return f"validation at step {history[-1]['step']}\n{format_table(header, rows)}"


def shorten(text: str, width: int = 60) -> str:
    """The text on one line, its middle left out when it is longer than `width`."""
    text = repr(text)[1:-1]
    return text if len(text) <= width else f"{text[: width // 2 - 2]} ... {text[-(width // 2 - 3) :]}"


def plot_learning_curve(history: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws validation scores per source (top) and the training reward (bottom) by step, from metrics.jsonl's rows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True}
    with pyplot.rc_context({**style, "grid.alpha": 0.25, "legend.frameon": False}):
        figure, (top, bottom) = pyplot.subplots(2, sharex=True, figsize=(8, 6), height_ratios=(3, 2), layout="tight")
        for name, values in validation_values(history).items():
            source, variable, metric = VALIDATION_NAME.fullmatch(name).groups()
            label = f"{source}: {variable}/{metric}  {values[0][1]:.3f} to {values[-1][1]:.3f}"
            top.plot(*zip(*values, strict=True), marker="o", markersize=5, linewidth=2, label=label)
        rewards = [(row["step"], row["critic/score/mean"]) for row in history if "critic/score/mean" in row]
        if rewards:
            steps, values = zip(*rewards, strict=True)
            window = max(2, len(values) // 20)
            means = [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]
            bottom.plot(steps, values, color="tab:gray", alpha=0.35, linewidth=1, label="each step")
            bottom.plot(steps, means, color="tab:green", linewidth=2, label=f"mean of the last {window} steps")
        top.set(title="Learning curve", ylabel="validation")
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


# ---- Start-up ----


class StartupTimer:
    """Where the seconds went between the launch (of torchrun, where there is one) and the first training step."""

    def __init__(self) -> None:
        launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
        age = _process_age_s(launcher)
        self._launched = time.monotonic() - age
        self._phases = [("launch and imports", age)]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures its body as one row of the table. Phases do not nest."""
        start = time.monotonic()
        yield
        self._phases.append((name, time.monotonic() - start))

    @property
    def total(self) -> float:
        """Seconds since the launch."""
        return time.monotonic() - self._launched

    def table(self) -> str:
        """The phases and their seconds, ending in `launch -> first step: X s`. Call it when the first step begins."""
        total = self.total
        phases = [*self._phases, ("other", total - sum(seconds for _, seconds in self._phases))]
        rows = [(name, f"{seconds:.1f}") for name, seconds in phases]
        return f"{format_table(('start-up', 'seconds'), rows)}\n  launch -> first step: {total:.1f} s"


def _process_age_s(pid: int) -> float:
    """Seconds since the process started, from the 22nd field of its stat file (clock ticks after boot)."""
    started = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, float(Path("/proc/uptime").read_text().split()[0]) - started)
