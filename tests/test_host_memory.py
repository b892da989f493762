"""Host memory for copies, and the copies of asynchronous saves in it."""

import torch

from lib.checkpoints.tensor_files import HostCopy, locals_of
from lib.model.host_memory import ALIGNMENT, PAGE, HostMemory


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


def test_copies_stay_as_they_were_taken_and_grow_when_moments_appear():
    weights = {"actor/model": {"w": (torch.arange(6.0).view(2, 3), (0, 0)), "b": (torch.ones(2), (2,))}}
    copy = HostCopy()
    first = copy.take(weights)
    for source in locals_of(weights):
        source.add_(1)
    assert first["actor/model"]["w"][0].tolist() == [[0, 1, 2], [3, 4, 5]] and first["actor/model"]["b"][1] == (2,)
    again = copy.take(weights)
    assert again["actor/model"]["w"][0].data_ptr() == first["actor/model"]["w"][0].data_ptr()  # no memory is taken
    grown = weights | {"actor/optim": {"exp_avg.w": (torch.full((2, 3), 0.5), (0, 0))}}
    taken = copy.take(grown)
    assert list(taken) == ["actor/model", "actor/optim"]
    for source, ours in zip(locals_of(grown), locals_of(taken), strict=True):
        assert torch.equal(source, ours)
