"""Policy losses per token, and how they become one scalar whose gradient does not depend on micro-batches or ranks.

A loss returns numbers per token; `aggregate` sums them over a micro-batch; `loss_denominator` counts over all ranks and
all micro-batches of the mini-batch. So the sum of `aggregate(...) / denominator` over micro-batches and ranks is the
loss of the mini-batch, however it was split.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lib.dist import World
from lib.errors import UserError
from lib.ops import masked_mean, masked_sum
from lib.types import Batch

MAX_LOG_RATIO = 20.0  # keeps the ratio finite in float32

LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
"""token-mean: every token counts the same (DAPO). seq-mean-token-sum: sum within a response, mean over responses.
seq-mean-token-mean: mean within, mean over (the GRPO paper). seq-mean-token-sum-norm: sum within over the constant
--rollout.max-response-len, mean over responses (Dr. GRPO)."""


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(ABC):
    """A loss per response token. Subclasses carry their knobs as fields and read what they need from the batch."""

    @abstractmethod
    def __call__(self, log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss (b, t) and metrics by name, each (b, t) and detached; what stands outside response_mask is not used.

        log_probs (b, t) of the current policy, with gradient; batch: the micro-batch, on the same device.
        """


@dataclass(frozen=True, kw_only=True)
class ClipLoss(PolicyLoss):
    """Clipped surrogate (PPO, arXiv:1707.06347, eq. 7) with a separate upper bound and a second clip.

    The separate upper bound is DAPO's clip-higher (arXiv:2503.14476, eq. 10); the second clip bounds the loss of
    tokens with a negative advantage (dual-clip PPO, arXiv:1912.09729, eq. 5).
    """

    clip_low: float = 0.2
    """Ratios of new to old probability are clipped below at 1 - clip-low."""
    clip_high: float = 0.2
    """Ratios of new to old probability are clipped above at 1 + clip-high."""
    clip_dual: float = 3.0
    """With a negative advantage A a token's loss is at most clip-dual x |A|."""

    def __post_init__(self) -> None:
        _check_between("--loss.clip-low", self.clip_low, 0, 1)
        _check_between("--loss.clip-high", self.clip_high, 0, math.inf)
        _check_between("--loss.clip-dual", self.clip_dual, 1, math.inf)

    def __call__(self, log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss (b, t), and pg_clipfrac, pg_clipfrac_lower (the share where the second clip acts), ppo_kl.

        Without batch.old_log_probs the old policy is the current one: the ratio is exactly 1, its gradient is not 0.
        """
        log_ratio, advantages = masked_log_ratio(log_probs, batch)
        ratio = log_ratio.exp()
        unclipped = -advantages * ratio
        clipped = -advantages * ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = torch.maximum(unclipped, clipped)
        bound = -advantages * self.clip_dual
        bounded = (advantages < 0) & (loss > bound)
        metrics = {
            "pg_clipfrac": (clipped > unclipped).float(),
            "pg_clipfrac_lower": bounded.float(),
            "ppo_kl": -log_ratio.detach(),
        }
        return torch.where(bounded, bound, loss), metrics


LOSSES: dict[str, type[PolicyLoss]] = {"vanilla": ClipLoss}
"""What --loss NAME chooses from."""


def masked_log_ratio(log_probs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """log(new / old probability) clamped to +-20, and the advantages, both (b, t) and 0 outside response_mask.

    Masked before any arithmetic: an infinite or undefined number outside the mask would reach the gradient as 0 * inf.
    """
    assert batch.advantages is not None, "advantages are computed before the update"
    old_log_probs = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
    log_ratio = torch.where(batch.response_mask, log_probs - old_log_probs, 0)
    advantages = torch.where(batch.response_mask, batch.advantages, 0)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), advantages


def aggregate(token_loss: Tensor, response_mask: Tensor, mode: LossAggMode) -> Tensor:
    """The micro-batch's share of the numerator, a scalar; divide it by `loss_denominator` of the whole mini-batch.

    token_loss and response_mask are (b, t). A response without a True in its mask contributes exactly 0.
    """
    if mode == "seq-mean-token-mean":
        return masked_mean(token_loss, response_mask, dim=-1).sum()
    return masked_sum(token_loss, response_mask)


def loss_denominator(mini_batch: Batch, mode: LossAggMode, world: World, *, max_response_len: int) -> float:
    """The denominator of the mini-batch's loss over all ranks: tokens or responses that take part, at least 1.

    A response without a True in its mask (it has no score) leaves the count of responses. max_response_len is the
    constant of seq-mean-token-sum-norm. Executed by all ranks together.
    """
    mask = mini_batch.response_mask
    count = max(1, int(world.sum(mask.sum() if mode == "token-mean" else mask.any(-1).sum())))
    return float(count * max_response_len if mode == "seq-mean-token-sum-norm" else count)


def _check_between(flag: str, value: float, low: float, high: float) -> None:
    if not low < value < high:  # also refuses NaN
        rule = f"a finite number above {low}" if high == math.inf else f"a number above {low} and below {high}"
        raise UserError(f"{flag} is out of range; the policy loss; found {value}, expected {rule}; choose one")
