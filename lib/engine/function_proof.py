"""The proof that engine and trainer compute the same function: a few tokens of the engine's, and the trainer's opinion.

Equal bits in equal places (weight_sync.py) do not prove it: a scale of the logits, a rotary setting or a kernel may
still differ. So once, at the start, the engine samples some tokens the way it samples all others, and the trainer
computes their log-probs. There also, whether the trainer's packed sequences see each other.
"""

import gc
import math
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lib.dist import SINGLE, World
from lib.engine.engine import RolloutEngine
from lib.engine.in_process import told_refusals
from lib.engine.mismatch import check_finite
from lib.engine.rollout_config import Sampling
from lib.engine.weight_sync import WeightSync, names_to_check
from lib.errors import UserError, WeightSyncError
from lib.model.attention import noting_windows
from lib.model.batching import make_batch
from lib.model.forward import forward_policy
from lib.model.fsdp import FSDPConfig, iter_full_tensors, onload, reshard, shard_
from lib.model.networks import CausalPolicy, build_policy, empty_, put_
from lib.types import Batch, Rollout, Sample, Score

NUM_TOKENS = 64  # sampled at least, in at least two sequences: a leak needs a neighbour
PROMPT_LEN, RESPONSE_LEN = 8, 16  # at most: the pass is short, and decoding has many steps
MAX_DIFF = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Largest mean |log-prob difference|, in nats. In float32 rounding alone gives about 1e-6, logits that are a tenth too
large 0.1; in bfloat16 rounding gives 0.005 to 0.04, for a few models more than 0.05."""
MAX_DIFF_TF32 = 0.01
"""The same of float32 on a GPU, where vLLM's attention (Triton's `tl.dot`) multiplies with 10 bits: that alone gives
0.001, measured by rounding so in the trainer."""
ROUNDING_FACTOR = 3.0
"""Above MAX_DIFF bfloat16 may still be the cause: so many times what it changes in the trainer itself is allowed. Two
implementations that round differently are about 1.4 times that apart."""
MAX_LEAK = {torch.float32: 1e-5, torch.bfloat16: 0.02}
"""Most that other tokens in a neighbour may change a log-prob, in nats. Without a leak it is exactly 0 on a CPU; the
room, about a rounding's, is for kernels that depend on what lies beside. A leak gives 1 and more."""


@dataclass(frozen=True, kw_only=True)
class FunctionProof:
    """What was compared. The same on all ranks."""

    num_tokens: int
    """Of each replica."""
    mean: float
    """Mean |engine - trainer| of the tokens' log-probs, in nats: the largest over replicas."""
    limit: float
    """What it may be, in nats."""


def prove_function(
    weight_sync: WeightSync, folder: str, *, dtype: torch.dtype, max_prompt_len: int, reserved_bytes: int = 0
) -> FunctionProof:
    """How far engine and trainer disagree on tokens that the engine samples now. The engine is awake, before and after.

    `folder` is the policy's, `dtype` its compute precision; `reserved_bytes` as for `WeightSync.wake`. All replicas
    sample the same prompts, and every rank passes its replica's responses through the policy. Changes neither weights
    nor random states. Executed by all ranks together. Raises on all of them: WeightSyncError when the two disagree by
    more than the limit or give numbers that are not finite, UserError when packed sequences see each other.
    """
    policy, engine = weight_sync.policy, weight_sync.engine
    world = engine.world
    with told_refusals(engine.cfg, folder, on_gpu=engine.on_gpu, rank=world.rank):  # what only the first step finds
        rollouts = _sample(engine, policy.config.vocab_size, max_prompt_len)
    engine.sleep()  # its memory may be all that the policy leaves
    batch = world.agree(lambda: make_batch(rollouts, SINGLE, mini_batch_size=len(rollouts)))
    onload(weight_sync.fsdp, policy, world)
    with noting_windows() as windows:
        log_probs = _log_probs(policy, batch)  # (B, T)
    world.agree(lambda: _refuse_windows(windows, engine.attention_windows(), engine.max_len, folder))
    check_finite(int(world.max((batch.response_mask & ~log_probs.isfinite()).sum())))
    leak = _leak(policy, batch, log_probs)
    world.agree(lambda: _refuse_leak(leak, MAX_LEAK[dtype], policy.config.model_type, folder))

    mean = _largest_mean(log_probs - batch.rollout_log_probs, batch, world)
    limit, rounding = max_diff(dtype, world.device), None
    if mean > limit and dtype is not torch.float32:
        rounding = _largest_mean(log_probs - _exact_log_probs(policy, batch, folder, world), batch, world)
        limit = max(limit, ROUNDING_FACTOR * rounding)
    reshard(policy)
    num_tokens = int(batch.response_mask.sum())
    if not mean <= limit:
        raise _disagreement(num_tokens, mean, limit, rounding).on_all_ranks()
    names = names_to_check(engine, seed=engine.seed, step=0)
    weight_sync.wake(names=names, time=nullcontext, reserved_bytes=reserved_bytes)
    return FunctionProof(num_tokens=num_tokens, mean=mean, limit=limit)


def max_diff(dtype: torch.dtype, device: torch.device) -> float:
    """What the mean |log-prob difference| may be without a look at the trainer's own rounding, in nats."""
    return MAX_DIFF_TF32 if dtype is torch.float32 and device.type == "cuda" else MAX_DIFF[dtype]


