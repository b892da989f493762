"""What the terminal shows of training: a row per step, below a header that comes again; 80 columns at most."""

import math
import time
from collections import deque
from collections.abc import Mapping

from lib.tracking.progress import duration

COLUMNS = {
    "reward": 6, "length": 6, "clip": 4, "equal": 5, "grad": 5, "sec": 5, "gen": 5, "upd": 5, "tok/s": 6, "elapsed": 7,
    "ETA": 6,
}  # fmt: skip
"""Header -> width, after the step's own column."""
LEGEND = """\
a row per step: means of reward and of length in tokens; clip: responses cut at
the limit; equal: groups of equal rewards, which teach nothing; grad: its norm;
sec: seconds, of them gen(eration) and upd(ate); tok/s: of all ranks together"""
DETAILS = (
    ("actor/entropy", "entropy {:.3g}"),
    ("actor/kl_loss", "KL {:.3g}"),
    ("actor/reward_kl_penalty", "KL {:.3g}"),
    ("training/rollout_log_probs_diff/mean", "mismatch {:.2g}"),
    ("critic/vf_loss", "critic loss {:.3g}"),
    ("critic/vf_explained_var", "critic explains {:.2f}"),
)
EVERY = 10  # steps between two lines of details, and at most that many rows below one header
WINDOW = 10  # steps whose mean time, validation and saves included, those to come are taken to need
WIDTH = 80


class StepTable:
    """The rows of one start of a run: they know when it began, and how long the last steps took."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self._start = time.monotonic()
        self._ends: deque[float] = deque(maxlen=WINDOW + 1)
        self._header_is_due, self._is_first = True, True

    def interrupted(self) -> None:
        """Other lines have come between: the next row gets a header."""
        self._header_is_due = True

    def lines(self, row: Mapping[str, float]) -> str:
        """The row of a step, by its metrics; now is its end. Every 10 steps a second line, with entropy, KL, the
        mismatch of engine and trainer, and memory. A number that is not known is a dash."""
        now = time.monotonic()
        self._ends.append(now)
        cells = [f"{row['step']}/{self.num_steps}", *self._cells(row, now)]
        width = len(f"{self.num_steps}/{self.num_steps}")
        widths = (max(width, len("step")), *COLUMNS.values())
        lines = []
        if self._header_is_due:
            lines += [LEGEND] * self._is_first + [_aligned(("step", *COLUMNS), widths)]
        lines.append(_aligned(cells, widths))
        if is_detailed := self._is_first or row["step"] % EVERY == 0:
            lines += _wrapped(_details(row), indent=" " * (widths[0] + 1))
        self._header_is_due, self._is_first = is_detailed and not self._is_first, False
        return "\n".join(lines)

    def _cells(self, row: Mapping[str, float], now: float) -> list[str]:
        def share(name: str) -> str:
            return f"{100 * row[name]:.0f}%" if math.isfinite(row.get(name, math.nan)) else "-"

        updates = [row[name] for name in ("timing_s/update_actor", "timing_s/update_critic") if name in row]
        update = sum(updates) if updates else None
        per_step = row.get("timing_s/step")
        if len(self._ends) > 1:
            per_step = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        left = None if per_step is None else per_step * (self.num_steps - row["step"])
        has_rate = "perf/total_num_tokens" in row and row.get("timing_s/step")
        return [
            short(row["critic/score/mean"], 3),
            short(row.get("response_length/mean"), 1),
            share("response_length/clip_ratio"),
            share("reward/constant_group_ratio"),
            of_any_size(row.get("actor/grad_norm", math.nan)),
            *(short(seconds, 1, width=5) for seconds in (row.get("timing_s/step"), row.get("timing_s/gen"), update)),
            rate(row["perf/total_num_tokens"] / row["timing_s/step"]) if has_rate else "-",
            duration(now - self._start),
            "-" if left is None else duration(left),
        ]


def short(value: float | None, digits: int, *, width: int = 6) -> str:
    """The value with so many digits behind its point, or fewer where it would be wider."""
    if value is None or not math.isfinite(value):
        return "-"
    for kept in range(digits, -1, -1):
        if len(text := f"{value:.{kept}f}") <= width:
            return text
    return f"{value:.0e}".replace("e+0", "e")


def of_any_size(value: float) -> str:
    """The value with two digits that count: 0.84, 12, 8.4e-05 as 8.4e-5."""
    if not math.isfinite(value):
        return "-" if math.isnan(value) else str(value)
    text = f"{value:.0f}" if 100 <= abs(value) < 1e5 else f"{value:.2g}"
    return text if len(text) <= 5 else f"{value:.1e}".replace("e+0", "e").replace("e-0", "e-")


def rate(value: float) -> str:
    """2,480 or 31.2k or 0.25M."""
    if value < 1e4:
        return f"{value:,.0f}"
    return f"{value / 1e3:.1f}k" if value < 99950 else f"{value / 1e6:.2f}M"


def _details(row: Mapping[str, float]) -> list[str]:
    parts = [form.format(row[name]) for name, form in DETAILS if name in row]
    memory = row.get("perf/max_memory_reserved_gb", row.get("perf/cpu_memory_used_gb"))
    return parts if memory is None else [*parts, f"memory {memory:.1f} GiB"]


def _aligned(cells: list[str] | tuple[str, ...], widths: tuple[int, ...]) -> str:
    """The cells to the right of their columns; one that is too wide takes from the room of the next."""
    line, end = "", -1
    for cell, width in zip(cells, widths, strict=True):
        end += width + 1
        line = f"{line}{' ' * (end > width)}{cell.rjust(end - len(line) - (end > width))}"
    return line


def _wrapped(parts: list[str], indent: str) -> list[str]:
    """The parts joined by bars, on as many lines as they need."""
    lines: list[str] = []
    for part in parts:
        if lines and len(longer := f"{lines[-1]} | {part}") <= WIDTH:
            lines[-1] = longer
        else:
            lines.append(indent + part)
    return lines
