"""Advantages: how much better a response, or a token, was than expected, from the rewards of a step.

Computed once per step, before any update. Statistics are over all ranks, in float64 and in an order that no rank
decides (step_rows.py), so an advantage is the same to the bit however the rows are spread. Rows that are not valid
leave all statistics.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lib.algorithms.shaping import response_rewards, token_rewards
from lib.algorithms.step_rows import Groups, StepRows, ordered_sum
from lib.dist import World
from lib.errors import check_fields
from lib.types import Batch

STD_EPSILON = 1e-6  # verl's; it cannot hide rounding in groups of equal scores, so those are handled apart
VARIANCE_EPSILON = 1e-8  # verl's, of whitening
WEIGHT_EPSILON = 1e-8  # verl's, of the optimal token baseline


@dataclass(frozen=True, kw_only=True)
class Advantage(ABC):
    """Turns a step's rewards into advantages. Subclasses carry their knobs as fields and declare what they read."""

    needs_group: ClassVar[bool] = False
    """Whether a response is compared with others of its prompt, so that --rollout.n must be at least 2."""
    needs_greedy: ClassVar[bool] = False
    """Whether batch.greedy_scores must be there: a greedy response to every prompt."""
    needs_logit_grad_squared: ClassVar[bool] = False
    """Whether batch.logit_grad_squared must be there, of the pass for old log-probs, whatever the number of updates."""
    needs_critic: ClassVar[bool] = False
    """Whether batch.values must be there."""
    reward_keys: ClassVar[tuple[str, ...]] = ()
    """What batch.named_rewards must hold, in this order, of what the reward function returns."""

    @abstractmethod
    def __call__(self, batch: Batch, world: World) -> tuple[Tensor, Tensor]:
        """Advantages and returns of this rank's rows, both (B, T) float32 and 0 outside response_mask.

        Executed by all ranks together.
        """


# ---- One number per response, compared with the other responses to the prompt ----


@dataclass(frozen=True, kw_only=True)
class ResponseAdvantage(Advantage):
    """An advantage that all tokens of a response share. A response that is alone in its group gets 0.

    verl gives such a response its whole score; but nothing is known of what was to be expected of it.
    """

    needs_group: ClassVar[bool] = True

    @abstractmethod
    def of_responses(self, rows: StepRows, rewards: Tensor, lens: Tensor) -> Tensor:
        """The advantage of each of the step's valid responses, (R,), from their rewards and lengths, both (R,).

        rewards are float64, lens count the True of response_mask and are float64 too.
        """

    def __call__(self, batch: Batch, world: World) -> tuple[Tensor, Tensor]:
        """Advantages, and the same numbers as returns: (B, T) float32, 0 outside response_mask. All ranks together."""
        rows = StepRows(batch, world, response_rewards(batch), batch.response_mask.sum(-1).double())
        advantages = _on_tokens(batch, rows.local(self.of_responses(rows, *rows.columns))[:, None])  # (B, T)
        return advantages, advantages


@dataclass(frozen=True, kw_only=True)
class GroupAdvantage(ResponseAdvantage):
    """A response's reward relative to its group (GRPO, arXiv:2402.03300, section 4.1.2)."""

    norm_by_std: bool = True
    """Divide by the standard deviation of the group's rewards; without it, as Dr. GRPO (arXiv:2503.20783) does."""

    def of_responses(self, rows: StepRows, rewards: Tensor, lens: Tensor) -> Tensor:
        """(reward - mean) / (std + 1e-6) of the group, std unbiased; exactly 0 in a group of equal rewards."""
        centred = _centred(rows, rewards)
        return centred / _std(rows, centred) if self.norm_by_std else centred


@dataclass(frozen=True, kw_only=True)
class DrGRPOAdvantage(GroupAdvantage):
    """A response's reward less its group's mean (Dr. GRPO, arXiv:2503.20783); --loss-agg-mode seq-mean-token-sum-norm.

    The name for grpo with another default.
    """

    norm_by_std: bool = False
    """Divide by the standard deviation of the group's rewards, which makes it GRPO's."""


