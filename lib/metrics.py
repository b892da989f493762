"""What a run measures: one step's numbers, reduced over ranks once, and the definitions of the data, speed, mismatch
and validation metrics. Names are verl's; docs/metrics.md defines each one and says where ours differs.

It does not write anything anywhere (tracking.py does), and it never averages averages: every mean is a sum over a
count, both taken over all micro-batches and all ranks.
"""

import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lib.critic_loss import explained_variance
from lib.dist import World
from lib.model_files import head_dim, num_kv_heads
from lib.shaping import response_rewards
from lib.types import Batch

Number = float | Tensor
"""A number, or a tensor of one element on any device."""


class Metrics:
    """One step's numbers of this rank, until `reduce` makes them everyone's.

    Numbers on a GPU stay there, so adding one never waits for the GPU. NaN is kept: a mean, maximum or minimum that saw
    a NaN is NaN, and so is one over nothing on any rank.
    """

    def __init__(self, world: World):
        self.world = world
        self._parts: dict[str, tuple[str, list[tuple[Number, ...]]]] = {}  # name -> (kind, what was added)

    def add_mean(self, name: str, total: Number, count: Number) -> None:
        """Adds `count` elements that sum to `total` to a mean over everything added on all ranks."""
        self._add(name, "mean", total, count)

    def add_std(self, name: str, total: Number, squares: Number, *, count: Number) -> None:
        """Adds elements, by their sum and sum of squares, to a standard deviation over all ranks (divided by n - 1)."""
        self._add(name, "std", total, squares, count)

    def add_effective_share(self, name: str, total: Number, squares: Number, *, count: Number) -> None:
        """Adds weights, by their sum and sum of squares, to (sum w)^2 / (count x sum w^2) over all ranks."""
        self._add(name, "effective_share", total, squares, count)

    def add_sum(self, name: str, value: Number) -> None:
        """Adds to a sum over all ranks."""
        self._add(name, "sum", value)

    def add_max(self, name: str, value: Number, count: Number = 1) -> None:
        """Adds the maximum of `count` elements; ignored where count is 0."""
        self._add(name, "max", value, count)

    def add_min(self, name: str, value: Number, count: Number = 1) -> None:
        """Adds the minimum of `count` elements; ignored where count is 0."""
        self._add(name, "min", value, count)

    def add_stats(self, prefix: str, values: Tensor) -> None:
        """Adds a tensor's elements to prefix/mean, prefix/max and prefix/min; it may be empty."""
        values, count = values.detach(), values.numel()
        self.add_mean(f"{prefix}/mean", values.sum(dtype=torch.float64), count)
        self.add_max(f"{prefix}/max", values.max() if count else math.nan, count)
        self.add_min(f"{prefix}/min", values.min() if count else math.nan, count)

    def set(self, name: str, value: Number) -> None:
        """Sets a number that is the same on all ranks, such as the learning rate; the last call of a step counts."""
        self._parts.pop(name, None)
        self._add(name, "set", value)

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Adds the wall seconds of its body to timing_s/NAME: the sum of a step's bodies, of the slowest rank."""
        self._wait_for_gpu()
        start = time.perf_counter()
        yield
        self._wait_for_gpu()
        self._add(f"timing_s/{name}", "time", time.perf_counter() - start)

    def reduce(self) -> dict[str, float]:
        """Every name of any rank with its value over all ranks, the same dict on every rank.

        Executed by all ranks, with one collective; a rank may lack names that others have.
        """
        parts = [(name, kind, row) for name, (kind, rows) in self._parts.items() for row in rows]
        numbers = iter(_read([number for _, _, row in parts for number in row]))
        rows: dict[tuple[str, str], list[tuple[float, ...]]] = defaultdict(list)
        for name, kind, row in parts:
            rows[name, kind].append(tuple(next(numbers) for _ in row))
        mine = {key: _merge(key[1], values) for key, values in rows.items()}
        gathered: dict[tuple[str, str], list[tuple[float, ...]]] = defaultdict(list)
        for of_rank in self.world.gather(mine):
            for (name, kind), row in of_rank.items():
                if kind == "time":  # a rank's own seconds are added up; the slowest rank holds up the others
                    kind, row = "max", (*row, 1.0)
                gathered[name, kind].append(row)
        assert len({name for name, _ in gathered}) == len(gathered), "ranks disagree about how to reduce a metric"
        return {name: _result(kind, _merge(kind, values)) for (name, kind), values in gathered.items()}

    def _add(self, name: str, kind: str, *row: Number) -> None:
        known, rows = self._parts.setdefault(name, (kind, []))
        assert known == kind, f"{name} is a {known}, not a {kind}"
        rows.append(tuple(number if _on_gpu(number) else float(number) for number in row))

    def _wait_for_gpu(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)


