"""Packed causal attention by cuDNN, whose kernels are written for Hopper; torch's are of the generation before it.

The package is nvidia-cudnn-frontend, which vLLM needs on a GPU too. A plan, cuDNN's choice and compilation of a kernel,
holds for one number of sequences and anything up to one length; both come in a few sizes, so that plans are few.
"""

import functools
import warnings
from typing import Any

import torch
from torch import Tensor


def has_cudnn() -> bool:
    """Whether this process has a Hopper GPU and a cuDNN that knows packed sequences on it (9.6)."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return False
    try:
        import cudnn
    except ImportError:
        warnings.warn("training's attention is slower without the package nvidia-cudnn-frontend", stacklevel=2)
        return False
    return cudnn.backend_version() >= 90600


def attend_by_cudnn(q: Tensor, k: Tensor, v: Tensor, cu_seq_lens: Tensor, max_len: int, scale: float) -> Tensor:
    """Causal attention within each sequence: q (N, heads, d), k and v (N, kv_heads, d), bfloat16, d a multiple of 16 up
    to 128; cu_seq_lens (S + 1,) the sequences' borders, the last ones may be empty; gives (N, heads, d)."""
    borders = cu_seq_lens.long()  # numbers of a large micro-batch do not fit 32 bits
    (_, heads, dim), kv_heads = q.shape, k.shape[1]
    places = (borders * (heads * dim), borders * (kv_heads * dim), borders * heads)
    return _forward(q, k, v, *places, cu_seq_lens.diff(), max_len, scale)[0]


@torch.library.custom_op("lockstep::packed_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, q_places: Tensor, kv_places: Tensor, stats_places: Tensor, lens: Tensor,
    max_len: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result (N, heads, d), and the log of each row's sum of exponentials, (N, heads) float32."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty_like(q)
    stats = q.new_empty(q.shape[:2], dtype=torch.float32)
    tensors = dict(q=q, k=k, v=v, o=out, stats=stats)
    _run(False, tensors, (q_places, kv_places, stats_places, lens), max_len, scale)
    return out, stats


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("lockstep::packed_attention_backward", mutates_args=())
def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, q_places: Tensor, kv_places: Tensor,
    stats_places: Tensor, lens: Tensor, max_len: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    q, k, v, d_out = q.contiguous(), k.contiguous(), v.contiguous(), d_out.contiguous()
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    tensors = dict(q=q, k=k, v=v, o=out, stats=stats, do=d_out)
    tensors |= zip(("dq", "dk", "dv"), gradients, strict=True)
    _run(True, tensors, (q_places, kv_places, stats_places, lens), max_len, scale)
    return gradients[0], gradients[1], gradients[2]


@_backward.register_fake
def _(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *places, ctx.max_len, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, *places)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, d_out: Tensor, _: None) -> tuple[Tensor | None, ...]:
    return *_backward(d_out, *ctx.saved_tensors, ctx.max_len, ctx.scale), *(None,) * 6


_forward.register_autograd(_differentiate, setup_context=_keep)


def _run(is_backward: bool, tensors: dict[str, Tensor], places: tuple[Tensor, ...], max_len: int, scale: float) -> None:
    """Launches the kernel on torch's stream; nothing waits."""
    import cudnn

    q, k = tensors["q"], tensors["k"]
    unit = max(128, 2 ** (max_len.bit_length() - 3))  # a quarter of the power of two below it
    most_tokens = -(-len(q) // 8192) * 8192 if is_backward else 0  # for its workspace
    graph, names, size = _plan(
        is_backward, q.device.index, len(places[3]), -(-max_len // unit) * unit, most_tokens,
        *q.shape[1:], k.shape[1], scale,
    )  # fmt: skip
    tensors |= zip(("q_places", "kv_places", "stats_places", "lens"), places, strict=True)
    handle = _handle(q.device.index)
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(q.device).cuda_stream)
    workspace = q.new_empty(size, dtype=torch.uint8)
    graph.execute({names[name]: tensor for name, tensor in tensors.items()}, workspace, handle=handle)


@functools.cache
def _handle(device: int) -> Any:
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


@functools.cache
def _plan(
    is_backward: bool, device: int, num_seqs: int, longest: int, most_tokens: int, heads: int, dim: int, kv_heads: int,
    scale: float,
) -> tuple[Any, dict[str, Any], int]:  # fmt: skip
    """cuDNN's graph, its tensors by name, and the bytes of its workspace."""
    import cudnn

    types = cudnn.data_type
    graph = cudnn.pygraph(
        io_data_type=types.BFLOAT16, intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT,
        handle=_handle(device),
    )  # fmt: skip
    names: dict[str, Any] = {}

    def numbers(name: str, count: int, dtype: Any) -> Any:
        names[name] = graph.tensor(name=name, dim=[count, 1, 1, 1], stride=[1, 1, 1, 1], data_type=dtype)
        return names[name]

    q_places, kv_places, stats_places = (
        numbers(name, num_seqs + 1, types.INT64) for name in ("q_places", "kv_places", "stats_places")
    )
    lens = numbers("lens", num_seqs, types.INT32)
    of_q, of_kv, of_stats = (
        ([num_seqs, h, longest, d], [longest * h * d, d, h * d, 1], place)
        for h, d, place in ((heads, dim, q_places), (kv_heads, dim, kv_places), (heads, 1, stats_places))
    )

    def read(name: str, layout: Any, dtype: Any = types.BFLOAT16) -> Any:
        names[name] = graph.tensor(name=name, dim=layout[0], stride=layout[1], data_type=dtype)
        return names[name].set_ragged_offset(layout[2])

    def write(name: str, tensor: Any, layout: Any, dtype: Any = types.BFLOAT16) -> None:
        tensor.set_output(True).set_dim(layout[0]).set_stride(layout[1]).set_data_type(dtype)
        tensor.set_ragged_offset(layout[2])
        names[name] = tensor

    causal = dict(attn_scale=scale, use_causal_mask=True, use_padding_mask=True, seq_len_q=lens, seq_len_kv=lens)
    q, k, v = read("q", of_q), read("k", of_kv), read("v", of_kv)
    if is_backward:
        o, d_o, stats = read("o", of_q), read("do", of_q), read("stats", of_stats, types.FLOAT)
        dq, dk, dv = graph.sdpa_backward(
            q=q, k=k, v=v, o=o, dO=d_o, stats=stats, max_total_seq_len_q=most_tokens, max_total_seq_len_kv=most_tokens,
            **causal,
        )  # fmt: skip
        write("dq", dq, of_q)
        write("dk", dk, of_kv)
        write("dv", dv, of_kv)
    else:
        o, stats = graph.sdpa(q=q, k=k, v=v, generate_stats=True, **causal)
        write("o", o, of_q)
        write("stats", stats, of_stats, types.FLOAT)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return graph, names, max(graph.get_workspace_size(), 1)