@dataclass(frozen=True, kw_only=True)
class GDPOAdvantage(GroupAdvantage):
    """Several rewards, each relative to its group, then summed and whitened over all tokens (GDPO, arXiv:2601.05242).

    Where rewards are summed first, (1, 0) and (0, 1) become one; a reward of small spread is drowned by the others.
    """

    reward_keys: tuple[str, ...] = ("score",)
    """What is learned from: numbers that the reward function returns. `score` is shaped and bears the KL penalty."""
    reward_weights: tuple[float, ...] = ()
    """The weight of each of them; none: 1 each."""

    def __post_init__(self) -> None:
        num_keys, weights = len(set(self.reward_keys) - {""}), self.reward_weights
        check_fields(
            self,
            "advantage.",
            reward_keys=(num_keys == len(self.reward_keys) > 0, "at least one name, and none twice"),
            reward_weights=(
                not weights or (len(weights) == num_keys and 0 < sum(map(abs, weights)) < 1e9),
                f"{num_keys} numbers below 1e9, not all 0, one for each of --advantage.reward-keys, or none",
            ),
        )

    def __call__(self, batch: Batch, world: World) -> tuple[Tensor, Tensor]:
        """Advantages, and the same numbers as returns: (B, T) float32, 0 outside response_mask. All ranks together."""
        assert batch.named_rewards is not None, "named rewards are read before the advantages"
        named = dict(zip(self.reward_keys, batch.named_rewards.double().T, strict=True))  # (B,) each
        if "score" in named:
            named["score"] = response_rewards(batch)
        rows = StepRows(batch, world, *named.values())
        weights = self.reward_weights or (1.0,) * len(named)
        relative = [
            w * self.of_responses(rows, rewards, rewards) for w, rewards in zip(weights, rows.columns, strict=True)
        ]
        summed = rows.local(torch.stack(relative).sum(0))  # (B,)
        advantages = whiten(summed[:, None].expand(batch.response_mask.shape), batch, world)
        return advantages, advantages


@dataclass(frozen=True, kw_only=True)
class PassKAdvantage(ResponseAdvantage):
    """The best response of a group gets its lead over the second best, the others 0 (arXiv:2503.19595)."""

    norm_by_std: bool = True
    """Divide by the standard deviation of the group's rewards."""

    def of_responses(self, rows: StepRows, rewards: Tensor, lens: Tensor) -> Tensor:
        """(best - second best) / (std + 1e-6) for the best response of a group, the first of equals (which get 0)."""
        best_first = rewards.argsort(descending=True, stable=True)
        best_first = best_first[rows.groups.ids[best_first].argsort(stable=True)]  # (R,), one group after the other
        sizes = rows.groups.ids.bincount(minlength=rows.groups.num_groups)  # (groups,)
        starts = (sizes.cumsum(0) - sizes)[sizes > 1]  # where in best_first a group with a second response begins
        best, second = best_first[starts], best_first[starts + 1]
        advantages = torch.zeros_like(rewards)
        advantages[best] = rewards[best] - rewards[second]
        return advantages / _std(rows, _centred(rows, rewards)) if self.norm_by_std else advantages


@dataclass(frozen=True, kw_only=True)
class RLOOAdvantage(ResponseAdvantage):
    """A response's reward less the mean reward of the others of its group (RLOO, arXiv:2402.14740)."""

    def of_responses(self, rows: StepRows, rewards: Tensor, lens: Tensor) -> Tensor:
        """n / (n - 1) x (reward - mean of the group): the same as leaving the response out of the mean."""
        count = rows.groups.sizes()
        return _centred(rows, rewards) * count / (count - 1).clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class OPOAdvantage(ResponseAdvantage):
    """A response's reward less the length-weighted mean of its group (OPO, arXiv:2505.23585).

    The paper trains strictly on-policy, one optimizer step a rollout, without KL and entropy terms.
    """

    def of_responses(self, rows: StepRows, rewards: Tensor, lens: Tensor) -> Tensor:
        """reward - sum(length x reward) / sum(length), sums over the group."""
        return rows.groups.centred(rewards, lens)