def _on_gpu(number: Number) -> bool:
    return isinstance(number, Tensor) and number.device.type != "cpu"


def _read(numbers: list[Number]) -> list[float]:
    """The numbers as floats; those on the GPU come over in one copy."""
    on_gpu = [number.detach().double().reshape(()) for number in numbers if _on_gpu(number)]
    read = iter(torch.stack(on_gpu).tolist() if on_gpu else [])
    return [next(read) if _on_gpu(number) else float(number) for number in numbers]


def _merge(kind: str, rows: list[tuple[float, ...]]) -> tuple[float, ...]:
    """One row for several: of a rank's own additions first, then of all ranks."""
    if kind == "set":
        return rows[0]
    if kind in ("max", "min"):
        seen = [value for value, count in rows if count > 0]
        pick = max if kind == "max" else min
        value = math.nan if not seen or any(map(math.isnan, seen)) else pick(seen)
        return value, sum(count for _, count in rows)
    return tuple(sum(column) for column in zip(*rows, strict=True))


def _result(kind: str, row: tuple[float, ...]) -> float:
    if kind == "mean":
        total, count = row
        return total / count if count else math.nan
    if kind == "std":
        total, squares, count = row
        variance = (squares - total * total / count) / (count - 1) if count > 1 else math.nan
        return 0.0 if variance < 0 else math.sqrt(variance)  # below 0 by rounding only; NaN stays NaN
    if kind == "effective_share":
        total, squares, count = row
        return total * total / (count * squares) if squares else math.nan
    return row[0]


# ---- Data ----


def data_metrics(batch: Batch, metrics: Metrics, *, max_prompt_len: int) -> None:
    """Adds critic/score, response_length/*, prompt_length/*, response/* and reward/* of the step's rows, as scored.

    Before a correction or the length limit leaves any of them out. Local to the rank.
    """
    metrics.add_stats("critic/score", batch.scores[batch.valid])
    metrics.add_mean(
        "training/stale_tokens_ratio", (batch.stale & batch.response_mask).sum(), batch.response_mask.sum()
    )
    metrics.add_stats("response_length", batch.response_lens)
    metrics.add_stats("prompt_length", batch.prompt_lens)
    for name, flags in {
        "response_length/clip_ratio": batch.truncated,
        "prompt_length/clip_ratio": batch.prompt_lens >= max_prompt_len,
        "response/aborted_ratio": batch.response_lens == 0,
        "reward/excluded_ratio": ~batch.valid,
    }.items():
        metrics.add_mean(name, flags.sum(), len(batch))


