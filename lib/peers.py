"""The other ranks' processes on this node: which of them a signal has killed.

A killed process says nothing, and its peers only see a connection that has closed. The kernel tells whoever has its
descriptor at once, and its exit status until torchrun, some tenths of a second later, asks for that itself.
"""

import os
import select
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

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

    def look(self) -> None:
        """Notes in `ended` who has ended since the last call."""
        poll = select.poll()  # `select` takes no descriptors above 1023
        for descriptor in self.alive:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(0):
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
    names = {each.value: each.name for each in signal.Signals}
    found = names.get(number, f"signal {number}")  # real-time signals have no name
    how = f"was killed by {found}" if number else "has ended without a word, as if it was killed"
    return (
        f"rank {rank} {how}; on {os.uname().nodename}; found its process gone, expected it to live as long as the run; "
        "it may have been memory: the kernel's log (dmesg) or the scheduler's tells, and so may the end of "
        f"logs/rank_{rank}.log; give the ranks more host memory, or let them need less"
    )
