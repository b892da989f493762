"""The policy's weights into the engine, and the proof that they arrived.

At the start the weights travel through vLLM's own loader, which is watched (layout.py); from then on they are copied in
place, by what was learned. The proof at the start overwrites the engine, copies, and compares exact checksums of the
bits with those after the load. Later ones lay the policy's tensors out in the same way: a tensor that was not sent, or
weights that are one step old, differ in at least one bit.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import islice

import torch
from torch import Tensor

from lib.engine.engine import RolloutEngine
from lib.engine.layout import Box, Layout, learn_layout, unused_sources, unwritten_targets
from lib.errors import WeightSyncError
from lib.model.fsdp import (
    FSDPConfig,
    exported_tensor,
    iter_full_tensors,
    iter_gathered,
    local_part,
    offload,
    onload,
    reshard,
)
from lib.model.networks import CausalPolicy

CHECKSUM_ELEMENTS = 2**24  # elements whose checksum is computed at once: bounds the int64 temporaries to 128 MiB each
CHECKED_PER_STEP = 8  # engine tensors compared after an ordinary sync


def checksum(tensor: Tensor) -> int:
    """An exact integer over the tensor's bits and their places; it does not depend on the device.

    Sum over i of bits[i] x w[i] modulo 2**64, with odd weights w[i] that differ between places: any single changed
    element changes it, and so does exchanging two different ones.
    """
    flat = tensor.detach().contiguous().view(-1)
    bits = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), CHECKSUM_ELEMENTS):
        part = bits[start : start + CHECKSUM_ELEMENTS].to(torch.int64)
        place = torch.arange(start, start + part.numel(), device=tensor.device)
        total += (part * ((place * 0x9E3779B1 % 0x7FFFFFFF) * 2 + 1)).sum()
    return int(total)


class WeightSync:
    """The way of one policy's weights into one engine. All methods are executed by all ranks together."""

    def __init__(self, policy: CausalPolicy, engine: RolloutEngine, *, fsdp: FSDPConfig) -> None:
        self.policy, self.engine, self.fsdp = policy, engine, fsdp
        self._dtype = next(engine.model.parameters()).dtype
        self.layout: Layout | None = None
        """How this rank's engine is filled, from the first `load` on."""
        self.computed: frozenset[str] = frozenset()
        """Engine tensors that the loader computes on any rank: for them every sync loads all weights."""
        self._made_of: dict[str, list[str]] = {}  # the Hugging Face tensors of each engine tensor, on all ranks
        # Where each Hugging Face tensor goes: its boxes, and their places in the engine. The engine's addresses stay
        # for good, so that captured graphs stay valid.
        self._places: dict[str, list[tuple[Box, Tensor]]] = {}
        self._padding: list[Tensor] = []
        # On a single rank, what goes into each place, in their order, and the factors of what is then added there.
        self._held: tuple[list[Tensor], list[Tensor]] | None = None
        self._adapted = {name: made for name, made in policy.exported().items() if len(made.sources) > 1}
        self._added_in_place = True

    def wake(
        self, *, names: list[str] | None, time: Callable[[str], AbstractContextManager], reserved_bytes: int = 0
    ) -> int:
        """Hands the GPU from trainer to engine: the engine comes back awake, with the policy's weights, proved.

        The order keeps the peak low: the engine's weights are mapped and written while the policy is still here; then
        the policy leaves (if the config says so) and the KV cache takes its place. `names` are the engine parameters
        to compare (None: all, after a first sync through the engine's loader); gives how many were. `time(name)`
        measures a body. `reserved_bytes` of the GPU's memory must be left (UserError).
        """
        with time("wake"):
            reshard(self.policy)
            self.engine.wake("weights")
            onload(self.fsdp, self.policy, self.engine.world)  # a no-op unless the policy was left on the host
        with time("sync_weights"):
            self.load() if names is None else self.copy()
        with time("verify_weights"):
            num_verified = self.verify(names)
        with time("wake"):
            offload(self.fsdp, self.policy)
            self.engine.wake("kv_cache", reserved_bytes=reserved_bytes)
        return num_verified

    @torch.no_grad()
    def copy(self) -> None:
        """Copies every weight of the policy into the engine's own parameters, in the engine's precision.

        The engine's weights must be awake, and its layout learned before (`load`). Where a loader computes, it is
        loaded again.
        """
        assert self.layout is not None, "nothing is known of the engine's layout: load() first"
        if self.computed:
            self.engine.load_weights(iter_full_tensors(self.policy, self._dtype))
            return
        if self._padding:
            torch._foreach_zero_(self._padding)
        if self.engine.world.size > 1 or not self._added_in_place:
            for weights in iter_gathered(self.policy, self._dtype):
                targets = [(name, *target) for name in weights for target in self._places[name]]
                if targets:  # tensor-parallel ranks may have no row of a small vocabulary
                    parts = [box.part(weights[name]) for name, box, _ in targets]
                    torch._foreach_copy_([place for _, _, place in targets], parts)
            return
        if self._held is None:
            reshard(self.policy)
            local = {name: local_part(parameter) for name, parameter in self.policy.named_parameters()}
            shards = [box.part(local[source]) for source, places in self._places.items() for box, _ in places]
            self._held = shards, [local[source] for made in self._adapted.values() for source in made.sources[1:]]
        shards, factors = self._held
        # One call: to launch hundreds of copies takes far longer than to copy.
        torch._foreach_copy_([place for places in self._places.values() for _, place in places], shards)
        if factors:
            self._add(factors)
        if self.fsdp.param_offload:  # they leave the GPU, and come back to other addresses
            self._held = None

    def _add(self, factors: list[Tensor]) -> None:
        """Adds each adapter to its frozen weight, which lies in the engine."""
        given = [torch.empty_like(factor, dtype=self._dtype) for factor in factors]
        torch._foreach_copy_(given, factors)
        given = iter(given)
        for name, made in self._adapted.items():
            [(_, place)] = self._places[name]
            made.add_(place, *islice(given, len(made.sources) - 1))

    @torch.no_grad()
    def load(self) -> None:
        """Writes every weight of the policy into the engine through vLLM's loader and learns the engine's layout.

        Then flips the engine's bits and copies; every bit must be as the loader left it. The engine's weights must be
        awake. Raises WeightSyncError on all ranks.
        """
        world, held = self.engine.world, self.engine.parameters()
        self.layout = learn_layout(self.engine.load_weights, iter_full_tensors(self.policy, self._dtype), held)
        loaded = {name: checksum(tensor) for name, tensor in held.items()}
        replicas = world.gather((self.engine.replica, self.layout))
        layouts = [layout for replica, layout in replicas if replica == self.engine.replica]
        shapes = {name: made.shape for name, made in self.policy.exported().items()}
        unused = unused_sources(layouts, shapes, world.device)
        world.agree(lambda: _refuse_layout(unwritten_targets(self.layout, held), unused))
        self.computed = frozenset().union(*(layout.computed for _, layout in replicas))
        self._made_of = {
            name: sorted({box.source for _, layout in replicas for box in layout.boxes.get(name, ())} - {None})
            for name in held
        }
        self._find_places()
        for tensor in held.values():
            tensor.view(torch.uint8).bitwise_not_()
        self.copy()
        world.agree(lambda: _refuse_learned([name for name, sum_ in loaded.items() if checksum(held[name]) != sum_]))

    def _find_places(self) -> None:
        held = self.engine.parameters()
        places: dict[str, list[tuple[Box, Tensor]]] = {name: [] for name in self.policy.exported()}
        self._padding, self._held = [], None
        for box in (box for boxes in self.layout.boxes.values() for box in boxes):
            if box.source is None:
                self._padding.append(box.place(held[box.target]))
            else:
                places[box.source].append((box, box.place(held[box.target])))
        self._places = places
        # Elsewhere, as where a loader splits a fused matrix, weights are made whole and copied.
        self._added_in_place = all(
            [box.takes_whole(made.shape) and place.stride(-1) == 1 for box, place in places[name]] == [True]
            for name, made in self._adapted.items()
        )

    @torch.no_grad()
    def verify(self, names: list[str] | None = None) -> int:
        """The number of engine parameters whose bits were proved equal to the policy's; of all when names is None.

        What a loader computes must come out of another load as it is. All ranks give the same names. Raises
        WeightSyncError, naming the tensors.
        """
        assert self.layout is not None, "nothing is known of the engine's layout: load() first"
        held = self.engine.parameters()
        names = sorted(held) if names is None else names
        wrong = []
        for name in names:
            if name in self.computed:
                continue
            whole = {source: exported_tensor(self.policy, source, self._dtype) for source in self._made_of[name]}
            expected = torch.empty_like(held[name])
            for box in self.layout.boxes[name]:
                place = box.place(expected)
                place.zero_() if box.source is None else place.copy_(box.part(whole[box.source]))
            if checksum(expected) != checksum(held[name]):
                wrong.append(name)
        if computed := [name for name in names if name in self.computed]:
            before = {name: checksum(held[name]) for name in computed}
            self.copy()
            wrong += [name for name in computed if checksum(held[name]) != before[name]]
        self.engine.world.agree(lambda: _refuse_wrong(wrong))
        return len(names)