def advantage_metrics(batch: Batch, metrics: Metrics) -> None:
    """Adds critic/rewards, critic/advantages, critic/returns, with a critic its values, and how many rows train.

    Also reward/constant_group_ratio, of all rewards that train. Executed by all ranks together, after the advantages
    are known (a group may be spread over ranks).
    """
    rewards = response_rewards(batch)  # (B,)
    metrics.add_stats("critic/rewards", rewards[batch.valid])
    metrics.add_stats("critic/advantages", batch.advantages[batch.response_mask])
    metrics.add_stats("critic/returns", batch.returns[batch.response_mask])
    metrics.add_mean("training/excluded_ratio", (~batch.valid).sum(), len(batch))
    if batch.values is not None:
        metrics.add_stats("critic/values", batch.values[batch.response_mask])
        explained = explained_variance(batch.values, batch.returns, batch.response_mask, metrics.world)
        metrics.set("critic/vf_explained_var", explained)
    groups: dict[int, set[tuple[float, ...]]] = defaultdict(set)
    trains = rewards[:, None] if batch.named_rewards is None else torch.column_stack((rewards, batch.named_rewards))
    rows = list(zip(batch.uids.tolist(), map(tuple, trains.tolist()), batch.valid.tolist(), strict=True))
    for uid, numbers, valid in (row for of_rank in metrics.world.gather(rows) for row in of_rank):
        groups[uid].update([numbers] if valid else [])
    constant = sum(len(different) < 2 for different in groups.values())
    metrics.set("reward/constant_group_ratio", constant / len(groups) if groups else math.nan)


def constant_reward_warning(constant_group_ratios: Sequence[float]) -> str | None:
    """A warning when all groups of the last 3 steps that had any had equal rewards, else None.

    Takes the steps' reward/constant_group_ratio, NaN without a group. Such steps have advantages of exactly zero and
    train nothing.
    """
    recent = [ratio for ratio in constant_group_ratios if not math.isnan(ratio)][-3:]
    if len(recent) < 3 or any(ratio < 1.0 for ratio in recent):
        return None
    return (
        "no signal: 100 % of the groups had equal rewards in each of the last 3 steps that had any, so nothing is "
        "learned; look at the responses in samples/ and at the reward function, or use prompts solved only sometimes"
    )


# ---- Update ----


def update_metrics(
    metrics: Metrics, mask: Tensor, *, terms: Mapping[str, Tensor], stats: Mapping[str, Tensor], num_updates: int,
    role: Literal["actor", "critic"] = "actor",
) -> None:  # fmt: skip
    """Adds ROLE/NAME of a micro-batch: losses summed over micro-batches and ranks, other numbers as token means.

    `terms` are this micro-batch's shares of a mini-batch's losses (scalars), averaged over the step's `num_updates`
    optimizer steps; `stats` are (b, t), averaged over the True places of `mask` (b, t).
    """
    for name, share in terms.items():
        metrics.add_sum(f"{role}/{name}", share.detach() / num_updates)
    for name, values in stats.items():
        metrics.add_mean(f"{role}/{name}", torch.where(mask, values.detach(), 0.0).sum(), mask.sum())


# ---- Speed ----

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


def flops_forward(config: Mapping[str, Any], seq_lens: Sequence[int], response_lens: Sequence[int]) -> float:
    """FLOPs of one forward pass over packed sequences of one of `ARCHITECTURES`.

    `config` is a Hugging Face config as a dict; `seq_lens` counts prompt and response tokens. A matrix product with P
    parameters costs 2P per token (one multiplication, one addition). With hidden size h, L layers, H query heads and K
    key-value heads of dimension d, MLP width f, vocabulary V:

        block parameters    N = L * (h*H*d [q] + 2*h*K*d [k, v] + H*d*h [o] + 3*h*f [gate, up, down])
        blocks              2 * N * sum(l)
        attention           L * 2 products (q k^T and p v) * 2*H*d * sum(l^2 / 2) = 2 * L*H*d * sum(l^2)
        head                2 * V*h * sum(r), on response positions only

    Causal attention needs half of the l x l products. The embedding is a look-up and costs nothing; norms, rotary
    embeddings and softmax are not counted. A backward pass costs twice as much; recomputation and padding are overhead,
    not work, so they do not count.
    """
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    attention = 2 * hidden * (heads + num_kv_heads(config)) * head_dim(config)
    block_params = layers * (attention + 3 * hidden * config["intermediate_size"])
    return float(
        2 * block_params * sum(seq_lens)
        + 2 * layers * heads * head_dim(config) * sum(length * length for length in seq_lens)
        + 2 * config["vocab_size"] * hidden * sum(response_lens)
    )


