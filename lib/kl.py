"""Per-token estimates of KL(policy || reference) from the log-probs of sampled tokens.

With x drawn from the policy and d = log policy(x) - log reference(x), k1 and k3 are unbiased estimates of the KL's
value (J. Schulman, "Approximating KL Divergence", 2020). As losses they differ: the gradient of k2 is an unbiased
estimate of the KL's gradient, that of k1 is zero in expectation.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from lib.types import Batch

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
    """e^-d - 1 + d, per token: unbiased, never negative, clamped to at most 10."""
    negative = (ref_log_probs - log_probs).clamp(-MAX_EXPONENT, MAX_EXPONENT)
    return (negative.exp() - negative - 1).clamp(-MAX_K3, MAX_K3)


KLType = Literal["k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl"]
"""The estimators by name; kl, mse and low_var_kl are verl's names of k1, k2 and k3."""

KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "kl": k1,
    "abs": absolute,
    "k2": k2,
    "mse": k2,
    "k3": k3,
    "low_var_kl": k3,
}


def kl_to_reference(log_probs: Tensor, batch: Batch, *, kl_type: KLType) -> Tensor:
    """The chosen estimate per response token, (b, t), 0 outside response_mask whatever stands there."""
    assert batch.ref_log_probs is not None, "the reference's log-probs are computed before the update"
    ours = torch.where(batch.response_mask, log_probs, 0)
    theirs = torch.where(batch.response_mask, batch.ref_log_probs, 0)
    return KL_ESTIMATORS[kl_type](ours, theirs)
