"""A policy that learns by adapters (LoRA): frozen weights, and beside the layers' matrices two factors that train.

Forward, a layer multiplies with one weight, that of `effective_weight`, which is also what the engine gets. Backward,
it computes what autograd would give through that weight, without its gradient: for y = x W_eff^T and s = alpha / rank

    dx = dy W_eff        dA = s (dy B)^T x        dB = s dy^T (x A^T)

with B0 + B and A0 + A in the place of B and A where the adapter begins elsewhere than at zero (PiSSA).
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lib.errors import UserError, check_fields
from lib.storage.adapter import ALL_LINEAR, adapted_weights, as_one_product, effective_weight, put_effective_weight_
from lib.storage.peft_folder import LEAST_ALPHA, MOST_ALPHA, read_peft


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Train adapters instead of all weights."""

    rank: int = 0
    """Rank of the adapters: numbers per row and per column of each adapted matrix; 0: train all weights."""
    alpha: float = 32.0
    """Adapters are scaled by alpha / rank, so that a learning rate fits every rank."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Modules with an adapter, such as q_proj down_proj; all-linear: every matrix of the layers."""
    exclude: tuple[str, ...] = ()
    """Modules without one, of those."""
    init: Literal["kaiming", "pissa"] = "kaiming"
    """Where adapters begin, with the policy as the base model, kaiming: A uniform within 1 / sqrt(inputs), B zero;
    pissa: the weight's largest singular directions, less themselves, whose published results in reinforcement learning
    are bad (https://arxiv.org/abs/2512.23165)."""
    path: str | None = None
    """Folder of an adapter as peft writes it, and merge.py --adapter: the run begins with it, at its rank, alpha and
    modules; a KL holds the policy to the model without it; None: begin anew."""

    def __post_init__(self) -> None:
        if self.path is not None:
            self._take_from_folder()
        check_fields(
            self,
            "lora.",
            rank=(self.rank >= 0, "0 or more"),
            alpha=(LEAST_ALPHA <= self.alpha <= MOST_ALPHA, f"from {LEAST_ALPHA:g} to {MOST_ALPHA:g}"),
            targets=(bool(self.targets), f"names of modules, or {ALL_LINEAR}"),
        )
        if self.rank == 0 and (said := [name for name in _NAMES if getattr(self, name) != getattr(LoRAConfig, name)]):
            raise _refuse_alone(said[0])

    def _take_from_folder(self) -> None:
        """Fills rank, alpha and targets from the folder's. Raises UserError when they are others."""
        peft = read_peft(self.path, "--lora.path")
        own = {"rank": peft.rank, "alpha": peft.alpha, "targets": peft.modules, "exclude": (), "init": "kaiming"}
        for name, value in own.items():
            given = getattr(self, name)
            if given != getattr(LoRAConfig, name) and not _are_equal(given, value):
                raise self._refuse(name, given, value)
            object.__setattr__(self, name, value)

    def check_said(self, said: Mapping[str, Sequence[str]]) -> None:
        """Raises UserError where a command line says, in these words, what the folder has otherwise, or what means
        nothing without adapters: a default too."""
        if self.rank == 0 and "rank" not in said and (alone := [name for name in _NAMES if name in said]):
            raise _refuse_alone(alone[0])
        for name, words in said.items() if self.path is not None else ():
            value = getattr(self, name)
            given = tuple(words) if isinstance(value, tuple) else type(value)(words[0])
            if name != "path" and not _are_equal(given, value):
                raise self._refuse(name, given, value)

    def _refuse(self, name: str, given: Any, value: Any) -> UserError:
        return UserError(
            f"an adapter that is there has its own --lora.{name}; --lora.path {self.path}; found {given!r}, expected "
            f"{value!r}; leave --lora.{name} out, or where a recipe gives it, say {_in_words(name, value)}"
        )

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank


def _are_equal(given: Any, value: Any) -> bool:
    return {*given} == {*value} if isinstance(value, tuple) else given == value


def _in_words(name: str, value: Any) -> str:
    return " ".join((f"--lora.{name}", *(value if isinstance(value, tuple) else (str(value),))))


def _refuse_alone(name: str) -> UserError:
    default = _in_words(name, getattr(LoRAConfig, name))
    return UserError(
        f"--lora.{name} means nothing without adapters; found --lora.rank 0, expected 1 or more; add --lora.rank 32, "
        f"or leave it out (where a recipe gives it, say --lora.rank 0 {default})"
    )


_NAMES = ("alpha", "targets", "exclude", "init")


