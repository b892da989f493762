"""Under torchrun: a critic's gradients of one mini-batch, its values and metrics, and its weights after two steps.

    torchrun --nproc_per_node=N -m tests.critic_worker MODEL OUT

writes OUT on rank 0. tests/test_critic.py says what must not depend on N.
"""

import sys

import torch

from lib.algorithms.aggregation import aggregate, loss_denominator
from lib.algorithms.losses import value_loss
from lib.algorithms.step_metrics import advantage_metrics, data_metrics, update_metrics
from lib.dist import SINGLE, init_distributed, shutdown_distributed
from lib.model.batching import iter_micro_batches, iter_mini_batches, make_batch
from lib.model.forward import compute_values, forward_critic
from lib.model.fsdp import FSDPConfig, begin_micro_batch, iter_full_tensors, load_critic, offload, onload
from lib.model.networks import ModelConfig
from lib.model.optim import OptimConfig, build_optimizer, optimizer_step
from lib.tracking.metrics import Metrics
from tests.tiny import make_rollouts

BUDGETS = (30, 60, 10_000)
CLIP = 0.5


def with_targets(batch):
    """Old values and returns that follow from the rows alone."""
    reported = torch.where(batch.response_mask, batch.rollout_log_probs, 0)
    return batch.with_(values=2 * reported, returns=batch.scores[:, None] - 3 * reported)


def backward(critic, mini_batch, world, budget, metrics):
    denominator = loss_denominator(mini_batch, "token-mean", world, scale=16)
    micro_batches = list(iter_micro_batches(mini_batch, budget, world))
    for place, micro_batch in enumerate(micro_batches, start=1):
        begin_micro_batch(critic, last=place == len(micro_batches))
        token_loss, stats = value_loss(forward_critic(critic, micro_batch), micro_batch, clip=CLIP)
        loss = aggregate(token_loss, micro_batch.response_mask, "token-mean") / denominator
        loss.backward()
        terms = {"vf_loss": loss}
        update_metrics(metrics, micro_batch.response_mask, terms=terms, stats=stats, num_updates=1, role="critic")


def per_row(batch, tensor, world):
    """{(uid, index): what `tensor` (B, ...) has there} of all ranks."""
    columns = zip(batch.uids.tolist(), batch.indices.tolist(), tensor.tolist(), strict=True)
    return {(uid, index): value for rows in world.gather(list(columns)) for uid, index, value in rows}


def dtypes_of_the_head(path, world, batch):
    """What a critic that computes in bfloat16 gives its head, and the head's weight and gradient there."""
    critic, found = load_critic(ModelConfig(dtype="bfloat16"), path, FSDPConfig(), world), []

    def look(module, arguments, result):
        found.extend([arguments[0].dtype, module.weight.dtype, result.dtype])

    critic.score.register_forward_hook(look)
    critic.model.norm.register_forward_hook(lambda module, arguments, result: found.append(result.dtype))
    forward_critic(critic, batch).sum().backward()
    return [*found, critic.score.weight.grad.dtype]


def main(path, out, recompute=False):
    world = init_distributed()
    rollouts = [r for r in make_rollouts(num_groups=6) if r.sample.uid % world.size == world.rank]
    batch = with_targets(make_batch(rollouts, world, mini_batch_size=18))
    cfg = ModelConfig(dtype="float32", gradient_checkpointing=recompute)
    fsdp = FSDPConfig(reshard_after_forward=recompute, param_offload=True)
    critic = load_critic(cfg, path, fsdp, world)
    result = {"keeps_gathered": critic.placement.keeps_gathered, "recomputes": critic.model.is_gradient_checkpointing}
    for budget in BUDGETS:
        values = compute_values(critic, batch, max_tokens_per_gpu=budget, world=world)
        offload(fsdp, critic)
        onload(fsdp, critic, world)
        result[f"values/{budget}"] = per_row(batch, values, world)
        metrics = Metrics(world)
        for mini_batch in iter_mini_batches(batch, world, update_epochs=1):
            backward(critic, mini_batch, world, budget, metrics)
        data_metrics(batch, metrics, max_prompt_len=16)
        advantage_metrics(batch.with_(advantages=batch.returns), metrics)
        result[f"metrics/{budget}"] = metrics.reduce()
        result[f"gradient/{budget}"] = {n: p.grad.full_tensor().clone() for n, p in critic.named_parameters()}
        critic.zero_grad()
    optimizer = build_optimizer(critic, OptimConfig(lr=1e-2))
    smaller = with_targets(make_batch(rollouts, world, mini_batch_size=6))
    for mini_batch in list(iter_mini_batches(smaller, world, update_epochs=1))[:2]:
        backward(critic, mini_batch, world, 60, Metrics(SINGLE))
        _, taken = optimizer_step(critic, optimizer, clip_grad=1.0)
        assert taken
    before = {name: full.clone() for name, full in iter_full_tensors(critic, torch.float32)}
    backward(critic, smaller.with_(response_mask=smaller.response_mask & False), world, 60, Metrics(SINGLE))
    result["without a token"] = optimizer_step(critic, optimizer, clip_grad=1.0)
    after = dict(iter_full_tensors(critic, torch.float32))
    result["unmoved"] = all(torch.equal(before[name], after[name]) for name in before)
    result["weights"] = dict(iter_full_tensors(critic, torch.float32))
    result["dtypes"] = dtypes_of_the_head(path, world, batch)
    if world.rank == 0:
        torch.save(result, out)
    shutdown_distributed()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], len(sys.argv) > 3)
