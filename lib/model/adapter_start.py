"""Where adapters begin that do not begin at zero: at a folder of peft's, or, PiSSA's, at the largest singular
directions of each weight (https://arxiv.org/abs/2404.02948).

The ranks share PiSSA's decompositions and exchange what they found: signs and order of singular vectors differ between
devices. A file in the user's cache keeps them for the next run on the same model.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from lib.dist import World
from lib.model.fsdp import full_tensor, reshard
from lib.model.lora import LoRAConfig, initial_factor
from lib.model.networks import CausalPolicy, put_
from lib.storage.adapter import START
from lib.storage.peft_folder import read_peft

NUM_ITERATIONS = 4


def begin_adapter_(policy: CausalPolicy, lora: LoRAConfig, hashes: Mapping[str, str], world: World) -> bool:
    """Fills the factors of a policy's adapters, which begin as `lora` says and load_policy does not do; whether PiSSA's
    were in the cache. Executed by all ranks together.

    `hashes` are those of the base model's tensors, by name.
    """
    if lora.path is not None:
        begin_at_folder_(policy, lora.path, world)
    return lora.init == "pissa" and begin_at_principal_(policy, lora, hashes, world)


def begin_at_folder_(policy: CausalPolicy, path: str, world: World) -> None:
    """Fills A and B from a folder of peft's, which rank 0 reads."""
    reshard(policy)
    adapter = read_peft(path, "--lora.path")
    for name, parameter in policy.trained().items():
        factor = world.on_rank_0(lambda name=name: adapter.read(name))
        put_(parameter, factor.to(world.device))


def begin_at_principal_(policy: CausalPolicy, lora: LoRAConfig, hashes: Mapping[str, str], world: World) -> bool:
    """Fills A0 and B0; whether the cache had them. The ranks share the decompositions."""
    reshard(policy)
    parameters = dict(policy.named_parameters())
    weights = [name for name in parameters if _factors(name)[0] in parameters]
    like = parameters[weights[0]]
    file = cache_file(lora, {name: hashes[name] for name in weights}, f"{like.dtype} {like.device.type}")
    own: dict[str, Tensor] = (_read(file) or {}) if world.rank == 0 else {}
    cached = world.gather(own.keys() >= {factor for name in weights for factor in _factors(name)})[0]
    kept = {}
    for start in range(0, len(weights), world.size):
        names = weights[start : start + world.size]
        if not cached:  # all gather each, and one decomposes it, while the others do theirs
            wholes = [full_tensor(parameters[name], parameters[name].dtype) for name in names]
            if world.rank < len(names):
                name, whole = names[world.rank], wholes[world.rank]
                found = principal_factors(name, whole, rank=lora.rank, scale=lora.scale)
                own = dict(zip(_factors(name), found, strict=True))
        for place, name in enumerate(names):
            for factor in _factors(name):
                whole = torch.empty(parameters[factor].shape, device=world.device)
                if factor in own:
                    whole.copy_(own[factor])
                _share(whole, 0 if cached else place, world)
                put_(parameters[factor], whole)
                kept |= {factor: whole.cpu()} if world.rank == 0 and not cached else {}
    if kept and file is not None:
        _write(file, kept)
    return cached


def _share(tensor: Tensor, source: int, world: World) -> None:
    if world.size > 1:
        torch.distributed.broadcast(tensor, src=source)


def _factors(weight: str) -> tuple[str, str]:
    prefix = weight.removesuffix("weight")
    return prefix + START[0], prefix + START[1]


@torch.no_grad()
def principal_factors(name: str, weight: Tensor, *, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """A0 (rank, in) and B0 (out, rank), float32: scale * B0 A0 is the weight's largest singular directions (PiSSA,
    eq. 2 and 3), by a randomised decomposition (Halko et al., https://arxiv.org/abs/0909.4061) seeded by the name.

    It looks for twice as many directions as are wanted: the last of those that it looks for are found poorly.
    """
    weight = weight.float()
    digest = hashlib.sha256(name.encode()).digest()
    with torch.random.fork_rng([weight.device] if weight.is_cuda else []):
        torch.manual_seed(int.from_bytes(digest[:7], "little"))
        u, values, v = torch.svd_lowrank(weight, q=min(2 * rank, *weight.shape), niter=NUM_ITERATIONS)
    roots = (values[:rank] / scale).sqrt()
    a0, b0 = (v[:, :rank] * roots).T, u[:, :rank] * roots
    signs = a0.gather(1, a0.abs().argmax(1, keepdim=True)).sign()  # (rank, 1); a direction has two signs
    a0, b0 = a0 * signs, b0 * signs.T
    if bool((is_zero := roots == 0).any()):  # as of layers that were added to a model: nothing there would ever learn
        a0[is_zero] = initial_factor(name, a0.shape, seed=0).to(a0.device)[is_zero]
    return a0, b0


# ---- The cache ----


def cache_file(lora: LoRAConfig, hashes: Mapping[str, str], precision: str) -> Path | None:
    """A file whose name changes with the weights, their precision, the kind of device, the rank, the scale and the
    method; None for a user without a home."""
    what = [dict(hashes), precision, lora.rank, lora.scale, NUM_ITERATIONS, "kaiming for zero", torch.__version__]
    what = json.dumps(what, sort_keys=True)
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return folder / "lockstep" / "pissa" / f"{hashlib.sha256(what.encode()).hexdigest()[:32]}.safetensors"


def _read(file: Path | None) -> dict[str, Tensor] | None:
    """None where there is none that can be read: it is made again."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file) if file is not None and file.is_file() else None
    except (OSError, SafetensorError):
        return None


def _write(file: Path, factors: dict[str, Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    part = file.with_name(f".{file.name}.{os.getpid()}")
    with suppress(OSError, SafetensorError):  # a cache that cannot be written costs the next run some seconds
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(factors, part)
        part.replace(file)
