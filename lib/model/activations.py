"""What autograd keeps of a pass through a decoder until the backward pass, counted without memory for it."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

NUM_TOKENS = 251  # of the pass that is counted: a prime, by which no size of a weight is likely to divide


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Bytes that a forward pass keeps for its backward pass, beside weights and logits."""

    per_token: int
    at_all: int = 0
    """Whatever the number of tokens, such as weights with an adapter's product added."""


def count_kept(decoder: nn.Module, layers: list[nn.Module], *, dtype: torch.dtype, compiled: bool) -> Kept:
    """What one pass through a decoder on the meta device keeps; the decoder is not changed.

    `layers` are the decoder's, `dtype` is its compute precision, `compiled` says whether layers are compiled: then they
    are traced and cut into forward and backward pass as inductor cuts them. Every storage that autograd is given counts
    once. Takes about a second.
    """
    memo: dict[int, Any] = {}
    decoder = copy.deepcopy(decoder, memo).to(dtype).train()
    if compiled:
        for layer in (memo[id(layer)] for layer in layers):
            layer.forward = torch.compile(layer.forward, backend="aot_eager_decomp_partition", fullgraph=True)
    for module in decoder.children():
        if not any(True for _ in module.parameters()):
            _compute_on_host(module)
    kept = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage  # itself, so that no other one comes to lie there
        return tensor

    borders = torch.tensor([0, NUM_TOKENS], dtype=torch.int32, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = decoder(
            input_ids=torch.zeros(1, NUM_TOKENS, dtype=torch.long, device="meta"),
            position_ids=torch.arange(NUM_TOKENS)[None], cu_seq_lens_q=borders, cu_seq_lens_k=borders,
            max_length_q=NUM_TOKENS, max_length_k=NUM_TOKENS, use_cache=False,
        )  # fmt: skip
    del result
    weights = {parameter.untyped_storage()._cdata for parameter in decoder.parameters()}
    sizes = [storage.nbytes() for place, storage in kept.items() if place not in weights]
    of_tokens = sum(size for size in sizes if size % NUM_TOKENS == 0)
    return Kept(per_token=of_tokens // NUM_TOKENS, at_all=sum(sizes) - of_tokens)


def _compute_on_host(module: nn.Module) -> None:
    """Lets a module without weights, such as rotary tables, see real numbers: some choose by the longest position."""

    def to_host(_: nn.Module, args: Any, keywords: Any) -> Any:
        return tree_map_only(Tensor, _on_host, (args, keywords))

    def to_meta(_: nn.Module, __: Any, result: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: tensor.to("meta"), result)

    module.register_forward_pre_hook(to_host, with_kwargs=True)
    module.register_forward_hook(to_meta)


def _on_host(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor
