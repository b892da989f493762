"""The terms of the policy's loss: each a number per response token with a coefficient; the loss is their sum."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lib.algorithms.kl import KLType, kl_to_reference
from lib.algorithms.losses import PolicyLoss
from lib.types import Batch


@dataclass(frozen=True, kw_only=True)
class LossTerm(ABC):
    """One term. With coefficient 0 it is measured and has no gradient."""

    name: ClassVar[str]
    """Of its metric: actor/NAME."""
    coef: float = 1.0
    """Weight in the sum."""

    @abstractmethod
    def __call__(self, log_probs: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The term (b, t) and metrics by name, each (b, t); what stands outside response_mask is not used.

        log_probs and entropy (b, t) of the current policy, with gradient; batch: the micro-batch, on the same device.
        """

    def metrics(self) -> dict[str, float]:
        """What is logged beside it in every step, also one in which the policy rests."""
        return {}


@dataclass(frozen=True, kw_only=True)
class PolicyTerm(LossTerm):
    """The policy loss, times the importance weights of the correction where there are any."""

    name: ClassVar[str] = "pg_loss"
    loss: PolicyLoss

    def __call__(self, log_probs: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        token_loss, stats = self.loss(log_probs, batch)
        return self.loss.weigh(token_loss, batch), stats


@dataclass(frozen=True, kw_only=True)
class EntropyTerm(LossTerm):
    """The entropy, whose coefficient is negative: a bonus."""

    name: ClassVar[str] = "entropy_loss"

    def __call__(self, log_probs: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return entropy, {"entropy": entropy}


@dataclass(frozen=True, kw_only=True)
class KLTerm(LossTerm):
    """The KL to the reference."""

    name: ClassVar[str] = "kl_loss"
    kl_type: KLType

    def __call__(self, log_probs: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return kl_to_reference(log_probs, batch, kl_type=self.kl_type), {}

    def metrics(self) -> dict[str, float]:
        return {"actor/kl_coef": self.coef}
