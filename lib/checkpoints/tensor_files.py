"""A model's weights and its optimizer's state on disk: one safetensors file a rank, loaded on any number of ranks.

The layout is that of torch.distributed.checkpoint's safetensors storage: a file holds the rank's pieces of sharded
tensors, and its metadata says where each piece begins. torch's reader loads and reshards it; there is no pickle
anywhere. The files are written here, not by torch's writer, which copies a rank's pieces in host memory first and
exchanges pickled plans: this one streams, holds no collective, and so may run in a thread.
"""

import hashlib
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from lib.dist import World
from lib.errors import DamagedCheckpoint, UserError
from lib.model.fsdp import reshard
from lib.model.host_memory import HostMemory
from lib.model.networks import Network
from lib.storage.checkpoint_folder import FileEntry
from lib.storage.whole_tensors import write_safetensors

MOMENTS = ("exp_avg", "exp_avg_sq")

Pieces = dict[str, tuple[Tensor, tuple[int, ...]]]
"""{name: (this rank's part of the tensor, where it begins in each dimension)}."""


# ---- What is saved ----


def model_tensors(model: Network) -> dict[str, Tensor]:
    """{Hugging Face name: parameter} of everything that is trained; what is frozen stays in the folder it came from."""
    reshard(model)
    return {name: parameter.detach() for name, parameter in model.trained().items()}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """{`exp_avg.NAME`, `exp_avg_sq.NAME`, `step.NAME`: tensor} of every parameter that has been updated.

    The moments are sharded like their parameter, also where they are kept on the host.
    """
    reshard(model)
    tensors = {}
    for name, parameter in model.named_parameters():
        if state := optimizer.state.get(parameter):
            tensors[f"step.{name}"] = state["step"]
            tensors |= {f"{moment}.{name}": _like(state[moment], parameter) for moment in MOMENTS}
    return tensors


def own_pieces(tensors: Mapping[str, Tensor], world: World) -> Pieces:
    """What this rank writes: its parts of the sharded tensors, without empty ones; of the others rank 0 writes all."""
    pieces: Pieces = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            if world.rank == 0:
                pieces[name] = tensor, (0,) * tensor.dim()
        elif tensor.to_local().numel():
            (chunk,) = tensor.__create_chunk_list__()
            pieces[name] = tensor.to_local(), tuple(chunk.offsets)
    return pieces


def num_bytes(pieces: Pieces) -> int:
    """The bytes of the tensors, without the file's header."""
    return sum(local.nbytes for local, _ in pieces.values())


class HostCopy:
    """A copy of all pieces in host memory, in the same place for every save."""

    def __init__(self) -> None:
        self._memory: HostMemory | None = None

    def prepare(self, like: Sequence[Tensor]) -> None:
        """Takes memory for tensors like these, unless it is there. Raises MemoryError."""
        shapes = [tensor.shape for tensor in like]  # all are float32
        if self._memory is None or [tensor.shape for tensor in self._memory.tensors] != shapes:
            self._memory = None  # given back first
            self._memory = HostMemory(like)

    def take(self, pieces: Mapping[str, Pieces]) -> dict[str, Pieces]:
        """The pieces as they are now, which training does not touch: valid until the next call. Raises MemoryError."""
        self.prepare(locals_of(pieces))
        places = iter(self._memory.tensors)
        copies = {
            place: {name: (next(places).copy_(local, non_blocking=True), begin) for name, (local, begin) in own.items()}
            for place, own in pieces.items()
        }
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return copies


def locals_of(pieces: Mapping[str, Pieces]) -> list[Tensor]:
    """The tensors of all pieces, in their order."""
    return [local for own in pieces.values() for local, _ in own.values()]


def write_pieces(path: Path, pieces: Pieces) -> FileEntry:
    """Writes a safetensors file, brings it to the disk and gives its size and hash; host memory grows by a chunk.

    Raises OSError.
    """
    tensors = {name: (local.dtype, tuple(local.shape)) for name, (local, _) in pieces.items()}
    sharding = {name: {"saved_offsets": offsets} for name, (_, offsets) in pieces.items()}
    about = {"DCP_SHARDING_INFO": json.dumps(sharding), "DCP_VERSION": "1.0"}
    digest = hashlib.sha256()
    size = write_safetensors(path, tensors, (local for local, _ in pieces.values()), about, update=digest.update)
    return FileEntry(size, digest.hexdigest())


