"""Measures training steps on random weights: where the time goes, and how far it is from the machine's limit.

    torchrun --nproc_per_node=1 -m recipes.bench --workload P1

It runs train_grpo.py's own loop on a model with random weights and made-up prompts, in a temporary folder: one step to
warm up, then the measured ones. In the last one the same requests also go through vLLM's own `LLM.generate`, whose
seconds are taken off the step's.
"""

import gc
import heapq
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal
from unittest.mock import patch

import torch

import train_grpo
from lib.checkpoints import CheckpointConfig
from lib.config import parse_cli, reporting_errors
from lib.data import DataConfig, write_rows
from lib.dist import World, init_distributed
from lib.engine import RolloutConfig, RolloutEngine, Sampling
from lib.errors import UserError
from lib.launch import setup
from lib.model import FSDPConfig, LoRAConfig, ModelConfig, OptimConfig, flops_forward, forward_policy, peak_flops
from lib.rewards import RewardConfig
from lib.rollouts import EvalConfig
from lib.tracking import Metrics, StartupTimer, read_metrics
from lib.tracking.console import format_table
from lib.types import Batch, Rollout, Sample

FLOPS = 790e12  # bf16 FLOP/s of large matrix products on an H200, measured; nominal: 989e12
BYTES = 4.3e12  # byte/s of its memory, measured


@dataclass(frozen=True)
class Workload:
    """One row of the benchmark: a shape, its prompts and its responses."""

    shape: str
    prompts: int
    response_len: int
    mean_len: int = 0
    """Mean of geometric lengths, in tokens; 0: every response has `response_len` tokens."""
    n: int = 8
    max_tokens_per_gpu: int = 8192
    adapter_max_tokens_per_gpu: int = 0
    """With adapters, which leave memory for more, and then wait less for the host; 0: as many."""
    gpu_memory_utilization: float = 0.5
    optimizer_offload: bool = False
    """Where all weights train."""


