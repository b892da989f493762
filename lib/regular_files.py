"""Regular files only: whoever opens a FIFO waits for its writer for ever, and a device may never end."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from lib.errors import LockstepError, UserError

KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISDIR, "a folder"),
)


def check_regular(path: str | Path, *, error: type[LockstepError] = UserError) -> None:
    """Raises `error` unless the path, its links followed, is a regular file; OSError, as open does, without one."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        found = next((word for holds, word in KINDS if holds(mode)), "something else")
        raise error(
            f"not a regular file; {path}; found {found}, expected a file that can be read to its end; put the file "
            "itself there, or give another path"
        )


def open_regular(path: str | Path, *, error: type[LockstepError] = UserError) -> BinaryIO:
    """The file, opened to read bytes, without ever waiting. Raises as `check_regular` and open do."""
    check_regular(path, error=error)
    return open(path, "rb")


def check_inside(path: Path, *folders: Path, error: type[LockstepError] = UserError) -> None:
    """Raises `error` unless the path, its links followed, is a regular file below one of these resolved folders."""
    target = Path(os.path.realpath(path))
    if not any(target.is_relative_to(folder) for folder in folders):
        raise error(
            f"a link leads out of its folder; {path}; found a link to {target}, expected the file itself: what lies "
            "elsewhere would be copied and passed on; copy that file here if you mean it"
        )
    try:
        check_regular(path, error=error)
    except OSError as problem:
        raise error(
            f"a link leads nowhere; {path}; found {problem.strerror}, expected a file; put the file itself there, or "
            "delete the link"
        ) from problem


def check_tree(folder: Path) -> None:
    """Raises UserError unless all that is below the folder are folders, and regular files or links to such in it.

    For a folder that others made and we copy from: its links could name any file of this machine.
    """
    folder = folder.resolve()
    for parent, folders, files in os.walk(folder):
        paths = (Path(parent, name) for name in (*folders, *files))
        for path in paths:
            if path.is_symlink() or not path.is_dir():
                check_inside(path, folder)
