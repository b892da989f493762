"""The folder of a checkpoint: written whole or not at all, found by scanning, proved by hashes. One process, no torch.

    RUN/.tmp-global_step_N-ID      while it is written: `stage`; a leftover of a killed save is swept by the next one
    RUN/global_step_N              whole: `publish` renames it, once MANIFEST.json has every file's size and hash
    RUN/.trash-NAME-TOKEN          while it is deleted: a kill in the middle leaves nothing that looks like a checkpoint
    RUN/latest_checkpointed_iteration.txt    a hint for people; nothing here reads it

Files of a published checkpoint are never written again; `prune` may replace the manifest, in one rename, by one without
the optimizer's files. One run writes into RUN at a time, one save after the other; readers may be anywhere. With
several ranks, each hashes the files that it writes, and one calls `stage`, `publish`, `discard`, `prune`.
"""

import hashlib
import json
import math
import os
import re
import secrets
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from lib.errors import FULL, DamagedCheckpoint, LockstepError, NoSpace, UserError
from lib.regular_files import open_regular
from lib.storage.writing import write_whole

MANIFEST = "MANIFEST.json"
LATEST = "latest_checkpointed_iteration.txt"
OPTIMIZER_FOLDERS = ("actor/optim", "critic/optim")
FORMAT = 1
STEP_FOLDER = re.compile(r"global_step_(0|[1-9][0-9]*)")
TEMPORARY = re.compile(rf"\.(?:tmp|trash)-({STEP_FOLDER.pattern}|optim|{re.escape(MANIFEST)}|{re.escape(LATEST)})-.*")
USE_ANOTHER = "restore it from a copy, or use another checkpoint of the run"


@dataclass(frozen=True)
class FileEntry:
    """A file's bytes: how many, and their SHA-256 as 64 hexadecimal digits."""

    size: int
    hash: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds. `files` are relative paths with "/"; `metrics` the step's validation metrics."""

    step: int
    files: Mapping[str, FileEntry]
    metrics: Mapping[str, float]
    inventory: Mapping[str, Any]

    @property
    def has_optimizer(self) -> bool:
        """False once `prune` dropped the optimizer's state, or when it was never saved."""
        return any(_is_optimizer(name) for name in self.files)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A folder named like a checkpoint: with its manifest when it is whole, with the problem when it is not."""

    step: int
    path: Path
    manifest: Manifest | None
    problem: str | None


# ---- Writing ----


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """RUN/global_step_N."""
    return run_dir / f"global_step_{step}"


def check_space(run_dir: Path, num_bytes: int) -> None:
    """Raises NoSpace when the disk has less free space than a new checkpoint needs beside those that are there.

    A quota shows only when it is hit: `disk_errors` then raises NoSpace too.
    """
    with disk_errors(run_dir):
        free = shutil.disk_usage(run_dir).free
    if free < num_bytes:
        raise NoSpace(
            f"not enough disk space for a checkpoint; {run_dir}; found {free / 2**30:.2f} GiB free, expected "
            f"{num_bytes / 2**30:.2f} GiB (an older one goes only after the new one is whole); free some space"
        )


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns an OSError of the body into NoSpace (disk, quota or file size limit) or another UserError."""
    try:
        yield
    except OSError as error:
        where, found = error.filename or path, error.strerror or error
        if error.errno in FULL:
            raise NoSpace(
                f"no space for a checkpoint; {where}; found {found}, expected room for all of its files; free some "
                "space or raise the quota; older checkpoints are untouched"
            ) from error
        raise UserError(
            f"cannot read or write a checkpoint; {where}; found {found}, expected a folder that this user may read and "
            "write; mend its permissions or its disk, or set --run-dir to another place"
        ) from error


def stage(run_dir: Path, step: int, run_id: str) -> Path:
    """A new empty folder RUN/.tmp-global_step_N-ID to write a checkpoint into; leftovers of earlier saves are deleted.

    An earlier save of this run must be published or discarded before. A damaged RUN/global_step_N, whose training is
    now repeated, is moved aside. Raises UserError when a whole one is there.
    """
    staging = run_dir / f".tmp-global_step_{step}-{re.sub(r'[^0-9A-Za-z]', '_', run_id)}"
    with disk_errors(run_dir):
        _sweep(run_dir)
        _make_way(checkpoint_path(run_dir, step))
        staging.mkdir(parents=True)
    return staging


