"""How a rank leaves: with the exit code that it chose."""

import subprocess
import sys

import pytest

from tests.ranks import LIMIT_S, ROOT

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