WORKLOADS = {
    "tiny": Workload("tiny", 4, 16, n=4, max_tokens_per_gpu=2048),
    "P1": Workload("1.7b", 64, 512, max_tokens_per_gpu=7168, adapter_max_tokens_per_gpu=10240),
    "P2": Workload("0.6b", 256, 1024, mean_len=256, max_tokens_per_gpu=24576),
    "P3": Workload("4b", 64, 512, gpu_memory_utilization=0.45),
    "P4": Workload("0.6b", 64, 4096, max_tokens_per_gpu=32768, gpu_memory_utilization=0.85),
    "P5": Workload("8b", 512, 1024, mean_len=256),
    "P6": Workload("8b", 64, 512, gpu_memory_utilization=0.6, optimizer_offload=True),
    "gemma-3-1b": Workload("gemma-3-1b", 32, 256),
    "phi-4-mini": Workload("phi-4-mini", 32, 256),
    "olmo-3-7b": Workload("olmo-3-7b", 32, 256, gpu_memory_utilization=0.6, optimizer_offload=True),
}
FIGURES = {
    "step_s_median": "seconds of a measured step, its validation and logging left out: median",
    "step_s_min": "fastest step",
    "step_s_max": "slowest step",
    "rollout_s": "seconds of generation, median",
    "update_s": "seconds of the policy update (forward, backward, optimizer), median",
    "gen_tok_per_s": "response tokens of all GPUs / rollout_s",
    "rollout_ratio": "our tokens/s on the last step's requests / those of vLLM's own LLM.generate on the same ones, "
    "once each; above 1: we are faster",
    "rollout_idle": "share of the generation that a GPU waits for the slowest one, mean over GPUs, last step",
    "raw_generate_s": "seconds of that LLM.generate: ids only, final outputs only, garbage collector off",
    "mfu_update": "FLOPs of the update (3 forward passes, about 2 with --lora-rank; recompute and padding do not "
    "count) / update_s / GPUs / 790e12, an H200's measured rate",
    "mfu_update_nominal": "the same of the GPU's nominal rate (H200: 989e12)",
    "mfu_logprob": "FLOPs of the log-prob pass likewise; null with one update per rollout, which needs no such pass",
    "sync_s": "seconds to copy the policy's weights into the engine, median",
    "sync_gbps": "bytes of the weights in the compute precision / sync_s, in GB/s",
    "verify_s": "seconds to compare checksums of 8 engine tensors, median",
    "sleep_s": "seconds to free the engine's memory, median; about 0 where it fits beside the update and stays",
    "wake_s": "seconds to map it again (weights and KV cache), median",
    "memory_after_sleep_gib": "GPU memory in use once the engine sleeps (if it does), by the trainer too; largest, GiB",
    "peak_allocated_gib": "most memory that tensors took within a phase, GiB; those of an engine that sleeps left out",
    "padding_fraction": "padding / all tokens computed in the update",
    "overhead_s": "seconds of a step outside all phases, median",
    "outside_share": "share of a step outside generation and update",
    "log_probs_diff_mean": "mean |log-prob of the trainer - of the engine| on the sampled tokens, nats; largest step",
    "grad_norm_min": "smallest gradient norm of a step; 0 would mean that nothing was trained",
    "pissa_init_s": "seconds of PiSSA's decompositions; null without --lora-init pissa",
    "pissa_was_cached": "1 where an earlier run's were found instead, 0 where not; null likewise",
    "launch_to_first_step_s": "seconds from the launch to the first step, making the model and data left out",
    "roofline_rollout_s": "limit of the rollout on an H200: prefill at 790 TFLOP/s, "
    "decoding at that or at 4.3 TB/s, whichever is slower, with the sequences in flight that the KV cache holds; no "
    "host time",
    "roofline_update_s": "limit of the update: 3 forward passes at 790 TFLOP/s, 32 bytes per parameter for AdamW; "
    "null with --lora-rank",
    "step_over_roofline": "step_s_median / (roofline_rollout_s + roofline_update_s)",
}


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    workload: Literal["tiny", "P1", "P2", "P3", "P4", "P5", "P6", "gemma-3-1b", "phi-4-mini", "olmo-3-7b"] = "P1"
    """Shape, prompts per step and response length: see WORKLOADS in recipes/bench.py."""
    steps: int = 3
    """Measured steps."""
    log_probs: bool = True
    """Let the engine report log-probs, so that engine and trainer are compared in every step."""
    weak_scaling: bool = False
    """As many times the workload's prompts as there are GPUs."""
    updates: int = 1
    """Optimizer steps per rollout; above 1 there is a pass for the old log-probs."""
    max_tokens_per_gpu: int | None = None
    """Tokens of a micro-batch; None: the workload's."""
    gradient_checkpointing: bool | None = None
    """Recompute each layer in the backward pass; None: only where the update would not fit without."""
    sleep: bool | None = None
    """Free the engine's memory during the update; None: only where the update would not fit beside it."""
    fast_paths: Literal["auto", "off"] = "auto"
    """--rollout.fast-paths of the run."""
    lora_rank: int = 0
    """--lora.rank of the run; above 0 the optimizer's moments, which are small then, stay on the GPU."""
    lora_init: Literal["kaiming", "pissa"] = "kaiming"
    """--lora.init of the run."""
    out: str | None = None
    """File for the JSON line, beside the terminal."""


BenchConfig.__doc__ = f"{__doc__}\nFigures (null where the device has none):\n" + "".join(
    f"\n  {name}: {meaning}" for name, meaning in FIGURES.items()
)


def main(cfg: BenchConfig) -> None:
    """Prints the table and the JSON line on rank 0."""
    started = time.monotonic()
    world = init_distributed()
    workload = WORKLOADS[cfg.workload]
    folder = world.gather(make_folder(cfg.workload) if world.rank == 0 else None)[0]
    try:
        config = training_config(cfg, workload, folder, world)
        if world.rank == 0:
            write_inputs(workload, folder, num_prompts=config.prompts_per_step)
        world.gather(None)  # the others wait for the files
        prepared = time.monotonic() - started
        probes = Probes(num_steps=config.num_steps)
        with probes.installed(), reporting_errors(debug=True):
            train_grpo.train(config)
        if world.rank == 0:
            rows = [row for row in read_metrics(Path(folder) / "run") if "timing_s/step" in row][1:]
            with_raw = rows[-1]["timing_s/gen"]
            rows[-1]["timing_s/gen"] = max(probes.seconds_by_rank)
            rows[-1]["timing_s/step"] -= with_raw - max(probes.seconds_by_rank)
            report(
                figures(rows, probes, read_shape(f"{folder}/model"), config, workload, world, prepared_s=prepared),
                rows, cfg, world,
            )  # fmt: skip
    finally:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


