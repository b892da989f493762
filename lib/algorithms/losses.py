"""Policy losses per token, by name. lib/algorithms/aggregation.py makes one scalar of them.

Notation of the docstrings: A is the advantage, p and p_old the sampled token's probability under the current policy and
under the one before the update, x = log p - log p_old, r = e^x the ratio, sg(.) a number without gradient. Without
batch.old_log_probs the old policy is the current one: r is exactly 1, its gradient is not 0.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lib.algorithms.aggregation import LossAggMode
from lib.algorithms.selection import select_by_covariance
from lib.dist import World
from lib.errors import UserError
from lib.ops import masked_mean
from lib.types import Batch

MAX_LOG_RATIO = 20.0  # keeps the ratio finite in float32
MAX_SEQUENCE_LOG_RATIO = 10.0  # verl's cap on the exponent of GSPO's ratio
POSITIVE = (0, math.inf)
MIN_PROB = 1e-8  # below it 1 - p is rounding noise of the log-prob, and its logarithm no measure of anything


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(ABC):
    """A loss per response token. Subclasses carry their knobs as fields and read what they need from the batch."""

    agg_mode: ClassVar[LossAggMode] = "token-mean"
    """How its numbers become one where --loss-agg-mode is not given."""
    has_ratio: ClassVar[bool] = True
    """Whether the ratio of new to old probability is in the loss, in a form that suits an older policy's tokens."""
    needs_old_log_probs: ClassVar[bool] = False
    """Whether it reads old_log_probs even before the only optimizer step of a rollout."""

    def prepare(self, mini_batch: Batch, world: World) -> Batch:
        """The mini-batch with what the loss must know of all of it, on all ranks; by default as it is.

        Called once per mini-batch, before it is cut into micro-batches. Executed by all ranks together.
        """
        return mini_batch

    @abstractmethod
    def __call__(self, log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss (b, t) and metrics by name, each (b, t) and detached; what stands outside response_mask is not used.

        log_probs (b, t) of the current policy, with gradient; batch: the micro-batch, on the same device.
        """

    def weigh(self, token_loss: Tensor, batch: Batch) -> Tensor:
        """The loss (b, t) times the importance weights of the rollout correction, where there are any."""
        if batch.is_weights is None:
            return token_loss
        return token_loss * torch.where(batch.response_mask, batch.is_weights, 1)


@dataclass(frozen=True, kw_only=True)
class ClipLoss(PolicyLoss):
    """Clipped surrogate (PPO, arXiv:1707.06347, eq. 7) with a separate upper bound and a second clip.

    The separate upper bound is DAPO's clip-higher (arXiv:2503.14476, eq. 10); the second clip bounds the loss of
    tokens with a negative advantage (dual-clip PPO, arXiv:1912.09729, eq. 5).
    """

    clip_low: float = 0.2
    """Ratios of new to old probability are clipped below at 1 - clip-low."""
    clip_high: float = 0.2
    """Ratios of new to old probability are clipped above at 1 + clip-high; works: 0.2 to 0.3."""
    clip_dual: float = 3.0
    """With a negative advantage A a token's loss is at most clip-dual x |A|."""

    def __post_init__(self) -> None:
        _check(self, clip_low=(0, 1), clip_high=POSITIVE, clip_dual=(1, math.inf))

    def __call__(self, log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss (b, t), and pg_clipfrac, pg_clipfrac_lower (the share where the second clip acts), ppo_kl."""
        log_ratio, advantages = masked_log_ratio(log_probs, batch)
        loss, clipped = _clipped_surrogate(log_ratio.exp(), advantages, self.clip_low, self.clip_high)
        bound = -advantages * self.clip_dual
        bounded = (advantages < 0) & (loss > bound)
        metrics = {
            "pg_clipfrac": clipped.float(),
            "pg_clipfrac_lower": bounded.float(),
            "ppo_kl": -log_ratio.detach(),
        }
        return torch.where(bounded, bound, loss), metrics


@dataclass(frozen=True, kw_only=True)
class GSPOLoss(PolicyLoss):
    """Clipped surrogate of a ratio per response, s = exp(mean of x): GSPO in its token form (arXiv:2507.18071, 4.3).

    Every token has its response's s, with the gradient of its own log-prob: s = exp(log p - sg(log p) + sg(mean of x)).
    The exponent is capped at 10, as in verl; x is not clamped.
    """

    agg_mode: ClassVar[LossAggMode] = "seq-mean-token-mean"

    clip_low: float = 3e-4
    """Ratios per response (geometric mean over its tokens) are clipped below at 1 - clip-low."""
    clip_high: float = 4e-4
    """Ratios per response (geometric mean over its tokens) are clipped above at 1 + clip-high."""

    def __post_init__(self) -> None:
        _check(self, clip_low=(0, 1), clip_high=POSITIVE)

    def __call__(self, log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss (b, t), and pg_clipfrac (all tokens of a clipped response count), ppo_kl."""
        log_ratio, advantages = masked_log_ratio(log_probs, batch, limit=math.inf)
        mean = masked_mean(log_ratio.detach(), batch.response_mask, dim=-1)[:, None]  # (b, 1)
        ratio = (log_ratio - log_ratio.detach() + mean).clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()  # (b, t)
        loss, clipped = _clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high)
        return loss, {"pg_clipfrac": clipped.float(), "ppo_kl": -log_ratio.detach()}


@dataclass(frozen=True, kw_only=True)
class CISPOLoss(PolicyLoss):
    """-sg(clip(r)) x A x log p: the clip bounds a token's weight and silences none (MiniMax-M1, arXiv:2506.13585)."""

    clip_low: float = 1.0
    """Weights are clipped below at 1 - clip-low; 1 or more: no lower bound."""
    clip_high: float = 0.2
    """Weights are clipped above at 1 + clip-high."""

    def __post_init__(self) -> None:
        _check(self, clip_low=POSITIVE, clip_high=POSITIVE)

    def __call__(self, log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss (b, t), and pg_clipfrac (the share whose weight was clipped), ppo_kl."""
        log_ratio, advantages = masked_log_ratio(log_probs, batch)
        ratio = log_ratio.detach().exp()
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        metrics = {"pg_clipfrac": (ratio != weight).float(), "ppo_kl": -log_ratio.detach()}
        return -weight * advantages * _masked(log_probs, batch), metrics


@dataclass(frozen=True, kw_only=True)
class SAPOLoss(PolicyLoss):
    """-A x sigmoid(tau x (r - 1)) x 4 / tau: a soft clip, of slope 1 at r = 1 (SAPO, arXiv:2511.20347)."""

    agg_mode: ClassVar[LossAggMode] = "seq-mean-token-mean"

    tau_pos: float = 1.0
    """Sharpness of the soft clip for positive advantages; higher: closer to ratio 1."""
    tau_neg: float = 1.05
    """Sharpness of the soft clip for advantages of 0 or less; higher: closer to ratio 1."""

    def __post_init__(self) -> None:
        _check(self, tau_pos=POSITIVE, tau_neg=POSITIVE)

    def __call__(self, log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss (b, t), and ppo_kl."""
        log_ratio, advantages = masked_log_ratio(log_probs, batch)
        tau = torch.full_like(advantages, self.tau_neg).masked_fill(advantages > 0, self.tau_pos)  # (b, t)
        gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau
        return -advantages * gate, {"ppo_kl": -log_ratio.detach()}


@dataclass(frozen=True, kw_only=True)
class GeoMeanLoss(PolicyLoss):
    """-(mean A) x exp(mean of the clipped x) per response: GMPO (arXiv:2507.20673).

    x is clipped per token on the side to which A pushes it: at clip-high with A > 0, at -clip-low with A < 0. Every
    token has its response's loss, so that seq-mean-token-mean averages over the responses of all ranks. A token whose
    importance weight is 0 leaves all means: in a geometric one it would silence its whole response.
    """

    agg_mode: ClassVar[LossAggMode] = "seq-mean-token-mean"

    clip_low: float = 0.4
    """With a negative advantage log-ratios are clipped below at -clip-low nats."""
    clip_high: float = 0.4
    """With a positive advantage log-ratios are clipped above at clip-high nats."""

    def __post_init__(self) -> None:
        _check(self, clip_low=POSITIVE, clip_high=POSITIVE)

    def __call__(self, log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss (b, t), and pg_clipfrac (clipped above), pg_clipfrac_lower (clipped below), ppo_kl."""
        log_ratio, advantages = masked_log_ratio(log_probs, batch)
        above = (advantages > 0) & (log_ratio > self.clip_high)
        below = (advantages < 0) & (log_ratio < -self.clip_low)
        clipped = torch.where(above, self.clip_high, torch.where(below, -self.clip_low, log_ratio))
        clipped = torch.where(advantages == 0, 0, clipped)  # such a token pushes its response nowhere
        kept = self._kept(batch)
        ratio = masked_mean(clipped, kept, dim=-1).exp()  # (b,)
        loss = -masked_mean(advantages, kept, dim=-1) * ratio  # (b,), 0 where nothing is kept
        metrics = {
            "pg_clipfrac": above.float(),
            "pg_clipfrac_lower": below.float(),
            "ppo_kl": -log_ratio.detach(),
        }
        return loss[:, None].expand_as(log_ratio), metrics

    def weigh(self, token_loss: Tensor, batch: Batch) -> Tensor:
        """The loss (b, t) times the geometric mean of its response's weights above 0, where there are any."""
        if batch.is_weights is None:
            return token_loss
        kept = self._kept(batch)
        mean = masked_mean(batch.is_weights.log(), kept, dim=-1).exp()  # (b,)
        return token_loss * torch.where(kept.any(-1), mean, 0)[:, None]

    def _kept(self, batch: Batch) -> Tensor:
        """The response tokens that take part, (b, t) bool."""
        return batch.response_mask if batch.is_weights is None else batch.response_mask & (batch.is_weights > 0)


@dataclass(frozen=True, kw_only=True)
class ClipCovLoss(PolicyLoss):
    """Clipped surrogate without the tokens that cost most entropy: Clip-Cov (arXiv:2505.22617).

    A small share of the tokens is drawn at random from those whose covariance of advantage and log-prob lies between
    two bounds, once per mini-batch over all ranks, and gets no loss unless the ratio's clip has acted already. The
    covariance takes the log-probs of the policy before the update, so that the choice stands before the first
    micro-batch and costs no pass but that of the old log-probs.
    """

    needs_old_log_probs: ClassVar[bool] = True

    clip_low: float = 0.2
    """Ratios of new to old probability are clipped below at 1 - clip-low; 1 or more: no lower bound."""
    clip_high: float = 0.2
    """Ratios of new to old probability are clipped above at 1 + clip-high."""
    clip_cov_ratio: float = 2e-4
    """Share of the mini-batch's response tokens that get no loss, above 0 and below 1; at least one token."""
    clip_cov_lb: float = 1.0
    """Tokens are drawn from those whose covariance is above this."""
    clip_cov_ub: float = 5.0
    """Tokens are drawn from those whose covariance is below this."""

    def __post_init__(self) -> None:
        _check(
            self,
            clip_low=POSITIVE,
            clip_high=POSITIVE,
            clip_cov_ratio=(0, 1),
            clip_cov_lb=(-math.inf, math.inf),
            clip_cov_ub=(self.clip_cov_lb, math.inf),
        )

    def prepare(self, mini_batch: Batch, world: World) -> Batch:
        """The mini-batch with `selected`: the tokens drawn over all ranks."""
        between = (self.clip_cov_lb, self.clip_cov_ub)
        selected = select_by_covariance(mini_batch, world, ratio=self.clip_cov_ratio, between=between)  # (b, t)
        return mini_batch.with_(selected=selected)

    def __call__(self, log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss (b, t), and pg_clipfrac, cov_frac (the share that lost its loss), ppo_kl."""
        assert batch.selected is not None, "prepare selects the tokens"
        log_ratio, advantages = masked_log_ratio(log_probs, batch)
        loss, clipped = _clipped_surrogate(log_ratio.exp(), advantages, self.clip_low, self.clip_high)
        dropped = batch.selected & ~clipped
        metrics = {"pg_clipfrac": clipped.float(), "cov_frac": dropped.float(), "ppo_kl": -log_ratio.detach()}
        return torch.where(dropped, 0, loss), metrics


@dataclass(frozen=True, kw_only=True)
class KLCovLoss(PolicyLoss):
    """-A x r, plus a penalty ppo-kl-coef x |x| on the tokens that cost most entropy: KL-Cov (arXiv:2505.22617).

    Those are the tokens of highest covariance of advantage and log-prob, chosen once per mini-batch over all ranks. The
    covariance takes the log-probs of the policy before the update, so that the choice stands before the first
    micro-batch and costs no pass but that of the old log-probs.
    """

    needs_old_log_probs: ClassVar[bool] = True

    kl_cov_ratio: float = 2e-4
    """Share of the mini-batch's response tokens that are penalised, above 0 and below 1; at least one token."""
    ppo_kl_coef: float = 0.1
    """Weight of the penalty, the absolute log-ratio in nats, on those tokens."""

    def __post_init__(self) -> None:
        _check(self, kl_cov_ratio=(0, 1), ppo_kl_coef=POSITIVE)

    def prepare(self, mini_batch: Batch, world: World) -> Batch:
        """The mini-batch with `selected`: the tokens of highest covariance over all ranks."""
        return mini_batch.with_(selected=select_by_covariance(mini_batch, world, ratio=self.kl_cov_ratio))

    def __call__(self, log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss (b, t), and cov_frac (the share that is penalised), ppo_kl, ppo_kl_abs (mean of |x|)."""
        assert batch.selected is not None, "prepare selects the tokens"
        log_ratio, advantages = masked_log_ratio(log_probs, batch)
        distance = log_ratio.abs()
        loss = -advantages * log_ratio.exp() + torch.where(batch.selected, self.ppo_kl_coef * distance, 0)
        metrics = {
            "cov_frac": batch.selected.float(),
            "ppo_kl": -log_ratio.detach(),
            "ppo_kl_abs": distance.detach(),
        }
        return loss, metrics


@dataclass(frozen=True, kw_only=True)
class GPGLoss(PolicyLoss):
    """-A x log p: the plain policy gradient, without a ratio (GPG, arXiv:2504.02546)."""

    has_ratio: ClassVar[bool] = False

    def __call__(self, log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss (b, t), and ppo_kl."""
        log_ratio, advantages = masked_log_ratio(log_probs, batch)
        return -advantages * _masked(log_probs, batch), {"ppo_kl": -log_ratio.detach()}


@dataclass(frozen=True, kw_only=True)
class DPPOLoss(PolicyLoss):
    """-sg(min(r, max-ratio)) x A x log p inside a trust region of probabilities (DPPO, arXiv:2602.04879).

    A token whose probability has gone where its advantage pushes it (up with A > 0, down with A < 0), and farther than
    the bound, gets no loss. What is measured on the way is the divergence of two Bernoulli distributions, of the
    sampled token against all others; subclasses say which divergence.
    """

    clip_low: float
    clip_high: float
    max_ratio: float = 20.0
    """Ratios of new to old probability are truncated above at this."""

    def __post_init__(self) -> None:
        _check(self, clip_low=POSITIVE, clip_high=POSITIVE, max_ratio=(1, math.inf))

    @abstractmethod
    def divergence(self, log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
        """How far a token is from the old policy: (b, t), 0 or more, from detached log-probs without masked places."""

    def __call__(self, log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss (b, t), and pg_clipfrac (outside the trust region), pg_clipfrac_lower (ratio truncated), ppo_kl."""
        log_ratio, advantages = masked_log_ratio(log_probs, batch)
        log_probs, moved = _masked(log_probs, batch), log_ratio.detach()
        divergence = self.divergence(log_probs.detach(), _masked(_old_log_probs(log_probs, batch), batch))
        too_high = (advantages > 0) & (moved > 0) & (divergence > self.clip_high)
        too_low = (advantages < 0) & (moved < 0) & (divergence > self.clip_low)
        outside = too_high | too_low
        ratio = moved.exp()
        metrics = {
            "pg_clipfrac": outside.float(),
            "pg_clipfrac_lower": (~outside & (ratio > self.max_ratio)).float(),
            "ppo_kl": -moved,
        }
        weight = torch.where(outside, 0, ratio.clamp(max=self.max_ratio))
        return -weight * advantages * log_probs, metrics


@dataclass(frozen=True, kw_only=True)
class DPPOTVLoss(DPPOLoss):
    """DPPO with the total variation |p - p_old| as the divergence."""

    clip_low: float = 0.15
    """A token with a negative advantage may lose this much probability (0 to 1) before its loss is 0."""
    clip_high: float = 0.15
    """A token with a positive advantage may gain this much probability (0 to 1) before its loss is 0."""

    def divergence(self, log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
        """|p - p_old|, (b, t)."""
        return (log_probs.exp() - old_log_probs.exp()).abs()


@dataclass(frozen=True, kw_only=True)
class DPPOKLLoss(DPPOLoss):
    """DPPO with the KL from the old to the new Bernoulli distribution as the divergence."""

    clip_low: float = 0.05
    """A token with a negative advantage may move by this much KL (nats) downwards before its loss is 0."""
    clip_high: float = 0.05
    """A token with a positive advantage may move by this much KL (nats) upwards before its loss is 0."""

    def divergence(self, log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
        """p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)), (b, t)."""
        others, old_others = (-torch.expm1(x).clamp(max=-MIN_PROB) for x in (log_probs, old_log_probs))
        return old_log_probs.exp() * (old_log_probs - log_probs) + old_others * (old_others / others).log()


@dataclass(frozen=True, kw_only=True)
class DROLoss(PolicyLoss):
    """-(A x log p - dro-beta / 2 x x^2): a quadratic penalty in place of a clip (DRO, arXiv:2405.19107), per token.

    x is not clamped: the penalty goes on pulling back a token that is far away. Up to a constant it is the paper's
    regression (A - dro-beta x x)^2 / (2 dro-beta), with the old policy in the reference's place. Its minimum in x does
    not depend on who sampled, so tokens of an older policy need no weight, only that policy's log-probs as old ones.
    """

    dro_beta: float = 0.1
    """Weight of the penalty, above 0: it balances the advantage A at a log-ratio of A / dro-beta nats."""

    def __post_init__(self) -> None:
        _check(self, dro_beta=POSITIVE)

    def __call__(self, log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss (b, t), and ppo_kl."""
        log_ratio, advantages = masked_log_ratio(log_probs, batch, limit=math.inf)
        loss = -advantages * _masked(log_probs, batch) + self.dro_beta / 2 * log_ratio.square()
        return loss, {"ppo_kl": -log_ratio.detach()}


LOSSES: dict[str, type[PolicyLoss]] = {
    "vanilla": ClipLoss,
    "gspo": GSPOLoss,
    "cispo": CISPOLoss,
    "sapo": SAPOLoss,
    "geo_mean": GeoMeanLoss,
    "clip_cov": ClipCovLoss,
    "kl_cov": KLCovLoss,
    "gpg": GPGLoss,
    "dppo_tv": DPPOTVLoss,
    "dppo_kl": DPPOKLLoss,
    "dro": DROLoss,
}
"""What --loss NAME chooses from."""


def masked_log_ratio(log_probs: Tensor, batch: Batch, *, limit: float = MAX_LOG_RATIO) -> tuple[Tensor, Tensor]:
    """log(new / old probability) clamped to +-limit, and the advantages, both (b, t) and 0 outside response_mask.

    Masked before any arithmetic: an infinite or undefined number outside the mask would reach the gradient as 0 * inf.
    """
    assert batch.advantages is not None, "advantages are computed before the update"
    log_ratio = _masked(log_probs - _old_log_probs(log_probs, batch), batch)
    return log_ratio.clamp(-limit, limit), _masked(batch.advantages, batch)


def _old_log_probs(log_probs: Tensor, batch: Batch) -> Tensor:
    return log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs


def _masked(values: Tensor, batch: Batch) -> Tensor:
    """The values (b, t), 0 outside response_mask."""
    return torch.where(batch.response_mask, values, 0)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), and whether the clip acts: (b, t) and (b, t) bool."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def _check(loss: PolicyLoss, **bounds: tuple[float, float]) -> None:
    """Raises UserError when a field does not lie strictly between its bounds."""
    for name, (low, high) in bounds.items():
        value, flag = getattr(loss, name), f"--loss.{name.replace('_', '-')}"
        if not low < value < high:  # also refuses NaN
            above = f" above {low}" if math.isfinite(low) else ""
            rule = f"a number{above} and below {high}" if math.isfinite(high) else f"a finite number{above}"
            raise UserError(f"{flag} is out of range; the policy loss; found {value}, expected {rule}; choose one")


# ---- The critic ----


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
