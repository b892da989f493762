"""The policy's weights into the engine, and the proof that they arrived.

At the start the weights travel through vLLM's own loader; from then on they are copied in place, by a description of
how the engine lays them out. The proof lays the policy's tensors out by the same description and compares exact
checksums of the bits. At the start that proves the description: a layout that vLLM changes differs. Later it proves the
copy: a tensor that was not sent, or weights that are one step old, differ in at least one bit.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from lib.engine.engine import RolloutEngine
from lib.errors import WeightSyncError
from lib.model.fsdp import FSDPConfig, full_tensor, iter_full_tensors, iter_gathered, offload, onload, reshard
from lib.model.networks import CausalPolicy

CHECKSUM_ELEMENTS = 2**24  # elements whose checksum is computed at once: bounds the int64 temporaries to 128 MiB each
CHECKED_PER_STEP = 8  # engine tensors compared after an ordinary sync


@dataclass(frozen=True)
class LayoutPiece:
    """Part of an engine tensor: `length` slices of the Hugging Face tensor `source` along `dim`, from `start`.

    `source` None stands for rows of zeros (the vocabulary's padding).
    """

    source: str | None
    dim: int = 0
    start: int = 0
    length: int | None = None


def engine_layout(policy: CausalPolicy, *, tp_size: int, tp_rank: int) -> dict[str, list[LayoutPiece]]:
    """For each engine parameter of this rank, the Hugging Face tensors that it is made of, in order.

    Llama-like decoders (Llama, Mistral, Qwen2, Qwen3): q, k and v are stacked, gate and up are stacked, heads and
    hidden units are split over tensor-parallel ranks, the vocabulary is split after padding to a multiple of 64.
    """
    names = {name: tuple(p.shape) for name, p in policy.named_parameters()}
    config = policy.config
    kv_heads = config.num_key_value_heads
    # With more ranks than key-value heads, several ranks hold the same head.
    kv_shards, kv_shard = (tp_size, tp_rank) if kv_heads >= tp_size else (kv_heads, tp_rank * kv_heads // tp_size)
    layout: dict[str, list[LayoutPiece]] = {}

    def split(source: str, dim: int, shards: int = tp_size, shard: int = tp_rank) -> LayoutPiece:
        length = names[source][dim] // shards
        return LayoutPiece(source, dim, shard * length, length)

    for name in names:
        module, kind = name.rsplit(".", 1)
        parent, leaf = module.rsplit(".", 1) if "." in module else ("", module)
        if leaf == "q_proj":
            stacked = [split(name, 0)]
            stacked += [split(f"{parent}.{x}.{kind}", 0, kv_shards, kv_shard) for x in ("k_proj", "v_proj")]
            layout[f"{parent}.qkv_proj.{kind}"] = stacked
        elif leaf == "gate_proj":
            layout[f"{parent}.gate_up_proj.{kind}"] = [split(name, 0), split(f"{parent}.up_proj.{kind}", 0)]
        elif leaf in ("k_proj", "v_proj", "up_proj"):
            continue  # stacked above
        elif leaf in ("o_proj", "down_proj") and kind == "weight":
            layout[name] = [split(name, 1)]
        elif leaf in ("embed_tokens", "lm_head"):
            layout[name] = _vocabulary_pieces(name, names[name][0], tp_size, tp_rank)
        else:
            layout[name] = [LayoutPiece(name)]
    return layout


def _vocabulary_pieces(name: str, rows: int, tp_size: int, tp_rank: int) -> list[LayoutPiece]:
    """This rank's rows of a vocabulary that is padded to a multiple of 64 and split evenly."""
    per_rank = -(-rows // 64) * 64 // tp_size
    start = min(tp_rank * per_rank, rows)
    real = min(per_rank, rows - start)
    pieces = [LayoutPiece(name, 0, start, real)] if real else []
    return pieces + ([LayoutPiece(None, 0, 0, per_rank - real)] if real < per_rank else [])


def checksum(tensor: Tensor) -> int:
    """An exact integer over the tensor's bits and their places; it does not depend on the device.

    Sum over i of bits[i] x w[i] modulo 2**64, with odd weights w[i] that differ between places: any single changed
    element changes it, and so does exchanging two different ones.
    """
    flat = tensor.detach().contiguous().view(-1)
    bits = flat.view(torch.int16 if flat.element_size() == 2 else torch.int32)
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
        self.layout = engine_layout(policy, tp_size=engine.tp_size, tp_rank=engine.tp_rank)
        # Where each Hugging Face tensor goes: its pieces, and the places in the engine that they fill. The engine's
        # addresses stay for good, so that captured graphs stay valid.
        self._places: dict[str, list[tuple[LayoutPiece, Tensor]]] = {}
        self._padding: list[Tensor] = []
        self._shards: list[Tensor] | None = None  # on a single rank: what goes into each place, in their order

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

        The engine's weights must be awake, and its layout proved before (`load`, then `verify`).
        """
        if not self._places:
            self._find_places()
        if self._padding:
            torch._foreach_zero_(self._padding)
        if self.engine.world.size > 1:
            for weights in iter_gathered(self.policy, self._dtype):
                targets = [(name, *target) for name in weights for target in self._places[name]]
                if targets:  # tensor-parallel ranks may have no row of a small vocabulary
                    parts = [_part(piece, weights[name], place) for name, piece, place in targets]
                    torch._foreach_copy_([place for _, _, place in targets], parts)
            return
        if self._shards is None:
            reshard(self.policy)
            self._shards = [
                _part(piece, parameter.detach().to_local(), place)
                for source, parameter in self.policy.named_parameters()
                for piece, place in self._places[source]
            ]
        # One call: to launch hundreds of copies takes far longer than to copy.
        torch._foreach_copy_([place for places in self._places.values() for _, place in places], self._shards)
        if self.fsdp.param_offload:  # they leave the GPU, and come back to other addresses
            self._shards = None

    def _find_places(self) -> None:
        held = self.engine.parameters()
        places: dict[str, list[tuple[LayoutPiece, Tensor]]] = {name: [] for name, _ in self.policy.named_parameters()}
        for name, pieces in self.layout.items():
            start = 0
            for piece in pieces:
                length = held[name].shape[piece.dim] if piece.length is None else piece.length
                place = held[name].narrow(piece.dim, start, length)
                start += length
                if piece.source is None:
                    self._padding.append(place)
                else:
                    places[piece.source].append((piece, place))
        self._places = places

    def load(self) -> None:
        """Writes every weight of the policy into the engine through vLLM's loader, in the engine's precision.

        The engine's weights must be awake. `verify` finds a parameter that was not written: it holds random numbers.
        """
        self.engine.load_weights(iter_full_tensors(self.policy, self._dtype))

    def verify(self, names: list[str] | None = None) -> int:
        """The number of engine parameters whose bits were proved equal to the policy's; of all when names is None.

        All ranks give the same names. Raises WeightSyncError, naming the tensors.
        """
        held = self.engine.parameters()
        self.engine.world.agree(lambda: _refuse_unknown(set(held) ^ set(self.layout)))
        parameters = dict(self.policy.named_parameters())
        names = sorted(self.layout) if names is None else names
        wrong = []
        for name in names:
            pieces = self.layout[name]
            sources = {p.source: full_tensor(parameters[p.source], self._dtype) for p in pieces if p.source is not None}
            expected = torch.cat([_cut(piece, sources, held[name]) for piece in pieces], dim=pieces[0].dim)
            if expected.shape != held[name].shape or checksum(expected) != checksum(held[name]):
                wrong.append(name)
        self.engine.world.agree(lambda: _refuse_wrong(wrong))
        return len(names)


def _part(piece: LayoutPiece, source: Tensor, place: Tensor) -> Tensor:
    """What of a whole tensor fills this place."""
    return source.narrow(piece.dim, piece.start, place.shape[piece.dim])


def _cut(piece: LayoutPiece, sources: dict[str, Tensor], like: Tensor) -> Tensor:
    if piece.source is None:
        return torch.zeros(piece.length, *like.shape[1:], dtype=like.dtype, device=like.device)
    source = sources[piece.source].to(like.device)
    length = source.shape[piece.dim] if piece.length is None else piece.length
    return source.narrow(piece.dim, piece.start, length)


def _refuse_unknown(names: set[str]) -> None:
    if names:
        raise WeightSyncError(
            f"the engine's parameters are not the ones expected; {len(names)} differ, such as {min(names)}; "
            "this model or vLLM version lays its weights out in an unknown way; please report the model's config.json"
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