# ---- What is run ----


def training_config(cfg: BenchConfig, workload: Workload, folder: str, world: World) -> train_grpo.GRPOConfig:
    """The workload as a configuration of train_grpo.py."""
    if cfg.steps < 1 or cfg.updates < 1:
        raise UserError(
            f"too few steps or updates; --steps {cfg.steps} --updates {cfg.updates}; expected 1 or more; raise it"
        )
    prompts = workload.prompts * (world.size if cfg.weak_scaling else 1)
    own = (cfg.lora_rank and workload.adapter_max_tokens_per_gpu) or workload.max_tokens_per_gpu
    return train_grpo.GRPOConfig(
        model=ModelConfig(path=f"{folder}/model", gradient_checkpointing=cfg.gradient_checkpointing),
        data=DataConfig(train_files=(f"{folder}/prompts.parquet",), max_prompt_len=256),
        reward=RewardConfig(path=str(Path(__file__).with_name("hash_reward.py"))),
        rollout=RolloutConfig(
            n=workload.n,
            max_response_len=workload.response_len,
            ignore_eos=not workload.mean_len,
            log_probs=cfg.log_probs,
            sleep=cfg.sleep,
            fast_paths=cfg.fast_paths,
            gpu_memory_utilization=workload.gpu_memory_utilization,
        ),
        prompts_per_step=prompts,
        mini_batch_size=prompts * workload.n // cfg.updates,
        max_tokens_per_gpu=own if cfg.max_tokens_per_gpu is None else cfg.max_tokens_per_gpu,
        num_steps=cfg.steps + 1,
        lora=LoRAConfig(rank=cfg.lora_rank, init=cfg.lora_init),
        optim=OptimConfig(lr=1e-5),
        fsdp=FSDPConfig(optimizer_offload=workload.optimizer_offload and not cfg.lora_rank),
        eval=EvalConfig(every=0),
        checkpoint=CheckpointConfig(every_minutes=0, at_end=False),
        run_dir=f"{folder}/run",
    )


def make_folder(workload: str) -> str:
    """A new temporary folder; where no other run uses it, of the same name every time: vLLM finds what it has compiled
    for a model by the model's path."""
    folder = Path(tempfile.gettempdir()) / f"lockstep-bench-{workload}"
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return tempfile.mkdtemp(prefix=f"{folder.name}-")
    return str(folder)


