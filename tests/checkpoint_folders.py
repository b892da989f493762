"""Small checkpoints, and a child process, for the tests of the folder's protocol."""

import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from lib.storage.checkpoint_folder import (
    FileEntry,
    checkpoint_path,
    find_checkpoints,
    hash_files,
    publish,
    stage,
    verify,
)
from tests.ranks import ROOT

NAMES = (
    "trainer.json",
    "actor/model/shard-00001.safetensors",
    "actor/model/shard-00002.safetensors",
    "actor/huggingface/config.json",
    "actor/huggingface/extra/template.jinja",
)
INVENTORY = {"seed": 1, "sizes": [2.5, None, "é"]}
OPTIMIZER = ("actor/optim/shard-00001.safetensors", "actor/optim/shard-00002.safetensors")


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder in memory where there is one: unlike a power failure, nothing in these tests needs a slow disk."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as folder:
        yield Path(folder)


def write(staging: Path, step: int, size: int = 300) -> dict[str, FileEntry]:
    """Files whose sizes and bytes depend on the step."""
    for number, name in enumerate((*NAMES, *OPTIMIZER)):
        (staging / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).write_bytes(random.Random(f"{step} {name}").randbytes(size + 40 * number + step))
    return hash_files(staging, (*NAMES, *OPTIMIZER), sync=True)


def save(run: Path, step: int, metrics: dict[str, float] | None = None, size: int = 300) -> Path:
    staging = stage(run, step, "first/run:1")
    final = checkpoint_path(run, step)
    publish(staging, final, write(staging, step, size), inventory=INVENTORY, metrics=metrics)
    return final


def steps(run: Path) -> list[int]:
    """The steps of the checkpoints that are whole to the bit, newest first; nothing else may look like one."""
    found = find_checkpoints(run)
    assert [item.problem for item in found] == [None] * len(found)
    for item in found:
        assert verify(item.path) == item.manifest
    return [item.step for item in found]


def start_child(body: Callable[[], None], *, user: int | None = None) -> int:
    """The id of a forked process that runs the body, as another user if told."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if user is not None:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            body()
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    return child


def exit_status(child: int) -> int:
    """Waits for the process to end; negative: the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_child(body: Callable[[], None], *, user: int | None = None) -> int:
    """Runs the body in a forked process and gives its exit status."""
    return exit_status(start_child(body, user=user))


def on_small_disk(folder: Path, size: str, code: str, *words: object) -> str:
    """Runs Python code with these words in a process that alone sees a tmpfs of this size there; what it printed."""
    alone, mount = ["unshare", "--map-root-user", "--mount"], f"mount -t tmpfs -o size={size} tmpfs {folder}"
    if not shutil.which("unshare") or subprocess.run([*alone, "sh", "-c", mount], capture_output=True).returncode != 0:
        pytest.skip("no permission to mount a small disk")
    words = [*alone, "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-c", code, *map(str, words)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout


def fill(ballast: Path) -> None:
    """Takes all the room that is left on the disk."""
    with suppress(OSError), open(ballast, "ab", buffering=0) as file:
        for size in (2**20, 4096):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))


def record_disk(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From here on the list gets "fsync NAME" and "rename NAME" (the new one); a power failure cannot be had here."""
    events, fsync = [], os.fsync

    def record_fsync(descriptor: int) -> None:
        events.append(f"fsync {os.readlink(f'/proc/self/fd/{descriptor}')}")
        fsync(descriptor)

    def recorded(rename: Callable) -> Callable:
        def record(source: Path, target: Path) -> None:
            events.append(f"rename {target}")
            rename(source, target)

        return record

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", recorded(os.rename))
    monkeypatch.setattr(os, "replace", recorded(os.replace))
    return events


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
