"""Under torchrun: a policy with adapters, beside an engine: what it starts as, learns, exports and refuses.

torchrun --nproc_per_node=N -m tests.lora_worker FOLDER OUT TP_SIZE DTYPE INIT
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import torch

from lib.checkpoints.tensor_files import model_tensors, own_pieces, write_pieces
from lib.dist import World, init_distributed, shutdown_distributed
from lib.engine.engine import RolloutEngine
from lib.engine.function_proof import prove_function
from lib.engine.rollout_config import RolloutConfig
from lib.engine.weight_sync import WeightSync
from lib.errors import WeightSyncError
from lib.model.adapter_start import begin_at_principal_
from lib.model.batching import iter_micro_batches, make_batch
from lib.model.forward import compute_log_probs, forward_policy
from lib.model.fsdp import FSDPConfig, begin_micro_batch, full_tensor, iter_full_tensors, load_policy, reshard
from lib.model.lora import LoRAConfig, without_adapter
from lib.model.networks import ModelConfig, put_
from lib.model.optim import OptimConfig, build_optimizer, optimizer_step
from lib.storage.adapter import Adapter, is_adapter
from lib.storage.beside_weights import copy_beside_weights
from lib.storage.weights import hash_tensors, open_weights
from merge import MergeConfig, merge
from tests.tiny import make_rollouts

LORA = {init: LoRAConfig(rank=4, alpha=8, init=init) for init in ("kaiming", "pissa")}
STEPS = 10
CACHED: list[bool] = []


def noise(name: str, shape: torch.Size) -> torch.Tensor:
    """The same on all ranks, of a name."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name)))) * 0.1


def set_b(policy) -> None:
    """B as after some learning: a zero would hide wrong names, slots and scales."""
    reshard(policy)
    for name, parameter in policy.named_parameters():
        if name.endswith("lora_B"):
            put_(parameter, noise(name, parameter.shape))


def whole(policy) -> dict[str, torch.Tensor]:
    """What trains."""
    reshard(policy)
    return {name: full_tensor(p, torch.float32).clone() for name, p in policy.trained().items()}


def log_probs(policy, batch, world: World) -> torch.Tensor:
    return compute_log_probs(policy, batch, max_tokens_per_gpu=60, temperature=1.0, world=world)[0]


def gather_rows(rows: torch.Tensor, world: World) -> torch.Tensor:
    return torch.cat(world.gather(rows))


def backward(policy, batch, world: World, budget: int) -> None:
    """Minus the sum of the chosen log-probs, over all ranks."""
    micro_batches = list(iter_micro_batches(batch, budget, world))
    for place, micro_batch in enumerate(micro_batches, start=1):
        begin_micro_batch(policy, last=place == len(micro_batches))
        values, _ = forward_policy(policy, micro_batch, temperature=1.0)
        (-values * micro_batch.advantages).sum().backward()


def load(folder: Path, lora: LoRAConfig, dtype: str, world: World, **options):
    fsdp, recompute = FSDPConfig(reshard_after_forward=options.pop("reshard", None)), options.pop("recompute", False)
    cfg = ModelConfig(dtype=dtype, gradient_checkpointing=recompute)
    policy = load_policy(cfg, str(folder), fsdp, world, lora=lora, seed=3, **options)
    if lora.init == "pissa":
        CACHED.append(begin_at_principal_(policy, lora, hash_tensors(folder, world), world))
    return policy


