"""How an engine lays a policy's weights out, learned by watching one load through the engine's own loader.

Loaders of vLLM stack, slice, transpose and pad what they are given, per model and per version. All of that are copies
from views of the given tensors into views of the engine's; a dispatch mode sees each of them, with both geometries. So
nothing about a model family is written down here, and what was learned is exact on every tensor-parallel rank.

A copy of a copy (`clone`, a `reshape` of what is transposed) is not followed: it counts as computed, and the loader
does it again at every sync. No dense decoder that can be trained here has one; strides cover all others.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

Part = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset of a part of a tensor, in elements."""


@dataclass(frozen=True)
class Box:
    """A strided part of an engine tensor, and the part of equal shape of a source tensor that fills it.

    Offsets and strides count elements in the tensor's storage, from its first one. `source` None stands for zeros (the
    padding of a vocabulary).
    """

    target: str
    source: str | None
    shape: tuple[int, ...]
    target_offset: int
    target_strides: tuple[int, ...]
    source_offset: int = 0
    source_strides: tuple[int, ...] = ()

    def place(self, target: Tensor) -> Tensor:
        """The box's part of its engine tensor, a view."""
        return target.as_strided(self.shape, self.target_strides, target.storage_offset() + self.target_offset)

    def part(self, source: Tensor) -> Tensor:
        """The box's part of its whole, contiguous source tensor, a view."""
        return source.as_strided(self.shape, self.source_strides, source.storage_offset() + self.source_offset)

    def takes_whole(self, shape: Sequence[int]) -> bool:
        """Whether its part of a source of this shape is all of it, as it lies."""
        whole = torch.empty(tuple(shape), device="meta")
        return (self.shape, self.source_strides, self.source_offset) == (tuple(whole.shape), whole.stride(), 0)


@dataclass(frozen=True)
class Layout:
    """What fills each engine tensor of this rank."""

    boxes: Mapping[str, Sequence[Box]]
    """In the order in which they were written, for engine tensors that copies alone fill, by name."""
    computed: frozenset[str]
    """Engine tensors of which the loader computed a part: only the loader can fill them again."""


def learn_layout(
    load: Callable[[Iterable[tuple[str, Tensor]]], Any], sources: Iterable[tuple[str, Tensor]],
    held: Mapping[str, Tensor],
) -> Layout:  # fmt: skip
    """Loads `sources`, (name, whole contiguous tensor) each, and gives the layout of the engine tensors `held`.

    Of what the load writes twice, the later one counts.
    """
    watch = _Watch(held)
    with torch.no_grad(), watch:
        load(watch.noting(sources))
    written: dict[str, list[Box]] = {name: [] for name in held}
    for box in watch.boxes:
        written[box.target] = [b for b in written[box.target] if _place(b) != _place(box)] + [box]
    copied = {name: boxes for name, boxes in written.items() if name not in watch.computed}
    return Layout(copied, frozenset(watch.computed))


def unwritten_targets(layout: Layout, held: Mapping[str, Tensor]) -> list[str]:
    """Engine tensors with an element that the load did not write: after an engine has slept it would be garbage."""
    return [
        name
        for name, boxes in layout.boxes.items()
        if not _covered(held[name], [(b.shape, b.target_strides, b.target_offset) for b in boxes], held[name].device)
    ]


def unused_sources(layouts: Iterable[Layout], shapes: Mapping[str, Sequence[int]], device: torch.device) -> list[str]:
    """Sources, of these shapes by name, with an element that no box of a replica's ranks takes; `device` counts them.

    None where a loader computes: what it takes for that is not seen.
    """
    layouts = list(layouts)
    if any(layout.computed for layout in layouts):
        return []
    taken: dict[str, list[Part]] = {name: [] for name in shapes}
    for box in (box for layout in layouts for boxes in layout.boxes.values() for box in boxes):
        if box.source is not None:
            taken[box.source].append((box.shape, box.source_strides, box.source_offset))
    whole = {name: torch.empty(tuple(shape), device="meta") for name, shape in shapes.items()}
    return [name for name, parts in taken.items() if not _covered(whole[name], parts, device)]


def _place(box: Box) -> tuple[Any, ...]:
    return box.shape, box.target_offset, box.target_strides


def _covered(tensor: Tensor, parts: Sequence[Part], device: torch.device) -> bool:
    """Whether the parts hold every element of a tensor, whose values are not read."""
    if (tuple(tensor.shape), tensor.stride(), 0) in parts:
        return True
    marks = torch.zeros(_extent(tensor), dtype=torch.bool, device=device)
    for part in parts:
        marks.as_strided(*part).fill_(True)
    return bool(marks.as_strided(tensor.shape, tensor.stride()).all())


def _extent(tensor: Tensor) -> int:
    """Elements of the storage from a tensor's first one to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class _Regions:
    """Which named tensor a view belongs to, of tensors that may share a storage.

    By the storage itself, kept from being mistaken for another one at the same address by a weak reference.
    """

    def __init__(self) -> None:
        self._of_storage: dict[int, list[tuple[int, int, str]]] = {}
        self._kept: list[StorageWeakRef] = []

    def add(self, name: str, tensor: Tensor) -> None:
        storage, start = tensor.untyped_storage(), tensor.storage_offset()
        self._of_storage.setdefault(storage._cdata, []).append((start, start + _extent(tensor), name))
        self._kept.append(StorageWeakRef(storage))

    def find(self, view: Tensor) -> tuple[str, int] | None:
        """(name, offset in it) of the tensor in which a view lies; None: in none that is known."""
        offset = view.storage_offset()
        for start, end, name in self._of_storage.get(view.untyped_storage()._cdata, ()):
            if start <= offset < end:
                return name, offset - start
        return None


class _Watch(TorchDispatchMode):
    """Notes every operation that writes into an engine tensor."""

    def __init__(self, held: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._targets, self._sources = _Regions(), _Regions()
        for name, tensor in held.items():
            self._targets.add(name, tensor)
        self.boxes: list[Box] = []
        self.computed: set[str] = set()

    def noting(self, sources: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The sources, each known from the moment in which the loader gets it."""
        for name, tensor in sources:
            assert tensor.is_contiguous(), name
            self._sources.add(name, tensor)
            yield name, tensor

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for place, argument in enumerate(operation._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[place] if place < len(args) else (kwargs or {}).get(argument.name)
            for written in value if isinstance(value, list | tuple) else [value]:
                if isinstance(written, Tensor) and written.numel() and (found := self._targets.find(written)):
                    self._note(operation, args, written, *found)
        return result

    def _note(self, operation: Any, args: Any, written: Tensor, target: str, offset: int) -> None:
        name, shape = operation.overloadpacket.__name__, tuple(written.shape)
        if name == "zero_" or (name == "fill_" and not isinstance(args[1], Tensor) and args[1] == 0):
            self.boxes.append(Box(target, None, shape, offset, written.stride()))
            return
        given = args[1] if name == "copy_" else None
        source = self._sources.find(given) if given is not None and given.dtype == written.dtype else None
        if source is None:
            self.computed.add(target)
            return
        strides = given.expand(shape).stride()
        self.boxes.append(Box(target, source[0], shape, offset, written.stride(), source[1], strides))
