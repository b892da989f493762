"""Packed attention behind transformers' attention interface: sequences lie end to end and never see each other.

In bfloat16 on a GPU cuDNN's kernels (Hopper) or torch's variable-length flash attention, which know no other precision;
else one call a sequence.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lib.errors import UserError
from lib.model.cudnn_attention import attend_by_cudnn, has_cudnn

PACKED = "lockstep_packed"
"""The name under which transformers knows this attention."""
HARMLESS = frozenset({"dropout", "position_ids", "use_cache", "cu_seq_lens_k", "max_length_k"})
"""Keywords of transformers that change nothing here: borders say where sequences lie, and the engine samples without
dropout."""
_has_cudnn = False  # a plain value: the compiler of a layer would follow the function that finds it out


def register_packed_attention() -> None:
    """Makes PACKED available as `attn_implementation`. Without an entry in the mask registry no mask is ever built."""
    from transformers import AttentionInterface

    global _has_cudnn
    _has_cudnn = has_cudnn()
    AttentionInterface.register(PACKED, packed_attention)


@contextmanager
def noting_windows() -> Iterator[dict[int, int | None]]:
    """Yields {layer: the tokens that its attention sees, None for all before}, filled by eager passes inside."""
    from transformers import AttentionInterface

    found: dict[int, int | None] = {}

    def noting(module: nn.Module, *arguments: Any, **keywords: Any) -> tuple[Tensor, None]:
        found[module.layer_idx] = keywords.get("sliding_window")
        return packed_attention(module, *arguments, **keywords)

    AttentionInterface.register(PACKED, noting)
    try:
        yield found
    finally:
        AttentionInterface.register(PACKED, packed_attention)


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, scaling: float,
    cu_seq_lens_q: Tensor | None = None, max_length_q: int = 0, sliding_window: int | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Causal attention within each packed sequence.

    query (1, heads, N, d), key and value (1, kv_heads, N, d); cu_seq_lens_q (S + 1,) int32 holds the S sequences'
    borders, for sequences of 3 and 2 tokens [0, 3, 5], the last sequences may be empty; gives (1, N, heads, d). Raises
    UserError for a keyword that is not known to be harmless: gpt-oss's `s_aux`, left out, moves log-probs by 1.8 nats;
    and where a model's layers do not hand the borders on.
    """
    _refuse_unknown(module, others)
    if cu_seq_lens_q is None:
        raise UserError(
            f"this model's layers do not hand on where packed sequences begin; {type(module).__name__}; found no "
            "cu_seq_lens_q among attention's keywords; choose another model"
        )
    assert attention_mask is None, "packed attention isolates sequences by their borders, not by a mask"
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (N, heads, d)
    window = (-1 if sliding_window is None else sliding_window - 1, 0)  # (tokens to the left, to the right)
    on_gpu = q.is_cuda and q.dtype == torch.bfloat16
    by_cudnn = on_gpu and _has_cudnn and sliding_window is None and q.shape[2] <= 128 and q.shape[2] % 16 == 0
    if by_cudnn or q.is_meta:  # without numbers: what is kept for the backward pass is equal (activations.py)
        return attend_by_cudnn(q, k, v, cu_seq_lens_q, max_length_q, scaling).unsqueeze(0), None
    attend = _attend_varlen if on_gpu else _attend_each
    return attend(q, k, v, cu_seq_lens_q, max_length_q, scaling, window).unsqueeze(0), None  # (1, N, heads, d)


def _refuse_unknown(module: nn.Module, keywords: dict[str, Any]) -> None:
    for name, given in keywords.items():
        if given is not None and name not in HARMLESS:
            raise UserError(
                f"this model's attention needs what packed attention does not have; {type(module).__name__}; found "
                f"{name}, expected none but {', '.join(sorted(HARMLESS))}; choose another model"
            )


def _attend_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seq_lens: Tensor, max_len: int, scale: float, window: tuple[int, int]
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 takes fewer key than query heads as they are; 2.13 wants to be told.
    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    return varlen_attn(
        q, k, v, cu_seq_lens, cu_seq_lens, max_len, max_len, scale=scale, window_size=window, **grouped
    )  # (N, heads, d)


def _attend_each(
    q: Tensor, k: Tensor, v: Tensor, cu_seq_lens: Tensor, max_len: int, scale: float, window: tuple[int, int]
) -> Tensor:
    borders = cu_seq_lens.tolist()
    outputs = []
    for start, end in pairwise(borders):
        if start == end:  # not every kernel takes none
            continue
        one = [x[start:end].transpose(0, 1) for x in (q, k, v)]  # (heads, len, d)
        mask = None
        if 0 <= window[0] < end - start - 1:
            place = torch.arange(end - start, device=q.device)
            distance = place[:, None] - place[None, :]
            mask = (distance >= 0) & (distance <= window[0])  # (len, len)
        outputs.append(
            torch.nn.functional.scaled_dot_product_attention(
                *one, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
            ).transpose(0, 1)
        )
    return torch.cat(outputs)  # (N, heads, d)
