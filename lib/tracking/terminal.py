"""The terminal that a script was started from, while what libraries print goes to a log."""

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TextIO

from lib.dist import World
from lib.errors import printable
from lib.secret_values import blank
from lib.tracking.run_folder import open_lossy

CLEAR_LINE = "\r\x1b[K"


class Terminal:
    """Lines and progress bars of rank 0. With a log, what this rank prints leads there meanwhile: file descriptors 1
    and 2, and Python's streams themselves, because a print to a full disk raises, and the log (`open_log`) does not.

    Use it as a context manager, or call `restore`: descriptors and streams are given back.
    """

    def __init__(self, world: World, log: TextIO | None) -> None:
        self.world, self.log = world, log
        self.console = open_lossy(os.dup(1), "w", encoding=sys.stdout.encoding, errors="replace")
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
        print((CLEAR_LINE if self.console.isatty() else "") + text, file=self.console, flush=True)
        if self.log is not None:
            print(text, file=self.log, flush=True)

    @contextmanager
    def progress(self, label: str, total: int) -> Iterator[Callable[[], None]]:
        """A bar on a terminal, else a line every 10 seconds: call the yielded function for every one that is done."""
        start = shown = time.monotonic()
        is_tty, done = self.console.isatty(), 0

        def advance() -> None:
            nonlocal done, shown
            done, now = done + 1, time.monotonic()
            if self.world.rank != 0 or now - shown < (0.1 if is_tty else 10.0):
                return
            shown = now
            text = f"  {label}: {done}/{total}, {now - start:.0f} s"
            bar = "#" * min(20, 20 * done // max(1, total))
            if is_tty:
                print(f"{CLEAR_LINE}{text} [{bar:.<20}]", end="", file=self.console, flush=True)
            else:
                self.say(text)

        yield advance
        if is_tty and self.world.rank == 0:
            print(CLEAR_LINE, end="", file=self.console, flush=True)


def _flush() -> None:
    """Empties Python's and C's output buffers, so that nothing printed before a redirection comes out after it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # on a full disk
            stream.flush()
    ctypes.CDLL(None).fflush(None)
