"""What every test module leaves behind for the next one: nothing. And what holds for all of hypothesis's tests."""

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

from lib import secret_values
from lib.dist import settle_elementwise, shutdown_distributed

# By itself hypothesis fails an example that takes 0.2 s, or draws that take long: on a busy machine any may. And the
# same commit draws the same examples.
settings.register_profile("any machine", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
settle_elementwise()  # most tests compute without joining other ranks, which does it
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored, by our children too
LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="module", autouse=True)
def no_secret_is_left():
    """A module may parse options with made-up secrets, which would be blanked in the next one's texts."""
    yield
    secret_values._of_options.clear()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model's folder, with a tokenizer. Not to be changed."""
    from tests.tiny import make_model, make_tokenizer  # which import transformers

    path = make_model(tmp_path_factory.mktemp("model") / "model")
    make_tokenizer(path)
    return path


@pytest.fixture(scope="module", autouse=True)
def no_process_group_is_left():
    """A module may join a group of one rank in this process; its scripts without torchrun would inherit its port."""
    before = {name: os.environ.get(name) for name in LAUNCH}
    yield
    shutdown_distributed()
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
