"""Masked reductions, and log-probs and entropy straight from hidden states, without a full logits matrix.

Arithmetic on masked tensors selects with torch.where and never multiplies by the mask: NaN * 0 is NaN.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 2**27  # float32 logits of one chunk: 512 MB, the head's peak memory whatever the batch
MIN_TEMPERATURE = 1e-8


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """The sum of the values where the mask is True, over `dim` or over everything.

    What stands in masked places, NaN included, reaches neither the sum nor the gradient of `values`.
    """
    return torch.where(mask, values, 0).sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """The mean of the values where the mask is True, over `dim` or over everything; 0 where nothing is."""
    return masked_sum(values, mask, dim) / mask.sum(dim).clamp(min=1)


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float,
    chunk_size: int | None = None,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each label, and entropy, under softmax(hidden @ weight.T / temperature): (N,) and (N,) float32.

    hidden (N, H) and weight (V, H) of one dtype; labels (N,) int64. Both results are differentiable in hidden and
    weight. The logits exist for `chunk_size` rows at a time (default: 512 MB of them), forward and again backward.
    The matrix products run in the dtype of the inputs; the softmax and the sum of the weight's gradient over chunks
    in float32 (float64 for float64 inputs). Entropy costs nothing backward as long as no gradient reaches it;
    `with_entropy=False` skips its values too and returns zeros.

    With z = hidden @ weight.T / temperature, log p = z - logsumexp(z) and H = -sum(p log p):
        d log p[label] / dz = onehot(label) - p        dH / dz = -p (log p + H)
    """
    assert hidden.dtype == weight.dtype, f"hidden is {hidden.dtype}, weight is {weight.dtype}"
    rows = max(1, CHUNK_ELEMENTS // weight.shape[0]) if chunk_size is None else chunk_size
    return _LinearLogProbs.apply(hidden, weight, labels, max(temperature, MIN_TEMPERATURE), rows, with_entropy)


class _LinearLogProbs(torch.autograd.Function):
    """Keeps only its inputs and two numbers a row; the backward pass computes each chunk's logits once more."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, rows: int, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = torch.empty(len(hidden), dtype=dtype, device=hidden.device)  # (N,)
        log_sums = torch.empty_like(log_probs)  # (N,)
        entropy = torch.zeros_like(log_probs)  # (N,)
        for start in range(0, len(hidden), rows):
            chunk = slice(start, start + rows)
            logits = _scaled_logits(hidden[chunk], weight, temperature, dtype)  # (rows, V)
            log_sums[chunk] = logits.logsumexp(-1)
            logits -= log_sums[chunk, None]  # now log p
            log_probs[chunk] = logits.gather(1, labels[chunk, None]).squeeze(1)
            if with_entropy:
                entropy[chunk] = torch.special.entr(logits.exp_()).sum(-1)
        ctx.save_for_backward(hidden, weight, labels, log_sums, entropy)
        ctx.temperature, ctx.rows = temperature, rows
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, log_sums, entropy = ctx.saved_tensors
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_sums)
        scale = -grad_log_probs  # (N,) of p in d loss / dz
        if grad_entropy is not None:
            scale = scale - grad_entropy * entropy
        hidden_grad = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None  # (N, H)
        weight_grad = torch.zeros_like(weight, dtype=log_sums.dtype) if ctx.needs_input_grad[1] else None  # (V, H)
        for start in range(0, len(hidden), ctx.rows):
            chunk = slice(start, start + ctx.rows)
            probs = _scaled_logits(hidden[chunk], weight, ctx.temperature, log_sums.dtype)  # (rows, V)
            probs.sub_(log_sums[chunk, None]).exp_()
            # entr(p) is -p log p, and 0 where p underflows to 0
            bend = None if grad_entropy is None else torch.special.entr(probs).mul_(grad_entropy[chunk, None])
            slope = probs.mul_(scale[chunk, None])  # (rows, V), d loss / dz
            if bend is not None:
                slope += bend
            slope.scatter_add_(1, labels[chunk, None], grad_log_probs[chunk, None])
            slope = slope.div_(ctx.temperature).to(hidden.dtype)
            if hidden_grad is not None:
                hidden_grad[chunk] = slope @ weight
            if weight_grad is not None:
                weight_grad += slope.T @ hidden[chunk]
        if weight_grad is not None:
            weight_grad = weight_grad.to(weight.dtype)
        return hidden_grad, weight_grad, None, None, None, None


def _scaled_logits(hidden: Tensor, weight: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    logits = (hidden @ weight.T).to(dtype)  # (rows, V)
    return logits if temperature == 1 else logits.div_(temperature)
