"""How per-token losses become one scalar whose gradient does not depend on micro-batches or ranks.

`aggregate` sums over a micro-batch; `loss_denominator` counts over all ranks and all micro-batches of the mini-batch.
So the sum of `aggregate(...) / denominator` over micro-batches and ranks is the loss of the mini-batch, however it was
split.
"""

from typing import Literal

from torch import Tensor

from lib.dist import World
from lib.ops import masked_mean, masked_sum
from lib.types import Batch

LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
"""token-mean: every token counts the same (DAPO). token-sum: no denominator, so that the gradient grows with the
mini-batch. seq-mean-token-sum: sum within a response, mean over responses.
seq-mean-token-mean: mean within, mean over (the GRPO paper). seq-mean-token-sum-norm: sum within over a constant,
--rollout.max-response-len unless --loss-scale-factor says another, mean over responses (Dr. GRPO)."""


def aggregate(token_loss: Tensor, response_mask: Tensor, mode: LossAggMode) -> Tensor:
    """The micro-batch's share of the numerator, a scalar; divide it by `loss_denominator` of the whole mini-batch.

    token_loss and response_mask are (b, t). A response without a True in its mask contributes exactly 0.
    """
    if mode == "seq-mean-token-mean":
        return masked_mean(token_loss, response_mask, dim=-1).sum()
    return masked_sum(token_loss, response_mask)


def loss_denominator(mini_batch: Batch, mode: LossAggMode, world: World, *, scale: float) -> float:
    """The denominator of the mini-batch's loss over all ranks: tokens or responses that take part, at least 1.

    For token-sum it is 1.

    A response without a True in its mask (it has no score) leaves the count of responses. `scale` is the constant of
    seq-mean-token-sum-norm, in tokens. Executed by all ranks together.
    """
    if mode == "token-sum":
        return 1.0
    mask = mini_batch.response_mask
    count = max(1, int(world.sum(mask.sum() if mode == "token-mean" else mask.any(-1).sum())))
    return float(count * scale if mode == "seq-mean-token-sum-norm" else count)
