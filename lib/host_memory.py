"""Host memory that a GPU copies to and from at full speed: taken once, page-locked, used again and again.

The kernel hands fresh memory out page by page: a copy into it ran at 1.3 GB/s beside an H200, one into memory that was
there and locked at 55 GB/s (EXPERIMENTS.md). Locked by hand, since torch rounds its own page-locked tensors up to a
power of two.
"""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes at whose multiples tensors begin


class HostMemory:
    """Zeros in the shapes and dtypes of other tensors, in one block that is page-locked as long as this object lives.

    It is not locked without a GPU, nor where the system forbids it, which costs speed alone.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        """Seconds for some ten GB."""
        starts, end = [], 0
        for tensor in like:
            starts.append(end)
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        block = torch.zeros(end, dtype=torch.uint8)
        self.num_bytes = end
        self.is_locked = False
        if end and torch.cuda.is_initialized():
            runtime, address = torch.cuda.cudart(), block.data_ptr()
            self.is_locked = int(runtime.cudaHostRegister(address, end, 0)) == 0
            if self.is_locked:
                weakref.finalize(self, runtime.cudaHostUnregister, address)
        self.tensors = [
            block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, like, strict=True)
        ]
