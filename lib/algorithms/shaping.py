"""From one score per response to a reward per token: placement, length shaping, and what advantages read of both.

`Batch.scores` stay what the reward function said, for metrics and for choosing groups. What training rewards beside
the score (length here, the KL in lib/algorithms/kl.py) goes into `Batch.token_level_rewards`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lib.algorithms.step_rows import ordered_sum
from lib.errors import check_fields
from lib.types import Batch


@dataclass(frozen=True, kw_only=True)
class OverlongConfig:
    """What happens to responses that come near, or reach, the length limit (DAPO, arXiv:2503.14476, section 3.4)."""

    buffer_len: int = 0
    """Last tokens before --rollout.max-response-len in which a response is penalised; 0 switches it off."""
    factor: float = 1.0
    """Penalty at the full response length, in units of score; it grows over the buffer from 0."""
    mask_truncated: bool = False
    """Leave responses that were cut off at the limit out of the loss, the group statistics and the denominators."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            "overlong.",
            buffer_len=(self.buffer_len >= 0, "0 or more tokens"),
            factor=(0 <= self.factor < math.inf, "a finite number of 0 or more"),
        )


def shape_rewards(batch: Batch, cfg: OverlongConfig, *, max_response_len: int) -> Batch:
    """The batch with shaped token_level_rewards, or without its truncated responses, as the config says."""
    if cfg.mask_truncated:
        batch = mask_truncated(batch)
    if cfg.buffer_len == 0:
        return batch  # its rewards are the scores
    penalty = overlong_penalty(
        batch.response_lens, max_response_len, buffer_len=cfg.buffer_len, factor=cfg.factor
    )  # (B,)
    return batch.with_(token_level_rewards=make_token_level_rewards(batch, penalty=penalty))


def make_token_level_rewards(batch: Batch, *, penalty: Tensor | None = None) -> Tensor:
    """The score, less the penalty (B,), on the last True of response_mask, and turns' rewards: (B, T) float32."""
    scores = batch.scores if penalty is None else batch.scores - penalty
    left = batch.response_mask.flip(-1).cumsum(-1).flip(-1)  # (B, T), how many tokens from here on
    rewards = torch.where(batch.response_mask & (left == 1), scores[:, None].float(), 0)
    return rewards if batch.turn_rewards is None else rewards + batch.turn_rewards.where(batch.response_mask, 0)


def token_rewards(batch: Batch) -> Tensor:
    """The reward of every token, (B, T): batch.token_level_rewards where they exist, else made of the scores.

    0 outside response_mask, whatever stands there.
    """
    if batch.token_level_rewards is None:
        return make_token_level_rewards(batch)
    return torch.where(batch.response_mask, batch.token_level_rewards, 0)


def response_rewards(batch: Batch) -> Tensor:
    """The reward of every response, (B,) float64: the sum over its tokens. One without any token has its score."""
    if batch.token_level_rewards is None and batch.turn_rewards is None:
        return batch.scores.double()
    return torch.where(batch.response_mask.any(-1), ordered_sum(token_rewards(batch)), batch.scores.double())


def overlong_penalty(response_lens: Tensor, max_response_len: int, *, buffer_len: int, factor: float) -> Tensor:
    """The penalty of each response, (B,) float32: 0 up to max_response_len - buffer_len tokens, then linear to factor.

    To be subtracted from the score (DAPO, arXiv:2503.14476, eq. 13). response_lens (B,) counts all tokens after the
    prompt; a buffer_len of 0 means no penalty.
    """
    assert 0 <= buffer_len <= max_response_len, f"a buffer of {buffer_len} tokens of {max_response_len}"
    if buffer_len == 0:
        return torch.zeros(len(response_lens), device=response_lens.device)
    return ((response_lens - (max_response_len - buffer_len)).clamp(min=0) / buffer_len * factor).float()


def mask_truncated(batch: Batch) -> Batch:
    """A copy in which responses that the length limit cut off are excluded: no token in the mask, not valid."""
    return batch.with_(
        response_mask=batch.response_mask & ~batch.truncated[:, None], valid=batch.valid & ~batch.truncated
    )
