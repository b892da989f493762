"""A worker as the trainer sees it: a process of its own, and a channel."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from lib.workers.keeper import END

END_TIMEOUT_S = 5.0  # from a closed channel to the end of its worker, which tells why; others are not served meanwhile
GROWN_GIB, GROWN_TIMES = 8.0, 10  # a worker beyond this, and so many times what it held first, has a leak
ROOT = Path(__file__).resolve().parents[2]
BOOT = "import sys; sys.path.insert(0, sys.argv[3]); from {} import main; main(*map(int, sys.argv[1:3]))"


class WorkerProcess:
    """A process behind its keeper, which runs `main` of `module`, and its channel."""

    def __init__(
        self, module: str, what: str, spec: bytes, environment: dict[str, str], start_timeout_s: float
    ) -> None:
        """`what` it is, in messages; `spec`: the frame that it gets first."""
        self.what = what
        self.channel, theirs = socket.socketpair()
        self.channel.setblocking(False)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", BOOT.format(module), str(theirs.fileno()), str(os.getpid()), str(ROOT)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=environment,
            )
        self.outgoing = bytearray(spec)
        self.incoming = bytearray()
        self.started = False
        self.first_memory = 0  # bytes after its first call: a model that this one loaded is no leak
        self.deadline = time.monotonic() + start_timeout_s

    @property
    def next_deadline(self) -> float:
        """When it is over its time, by time.monotonic()."""
        return self.deadline

    def has_outgrown(self, max_gib: float | None, memory: int) -> bool:
        """Whether the worker, which holds `memory` bytes after a call, is to be replaced."""
        if max_gib is None and memory <= GROWN_TIMES * self.first_memory:
            return False
        return memory > 2**30 * (max_gib or GROWN_GIB)

    def send(self) -> None:
        """Sends as much of `outgoing` as the channel takes."""
        with suppress(BlockingIOError):
            del self.outgoing[: self.channel.send(self.outgoing)]

    def receive(self) -> list[dict[str, Any]]:
        """The messages that are complete now. Raises OSError or ValueError when none can come any more."""
        received = b""
        with suppress(ConnectionError):  # it ended with a request unread
            received = self.channel.recv(1 << 16)
        if not received:
            raise OSError(self._how_it_ended())
        self.incoming += received
        messages = []
        while len(self.incoming) >= 8 and len(self.incoming) >= (end := 8 + struct.unpack(">Q", self.incoming[:8])[0]):
            messages.append(json.loads(bytes(self.incoming[8:end])))
            del self.incoming[:end]
        return messages

    def kill(self) -> None:
        """Has the process ended by its keeper, with everything that it started."""
        self.channel.close()
        self.process.send_signal(END)

    def _how_it_ended(self) -> str:
        try:
            code = self.process.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"{self.what} closed its channel"
        return f"{self.what} was killed by {signal.Signals(-code).name}" if code < 0 else (
            f"{self.what} exited with code {code}"
        )  # fmt: skip
