"""The other ranks' processes on this node: which of them a signal has killed.

A killed process says nothing, and its peers only see a connection that has closed. The kernel tells whoever has its
descriptor at once, and its exit status until torchrun, some tenths of a second later, asks for that itself.
"""

import os
import select
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from lib.dist import World
from lib.errors import RankKilled, error_line

ASKED_FOR = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # whoever sends these knows
LOOK_S = 0.5  # the longest wait of a thread for the end of a peer
NOTICE_S = 2.0  # from a peer's closed connections to the end of its process
EXIT_STATUS = 49  # its place in /proc/PID/stat, behind the name


def node_of_process() -> str:
    """The same for processes that can see each other."""
    return f"{os.uname().nodename} {os.readlink('/proc/self/ns/pid')}"


class Peers:
    """`ended` has those that have ended, by rank: with 0, or an exit code, or minus the signal; None: not known."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        """`pids` by rank."""
        self.ended: dict[int, int | None] = {}
        self.alive: dict[int, tuple[int, int]] = {}
        """{descriptor, readable when its process has ended: (rank, process)}"""
        for rank, pid in pids.items():
            with suppress(OSError):  # a kernel without such descriptors; one that has ended already
                self.alive[os.pidfd_open(pid)] = rank, pid

    def look(self, *, wait_s: float = 0.0) -> None:
        """Notes in `ended` who has ended since the last call; waits so long for the first one."""
        poll = select.poll()  # `select` takes no descriptors above 1023
        for descriptor in self.alive:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(1000 * wait_s):
            rank, pid = self.alive.pop(descriptor)
            os.close(descriptor)
            self.ended[rank] = _exit_code(pid)

    def killed(self) -> dict[int, int | None]:
        """{rank: signal} of those that a signal has killed. None: it has ended, and how is not known."""
        return {rank: code and -code for rank, code in list(self.ended.items()) if code is None or code < 0}


def _exit_code(pid: int) -> int | None:
    """How a process that is not waited for yet has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return os.waitstatus_to_exitcode(int(fields[EXIT_STATUS])) if fields[0] == "Z" else None
    except (OSError, ValueError):
        return None


def in_words(rank: int, number: int | None) -> str:
    """What is wrong and where, found and expected, and what to do: a line for people."""
    how = f"was killed by {signal.Signals(number).name}" if number else "has ended without a word, as if it was killed"
    return (
        f"rank {rank} {how}; on {os.uname().nodename}; found its process gone, expected it to live as long as the run; "
        "it may have been memory: the kernel's log (dmesg) or the scheduler's tells, and so may the end of "
        f"logs/rank_{rank}.log; give the ranks more host memory, or let them need less"
    )


@contextmanager
def naming_killed_ranks(world: World) -> Iterator[None]:
    """A block in which the first rank that is left on a node tells which one a signal has killed; for scripts without a
    `Stopper`. Raises RankKilled instead of what a collective says then. Executed by all ranks.

    A thread tells at once: torchrun soon ends the ranks that are left, and on a GPU a collective would wait for ever.
    """
    node = node_of_process()
    ranks = enumerate(world.gather((node, os.getpid())))
    peers = Peers({rank: pid for rank, (where, pid) in ranks if rank != world.rank and where == node})
    terminal, over, told = os.dup(2), threading.Event(), threading.Event()
    lines: list[str] = []

    def watch() -> None:
        while peers.alive and not over.is_set() and not lines:
            peers.look(wait_s=LOOK_S)
            lines.extend(in_words(*each) for each in peers.killed().items() if each[1] not in (None, *ASKED_FOR))
        if lines and not over.is_set() and all(world.rank < rank for rank, _ in peers.alive.values()):
            with suppress(OSError):
                os.write(terminal, f"{error_line(RankKilled(lines[0]))}\n".encode(errors="backslashreplace"))
        told.set()

    threading.Thread(target=watch, name="peers", daemon=True).start()
    try:
        yield
    except RuntimeError as error:
        if world.size > 1 and told.wait(NOTICE_S) and lines:
            raise RankKilled(lines[0]) from error
        raise
    finally:
        over.set()
