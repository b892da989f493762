"""Sharding (FSDP2) and where the shards live: float32 master weights, compute precision on the wire, float32 sums."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lib.dist import World
from lib.model.activations import Kept, count_kept
from lib.model.host_memory import HostMemory
from lib.model.lora import LoRAConfig
from lib.model.networks import (
    CausalPolicy,
    Critic,
    Exported,
    ModelConfig,
    build_critic,
    build_policy,
    empty_,
    load_weights_,
)

COMPILE_OPTIONS = {"triton.mix_order_reduction_non_strict_mode": True}
"""For inductor. The option lets it fuse the two sums of a norm's backward pass whatever the number of tokens. Without
it the graph is guarded on that number, and a small micro-batch compiles all layers again (EXPERIMENTS.md)."""

BUCKET_BYTES = 2**29
"""Whole weights gathered at once, outside passes over the model. In use are also what the ranks sent, what arrived, and
the bucket before."""


@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """How a model is sharded and offloaded."""

    param_offload: bool = False
    """Keep the weights' shards on the host while the engine samples."""
    optimizer_offload: bool = False
    """Keep the optimizer's moments on the host for good; a step streams them through the GPU."""
    reshard_after_forward: bool | None = None
    """Drop gathered layers after every pass and sum gradients over ranks in every micro-batch: least memory, most
    traffic; False: once per optimizer step; None: False where weights and gradients take a quarter of the GPU's
    memory at most."""


@dataclass(kw_only=True)
class Placement:
    """How a sharded model lies on this rank: its attribute `placement`."""

    keeps_gathered: bool
    """Whether shards are gathered once per optimizer step instead of in every pass."""
    base_is_whole: bool = False
    """Whether every rank holds the frozen weights under adapters whole, instead of a shard of them."""
    spare_bytes: int = 0
    """What the model's update leaves of this rank's GPU."""
    host_memory: HostMemory | None = None
    """Where this rank's shards are while they are offloaded; taken by the first `offload`."""


def load_policy(
    cfg: ModelConfig, folder: str, fsdp: FSDPConfig, world: World, *, trainable: bool = True,
    lora: LoRAConfig | None = None, seed: int = 0, max_tokens_per_gpu: int = 0, num_frozen_parameters: int = 0,
    reserved_bytes: int = 0,
) -> CausalPolicy:  # fmt: skip
    """The sharded policy with its weights, on this rank's device. Executed by all ranks together.

    What trains, all weights or the adapters of `lora` (which start with `seed`), is float32; what is frozen, such as a
    reference, only ever computes, so it is held in the compute precision. `max_tokens_per_gpu` is the largest
    micro-batch, `num_frozen_parameters` those of a reference that will follow, `reserved_bytes` what else will be on
    the GPU during an update and is not yet there (`held_bytes` of a critic): all bear on whether activations fit.
    """
    dtype = cfg.compute_dtype(world)
    has_adapter = lora is not None and lora.rank > 0
    policy = build_policy(folder, param_dtype=torch.float32 if trainable and not has_adapter else dtype, lora=lora)
    reserved_bytes += num_frozen_parameters * dtype.itemsize // world.size
    if not has_adapter:
        policy.requires_grad_(trainable)
    _load_(
        policy, cfg, folder, fsdp, world, seed=seed, max_tokens_per_gpu=max_tokens_per_gpu,
        reserved_bytes=reserved_bytes,
    )  # fmt: skip
    return policy.train(trainable)


def load_critic(
    cfg: ModelConfig, folder: str, fsdp: FSDPConfig, world: World, *, max_tokens_per_gpu: int = 0,
    reserved_bytes: int = 0,
) -> Critic:  # fmt: skip
    """The sharded critic with its weights, float32, on this rank's device. Executed by all ranks together.

    The folder has a model for token classification with one label, or a causal language model: then its head is zero,
    and so are all values until the first update. `max_tokens_per_gpu` and `reserved_bytes` as for the policy.
    """
    critic = build_critic(folder, param_dtype=torch.float32)
    _load_(critic, cfg, folder, fsdp, world, max_tokens_per_gpu=max_tokens_per_gpu, reserved_bytes=reserved_bytes)
    return critic.train()


