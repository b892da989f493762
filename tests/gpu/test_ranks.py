"""Several GPUs: what leaves them comes back, and a run goes on with another number of them.

tests/checkpoint_worker.py trains. Its shards are uneven, over two ranks and over three: FSDP pads the shorter ones.
"""

import shutil

import pytest
import torch

from tests.ranks import torchrun
from tests.tiny import make_model, make_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="wants two GPUs"),
]
THIRD = pytest.mark.skipif(torch.cuda.device_count() < 3, reason="wants three GPUs")
OFF_THE_GPU = ("--fsdp.optimizer-offload", "True", "--fsdp.param-offload", "True", "--checkpoint.async-save", "True")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A function that trains on so many GPUs, saving every second step, and gives what was computed."""
    folder = tmp_path_factory.mktemp("gpus")
    model = make_model(folder / "model", intermediate_size=97)
    make_tokenizer(model)

    def run(num_ranks, run_dir, dtype, *words):
        out = run_dir.with_suffix(".pt")
        words = (
            "--model.dtype", dtype, "--run-dir", run_dir, "--num-steps", 4, "--checkpoint.every", 2,
            "--checkpoint.keep", "None", *words,
        )  # fmt: skip
        done = torchrun(num_ranks, "-m", "tests.checkpoint_worker", *map(str, (model, out, *words)))
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
        return torch.load(out)

    return run


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=THIRD)])
def test_weights_and_moments_on_the_host_change_no_bit_of_uneven_shards(start, tmp_path, num_ranks):
    on_gpu = start(num_ranks, tmp_path / "gpu", "bfloat16")
    on_host = start(num_ranks, tmp_path / "host", "bfloat16", *OFF_THE_GPU)
    assert len(on_gpu["losses"]) == 4 and on_gpu["losses"] == on_host["losses"]
    for name, tensor in on_gpu["weights"].items():
        assert torch.equal(tensor, on_host["weights"][name]), name
    for kind in ("model", "optim"):
        shards = sorted((tmp_path / "gpu" / "global_step_4" / "actor" / kind).iterdir())
        assert len(shards) == num_ranks
        for shard in shards:
            assert shard.read_bytes() == (tmp_path / "host" / shard.relative_to(tmp_path / "gpu")).read_bytes()


@pytest.mark.parametrize("before, after", [(1, 2), (2, 1), pytest.param(2, 3, marks=THIRD)])
def test_another_number_of_gpus_computes_the_same_up_to_rounding(start, tmp_path, before, after):
    whole = start(before, tmp_path / "whole", "float32")
    shutil.copytree(tmp_path / "whole", tmp_path / "other")
    shutil.rmtree(tmp_path / "other" / "global_step_4")
    resume = ("--checkpoint.resume", tmp_path / "other" / "global_step_2")
    found = start(after, tmp_path / "other", "float32", *resume)
    assert found["uids"] == {step: whole["uids"][step] for step in (3, 4)}
    assert found["losses"] == pytest.approx({step: whole["losses"][step] for step in (3, 4)}, rel=1e-4)
    for name, tensor in whole["weights"].items():
        assert torch.allclose(found["weights"][name], tensor, rtol=1e-3, atol=1e-4), name
