"""Adds an adapter's product to a weight in one pass over it: a Triton kernel.

`torch.addmm` takes two: it copies the weight, and adds to the copy. That takes 1.6 to 2.3 times as long on an H200
(EXPERIMENTS.md), and a layer needs the sum twice per micro-batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, RANK = 64, 64, 32
"""Of the weight's that a program takes, and of the rank at a time."""


@triton.jit
def _put_sum_kernel(
    out_ptr, weight_ptr, a_ptr, b_ptr, out_stride, weight_stride, a_stride, b_stride, num_rows, num_columns, rank,
    scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    is_row, is_column = row < num_rows, column < num_columns
    row = row.to(tl.int64)
    weight = tl.load(weight_ptr + row * weight_stride + column, mask=is_row & is_column)
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, rank, RANK):
        place = (first + tl.arange(0, RANK)).to(tl.int64)
        is_place = place < rank
        b = tl.load(b_ptr + row * b_stride + place[None, :], mask=is_row & is_place[None, :], other=0.0)
        a = tl.load(a_ptr + place[:, None] * a_stride + column, mask=is_place[:, None] & is_column, other=0.0)
        product = tl.dot(b, a, product)
    total = weight.to(tl.float32) + scale * product
    tl.store(out_ptr + row * out_stride + column, total.to(weight.dtype), mask=is_row & is_column)


def put_sum_(out: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """Puts weight + scale * b a into `out`, which may be `weight`: a sum in float32, rounded once.

    `out` and `weight` (rows, columns), `a` (rank, columns), `b` (rows, rank), all bfloat16 on one GPU; numbers of a row
    lie side by side.
    """
    assert all(tensor.dtype is torch.bfloat16 and tensor.stride(1) == 1 for tensor in (out, weight, a, b))
    (num_rows, num_columns), rank = weight.shape, len(a)
    _put_sum_kernel[(triton.cdiv(num_columns, COLUMNS), triton.cdiv(num_rows, ROWS))](
        out, weight, a, b, out.stride(0), weight.stride(0), a.stride(0), b.stride(0), num_rows, num_columns, rank,
        scale, ROWS=ROWS, COLUMNS=COLUMNS, RANK=RANK, num_warps=4,
    )  # fmt: skip