def perf_metrics(
    batch: Batch,
    timings: Mapping[str, float],
    world: World,
    *,
    model_config: Mapping[str, Any],
    update_epochs: int = 1,
    engine_bytes: int = 0,
) -> dict[str, float]:
    """perf/* and timing_per_token_ms/* of a step, from this rank's rows and the reduced timing_s/* of all ranks.

    `engine_bytes` are counted by torch's allocator for the engine though they are unmapped while it sleeps; the peaks
    leave them out. `timings` must have timing_s/step. MFU is absent where the GPU is unknown.
    Executed by all ranks.
    """
    lens, response_lens = batch.total_lens.tolist(), batch.response_lens.tolist()
    flops = flops_forward(model_config, lens, response_lens)
    on_gpu = world.device.type == "cuda"
    peak = peak_flops(torch.cuda.get_device_name(world.device)) if on_gpu else None
    mine = {"tokens": sum(lens), "responses": sum(response_lens), "flops": flops, "cpu": _node_memory_used()}
    if on_gpu:
        mine["allocated"] = torch.cuda.max_memory_allocated(world.device) - engine_bytes
        mine["reserved"] = torch.cuda.max_memory_reserved(world.device) - engine_bytes
    ranks = world.gather(mine)
    tokens, responses, flops = (sum(rank[key] for rank in ranks) for key in ("tokens", "responses", "flops"))

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
    passes = {"actor": ("update_actor", 3 * update_epochs), "actor_infer": ("old_log_prob", 1)}
    for name, (phase, forwards) in passes.items():
        if peak and flops and f"timing_s/{phase}" in timings:
            result[f"perf/mfu/{name}"] = forwards * flops / (timings[f"timing_s/{phase}"] * peak * world.size)
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


# ---- Trainer against engine ----


def mismatch_metrics(log_probs: Tensor, batch: Batch, metrics: Metrics) -> None:
    """Adds training/rollout_probs_diff_* and training/rollout_log_probs_diff/* of a micro-batch's response tokens.

    `log_probs` (b, T) are of the pass before the update or, where there is none, of the update's own forward over the
    first mini-batch: those of the policy that generated. What an older one sampled is left out. A token that is not
    finite on either side is counted, not compared. Adds nothing when the engine reported no log-probs.
    """
    if batch.rollout_log_probs is None or log_probs.numel() == 0:
        return
    trainer, engine = log_probs.detach().double(), batch.rollout_log_probs.double()  # (b, T)
    finite = torch.isfinite(trainer) & torch.isfinite(engine)
    used = batch.response_mask & finite & ~batch.stale
    trainer, engine = torch.where(used, trainer, 0.0), torch.where(used, engine, 0.0)
    log_diff, diff = (trainer - engine).abs(), (trainer.exp() - engine.exp()).abs()  # 0 where not used
    count = used.sum()
    metrics.add_mean("training/rollout_log_probs_diff/mean", log_diff.sum(), count)
    metrics.add_max("training/rollout_log_probs_diff/max", log_diff.max(), count)
    metrics.add_mean("training/rollout_probs_diff_mean", diff.sum(), count)
    metrics.add_max("training/rollout_probs_diff_max", diff.max(), count)
    metrics.add_std("training/rollout_probs_diff_std", diff.sum(), diff.square().sum(), count=count)
    metrics.add_max("training/rollout_probs_diff_valid", count > 0)
    metrics.add_sum("training/rollout_log_probs_nonfinite", (batch.response_mask & ~finite).sum())


# ---- Validation ----


ScoredResponse = tuple[str, int, Mapping[str, float | str | bool]]
"""data_source, prompt uid, and `reward` with what else the reward function returned; `pred` is the extracted answer."""


MAX_VARIABLES = 100  # of a run


