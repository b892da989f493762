"""Runs a test's script under torchrun, as users run ours."""

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
LIMIT_S = 1800
"""For whatever a test waits for. It only ends what hangs: a slow machine that others use too needs many times the
seconds of an idle one."""

ONE_KILLED = r"error\[1\] rank 1 (was killed by SIGKILL|has ended without a word, as if it was killed); "
"""The second where the machine is so busy that torchrun has asked for the exit status before: it is gone then."""


def torchrun(num_ranks: int, *words: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess:
    """The finished `torchrun --nproc_per_node=num_ranks WORDS`, its output as text."""
    return subprocess.run(
        [*_torchrun(num_ranks), *words], cwd=cwd, env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip


def _torchrun(num_ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={num_ranks}", "--standalone"]


class Job:
    """A running torchrun (or, of one rank, a plain script) to send signals to. None of it outlives the `with` block.

    All processes of the job carry a variable of its own in their environment, by which they are found wherever they
    have moved to.
    """

    def __init__(self, num_ranks: int | None, *words: str, options: tuple[str, ...] = (), **env: str) -> None:
        """`num_ranks` None: without torchrun. `options`: torchrun's."""
        self.mark = uuid.uuid4().hex
        launcher = [sys.executable] if num_ranks is None else _torchrun(num_ranks)
        if num_ranks is not None:
            launcher += ["--signals-to-handle", SIGNALS, *options]
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 (as long as the job)
        self.process = subprocess.Popen(
            [*launcher, *words], cwd=ROOT, start_new_session=True, stdout=self._out, stderr=self._err,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env, "LOCKSTEP_TEST_JOB": self.mark},
        )  # fmt: skip

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: Any) -> None:
        while alive := self.alive():
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        self.process.wait()

    def alive(self) -> list[int]:
        """The job's processes; one that has ended has no environment any more."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if self.mark.encode() in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    def pid_of_rank(self, rank: int) -> int:
        """The rank's process: torchrun's child with that number. What the rank starts inherits the number."""
        [found] = [
            pid for pid in self._children() if f"\0RANK={rank}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        ]
        return found

    def _children(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def wait(self) -> int:
        """The exit code of torchrun."""
        return self.process.wait(LIMIT_S)

    def wait_for_all(self) -> None:
        """Returns when none of the job's processes lives. Fails when they do not end."""
        deadline = time.monotonic() + LIMIT_S
        while alive := self.alive():
            assert time.monotonic() < deadline, f"still alive: {alive}\n{self.stderr[-4000:]}"
            time.sleep(0.05)

    @property
    def stdout(self) -> str:
        return _text(self._out)

    @property
    def stderr(self) -> str:
        return _text(self._err)

    def until(self, condition: Callable[[], Any]) -> Any:
        """The condition's first value that is true. Fails when the job ends before, or time does."""
        deadline = time.monotonic() + LIMIT_S
        while not (value := condition()):
            assert self.process.poll() is None, f"the job has ended:\n{self.stdout[-2000:]}{self.stderr[-4000:]}"
            assert time.monotonic() < deadline, f"nothing came of it:\n{self.stdout[-2000:]}{self.stderr[-4000:]}"
            time.sleep(0.02)
        return value


def save_of_rank(rank: int, compute: Callable[[Any], Any], size: int, folder: Path) -> None:
    """For `mp.start_processes`: saves what the World's rank computes as SIZE_RANK.pt, met with the others by Gloo."""
    import torch

    from lib.dist import World

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store{size}", rank=rank, world_size=size,
        timeout=timedelta(seconds=LIMIT_S),
    )  # fmt: skip
    world = World(rank=rank, size=size, device=torch.device("cpu"))
    torch.save(compute(world), f"{folder}/{size}_{rank}.pt")
    torch.distributed.destroy_process_group()


def free_port() -> str:
    """A port for ranks that the test starts by itself. Below those that the system hands out to whoever asks for any:
    one of these could be gone before rank 0, which still imports torch, listens there."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(max(1024, first // 2), first) or range(1024, 2**16)
    while True:
        port = random.SystemRandom().choice(ports)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return str(port)


def _text(file: Any) -> str:
    return os.pread(file.fileno(), 10**7, 0).decode(errors="replace")
