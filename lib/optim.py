"""AdamW, its schedule, and one optimizer step: clip by the global norm, skip what is not finite."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from lib.errors import UserError
from lib.fsdp import reshard


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: float = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled weight decay, per step and unit of learning rate."""
    clip_grad: float = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly to its peak."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up, as a function of the training step (not of the optimizer update)."""
    min_lr_ratio: float = 0.0
    """Final learning rate of the cosine schedule as a share of the peak."""

    def __post_init__(self) -> None:
        rules = {
            "lr": (0 < self.lr < math.inf, "above 0 and finite"),
            "betas": (all(0 <= beta < 1 for beta in self.betas), "two numbers in [0, 1)"),
            "eps": (0 < self.eps < math.inf, "above 0 and finite"),
            "weight_decay": (0 <= self.weight_decay < math.inf, "0 or more and finite"),
            "clip_grad": (0 < self.clip_grad < math.inf, "above 0 and finite"),
            "warmup_steps": (self.warmup_steps >= 0, "0 or more"),
            "min_lr_ratio": (0 <= self.min_lr_ratio <= 1, "in [0, 1]"),
        }
        for name, (ok, rule) in rules.items():
            if not ok:
                flag = "--optim." + name.replace("_", "-")
                raise UserError(f"{flag} is out of range; found {getattr(self, name)}, expected {rule}; change {flag}")


def build_optimizer(policy: nn.Module, cfg: OptimConfig, *, num_steps: int) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """AdamW over the trainable parameters, and its schedule, stepped once per training step (as verl does)."""
    reshard(policy)  # the optimizer must hold the shards
    parameters = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, weight_decay=cfg.weight_decay, fused=True
    )
    return optimizer, LambdaLR(optimizer, lambda step: lr_factor(step, cfg, num_steps))


def lr_factor(step: int, cfg: OptimConfig, num_steps: int) -> float:
    """Learning rate of a training step (from 0) as a share of the peak.

    With 4 warm-up steps: 0.25, 0.5, 0.75, 1, then constant, or a half cosine down to `min_lr_ratio` at the last step.
    """
    if step < cfg.warmup_steps:
        return (step + 1) / cfg.warmup_steps
    if cfg.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - cfg.warmup_steps) / max(1, num_steps - 1 - cfg.warmup_steps))
    return cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def optimizer_step(policy: nn.Module, optimizer: torch.optim.Optimizer, *, clip_grad: float) -> tuple[float, bool]:
    """The global gradient norm before clipping, and whether the step was taken. Executed by all ranks together.

    The norm is over all ranks' shards, so all ranks see the same number and skip a non-finite one together.
    """
    reshard(policy)
    parameters = [p for p in policy.parameters() if p.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
    grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    taken = math.isfinite(grad_norm)
    if taken:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return grad_norm, taken
