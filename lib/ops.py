"""Masked reductions.

Arithmetic on masked tensors selects with torch.where and never multiplies by the mask: NaN * 0 is NaN.
"""

import torch
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """The sum of the values where the mask is True, over `dim` or over everything.

    What stands in masked places, NaN included, reaches neither the sum nor the gradient of `values`.
    """
    return torch.where(mask, values, 0).sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """The mean of the values where the mask is True, over `dim` or over everything; 0 where nothing is."""
    return masked_sum(values, mask, dim) / mask.sum(dim).clamp(min=1)
