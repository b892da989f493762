"""What takes long, shown while it lasts: a bar that moves on a terminal, elsewhere a line now and then."""

import re
import time
from itertools import chain, repeat
from pathlib import Path

SILENCE_S = 30.0  # without a line, after which a phase says that it goes on
PAUSES_S = (60.0, 120.0, 300.0)  # between its further lines; the last one repeats
BAR = 20  # columns
TAIL_BYTES = 4096
VLLM_PREFIX = r"^(?:\(.*?\) )*(?:INFO|WARNING|DEBUG) \d\d-\d\d [\d:]+ \[[^]]*\] "


class Phase:
    """One thing that takes long, in words, and how much of it is done."""

    def __init__(self, label: str, total: float, log: Path | None) -> None:
        """`total`: of what `advance` counts; 0: not known, then the words end in what `log` has got since."""
        self.label, self.total, self.done = label, total, 0.0
        self.start = time.monotonic()
        self._log, self._log_size = log, _size(log)
        self._pause, self._pauses = SILENCE_S, chain(PAUSES_S, repeat(PAUSES_S[-1]))

    def advance(self, amount: float = 1.0) -> None:
        self.done += amount

    def is_due(self, now: float, *, said_at: float) -> bool:
        """Whether it is time for a line, when the last one of anybody's came at `said_at`; the next is due later."""
        if now - said_at < self._pause:
            return False
        self._pause = next(self._pauses)
        return True

    def line(self, now: float, *, width: int) -> str:
        """`  step 3/60: sampling 12/32, 41s`, cut at the width."""
        count = f" {self.done:.0f}/{self.total:g}" if self.total > 1 else ""
        line = f"  {self.label}{count}, {duration(now - self.start)}"
        if not self.total and (last := self._last_log_line()):
            line += f": {last}"
        return line if len(line) <= width else f"{line[: width - 3]}..."

    def bar(self, now: float, *, width: int) -> str:
        """The line with a bar behind it, where a total is known."""
        if not self.total:
            return self.line(now, width=width)
        filled = "#" * min(BAR, int(BAR * self.done / self.total + 1e-6))
        return f"{self.line(now, width=width - BAR - 3)} [{filled:.<{BAR}}]"

    def _last_log_line(self) -> str:
        if _size(self._log) <= self._log_size:
            return ""
        with open(self._log, "rb") as file:
            file.seek(max(self._log_size, _size(self._log) - TAIL_BYTES))
            lines = [line.strip() for line in re.split(r"[\r\n]+", file.read().decode(errors="replace"))]
        others = (line for line in reversed(lines) if line and not line.startswith(self.label))
        return re.sub(VLLM_PREFIX, "", next(others, ""))


def duration(seconds: float) -> str:
    """37s, 2m40s, 3h05m or 2d04h: six columns at most, below a hundred days."""
    seconds = round(seconds)
    for unit, size, below, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if seconds >= size:
            return f"{seconds // size}{unit}{seconds % size // part:02d}{below}"
    return f"{seconds}s"


def _size(path: Path | None) -> int:
    try:
        return path.stat().st_size if path else 0
    except OSError:
        return 0
