"""Advantages: how much better a response was than expected, per response token, from the scores of a step.

Computed once per step, before any update. The arithmetic is in pure functions; the dataclasses carry the knobs.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lib.dist import World
from lib.types import Batch

STD_EPSILON = 1e-6  # verl's; it cannot hide rounding in groups of equal scores, so those are handled apart


@dataclass(frozen=True, kw_only=True)
class Advantage(ABC):
    """Turns a step's scores into advantages. Subclasses carry their knobs as fields."""

    needs_group: ClassVar[bool] = False
    """Whether a response is compared with others of its prompt, so that --rollout.n must be at least 2."""

    @abstractmethod
    def __call__(self, batch: Batch, world: World) -> tuple[Tensor, Tensor]:
        """Advantages and returns of this rank's rows, both (B, T) float32 and 0 outside response_mask."""


@dataclass(frozen=True, kw_only=True)
class GroupAdvantage(Advantage):
    """A response's score relative to its group (GRPO, arXiv:2402.03300, section 4.1.2)."""

    needs_group: ClassVar[bool] = True

    norm_by_std: bool = True
    """Divide by the standard deviation of the group's scores; without it, as Dr. GRPO (arXiv:2503.20783) does."""

    def __call__(self, batch: Batch, world: World) -> tuple[Tensor, Tensor]:
        """Advantages, and the same numbers as returns: (B, T) float32, 0 outside response_mask. All ranks together.

        Every rank computes all groups from the scores of all ranks, each group in order of index, so the result is
        the same to the bit however a group is spread over ranks.
        """
        columns = (batch.uids, batch.indices, batch.scores.double(), batch.valid)
        gathered = world.gather(tuple(column.cpu() for column in columns))
        uids, indices, scores, valid = (torch.cat(parts) for parts in zip(*gathered, strict=True))  # (all rows,)
        order = indices.argsort(stable=True)
        advantages = torch.empty_like(scores)  # (all rows,)
        advantages[order] = group_advantages(scores[order], uids[order], valid[order], norm_by_std=self.norm_by_std)
        before = sum(len(of_rank[0]) for of_rank in gathered[: world.rank])
        mine = advantages[before : before + len(batch)].to(batch.response_mask.device, torch.float32)
        per_token = torch.where(batch.response_mask, mine[:, None], 0)  # (B, T)
        return per_token, per_token


def group_advantages(scores: Tensor, uids: Tensor, valid: Tensor, *, norm_by_std: bool) -> Tensor:
    """(score - mean) / (std + 1e-6) within each group of equal uid, std unbiased: (B,) in the scores' dtype.

    scores, uids and valid (B,), in any order. Rows that are not valid leave the statistics and get 0; so do all rows
    of a group with fewer than two valid rows, or with equal scores: their std is rounding noise, not a scale.
    """
    advantages = torch.zeros_like(scores)
    for uid in uids[valid].unique():
        members = (valid & (uids == uid)).nonzero().flatten()  # (n,)
        group = scores[members]  # (n,)
        if group.max() == group.min():  # also a group of one
            continue
        centred = group - group.mean()
        advantages[members] = centred / (group.std() + STD_EPSILON) if norm_by_std else centred
    return advantages


ADVANTAGES: dict[str, type[Advantage]] = {"grpo": GroupAdvantage}
"""What --advantage NAME chooses from."""
