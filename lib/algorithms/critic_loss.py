"""The critic's loss per token, and how much of the returns its values explain."""

import math

import torch
from torch import Tensor

from lib.dist import World
from lib.ops import masked_sum
from lib.types import Batch


def value_loss(values: Tensor, batch: Batch, *, clip: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error to batch.returns (b, t), and what is averaged as vf_clipfrac and vpred_mean, (b, t) and
    detached.

    The larger of the error of the new values (b, t) and of those moved at most `clip` away from batch.values, the
    values before the update: so a value gains nothing from going further. 0 and without gradient outside
    response_mask. The critic's counterpart of PPO's clipped loss (openai/baselines, ppo2).
    """
    assert batch.values is not None and batch.returns is not None, "values and returns are computed before the update"
    new, old, returns = (torch.where(batch.response_mask, it, 0) for it in (values, batch.values, batch.returns))
    free = (new - returns).square()
    clipped = (new.clamp(old - clip, old + clip) - returns).square()
    metrics = {"vf_clipfrac": (clipped > free).float(), "vpred_mean": new.detach()}
    return 0.5 * torch.maximum(free, clipped), metrics


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
