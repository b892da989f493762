"""The tensors of verl's FSDP checkpoints, so that a run from there can be merged: model_world_size_W_rank_R.pt.

These are pickles of dicts {name: DTensor or tensor}. They are opened with torch's restricted unpickler, and even
torch's own distributed classes are replaced by stand-ins that only keep what the file says about them: no code of the
file's choice runs, no process group is needed, and files of torch 2.4 to 2.13, whose classes differ, read alike.
"""

import math
import pickle
import re
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lib.errors import DamagedCheckpoint, UserError
from lib.storage.weight_headers import Shape, read_json
from lib.storage.whole_tensors import ANOTHER, Piece, ShardedTensor, Shards

RANK_FILE = re.compile(r"model_world_size_([1-9][0-9]*)_rank_(0|[1-9][0-9]*)\.pt")


class SavedDTensor(torch.Tensor):
    """Stands in for a DTensor: the whole tensor's shape, with the rank's own part and its spec as attributes."""

    _local_tensor: Tensor
    _spec: "Saved"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


class Saved:
    """Stands in for an object of torch's: its attributes."""

    def __new__(cls, *args: Any) -> "Saved":
        return object.__new__(cls)

    def __init__(self, *args: Any) -> None:
        pass


def _stand_in(name: str) -> type:
    return SavedDTensor if name == "DTensor" else type(name, (Saved,), {})


MODULES = (  # of torch, where one or the other release has these classes
    "torch.distributed.device_mesh",
    "torch.distributed._mesh_layout",
    "torch.distributed._tensor",
    "torch.distributed._tensor.api",
    "torch.distributed._tensor.placement_types",
    "torch.distributed._tensor._dtensor_spec",
    "torch.distributed.tensor",
    "torch.distributed.tensor._api",
    "torch.distributed.tensor.placement_types",
    "torch.distributed.tensor._dtensor_spec",
)
CLASSES = {
    name: _stand_in(name)
    for name in ("DTensor", "DTensorSpec", "TensorMeta", "ShardOrderEntry", "DeviceMesh", "_MeshLayout", "_FlatLayout",
                 "Shard", "_StridedShard", "Replicate", "Partial", "_Partial")
}  # fmt: skip
STAND_INS = [(stand_in, f"{module}.{name}") for module in MODULES for name, stand_in in CLASSES.items()]


def is_verl(folder: Path) -> bool:
    """Whether the folder has rank files of verl's."""
    return any(RANK_FILE.fullmatch(entry.name) for entry in folder.iterdir())


def read_verl_shards(folder: Path, *, verify: bool = True) -> Shards:
    """The tensors of a folder of model_world_size_W_rank_R.pt, unread. `verify` compares every file with its CRC-32s.

    Raises DamagedCheckpoint for ranks that are missing or contradict each other, or a file that is not whole; UserError
    for a pickle with anything but tensors in it, and for layouts that FSDP does not make.
    """
    files = _rank_files(folder)
    if verify:
        for file in files:
            _check_crc(file)
    maps: dict[Path, dict[str, Tensor]] = {}

    def load(file: Path) -> dict[str, Tensor]:
        if file not in maps:
            maps[file] = _load(file)
        return maps[file]

    parts: dict[str, list[tuple[Path, Tensor]]] = {}
    for file in files:
        for name, tensor in load(file).items():
            parts.setdefault(name, []).append((file, tensor))
    try:
        tensors = {name: _sharded_tensor(name, found, files, load) for name, found in parts.items()}
    except (AttributeError, TypeError, ValueError) as error:  # stand-ins without the attributes of what they stand for
        raise DamagedCheckpoint(
            f"shards in a layout that is not known; {folder}; found {error!r}, expected DTensors of torch 2.4 to 2.13; "
            "save them with one of these releases"
        ) from error
    return Shards(folder=folder, tensors=tensors, release=maps.clear)


def _rank_files(folder: Path) -> list[Path]:
    """The file of every rank, in rank order."""
    matches = [match for entry in folder.iterdir() if (match := RANK_FILE.fullmatch(entry.name))]
    sizes = {int(match[1]) for match in matches}
    info = folder / "fsdp_config.json"
    if info.exists():
        try:
            sizes.add(int(read_json(info)["world_size"]))
        except (UserError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise DamagedCheckpoint(f"not a description of shards; {info}; found {error!r}; {ANOTHER}") from error
    if len(sizes) > 1:
        raise DamagedCheckpoint(
            f"shards of different numbers of ranks; {folder}; found {sorted(sizes)}, expected one; keep the files of "
            "one save"
        )
    (size,) = sizes
    ranks = {rank for match in matches if (rank := int(match[2])) < size and (folder / match[0]).is_file()}
    missing = next((rank for rank in range(size) if rank not in ranks), None)  # at most one look more than files
    if missing is not None:
        raise DamagedCheckpoint(
            f"shards of some ranks are missing; {folder}; found {len(ranks)} of {size}, expected also "
            f"{_rank_file(size, missing)}; copy the files of all nodes into one folder"
        )
    return [folder / _rank_file(size, rank) for rank in range(size)]


def _rank_file(size: int, rank: int) -> str:
    return f"model_world_size_{size}_rank_{rank}.pt"


def _check_crc(file: Path) -> None:
    """torch.save writes a zip file, which has a checksum for every storage; torch.load never looks at it."""
    try:
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError) as error:
        raise DamagedCheckpoint(f"not a whole shard; {file}; found {error}; {ANOTHER}") from error
    if bad is not None:
        raise DamagedCheckpoint(f"a shard was changed after it was written; {file}; found {bad} damaged; {ANOTHER}")


