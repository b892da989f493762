"""The terminal that a script was started from, while what libraries print goes to a log."""

import ctypes
import os
import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TextIO

from lib.dist import World
from lib.errors import printable
from lib.secret_values import blank
from lib.tracking.progress import Phase
from lib.tracking.run_folder import open_lossy

CLEAR_LINE = "\r\x1b[K"
FILE_WIDTH = 100  # columns
UNKNOWN_WIDTH = 80  # of a terminal that does not tell
BAR_S = 0.2  # between two pictures of a bar
LOOK_S = 1.0  # between two looks whether a line is due


class Terminal:
    """Lines and progress bars of rank 0. With a log, what this rank prints leads there meanwhile: file descriptors 1
    and 2, and Python's streams themselves, because a print to a full disk raises, and the log (`open_log`) does not.

    Use it as a context manager, or call `restore`: descriptors and streams are given back.
    """

    def __init__(self, world: World, log: TextIO | None) -> None:
        self.world, self.log = world, log
        self.console = open_lossy(os.dup(1), "w", encoding=sys.stdout.encoding, errors="replace")
        self._writing = threading.RLock()  # by the main thread, and by the one that shows a phase
        self._phases: list[Phase] = []  # within one another, as their bodies stand
        self._said_at = time.monotonic()
        self._saved: tuple[int, int] | None = None
        if log is not None:
            _flush()
            self._saved, self._streams = (os.dup(1), os.dup(2)), (sys.stdout, sys.stderr)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            sys.stdout = sys.stderr = log

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.restore()

    def restore(self) -> None:
        """Gives file descriptors 1 and 2 and Python's streams back to the terminal; `say` goes on working."""
        if self._saved is not None:
            self.log.flush()
            sys.stdout, sys.stderr = self._streams
            _flush()
            for fd, saved in zip((1, 2), self._saved, strict=True):
                os.dup2(saved, fd)
                os.close(saved)
        self._saved = None

    def write_error(self, text: str) -> None:
        """Writes to where file descriptor 2 led before, on whichever rank."""
        with suppress(OSError):  # it is the error that matters, not that it cannot be written
            os.write(
                2 if self._saved is None else self._saved[1], printable(blank(text)).encode(errors="backslashreplace")
            )

    def say(self, text: str) -> None:
        """Prints a line, or several, on the terminal and in rank 0's log; escape codes as text."""
        if self.world.rank != 0:
            return
        text = printable(text)
        with self._writing:
            self._said_at = time.monotonic()
            print((CLEAR_LINE if self.console.isatty() else "") + text, file=self.console, flush=True)
            if self.log is not None:
                print(text, file=self.log, flush=True)

    def fitted(self, text: str) -> str:
        """Lines of a label and words, such as `run          12 steps`, in lines that a terminal need not cut: the words
        go on below the first one. Not for what somebody may copy."""
        return "\n".join(map(self._fit, text.split("\n"))) if self.console.isatty() else text

    def _fit(self, line: str) -> str:
        label = re.match(r" *\S+ {2,}|", line)[0]
        indent = " " * (len(label) or 2)
        pieces = textwrap.wrap(
            line[len(label) :], max(self.width, len(label) + 20), initial_indent=label, subsequent_indent=indent,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        return "\n".join(pieces) or line

    @property
    def width(self) -> int:
        """Columns that a line may take: the terminal's, or 100 in a file."""
        with suppress(OSError):
            return max(40, os.get_terminal_size(self.console.fileno()).columns or UNKNOWN_WIDTH)
        return FILE_WIDTH

    @contextmanager
    def progress(self, label: str, total: float = 0) -> Iterator[Callable[..., None]]:
        """Shows, while its body lasts, that it does: a bar on a terminal; else a line after 30 s of silence, then after
        1, 2, 5, 5 ... minutes. Call the yielded function for every one of `total` that is done (or with how much).

        Where one stands within another, the inner one is shown. A thread of rank 0 shows it, whatever the body waits
        for.
        """
        phase = Phase(label, total, None if self.log is None else Path(self.log.name))
        if self.world.rank != 0:
            yield phase.advance
            return
        over = threading.Event()
        thread = threading.Thread(target=self._show, args=(phase, over), name="progress", daemon=True)
        self._phases.append(phase)
        thread.start()
        try:
            yield phase.advance
        finally:
            over.set()
            thread.join()
            self._phases.remove(phase)
            if self.console.isatty():
                print(CLEAR_LINE, end="", file=self.console, flush=True)

    def _show(self, phase: Phase, over: threading.Event) -> None:
        is_tty = self.console.isatty()
        while not over.wait(BAR_S if is_tty else LOOK_S):
            with self._writing:
                now = time.monotonic()
                if self._phases[-1] is not phase:
                    continue
                if is_tty:
                    bar = printable(phase.bar(now, width=self.width - 1))
                    print(f"{CLEAR_LINE}{bar}", end="", file=self.console, flush=True)
                elif phase.is_due(now, said_at=self._said_at):
                    self.say(phase.line(now, width=self.width))


def _flush() -> None:
    """Empties Python's and C's output buffers, so that nothing printed before a redirection comes out after it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # on a full disk
            stream.flush()
    ctypes.CDLL(None).fflush(None)