def _make_way(final: Path) -> None:
    """Moves a checkpoint aside that is not whole to the bit; raises UserError about one that is."""
    if not final.exists():
        return
    try:
        verify(final)
    except DamagedCheckpoint:
        final.rename(final.with_name(f"{final.name}.damaged-{secrets.token_hex(4)}"))
        return
    raise UserError(
        f"the checkpoint is already there; {final}; found a whole one, expected none of this step; resume from it, or "
        "move it to another place"
    )


def discard(staging: Path) -> None:
    """Deletes the folder of a save that failed, as far as that is possible; the next `stage` deletes the rest."""
    _remove(staging)


def hash_file(path: Path, *, sync: bool = False) -> FileEntry:
    """The file's size and hash, read as a stream, without Python's lock. `sync`: first bring it to the disk.

    SHA-256 is slower than a CRC, but `sha256sum` checks it without us, and a file replaced by another one is found as
    surely as a flipped bit. Executed by the rank that wrote the file: on a shared file system no other rank's fsync
    reaches its data.
    """
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())
        return FileEntry(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())


def hash_files(folder: Path, names: Iterable[str], *, sync: bool = False) -> dict[str, FileEntry]:
    """{name: `hash_file`} of files below the folder, read by several threads."""
    names = list(names)
    with disk_errors(folder), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        entries = pool.map(lambda name: hash_file(folder / name, sync=sync), names)
        return dict(zip(names, entries, strict=True))


def publish(
    staging: Path,
    final: Path,
    entries: Mapping[str, FileEntry],
    *,
    inventory: Mapping[str, Any],
    metrics: Mapping[str, float] | None = None,
) -> None:
    """Makes the staging folder the checkpoint RUN/global_step_N, in one rename.

    `entries` are all of its files; `inventory` is plain JSON: what a reader needs to know before it opens a file;
    `metrics` are what `prune` may choose the best checkpoint by (finite ones are kept). After the return the checkpoint
    survives a power failure. Raises NoSpace, UserError, or DamagedCheckpoint when a file is not what its writer said.
    """
    manifest = Manifest(
        step=int(STEP_FOLDER.fullmatch(final.name)[1]),
        files=dict(sorted(entries.items())),
        metrics={name: value for name, value in (metrics or {}).items() if math.isfinite(value)},
        inventory=inventory,
    )
    with disk_errors(final):
        _compare(staging, manifest.files)
        stray = set(_names(staging)) - entries.keys()
        assert not stray, f"files of the checkpoint without a hash: {sorted(stray)}"
        (staging / MANIFEST).write_bytes(_encode(manifest))
        for name in (*entries, MANIFEST):
            fsync(staging / name)
        for folder, _, _ in os.walk(staging, topdown=False):
            fsync(folder)
        staging.rename(final)
        fsync(final.parent)
    check(final)
    hint = final.with_name(f".tmp-{LATEST}-{secrets.token_hex(4)}")
    with suppress(OSError):  # nothing depends on it, and the checkpoint is published
        write_whole(final.with_name(LATEST), f"{manifest.step}\n".encode(), staged=hint)