class AdaptedLinear(nn.Linear):
    """A frozen linear layer with an adapter."""

    def __init__(self, base: nn.Linear, cfg: LoRAConfig) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias, self.scale = base.weight, base.bias, cfg.scale
        like = dict(dtype=torch.float32, device=base.weight.device)
        self.lora_A = nn.Parameter(torch.empty(cfg.rank, self.in_features, **like))
        self.lora_B = nn.Parameter(torch.empty(self.out_features, cfg.rank, **like))
        self.lora_A0 = self.lora_B0 = None
        if cfg.init == "pissa":
            self.lora_A0, self.lora_B0 = (
                nn.Parameter(torch.empty_like(factor), requires_grad=False) for factor in (self.lora_A, self.lora_B)
            )
        self.is_on = True

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) to (..., out)."""
        if self.is_on:
            factors = (self.lora_A, self.lora_B, self.lora_A0, self.lora_B0)
            return _Adapted.apply(x, self.weight, self.bias, self.scale, *factors)
        return nn.functional.linear(x, self.weight, self.bias)


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, *factors: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, *factors)
        ctx.scale = scale
        return nn.functional.linear(x, effective_weight(weight, *as_one_product(*factors), scale), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *factors = ctx.saved_tensors
        a, b, a0, b0 = factors
        rows, grads = x.flatten(0, -2), grad.flatten(0, -2)  # (N, in), (N, out)
        if a0 is not None:
            a, b = a0 + a, b0 + b
        if ctx.needs_input_grad[0]:
            both = _input_gradients(grads, weight, *as_one_product(*factors), ctx.scale, b)  # (N, in + rank or more)
            width = weight.shape[1]
            grad_x, grad_xa = both[:, :width].unflatten(0, grad.shape[:-1]), both[:, width : width + len(a)]
        else:
            grad_x, grad_xa = None, grads @ b
        grad_a, grad_b = grad_xa.T @ rows, grads.T @ (rows @ a.T)
        if ctx.scale != 1:  # each product would be a kernel
            grad_a, grad_b = ctx.scale * grad_a, ctx.scale * grad_b
        return grad_x, None, None, None, grad_a, grad_b, None, None


@torch.library.custom_op("lockstep::input_gradients", mutates_args=())
def _input_gradients(grads: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float, beside: Tensor) -> Tensor:
    """`grads` (N, out) times the effective weight and, in the next columns, times `beside` (out, rank).

    Gives (N, in + rank), rounded up: of one product, in which a narrow one takes no time (rank 128 or less, an H200).

    The weight is made again, and nothing of its size kept. All of this is one operation: of several, a compiler of
    layers would see that the forward pass has made that weight, and keep it.
    """
    num_rows, width = weight.shape
    rank = beside.shape[1]
    both = weight.new_empty(num_rows, _rounded_up(width + rank))
    put_effective_weight_(both[:, :width], weight, a, b, scale)
    both[:, width : width + rank] = beside
    both[:, width + rank :] = 0  # of a rank of 8, 16, 32, ... there is nothing
    return grads @ both


@_input_gradients.register_fake
def _(grads: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float, beside: Tensor) -> Tensor:
    # Not len(): that is a number, and the layer would be compiled again for every other number of tokens.
    return grads.new_empty(grads.shape[0], _rounded_up(weight.shape[1] + beside.shape[1]))


def _rounded_up(width: int) -> int:
    # Rows that begin at multiples of 16 bytes.
    return width + -width % 8


def adapt_(policy: nn.Module, cfg: LoRAConfig) -> None:
    """Freezes a policy of the meta device and puts adapters into its layers. Raises UserError."""
    policy.requires_grad_(False)
    shapes = {name: tuple(parameter.shape) for name, parameter in policy.named_parameters()}
    for name in adapted_weights(shapes, targets=cfg.targets, exclude=cfg.exclude):
        path, _, last = name.removesuffix(".weight").rpartition(".")
        parent = policy.get_submodule(path)
        setattr(parent, last, AdaptedLinear(getattr(parent, last), cfg))


def initial_factor(name: str, shape: Sequence[int], *, seed: int) -> Tensor:
    """A as kaiming starts it, float32 on the CPU: a function of its name and the seed, equal on all ranks."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    bound = 1 / math.sqrt(shape[1])  # of kaiming_uniform_(a=sqrt(5)), as nn.Linear and peft have it
    return torch.empty(tuple(shape)).uniform_(-bound, bound, generator=generator)


@contextmanager
def without_adapter(policy: nn.Module) -> Iterator[None]:
    """While it holds, the policy is the base model, bit for bit."""
    adapted = [module for module in policy.modules() if isinstance(module, AdaptedLinear)]
    for module in adapted:
        module.is_on = False
    try:
        yield
    finally:
        for module in adapted:
            module.is_on = True
