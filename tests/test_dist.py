"""How a rank meets the others, or waits for them in vain. How it leaves: with the exit code that it chose. And what it
does before it computes."""

import os
import subprocess
import sys

import pytest

from tests.conftest import LAUNCH
from tests.ranks import LIMIT_S, ROOT, free_port

LEAVE = """
import sys
import torch
import torch.distributed as torch_dist
from lib.dist import init_distributed

init_distributed()
groups = [torch_dist.new_group([0]) for _ in range(16)]
sys.setswitchinterval(60)  # Gloo's threads get Python's lock only from one who gives it away
for group in groups:
    torch_dist.all_reduce(torch.ones(2000), group=group, async_op=True)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 2])
def test_a_rank_ends_with_its_exit_code_though_gloo_still_holds_tensors(code):
    words = [sys.executable, "-c", LEAVE, str(code)]
    for _ in range(4):  # without the wait 8 of 10 aborted
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
        assert (done.returncode, done.stderr) == (code, "")


SETTLE = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from lib.dist import init_distributed

class Calls(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor):
            print(function.__name__.split(".")[0], args[0].numel(), args[0].device)
        return function(*args, **(kwargs or {}))

with Calls():
    init_distributed()
"""


def test_the_first_elementwise_function_of_a_process_is_of_one_number():
    """So one thread calls it. The race that this avoids shows in one of 20 processes (EXPERIMENTS.md)."""
    done = subprocess.run([sys.executable, "-c", SETTLE], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    calls = [line.split() for line in done.stdout.splitlines()]
    assert next(call for call in calls if call[0] in ("cos", "exp", "log", "sin", "sqrt")) == ["exp", "1", "cpu"]


LISTEN = """
import os
from pathlib import Path
from lib.dist import init_distributed
from lib.stopping import Stopper

with Stopper(init_distributed()):
    own = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                print(fields[1])
"""


def test_one_rank_without_torchrun_listens_to_nobody_on_the_network():
    env = {name: value for name, value in os.environ.items() if name not in LAUNCH}
    for by_hand in ({}, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}):
        done = subprocess.run(
            [sys.executable, "-c", LISTEN], cwd=ROOT, env=env | by_hand, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert all(address.split(":")[0].endswith("7F") for address in done.stdout.split()), done.stdout  # 127.x.y.z


ALONE = """
import lib.dist
from datetime import timedelta
from lib.config import reporting_errors

lib.dist.HAND_TIMEOUT = timedelta(seconds=1)
with reporting_errors():
    lib.dist.init_distributed()
"""


@pytest.mark.parametrize(("rank", "missing"), [("0", "ranks 1, 2"), ("1", "rank 0")])  # who is there, rank 0 knows
def test_a_rank_started_by_hand_says_soon_which_others_have_not_come(rank, missing):
    env = os.environ | {"RANK": rank, "WORLD_SIZE": "3", "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", ALONE], cwd=ROOT, env=env | {"MASTER_PORT": free_port()}, capture_output=True, text=True,
        timeout=LIMIT_S,
    )  # fmt: skip
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("error[2] not all ranks have come; ")
    assert f"found no {missing} after 1 s" in line


def test_transformers_runs_no_code_of_the_hub():
    """With the package `kernels` it would download kernels for the models that it builds."""
    code = (
        "from lib.dist import init_distributed; init_distributed()\n"
        "from transformers.integrations import hub_kernels; print(hub_kernels._kernels_enabled)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout == "False\n", done.stderr
