"""How fast a step was: tokens per second, FLOPs by the model's shape, memory. docs/metrics.md defines each number."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lib.dist import World
from lib.storage.model_folder import ModelFiles, head_dim
from lib.types import Batch

# bf16 FLOP/s of one GPU, dense (without sparsity). The longer name first where one contains another.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L20": 119.5e12,
}


def peak_flops(device_name: str) -> float | None:
    """The bf16 FLOP/s of a GPU by its name, None when it is unknown (so no MFU, rather than a wrong one)."""
    matches = (peak for name, peak in PEAK_FLOPS.items() if re.search(rf"\b{name}\b", device_name))
    return next(matches, None)


def flops_forward(
    config: Mapping[str, Any], seq_lens: Sequence[int], response_lens: Sequence[int], *, block_parameters: int
) -> float:
    """FLOPs of one forward pass over packed sequences of a dense decoder.

    `config` is a Hugging Face config as a dict, with its defaults; `seq_lens` counts prompt and response tokens. A
    matrix product with P parameters costs 2P per token (one multiplication, one addition). With hidden size h, L
    layers, H query heads of dimension d, vocabulary V and N parameters in the layers' matrices (`block_parameters`):

        blocks              2 * N * sum(l)
        attention           over layers: 2 products (q k^T and p v) * 2*H*d * sum(pairs)
        head                2 * V*h * sum(r), on response positions only

    Causal attention needs pairs = l^2 / 2 of the l x l products, a layer with a window w < l only w * l - w^2 / 2. The
    embedding is a look-up and costs nothing; norms, rotary embeddings and softmax are not counted. A backward pass
    costs twice as much; recomputation and padding are overhead, not work, so they do not count.
    """
    pairs = sum(
        length * length / 2 if window is None or window >= length else window * length - window * window / 2
        for window in _windows(config)
        for length in seq_lens
    )
    return float(
        2 * block_parameters * sum(seq_lens)
        + 4 * config["num_attention_heads"] * head_dim(config) * pairs
        + 2 * config["vocab_size"] * config["hidden_size"] * sum(response_lens)
    )


def flops_update(
    config: Mapping[str, Any], seq_lens: Sequence[int], response_lens: Sequence[int], *, block_parameters: int,
    has_adapter: bool = False,
) -> float:  # fmt: skip
    """FLOPs of one forward and backward pass: three forward passes.

    With an adapter the weights' gradients are left out: two forward passes, and a third one of attention, in which no
    weights are. The adapter's own products, about rank / width of a pass, are not counted.
    """
    forward = flops_forward(config, seq_lens, response_lens, block_parameters=block_parameters)
    if not has_adapter:
        return 3 * forward
    return 2 * forward + flops_forward(config, seq_lens, [], block_parameters=0)


def _windows(config: Mapping[str, Any]) -> list[int | None]:
    """The tokens that each layer's attention sees; None: all before."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if window and config.get("use_sliding_window", True) and not kinds:
        return [window] * config["num_hidden_layers"]
    return [window if kind == "sliding_attention" else None for kind in kinds or [""] * config["num_hidden_layers"]]


def perf_metrics(
    batch: Batch,
    timings: Mapping[str, float],
    world: World,
    *,
    model: ModelFiles,
    update_epochs: int = 1,
    engine_bytes: int = 0,
) -> dict[str, float]:
    """perf/* and timing_per_token_ms/* of a step, from this rank's rows and the reduced timing_s/* of all ranks.

    `engine_bytes` are counted by torch's allocator for the engine though they are unmapped while it sleeps; the peaks
    leave them out. `timings` must have timing_s/step. MFU is absent where the GPU is unknown.
    Executed by all ranks.
    """
    lens, response_lens = batch.total_lens.tolist(), batch.response_lens.tolist()
    shape = dict(config=model.full_config, seq_lens=lens, response_lens=response_lens)
    flops = flops_forward(**shape, block_parameters=model.block_parameters)
    of_update = flops_update(**shape, block_parameters=model.block_parameters, has_adapter=model.has_adapter)
    on_gpu = world.device.type == "cuda"
    peak = peak_flops(torch.cuda.get_device_name(world.device)) if on_gpu else None
    mine = {
        "tokens": sum(lens),
        "responses": sum(response_lens),
        "flops": flops,
        "of_update": of_update,
        "cpu": _node_memory_used(),
    }
    if on_gpu:
        mine["allocated"] = torch.cuda.max_memory_allocated(world.device) - engine_bytes
        mine["reserved"] = torch.cuda.max_memory_reserved(world.device) - engine_bytes
    ranks = world.gather(mine)
    tokens, responses, flops, of_update = (
        sum(rank[key] for rank in ranks) for key in ("tokens", "responses", "flops", "of_update")
    )

    seconds = timings["timing_s/step"]
    result = {
        "perf/total_num_tokens": float(tokens),
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / seconds / world.size,
        "perf/cpu_memory_used_gb": max(rank["cpu"] for rank in ranks) / 2**30,
    }
    if on_gpu:
        result["perf/max_memory_allocated_gb"] = max(rank["allocated"] for rank in ranks) / 2**30
        result["perf/max_memory_reserved_gb"] = max(rank["reserved"] for rank in ranks) / 2**30
    passes = {"actor": ("update_actor", update_epochs * of_update), "actor_infer": ("old_log_prob", flops)}
    for name, (phase, work) in passes.items():
        if peak and work and f"timing_s/{phase}" in timings:
            result[f"perf/mfu/{name}"] = work / (timings[f"timing_s/{phase}"] * peak * world.size)
    for phase in ("gen", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor"):
        per = responses if phase == "gen" else tokens
        if f"timing_s/{phase}" in timings and per:
            result[f"timing_per_token_ms/{phase}"] = 1000 * timings[f"timing_s/{phase}"] / per
    return result


def _node_memory_used() -> int:
    """Bytes of RAM in use on this node, by all processes."""
    with open("/proc/meminfo") as lines:
        kib = {name: int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
    return (kib["MemTotal"] - kib["MemAvailable"]) * 1024
