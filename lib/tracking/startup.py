"""The start-up: what it does while it lasts, and where its seconds went."""

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from lib.config.reporting import is_first_rank
from lib.dist import SINGLE
from lib.tracking.console import format_table
from lib.tracking.terminal import Terminal


class StartupTimer:
    """Where the seconds went between the launch (of torchrun, where there is one) and the first training step.

    No garbage is collected meanwhile: what is imported and built stays, and a search of all of it takes up to .2 s
    (EXPERIMENTS.md).
    """

    def __init__(self) -> None:
        gc.disable()
        launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
        age = _process_age_s(launcher)
        self._launched = time.monotonic() - age
        self._phases = [("launch and imports", age)]
        self.terminal = Terminal(replace(SINGLE, rank=0 if is_first_rank() else 1), None)
        """Where a phase that lasts is shown; the run's own, as soon as there is a run."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures its body as one row of the table, and shows it while it lasts. Phases do not nest."""
        start = time.monotonic()
        with self.terminal.progress(f"start: {name}"):
            yield
        self._phases.append((name, time.monotonic() - start))

    @property
    def total(self) -> float:
        """Seconds since the launch."""
        return time.monotonic() - self._launched

    def table(self) -> str:
        """The phases and their seconds, ending in `launch -> first step: X s`. Call it when the first step begins:
        garbage is collected again."""
        gc.enable()
        total = self.total
        phases = [*self._phases, ("other", total - sum(seconds for _, seconds in self._phases))]
        rows = [(name, f"{seconds:.1f}") for name, seconds in phases]
        return f"{format_table(('start-up', 'seconds'), rows)}\n  launch -> first step: {total:.1f} s"


def _process_age_s(pid: int) -> float:
    """Seconds since the process started, from the 22nd field of its stat file (clock ticks after boot)."""
    started = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, float(Path("/proc/uptime").read_text().split()[0]) - started)
