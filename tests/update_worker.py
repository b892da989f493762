"""Under torchrun: gradients of one mini-batch, and the weights after four optimizer steps, for several layouts.

    torchrun --nproc_per_node=N -m tests.update_worker MODEL OUT

writes OUT on rank 0: {"gradient/BUDGET": {name: tensor}, "CASE/BUDGET": the same of every one of CASES (not where
activations are recomputed), "weights": {name: tensor}, "norms": [...], "gathered in buckets": [number of buckets]}.
"""

import sys

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import lib.model.fsdp
from lib.algorithms.advantages import GroupAdvantage
from lib.algorithms.aggregation import aggregate, loss_denominator
from lib.algorithms.correction import Correction
from lib.algorithms.kl import kl_to_reference
from lib.algorithms.losses import LOSSES, ClipLoss
from lib.dist import init_distributed, shutdown_distributed
from lib.model.batching import iter_micro_batches, iter_mini_batches, make_batch
from lib.model.forward import compute_log_probs, forward_policy
from lib.model.fsdp import FSDPConfig, begin_micro_batch, iter_full_tensors, iter_gathered, load_policy
from lib.model.networks import ModelConfig, Network
from lib.model.optim import OptimConfig, build_optimizer, optimizer_step
from lib.tracking.metrics import Metrics
from tests.tiny import make_rollouts

BUDGETS = (30, 60, 10_000)
CASE_BUDGETS = (BUDGETS[0], BUDGETS[-1])
MAX_RESPONSE_LEN = 16
CLIP, UNCORRECTED = ClipLoss(), Correction()
WEIGHTS = Correction(is_level="token", is_threshold=1.3, batch_normalize=True)
REINFORCE = Correction(bypass=True, loss_type="reinforce", is_level="sequence")
KNOBS = {
    "vanilla": ("token-mean", dict(clip_low=0.1, clip_high=0.3, clip_dual=1.2)),
    "gspo": ("seq-mean-token-mean", dict(clip_low=0.05, clip_high=0.05)),
    "cispo": ("seq-mean-token-sum", dict(clip_low=0.2)),
    "sapo": ("seq-mean-token-sum-norm", dict(tau_neg=2.0)),
    "geo_mean": ("seq-mean-token-mean", dict(clip_low=0.1, clip_high=0.2)),
    "clip_cov": ("token-mean", dict(clip_cov_ratio=0.2, clip_cov_lb=-0.2, clip_cov_ub=3.0)),
    "kl_cov": ("seq-mean-token-sum", dict(kl_cov_ratio=0.3, ppo_kl_coef=0.7)),
    "gpg": ("seq-mean-token-sum-norm", {}),
    "dppo_tv": ("seq-mean-token-sum-norm", dict(clip_low=0.001, clip_high=0.001, max_ratio=1.2)),
    "dppo_kl": ("token-sum", dict(clip_low=0.001, clip_high=0.001, max_ratio=1.2)),
    "dro": ("token-mean", dict(dro_beta=0.8)),
}
CASES = {name: (LOSSES[name](**knobs), mode, WEIGHTS) for name, (mode, knobs) in KNOBS.items()}
CASES["reinforce"] = LOSSES["gpg"](), "seq-mean-token-mean", REINFORCE
"""Every loss with knobs that tell tokens of this batch apart, and one whose weights follow the current policy."""


def full_gradients(policy):
    return {name: p.grad.full_tensor().clone() for name, p in policy.named_parameters()}