@dataclass(frozen=True, kw_only=True)
class GPGAdvantage(ResponseAdvantage):
    """A response's reward less its group's mean, scaled up for responses without a reward (GPG, arXiv:2504.02546).

    Meant for --loss gpg. The scale is verl's: it counts rewards that are not 0, which says something only of rewards
    where failure is 0.
    """

    def of_responses(self, rows: StepRows, rewards: Tensor, lens: Tensor) -> Tensor:
        """alpha x (reward - mean), alpha the number of responses of the step over that of the rewards not 0."""
        alpha = len(rewards) / max(1, int(rewards.count_nonzero()))
        return alpha * _centred(rows, rewards)


# ---- A number per token ----


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlusAdvantage(Advantage):
    """Discounted return of each token, whitened over all tokens of the step (REINFORCE++, arXiv:2501.03262).

    Usually with a KL penalty in the reward.
    """

    gamma: float = 1.0
    """Discount per token, 0 to 1."""

    def __post_init__(self) -> None:
        check_fields(self, "advantage.", gamma=(0 <= self.gamma <= 1, "a number from 0 to 1"))

    def __call__(self, batch: Batch, world: World) -> tuple[Tensor, Tensor]:
        """Whitened returns, and the returns: (B, T) float32, 0 outside response_mask. All ranks together."""
        rewards = token_rewards(batch).double()
        returns = gae(rewards, torch.zeros_like(rewards), batch.response_mask, gamma=self.gamma, lam=1.0)  # (B, T)
        return whiten(returns, batch, world), _on_tokens(batch, returns)


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlusBaselineAdvantage(Advantage):
    """A response's reward less its group's mean, whitened over all tokens (REINFORCE++-baseline, arXiv:2501.03262).

    A response that is alone in its group enters the whitening with 0 (verl: with its reward).
    """

    needs_group: ClassVar[bool] = True

    def __call__(self, batch: Batch, world: World) -> tuple[Tensor, Tensor]:
        """Advantages, and the same numbers as returns: (B, T) float32, 0 outside response_mask. All ranks together."""
        rows = StepRows(batch, world, response_rewards(batch))
        centred = rows.local(_centred(rows, *rows.columns))  # (B,)
        advantages = whiten(centred[:, None].expand(batch.response_mask.shape), batch, world)
        return advantages, advantages


@dataclass(frozen=True, kw_only=True)
class ReMaxAdvantage(Advantage):
    """Reward still to come, less the score of a greedy response to the same prompt (ReMax, arXiv:2310.10505)."""

    needs_greedy: ClassVar[bool] = True

    def __call__(self, batch: Batch, world: World) -> tuple[Tensor, Tensor]:
        """Returns less batch.greedy_scores, and the returns: (B, T) float32, 0 outside response_mask."""
        assert batch.greedy_scores is not None, "the greedy responses are scored before the advantages"
        returns = _rewards_to_go(token_rewards(batch).double())
        return _on_tokens(batch, returns - batch.greedy_scores.double()[:, None]), _on_tokens(batch, returns)


@dataclass(frozen=True, kw_only=True)
class GAEAdvantage(Advantage):
    """Generalized advantage estimates of a critic's values (arXiv:1506.02438), whitened over all tokens: PPO's."""

    needs_critic: ClassVar[bool] = True

    gamma: float = 1.0
    """Discount per token, 0 to 1."""
    lam: float = 1.0
    """Weight of later tokens, 0 to 1: at 0 only the next value counts, at 1 only the rewards."""

    def __post_init__(self) -> None:
        rules = {name: (0 <= getattr(self, name) <= 1, "a number from 0 to 1") for name in ("gamma", "lam")}
        check_fields(self, "advantage.", **rules)

    def __call__(self, batch: Batch, world: World) -> tuple[Tensor, Tensor]:
        """Whitened estimates, and the unwhitened plus batch.values: (B, T) float32, 0 outside response_mask.

        The returns are what the critic learns. Executed by all ranks together.
        """
        assert batch.values is not None, "the critic's values are computed before the advantages"
        values = torch.where(batch.response_mask, batch.values, 0).double()  # (B, T)
        estimates = gae(
            token_rewards(batch).double(), values, batch.response_mask, gamma=self.gamma, lam=self.lam
        )  # (B, T)
        return whiten(estimates, batch, world), _on_tokens(batch, estimates + values)


