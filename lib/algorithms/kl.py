"""Per-token estimates of KL(policy || reference) from the log-probs of sampled tokens.

With x drawn from the policy and d = log policy(x) - log reference(x), k1 and k3 are unbiased estimates of the KL's
value (J. Schulman, "Approximating KL Divergence", 2020). As losses they differ: the gradient of k2 is an unbiased
estimate of the KL's gradient, that of k1 is zero in expectation. In the reward only their values count.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lib.algorithms.shaping import token_rewards
from lib.algorithms.step_rows import StepRows, ordered_sum
from lib.dist import World
from lib.errors import check_fields
from lib.tracking.metrics import Metrics
from lib.types import Batch

Estimator = Callable[[Tensor, Tensor], Tensor]

MAX_EXPONENT = 20.0  # e^20 is still finite in any dtype that log-probs come in
MAX_K3 = 10.0


def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """d, per token; unbiased, may be negative."""
    return log_probs - ref_log_probs


def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """|d|, per token."""
    return (log_probs - ref_log_probs).abs()


def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """d^2 / 2, per token."""
    return 0.5 * (log_probs - ref_log_probs).square()


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """e^-d - 1 + d, per token: unbiased, never negative, clamped to at most 10.

    By expm1: the difference of e^-d and 1 - d keeps no digits where d is small, not even the sign.
    """
    negative = (ref_log_probs - log_probs).clamp(-MAX_EXPONENT, MAX_EXPONENT)
    return (negative.expm1() - negative).clamp(0, MAX_K3)


def straight_through(estimator: Estimator) -> Estimator:
    """The estimator's value with the gradient of k2, the only one whose gradient is unbiased."""

    def estimate(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        carrier = k2(log_probs, ref_log_probs)
        return estimator(log_probs, ref_log_probs).detach() + (carrier - carrier.detach())

    return estimate


KLType = Literal["k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k1+", "kl+", "abs+", "k3+", "low_var_kl+"]
"""The estimators by name; kl, mse and low_var_kl are verl's names of k1, k2 and k3. With a + the value is that
estimator's and the gradient is that of k2."""

KL_ESTIMATORS: dict[str, Estimator] = {
    "k1": k1,
    "kl": k1,
    "abs": absolute,
    "k2": k2,
    "mse": k2,
    "k3": k3,
    "low_var_kl": k3,
}
KL_ESTIMATORS |= {f"{name}+": straight_through(KL_ESTIMATORS[name]) for name in ("k1", "kl", "abs", "k3", "low_var_kl")}


def kl_to_reference(log_probs: Tensor, batch: Batch, *, kl_type: KLType) -> Tensor:
    """The chosen estimate per response token, (b, t), 0 outside response_mask whatever stands there."""
    assert batch.ref_log_probs is not None, "the reference's log-probs are computed before the update"
    ours = torch.where(batch.response_mask, log_probs, 0)
    theirs = torch.where(batch.response_mask, batch.ref_log_probs, 0)
    return KL_ESTIMATORS[kl_type](ours, theirs)


@dataclass(frozen=True, kw_only=True)
class KLRewardConfig:
    """A penalty on the reward of every token for leaving the frozen initial policy (arXiv:1909.08593, section 2)."""

    coef: float = 0.0
    """Weight of the KL estimate that each token's reward loses; 0 switches it off."""
    type: KLType = "k1"
    """Estimator of that KL per token."""
    target: float | None = None
    """KL per token in nats that the weight adapts to, starting from coef; None: the weight stays."""
    horizon: int = 10000
    """Responses over which an adaptive weight moves by at most about 20 %."""

    def __post_init__(self) -> None:
        target_ok = self.target is None or 0 < self.target < math.inf
        coef_ok = 0 <= self.coef < math.inf and (self.coef > 0 or self.target is None)
        check_fields(
            self,
            "kl-reward.",
            target=(target_ok, "a finite number above 0, or None for a fixed weight"),
            coef=(coef_ok, "a finite number of 0 or more, and above 0 with a target, for it changes by factors"),
            horizon=(self.horizon >= 1, "at least 1 response"),
        )


def kl_in_words(loss_coef: float, loss_type: KLType, reward: KLRewardConfig) -> str:
    """The KL terms of a run in a line, with what is legal but may not be meant; empty without anything to say."""
    parts = []
    if loss_coef:
        no_use = ", whose gradient is 0 in expectation: it holds nothing back" if loss_type in ("k1", "kl") else ""
        parts.append(f"{loss_coef:g} x {loss_type} in the loss{no_use}")
    elif loss_type != "k3":
        parts.append(f"none in the loss: --kl-loss-type {loss_type} without --kl-loss-coef does nothing")
    if reward.coef:
        plus = ", where the + means nothing: a reward has no gradient" if reward.type.endswith("+") else ""
        adapts = (
            f", the weight adapting to {reward.target:g} nats a token within {reward.horizon} responses"
            if reward.target is not None
            else ""
        )
        parts.append(f"{reward.coef:g} x {reward.type} in the reward{plus}{adapts}")
    elif reward.type != "k1":
        parts.append(f"none in the reward: --kl-reward.type {reward.type} without --kl-reward.coef does nothing")
    if reward.target is None and reward.horizon != KLRewardConfig.horizon:
        parts.append(f"--kl-reward.horizon {reward.horizon} without --kl-reward.target does nothing")
    if loss_coef and reward.coef:
        parts.append("both hold the policy back: they add up")
    return "; ".join(parts)


class KLController:
    """The weight of the KL in the reward; with a target it follows the measured KL (arXiv:1909.08593, section 2.2)."""

    def __init__(self, cfg: KLRewardConfig) -> None:
        self.coef = cfg.coef
        self._cfg = cfg

    def penalize(self, batch: Batch, metrics: Metrics) -> Batch:
        """The batch with the KL taken off its token_level_rewards; then the weight moves. Nothing with a weight of 0.

        Adds actor/reward_kl_penalty and actor/reward_kl_penalty_coeff. Executed by all ranks together.
        """
        if self.coef == 0:
            return batch
        rewards, current_kl, count = penalized_rewards(
            batch, coef=self.coef, kl_type=self._cfg.type, world=metrics.world
        )
        metrics.set("actor/reward_kl_penalty", current_kl)
        metrics.set("actor/reward_kl_penalty_coeff", self.coef)
        self.update(current_kl, count)
        return batch.with_(token_level_rewards=rewards)

    def update(self, current_kl: float, num_responses: int) -> None:
        """Moves the weight after a step with this KL: by up to 20 % in a horizon, up when the KL is above the target.

        A step counts as one horizon at most: by verl's rule, without that bound, a large step makes the weight
        negative. A KL that is not finite changes nothing.
        """
        if self._cfg.target is None or not math.isfinite(current_kl):
            return
        error = min(max(current_kl / self._cfg.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * min(num_responses / self._cfg.horizon, 1.0)

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"coef": self.coef}

    def restore(self, state: dict[str, float]) -> None:
        """Goes on from a checkpoint's weight."""
        self.coef = float(state["coef"])


def penalized_rewards(batch: Batch, *, coef: float, kl_type: KLType, world: World) -> tuple[Tensor, float, int]:
    """Token rewards less coef x KL estimate (B, T) float32, the step's KL, and how many responses that is of.

    Starts from batch.token_level_rewards, else from the scores; needs old_log_probs and ref_log_probs. The KL is the
    mean over responses, of all ranks, of the mean over their tokens; responses without a token, or not valid, are left
    out. It is NaN without any. Executed by all ranks together.
    """
    assert batch.old_log_probs is not None, "a KL in the reward is that of the policy before the update"
    estimate = kl_to_reference(batch.old_log_probs, batch, kl_type=kl_type)  # (B, T)
    lens = batch.response_mask.sum(-1)  # (B,)
    lens, sums = StepRows(batch, world, lens, ordered_sum(estimate)).columns  # (R,), (R,)
    count = int(lens.count_nonzero())
    current_kl = float(ordered_sum(sums / lens.clamp(min=1))) / count if count else math.nan
    return token_rewards(batch) - coef * estimate, current_kl, count
