"""AdamW, its schedule, and one optimizer step: clip by the global norm, skip what is not finite or exactly 0."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from lib.errors import UserError, check_fields
from lib.model.fsdp import local_part, reshard
from lib.model.host_memory import HostMemory

MOMENT_ELEMENTS = 2**26  # elements whose moments visit the GPU at once: 512 MiB, or one parameter that is larger


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule."""

    section: ClassVar[str] = "optim."
    """Where its options are on the command line, for messages."""
    lr: float = 1e-6
    """Peak learning rate; works: 5e-7 to 5e-6 from a billion weights on, 1e-5 to 5e-5 for smaller models and for
    adapters."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled weight decay, per step and unit of learning rate; adapters it pulls to the base model (recipes: 0)."""
    clip_grad: float = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly to its peak."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after the warm-up, as a function of the training step (not of the optimizer update)."""
    min_lr_ratio: float = 0.0
    """Where cosine and linear fall to, as a share of the peak: one step after the last, so that the last one trains."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            self.section,
            lr=(0 < self.lr < math.inf, "above 0 and finite"),
            betas=(all(0 <= beta < 1 for beta in self.betas), "two numbers in [0, 1)"),
            eps=(0 < self.eps < math.inf, "above 0 and finite"),
            weight_decay=(0 <= self.weight_decay < math.inf, "0 or more and finite"),
            clip_grad=(0 < self.clip_grad < math.inf, "above 0 and finite"),
            warmup_steps=(self.warmup_steps >= 0, "0 or more"),
            min_lr_ratio=(0 <= self.min_lr_ratio <= 1, "in [0, 1]"),
        )


def build_optimizer(policy: nn.Module, cfg: OptimConfig, *, on_host: bool = False) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters. `on_host`: a GPU's moments stay in host memory (`HostAdamW`)."""
    reshard(policy)  # the optimizer must hold the shards
    parameters = [p for p in policy.parameters() if p.requires_grad]
    kind = HostAdamW if on_host and parameters[0].device.type == "cuda" else torch.optim.AdamW
    return kind(parameters, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, weight_decay=cfg.weight_decay, fused=True)


class HostAdamW(torch.optim.AdamW):
    """AdamW of float32 parameters on a GPU whose moments stay in page-locked host memory, 8 bytes per parameter.

    A step brings them to the GPU chunk by chunk: while one is updated with torch's fused kernel, the next one arrives
    and the previous one leaves. The numbers are AdamW's, to the bit.
    """

    def __init__(self, parameters: Iterable[Tensor], **settings: object) -> None:
        """Raises UserError when the host cannot lock the memory."""
        super().__init__(parameters, **settings)
        held = [p for group in self.param_groups for p in group["params"]]
        self._memory = HostMemory([local_part(p) for p in held] * 2)
        if not self._memory.is_locked and self._memory.num_bytes:
            raise UserError(
                "the host cannot hold the optimizer's moments; --fsdp.optimizer-offload True; found no "
                f"{self._memory.num_bytes / 2**30:.1f} GiB of memory that can be page-locked (ulimit -l, the "
                "container's limit); turn it off, or use more ranks"
            )
        moments = self._memory.tensors
        for parameter, first, second in zip(held, moments[: len(held)], moments[len(held) :], strict=True):
            counter = torch.zeros((), device=parameter.device)
            self.state[parameter] = {"step": counter, "exp_avg": first, "exp_avg_sq": second}
        self._arriving, self._leaving = torch.cuda.Stream(), torch.cuda.Stream()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of every parameter that has a gradient."""
        assert closure is None
        compute, left = torch.cuda.current_stream(), []  # left: what the GPU still copies out, and when that ends
        for group in self.param_groups:
            chunks = _chunks([p for p in group["params"] if p.grad is not None])
            following = self._fetch(chunks[0]) if chunks else None
            for place, chunk in enumerate(chunks):
                (moments, arrived), following = following, None
                for _, done in left[:-1]:
                    done.synchronize()  # bounds the copies on the GPU: arriving, in use, leaving
                del left[:-1]
                if place + 1 < len(chunks):
                    following = self._fetch(chunks[place + 1])
                compute.wait_event(arrived)
                states = [self.state[p] for p in chunk]
                adamw(
                    [local_part(p) for p in chunk], [local_part(p.grad) for p in chunk], *moments, [],
                    [state["step"] for state in states], fused=True, amsgrad=False, maximize=False,
                    beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
                    weight_decay=group["weight_decay"], eps=group["eps"],
                )  # fmt: skip
                self._leaving.wait_stream(compute)
                with torch.cuda.stream(self._leaving):
                    for name, arrivals in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
                        for state, moment in zip(states, arrivals, strict=True):
                            state[name].copy_(moment, non_blocking=True)
                left.append((moments, self._leaving.record_event()))
        self._leaving.synchronize()

    def _fetch(self, chunk: list[Tensor]) -> tuple[tuple[list[Tensor], list[Tensor]], torch.cuda.Event]:
        """Both moments of these parameters on the GPU, and when they are there."""
        with torch.cuda.stream(self._arriving):
            moments = tuple(
                [self.state[p][name].to(p.device, non_blocking=True) for p in chunk]
                for name in ("exp_avg", "exp_avg_sq")
            )
        return moments, self._arriving.record_event()


def moments_to_come(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Bytes of the moments that the first steps of these optimizers will put on this rank's GPU, for good."""
    new = [p for each in optimizers for group in each.param_groups for p in group["params"] if not each.state.get(p)]
    return sum(2 * local_part(p).nbytes for p in new)