def main(folder: str, out: str, tp_size: str, dtype: str, init: str) -> None:
    """Writes what was found, from rank 0."""
    world, folder, lora = init_distributed(), Path(folder), LORA[init]
    found = {}
    rollouts = make_rollouts()
    own = rollouts[world.rank :: world.size]
    batch = make_batch(own, world, mini_batch_size=len(rollouts))
    mask = batch.response_mask
    places = (batch.prompt_lens[:, None] + torch.arange(mask.shape[1])).clamp(max=batch.input_ids.shape[1] - 1)
    batch = batch.with_(advantages=torch.where(mask, 1 + batch.input_ids.gather(1, places) % 5, 0.0))

    policy = load(folder, lora, dtype, world)
    weights, precision = open_weights(folder), getattr(torch, dtype)
    found["cached"] = CACHED
    found["step 0"] = all(
        torch.equal(tensor, weights.read(name).to(precision)) for name, tensor in iter_full_tensors(policy, precision)
    )
    with without_adapter(policy):
        base = log_probs(policy, batch, world)
    found["step 0 log-probs"] = torch.equal(base, log_probs(policy, batch, world))
    found["trained"] = [name for name, p in policy.named_parameters() if p.requires_grad]
    found["start"] = whole(policy)

    # ---- Gradients, however it is sharded and cut into micro-batches ----
    for name, options in {
        "": {},
        "reshard": {"reshard": True},
        "recompute": {"reshard": True, "recompute": True},
    }.items():
        one = load(folder, lora, dtype, world, **options)
        assert one.model.is_gradient_checkpointing == (name == "recompute")
        set_b(one)
        for budget in (30, 10_000):
            backward(one, batch, world, budget)
            found[f"gradients {name} {budget}"] = {
                n: p.grad.full_tensor().clone() for n, p in one.named_parameters() if p.grad is not None
            }
            one.zero_grad(set_to_none=True)
    optimizer = build_optimizer(one, OptimConfig(lr=1e-2, weight_decay=0.0))
    for _ in range(STEPS):
        backward(one, batch, world, 30)
        optimizer_step(one, optimizer, clip_grad=1e9)
    found["learned"] = whole(one)
    found["held"] = sorted({name for name, p in one.named_parameters() if optimizer.state.get(p)})
    found["base is as it was"] = all(
        torch.equal(full_tensor(p, precision), weights.read(name).to(precision))
        for name, p in one.named_parameters()
        if not is_adapter(name)
    )
    with without_adapter(one):
        found["reference"] = torch.equal(base, log_probs(one, batch, world))
    found["changed"] = float((base - log_probs(one, batch, world)).abs().max())

    # ---- Beside an engine ----
    cfg = RolloutConfig(
        tensor_model_parallel_size=int(tp_size), max_response_len=16, max_num_seqs=8, max_num_batched_tokens=2048,
        cpu_kv_cache_gib=0.1,
    )  # fmt: skip
    engine = RolloutEngine(
        cfg, str(folder), dtype=dtype, max_prompt_len=8, most_responses=8, stop_token_ids=[3], world=world, seed=5
    )
    engine.sleep()
    weight_sync = WeightSync(one, engine, fsdp=FSDPConfig())
    found["compared"] = weight_sync.wake(names=None, time=nullcontext)
    found["in place"] = weight_sync._added_in_place
    found["function"] = prove_function(weight_sync, str(folder), dtype=precision, max_prompt_len=8).mean
    found["merged"] = {name: tensor.clone() for name, tensor in iter_full_tensors(one, precision)}
    found["own"] = gather_rows(log_probs(one, batch, world), world)
    for what, change in (("scaled", lambda b: 1.01 * b), ("flipped", flip_a_bit)):
        before = whole(one)
        for name, parameter in one.trained().items():
            if name == "model.layers.1.mlp.down_proj.lora_B":
                put_(parameter, change(before[name]))
        weight_sync.copy()
        for name, parameter in one.trained().items():
            put_(parameter, before[name])
        try:
            found[what] = weight_sync.verify()
        except WeightSyncError as error:
            found[what] = str(error)
    engine.sleep()

    # ---- As a checkpoint, which merge.py makes a plain model of ----
    actor = Path(out).with_suffix("") / "actor"
    for part in ("model", "huggingface"):
        (actor / part).mkdir(parents=True, exist_ok=True)
    pieces = own_pieces(model_tensors(one), world)
    write_pieces(actor / "model" / f"shard-{world.rank + 1:05}-of-{world.size:05}.safetensors", pieces)
    hashes = hash_tensors(folder, world)
    if world.rank == 0:
        copy_beside_weights(folder, actor / "huggingface")
        Adapter(base=str(folder), dtype=dtype, scale=lora.scale, tensors=hashes).write(actor / "huggingface")
        merge(MergeConfig(local_dir=str(actor), target_dir=str(actor.parent / "merged"), dtype=dtype, skip_verify=True))
    world.gather(None)
    plain = load_policy(ModelConfig(dtype=dtype), str(actor.parent / "merged"), FSDPConfig(), world, trainable=False)
    found["plain"] = gather_rows(log_probs(plain, batch, world), world)
    if world.rank == 0:
        torch.save(found, out)
    shutdown_distributed()


def flip_a_bit(tensor: torch.Tensor) -> torch.Tensor:
    """One number's, of those that bfloat16 keeps; the largest number, so that the sum shows it."""
    flat = tensor.clone().view(-1)
    place = int(flat.abs().argmax())
    flat.view(torch.int32)[place] ^= 1 << 21
    return flat.view_as(tensor)


if __name__ == "__main__":
    main(*sys.argv[1:])
