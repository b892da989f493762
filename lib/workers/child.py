"""The worker's side: its channel, its prints, the signals that it outlives, and the user's file.

Imports little but the standard library, so that a worker starts in milliseconds, and never the trainer. Requests are
pickled (the trainer's own data), replies are JSON (nothing that the user's code returns is unpickled in the trainer),
both on a descriptor of their own, so prints cannot disturb them. It is no sandbox: the file is the operator's code.
"""

import io
import json
import os
import signal
import struct
import sys
import traceback
import types
from contextlib import suppress
from typing import Any, BinaryIO

from lib.errors import printable
from lib.secret_values import BlankedText, blank
from lib.workers.keeper import fork_behind_keeper

LOG_LIMIT = 4 * 1024**2  # bytes of prints kept per worker process
OWN_FILES = {__file__}  # whose lines tell a user nothing; workers add theirs
PAGE = os.sysconf("SC_PAGE_SIZE")


class StartError(Exception):
    """What the user's file holds cannot be used at all; the text is a finished message."""


def begin(fd: int, parent: int) -> tuple[BinaryIO, BinaryIO]:
    """Where requests come from and replies go to, in a process of its own behind a keeper: it ends when `parent` closes
    descriptor `fd`, sends END or dies."""
    fork_behind_keeper(fd, parent)
    _outlive_requests_to_stop()
    os.set_inheritable(fd, False)
    return os.fdopen(fd, "rb"), os.fdopen(fd, "wb", closefd=False)


def print_to(path: str) -> "CappedFile":
    """Where what the user's code prints goes from now on, without secrets."""
    output = CappedFile(path)
    sys.stdout = sys.stderr = BlankedText(io.BufferedWriter(output), line_buffering=True, errors="backslashreplace")
    return output


def frame(payload: bytes) -> bytes:
    """The payload behind its length in 8 bytes."""
    return struct.pack(">Q", len(payload)) + payload


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next payload; None at the end of the stream."""
    head = stream.read(8)
    return stream.read(struct.unpack(">Q", head)[0]) if len(head) == 8 else None


def write_frame(stream: BinaryIO, message: dict) -> None:
    """Sends one reply."""
    stream.write(frame(json.dumps(message).encode()))
    stream.flush()


def memory_bytes() -> int:
    """What this process holds alone, without files that it maps; 0 where the system does not say."""
    with suppress(OSError), open("/proc/self/statm") as file:
        resident, shared = map(int, file.read().split()[1:3])
        return (resident - shared) * PAGE
    return 0


def _outlive_requests_to_stop() -> None:
    """Keeps signals that a scheduler sends to all processes of a job from ending this one: the trainer decides.

    Handlers, since programs that the reward function starts would inherit signals that are ignored. Its forks get the
    usual ones back, and signals wait meanwhile: one that the reward function sends to end its child is not lost.
    """
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    usual = {number: signal.getsignal(number) for number in numbers}

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    def reset() -> None:
        for number, handler in usual.items():
            signal.signal(number, handler)
        unblock()

    for number in numbers:
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, numbers), after_in_parent=unblock, after_in_child=reset
    )


class CappedFile(io.RawIOBase):
    """A file that keeps the first LOG_LIMIT bytes and drops the rest: prints must not fill the disk."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "ab", buffering=0)  # noqa: SIM115 (open as long as the process lives)
        self.num_written = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1  # for code that asks; the descriptor itself leads to /dev/null

    def write(self, data: Any) -> int:
        kept = bytes(data)[: max(0, LOG_LIMIT - self.num_written)]
        with suppress(OSError):  # a full disk
            self.file.write(kept)
        self.num_written += len(data)
        return len(data)


# ---- The user's file ----


def import_file(path: str, source: bytes, name: str, *, what: str, flag: str) -> types.ModuleType:
    """The user's file as the module `name`, from the trainer's copy of its source: all workers of a run, also later
    ones, run the same code. Raises StartError."""
    module = types.ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module
    # Last, because a neighbour called types.py must not hide the standard library's.
    sys.path += [os.path.dirname(path), os.getcwd()]
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except BaseException as error:
        raise StartError(
            f"{what} does not import; {flag} {path}; {error_in_words(error)}; mend the file: it is "
            f"imported in a worker process with {sys.executable}"
        ) from error
    return module


def error_in_words(error: BaseException) -> str:
    """The error and where user code raised it: `ValueError: no digits [reward.py:12 in compute_score: int(text)]`."""
    frames = [
        f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}: {shorten(frame.line or '', 80)}"
        for frame in traceback.extract_tb(error.__traceback__, limit=-8)
        if frame.filename not in OWN_FILES
        and not frame.filename.startswith("<frozen")
        and not any(part in frame.filename for part in ("/asyncio/", "/concurrent/futures/"))
    ]
    text = shorten(blank(" ".join(traceback.format_exception_only(error))), 300)  # while secrets are whole
    return f"{text} [{' > '.join(frames[-3:])}]" if frames else text


def shorten(text: str, limit: int) -> str:
    text = " ".join(text.split())
    return printable(text if len(text) <= limit else text[: limit - 3] + "...")