def write_inputs(workload: Workload, folder: str, *, num_prompts: int) -> None:
    """The model's folder, and prompts about as long as GSM8K's (40 to 220 tokens, mean about 100)."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 6))) for _ in range(2000)]

    def row(index: int) -> dict[str, Any]:
        length = min(max(round(rng.lognormvariate(4.5, 0.35)), 36), 210)
        return {
            "data_source": "bench",
            "prompt": [{"role": "user", "content": " ".join(rng.choices(words, k=length))}],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }

    write_rows(Path(folder) / "prompts.parquet", [row(index) for index in range(2 * num_prompts)])
    subprocess.run(
        [sys.executable, "-m", "recipes.make_random_model", "--shape", workload.shape, "--out", f"{folder}/model",
         "--texts", f"{folder}/prompts.parquet", "--mean-len", str(workload.mean_len)],
        check=True,
    )  # fmt: skip


class Probes:
    """What the loop does not log: taken by standing in for names that train_grpo.py and its setup call."""

    def __init__(self, *, num_steps: int) -> None:
        self.num_steps = num_steps
        self.launch_to_first_step_s = 0.0
        self.adapter_start = 0.0, False
        self.real_tokens = self.computed_tokens = 0
        self.raw_s = self.ours_s = 0.0
        self.seconds_by_rank: list[float] = []
        self.raw_tokens = self.ours_tokens = 0
        self.response_lens: list[int] = []
        self.prompt_lens: list[int] = []
        self.kv_cache_tokens = self.max_num_seqs = 0
        self.pool_bytes = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        probes = self

        class Timer(StartupTimer):
            def table(self) -> str:
                probes.launch_to_first_step_s = self.total
                return super().table()

        class PhaseMetrics(Metrics):
            @contextmanager
            def time(self, name: str) -> Iterator[None]:
                on_gpu = self.world.device.type == "cuda"
                if on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                with super().time(name):
                    yield
                if on_gpu:
                    free, total = torch.cuda.mem_get_info()
                    self.add_max(f"memory_gib/{name}/allocated", torch.cuda.max_memory_allocated() / 2**30)
                    self.add_max(f"memory_gib/{name}/reserved", torch.cuda.max_memory_reserved() / 2**30)
                    self.add_max(f"memory_gib/{name}/device", (total - free) / 2**30)

        class Engine(RolloutEngine):
            calls = 0

            def generate(self, samples: list[Sample], sampling: Sampling, **keywords: Any) -> Iterator[list[Rollout]]:
                self.calls += keywords.get("stream", "train") == "train"  # not the start's proof
                started, groups = time.perf_counter(), []
                for group in super().generate(samples, sampling, **keywords):
                    groups.append(group)
                    yield group
                if self.calls == probes.num_steps:
                    probes.ours_s = time.perf_counter() - started
                    probes.seconds_by_rank = self.world.gather(probes.ours_s)
                    probes.ours_tokens = sum(len(rollout.response_ids) for group in groups for rollout in group)
                    probes.raw_s, probes.raw_tokens = generate_raw(self, samples, sampling)
                    probes.response_lens = [len(rollout.response_ids) for group in groups for rollout in group]
                    probes.prompt_lens = [len(sample.prompt_ids) for sample in samples]
                    probes.kv_cache_tokens, probes.pool_bytes = self.kv_cache_tokens, self.pool_bytes
                    probes.max_num_seqs = self.max_num_seqs

        def forward(policy: Any, micro_batch: Batch, **keywords: Any) -> Any:
            probes.real_tokens += int(micro_batch.total_lens[micro_batch.response_mask.any(1)].sum())
            probes.computed_tokens += int(micro_batch.total_lens.sum())
            return forward_policy(policy, micro_batch, **keywords)

        begin_adapter = setup.begin_adapter_

        def begin(*args: Any) -> bool:
            started = time.perf_counter()
            was_cached = begin_adapter(*args)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            probes.adapter_start = time.perf_counter() - started, was_cached
            return was_cached

        in_script = {"StartupTimer": Timer, "Metrics": PhaseMetrics, "forward_policy": forward}
        in_setup = {"RolloutEngine": Engine, "begin_adapter_": begin}
        with patch.multiple(train_grpo, **in_script), patch.multiple(setup, **in_setup):
            yield


def generate_raw(engine: RolloutEngine, samples: list[Sample], sampling: Sampling) -> tuple[float, int]:
    """Seconds and response tokens of vLLM's own `LLM.generate` on the same requests: the yardstick."""
    llm = engine._llm
    llm.reset_prefix_cache()
    params = [engine._sampling_params(sampling, sample, "train") for sample in samples]
    prompts = [{"prompt_token_ids": sample.prompt_ids} for sample in samples]
    gc.collect()
    gc.disable()  # as our engine samples
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    gc.enable()
    return seconds, sum(len(response.token_ids) for output in outputs for response in output.outputs)


# ---- What comes out ----