def limit_variables(responses: Sequence[ScoredResponse], known: set[str]) -> tuple[list[ScoredResponse], int]:
    """The responses without the numbers whose names are not in `known`, and how many names that leaves out.

    First `known` gets the names that are new, those that most responses have first, until it has MAX_VARIABLES: a
    reward function may make names of a response's text, and each becomes columns of metrics.
    """
    names = Counter(name for _, _, values in responses for name, value in values.items() if not isinstance(value, str))
    for name in sorted(names.keys() - known, key=lambda name: (-names[name], name))[: MAX_VARIABLES - len(known)]:
        known.add(name)
    kept = [
        (source, uid, {name: value for name, value in values.items() if isinstance(value, str) or name in known})
        for source, uid, values in responses
    ]
    return kept, len(names.keys() - known)


def validation_metrics(responses: Sequence[ScoredResponse], *, largest: int) -> dict[str, float]:
    """val-core/* and val-aux/* of all ranks' scored responses, per data source and variable, averaged over prompts.

    Variables are `reward` and every number or bool beside it. With N responses per prompt (`largest`, of which some may
    have no score): mean@N; for N > 1 also std@N and, for n = 2, 4, 8, ... below N and for N itself, best@n, worst@n and
    (where there are answers) maj@n: mean and standard deviation over 1000 draws of n responses with replacement (numpy
    seed 42). The core variable of a source is `acc` if there is one, else `reward`.
    """
    result = {}
    for source in sorted({source for source, _, _ in responses}):
        prompts: dict[int, list[Mapping[str, float | str | bool]]] = defaultdict(list)
        for _, uid, values in (response for response in responses if response[0] == source):
            prompts[uid].append(values)
        values_of_all = [values for group in prompts.values() for values in group]
        names = {name for values in values_of_all for name, value in values.items() if not isinstance(value, str)}
        names.discard("pred")  # an answer, even where it is a number
        core = "acc" if "acc" in names else "reward"
        for name in sorted(names):
            for metric, value in _variable_metrics(prompts.values(), name, largest).items():
                is_core = name == core and re.fullmatch(rf"(mean|best|maj)@{largest}(/.*)?", metric)
                result[f"{'val-core' if is_core else 'val-aux'}/{source}/{name}/{metric}"] = value
    return result


def _variable_metrics(prompts: Iterable[Sequence[Mapping[str, Any]]], name: str, largest: int) -> dict[str, float]:
    """mean@N and its companions of one variable of one source, averaged over prompts."""
    per_prompt: dict[str, list[float]] = defaultdict(list)
    sizes = [2**k for k in range(1, largest.bit_length()) if 2**k < largest] + [largest]
    for responses in prompts:
        having = [values for values in responses if not isinstance(values.get(name, ""), str)]
        if not having:
            continue
        values, preds = np.array([float(values[name]) for values in having]), [values.get("pred") for values in having]
        per_prompt[f"mean@{largest}"].append(values.mean())
        if largest == 1:
            continue
        per_prompt[f"std@{largest}"].append(values.std())
        for n in sizes:
            draws = _draws(len(values), n)  # (1000, n)
            picked = {f"best@{n}": values[draws].max(axis=1), f"worst@{n}": values[draws].min(axis=1)}
            if None not in preds:
                picked[f"maj@{n}"] = _majority_values(values, preds, draws)
            for metric, of_draws in picked.items():
                per_prompt[f"{metric}/mean"].append(of_draws.mean())
                per_prompt[f"{metric}/std"].append(of_draws.std())
    return {metric: float(np.mean(values)) for metric, values in per_prompt.items()}


@lru_cache(maxsize=64)
def _draws(size: int, n: int) -> np.ndarray:
    """(1000, n) indices below `size`, drawn with replacement; the same for every prompt."""
    return np.random.RandomState(42).choice(size, size=(1000, n), replace=True)


def _majority_values(values: np.ndarray, preds: Sequence[Any], draws: np.ndarray) -> np.ndarray:
    """(draws,) the value of each draw's most frequent answer; of equally frequent ones, of the first drawn."""
    answers = np.unique([str(pred) for pred in preds], return_inverse=True)[1][draws]  # (draws, n)
    counts = (answers[:, :, None] == answers[:, None, :]).sum(axis=2)  # (draws, n), how often the answer was drawn
    first = counts.argmax(axis=1)  # argmax takes the first of equals
    return values[draws[np.arange(len(draws)), first]]
