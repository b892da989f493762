"""What is in a run's folder, and whose folder it is: claimed, cut back, read; JSON without secrets.

JSON has no NaN or infinity, so these are the strings "NaN", "Infinity" and "-Infinity", which `float` reads.
"""

import errno
import fcntl
import io
import json
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from lib.dist import World
from lib.errors import FULL, UserError
from lib.secret_values import BlankedText, blank
from lib.storage.checkpoint_folder import disk_errors, find_checkpoints
from lib.storage.writing import lock, write_whole

METRICS = "metrics.jsonl"
SHARED_WAIT_S = 5.0  # a network's file system may show another node's file late


def claim_folder(run_dir: str | Path, *, overwrite: bool, goes_on: bool, needed_gib: float) -> Path:
    """The run folder as an absolute path, made, and empty unless its run goes on. Executed by rank 0."""
    folder = check_folder(run_dir, overwrite=overwrite, goes_on=goes_on, needed_gib=needed_gib)
    if not goes_on and folder.is_dir() and any(folder.iterdir()):
        aside = folder.with_name(f"{folder.name}.old-{time.strftime('%Y%m%d-%H%M%S')}")
        while aside.exists():
            aside = aside.with_name(aside.name + "b")
        folder.rename(aside)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def lock_folder(folder: Path) -> int:
    """A file descriptor that keeps other runs out of the folder until it is closed, or this process has ended.

    Raises UserError when another process has one. Executed by rank 0.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    if not lock(descriptor):
        os.close(descriptor)
        raise UserError(
            f"another run is writing to the run folder; --run-dir {folder}; found it locked, expected a run that has "
            "ended; wait for its end, stop it, or choose another --run-dir"
        )
    return descriptor


def check_shared(folder: Path, world: World) -> None:
    """Raises UserError, on all ranks, unless every rank sees what rank 0 writes to the folder: a checkpoint has a file
    of each. Leaves nothing there, and no folder that was empty. Executed by all ranks together."""
    token = secrets.token_hex(8)
    path = world.on_rank_0(lambda: _leave(folder / f".shared-{token}"))
    deadline = time.monotonic() + SHARED_WAIT_S
    while not (seen := os.path.exists(path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    blind = [
        f"{rank} ({node})" for rank, (saw, node) in enumerate(world.gather((seen, os.uname().nodename))) if not saw
    ]
    if world.rank == 0:
        with suppress(OSError):
            path.unlink()
            if blind:
                folder.rmdir()
    if blind:
        raise UserError(
            f"not every node shares the run folder; --run-dir {folder}; found that rank {', '.join(blind[:4])}"
            f"{f' and {len(blind) - 4} more' if len(blind) > 4 else ''} cannot see what rank 0 wrote there, expected "
            "one folder for all ranks, into which each writes its part of a checkpoint; set --run-dir to a file system "
            "that all nodes mount in the same place"
        ).on_all_ranks()


def _leave(path: Path) -> Path:
    with disk_errors(path.parent):
        path.write_bytes(b"")
    return path


def has_ended(folder: Path) -> bool:
    """Whether the folder's run is over. Raises UserError when a process holds its lock. Executed by rank 0."""
    with disk_errors(folder):
        descriptor = lock_folder(folder)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # once more: only without locks this fails
            return True
        except OSError:
            return read_status(folder).get("state") in ("stopped", "failed")  # else it is not known
        finally:
            os.close(descriptor)


def check_folder(run_dir: str | Path, *, overwrite: bool, goes_on: bool, needed_gib: float) -> Path:
    """The run folder as an absolute path, after all checks that change nothing. Executed by rank 0."""
    try:
        if not str(run_dir).strip():
            raise ValueError("it is empty")
        folder = Path(os.path.abspath(Path(run_dir).expanduser()))
        if re.search("[\ud800-\udfff]", str(folder)):
            raise ValueError("its name has bytes that are not UTF-8, and logs could not name it")
        existing = next(path for path in (folder, *folder.parents) if path.exists())
    except (RuntimeError, ValueError) as error:  # ~NAME of no user; a null byte
        raise UserError(
            f"not a usable path; --run-dir {run_dir}; {error}; name a folder to make, such as runs/first"
        ) from None
    if not existing.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "a file is in the way", str(existing))
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "no permission to write there", str(existing))
    free_gib = shutil.disk_usage(existing).free / 2**30
    if free_gib < needed_gib:
        raise UserError(
            f"not enough disk space for the run folder; --run-dir {folder}; found {free_gib:.2f} GiB free, expected at "
            f"least {needed_gib:.2f} GiB; free some space, or set --run-dir to a folder on another disk"
        )
    if not goes_on and folder.is_dir() and any(folder.iterdir()):
        _check_way(folder, overwrite=overwrite)
    if goes_on:
        _rows(folder)  # which may be damaged
    if folder.is_dir():  # before anything is moved or cut
        os.close(lock_folder(folder))
    return folder


def _check_way(folder: Path, *, overwrite: bool) -> None:
    """Raises UserError unless the folder holds an older run that `overwrite` may move: never what is not a run."""
    if not (folder / "status.json").is_file():
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:3])
        raise UserError(
            f"the run folder holds files that are not a run's; --run-dir {folder}; found {names}, expected a new or "
            "empty folder; choose another --run-dir (--overwrite moves only an older run aside)"
        )
    if overwrite:
        return
    status = read_status(folder)
    readable = "state" in status and "step" in status
    found = f"a run with state {status['state']} at step {status['step']}" if readable else "one without a status"
    raise UserError(
        f"the run folder is not empty; --run-dir {folder}; found {found}, expected a new or empty folder; choose "
        f"another --run-dir, or add --overwrite to start afresh and move the old run to {folder.name}.old-TIME"
    )


