"""A run of a few steps without an engine, for tests of what goes on from it."""

import json
import shutil

import pytest

from lib.dist import init_distributed
from lib.tracking.run_folder import read_status
from tests.checkpoint_worker import config, train


@pytest.fixture(scope="module")
def done(model, tmp_path_factory):
    """A run of 4 steps with checkpoints 2 and 4. Not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    cfg = config(model, "--run-dir", folder, "--num-steps", 4, "--checkpoint.every", 2)
    train(cfg, init_distributed())
    return folder


@pytest.fixture
def run(done, tmp_path):
    """A copy of it, killed in its last step."""
    shutil.copytree(done, tmp_path / "run")
    change_status(tmp_path / "run", state="running")
    return tmp_path / "run"


def change_status(folder, **values):
    (folder / "status.json").write_text(json.dumps(read_status(folder) | values))


def options(model, run, *words):
    return config(model, "--run-dir", run, "--num-steps", 6, *words)


def flip(path, place=-5):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
