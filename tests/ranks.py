"""Runs a test's script under torchrun, as users run ours."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def torchrun(num_ranks: int, *words: str, timeout_s: float = 300, **env: str) -> subprocess.CompletedProcess:
    """The finished `torchrun --nproc_per_node=num_ranks WORDS`, its output as text."""
    return subprocess.run(
        [*_torchrun(num_ranks), *words], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True, text=True, timeout=timeout_s,
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

    def wait(self, timeout_s: float = 60) -> int:
        """The exit code of torchrun."""
        return self.process.wait(timeout_s)

    @property
    def stdout(self) -> str:
        return _text(self._out)

    @property
    def stderr(self) -> str:
        return _text(self._err)

    def until(self, condition: Callable[[], Any], *, timeout_s: float = 120) -> Any:
        """The condition's first value that is true. Fails when the job ends before, or time does."""
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert self.process.poll() is None, f"the job has ended:\n{self.stdout[-2000:]}{self.stderr[-4000:]}"
            assert time.monotonic() < deadline, f"nothing came of it:\n{self.stdout[-2000:]}{self.stderr[-4000:]}"
            time.sleep(0.02)
        return value


def _text(file: Any) -> str:
    return os.pread(file.fileno(), 10**7, 0).decode(errors="replace")
