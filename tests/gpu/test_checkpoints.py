"""Saving and going on where the weights are a GPU's, and the moments its own or the host's.

The loop is tests/checkpoint_worker.py's, in this process, in bfloat16 as users train and in float32.
"""

import gc
import shutil

import pytest
import torch
from safetensors.torch import load_file

from lib.algorithms.advantages import GroupAdvantage
from lib.checkpoints.tensor_files import model_tensors, optimizer_tensors, own_pieces
from lib.dist import init_distributed
from lib.launch.resume import find_resume
from lib.model.batching import iter_mini_batches, make_batch
from lib.model.fsdp import FSDPConfig, load_policy, offload, onload
from lib.model.lora import LoRAConfig
from lib.model.networks import ModelConfig
from lib.model.optim import HostAdamW, OptimConfig, build_optimizer, optimizer_step
from lib.types import Sample
from tests.checkpoint_worker import config, respond, train
from tests.update_worker import backward

pytestmark = pytest.mark.gpu
ON_HOST = ("--fsdp.optimizer-offload", "True", "--fsdp.param-offload", "True")
ON_HOST_FIELDS = {"optimizer_offload": True, "param_offload": True}
ASYNC = ("--checkpoint.async-save", "True")


@pytest.fixture(scope="module")
def world():
    return init_distributed()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def start(request, model, world):
    """A function that trains: a run's folder, its steps, options. Saves every second step."""

    def run(folder, num_steps, *words):
        common = ("--model.dtype", request.param, "--checkpoint.every", 2, "--checkpoint.keep", "None")
        return train(config(model, "--run-dir", folder, "--num-steps", num_steps, *common, *words), world)

    run.dtype = request.param
    return run


@pytest.fixture(scope="module")
def straight(start, tmp_path_factory):
    """A run of 4 steps and what it computed. Not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "straight"
    return folder, start(folder, 4)


@pytest.mark.parametrize(
    "saving, going_on",
    [((), ON_HOST), (ON_HOST, ()), (ASYNC, ()), ((*ON_HOST, *ASYNC), ON_HOST)],
    ids=["gpu to host", "host to gpu", "async", "async on host"],
)
def test_a_run_goes_on_as_if_nothing_had_happened(start, straight, tmp_path, saving, going_on):
    start(tmp_path / "first", 4, *saving)
    shutil.copytree(tmp_path / "first", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "global_step_4")
    found = start(tmp_path / "run", 4, "--checkpoint.resume", tmp_path / "run" / "global_step_2", *going_on)
    assert found["uids"] == {step: straight[1]["uids"][step] for step in (3, 4)}
    assert found["losses"] == {step: straight[1]["losses"][step] for step in (3, 4)}
    for name, tensor in straight[1]["weights"].items():
        assert torch.equal(tensor, found["weights"][name]), name


def test_weights_on_the_host_are_nowhere_else(model, world):
    def allocated():
        gc.collect()  # what an earlier test has left
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    start, fsdp = allocated(), FSDPConfig(param_offload=True)
    policy = load_policy(ModelConfig(), str(model), fsdp, world)
    size = sum(p.to_local().nbytes for p in policy.parameters())
    expected = {name: p.detach().to_local().cpu() for name, p in policy.named_parameters()}
    for _ in range(3):
        offload(fsdp, policy)
        assert allocated() - start < 0.1 * size  # buffers
        onload(fsdp, policy, world)
        assert size <= allocated() - start < 1.3 * size  # small tensors take 512 bytes each
    for name, parameter in policy.named_parameters():
        assert torch.equal(parameter.to_local().cpu(), expected[name]), name


@pytest.mark.parametrize("on_host", [False, True])
def test_every_saved_tensor_is_loaded_bit_for_bit(start, straight, model, world, tmp_path, on_host):
    saved_at = shutil.copytree(straight[0] / "global_step_4", tmp_path / "global_step_4")
    cfg = config(model, "--model.dtype", start.dtype, "--run-dir", tmp_path / "new", "--checkpoint.resume", saved_at)
    policy = load_policy(cfg.model, str(model), cfg.fsdp, world)
    optimizer = build_optimizer(policy, cfg.optim, on_host=on_host)
    assert isinstance(optimizer, HostAdamW) == on_host
    find_resume(cfg, world).load_("actor", policy, optimizer, world)
    weights, moments = model_tensors(policy), optimizer_tensors(policy, optimizer)
    for kind, loaded in ("model", weights), ("optim", moments):
        saved = load_file(saved_at / "actor" / kind / "shard-00001-of-00001.safetensors")
        assert set(saved) == set(loaded) and len(saved) > 20
        for name, (local, _) in own_pieces(loaded, world).items():  # of one rank: everything
            assert torch.equal(local.cpu(), saved[name]), name
    where = {tensor.device.type for name, tensor in moments.items() if name.startswith("exp_avg")}
    assert where == {"cpu" if on_host else world.device.type}


@pytest.mark.parametrize("offloaded", [FSDPConfig(optimizer_offload=True), FSDPConfig(**ON_HOST_FIELDS)])
def test_an_adapter_learns_to_the_bit_what_it_learns_on_the_gpu(model, world, offloaded):
    samples = [
        Sample(uid=uid, prompt_ids=[1] * (1 + uid), data_source="test", ground_truth="", extra_info={})
        for uid in range(4)
    ]
    rollouts = [respond(sample, index) for sample in samples for index in range(2)]
    batch = make_batch(rollouts, world, mini_batch_size=len(rollouts))
    advantages, returns = GroupAdvantage()(batch, world)
    batch = batch.with_(
        advantages=advantages, returns=returns, old_log_probs=batch.rollout_log_probs,
        ref_log_probs=batch.rollout_log_probs,
    )  # fmt: skip
    found = []
    for fsdp in (FSDPConfig(), offloaded):
        policy = load_policy(ModelConfig(dtype="bfloat16"), str(model), fsdp, world, lora=LoRAConfig(rank=4))
        optimizer = build_optimizer(policy, OptimConfig(lr=1e-2), on_host=fsdp.optimizer_offload)
        for _ in range(3):
            onload(fsdp, policy, world)
            [mini_batch] = iter_mini_batches(batch, world, update_epochs=1)
            backward(policy, mini_batch, world, 60)
            optimizer_step(policy, optimizer, clip_grad=0.5)
            offload(fsdp, policy)
        onload(fsdp, policy, world)
        found.append({name: p.detach().to_local().cpu() for name, p in policy.trained().items()})
    plain, other = found
    assert any("lora_B" in name and tensor.any() for name, tensor in plain.items())
    for name, tensor in plain.items():
        assert torch.equal(tensor, other[name]), name
