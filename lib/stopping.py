"""Stopping a run from outside: a signal to any rank, or a time limit, ends all ranks together, between two steps.

A Python signal handler never runs while the main thread sits in a collective. So a thread of each rank reads the
signals' numbers (`signal.set_wakeup_fd`) and passes the request on to all ranks, within about a second, through the
store where they met. It only takes note: what runs long asks `Stopper.requested` and breaks off, and where all ranks
come together `Stopper.agreed` gives all of them the same answer.

The thread also sees which other ranks of its node a signal has killed, since these cannot tell: SIGKILL is what the
system sends where memory is short. Where torchrun has asked for the exit status before, it is gone; so a rank that ends
by itself leaves a word, and one without a word was killed.

SIGUSR1, which schedulers send some time before they end a job, stops as SIGTERM does, but the exit code is 0.

LLVM, which Triton compiles with in this process, puts handlers of its own behind Python's back, and swallows SIGUSR1.
So the thread goes on putting ours in place.
"""

import ctypes
import json
import os
import secrets
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as torch_dist

from lib.dist import World
from lib.errors import RankKilled, Stopped, error_line
from lib.messages import Messages
from lib.peers import Peers, in_words, node_of_process
from lib.torchrun import ATTEMPT

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
POLL_S = 0.5  # between two looks at the store
LIBC = ctypes.CDLL(None)
SIGACTION_BYTES = 512  # at least its struct sigaction
NOTICE_S = 2.0  # from a peer's closed connections to the end of its process
ECHO_S = 2.0  # one request may arrive twice: from the scheduler, and handed on by torchrun
UNWIND_S = 10.0  # for what is left to do when a peer was killed; in a collective on a GPU a rank would wait for ever