def _load(file: Path) -> dict[str, Tensor]:
    """A rank's tensors, mapped. Only the stand-ins are allowed, whatever else this process has registered as safe."""
    registered = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(STAND_INS)
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        reason = " ".join(str(error).split()).partition("was not an allowed")[0][-200:]
        raise UserError(
            f"a pickle that may run code, refused; {file}; found {reason.strip()}, expected only tensors; do not use "
            "this file, unless you trust it and can save it anew as a dict of tensors"
        ) from error
    except Exception as error:  # the unpickler raises what it likes on bytes that are no pickle
        raise DamagedCheckpoint(f"not a whole shard; {file}; found {error!r:.200}; {ANOTHER}") from error
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(registered)
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(
            f"not the weights of a model; {file}; found {type(state).__name__}, expected a dict of tensors; give a "
            "folder that verl's FSDP checkpoint manager wrote"
        )
    return state


def _sharded_tensor(
    name: str, found: list[tuple[Path, Tensor]], files: list[Path], load: Callable[[Path], dict[str, Tensor]]
) -> ShardedTensor:
    """One tensor from what every rank has of it: a DTensor, or a plain tensor, of which all ranks have a copy."""
    if len(found) != len(files):
        raise DamagedCheckpoint(
            f"a tensor is not in all shards; {name} in {files[0].parent}; found in {len(found)} of {len(files)}; "
            f"{ANOTHER}"
        )
    pieces, copies = [], []
    for rank, (file, tensor) in enumerate(found):
        sharded = isinstance(tensor, SavedDTensor)
        local = tensor._local_tensor if sharded else tensor
        offsets, shape, first = (0,) * local.dim(), tuple(local.shape), rank == 0
        if sharded:
            offsets, shape, first = _place(name, tensor, rank, len(files), file)
        if shape != tuple(local.shape):
            raise DamagedCheckpoint(
                f"a rank's part has another shape than its layout says; {name} in {file}; found {list(local.shape)}, "
                f"expected {list(shape)}; {ANOTHER}"
            )
        piece = Piece(file=file, offsets=offsets, shape=shape, dtype=local.dtype, read=partial(_read, load, file, name))
        (pieces if first else copies).append(piece)
    return ShardedTensor(name=name, shape=tuple(found[0][1].shape), pieces=tuple(pieces), copies=tuple(copies))


def _read(load: Callable[[Path], dict[str, Tensor]], file: Path, name: str) -> Tensor:
    tensor = load(file)[name]
    return tensor._local_tensor if isinstance(tensor, SavedDTensor) else tensor


def _place(name: str, tensor: SavedDTensor, rank: int, num_ranks: int, file: Path) -> tuple[Shape, Shape, bool]:
    """(offsets, shape) of a rank's part, and whether no lower rank has the same part.

    A dimension of the mesh cuts a dimension of the tensor as torch.chunk does: into parts of ceil(size / ranks), the
    last ones smaller or empty. Ranks are numbered through the mesh with its last dimension fastest.
    """
    spec = tensor._spec
    sizes, placements = _mesh_sizes(spec.mesh), spec.placements
    kinds = {type(placement).__name__ for placement in placements}
    if math.prod(sizes) != num_ranks or len(placements) != len(sizes) or not kinds <= {"Shard", "Replicate"}:
        raise UserError(
            f"a layout that is not FSDP's; {name} in {file}; found {', '.join(sorted(kinds))} on a mesh of "
            f"{list(sizes)} for {num_ranks} ranks, expected Shard or Replicate on one mesh of all ranks; save with "
            "FSDP alone (one or two mesh dimensions)"
        )
    offsets, shape, first = [0] * tensor.dim(), list(tensor.shape), True
    for place, (size, placement) in enumerate(zip(sizes, placements, strict=True)):
        at = rank // math.prod(sizes[place + 1 :]) % size
        if type(placement).__name__ == "Replicate":
            first = first and at == 0
            continue
        whole = shape[placement.dim]
        chunk = -(-whole // size)
        start = min(at * chunk, whole)
        offsets[placement.dim] += start
        shape[placement.dim] = min(chunk, whole - start)
    return tuple(offsets), tuple(shape), first


def _mesh_sizes(mesh: Saved) -> Shape:
    """The sizes of a saved DeviceMesh, whose attributes differ between releases of torch."""
    if hasattr(mesh, "mesh"):  # the ranks themselves, as a tensor
        return tuple(mesh.mesh.shape)
    layout = mesh._layout
    axes = [axis.shape for axis in layout.axes] if hasattr(layout, "axes") else layout.shape
    axes = axes if isinstance(axes, list | tuple) else [axes]
    return tuple(math.prod(axis) if isinstance(axis, tuple) else axis for axis in axes)