def figures(
    rows: Sequence[dict[str, Any]], probes: Probes, model: dict[str, Any], config: train_grpo.GRPOConfig,
    workload: Workload, world: World, *, prepared_s: float,
) -> dict[str, float | None]:  # fmt: skip
    """Every figure of FIGURES, None where the device has none."""
    on_gpu = world.device.type == "cuda"
    device = torch.cuda.get_device_name(world.device) if on_gpu else "cpu"
    peak = peak_flops(device) or 0.0

    def middle(name: str) -> float | None:
        values = [row[f"timing_s/{name}"] for row in rows if f"timing_s/{name}" in row]
        return median(values) if values else None

    def share_of_limit(name: str) -> float | None:
        values = [row[f"perf/mfu/{name}"] for row in rows if f"perf/mfu/{name}" in row]
        return median(values) * peak / FLOPS if values else None

    step, gen, update = middle("step"), middle("gen"), middle("update_actor")
    phases = ("update_weights", "gen", "sleep", "reward", "old_log_prob", "adv", "update_actor")
    rests = [row["timing_s/step"] - sum(row.get(f"timing_s/{name}", 0.0) for name in phases) for row in rows]
    num_tokens = fmean(row["response_length/mean"] for row in rows) * config.prompts_per_step * workload.n
    num_parameters = count_parameters(model)
    peaks = [value for row in rows for name, value in row.items() if name.endswith("/allocated")]
    result: dict[str, float | None] = {
        "step_s_median": step,
        "step_s_min": min(row["timing_s/step"] for row in rows),
        "step_s_max": max(row["timing_s/step"] for row in rows),
        "rollout_s": gen,
        "update_s": update,
        "gen_tok_per_s": num_tokens / gen,
        "rollout_ratio": probes.ours_tokens / probes.ours_s / (probes.raw_tokens / probes.raw_s),
        "rollout_idle": 1 - fmean(probes.seconds_by_rank) / max(probes.seconds_by_rank),
        "raw_generate_s": probes.raw_s,
        "mfu_update": share_of_limit("actor"),
        "mfu_update_nominal": share_of_limit("actor") and share_of_limit("actor") * FLOPS / peak,
        "mfu_logprob": share_of_limit("actor_infer"),
        "sync_s": middle("sync_weights"),
        "sync_gbps": num_parameters * (2 if on_gpu else 4) / middle("sync_weights") / 1e9,
        "verify_s": middle("verify_weights"),
        "sleep_s": middle("sleep"),
        "wake_s": middle("wake"),
        "memory_after_sleep_gib": max(row["perf/memory_after_sleep_gb"] for row in rows) if on_gpu else None,
        "peak_allocated_gib": max(peaks) - probes.pool_bytes / 2**30 if peaks else None,
        "padding_fraction": 1 - probes.real_tokens / probes.computed_tokens,
        "overhead_s": median(rests),
        "outside_share": 1 - (gen + update) / step,
        "log_probs_diff_mean": max(row.get("training/rollout_log_probs_diff/mean", 0.0) for row in rows)
        if config.rollout.log_probs
        else None,
        "grad_norm_min": min(row["actor/grad_norm"] for row in rows),
        "pissa_init_s": probes.adapter_start[0] if config.lora.init == "pissa" else None,
        "pissa_was_cached": float(probes.adapter_start[1]) if config.lora.init == "pissa" else None,
        "launch_to_first_step_s": probes.launch_to_first_step_s - prepared_s,
        "roofline_rollout_s": None,
        "roofline_update_s": None,
        "step_over_roofline": None,
    }
    if "H200" in device:
        rollout_s, update_s = rooflines(model, probes, config, num_parameters, world)
        result["roofline_rollout_s"] = rollout_s
        if not config.lora.rank:
            result |= {"roofline_update_s": update_s, "step_over_roofline": step / (rollout_s + update_s)}
    assert set(result) == set(FIGURES)
    return result