def _like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The tensor, sharded like the parameter whose shard it belongs to."""
    if isinstance(tensor, DTensor) or not isinstance(parameter, DTensor):
        return tensor
    mesh = parameter.device_mesh
    if tensor.device.type != mesh.device_type:  # or torch would move the tensor to the mesh's device
        mesh = _mesh(tensor.device.type, mesh.size())
    return DTensor.from_local(
        tensor, mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


@cache
def _mesh(device_type: str, size: int) -> DeviceMesh:
    return init_device_mesh(device_type, (size,))


# ---- What is loaded ----


def load_model_(folder: Path, model: nn.Module, world: World) -> None:
    """Fills the model's trained parameters from the files of all ranks that wrote them.

    Raises UserError when they belong to another model, DamagedCheckpoint when pieces are missing, on all ranks and
    before a parameter is written. Executed by all ranks together.
    """
    tensors = model_tensors(model)
    world.agree(lambda: _check(folder, tensors))
    world.agree(lambda: _read_(folder, tensors))


def load_optimizer_(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Gives a new optimizer the saved state of every parameter that has one. Errors as for the model."""
    reshard(model)
    saved = world.agree(lambda: _saved(folder))
    for name, parameter in model.named_parameters():
        if f"step.{name}" in saved and parameter.requires_grad and not optimizer.state.get(parameter):
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),  # where AdamW's fused kernel wants it
                **{moment: torch.zeros_like(parameter).detach() for moment in MOMENTS},
            }
    updated = {name.partition(".")[2] for name in saved}  # of the others a HostAdamW has zeros already
    held = optimizer_tensors(model, optimizer)
    tensors = {name: tensor for name, tensor in held.items() if name.partition(".")[2] in updated}
    world.agree(lambda: _check(folder, tensors))
    world.agree(lambda: _read_(folder, tensors))


def _saved(folder: Path) -> dict[str, dcp.metadata.TensorStorageMetadata]:
    """What the folder's files hold, from their headers."""
    try:
        return dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except Exception as error:  # safetensors raises a class of its own, the reader KeyError and others
        raise DamagedCheckpoint(
            f"a checkpoint's tensors cannot be read; {folder}; found {type(error).__name__}: {error}, expected the "
            "safetensors files that its ranks wrote; continue from another checkpoint"
        ) from error


def _check(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises unless the files hold exactly these tensors, whole, in these shapes and dtypes."""
    saved = _saved(folder)
    if problems := _differences(saved, tensors):
        raise UserError(
            f"the checkpoint is of another model; {folder}; {'; '.join(problems[:3])}"
            f"{f'; and {len(problems) - 3} more' if len(problems) > 3 else ''}; give the --model.path that the "
            "checkpoint was trained from, or start a new run"
        )
    for name, entry in saved.items():
        held = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        if held != math.prod(entry.size):
            raise DamagedCheckpoint(
                f"a checkpoint lacks part of a tensor; {name} in {folder}; found pieces of {held} elements, expected "
                f"{math.prod(entry.size)}; continue from another checkpoint"
            )


def _differences(saved: Mapping[str, dcp.metadata.TensorStorageMetadata], tensors: Mapping[str, Tensor]) -> list[str]:
    found = []
    for name in sorted({*saved, *tensors}):
        if name not in saved:
            found.append(f"it lacks {name}")
        elif name not in tensors:
            found.append(f"it holds {name}, which the model has not")
        elif saved[name].size != tensors[name].shape:
            found.append(f"{name} is {list(saved[name].size)} there and {list(tensors[name].shape)} here")
        elif saved[name].properties.dtype != tensors[name].dtype:
            found.append(f"{name} is {saved[name].properties.dtype} there and {tensors[name].dtype} here")
    return found


def _read_(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Copies this rank's parts of the tensors from whichever files hold them. No collective."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # meant: ranks need no common plan to read
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
