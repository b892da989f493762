"""Fast path: attention is not split where sequences alone fill the GPU."""

from typing import Any

import torch

FULL_WAVES = 8
"""A GPU's processors are busy to the end without splits where there are this many sequences and heads for each."""


def split_less() -> None:
    """Keeps vLLM from splitting every sequence's attention where sequences alone fill the GPU.

    In a CUDA graph its kernel always gets 32 places for parts of a sequence and a second kernel that sums them: worth
    it for few sequences, 8 % of the attention of 512. Engines that are built from now on; the graph of a number of
    sequences is captured and replayed with the same answer.
    """
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    if hasattr(FlashAttentionMetadataBuilder, "plain_build"):
        return  # for an earlier engine
    plain = FlashAttentionMetadataBuilder.build
    num_processors = torch.cuda.get_device_properties().multi_processor_count

    def build(self: Any, common_prefix_len: int, common_attn_metadata: Any, *rest: Any, **named: Any) -> Any:
        most = self.max_num_splits
        if common_attn_metadata.num_reqs * self.num_heads_kv >= FULL_WAVES * num_processors:
            self.max_num_splits = min(most, 1)  # 0 is vLLM's own choice, without graphs
        try:
            return plain(self, common_prefix_len, common_attn_metadata, *rest, **named)
        finally:
            self.max_num_splits = most

    FlashAttentionMetadataBuilder.plain_build, FlashAttentionMetadataBuilder.build = plain, build
