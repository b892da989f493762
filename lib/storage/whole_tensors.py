"""The tensors of a sharded checkpoint, put together one at a time, in one process, on the CPU.

Reads what `torch.distributed.checkpoint` writes with its safetensors storage: one file a rank, in whose metadata
DCP_SHARDING_INFO says at which offsets of the whole tensor a piece belongs.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lib.errors import DamagedCheckpoint, UserError
from lib.regular_files import check_regular
from lib.storage.weight_headers import DOWNLOAD_AGAIN, Shape, iter_weight_files

WRITE_BYTES = 2**26  # bytes that a write brings from the GPU at once
ANOTHER = "use another checkpoint of the run, or copy this one again"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A rectangle of a tensor, in one file. `offsets` and `shape` have one number a dimension."""

    file: Path
    offsets: Shape
    shape: Shape
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where the piece belongs in the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.shape, strict=True))


@dataclass(frozen=True, kw_only=True)
class ShardedTensor:
    """A tensor in pieces; `copies` are further pieces that must hold what the tensor holds at their place."""

    name: str
    shape: Shape
    pieces: tuple[Piece, ...]
    copies: tuple[Piece, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """The precision that the checkpoint keeps it in."""
        return self.pieces[0].dtype

    def check(self) -> None:
        """Raises DamagedCheckpoint unless every number of the tensor is in exactly one piece. Reads no numbers."""
        pieces = [piece for piece in self.pieces if 0 not in piece.shape]
        for piece in (*self.pieces, *self.copies):
            inside = (at + n <= size for at, n, size in zip(piece.offsets, piece.shape, self.shape, strict=True))
            if piece.dtype != self.dtype or not all(inside):
                raise DamagedCheckpoint(
                    f"a piece does not belong to its tensor; {self.name} in {piece.file}; found {list(piece.shape)} "
                    f"{piece.dtype} at {list(piece.offsets)}, expected part of {list(self.shape)} {self.dtype}; "
                    f"{ANOTHER}"
                )
        for a, b in combinations(pieces, 2):
            if all(
                max(i, k) < min(i + n, k + m) for i, n, k, m in zip(a.offsets, a.shape, b.offsets, b.shape, strict=True)
            ):
                raise DamagedCheckpoint(
                    f"two pieces of a tensor overlap; {self.name} in {a.file} and {b.file.name}; found offsets "
                    f"{list(a.offsets)} and {list(b.offsets)}, expected every number once; {ANOTHER}"
                )
        found, expected = sum(math.prod(piece.shape) for piece in pieces), math.prod(self.shape)
        if found != expected:
            files = ", ".join(sorted({piece.file.name for piece in pieces})) or "no file"
            raise DamagedCheckpoint(
                f"pieces of a tensor are missing; {self.name} in {self.pieces[0].file.parent}; found {found} of "
                f"{expected} numbers, in {files}; {ANOTHER}"
            )

    def read(self, dtype: torch.dtype) -> Tensor:
        """The whole tensor, cast piece by piece: host memory for it and one piece.

        Raises DamagedCheckpoint when copies differ, UserError when a number is not finite in `dtype`.
        """
        whole = torch.empty(self.shape, dtype=dtype)
        for piece in self.pieces:
            found = piece.read()
            part = whole[piece.slices]
            part.copy_(found)
            if not bool(torch.isfinite(part).all()):
                self._refuse_infinite(piece, found, dtype)
        for piece in self.copies:
            if not torch.equal(whole[piece.slices], piece.read().to(dtype)):
                raise DamagedCheckpoint(
                    f"ranks hold different values of one tensor; {self.name} in {self.pieces[0].file} and "
                    f"{piece.file.name}; found a difference at {list(piece.offsets)}, expected copies; {ANOTHER}"
                )
        return whole

    def _refuse_infinite(self, piece: Piece, found: Tensor, dtype: torch.dtype) -> None:
        if bool(torch.isfinite(found).all()):
            raise refuse_too_large(self.name, piece.file, found, dtype)
        raise UserError(
            f"the weights hold NaN or infinity; {self.name} in {piece.file}; found "
            f"{int((~torch.isfinite(found)).sum())} such values; use a checkpoint from before the run diverged"
        )


def refuse_too_large(name: str, where: Path, found: Tensor, dtype: torch.dtype) -> UserError:
    """The error for a finite tensor that is not finite in `dtype`."""
    return UserError(
        f"a weight is too large for {str(dtype).removeprefix('torch.')}; {name} in {where}; found "
        f"{float(found.abs().max()):.3g}, expected at most {torch.finfo(dtype).max:.3g}; use --dtype bfloat16"
    )


@dataclass(frozen=True, kw_only=True)
class Shards:
    """The tensors of a checkpoint by name, and how to let go of files that reading has mapped into memory."""

    folder: Path
    tensors: dict[str, ShardedTensor]
    release: Callable[[], None] = lambda: None


def read_shards(folder: Path) -> Shards:
    """The tensors of a folder of shard-*.safetensors, unread. Raises DamagedCheckpoint for a file that is not whole.

    A tensor is as large as its farthest piece reaches; whether that is all of it, the model's config.json says.
    """
    pieces: dict[str, list[Piece]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, piece in _read_header(file):
            pieces.setdefault(name, []).append(piece)
    return Shards(folder=folder, tensors={name: _assemble(name, found) for name, found in pieces.items()})


def _assemble(name: str, pieces: list[Piece]) -> ShardedTensor:
    if len({len(piece.shape) for piece in pieces}) > 1:
        raise DamagedCheckpoint(
            f"pieces of different tensors have one name; {name} in {pieces[0].file.parent}; found shapes "
            f"{[list(piece.shape) for piece in pieces]}; {ANOTHER}"
        )
    ends = ([at + n for at, n in zip(piece.offsets, piece.shape, strict=True)] for piece in pieces)
    return ShardedTensor(name=name, shape=tuple(map(max, zip(*ends, strict=True))), pieces=tuple(pieces))


def _read_header(file: Path) -> Iterable[tuple[str, Piece]]:
    from safetensors import SafetensorError, safe_open

    check_regular(file, error=DamagedCheckpoint)
    try:
        with safe_open(file, framework="pt") as tensors:
            offsets = json.loads(tensors.metadata()["DCP_SHARDING_INFO"])
            return [(name, _piece(file, tensors, name, offsets)) for name in tensors.keys()]  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise DamagedCheckpoint(
            f"not a whole shard; {file}; found {type(error).__name__}: {error}, expected safetensors with "
            f"DCP_SHARDING_INFO; {ANOTHER}"
        ) from error


def _piece(file, tensors, name: str, offsets: dict) -> Piece:
    view = tensors.get_slice(name)
    shape, start = tuple(view.get_shape()), tuple(int(offset) for offset in offsets[name]["saved_offsets"])
    if len(shape) != len(start) or min(start, default=0) < 0:
        raise ValueError(f"offsets {start} for a piece of shape {shape}")
    return Piece(
        file=file, offsets=start, shape=shape, dtype=DTYPES[view.get_dtype()], read=lambda: read_tensor(file, name)
    )


class ShardsFolder:
    """The tensors of a checkpoint's shards, put together and read one at a time, as a `SafetensorsFolder`'s are."""

    def __init__(self, path: Path) -> None:
        self.path, self._shards = path, read_shards(path)
        self.files = {name: tensor.pieces[0].file for name, tensor in self._shards.tensors.items()}
        self.shapes = {name: tensor.shape for name, tensor in self._shards.tensors.items()}

    def read(self, name: str) -> Tensor:
        """One whole tensor as it was saved. Raises DamagedCheckpoint when a part of it is missing."""
        tensor = self._shards.tensors[name]
        tensor.check()
        whole = tensor.read(tensor.dtype)
        self._shards.release()
        return whole


# ---- The format ----


DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""The safetensors format's names of what torch calls its dtypes."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class SafetensorsFolder:
    """The tensors of a Hugging Face folder, one file or many, read one at a time. Raises UserError."""

    def __init__(self, path: str | Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        self.files: dict[str, Path] = {}
        for file, _ in iter_weight_files(Path(path)):
            try:
                with safe_open(file, framework="pt") as tensors:
                    self.files |= dict.fromkeys(tensors.keys(), file)
            except SafetensorError as error:
                raise UserError(f"not a whole safetensors file; {file}; found {error}; {DOWNLOAD_AGAIN}") from error

    def read(self, name: str) -> Tensor:
        """One tensor as it was saved."""
        return read_tensor(self.files[name], name)


def read_tensor(file: Path, name: str) -> Tensor:
    """One tensor of a safetensors file, which is opened anew: what was read stays in memory until it is closed."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor(name)


def write_safetensors(
    file: Path, tensors: Mapping[str, tuple[torch.dtype, Shape]], numbers: Iterable[Tensor], about: Mapping[str, str],
    *, update: Callable[[Any], None] = lambda part: None,
) -> int:  # fmt: skip
    """8 bytes of little-endian header length, a JSON header, then `numbers`, one tensor for each of `tensors`, written
    as they come and brought to the disk: the format's own library would want all of them in memory. Gives the size of
    what was to be written; a hash's `update` gets all of it meanwhile, in another thread. Raises OSError."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **about}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes

    with open(file, "xb") as stream, ThreadPoolExecutor(1) as hasher:

        def write(part: Any) -> None:
            hashed = hasher.submit(update, part)
            stream.write(part)
            hashed.result()

        write(len(text).to_bytes(8, "little") + text)
        for tensor in numbers:
            for part in tensor.detach().contiguous().view(-1).view(torch.uint8).split(WRITE_BYTES):
                write(part.cpu().numpy())
        stream.flush()
        os.fsync(stream.fileno())
    return len(text) + 8 + end
