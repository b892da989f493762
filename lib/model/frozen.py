"""A model that scores every batch and does not learn: one of its own, or the policy without its adapter."""

from dataclasses import dataclass

from lib.dist import World
from lib.model.forward import compute_log_probs
from lib.model.fsdp import FSDPConfig, offload, onload
from lib.model.lora import without_adapter
from lib.model.networks import CausalPolicy
from lib.types import Batch


@dataclass(frozen=True, kw_only=True)
class FrozenModel:
    """A policy whose log-probs of the sampled tokens become one field of the batch."""

    name: str
    """Of its phase: timing_s/NAME."""
    field: str
    """Of the batch, (B, T)."""
    model: CausalPolicy
    fsdp: FSDPConfig

    def score(self, batch: Batch, world: World, *, max_tokens_per_gpu: int, temperature: float) -> Batch:
        """The batch with this model's log-probs. Executed by all ranks together; the model is onloaded meanwhile."""
        onload(self.fsdp, self.model, world)
        log_probs, _ = compute_log_probs(
            self.model, batch, max_tokens_per_gpu=max_tokens_per_gpu, temperature=temperature, world=world
        )  # (B, T)
        offload(self.fsdp, self.model)
        return batch.with_(**{self.field: log_probs})


@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """The policy as it was before it learned: without its adapter."""

    name: str
    """Of its phase: timing_s/NAME."""
    field: str
    """Of the batch, (B, T)."""
    model: CausalPolicy
    """The policy, which is on its device."""

    def score(self, batch: Batch, world: World, *, max_tokens_per_gpu: int, temperature: float) -> Batch:
        """The batch with the base model's log-probs. Executed by all ranks together."""
        with without_adapter(self.model):
            log_probs, _ = compute_log_probs(
                self.model, batch, max_tokens_per_gpu=max_tokens_per_gpu, temperature=temperature, world=world
            )  # (B, T)
        return batch.with_(**{self.field: log_probs})
