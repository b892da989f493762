"""Log-probs and entropy straight from hidden states, without a full logits matrix."""

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = {"cuda": 5 * 2**30, "cpu": 2**29}  # logits of one chunk: the head's peak memory whatever the batch
MIN_TEMPERATURE = 1e-8

Statistic = Literal["entropy", "logit_grad_squared", "none"]
"""What the head gives of each distribution beside the label's log-prob."""


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float,
    chunk_size: int | None = None,
    statistic: Statistic = "entropy",
) -> tuple[Tensor, Tensor]:
    """Log-prob of each label, and entropy, under softmax(hidden @ weight.T / temperature): (N,) and (N,) float32.

    hidden (N, H) and weight (V, H) of one dtype; labels (N,) int64. Both results are differentiable in hidden and
    weight. The matrix products run in the dtype of the inputs; the softmax and the sum of the weight's gradient over
    chunks in float32 (float64 for float64 inputs). `chunk_size` rows of logits exist at a time (default: CHUNK_BYTES
    of them). A single chunk is kept for the backward pass; several are computed once more there. Entropy costs
    nothing backward as long as no gradient reaches it. Instead of it the second result may be the squared norm of
    d log p[label] / dz or, for `statistic` "none", zeros; neither has a gradient.

    With z = hidden @ weight.T / temperature, log p = z - logsumexp(z) and H = -sum(p log p):
        d log p[label] / dz = onehot(label) - p        dH / dz = -p (log p + H)
    """
    assert hidden.dtype == weight.dtype, f"hidden is {hidden.dtype}, weight is {weight.dtype}"
    if chunk_size is None:
        chunk_size = max(1, CHUNK_BYTES[hidden.device.type] // (weight.shape[0] * hidden.element_size()))
    return _LinearLogProbs.apply(hidden, weight, labels, max(temperature, MIN_TEMPERATURE), chunk_size, statistic)


class _LinearLogProbs(torch.autograd.Function):
    """Keeps its inputs, two numbers a row and, if they are one chunk, the logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, rows: int, statistic: Statistic
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        # (N,) each; not three rows of one tensor, since FSDP warns of results that are views
        log_probs, log_sums, entropy = (torch.empty(len(hidden), dtype=dtype, device=hidden.device) for _ in range(3))
        logits = hidden[:0] @ weight.T  # (rows, V)
        for start in range(0, len(hidden), rows):
            chunk = slice(start, start + rows)
            logits = hidden[chunk] @ weight.T
            statistics = _on(hidden.device, _row_statistics)(logits, labels[chunk], 1 / temperature, dtype, statistic)
            log_probs[chunk], log_sums[chunk], entropy[chunk] = statistics
        keep = len(hidden) <= rows and (ctx.needs_input_grad[0] or ctx.needs_input_grad[1])
        ctx.save_for_backward(hidden, weight, labels, log_sums, entropy, logits if keep else None)
        ctx.temperature, ctx.rows = temperature, rows
        ctx.set_materialize_grads(False)
        if statistic != "entropy":
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, log_sums, entropy, kept = ctx.saved_tensors
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_sums)
        hidden_grad = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None  # (N, H)
        weight_grad = None  # (V, H)
        for start in range(0, len(hidden), ctx.rows):
            chunk = slice(start, start + ctx.rows)
            logits = hidden[chunk] @ weight.T if kept is None else kept  # (rows, V)
            of_entropy = None if grad_entropy is None else (grad_entropy[chunk], entropy[chunk])
            _on(hidden.device, _slope_)(
                logits, labels[chunk], log_sums[chunk], grad_log_probs[chunk], of_entropy, 1 / ctx.temperature
            )
            if hidden_grad is not None:
                hidden_grad[chunk] = logits @ weight
            if ctx.needs_input_grad[1] and len(hidden) <= ctx.rows:
                weight_grad = logits.T @ hidden
            elif ctx.needs_input_grad[1]:
                if weight_grad is None:
                    weight_grad = torch.zeros_like(weight, dtype=log_sums.dtype)
                weight_grad += logits.T @ hidden[chunk]
        if weight_grad is None and ctx.needs_input_grad[1]:
            weight_grad = torch.zeros_like(weight)
        elif weight_grad is not None:
            weight_grad = weight_grad.to(weight.dtype)
        return hidden_grad, weight_grad, None, None, None, None


def _row_statistics(
    logits: Tensor, labels: Tensor, inverse_temperature: float, dtype: torch.dtype, statistic: Statistic
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of the label, log of the sum and the statistic of each row of logits (rows, V): three times (rows,)."""
    scaled = logits.to(dtype) * inverse_temperature
    log_sum = scaled.logsumexp(-1)
    log_prob = scaled.gather(1, labels[:, None]).squeeze(1) - log_sum
    if statistic == "none":
        return log_prob, log_sum, torch.zeros_like(log_sum)
    log_probs = scaled - log_sum[:, None]
    if statistic == "logit_grad_squared":  # by the other tokens' probabilities: 1 - p would lose its digits near p = 1
        others = torch.where(_is_label(logits, labels), 0, log_probs.exp())  # (rows, V)
        return log_prob, log_sum, others.sum(-1).square() + others.square().sum(-1)
    return log_prob, log_sum, -(log_probs.exp() * log_probs).sum(-1)


def _slope_(
    logits: Tensor,
    labels: Tensor,
    log_sums: Tensor,
    grad_log_probs: Tensor,
    of_entropy: tuple[Tensor, Tensor] | None,
    inverse_temperature: float,
) -> None:
    """Writes d loss / d logits over the logits (rows, V). `of_entropy` holds the entropy's gradient and the entropy."""
    log_probs = logits.to(log_sums.dtype) * inverse_temperature - log_sums[:, None]  # (rows, V)
    probs = log_probs.exp()
    slope = torch.where(_is_label(logits, labels), 1 - probs, -probs) * grad_log_probs[:, None]
    if of_entropy is not None:
        grad, entropy = of_entropy
        slope = slope - probs * (log_probs + entropy[:, None]) * grad[:, None]
    logits.copy_(slope * inverse_temperature)


def _is_label(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.arange(logits.shape[1], device=logits.device) == labels[:, None]  # (rows, V)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True)


def _on(device: torch.device, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function for this device: on a GPU one fused kernel instead of a pass over memory per operation."""
    return _compiled(function) if device.type == "cuda" else function
