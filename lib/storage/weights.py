"""The weights of a model, wherever they lie: a Hugging Face folder, a checkpoint's shards, or an adapter and its base.

All are read one tensor at a time.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from lib.dist import World
from lib.errors import DamagedCheckpoint, UserError
from lib.storage.adapter import (
    Adapter,
    adapter_shapes,
    as_one_product,
    effective_weight,
    factors_of,
    hash_tensor,
    read_adapter,
    refuse_other_base,
)
from lib.storage.weight_headers import Shape, shards_beside, some
from lib.storage.whole_tensors import ANOTHER, SafetensorsFolder, Shards, ShardsFolder, refuse_too_large


class AdaptedFolder:
    """The weights of a base model with an adapter added: the engine's in training, bit for bit."""

    def __init__(self, path: Path, adapter: Adapter, factors: "Factors", *, base: Path | None = None) -> None:
        """`path`: the adapter's. `base`: where somebody says that its model is now. Raises UserError when that is not
        there, or is another model, DamagedCheckpoint for an adapter that does not fit its own."""
        folder = base or Path(adapter.base)
        if not folder.is_dir():
            raise UserError(
                f"the model under an adapter is gone; {path}; found no {folder}, which it was trained on; put that "
                "model back there, or merge with python merge.py --base DIR"
            )
        self.path, self._adapter, self._base_path = path, adapter, folder
        self._base, self._factors = open_weights(folder), factors
        self.files = self._base.files
        known = {factor for name in self.files for factor in factors_of(name, with_start=True)}
        if unknown := sorted({*factors.shapes} - known):
            if base is not None:
                raise refuse_other_base(unknown[0].rpartition(".")[0] + ".weight", base)
            raise DamagedCheckpoint(
                f"an adapter does not fit its base model; {path}; found {some(unknown)}, expected factors of the "
                f"weights in {folder}; {ANOTHER}"
            )

    def read(self, name: str) -> Tensor:
        """One whole tensor in the precision of the training. Raises UserError when the base model is another."""
        weight = self._base.read(name)
        if name in self._adapter.tensors and hash_tensor(weight) != self._adapter.tensors[name]:
            raise refuse_other_base(name, self._base_path)
        weight = weight.to(dtype := getattr(torch, self._adapter.dtype))
        factors = {each: self._factors.shapes.get(each) for each in factors_of(name, with_start=True)}
        if not any(factors.values()):
            return weight
        factors = {each: shape for each, shape in factors.items() if shape is not None}
        rank = (*next(iter(factors.values())), 0)[0]  # of A, (rank, in)
        expected = adapter_shapes({name: tuple(weight.shape)}, [name], rank, with_start=len(factors) == 4)
        if factors != expected:
            raise DamagedCheckpoint(
                f"an adapter's factors do not fit their weight; {name} in {self.path}; found {factors}, expected "
                f"{expected}; {ANOTHER}"
            )
        product = as_one_product(*(self._factors.read(each).to(dtype) for each in factors))
        return effective_weight(weight, *product, self._adapter.scale)


class Factors(Protocol):
    """Of an adapter: a checkpoint's shards, or a folder of peft's."""

    shapes: Mapping[str, Shape]
    """{name: shape}, of NAME.lora_A and the like."""

    def read(self, name: str) -> Tensor:
        """One of them, whole, float32."""


@dataclass(frozen=True, kw_only=True)
class AdaptedTensor:
    """One of them, as merge.py reads a checkpoint's (`ShardedTensor`)."""

    name: str
    shape: Shape
    dtype: torch.dtype
    folder: AdaptedFolder

    def check(self) -> None:
        """Nothing: what is wrong shows when it is read."""

    def read(self, dtype: torch.dtype) -> Tensor:
        """The whole tensor in `dtype`. Raises as `AdaptedFolder.read`, DamagedCheckpoint for one of another shape or
        that is not finite, UserError for one that is not finite in `dtype`."""
        found = self.folder.read(self.name)
        if tuple(found.shape) != self.shape or not bool(torch.isfinite(found).all()):
            raise DamagedCheckpoint(
                f"a weight with its adapter is not what config.json describes; {self.name} in {self.folder.path}; "
                f"found {list(found.shape)}, expected finite numbers of shape {list(self.shape)}; {ANOTHER}"
            )
        if not bool(torch.isfinite(tensor := found.to(dtype)).all()):
            raise refuse_too_large(self.name, self.folder.path, found, dtype)
        return tensor


def adapted_shards(path: Path, adapter: Adapter, shapes: Mapping[str, Shape], *, base: Path | None) -> Shards:
    """The weights with a checkpoint's adapter added, of these shapes, unread. Raises as `AdaptedFolder`."""
    folder = AdaptedFolder(path, adapter, ShardsFolder(shards_beside(path)), base=base)
    dtype = getattr(torch, adapter.dtype)
    return Shards(
        folder=path,
        tensors={
            name: AdaptedTensor(name=name, shape=shape, dtype=dtype, folder=folder)
            for name, shape in shapes.items()
            if name in folder.files
        },
    )


def open_weights(folder: str | Path) -> SafetensorsFolder | ShardsFolder | AdaptedFolder:
    """The weights of a model folder: its own, or, of a checkpoint's `huggingface`, those of the shards beside it."""
    folder = Path(folder)
    shards = shards_beside(folder)
    if shards is None:
        return SafetensorsFolder(folder)
    adapter = read_adapter(folder)
    factors = ShardsFolder(shards)
    return factors if adapter is None else AdaptedFolder(folder, adapter, factors)


def hash_tensors(folder: Path, world: World) -> dict[str, str]:
    """{name: hash} of all weights of a model folder. Executed by all ranks together, which share the work."""

    def run() -> dict[str, str]:
        weights = open_weights(folder)
        own = sorted(weights.files)[world.rank :: world.size]
        with ThreadPoolExecutor(4) as pool:  # hashing lets other threads run
            return dict(zip(own, pool.map(lambda name: hash_tensor(weights.read(name)), own), strict=True))

    return {name: digest for of_rank in world.gather(world.agree(run)) for name, digest in of_rank.items()}
