"""The options of PPO's critic. Its network is in lib/model/networks.py, its passes in lib/model/forward.py, its loss in
lib/algorithms/losses.py."""

from dataclasses import dataclass, field
from typing import ClassVar

from lib.errors import UserError, check_fields
from lib.model.fsdp import FSDPConfig
from lib.model.networks import ModelConfig
from lib.model.optim import OptimConfig


@dataclass(frozen=True, kw_only=True)
class CriticOptimConfig(OptimConfig):
    """The critic's AdamW and its schedule."""

    section: ClassVar[str] = "critic.optim."
    lr: float = 1e-5
    """Peak learning rate."""


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The critic: a decoder with a value head, which learns the returns. An empty path: the policy's own model."""

    model: ModelConfig = field(default_factory=ModelConfig)
    optim: CriticOptimConfig = field(default_factory=CriticOptimConfig)
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    value_clip: float = 0.5
    """Farthest that a value may move from the one before the update and still gain; above 0, inf: no clip."""
    warmup_steps: int = 0
    """First training steps in which only the critic learns."""
    update_epochs: int | None = None
    """The critic's passes over the responses of a step; None: the policy's."""
    max_tokens_per_gpu: int | None = None
    """Most tokens in one forward or backward pass of the critic on a rank; None: the policy's."""

    def __post_init__(self) -> None:
        epochs, tokens = self.update_epochs, self.max_tokens_per_gpu
        check_fields(
            self,
            "critic.",
            value_clip=(self.value_clip > 0, "above 0"),
            warmup_steps=(self.warmup_steps >= 0, "0 or more"),
            update_epochs=(epochs is None or epochs >= 1, "at least 1, or None"),
            max_tokens_per_gpu=(tokens is None or tokens >= 1, "at least 1, or None"),
        )
        if self.model.reference_path is not None:
            raise UserError(
                f"no KL holds a critic; --critic.model.reference-path {self.model.reference_path}; found it set, "
                "expected it left out; leave it out, or give --model.reference-path"
            )