def _chunks(parameters: list[Tensor]) -> list[list[Tensor]]:
    """The parameters in order, in runs of at most MOMENT_ELEMENTS elements of this rank, or of one parameter."""
    chunks: list[list[Tensor]] = []
    room = 0
    for parameter in parameters:
        size = local_part(parameter).numel()
        if not chunks or size > room:
            chunks.append([])
            room = MOMENT_ELEMENTS
        chunks[-1].append(parameter)
        room -= size
    return chunks


def set_lr_(optimizer: torch.optim.Optimizer, cfg: OptimConfig, *, step: int, num_steps: int) -> float:
    """The learning rate of a training step (1 to num_steps; the first one's before it), which the optimizer now has.

    A function of the step alone, so there is no state to save.
    """
    lr = cfg.lr * lr_factor(max(step - 1, 0), cfg, num_steps)
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def lr_factor(step: int, cfg: OptimConfig, num_steps: int) -> float:
    """Learning rate of a training step (from 0) as a share of the peak.

    With 4 warm-up steps: 0.25, 0.5, 0.75, 1, then constant, or half a cosine or a line down to `min_lr_ratio`, which
    would come at `schedule_end`: a last step with a rate of 0 would be a whole rollout for nothing.
    """
    if step < cfg.warmup_steps:
        return (step + 1) / cfg.warmup_steps
    if cfg.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - cfg.warmup_steps) / max(1, schedule_end(num_steps) - 1 - cfg.warmup_steps))
    height = 0.5 * (1 + math.cos(math.pi * progress)) if cfg.schedule == "cosine" else 1 - progress
    return cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * height


def schedule_end(num_steps: int) -> int:
    """The step (from 1) at which a schedule would have fallen to its end. A checkpoint keeps it."""
    return num_steps + 1


def optimizer_step(policy: nn.Module, optimizer: torch.optim.Optimizer, *, clip_grad: float) -> tuple[float, bool]:
    """The global gradient norm before clipping, and whether the step was taken. Executed by all ranks together.

    The norm is over all ranks' shards, so all ranks see the same number and skip together: a gradient that is not
    finite, and one of exactly 0. Nothing in the mini-batch asked for a change then (no token trains, all advantages are
    0, or every token is clipped), and AdamW would move the weights all the same, by its momentum and the weight decay.
    """
    reshard(policy)
    parameters = [p for p in policy.parameters() if p.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
    grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    taken = 0 < grad_norm < math.inf  # False for NaN
    if taken:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return grad_norm, taken
