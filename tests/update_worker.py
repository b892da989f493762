"""Under torchrun: gradients of one mini-batch, and the weights after four optimizer steps, for several layouts.

    torchrun --nproc_per_node=N -m tests.update_worker MODEL OUT

writes OUT on rank 0: {"gradient/BUDGET": {name: tensor}, "weights": {name: tensor}, "norms": [...]}.
"""

import sys

import torch

from lib.advantages import GroupAdvantage
from lib.aggregation import aggregate, loss_denominator
from lib.batching import iter_micro_batches, iter_mini_batches, make_batch
from lib.dist import init_distributed, shutdown_distributed
from lib.forward import forward_policy
from lib.fsdp import FSDPConfig, begin_micro_batch, iter_full_tensors, load_policy
from lib.kl import kl_to_reference
from lib.losses import ClipLoss
from lib.model import ModelConfig
from lib.optim import OptimConfig, build_optimizer, optimizer_step
from tests.tiny import make_rollouts

BUDGETS = (30, 60, 10_000)


def full_gradients(policy):
    return {name: p.grad.full_tensor().clone() for name, p in policy.named_parameters()}


def backward(policy, mini_batch, world, budget, mode="seq-mean-token-mean"):
    denominator = loss_denominator(mini_batch, mode, world, scale=16)
    micro_batches = list(iter_micro_batches(mini_batch, budget, world))
    for place, micro_batch in enumerate(micro_batches, start=1):
        begin_micro_batch(policy, last=place == len(micro_batches))
        log_probs, entropy = forward_policy(policy, micro_batch, temperature=0.9)
        micro_batch = micro_batch.to(log_probs.device)
        token_loss, _ = ClipLoss()(log_probs, micro_batch)
        token_loss = token_loss - 0.01 * entropy + 0.1 * kl_to_reference(log_probs, micro_batch, kl_type="k3")
        (aggregate(token_loss, micro_batch.response_mask, mode) / denominator).backward()


def main(path, out, checkpointing=False):
    world = init_distributed()
    # A static share, as if each rank were an engine: the batch must not depend on who generated what.
    rollouts = [r for r in make_rollouts(num_groups=6) if r.sample.uid % world.size == world.rank]
    batch = make_batch(rollouts, world, mini_batch_size=18)
    advantages, returns = GroupAdvantage()(batch, world)
    batch = batch.with_(
        advantages=advantages, returns=returns, old_log_probs=batch.rollout_log_probs * 4 - 3,
        ref_log_probs=batch.rollout_log_probs * 4 - 2,
    )  # fmt: skip
    cfg = ModelConfig(dtype="float32", gradient_checkpointing=checkpointing)
    policy = load_policy(cfg, path, FSDPConfig(reshard_after_forward=checkpointing), world)
    result = {"num_forwards": 0}

    def count(module, arguments):
        result["num_forwards"] += 1

    policy.layers[0].self_attn.q_proj.register_forward_pre_hook(count)
    for budget in BUDGETS:
        for mini_batch in iter_mini_batches(batch, world, update_epochs=1):
            backward(policy, mini_batch, world, budget)
        result[f"gradient/{budget}"] = full_gradients(policy)
        policy.zero_grad()
    optim = OptimConfig(lr=1e-2, clip_grad=0.5)
    optimizer = build_optimizer(policy, optim)
    result["norms"] = []
    untrained = batch.with_(response_mask=torch.zeros_like(batch.response_mask))
    for step in range(4):
        for mini_batch in iter_mini_batches(untrained if step == 2 else batch, world, update_epochs=1):
            backward(policy, mini_batch, world, 60)
        if step == 1 and world.rank == world.size - 1:  # one rank's gradient breaks: all ranks skip the step
            next(policy.parameters()).grad.to_local()[0] = float("nan")
        before = {name: full.clone() for name, full in iter_full_tensors(policy, torch.float32)}
        norm, taken = optimizer_step(policy, optimizer, clip_grad=optim.clip_grad)
        same = all(torch.equal(before[name], full) for name, full in iter_full_tensors(policy, torch.float32))
        result["norms"].append((norm, taken, same))
    result["weights"] = dict(iter_full_tensors(policy, torch.float32))
    if world.rank == 0:
        torch.save(result, out)
    shutdown_distributed()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], len(sys.argv) > 3)
