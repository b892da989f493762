"""Ranks that do not share the run folder, as on nodes with disks of their own, are told before anything is loaded."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lib.dist import SINGLE
from lib.tracking.run_folder import check_shared
from tests.ranks import torchrun

ON_ITS_OWN_DISK = """
if [ "$RANK" = 1 ]; then exec unshare --map-root-user --mount sh -c 'mount -t tmpfs tmpfs {disk} && exec "$@"' sh "$@"
else exec "$@"; fi
"""
OPEN_A_RUN = """
import sys
from lib.config import reporting_errors
from lib.dist import init_distributed
from lib.tracking import Run, TrackingConfig
with reporting_errors():
    world = init_distributed()
    with Run(sys.argv[1], TrackingConfig(), world, config={{}}, num_steps=1):
        print("opened")
"""


def open_run(disk: Path, run: Path) -> subprocess.CompletedProcess:
    """Two ranks open a run; on the second one the disk is another."""

    words = ("sh", "-c", ON_ITS_OWN_DISK.format(disk=disk), "sh", sys.executable, "-c", OPEN_A_RUN.format(), str(run))
    return torchrun(2, "--no-python", *words)


def test_a_run_folder_that_one_rank_does_not_see_is_refused_and_leaves_nothing(tmp_path):
    alone = ["unshare", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    if not shutil.which("unshare") or subprocess.run(alone, capture_output=True).returncode:
        pytest.skip("no permission to mount a disk")
    done = open_run(tmp_path, tmp_path / "run")
    lines = [line for line in done.stderr.splitlines() if line.startswith("error[")]
    assert len(lines) == 1, done.stdout + done.stderr[-3000:]
    assert lines[0].startswith("error[2] not every node shares the run folder; --run-dir ")
    assert "found that rank 1 (" in lines[0] and "a file system that all nodes mount" in lines[0]
    assert "opened" not in done.stdout and not list(tmp_path.iterdir())


def test_the_check_leaves_nothing_in_a_folder_that_is_shared(tmp_path):
    check_shared(tmp_path, SINGLE)
    assert tmp_path.is_dir() and not list(tmp_path.iterdir())