@dataclass(frozen=True, kw_only=True)
class OptimalTokenBaselineAdvantage(Advantage):
    """Reward still to come, less a baseline for each position of the group that makes the gradient's variance least.

    "The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL" (Li et al.), in the form of verl's
    estimator of that name. The baseline at a position weighs the group's rewards to come by W: the sum, up to there,
    of 1 - 2 pi + sum(pi^2), the squared norm of the gradient of log pi in the logits, times the square of the
    importance weight if there is one; pi is the policy before the update, also where an older one sampled the token.
    Positions count the tokens that the policy chose, as verl's variant for tools does. A response alone at a position,
    the longest one's end, has nothing to be compared with there: baseline 0; one that is all of its group gets 0, as
    under every other group advantage. Where all rewards to come are equal the advantage is exactly 0, also where W
    vanishes.
    """

    needs_group: ClassVar[bool] = True
    needs_logit_grad_squared: ClassVar[bool] = True

    def __call__(self, batch: Batch, world: World) -> tuple[Tensor, Tensor]:
        """Advantages, and rewards to come as returns: (B, T) float32, 0 outside response_mask.

        Executed by all ranks together. All ranks hold two numbers per token of the step meanwhile.
        """
        assert batch.logit_grad_squared is not None, "norms of gradients are computed before the advantages"
        mask = batch.response_mask
        norms = batch.logit_grad_squared.double()  # (B, T)
        if batch.is_weights is not None:
            norms = norms * batch.is_weights.double().square()
        weights = torch.where(mask, norms, 0).cumsum(-1)  # (B, T)
        returns = _rewards_to_go(token_rewards(batch).double())  # (B, T)

        rows = StepRows(batch, world)
        gathered = world.gather((mask.sum(-1).cpu(), returns[mask].cpu(), weights[mask].cpu()))
        lens, *tokens = (torch.cat(parts) for parts in zip(*gathered, strict=True))  # (all rows,), (tokens,), (tokens,)
        advantages = _less_token_baseline(rows, lens, *tokens)  # (tokens,)
        start = sum(len(of_rank[1]) for of_rank in gathered[: world.rank])
        mine = torch.zeros_like(returns)  # (B, T)
        mine[mask] = advantages[start : start + int(mask.sum())].to(mine.device)
        return _on_tokens(batch, mine), _on_tokens(batch, returns)


def _less_token_baseline(rows: StepRows, lens: Tensor, returns: Tensor, weights: Tensor) -> Tensor:
    """Returns less their group's weighted mean at the same position, (tokens,) one row of all ranks after the other.

    lens (all rows,) counts each row's tokens; returns and weights are (tokens,) and come back in the same order.
    """
    places = torch.zeros(rows.num_rows, dtype=torch.int64)  # (all rows,); an excluded row has no tokens
    places[rows.order] = torch.arange(len(rows.order))
    order = places.repeat_interleave(lens).argsort(stable=True)  # (tokens,), by uid, index and position
    returns, weights, lens = returns[order], weights[order], lens[rows.order]
    width = int(lens.max()) if len(lens) else 0
    positions = torch.arange(len(order)) - (lens.cumsum(0) - lens).repeat_interleave(lens)  # (tokens,)
    cells = Groups(rows.groups.ids.repeat_interleave(lens) * width + positions, rows.groups.num_groups * width)
    compared = cells.centred(returns, weights, WEIGHT_EPSILON)
    advantages = torch.empty_like(returns)
    is_group = (rows.groups.sizes() > 1).repeat_interleave(lens)
    advantages[order] = torch.where(cells.sizes() > 1, compared, torch.where(is_group, returns, 0))
    return advantages