def _sample(engine: RolloutEngine, vocab_size: int, max_prompt_len: int) -> list[Rollout]:
    """At least NUM_TOKENS tokens of random prompts, with a score that stands for none; the same from every replica."""
    response_len = min(RESPONSE_LEN, engine.cfg.max_response_len)
    num_sequences = max(2, math.ceil(NUM_TOKENS / response_len))
    generator = torch.Generator().manual_seed(engine.seed)
    ids = torch.randint(vocab_size, (num_sequences, min(PROMPT_LEN, max_prompt_len)), generator=generator).tolist()
    samples = [
        Sample(uid=uid, prompt_ids=prompt_ids, data_source="", ground_truth="", extra_info={})
        for uid, prompt_ids in enumerate(ids)
    ]
    sampling = Sampling(n=1, max_response_len=response_len, temperature=1.0, log_probs=True, full_len=True)
    groups = engine.generate(samples, sampling, stream="proof")
    return [replace(rollout, score=Score(score=0.0)) for group in groups for rollout in group]


def _log_probs(policy: CausalPolicy, batch: Batch) -> Tensor:
    """The trainer's log-probs (B, T) on the CPU. Executed by all ranks together.

    Layers are not compiled for these few tokens: that would take seconds, and choose kernels for short batches.
    """
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        return forward_policy(policy, batch, temperature=1.0, statistic="none")[0].cpu()


def _leak(policy: CausalPolicy, batch: Batch, log_probs: Tensor) -> float:
    """By how much log-probs (B, T) change at most with the tokens of another sequence, the first or the last, in nats.

    Executed by all ranks together.
    """
    largest = 0.0
    for row in (0, len(log_probs) - 1):
        input_ids = batch.input_ids.clone()  # (B, L)
        length = int(batch.total_lens[row])
        input_ids[row, :length] = (input_ids[row, :length] + 1) % policy.config.vocab_size
        changed = _log_probs(policy, batch.with_(input_ids=input_ids))  # (B, T)
        of_others = torch.where(batch.response_mask, changed - log_probs, 0.0).abs()
        of_others[row] = 0
        largest = max(largest, float(of_others.max()))
    return largest


def _refuse_windows(trainer: dict[int, int | None], engine: dict[int, int | None], max_len: int, folder: str) -> None:
    """Sequences as short as the proof's do not reach a window's end, so the windows themselves are compared."""
    ours, theirs = (
        {layer: window for layer, window in windows.items() if window is not None and window < max_len}
        for windows in (trainer, engine)
    )
    if ours != theirs:
        layer = min(layer for layer in {*ours, *theirs} if ours.get(layer) != theirs.get(layer))
        raise UserError(
            f"trainer and engine give a layer other windows of attention; layer {layer} of {folder}; found "
            f"{ours.get(layer, 'none')} in the trainer and {theirs.get(layer, 'none')} in the engine; take "
            "sliding_window or layer_types out of config.json where the model was not made with them, or keep prompt "
            "and response within the window"
        )


def _largest_mean(difference: Tensor, batch: Batch, world: World) -> float:
    """The mean size of a difference (B, T) over this rank's response tokens, the largest over ranks."""
    return float(world.max(difference[batch.response_mask].abs().double().mean()))


@torch.no_grad()
def _float32_copy(policy: CausalPolicy, folder: str, world: World) -> CausalPolicy:
    """A frozen policy that computes in float32 with the same weights, an adapter's added to them."""
    copy = build_policy(folder, param_dtype=torch.float32).requires_grad_(False)
    shard_(copy, FSDPConfig(reshard_after_forward=True), world, dtype=torch.float32)
    empty_(copy, world.device)
    for name, whole in iter_full_tensors(policy, torch.float32):
        put_(copy.get_parameter(name), whole)
    return copy.eval()


def _exact_log_probs(policy: CausalPolicy, batch: Batch, folder: str, world: World) -> Tensor:
    """Those of a float32 copy (B, T), which is gone afterwards: FSDP's modules hold each other."""
    reshard(policy)
    copy = _float32_copy(policy, folder, world)
    log_probs = _log_probs(copy, batch)
    reshard(copy)
    del copy
    gc.collect()
    return log_probs


def _refuse_leak(leak: float, limit: float, model_type: str, folder: str) -> None:
    if not leak <= limit:
        raise UserError(
            f"this model's layers see across the borders of packed sequences; {model_type} in {folder}; found "
            f"log-probs that change by {leak:.2g} nats with the tokens of another sequence, expected at most "
            f"{limit:g}; linear attention and state-space layers do that here: every gradient would be wrong; choose "
            "a model whose layers mix tokens by attention alone"
        )


def _disagreement(num_tokens: int, mean: float, limit: float, rounding: float | None) -> WeightSyncError:
    of_rounding = ""
    if rounding is not None:
        of_rounding = f" (the trainer's own difference from float32 is {rounding:.2g}, {ROUNDING_FACTOR:g} times it)"
    return WeightSyncError(
        f"engine and trainer hold the same weights and do not compute the same; {num_tokens} tokens that the engine "
        f"sampled; mean |log-prob difference| {mean:.4g} nats, expected at most {limit:.2g}{of_rounding}; the likely "
        "causes, in this order: a model that the two implement differently (a scale of the logits, attention or rotary "
        "settings); a kernel that is wrong on this machine (try --rollout.fast-paths off, --rollout.enforce-eager "
        "True); low precision (try --model.dtype float32); if none of these mends it, choose another model and please "
        "report its config.json"
    )