def read_shape(folder: str) -> dict[str, Any]:
    """The model's config with transformers' defaults, and the size of a head, which some families leave out."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder).to_dict()
    return config | {"head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]}


def count_parameters(model: dict[str, Any], *, blocks_only: bool = False) -> int:
    """Parameters of a dense decoder by its config; norms left out."""
    hidden, head = model["hidden_size"], model["head_dim"]
    attention = 2 * hidden * head * (model["num_attention_heads"] + model["num_key_value_heads"])
    blocks = model["num_hidden_layers"] * (attention + 3 * hidden * model["intermediate_size"])
    embeddings = model["vocab_size"] * hidden * (1 if model["tie_word_embeddings"] else 2)
    return blocks if blocks_only else blocks + embeddings


def rooflines(
    model: dict[str, Any], probes: Probes, config: train_grpo.GRPOConfig, num_parameters: int, world: World
) -> tuple[float, float]:
    """Least seconds of rollout and update on this rank's share of the last step's responses, from FLOPs and bytes.

    A decode step of C sequences with mean context c costs the slower of reading weights and KV cache and of computing,
    plus one read and write of the logits (8 bytes each) by the sampler. Sequences in flight: as many as fit the KV
    cache at the responses' mean length, at most --max-num-seqs; when one ends, the next begins.
    """
    layers, heads, head = model["num_hidden_layers"], model["num_attention_heads"], model["head_dim"]
    block = count_parameters(model, blocks_only=True)
    vocabulary = model["vocab_size"] * model["hidden_size"]
    kv_bytes = 4 * layers * model["num_key_value_heads"] * head  # a token's key and value in bf16
    prompts = [length for length in probes.prompt_lens for _ in range(config.rollout.n)]
    lens = probes.response_lens
    mean_len = fmean(prompt + response for prompt, response in zip(prompts, lens, strict=True))
    in_flight = max(1, min(probes.max_num_seqs, int(probes.kv_cache_tokens / mean_len)))

    running: list[int] = []  # the decode steps at which the running responses end
    waiting, seconds, step, tokens = list(reversed(lens)), 0.0, 0, 0  # tokens: in the running responses so far
    while running or waiting:
        while waiting and len(running) < in_flight:
            heapq.heappush(running, step + waiting.pop())
        ends = running[0]
        count = len(running)
        for _ in range(ends - step):
            tokens += count
            context = tokens + count * fmean(prompts)
            memory = (2 * (block + vocabulary) + context * kv_bytes) / BYTES
            compute = (2 * count * (block + vocabulary) + 4 * layers * heads * head * context) / FLOPS
            seconds += max(memory, compute) + count * model["vocab_size"] * 8 / BYTES
        step = ends
        while running and running[0] == ends:
            heapq.heappop(running)
            tokens -= tokens // max(1, len(running) + 1)  # the one that ended had about the mean length
    prefill = 2 * block * sum(probes.prompt_lens) / FLOPS

    totals = [prompt + response for prompt, response in zip(prompts, lens, strict=True)]
    forward = flops_forward(model, totals, lens, block_parameters=block)
    return seconds + prefill, 3 * forward / FLOPS + 32 * num_parameters / world.size / BYTES


def report(values: dict[str, float | None], rows: Sequence[dict[str, Any]], cfg: BenchConfig, world: World) -> None:
    """Prints phases, memory and figures as tables, and the figures as one line of JSON."""
    names = sorted({name for row in rows for name in row if name.startswith("timing_s/")})
    lines = []
    for name in names:
        seconds = [row[name] for row in rows if name in row]
        lines.append((name.removeprefix("timing_s/"), *(f"{f(seconds):.3f}" for f in (median, min, max))))
    print(format_table(("phase, seconds", "median", "min", "max"), lines))
    peaks = sorted({name.split("/")[1] for row in rows for name in row if name.startswith("memory_gib/")})
    if peaks:
        kinds = ("allocated", "reserved", "device")
        memory = [(p, *(f"{max(row[f'memory_gib/{p}/{kind}'] for row in rows):.1f}" for kind in kinds)) for p in peaks]
        print(format_table(("peak GiB (the engine's pool counts as allocated)", *kinds), memory))
    shown = {name: "-" if value is None else f"{value:,.4g}" for name, value in values.items()}
    print(format_table(("figure", cfg.workload), list(shown.items())))
    where = {"workload": cfg.workload, "num_gpus": world.size, "torch": torch.__version__}
    line = json.dumps(
        where | {name: value if value is None else float(f"{value:.5g}") for name, value in values.items()}
    )
    print(line)
    if cfg.out:
        Path(cfg.out).write_text(line + "\n")


if __name__ == "__main__":
    main(parse_cli(BenchConfig()))
