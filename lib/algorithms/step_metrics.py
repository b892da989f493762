"""What a step measures of its batch and of its updates. docs/metrics.md defines each number; names are verl's."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Literal

import torch
from torch import Tensor

from lib.algorithms.shaping import response_rewards
from lib.dist import World
from lib.ops import masked_sum
from lib.tracking.metrics import Metrics
from lib.types import Batch


def data_metrics(batch: Batch, metrics: Metrics, *, max_prompt_len: int) -> None:
    """Adds critic/score, response_length/*, prompt_length/*, response/* and reward/* of the step's rows, as scored.

    Before a correction or the length limit leaves any of them out. Local to the rank.
    """
    metrics.add_stats("critic/score", batch.scores[batch.valid])
    metrics.add_mean(
        "training/stale_tokens_ratio", (batch.stale & batch.response_mask).sum(), batch.response_mask.sum()
    )
    metrics.add_stats("response_length", batch.num_sampled)
    metrics.add_stats("prompt_length", batch.prompt_lens)
    for name, flags in {
        "response_length/clip_ratio": batch.truncated,
        "prompt_length/clip_ratio": batch.prompt_lens >= max_prompt_len,
        "response/aborted_ratio": batch.num_sampled == 0,
        "reward/excluded_ratio": ~batch.valid,
    }.items():
        metrics.add_mean(name, flags.sum(), len(batch))


def advantage_metrics(batch: Batch, metrics: Metrics) -> None:
    """Adds critic/rewards, critic/advantages, critic/returns, with a critic its values, and how many rows train.

    Also reward/constant_group_ratio, of all rewards that train. Executed by all ranks together, after the advantages
    are known (a group may be spread over ranks).
    """
    rewards = response_rewards(batch)  # (B,)
    metrics.add_stats("critic/rewards", rewards[batch.valid])
    metrics.add_stats("critic/advantages", batch.advantages[batch.response_mask])
    metrics.add_stats("critic/returns", batch.returns[batch.response_mask])
    metrics.add_mean("training/excluded_ratio", (~batch.valid).sum(), len(batch))
    if batch.values is not None:
        metrics.add_stats("critic/values", batch.values[batch.response_mask])
        explained = explained_variance(batch.values, batch.returns, batch.response_mask, metrics.world)
        metrics.set("critic/vf_explained_var", explained)
    groups: dict[int, set[tuple[float, ...]]] = defaultdict(set)
    trains = rewards[:, None] if batch.named_rewards is None else torch.column_stack((rewards, batch.named_rewards))
    rows = list(zip(batch.uids.tolist(), map(tuple, trains.tolist()), batch.valid.tolist(), strict=True))
    for uid, numbers, valid in (row for of_rank in metrics.world.gather(rows) for row in of_rank):
        groups[uid].update([numbers] if valid else [])
    constant = sum(len(different) < 2 for different in groups.values())
    metrics.set("reward/constant_group_ratio", constant / len(groups) if groups else math.nan)


def constant_reward_warning(constant_group_ratios: Sequence[float], *, at_end: bool = False) -> str | None:
    """A warning when all groups of a step had equal rewards, else None.

    Takes the steps' reward/constant_group_ratio, NaN without a group. Such steps have advantages of exactly zero and
    train nothing. It warns of the first such step of a run, and of the third one in a row; `at_end` of their number.
    """
    constant = [ratio >= 1.0 for ratio in constant_group_ratios if not math.isnan(ratio)]
    in_a_row = len(list(takewhile(bool, reversed(constant))))
    if not any(constant):
        return None
    if at_end:
        found = f"in {sum(constant)} of {len(constant)} steps"
    elif in_a_row == 3:
        found = "in each of the last 3 steps that had any"
    elif constant[-1] and sum(constant) == 1 and not math.isnan(constant_group_ratios[-1]):
        found = "in this step"
    else:
        return None
    return (
        f"no signal: 100 % of the groups had equal rewards {found}, so nothing is learned; look at the responses in "
        "samples/ and rollouts/ and at the reward function, or use prompts solved only sometimes"
    )


def update_metrics(
    metrics: Metrics, mask: Tensor, *, terms: Mapping[str, Tensor], stats: Mapping[str, Tensor], num_updates: int,
    role: Literal["actor", "critic"] = "actor",
) -> None:  # fmt: skip
    """Adds ROLE/NAME of a micro-batch: losses summed over micro-batches and ranks, other numbers as token means.

    `terms` are this micro-batch's shares of a mini-batch's losses (scalars), averaged over the step's `num_updates`
    optimizer steps; `stats` are (b, t), averaged over the True places of `mask` (b, t).
    """
    for name, share in terms.items():
        metrics.add_sum(f"{role}/{name}", share.detach() / num_updates)
    for name, values in stats.items():
        metrics.add_mean(f"{role}/{name}", torch.where(mask, values.detach(), 0.0).sum(), mask.sum())


def mismatch_metrics(log_probs: Tensor, batch: Batch, metrics: Metrics) -> None:
    """Adds training/rollout_probs_diff_* and training/rollout_log_probs_diff/* of a micro-batch's response tokens.

    `log_probs` (b, T) are of the pass before the update or, where there is none, of the update's own forward over the
    first mini-batch: those of the policy that generated. What an older one sampled is left out. A token that is not
    finite on either side is counted, not compared. Adds nothing when the engine reported no log-probs.
    """
    if batch.rollout_log_probs is None or log_probs.numel() == 0:
        return
    trainer, engine = log_probs.detach().double(), batch.rollout_log_probs.double()  # (b, T)
    finite = torch.isfinite(trainer) & torch.isfinite(engine)
    used = batch.response_mask & finite & ~batch.stale
    trainer, engine = torch.where(used, trainer, 0.0), torch.where(used, engine, 0.0)
    log_diff, diff = (trainer - engine).abs(), (trainer.exp() - engine.exp()).abs()  # 0 where not used
    count = used.sum()
    metrics.add_mean("training/rollout_log_probs_diff/mean", log_diff.sum(), count)
    metrics.add_max("training/rollout_log_probs_diff/max", log_diff.max(), count)
    metrics.add_mean("training/rollout_probs_diff_mean", diff.sum(), count)
    metrics.add_max("training/rollout_probs_diff_max", diff.max(), count)
    metrics.add_std("training/rollout_probs_diff_std", diff.sum(), diff.square().sum(), count=count)
    metrics.add_max("training/rollout_probs_diff_valid", count > 0)
    metrics.add_sum("training/rollout_log_probs_nonfinite", (batch.response_mask & ~finite).sum())


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, world: World) -> float:
    """1 - Var(returns - values) / Var(returns) over the True places of all ranks' masks; NaN if returns do not vary.

    All (B, T). 1: the values are the returns up to a constant; 0: a constant would do as well. Executed by all ranks
    together.
    """
    returns = torch.where(mask, returns, 0).double()
    terms = torch.stack([returns - torch.where(mask, values, 0).double(), returns])  # (2, B, T)
    sums = world.sum(torch.stack([*(masked_sum(term, mask) for term in terms), mask.sum().double()]))  # (3,)
    means = sums[:2] / sums[2].clamp(min=1)  # (2,)
    centred = terms - means[:, None, None]
    errors, spread = world.sum(torch.stack([masked_sum(term.square(), mask) for term in centred])).tolist()
    return 1 - errors / spread if spread > 0 else math.nan