def _refuse_layout(unwritten: list[str], unused: list[str]) -> None:
    for what, names in (("engine tensors as they are", unwritten), ("tensors of the policy out", unused)):
        if names:
            raise WeightSyncError(
                f"the engine's loader leaves {what}; {len(names)}, such as {names[0]}; expected every element of the "
                "policy in the engine and every element of the engine written; this model does not fit the engine's "
                "version: please report its config.json"
            )


def _refuse_learned(wrong: list[str]) -> None:
    if wrong:
        raise WeightSyncError(
            f"copies do not rebuild what the engine's loader made of the policy's weights; {len(wrong)} tensors differ "
            f"in bits, such as {wrong[0]}; expected equal checksums; this model does not fit the engine's version: "
            "please report its config.json"
        )


def _refuse_wrong(wrong: list[str]) -> None:
    if wrong:
        raise WeightSyncError(
            f"the engine does not hold the policy's weights; {len(wrong)} tensors differ in bits, such as {wrong[0]}; "
            "expected equal checksums; the weights are stale or were overwritten after the sync (an engine slept or "
            "reloaded in between?): rollouts would come from another model, so the run stops"
        )


def names_to_check(engine: RolloutEngine, *, seed: int, step: int) -> list[str]:
    """The engine parameters whose bits are compared after this step's sync: random, the same on all ranks."""
    names = sorted(engine.parameters())
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
    return [names[i] for i in torch.randperm(len(names), generator=generator)[:CHECKED_PER_STEP].tolist()]
