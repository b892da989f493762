"""A process that only waits for another one, and then ends everything that this one started.

Also what left its session and lost its parent, and also where the trainer that wanted it was killed (kill -9): Linux
gives a subreaper the orphans among its descendants, and a signal when its own parent dies.
"""

import ctypes
import os
import resource
import signal
import time
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
END = signal.SIGRTMIN  # asks a keeper to end everything; no scheduler sends it
END_LIMIT_S = 3.0  # for that; what is left then is held back by the kernel, or is another user's


def fork_behind_keeper(fd: int, parent: int) -> None:
    """Returns in a child in a session of its own, which is the worker. This process, its keeper, waits for the end of
    the worker or of `parent`, or for END; ends all that is left; and then ends as the worker did."""
    keeper, before = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # processes whose parents have ended become the keeper's children
    libc.prctl(PR_SET_PDEATHSIG, END)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.getppid() != parent:  # it died before the lines above
        os._exit(1)
    worker = os.fork()
    if worker == 0:
        os.setsid()
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(1)
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # the first to go when memory runs out
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    os.close(fd)
    ended: dict[int, int] = {}
    while worker not in ended and signal.sigwait({signal.SIGCHLD, END}) == signal.SIGCHLD:
        _reap(ended)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)
    limit = time.monotonic() + END_LIMIT_S
    while _reap(ended) and time.monotonic() < limit:  # what they leave behind comes to this process in turn
        for pid in _children(keeper):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    code = os.waitstatus_to_exitcode(ended.get(worker, 0))
    if code < 0:
        with suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(keeper, -code)
    os._exit(abs(code))


def _reap(ended: dict[int, int]) -> bool:
    """Notes pid and status of children that have ended; whether there are others."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
        return True
    return False


def _children(parent: int) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            if int(file.read().rpartition(b")")[2].split()[1]) == parent:
                found.append(int(name))
    return found