def backward(policy, mini_batch, world, budget, *, loss=CLIP, mode="seq-mean-token-mean", correction=UNCORRECTED):
    """One mini-batch in train_grpo.py's order."""
    mini_batch = loss.prepare(mini_batch, world)
    denominator = loss_denominator(mini_batch, mode, world, scale=MAX_RESPONSE_LEN)
    micro_batches = list(iter_micro_batches(mini_batch, budget, world))
    for place, micro_batch in enumerate(micro_batches, start=1):
        begin_micro_batch(policy, last=place == len(micro_batches))
        log_probs, entropy = forward_policy(policy, micro_batch, temperature=0.9)
        micro_batch = correction.weigh(log_probs, micro_batch.to(log_probs.device), Metrics(world))
        token_loss = loss.weigh(loss(log_probs, micro_batch)[0], micro_batch)
        token_loss = token_loss - 0.01 * entropy + 0.1 * kl_to_reference(log_probs, micro_batch, kl_type="k3")
        (aggregate(token_loss, micro_batch.response_mask, mode) / denominator).backward()


def near_policies(log_probs, noise):
    """Log-probs of an old policy and of the engine, about half a nat from the current ones; noise is from -1 to 0."""
    return log_probs + noise + 0.5, log_probs + 0.5 * torch.sin(40 * noise)


def gradients_of_cases(policy, batch, world):
    """{"CASE/BUDGET": gradients}, with the engine and the old policy apart from the current one and from each other."""
    current, _ = compute_log_probs(policy, batch, max_tokens_per_gpu=60, temperature=0.9, world=world)  # (B, T)
    old, engine = near_policies(current, batch.rollout_log_probs)
    batch = batch.with_(old_log_probs=old, rollout_log_probs=engine)
    found = {}
    for name, (loss, mode, correction) in CASES.items():
        corrected = correction.correct(batch, Metrics(world))
        for budget in CASE_BUDGETS:
            for mini_batch in iter_mini_batches(corrected, world, update_epochs=1):
                backward(policy, mini_batch, world, budget, loss=loss, mode=mode, correction=correction)
            found[f"{name}/{budget}"] = full_gradients(policy)
            policy.zero_grad()
    return found


def tall_and_short(world):
    """Sharded parameters of which the last ranks have few rows or none."""
    model = Network()
    torch.manual_seed(1)
    for place, shape in enumerate([(1,), (4, 3), (2, 5, 2), (7,)]):
        sharded = distribute_tensor(torch.randn(shape), init_device_mesh("cpu", (world.size,)), [Shard(0)])
        model.register_parameter(f"p{place}", torch.nn.Parameter(sharded))
    return model


def gathered_in_buckets(model, dtype, bucket_bytes):
    """How many buckets it took; an error where a name or a bit differs from DTensor's own gather, on any rank."""
    lib.model.fsdp.BUCKET_BYTES = bucket_bytes
    buckets = list(iter_gathered(model, dtype))
    expected = [(name, p.detach().to(dtype).full_tensor()) for name, p in model.named_parameters()]
    sizes = [sum(tensor.nbytes for tensor in bucket.values()) for bucket in buckets]
    assert all(size <= bucket_bytes or len(bucket) == 1 for size, bucket in zip(sizes, buckets, strict=True))
    found = [pair for bucket in buckets for pair in bucket.items()]
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, ours), (_, theirs) in zip(found, expected, strict=True):
        assert ours.dtype == dtype and torch.equal(ours, theirs), name
    return len(buckets)


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
    result = {"num_forwards": 0} | ({} if checkpointing else gradients_of_cases(policy, batch, world))

    def count(module, arguments):
        result["num_forwards"] += 1

    counter = policy.layers[0].self_attn.q_proj.register_forward_pre_hook(count)
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
    counter.remove()
    compute_log_probs(policy, batch, max_tokens_per_gpu=60, temperature=0.9, world=world)  # leaves weights gathered
    result["gathered in buckets"] = [
        gathered_in_buckets(model, dtype, size)
        for model in (policy, tall_and_short(world))
        for dtype in (torch.float32, torch.bfloat16)
        for size in (1, 40 * 2**10, 2**30)
    ]
    if world.rank == 0:
        torch.save(result, out)
    shutdown_distributed()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], len(sys.argv) > 3)
