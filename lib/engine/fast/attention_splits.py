"""Fast path: attention is not split where sequences alone fill the GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from lib.engine.fast.needs import FastPath, Has, Replaces

BUILDER = "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder"
FULL_WAVES = 8
"""A GPU's processors are busy to the end without splits where there are this many sequences and heads for each."""


@contextmanager
def split_less() -> Iterator[None]:
    """Keeps vLLM from splitting every sequence's attention where sequences alone fill the GPU.

    In a CUDA graph its kernel always gets 32 places for parts of a sequence and a second kernel that sums them: worth
    it for few sequences, 8 % of the attention of 512. Engines that are built from now on, also after the context: the
    graph of a number of sequences is captured and replayed with the same answer.
    """
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    if hasattr(FlashAttentionMetadataBuilder, "plain_build"):  # for an earlier engine
        yield
        return
    plain = FlashAttentionMetadataBuilder.build
    num_processors = torch.cuda.get_device_properties().multi_processor_count

    @wraps(plain)  # so that the next engine finds the same signature
    def build(self: Any, common_prefix_len: int, common_attn_metadata: Any, *rest: Any, **named: Any) -> Any:
        most = self.max_num_splits
        if common_attn_metadata.num_reqs * self.num_heads_kv >= FULL_WAVES * num_processors:
            self.max_num_splits = min(most, 1)  # 0 is vLLM's own choice, without graphs
        try:
            return plain(self, common_prefix_len, common_attn_metadata, *rest, **named)
        finally:
            self.max_num_splits = most

    FlashAttentionMetadataBuilder.plain_build, FlashAttentionMetadataBuilder.build = plain, build
    yield


PATH = FastPath(
    name="attention splits",
    tested=("0.26",),
    on_gpu_only=True,
    while_building=split_less,
    needs=(
        Replaces(f"{BUILDER}.build", "self common_prefix_len common_attn_metadata fast_build"),
        Has(BUILDER, "max_num_splits num_heads_kv"),
        Has("vllm.v1.attention.backend:CommonAttentionMetadata", "num_reqs"),
    ),
)