def fsync(path: Path | str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- The manifest ----


def _encode(manifest: Manifest) -> bytes:
    """The manifest as JSON whose last key is the hash of all that is before it."""
    files = {name: {"size": entry.size, "sha256": entry.hash} for name, entry in manifest.files.items()}
    body = {"format": FORMAT, "step": manifest.step, "metrics": dict(manifest.metrics), "files": files}
    return _sealed(body | {"inventory": dict(manifest.inventory)})


def _sealed(body: Mapping[str, Any]) -> bytes:
    digest = hashlib.sha256(json.dumps(body, allow_nan=False).encode()).hexdigest()
    return (json.dumps({**body, "sha256": digest}, indent=1, allow_nan=False) + "\n").encode()


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    if not folder.is_dir():
        raise UserError(f"no such checkpoint; {folder}; found no folder there; name one that holds {MANIFEST}")
    try:
        with open_regular(path, error=DamagedCheckpoint) as stream:
            data = stream.read()
    except FileNotFoundError:
        raise DamagedCheckpoint(
            f"not a whole checkpoint; {folder}; found no {MANIFEST}, which is written last; use another checkpoint"
        ) from None
    try:
        body = json.loads(data)
        body.pop("sha256")
        if _sealed(body) != data:  # byte by byte: JSON has several spellings of one value
            raise ValueError("its bytes do not give its own hash")
        if body["format"] != FORMAT:
            raise UserError(
                f"a checkpoint of another version; {path}; found format {body['format']}, expected {FORMAT}; use the "
                "version of Lockstep that wrote it"
            )
        files = {name: FileEntry(int(file["size"]), str(file["sha256"])) for name, file in body["files"].items()}
        metrics = {name: float(value) for name, value in body["metrics"].items()}
        for name in files:
            pure = PurePosixPath(name)
            if pure.is_absolute() or ".." in pure.parts or str(pure) != name or name in (".", MANIFEST):
                raise ValueError(f"the file name {name!r} does not stay in the folder")
        return Manifest(step=int(body["step"]), files=files, metrics=metrics, inventory=dict(body["inventory"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"a damaged manifest; {path}; found {error!r}; {USE_ANOTHER}") from error


# ---- Reading ----


def check(folder: Path, *, below: tuple[str, ...] = ("",)) -> Manifest:
    """The manifest of a checkpoint whose files are all there in their full size; their bytes are not read.

    `below`: only the files whose names begin so, the others may be missing.

    A file that the manifest does not list is an error wherever listed ones lie, since model and tokenizer folders are
    read whole; notes at the top, or a folder of its own, are passed over. Raises DamagedCheckpoint naming file
    and reason, UserError when there is no such folder or no permission.
    """
    with disk_errors(folder):
        manifest = _read_manifest(folder)
        _compare(folder, {name: entry for name, entry in manifest.files.items() if name.startswith(below)})
    named = STEP_FOLDER.fullmatch(folder.name)
    if named and int(named[1]) != manifest.step:
        raise DamagedCheckpoint(
            f"a checkpoint under another's name; {folder}; found step {manifest.step} in its manifest, expected "
            f"{named[1]}; give the folder its own name again"
        )
    return manifest


def verify(folder: Path, names: Iterable[str] | None = None, *, below: tuple[str, ...] = ("",)) -> Manifest:
    """The manifest of a checkpoint that is whole: `check`, and the bytes of the named files (of all by default).

    Ranks divide the work by `names=share(check(folder).files, rank, size)`. Raises as `check` does.
    """
    manifest = check(folder, below=below)
    if names is None:
        names = [name for name in manifest.files if name.startswith(below)]
    for name, found in hash_files(folder, names).items():
        if found != manifest.files[name]:
            raise DamagedCheckpoint(
                f"a file was changed after it was written; {folder / name}; found SHA-256 {found.hash[:16]}..., "
                f"expected {manifest.files[name].hash[:16]}...; {USE_ANOTHER}"
            )
    return manifest


def share(files: Mapping[str, FileEntry], rank: int, size: int) -> list[str]:
    """The files of one of `size` ranks, so that all files are some rank's and the ranks have similar numbers of bytes.

    Largest first, each to the rank that has least.
    """
    loads, mine = [0] * size, []
    for name in sorted(files, key=lambda name: (-files[name].size, name)):
        lightest = loads.index(min(loads))
        loads[lightest] += files[name].size
        if lightest == rank:
            mine.append(name)
    return mine


def find_checkpoints(run_dir: Path, *, below: tuple[str, ...] = ("",)) -> list[Found]:
    """All folders RUN/global_step_N, newest step first, each after `check`. Raises UserError without permission."""
    with disk_errors(run_dir):
        names = os.listdir(run_dir) if run_dir.exists() else []
    steps = sorted((int(match[1]) for match in map(STEP_FOLDER.fullmatch, names) if match), reverse=True)
    return [_find(checkpoint_path(run_dir, step), step, below) for step in steps]


def _find(path: Path, step: int, below: tuple[str, ...]) -> Found:
    try:
        return Found(step=step, path=path, manifest=check(path, below=below), problem=None)
    except LockstepError as error:
        return Found(step=step, path=path, manifest=None, problem=str(error))


def _compare(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Raises DamagedCheckpoint unless the files are there, plain, in their size and without others beside them."""
    root = folder.resolve()
    for name, entry in files.items():
        path = folder / name
        try:
            info = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            raise DamagedCheckpoint(f"a file is missing; {path}; found no such file; {USE_ANOTHER}") from None
        if not stat.S_ISREG(info.st_mode) or path.resolve() != root / name:
            raise DamagedCheckpoint(
                f"not a plain file of the checkpoint; {path}; found a link or a special file, expected "
                f"{entry.size} bytes; {USE_ANOTHER}"
            )
        if info.st_size != entry.size:
            how = "truncated" if info.st_size < entry.size else "longer than it was written"
            raise DamagedCheckpoint(
                f"a file is {how}; {path}; found {info.st_size} bytes, expected {entry.size}; {USE_ANOTHER}"
            )
    read_whole = {PurePosixPath(name).parent for name in files} - {PurePosixPath(".")}
    for name in _names(folder):
        if name not in files and read_whole.intersection(PurePosixPath(name).parents):
            raise DamagedCheckpoint(
                f"a file that the manifest does not list; {folder / name}; expected only what was saved in its folder, "
                "which is read whole; move the file to another place"
            )


def _names(folder: Path) -> list[str]:
    """All files and links below the folder, as relative paths with "/"; links are not followed."""
    found = []
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        found += [Path(parent, name).relative_to(folder).as_posix() for name in (*files, *links)]
    return found


# ---- Deleting ----


def prune(
    run_dir: Path,
    *,
    keep_last: int | None,
    keep_best: int = 0,
    metric: str | None = None,
    keep_optimizer: int | None = None,
    protect: Collection[Path] = (),
) -> list[str]:
    """Deletes the checkpoints that are not among those to keep; gives a warning for what could not be deleted.

    Kept are the `keep_last` whole ones of the largest steps (None: all), the `keep_best` with the largest `metric` (of
    equal ones the earlier), and those in `protect`, such as the one that was resumed from. What is not whole is neither
    counted nor deleted. All but the newest `keep_optimizer` (None: all) and the protected lose their optimizer's state.
    Call it after `publish`.
    """
    assert keep_last is None or keep_last >= 1
    assert keep_optimizer is None or keep_optimizer >= 1
    whole = [found for found in find_checkpoints(run_dir) if found.manifest is not None]
    protected = {os.path.realpath(path) for path in protect}
    measured = [found for found in whole if metric in found.manifest.metrics]
    best = sorted(measured, key=lambda found: (-found.manifest.metrics[metric], found.step))[:keep_best]
    kept_steps = {found.step for found in (*whole[:keep_last], *best)}
    warnings: list[str] = []
    for place, found in enumerate(whole):
        if os.path.realpath(found.path) in protected:
            continue
        if found.step not in kept_steps:
            warnings += _delete(found.path, run_dir)
        elif keep_optimizer is not None and place >= keep_optimizer:
            warnings += _drop_optimizer(found, run_dir)
    return warnings


def _is_optimizer(name: str) -> bool:
    return name.startswith(tuple(f"{folder}/" for folder in OPTIMIZER_FOLDERS))


def _drop_optimizer(found: Found, run_dir: Path) -> list[str]:
    """Takes the optimizer's files out of the manifest, in one rename, and then deletes them.

    Between the two they are files that no one lists, in folders of their own: the checkpoint is whole all the time, and
    the next call deletes what a kill left.
    """
    folders = [folder for name in OPTIMIZER_FOLDERS if (folder := found.path / name).exists()]
    if found.manifest.has_optimizer:
        files = {name: entry for name, entry in found.manifest.files.items() if not _is_optimizer(name)}
        temporary = run_dir / f".tmp-{MANIFEST}-{secrets.token_hex(4)}"
        try:
            write_whole(found.path / MANIFEST, _encode(replace(found.manifest, files=files)), staged=temporary)
            fsync(found.path)
        except OSError as error:
            return [f"cannot drop the optimizer's state of {found.path}: {error.strerror}"]
    return [warning for folder in folders for warning in _delete(folder, run_dir)]


def _delete(path: Path, run_dir: Path) -> list[str]:
    trash = run_dir / f".trash-{path.name}-{secrets.token_hex(4)}"
    try:
        path.rename(trash)
        fsync(run_dir)
    except OSError as error:
        return [f"cannot delete {path}: {error.strerror}"]
    return _remove(trash)


def _sweep(run_dir: Path) -> None:
    """Deletes what a killed save or deletion left, as far as that is possible; only names that this module gives."""
    for name in os.listdir(run_dir) if run_dir.exists() else []:
        if TEMPORARY.fullmatch(name):
            _remove(run_dir / name)


def _remove(path: Path) -> list[str]:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        return [f"cannot delete {path}: {error.strerror}"]
    return []