def _load_(
    model: CausalPolicy | Critic, cfg: ModelConfig, folder: str, fsdp: FSDPConfig, world: World, *, seed: int = 0,
    max_tokens_per_gpu: int, reserved_bytes: int,
) -> None:  # fmt: skip
    """Shards a model of the meta device, decides whether its backward pass recomputes, and fills it."""
    dtype = cfg.compute_dtype(world)
    estimates = world.device.type == "cuda" and bool(model.trained())
    settle_compiler()
    # Before shards stand for its weights.
    kept = estimates and count_kept(model.model, model.layers, dtype=dtype, compiled=compiles(world, dtype))
    shard_(model, fsdp, world, dtype=dtype)
    recompute = cfg.gradient_checkpointing
    if estimates:
        needed = update_bytes(
            model, world, dtype=dtype, kept=kept, max_tokens_per_gpu=max_tokens_per_gpu,
            keeps_gathered=model.placement.keeps_gathered, base_is_whole=model.placement.base_is_whole,
            moments_on_gpu=not fsdp.optimizer_offload,
        )  # fmt: skip
        torch.cuda.empty_cache()  # of what loading another model took
        spare = int(0.95 * torch.cuda.mem_get_info(world.device)[0]) - needed - reserved_bytes
        if recompute is None:
            recompute = not world.all_agree(spare >= 0)
        # In float32 nobody has measured what attention works in.
        model.placement.spare_bytes = 0 if dtype is torch.float32 else spare
    if recompute and model.trained():
        model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    empty_(model, world.device)
    load_weights_(model, folder, world, seed=seed)


def shard_(model: CausalPolicy | Critic, fsdp: FSDPConfig, world: World, *, dtype: torch.dtype) -> None:
    """Shards every decoder layer and the rest over all ranks, and puts the model's `placement` on it.

    Gradients are summed over ranks, never averaged. The frozen weights under adapters are whole on every rank where
    gathered weights may stay: as large as gathered, and never gathered. Not where they are offloaded: every rank would
    keep a copy on its host.
    """
    mesh = init_device_mesh(world.device.type, (world.size,))
    # Inputs of a layer are what the one before made: rotary tables that a family keeps in float32 stay so.
    precision = MixedPrecisionPolicy(
        param_dtype=None if dtype is torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    drop = fsdp.reshard_after_forward
    if drop is None:
        # Weights, and float32 gradients of those that train.
        gathered = sum(p.numel() * (dtype.itemsize + 4 * p.requires_grad) for p in model.parameters())
        large = world.device.type == "cuda" and gathered > torch.cuda.mem_get_info(world.device)[1] / 4
        drop = not world.all_agree(not large)  # collectives depend on it: GPUs may differ
    trained = model.trained()
    base_is_whole = bool(trained) and not drop and not fsdp.param_offload
    whole = {p for name, p in model.named_parameters() if base_is_whole and name not in trained}
    for layer in model.layers:
        # One graph serves all layers and any packed length.
        if compiles(world, dtype):
            layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=True, options=COMPILE_OPTIONS)
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=drop, ignored_params=whole)
    if isinstance(model, Critic):  # on its own, so that it computes in its own precision
        fully_shard(model.score, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=False, ignored_params=whole)
    model.placement = Placement(keeps_gathered=not drop, base_is_whole=base_is_whole)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # FSDP averages by default. The loss has a global denominator already, so gradients must be summed; gloo
            # can only sum if told that the factor 1 is meant as a plain sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def settle_compiler() -> None:
    """Tells torch.compile, for the whole process, how layers are cut into forward and backward pass, and how often."""
    # Kinds of layers, passes with gradients and without, the one that is counted, policy, reference and critic: each
    # combination is a graph.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
    # What a product reads and can be made of what is kept anyway (silu(gate) x up, the norms' results) is made again in
    # the backward pass, in the kernels that read what it is made of: a quarter less is kept (EXPERIMENTS.md).
    torch._functorch.config.ban_recompute_materialized_backward = False