ADVANTAGES: dict[str, type[Advantage]] = {
    "grpo": GroupAdvantage,
    "dr_grpo": DrGRPOAdvantage,
    "gdpo": GDPOAdvantage,
    "grpo_passk": PassKAdvantage,
    "rloo": RLOOAdvantage,
    "opo": OPOAdvantage,
    "gpg": GPGAdvantage,
    "reinforce_plus_plus": ReinforcePlusPlusAdvantage,
    "reinforce_plus_plus_baseline": ReinforcePlusPlusBaselineAdvantage,
    "remax": ReMaxAdvantage,
    "gae": GAEAdvantage,
    "optimal_token_baseline": OptimalTokenBaselineAdvantage,
}
"""What --advantage NAME chooses from."""


# ---- The arithmetic ----


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> Tensor:
    """Generalized advantage estimates (arXiv:1506.02438, eq. 16), unwhitened: (B, T), 0 where the mask is False.

    All (B, T); rewards and values are 0 outside the mask, and those positions are skipped: the next token of one is
    the next True of the mask. After the last, value and reward are 0. With values of 0 and lam 1: discounted returns.
    """
    columns = (tensor.T.contiguous() for tensor in (rewards, values, mask))  # (T, B): the loop reads whole positions
    running = next_value = rewards.new_zeros(len(rewards))  # (B,)
    estimates = torch.zeros_like(rewards.T)  # (T, B)
    for estimate, reward, value, chosen in reversed(list(zip(estimates, *columns, strict=True))):
        surprise = reward + gamma * next_value - value
        running = torch.where(chosen, surprise + gamma * lam * running, running)
        next_value = torch.where(chosen, value, next_value)
        estimate.copy_(torch.where(chosen, running, 0))
    return estimates.T


def whiten(values: Tensor, batch: Batch, world: World) -> Tensor:
    """(values - mean) / sqrt(variance + 1e-8) over all tokens of all ranks: (B, T) float32, 0 outside response_mask.

    values (B, T) float64; the variance is unbiased. Executed by all ranks together.
    """
    mask = batch.response_mask
    lens = mask.sum(-1)  # (B,)
    means = ordered_sum(torch.where(mask, values, 0)) / lens.clamp(min=1)  # (B,)
    squares = ordered_sum(torch.where(mask, values - means[:, None], 0).square())  # (B,), around the row's own mean
    lens, means, squares = StepRows(batch, world, lens, means, squares).columns  # (R,) each
    count = lens.sum()
    mean = ordered_sum(lens * means) / count.clamp(min=1)
    squares = ordered_sum(squares) + ordered_sum(lens * (means - mean).square())
    variance = squares / (count - 1).clamp(min=1)
    return _on_tokens(batch, (values - mean.to(values.device)) / (variance + VARIANCE_EPSILON).sqrt().to(values.device))


def _centred(rows: StepRows, rewards: Tensor) -> Tensor:
    return rows.groups.centred(rewards, torch.ones_like(rewards))


def _std(rows: StepRows, centred: Tensor) -> Tensor:
    """(R,) the unbiased standard deviation of each row's group, plus 1e-6."""
    return (rows.groups.sum(centred.square()) / (rows.groups.sizes() - 1).clamp(min=1)).sqrt() + STD_EPSILON


def _rewards_to_go(rewards: Tensor) -> Tensor:
    """(B, T) the sum of the rewards (B, T) from each position on."""
    return rewards.flip(-1).cumsum(-1).flip(-1)


def _on_tokens(batch: Batch, values: Tensor) -> Tensor:
    """The values as (B, T) float32, 0 outside response_mask."""
    return torch.where(batch.response_mask, values.float(), 0)