def read_status(run_dir: Path) -> dict[str, Any]:
    """status.json of a run folder: state, step, resumable, error, run_id, launch_id, date; empty without one."""
    return read_object(run_dir / "status.json")


def read_object(path: Path) -> dict[str, Any]:
    """A file's JSON object; empty where it holds none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def launch_id() -> str | None:
    """What the launches of one torchrun, or of one job, have in common; None without torchrun.

    torchrun's own run id where it is one (--standalone, --rdzv-id); otherwise the torchrun process, which restarts its
    ranks (--max-restarts).
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id != "none":
        return run_id
    started = Path(f"/proc/{os.getppid()}/stat").read_text().rsplit(")", 1)[1].split()[19]
    return f"{os.uname().nodename}-{os.getppid()}-{started}"


def cut_after(run_dir: Path, last_row: int) -> list[str]:
    """Moves what was saved and logged after a step aside, since it will come again; gives the new names."""
    mark = f"replaced-{secrets.token_hex(4)}"
    moved = []

    def move_aside(paths: Iterable[Path]) -> None:
        for path in paths:
            path.rename(path.with_name(f"{path.name}.{mark}"))
            moved.append(f"{path.relative_to(run_dir)}.{mark}")

    move_aside([found.path for found in find_checkpoints(run_dir) if found.step > last_row])
    rows = _rows(run_dir)
    if later := [row for row in rows if row["step"] > last_row]:
        append(run_dir / f"{METRICS}.{mark}", to_lines(later))
        moved.append(f"{METRICS}.{mark}")
    write_whole(run_dir / METRICS, to_lines([row for row in rows if row["step"] <= last_row]))
    for folder, ending in (("samples", "jsonl"), ("rollouts", "parquet"), ("tokens", "jsonl")):
        move_aside(path for step, path in step_files(run_dir / folder, ending) if step > last_row)
    return moved


def step_files(folder: Path, ending: str) -> list[tuple[int, Path]]:
    """The step_N.ENDING of a folder with their steps, ascending."""
    found = ((path, re.fullmatch(rf"step_(\d+)\.{ending}", path.name)) for path in folder.glob("*"))
    return sorted((int(name[1]), path) for path, name in found if name)


class _LossyFile(io.FileIO):
    """What a full disk has no room for is lost: no log is worth a run."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in FULL:
                raise
            return len(data)


def open_lossy(file: Path | int, mode: str, *, encoding: str, errors: str) -> TextIO:
    """A file, or a descriptor, for lines without secrets: written at once, and lost where the disk is full."""
    raw = io.BufferedWriter(_LossyFile(file, mode))
    return BlankedText(raw, encoding=encoding, errors=errors, line_buffering=True)


def open_log(path: Path) -> TextIO:
    """Raises OSError: whose log it is, the caller knows."""
    path.parent.mkdir(parents=True, exist_ok=True)  # an evaluation's other nodes may not share rank 0's disk
    return open_lossy(path, "a", encoding="utf-8", errors="backslashreplace")


def cannot_write(error: OSError) -> str:
    where = f"{error.filename}; " if error.filename else "in the run folder; "
    return (
        f"cannot write the run folder; {where}{error.strerror or error}, expected a folder that can be made and "
        "written; free space or mend the permissions, or set --run-dir to another place"
    )


def append(path: Path, data: bytes) -> None:
    """Appends all of the data or, where that fails, nothing: what was written of it is cut off again."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with open(path, "ab") as file:
            file.write(data)
    except OSError:
        with suppress(OSError):
            os.truncate(path, size)
        raise


def to_lines(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return "".join(to_json(row) + "\n" for row in rows).encode(errors="backslashreplace")


def read_metrics(run_dir: Path, *, unwritten: bytes = b"") -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, as floats again (NaN and infinities too), without a last line cut short by a crash;
    then those of the lines that are still to be written."""
    rows = _rows(run_dir, unwritten)
    return [{name: value if name == "step" else float(value) for name, value in row.items()} for row in rows]


def _rows(run_dir: Path, unwritten: bytes = b"") -> list[dict[str, Any]]:
    path = run_dir / METRICS
    data = path.read_bytes() if path.exists() else b""
    rows = []
    for number, line in enumerate([line for part in (data, unwritten) for line in part.split(b"\n")[:-1]], start=1):
        try:
            if line.strip():
                row = json.loads(line)
                rows.append({**row, "step": row["step"] + 0})  # a number
        except (ValueError, TypeError, KeyError, RecursionError):
            raise UserError(
                f"a line of the run's metrics is damaged; {path}; found {line[:40].decode(errors='replace')!r} in line "
                f'{number}, expected {{"step": NUMBER, ...}}; remove the line, or move the file away'
            ) from None
    return rows


def to_json(value: Any, *, indent: int | None = None) -> str:
    return json.dumps(plain(value), indent=indent, ensure_ascii=False, allow_nan=False, default=str)


def plain(value: Any) -> Any:
    """The value with secrets blanked and non-finite floats as strings."""
    return _finite(blank(value))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
