"""`torchrun` for tests, from an image: a process that has imported the libraries, and is forked for each rank.

Importing torch and transformers takes seconds, and vLLM ten, in every rank of every launch. Here an image imports them
once a session; a launch is a fork of it that holds the store, as torchrun's agent does, and a fork of that for each
rank, with torchrun's variables. The rank runs the same script or module to the interpreter's ordinary end: real
processes, real Gloo. An engine starts in the rank.

What a fork cannot show stays with torchrun itself (tests/ranks.py): that our scripts run under it, signals to it, and
what the environment says before Python begins. All ranks have one hash seed here.

    python -m tests.prefork [vllm]

Standard input: a line of JSON for each launch, {ranks, words, cwd, env, out, err}; standard output: one of the exit
codes of its ranks. `ranks` 0: one process, as without torchrun.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.ranks import LIMIT_S, ROOT

LIBRARIES = (
    "torch", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor", "transformers",
    "transformers.models.auto.modeling_auto", "transformers.models.qwen3.modeling_qwen3", "safetensors.torch",
)  # fmt: skip
GRACE_S = 30.0  # torchrun's, from SIGTERM to SIGKILL for ranks whose peer has failed
PR_SET_PDEATHSIG = 1


# ---- In the test's process ----


@dataclass(frozen=True)
class Launch:
    """What came of a launch."""

    codes: list[int]
    """The exit code of each rank; a signal's is negative, as a Popen's."""
    returncode: int
    """torchrun's, 1 where a rank has failed; without ranks the process's own."""
    stdout: str
    stderr: str


OF_IMAGES = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
"""What libraries read when they are imported: what lib/dist.py sets on a CPU before that."""
_images: dict[bool, subprocess.Popen] = {}


def prefork(num_ranks: int, *words: str, cwd: Path = ROOT, vllm: bool = False, **env: str) -> Launch:
    """The finished `torchrun --nproc_per_node=num_ranks WORDS`, of ranks that an image's forks are.

    `num_ranks` 0: `python WORDS`. `vllm`: of the image that has imported vLLM too.
    """
    image = _images.get(vllm)
    if image is None or image.poll() is not None:
        image = _images[vllm] = subprocess.Popen(
            [sys.executable, "-m", "tests.prefork", *["vllm"] * vllm], cwd=ROOT, start_new_session=True, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | OF_IMAGES,
        )  # fmt: skip
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        launch = {
            "ranks": num_ranks, "words": words, "cwd": str(cwd), "out": out.name, "err": err.name,
            "env": {**os.environ, "OMP_NUM_THREADS": "1", **env},
        }  # fmt: skip
        print(json.dumps(launch), file=image.stdin, flush=True)
        ready, _, _ = select.select([image.stdout], [], [], LIMIT_S)
        answer = image.stdout.readline() if ready else ""
        found = [file.read().decode(errors="replace") for file in (out, err)]
    if not answer:  # it hangs, or is gone; its forks die with it
        image.kill()
        raise AssertionError(f"no answer to {words}:\n{found[0][-2000:]}{found[1][-4000:]}")
    codes = json.loads(answer)
    return Launch(codes, int(any(codes)) if num_ranks else codes[0], *found)


@atexit.register
def _close() -> None:
    for image in _images.values():
        image.stdin.close()
        image.wait()


# ---- In the image ----


def serve(libraries: tuple[str, ...]) -> list[str]:
    """Answers launches until standard input ends, then ends the process. Returns in a rank: the words that it is."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries say is no answer
    for name in libraries:
        importlib.import_module(name)
    sys.stdout.flush()
    os.dup2(answers, 1)
    os.close(answers)
    gc.collect()
    gc.freeze()  # so that no fork copies what its collector would look at
    for line in sys.stdin:
        threads = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        assert len(threads) == 1, f"a fork would lack these threads: {threads}"
        reader, writer = os.pipe()
        if (agent := os.fork()) == 0:
            os.close(reader)
            _die_with_parent()
            return _launch(json.loads(line), writer)
        os.close(writer)
        with open(reader) as answer:
            text = answer.read()
        os.waitpid(agent, 0)
        print(text or "[-1]", flush=True)
    os._exit(0)


def _launch(launch: dict, writer: int) -> list[str]:
    """The agent: starts the ranks, holds the store, writes their exit codes, and ends. Returns in a rank."""
    for number, name in enumerate((os.devnull, launch["out"], launch["err"])):
        file = os.open(name, os.O_RDWR | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.chdir(launch["cwd"])
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen(128)  # who comes before the store is there waits
    port, run_id, pids = server.getsockname()[1], str(uuid.uuid4()), []
    for rank in range(launch["ranks"] or 1):
        if (pid := os.fork()) == 0:
            _die_with_parent()
            if launch["ranks"]:
                os.setsid()  # as torchrun's
            os.close(writer)
            server.close()
            return _become(launch["words"], launch["env"] | _variables(rank, launch["ranks"], port, run_id))
        pids.append(pid)
    import torch.distributed as torch_dist

    store = torch_dist.TCPStore(  # noqa: F841 (as long as the ranks)
        "127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=server.detach()
    )
    os.write(writer, json.dumps(_wait(pids)).encode())
    os._exit(0)


def _variables(rank: int, size: int, port: int, run_id: str) -> dict[str, str]:
    """What torchrun --standalone tells a rank; nothing where there are none."""
    return {} if size == 0 else {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank), "GROUP_RANK": "0", "ROLE_NAME": "default",
        "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "ROLE_WORLD_SIZE": str(size), "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }  # fmt: skip


def _become(words: list[str], env: dict[str, str]) -> list[str]:
    """Makes this fork what a new interpreter would be."""
    os.environ.clear()
    os.environ.update(env)
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    first = os.getcwd() if words[0] == "-m" else str(Path(words[0]).resolve().parent)
    sys.path[0] = first
    sys.path[1:1] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    importlib.invalidate_caches()
    return words


def _wait(pids: list[int]) -> list[int]:
    """The ranks' exit codes. After the first failure the others get SIGTERM, and SIGKILL when they do not end."""
    codes: dict[int, int] = {}
    deadline, number = float("inf"), signal.SIGTERM
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            codes[pid] = os.waitstatus_to_exitcode(status)
            if codes[pid] and deadline == float("inf"):
                deadline = 0.0
        elif pid == 0:
            time.sleep(0.01)
        if time.monotonic() > deadline:
            for other in (other for other in pids if other not in codes):
                with suppress(ProcessLookupError):
                    os.kill(other, number)
            deadline, number = time.monotonic() + GRACE_S, signal.SIGKILL
    return [codes[pid] for pid in pids]


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    if "vllm" in sys.argv:
        from lib.engine.in_process import set_engine_environment

        set_engine_environment(on_gpu=False)
        LIBRARIES = (*LIBRARIES, "vllm", "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker")
    # A rank returns, and ends as any interpreter does: with its exit functions, and its exceptions told.
    _words = serve(LIBRARIES)
    if _words[0] == "-m":
        sys.argv = _words[1:]
        runpy.run_module(_words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = _words
        runpy.run_path(_words[0], run_name="__main__")
