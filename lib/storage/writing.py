"""How a file is written: whole or not at all, and where it matters by one process at a time."""

import errno
import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_whole(path: Path, data: Any, *, staged: Path | None = None) -> None:
    """Writes bytes to a file, whole or not at all; they are on the disk before they get its name. Raises OSError.

    `staged`: their name until then, in the same file system. A file that is there already is written over in place, so
    that its blocks serve where no others are left; a link or a FIFO that somebody put there is an OSError.
    """
    staged = staged or path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(staged, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            os.close(descriptor)
            raise OSError(errno.EEXIST, "not a file of its own", str(staged))
        with open(descriptor, "r+b") as file:
            file.write(data)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
    except BaseException:
        with suppress(OSError):
            staged.unlink()
        raise


def lock(descriptor: int) -> bool:
    """Locks an open file or folder until it is closed, or this process ends; False: another process has locked it.

    True also on a file system without locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