class Stopper:
    """What this rank knows of requests to stop. Signals are taken inside the `with` block; before it they kill.

    A second SIGTERM (SIGINT, SIGHUP, SIGQUIT) ends the process at once, and so does the first one when another rank
    has failed: torchrun then ends those that are left, and there is nothing to agree on.
    """

    def __init__(self, world: World, *, max_minutes: float | None = None, at_once: bool = False) -> None:
        """`max_minutes`: from the start of torchrun, however often it restarts its ranks; without it from now on.
        `at_once`: for work that can be cut off anywhere: signals end the process as they do without a Stopper, but it
        tells before which rank was killed, if one was.
        Executed by all ranks, after they have joined the process group."""
        self.world, self.max_minutes, self.at_once = world, max_minutes, at_once
        self._request: tuple[str, int] | None = None  # reason, exit code
        self._arrivals: dict[int, float] = {}  # signal -> when it came first
        self._replaced: dict[int, Any] = {}  # signal -> the handler before ours
        self._ours: dict[int, ctypes.Array[ctypes.c_char]] = {}  # signal -> what the system knows of our handler
        self._longest_step_s = 0.0
        self._terminal = os.dup(2)  # stays what it is when a run moves descriptor 2 to its log
        self._sender: socket.socket | None = None
        self._closing = False
        self._messages: Messages | None = None
        self._peers = Peers({})
        self._told_of_strangers = False
        self._may_tell = threading.Lock()  # of a killed peer; whoever takes it first does, main thread or watcher
        self._give_up = float("inf")  # when the process ends by force
        if world.size > 1:
            key, about = secrets.token_bytes(32), (node_of_process(), os.getpid())
            ranks = world.gather((key, *about))
            self._peers = Peers(
                {rank: pid for rank, (_, node, pid) in enumerate(ranks) if rank != world.rank and node == about[0]}
            )
            # A client of its own: the process group's waits in the main thread while the watcher asks.
            store = torch_dist.TCPStore(
                os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=30)
            )
            place = f"lockstep/{os.environ.get(ATTEMPT, '0')}/stop"
            self._messages = Messages(torch_dist.PrefixStore(place, store), ranks[0][0], rank=world.rank)
        self._deadline = _launched_s() + 60 * max_minutes if max_minutes is not None else float("inf")

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
        if self.world.rank == 0 and _now_s() + self._longest_step_s + save_s > self._deadline:
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
        """Raises RankKilled instead of what a collective says when a peer was killed."""
        killed = self._killed_peer(error)
        failed = error is not None and not isinstance(error, Stopped)
        self._leave(failure=str(killed or "") if failed else None)
        self._closing = True
        self._sender.send(b"\0")
        self._thread.join()
        signal.set_wakeup_fd(-1)
        for number, handler in self._replaced.items():  # what is left is to leave: an echo must not disturb it
            ignored = isinstance(error, Stopped) or killed is not None
            signal.signal(number, signal.SIG_IGN if ignored else handler)
        self._sender.close()
        self._receiver.close()
        self._sender = None
        if killed is not None:
            raise killed from error

    def _killed_peer(self, error: BaseException | None) -> RankKilled | None:
        """What ended this rank, where it is a peer that a signal has killed. Its connections close before it ends."""
        if not isinstance(error, RuntimeError) or self.world.size == 1:
            return None
        deadline = time.monotonic() + NOTICE_S
        while not (line := self._line_about_killed()):
            if self._failure_of_peer() == "" or time.monotonic() > deadline:
                return None
            time.sleep(0.05)
        return self._tell_of_killed(line)

    def _install(self) -> None:
        for number in STOP_SIGNALS:
            handler = signal.getsignal(number)
            if handler in (signal.SIG_IGN, _take_note):  # `nohup` ignores SIGHUP, and so do we
                continue
            if self.at_once and number == signal.SIGINT:  # an exception, with which the block is left
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
            ready, _, _ = select.select([self._receiver, *self._peers.alive], [], [], POLL_S)
            self._peers.look()
            if self._peers.killed() and (line := self._line_about_killed()):
                self._tell_of_killed(line)
            for number in self._receiver.recv(64) if self._receiver in ready else b"":
                if number in self._ours:
                    self._receive(number)
            if self._closing:  # the main thread has come to its end after all
                return
            if time.monotonic() > self._give_up:
                os._exit(1)
            try:
                self._exchange()
            except RuntimeError:  # the store has ended, with whoever held it
                self._messages = None

    def _receive(self, number: int) -> None:
        if self.at_once:
            return self._end_at_once(number)
        name, now = signal.Signals(number).name, time.monotonic()
        is_second = now - self._arrivals.setdefault(number, now) > ECHO_S and number != signal.SIGUSR1
        if is_second or self._failure_of_peer() == "":
            why = "came a second time" if is_second else "came after another rank had failed"
            self._say(f"{name} {why}: rank {self.world.rank} exits at once")
            self._leave(failure="")
            os._exit(128 + number)
        if line := self._line_about_killed():  # so torchrun ends us too; the main thread will notice, or never
            self._tell_of_killed(line)
            self._give_up = now + UNWIND_S
        code = 0 if number == signal.SIGUSR1 else 128 + number
        self._request = self._request or (f"{name} on rank {self.world.rank}", code)

    def _end_at_once(self, number: int) -> None:
        def end() -> None:
            LIBC.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

        threading.Timer(NOTICE_S, end).start()  # where the store does not answer
        if line := self._line_about_killed():
            self._tell_of_killed(line)
        self._leave(failure=line or None)
        end()

    def _exchange(self) -> None:
        """Learns of another rank's request, or tells all ranks of the one that this rank knows."""
        if self._messages is None or self.at_once:
            return
        told = self._messages.read("request")
        if told is None and self._request is not None:
            self._messages.post("request", json.dumps(self._request))
        elif told is not None and self._request is None:
            reason, code = json.loads(told)
            self._request = reason, code
        if self._messages.refused is not None and not self._told_of_strangers and self.world.rank == 0:
            self._told_of_strangers = True
            self._say(
                "warning: what no rank has written is in the store of the ranks, and is ignored; "
                f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}; found {self._messages.refused!r:.60}, "
                "expected only messages of this run; keep other processes away from that port"
            )

    def _leave(self, *, failure: str | None) -> None:
        """Tells the others that this rank ends by itself. `failure`: a line about the rank that was killed, if that is
        what ends this one, or nothing about it; None: it has not failed."""
        with suppress(RuntimeError):
            if self._messages is not None:
                if failure is not None:
                    self._messages.post("failed", failure)
                self._messages.post(f"left/{self.world.rank}", "")

    def _failure_of_peer(self) -> str | None:
        """What `_leave` has told of a failure on another rank; None: nothing."""
        return self._read("failed")

    def _read(self, name: str) -> str | None:
        with suppress(RuntimeError):
            return self._messages and self._messages.read(name)
        return None

    def _line_about_killed(self) -> str:
        """Which rank a signal has killed, as this rank sees it or another one has told; empty: none."""
        for rank, number in self._peers.killed().items():
            if number in STOP_SIGNALS:  # whoever sends these knows
                continue
            if number is not None or self._read(f"left/{rank}") is None:  # one that ends by itself tells so
                return in_words(rank, number)
        return self._failure_of_peer() or ""

    def _tell_of_killed(self, line: str) -> RankKilled:
        """The error, told once, by the first rank that is left on a node that lost one."""
        error = RankKilled(line)
        is_first = all(self.world.rank < rank for rank, _ in list(self._peers.alive.values()))
        if is_first and self._peers.killed() and self._may_tell.acquire(blocking=False):
            self._say(error_line(error))
        return error

    def _say(self, line: str) -> None:
        with suppress(OSError):  # a full disk must not end the watcher
            os.write(self._terminal, f"{line}\n".encode(errors="backslashreplace"))


def _take_note(number: int, frame: Any) -> None:
    """A handler, so that the signal does not end the process; its number goes to the watcher."""


def _now_s() -> float:
    """Seconds on a clock that is never set, and by which the system notes when a process starts."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _launched_s() -> float:
    """When torchrun was started, which restarts its ranks; without torchrun now."""
    if ATTEMPT not in os.environ:
        return _now_s()
    fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")