def compiles(world: World, dtype: torch.dtype) -> bool:
    """Whether layers that compute in this precision are compiled: on a GPU, and not in float32, whose attention loops
    over the sequences and would need a graph for every number of them."""
    return world.device.type == "cuda" and dtype is not torch.float32


def update_bytes(
    model: CausalPolicy | Critic, world: World, *, dtype: torch.dtype, kept: Kept, max_tokens_per_gpu: int,
    keeps_gathered: bool, base_is_whole: bool = False, moments_on_gpu: bool = True,
) -> int:  # fmt: skip
    """About the memory that a rank's update takes without recomputation, in bytes; meant to err upwards.

    Shards of float32 weights, gradients and (unless on the host) two moments; gathered weights and float32 gradients
    of everything or of two layers; what the decoder keeps for the backward pass (`kept`); per token a policy's logits,
    and what cuDNN's attention works in. What policies of 0.6 to 4 B (Qwen3) took on one H200 is 87 to 91 % of it, with
    adapters 97 %; what torch's allocator reserves for it is more (EXPERIMENTS.md).
    """
    config, num_layers = model.config, len(model.layers)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def at_once(*, trains: bool) -> tuple[int, int]:
        """The numbers that train or do not, and how many of them are gathered at once."""
        every = sum(p.numel() for p in model.parameters() if p.requires_grad == trains)
        in_layers = sum(p.numel() for layer in model.layers for p in layer.parameters() if p.requires_grad == trains)
        return every, every if keeps_gathered else every - in_layers + 2 * in_layers // num_layers

    trained, gathered = at_once(trains=True)
    frozen, whole = at_once(trains=False)
    logits = config.vocab_size if isinstance(model, CausalPolicy) else 0
    of_attention = 12 * config.num_attention_heads * head_dim  # float32 gradients of q, and of k and v for every head
    per_token = kept.per_token + logits * dtype.itemsize + of_attention
    of_shards = (16 if moments_on_gpu else 8) * trained // world.size
    # Frozen weights: whole, or shards and what is gathered of them.
    of_shards += dtype.itemsize * (whole + (0 if base_is_whole else frozen // world.size))
    return of_shards + gathered * (dtype.itemsize + 4) + kept.at_all + per_token * max_tokens_per_gpu


def held_bytes(num_parameters: int, fsdp: FSDPConfig, world: World) -> int:
    """What a trainable model that is not loaded yet will have on a rank's GPU while another one is updated, in bytes.

    Shards of float32 weights, and of two moments unless they are on the host.
    """
    return (4 if fsdp.optimizer_offload else 12) * num_parameters // world.size


def begin_micro_batch(model: CausalPolicy | Critic, *, last: bool) -> None:
    """Says before a micro-batch's forward whether it is the last of its optimizer step.

    Unless the model reshards after every pass, weights stay gathered and gradients are added up locally, in float32,
    until the last one sums them over ranks: one gather and one scatter per optimizer step.
    """
    if (placement := getattr(model, "placement", None)) and placement.keeps_gathered:  # None: not sharded
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        model.set_is_last_backward(last)


def reshard(model: nn.Module) -> None:
    """Drops gathered weights. Whoever writes the shards calls this first: a gathered copy would be stale."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def offload(fsdp: FSDPConfig, model: CausalPolicy | Critic) -> None:
    """Moves the model to the host if the config wants it there while the engine samples."""
    reshard(model)
    if fsdp.param_offload:
        _to_host_(model)


@torch.no_grad()
def _to_host_(model: CausalPolicy | Critic) -> None:
    """`model.to("cpu")` into memory that is taken when the model leaves the GPU first, and kept.

    FSDP pads shards that are shorter than others, in memory of its own, as soon as they are put in place: so all of
    them have arrived before.
    """
    parameters = [p for p in model.parameters() if p.device.type != "cpu"]
    if not parameters:
        return
    if model.placement.host_memory is None:
        model.placement.host_memory = HostMemory([local_part(p) for p in parameters])
    places = {id(p): place for p, place in zip(parameters, model.placement.host_memory.tensors, strict=True)}
    for parameter in parameters:
        places[id(parameter)].copy_(local_part(parameter), non_blocking=True)
    torch.cuda.synchronize()

    def move(tensor: Tensor) -> Tensor:
        if id(tensor) not in places:
            return tensor.to("cpu")  # a buffer
        if not isinstance(tensor, DTensor):
            return places[id(tensor)]
        on_host = torch.empty_like(tensor, device="cpu")
        on_host._local_tensor = places[id(tensor)]
        return on_host

    model._apply(move)  # what `to` calls, and FSDP extends


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def onload(fsdp: FSDPConfig, model: CausalPolicy | Critic, world: World) -> None:
    """Moves back to the rank's device what `offload` took away."""
    if fsdp.param_offload:
        model.to(world.device, non_blocking=True)


def full_tensor(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole parameter in `dtype`, on every rank: cast before the gather, so only `dtype` travels."""
    local = parameter.detach().to(dtype)
    return local.full_tensor() if isinstance(local, DTensor) else local


@torch.no_grad()
def exported_tensor(model: CausalPolicy | Critic, name: str, dtype: torch.dtype) -> Tensor:
    """One tensor as the engine sees it, whole, in `dtype`, on every rank. Executed by all ranks together."""
    made = model.exported()[name]
    return made.make(*(full_tensor(model.get_parameter(source), dtype) for source in made.sources))


@torch.no_grad()
def iter_gathered(model: CausalPolicy | Critic, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """Whole tensors by their Hugging Face names, in `dtype`: as many at a time as have BUCKET_BYTES, at least one.

    One collective a bucket: with one a layer the host set the pace (EXPERIMENTS.md). All ranks iterate to the end.
    """
    reshard(model)
    parameters = dict(model.named_parameters())
    bucket: dict[str, Exported] = {}
    size = 0
    for name, made in model.exported().items():
        num_bytes = sum(parameters[source].numel() for source in made.sources) * dtype.itemsize
        if bucket and size + num_bytes > BUCKET_BYTES:
            yield _make(bucket, parameters, dtype)
            bucket, size = {}, 0
        bucket[name] = made
        size += num_bytes
    yield _make(bucket, parameters, dtype)


def _make(bucket: dict[str, Exported], parameters: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The bucket's tensors, of their gathered sources."""
    used = {source: parameters[source] for made in bucket.values() for source in made.sources}
    sharded = {name: p for name, p in used.items() if isinstance(p, DTensor)}
    whole = {name: p.detach().to(dtype) for name, p in used.items() if name not in sharded}
    whole |= _gather(sharded, dtype) if sharded else {}
    return {name: made.make(*(whole[source] for source in made.sources)) for name, made in bucket.items()}


def _gather(parameters: dict[str, DTensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The whole parameters, of shards along their first dimension: cast first, so only `dtype` travels."""
    num_ranks = torch.distributed.get_world_size()
    shards = [local_part(parameter) for parameter in parameters.values()]
    # Every rank holds so many rows, the last ones fewer or none: all send as many elements.
    counts = [-(-len(p) // num_ranks) * (p.numel() // len(p)) for p in parameters.values()]
    sent = torch.empty(sum(counts), dtype=dtype, device=shards[0].device)
    rooms = [room[: s.numel()].view(s.shape) for room, s in zip(sent.split(counts), shards, strict=True)]
    torch._foreach_copy_(rooms, shards)
    received = sent.new_empty(num_ranks, len(sent))
    torch.distributed.all_gather(list(received), sent)
    whole = [sent.new_empty(num_ranks, count) for count in counts]
    torch.split_with_sizes_copy(received, counts, dim=1, out=whole)  # one kernel
    return {
        name: rows.view(-1, *p.shape[1:])[: len(p)] for (name, p), rows in zip(parameters.items(), whole, strict=True)
    }


def iter_full_tensors(model: CausalPolicy | Critic, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """What `iter_gathered` gives, pair by pair. All ranks iterate to the end."""
    for parameters in iter_gathered(model, dtype):
        yield from parameters.items()
