"""Memory for copies in host memory."""

import torch

from lib.host_memory import ALIGNMENT, PAGE, HostMemory


def test_memory_has_the_shapes_asked_for_side_by_side_and_aligned():
    like = [torch.ones(3, 5), torch.ones(()), torch.ones(0, 7), torch.ones(9, dtype=torch.bfloat16), torch.ones(2, 2)]
    memory = HostMemory([tensor.to("meta") for tensor in like])
    for ours, tensor in zip(memory.tensors, like, strict=True):
        assert (ours.shape, ours.dtype, ours.device.type) == (tensor.shape, tensor.dtype, "cpu")
        assert ours.data_ptr() % ALIGNMENT == 0 or not ours.numel()
        assert not ours.any()
        ours.copy_(tensor)
    assert all(torch.equal(ours, tensor) for ours, tensor in zip(memory.tensors, like, strict=True))
    assert memory.tensors[0].data_ptr() % PAGE == memory.num_bytes % PAGE == 0
    assert memory.is_locked == torch.cuda.is_initialized()


def test_no_tensor_needs_no_memory():
    assert HostMemory([]).num_bytes == 0
