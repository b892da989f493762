"""Stopping a run from outside: a signal to any rank, or a time limit, ends all ranks together, between two steps.

A Python signal handler never runs while the main thread sits in a collective. So a thread of each rank reads the
signals' numbers (`signal.set_wakeup_fd`) and passes the request on to all ranks, within about a second, through the
store where they met. It only takes note: what runs long asks `Stopper.requested` and breaks off, and where all ranks
come together `Stopper.agreed` gives all of them the same answer.

SIGUSR1, which schedulers send some time before they end a job, stops as SIGTERM does, but the exit code is 0.

LLVM, which Triton compiles with in this process, puts handlers of its own behind Python's back, and swallows SIGUSR1.
So the thread goes on putting ours in place.
"""

import ctypes
import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as torch_dist

from lib.dist import ATTEMPT, World
from lib.errors import Stopped

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
POLL_S = 0.5  # between two looks at the store
LIBC = ctypes.CDLL(None)
SIGACTION_BYTES = 512  # at least its struct sigaction
ECHO_S = 2.0  # one request may arrive twice: from the scheduler, and handed on by torchrun


class Stopper:
    """What this rank knows of requests to stop. Signals are taken inside the `with` block; before it they kill.

    A second SIGTERM (SIGINT, SIGHUP, SIGQUIT) ends the process at once, and so does the first one when another rank
    has failed: torchrun then ends those that are left, and there is nothing to agree on.
    """

    def __init__(self, world: World, *, max_minutes: float | None = None) -> None:
        """`max_minutes`: from now on, or where torchrun has restarted the ranks from their first start. Executed by
        all ranks, after they have joined the process group."""
        self.world, self.max_minutes = world, max_minutes
        self._request: tuple[str, int] | None = None  # reason, exit code
        self._is_told = False
        self._arrivals: dict[int, float] = {}  # signal -> when it came first
        self._replaced: dict[int, Any] = {}  # signal -> the handler before ours
        self._ours: dict[int, ctypes.Array[ctypes.c_char]] = {}  # signal -> what the system knows of our handler
        self._longest_step_s = 0.0
        self._terminal = os.dup(2)  # stays what it is when a run moves descriptor 2 to its log
        self._sender: socket.socket | None = None
        self._closing = False
        self._store, started = None, time.time()
        if torch_dist.is_initialized():
            # A client of its own: the process group's waits in the main thread while the watcher asks.
            store = torch_dist.TCPStore(
                os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=30)
            )
            if world.rank == 0:  # torchrun's store outlives the ranks that it restarts
                started = float(store.compare_set("lockstep/started", "", str(started)))
            attempt = os.environ.get(ATTEMPT, "0")
            self._store = torch_dist.PrefixStore(f"lockstep/{attempt}/stop", store)
        self._deadline = started + 60 * max_minutes if max_minutes is not None else float("inf")

    def requested(self) -> bool:
        """Whether this rank knows of a request. Ranks learn of it at different moments: see `agreed`."""
        return self._request is not None

    def agreed(self) -> Stopped | None:
        """What all ranks are to stop for, the same on all of them. Executed by all ranks together."""
        if self._sender is not None:
            self._install()  # again: a library loaded since may have put handlers of its own
        requests = [request for request in self.world.gather(self._request) if request is not None]
        return Stopped(*requests[0]) if requests else None

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block, without collectives, that each rank may leave early with Stopped: then all raise it at its end."""
        broke_off = True
        with suppress(Stopped):
            yield
            broke_off = False
        stopped = self.agreed()
        assert stopped or not broke_off, "a rank broke off what the others go on with"
        if stopped:
            raise stopped

    def step_ended(self, seconds: float, *, save_s: float) -> Stopped | None:
        """As `agreed`, at the end of a step that took so long; also when the time is over.

        It is over when another step, as long as the longest so far, and a save of `save_s` seconds (0: not known yet,
        as long as a step then) would not end before the limit.
        """
        self._longest_step_s = max(self._longest_step_s, seconds)
        save_s = save_s or self._longest_step_s
        if self.world.rank == 0 and time.time() + self._longest_step_s + save_s > self._deadline:
            self._request = self._request or (
                f"the time limit of {self.max_minutes:g} minutes: a step of up to {self._longest_step_s:.0f} s and a "
                f"save of up to {save_s:.0f} s would not end before it", 0,
            )  # fmt: skip
        return self.agreed()

    # ---- Signals: the handler does nothing, the watcher's thread reads what has come ----

    def __enter__(self) -> "Stopper":
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._install()
        self._thread = threading.Thread(target=self._watch, name="stopper", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not isinstance(error, Stopped):
            self._tell_failure()
        self._closing = True
        self._sender.send(b"\0")
        self._thread.join()
        signal.set_wakeup_fd(-1)
        for number, handler in self._replaced.items():  # what is left is to leave: an echo must not disturb it
            signal.signal(number, signal.SIG_IGN if isinstance(error, Stopped) else handler)
        self._sender.close()
        self._receiver.close()
        self._sender = None

    def _install(self) -> None:
        for number in STOP_SIGNALS:
            handler = signal.getsignal(number)
            if handler in (signal.SIG_IGN, _take_note):  # `nohup` ignores SIGHUP, and so do we
                continue
            signal.signal(number, _take_note)
            signal.siginterrupt(number, False)  # no system call of anybody's fails for it
            self._replaced.setdefault(number, handler or signal.SIG_DFL)
            ours = ctypes.create_string_buffer(SIGACTION_BYTES)
            LIBC.sigaction(number, None, ours)
            self._ours[number] = ours  # the watcher uses it from now on
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)

    # What follows runs in the watcher's thread.

    def _watch(self) -> None:
        while not self._closing:
            for number, ours in list(self._ours.items()):
                LIBC.sigaction(number, ours, None)
            ready, _, _ = select.select([self._receiver], [], [], POLL_S)
            for number in self._receiver.recv(64) if ready else b"":
                if number in STOP_SIGNALS:
                    self._receive(number)
            try:
                self._exchange()
            except RuntimeError:  # the store has ended, with whoever held it
                self._store = None

    def _receive(self, number: int) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        is_second = now - self._arrivals.setdefault(number, now) > ECHO_S and number != signal.SIGUSR1
        if is_second or self._has_peer_failed():
            why = "came a second time" if is_second else "came after another rank had failed"
            os.write(self._terminal, f"{name} {why}: rank {self.world.rank} exits at once\n".encode())
            self._tell_failure()
            os._exit(128 + number)
        code = 0 if number == signal.SIGUSR1 else 128 + number
        self._request = self._request or (f"{name} on rank {self.world.rank}", code)

    def _exchange(self) -> None:
        """Tells all ranks of this rank's request, or learns of another's."""
        if self._store is None:
            return
        if self._request is not None and not self._is_told:
            self._store.compare_set("request", "", json.dumps(self._request))  # the first one stays
            self._is_told = True
        elif self._request is None and self._store.check(["request"]):
            reason, code = json.loads(self._store.get("request"))
            self._request, self._is_told = (reason, code), True

    def _tell_failure(self) -> None:
        with suppress(RuntimeError):
            if self._store is not None:
                self._store.set("failed", str(self.world.rank))

    def _has_peer_failed(self) -> bool:
        with suppress(RuntimeError):
            return self._store is not None and self._store.check(["failed"])
        return False


def _take_note(number: int, frame: Any) -> None:
    """A handler, so that the signal does not end the process; its number goes to the watcher."""
