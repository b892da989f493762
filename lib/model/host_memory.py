"""Host memory that a GPU copies to and from at full speed: taken once, page-locked, used again and again.

The kernel hands fresh memory out page by page: a copy into it ran at 1.3 GB/s beside an H200, one into memory that was
there and locked at 55 GB/s (EXPERIMENTS.md). Locked by hand, since torch rounds its own page-locked tensors up to a
power of two.
"""

import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes at whose multiples tensors begin
PAGE = 4096  # bytes; what is locked begins and ends with a page, of which no other block has a part


class HostMemory:
    """Zeros in the shapes and dtypes of other tensors, in one block that is page-locked as long as this object lives.

    It is not locked without a GPU, nor where the system forbids it, which costs speed alone.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        """Seconds for some ten GB. Raises MemoryError."""
        starts, end = [], 0
        for tensor in like:
            starts.append(end)
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self.num_bytes = -(-end // PAGE) * PAGE
        try:
            block = torch.zeros(self.num_bytes + PAGE, dtype=torch.uint8)
        except RuntimeError as error:  # torch has no class of its own for it
            raise MemoryError(f"{self.num_bytes / 1e9:,.1f} GB of host memory refused") from error
        block = block[-block.data_ptr() % PAGE :][: self.num_bytes]
        self.is_locked = False
        if end and torch.cuda.is_initialized():
            runtime, address = torch.cuda.cudart(), block.data_ptr()
            self.is_locked = int(runtime.cudaHostRegister(address, self.num_bytes, 0)) == 0
            if self.is_locked:
                weakref.finalize(self, runtime.cudaHostUnregister, address)
            else:
                with suppress(RuntimeError):  # the error is kept for the next kernel to raise: this one
                    torch.zeros(1, device="cuda")
        self.tensors = [
            block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, like, strict=True)
        ]
