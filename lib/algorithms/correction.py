"""Rollout correction: the engine sampled with other probabilities than the trainer computes for the same tokens.

Three policies are told apart (decoupled PPO, arXiv:2110.00641): the rollout policy, as the engine reported it; the old
policy, the trainer's before the update; the current one. The ratio old / rollout of a token is 1 up to rounding while
both hold the same weights, and further away for responses of older weights. It becomes an importance weight of the
loss, or the reason to reject a token or a response. The ratio current / old stays the loss's own business.

All arithmetic is in float64, so that a bound decides alike however rows are padded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import inf, log
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lib.algorithms.losses import MAX_LOG_RATIO, GPGLoss, PolicyLoss
from lib.config.values import JsonObject
from lib.errors import UserError, check_fields
from lib.ops import masked_mean, masked_sum
from lib.tracking.metrics import Metrics
from lib.types import Batch

PREFIX = "rollout_corr/"

ISLevel = Literal["none", "token", "sequence"]
"""What has an importance weight of its own: nothing, every token, or every response (the product of its ratios)."""

RejectStatistic = Literal[
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3",
]  # fmt: skip
"""What a rejection looks at: k1, k2 or k3 of each token, or their sum, mean or maximum over the response."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Importance weights and rejection by the ratio of the trainer's to the engine's probability."""

    is_level: ISLevel = "none"
    """Importance weights: none, the ratio of every token, or the product of the ratios of a response (sequence)."""
    is_threshold: float = 2.0
    """Importance weights above this are cut down to it (TIS), at least 1."""
    icepop_low: float | None = None
    """Weights below this or above is-threshold become 0 instead (IcePop), from 0 to 1; None: weights are cut down."""
    batch_normalize: bool = False
    """Divide the weights by their mean over the step's tokens (or responses) of all ranks, so that their mean is 1."""
    reject: JsonObject = field(default_factory=dict)
    """Bounds outside which tokens or responses are left out, as JSON: '{"seq_mean_k1": [0.999, 1.001]}'."""
    bypass: bool = False
    """Take the engine's log-probs as the old ones: no pass for old log-probs, corrections follow the current policy."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """With bypass: the loss of --loss, whose ratio is the correction, or REINFORCE with importance weights."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            "correction.",
            is_threshold=(1 <= self.is_threshold < inf, "a finite number of at least 1"),
            icepop_low=(self.icepop_low is None or 0 <= self.icepop_low <= 1, "from 0 to 1"),
        )
        for name, bounds in self.reject.items():
            log_bounds(name, bounds)
        weighs, clips = self.is_level != "none", self.loss_type == "ppo_clip"
        for clash, what, why, remedy in (
            (not weighs and self.icepop_low is not None, "icepop-low", "there are no weights", "set is-level token"),
            (not weighs and self.batch_normalize, "batch-normalize", "there are no weights", "set is-level token"),
            (not self.bypass and not clips, "loss-type reinforce", "it belongs to bypass", "set bypass True"),
            (self.bypass and clips and weighs, f"is-level {self.is_level}",
             "with bypass the loss's own ratio is the correction, weights would correct twice",
             "set is-level none, or loss-type reinforce"),
            (self.bypass and self.batch_normalize, "batch-normalize",
             "with bypass the weights are known only inside an update, their mean is not", "leave one of them out"),
        ):  # fmt: skip
            if clash:
                raise UserError(f"--correction.{what} has no place here; --correction; {why}; {remedy}")

    @property
    def needs_rollout_log_probs(self) -> bool:
        """Whether there is anything to correct with."""
        return self.is_level != "none" or self.bypass or bool(self.reject)

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether the pass for old log-probs runs even before a single update.

        A mean weight, group statistics and denominators are over all rows, so they are known before the first
        micro-batch or never.
        """
        return not self.bypass and (self.batch_normalize or bool(self.reject))

    def policy_loss(self, loss: PolicyLoss) -> PolicyLoss:
        """The loss to train with: REINFORCE with loss_type reinforce, else the given one."""
        return GPGLoss() if self.loss_type == "reinforce" else loss

    def correct(self, batch: Batch, metrics: Metrics) -> Batch:
        """The step's rows with is_weights (B, T), and without what is rejected in response_mask, valid and scores.

        Comes after old_log_probs and before whatever looks at response_mask or valid: rewards per token, advantages,
        denominators. A response that loses all its tokens keeps its place and is no longer valid. Weights and
        rejections are each other's business only in batch_normalize: rejected tokens leave the mean. With bypass, the
        engine's log-probs become the old ones and `weigh` does the rest; so it does before a single update, when
        batch.old_log_probs is None. Executed by all ranks together (a collective with batch_normalize).
        """
        if batch.rollout_log_probs is None:
            return batch
        if self.bypass:
            return batch.with_(old_log_probs=batch.rollout_log_probs)
        if batch.old_log_probs is None:
            assert not self.needs_old_log_probs, "the pass for old log-probs was left out"
            return batch
        weights, kept = self._compare(batch.old_log_probs, batch, metrics)
        mask = batch.response_mask & kept  # (B, T)
        if self.batch_normalize:
            of_units, units = _per_unit(weights, mask, self.is_level)
            total, count = metrics.world.sum(torch.stack([masked_sum(of_units, units), units.sum()])).tolist()
            mean = total / count if total > 0 else 1.0  # every weight may be 0 under IcePop
            metrics.set(f"{PREFIX}rollout_is_batch_norm_factor", mean)
            weights = weights / mean
        valid = batch.valid & (mask.any(-1) | ~batch.response_mask.any(-1))  # a response without tokens loses none
        return batch.with_(
            is_weights=None if self.is_level == "none" else torch.where(mask, weights, 0).float(),
            response_mask=mask,
            valid=valid,
            scores=torch.where(valid, batch.scores, 0),
        )

    def weigh(self, log_probs: Tensor, micro_batch: Batch, metrics: Metrics) -> Batch:
        """The micro-batch with is_weights (b, t) by the current log_probs (b, t), unless `correct` made them already.

        Without old_log_probs the current policy is the old one. With bypass a rejection by the current policy changes
        from update to update, so it is a weight of 0: it moves neither group statistics nor denominators. Rows are
        whole here, so nothing depends on micro-batches. No collective.
        """
        if micro_batch.rollout_log_probs is None or (micro_batch.old_log_probs is not None and not self.bypass):
            return micro_batch
        weights, kept = self._compare(log_probs, micro_batch, metrics)
        if self.is_level == "none" and not self.reject:
            return micro_batch
        return micro_batch.with_(is_weights=torch.where(micro_batch.response_mask & kept, weights, 0).float())

    def in_words(self, *, log_probs: bool) -> str:
        """The correction of a run in a line, given whether the engine reports log-probs."""
        if not log_probs:
            return "none: the engine reports no log-probs (--rollout.log-probs False)"
        bounds = f"cut down to {self.is_threshold:g}"
        if self.icepop_low is not None:
            bounds = f"kept from {self.icepop_low:g} to {self.is_threshold:g}, else 0"
        normalized = ", mean 1" if self.batch_normalize else ""
        parts = [f"importance weights per {self.is_level}, {bounds}{normalized}"] if self.is_level != "none" else []
        parts += [f"rejection by {name} {bounds}" for name, bounds in self.reject.items()]
        if self.bypass:
            reinforce = "the loss is REINFORCE, --loss is not used"
            parts += ["the engine's log-probs as old ones", *([reinforce] if self.loss_type == "reinforce" else [])]
        return "; ".join(parts) or "none; the mismatch is logged"

    def _compare(self, log_probs: Tensor, batch: Batch, metrics: Metrics) -> tuple[Tensor, Tensor]:
        """The weights, 1 without any, and what is not rejected, both (b, t); adds rollout_corr/*."""
        log_ratio, known = log_ratios(log_probs, batch)  # (b, t), (b, t)
        _add_mismatch(metrics, log_probs, batch, log_ratio, known)
        kept, tokens = torch.ones_like(known), batch.response_mask
        for name, bounds in self.reject.items():
            low, high = log_bounds(name, bounds)
            values = statistic(log_ratio, known, name)  # (b, t)
            inside = (values >= low) & (values <= high)
            kept = kept & inside
            of_units, units = _per_unit(values, tokens, "token" if name.startswith("token") else "sequence")
            for kind in ("mean", "max", "min"):
                _add(metrics, f"rollout_rs_{name}_{kind}", of_units, units, kind)
            _add_rejection(metrics, f"rollout_rs_{name}", inside, tokens)
        if self.reject:
            _add_rejection(metrics, "rollout_rs", kept, tokens)
        if self.is_level == "none":
            return torch.ones_like(log_ratio), kept
        raw = importance_weights(log_ratio, self.is_level)
        weights = bound_weights(raw, high=self.is_threshold, icepop_low=self.icepop_low)
        self._add_weights(metrics, raw, weights, tokens)
        return weights, kept

    def _add_weights(self, metrics: Metrics, raw: Tensor, weights: Tensor, tokens: Tensor) -> None:
        """Adds rollout_is_*: over what has a weight, and over the responses' mean weights."""
        low = 1 / self.is_threshold if self.icepop_low is None else self.icepop_low
        for name, level in (("rollout_is", self.is_level), ("rollout_is_seq", "sequence")):
            (of_raw, units), (applied, _) = (_per_unit(values, tokens, level) for values in (raw, weights))
            too_high, too_low = of_raw > self.is_threshold, of_raw < low
            for kind in ("mean", "std"):
                _add(metrics, f"{name}_{kind}", applied, units, kind)
            for kind in ("max", "min"):
                _add(metrics, f"{name}_{kind}", of_raw, units, kind)
            fraction = "rollout_is_ratio_fraction" if name == "rollout_is" else f"{name}_fraction"
            _add(metrics, f"{fraction}_high", too_high, units)
            _add(metrics, f"{fraction}_low", too_low, units)
            if name == "rollout_is":
                _add(metrics, f"{name}_eff_sample_size", applied, units, "effective_share")
                if self.icepop_low is not None:
                    _add(metrics, f"{name}_oob_ratio", too_high | too_low, units)
            else:
                _add(metrics, f"{name}_max_deviation", (applied - 1).abs(), units, "max")


@dataclass(frozen=True, kw_only=True)
class AutoCorrection(Correction):
    """Token weights truncated at 2.0 if the engine reports log-probs, else none: what a run does if nothing is said."""

    is_level: ISLevel = "token"
    """Importance weights: none, the ratio of every token, or the product of the ratios of a response (sequence)."""


GEO_RS = {"reject": {"seq_mean_k1": [0.999, 1.001]}}
K3_RS = {"reject": {"seq_mean_k3": 0.01}}
ICEPOP: Mapping[str, Any] = {"is_level": "token", "icepop_low": 0.5, "is_threshold": 5.0}
PG: Mapping[str, Any] = {"bypass": True, "loss_type": "reinforce"}

CORRECTIONS: dict[str, Callable[[], Correction]] = {
    "auto": AutoCorrection,
    "none": partial(Correction),
    "disabled": partial(Correction),
    "decoupled_token_is": partial(Correction, is_level="token"),
    "decoupled_seq_is": partial(Correction, is_level="sequence"),
    "decoupled_token_icepop": partial(Correction, **ICEPOP),
    "decoupled_seq_is_rs": partial(Correction, is_level="sequence", reject={"seq_sum_k1": [0.5, 2.0]}),
    "decoupled_geo_rs": partial(Correction, **GEO_RS),
    "decoupled_geo_rs_seq_tis": partial(Correction, is_level="sequence", **GEO_RS),
    "decoupled_geo_rs_token_tis": partial(Correction, is_level="token", **GEO_RS),
    "decoupled_k3_rs": partial(Correction, **K3_RS),
    "decoupled_k3_rs_seq_tis": partial(Correction, is_level="sequence", **K3_RS),
    "decoupled_k3_rs_token_tis": partial(Correction, is_level="token", **K3_RS),
    "bypass_ppo_clip": partial(Correction, bypass=True),
    "bypass_ppo_clip_geo_rs": partial(Correction, bypass=True, **GEO_RS),
    "bypass_ppo_clip_k3_rs": partial(Correction, bypass=True, **K3_RS),
    "bypass_pg_is": partial(Correction, is_level="sequence", **PG),
    "bypass_pg_token_icepop": partial(Correction, **ICEPOP, **PG),
    "bypass_pg_geo_rs": partial(Correction, **GEO_RS, **PG),
    "bypass_pg_geo_rs_seq_tis": partial(Correction, is_level="sequence", **GEO_RS, **PG),
    "bypass_pg_geo_rs_token_tis": partial(Correction, is_level="token", **GEO_RS, **PG),
}
"""What --correction NAME chooses from: verl's names of its presets, `auto`, and `none` for its `disabled`."""


# ---- The arithmetic: pure functions of (b, t) tensors ----


def log_ratios(log_probs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """log(probability under log_probs / under the engine), (b, t) float64 without gradient, and where it is known.

    0 outside response_mask, and where a log-prob is not finite: the engine's always are (lib/model/batching.py), and
    one of the trainer's ends the run or skips the update.
    """
    assert batch.rollout_log_probs is not None, "the engine reported no log-probs"
    ours, theirs = log_probs.detach().double(), batch.rollout_log_probs.double()
    known = batch.response_mask & torch.isfinite(ours) & torch.isfinite(theirs)
    return torch.where(known, ours - theirs, 0), known


def importance_weights(log_ratio: Tensor, level: ISLevel) -> Tensor:
    """The ratio of every token, or on every token the product of its response's ratios: (b, t), within e^+-20.

    log_ratio (b, t) is 0 where there is no token. `token` has a low variance and a bias, `sequence` the reverse.
    """
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def bound_weights(weights: Tensor, *, high: float, icepop_low: float | None) -> Tensor:
    """min(weight, high) (truncated importance sampling, Ionides 2008), or with icepop_low: 0 outside both bounds.

    The second is IcePop (Ring-1T, arXiv:2510.18855): it also masks tokens that the engine finds far likelier.
    """
    if icepop_low is None:
        return weights.clamp(max=high)
    return torch.where((weights >= icepop_low) & (weights <= high), weights, 0)


def statistic(log_ratio: Tensor, known: Tensor, name: RejectStatistic) -> Tensor:
    """A rejection's statistic on every token (b, t), the same number on all tokens of a response for seq_*.

    Of x = log(old / rollout), clamped to +-20: k1 = x, k2 = x^2 / 2, k3 = e^x - 1 - x. `seq_mean_k1` is the log of the
    geometric mean ratio. known (b, t) says which tokens count in a mean; log_ratio is 0 elsewhere.
    """
    scope, _, estimator = name.rpartition("_")
    x = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    values = {"k1": x, "k2": x.square() / 2, "k3": x.expm1() - x}[estimator]  # (b, t), 0 where x is
    if scope == "token" or values.numel() == 0:
        return values
    if scope == "seq_max":
        per_row = values.amax(-1)  # k2 and k3 are nowhere negative
    else:
        per_row = masked_mean(values, known, dim=-1) if scope == "seq_mean" else values.sum(-1)
    return per_row[:, None].expand_as(values)


def log_bounds(name: str, bounds: Any) -> tuple[float, float]:
    """The least and the largest value of a statistic that is kept; [low, high] of a k1 bound the ratio old / rollout.

    One number u for a k1 is [1 / u, u]; k2 and k3 have an upper bound alone. Raises UserError for an unknown name, and
    for bounds that would reject equal probabilities.
    """
    if name not in get_args(RejectStatistic):
        raise UserError(
            f"--correction.reject has no {name!r}; --correction; expected {', '.join(get_args(RejectStatistic))}; "
            "choose some"
        )
    numbers = list(bounds) if isinstance(bounds, list | tuple) else [bounds]
    is_k1 = name.endswith("k1")
    if not all(type(number) in (int, float) and 0 < number <= 1e9 for number in numbers):
        numbers = []
    if len(numbers) == 1:
        numbers = [1 / numbers[0], numbers[0]] if is_k1 else [-inf, *numbers]
    if len(numbers) != 2 or (is_k1 and not numbers[0] <= 1 <= numbers[1]) or (not is_k1 and numbers[0] > -inf):
        rule = "[low, high] around 1, or one number u for [1 / u, u]" if is_k1 else "one number above 0, at most 1e9"
        raise UserError(
            f"--correction.reject {name} is out of range; --correction; found {bounds}, expected {rule}; change it"
        )
    return (log(numbers[0]), log(numbers[1])) if is_k1 else (numbers[0], numbers[1])


# ---- Metrics ----


def _per_unit(values: Tensor, tokens: Tensor, level: ISLevel) -> tuple[Tensor, Tensor]:
    """The numbers that a mean is over, and which of them count: tokens (b, t), or means per response (b,)."""
    return (masked_mean(values, tokens, dim=-1), tokens.any(-1)) if level == "sequence" else (values, tokens)


def _add(metrics: Metrics, name: str, values: Tensor, mask: Tensor, kind: str = "mean") -> None:
    """Adds rollout_corr/NAME, of the values where the mask is True; never waits for a GPU."""
    if values.numel() == 0:
        return
    name, values, count = PREFIX + name, values.double(), mask.sum()
    if kind == "mean":
        metrics.add_mean(name, masked_sum(values, mask), count)
    elif kind == "std":
        metrics.add_std(name, masked_sum(values, mask), masked_sum(values.square(), mask), count=count)
    elif kind == "effective_share":
        metrics.add_effective_share(name, masked_sum(values, mask), masked_sum(values.square(), mask), count=count)
    elif kind == "max":
        metrics.add_max(name, torch.where(mask, values, -inf).max(), count)
    else:
        metrics.add_min(name, torch.where(mask, values, inf).min(), count)


def _add_rejection(metrics: Metrics, name: str, kept: Tensor, tokens: Tensor) -> None:
    _add(metrics, f"{name}_masked_fraction", ~kept, tokens)
    _add(metrics, f"{name}_seq_masked_fraction", (~kept & tokens).any(-1), tokens.any(-1))


def _add_mismatch(metrics: Metrics, log_probs: Tensor, batch: Batch, log_ratio: Tensor, known: Tensor) -> None:
    """Adds how far trainer and engine are apart, by token and by response; nothing of it depends on the options."""
    rows = known.any(-1)  # (b,)
    ours, theirs = (
        masked_mean(-side.detach().double(), known, dim=-1) for side in (log_probs, batch.rollout_log_probs)
    )  # (b,), (b,), log perplexities
    clamped, of_row = (x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) for x in (log_ratio, log_ratio.sum(-1)))
    for name, values, mask in (
        ("kl", -log_ratio, known),
        ("k3_kl", clamped.expm1() - clamped, known),
        ("chi2_token", (2 * clamped).expm1(), known),
        ("chi2_seq", (2 * of_row).expm1(), rows),
        ("training_ppl", ours.clamp(max=MAX_LOG_RATIO).exp(), rows),
        ("training_log_ppl", ours, rows),
        ("rollout_ppl", theirs.clamp(max=MAX_LOG_RATIO).exp(), rows),
        ("rollout_log_ppl", theirs, rows),
        ("log_ppl_diff", ours - theirs, rows),
        ("log_ppl_abs_diff", (ours - theirs).abs(), rows),
        ("ppl_ratio", (ours - theirs).clamp(max=MAX_LOG_RATIO).exp(), rows),
    ):
        _add(metrics, name, values, mask)
    for kind in ("max", "min"):
        _add(metrics, f"log_ppl_diff_{kind}", ours - theirs, rows, kind)
