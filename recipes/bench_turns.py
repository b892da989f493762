"""Measures conversations: many episodes of a few turns, answered after times as tools take them, in one engine.

    torchrun --nproc_per_node=1 -m recipes.bench_turns
    torchrun --nproc_per_node=2 -m recipes.bench_turns --tensor-parallel 2 --rows single l0_arrival l1_arrival

Nothing is trained: an engine with random weights, and the conversations that training samples with, their workers too.
Every episode has the same number of turns, and every turn the same number of tokens. For that no id ends a turn, and
one that has reached its length counts as ended: `TimedEngine`, here alone, says `stop` where vLLM says `length`.
What answers stands in recipes/slow_environments.py. Latencies are drawn once, by the seed, and lie in the episodes'
rows, so that every row of the table, and the simulation, has the same ones: L0 none; L1 lognormal, with a cap below the
time limit; L2 as L1, and one call in a hundred hangs until that limit, whereupon its episode is excluded.
A row is printed as soon as it has been measured, with the bars that it settles.
"""

import heapq
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch

from lib.config import parse_cli, reporting_errors
from lib.data import ChatTemplate, load_tokenizer, stop_token_ids, write_rows
from lib.dist import World, init_distributed, shutdown_distributed
from lib.engine import RolloutConfig, RolloutEngine, Sampling
from lib.errors import UserError
from lib.launch import check_engines
from lib.tracking.console import format_table
from lib.turns.appended import Appender
from lib.turns.config import TurnsConfig
from lib.turns.conversations import Conversations
from lib.turns.start import find_kinds, find_turns, open_sampler
from lib.types import Rollout, Sample

HANGING = 0.01
"""Share of L2's calls."""
HANG_S = 3600.0
CALIBRATED = (1 / 64, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)
"""Shares of a replica's episodes whose steps are timed for the simulation."""
CALIBRATION_LEN = 24
RowName = Literal["single", "l0_arrival", "l0_step", "l1_arrival", "l1_round", "l1_serial", "l2_arrival"]
Tools = Literal["threads", "loop"]
HEADER = f"  {'row':20}" + "".join(
    f"{it:>12}" for it in ("wall s", "steps s", "waited s", "tokens/s", "ms/turn", "ms/step", "with new", "excluded")
)
Bar = tuple[str, float, str, float]
"""A figure, its value, `>=` or `<=`, its bar."""


@dataclass(frozen=True)
class Workload:
    """A model's shape and its episodes; lengths in tokens, times in seconds."""

    shape: str
    prompts: int
    n: int
    prompt_len: int
    turns: int
    turn_len: int
    observed_len: int
    latency: tuple[float, float, float]
    """Median, sigma and cap of the lognormal."""
    timeout_s: float
    workers: int
    concurrency: int

    @property
    def response_len(self) -> int:
        return self.turns * self.turn_len + (self.turns - 1) * self.observed_len


WORKLOADS = {
    "tiny": Workload("tiny", 2, 4, 160, 4, 16, 32, (0.05, 1.0, 0.5), 2.0, 2, 16),
    "1.7b": Workload("1.7b", 64, 8, 512, 4, 256, 64, (0.5, 1.0, 9.5), 10.0, 8, 72),
}


@dataclass(frozen=True, kw_only=True)
class BenchTurnsConfig:
    workload: Literal["tiny", "1.7b"] = "1.7b"
    """The model's shape, the episodes and the latencies: see WORKLOADS in recipes/bench_turns.py."""
    rows: tuple[RowName, ...] = ("single", "l0_arrival", "l0_step", "l1_arrival", "l1_round", "l2_arrival")
    """What is measured, in this order. l1_serial has one tool answer after the other, as TRL 1.16 does: a quarter of an
    hour and more at 1.7b, so that it is summed up instead unless it is asked for."""
    tools: tuple[Tools, ...] = ("threads", "loop")
    """Synchronous tools, asynchronous ones, or both, each with a row of its own for l0_arrival, l1_arrival,
    l2_arrival."""
    prompts: int | None = None
    """Instead of the workload's, for a GPU whose memory does not hold all episodes."""
    tensor_parallel: int = 1
    """GPUs that share an engine; as many replicas as the ranks make of it."""
    gpu_memory_utilization: float = 0.88
    """Share of a GPU's memory for the engine."""
    fast_paths: Literal["auto", "off"] = "auto"
    """--rollout.fast-paths."""
    seed: int = 0
    """Of the latencies and of the sampling."""
    out: str | None = None
    """File for the JSON line, written anew after each row."""


BenchTurnsConfig.__doc__ = __doc__


def main(cfg: BenchTurnsConfig) -> None:
    """Prints rows, bars and the JSON line on rank 0."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # between the rows it would say that prefixes are dropped
    world = init_distributed()
    workload = WORKLOADS[cfg.workload]
    if cfg.prompts is not None:
        workload = replace(workload, prompts=cfg.prompts)
    rollout = RolloutConfig(
        n=workload.n, max_response_len=workload.response_len, tensor_model_parallel_size=cfg.tensor_parallel,
        gpu_memory_utilization=cfg.gpu_memory_utilization, fast_paths=cfg.fast_paths, sleep=False,
    )  # fmt: skip
    world.agree(lambda: check_engines(rollout, world))
    if workload.prompts < world.size // cfg.tensor_parallel:
        raise UserError(
            f"too few prompts; --prompts {workload.prompts}; found {world.size // cfg.tensor_parallel} replicas, "
            "expected at least a prompt for each; raise it"
        ).on_all_ranks()
    folder = world.gather(make_folder(cfg.workload) if world.rank == 0 else None)[0]
    try:
        if world.rank == 0:
            write_model(workload, folder)
        world.gather(None)  # the others wait for the files
        Bench(cfg, workload, rollout, folder, world).run()
    finally:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def make_folder(workload: str) -> str:
    """A new temporary folder, of the same name every time unless another run uses it: what vLLM has compiled for a
    model is found by the model's path."""
    folder = Path(tempfile.gettempdir()) / f"lockstep-bench-turns-{workload}"
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return tempfile.mkdtemp(prefix=f"{folder.name}-")
    return str(folder)


def write_model(workload: Workload, folder: str) -> None:
    """A model's folder without weights: the engine makes its own."""
    write_texts(folder)
    subprocess.run(
        [sys.executable, "-m", "recipes.make_random_model", "--shape", workload.shape, "--out", f"{folder}/model",
         "--texts", f"{folder}/texts.parquet", "--weights", "False"],
        check=True,
    )  # fmt: skip


def write_texts(folder: str) -> None:
    """What the tokenizer learns from: letters, so that every digit is a token."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 6))) for _ in range(2000)]
    messages = [[{"role": "user", "content": " ".join(rng.choices(words, k=300))}] for _ in range(64)]
    write_rows(Path(folder) / "texts.parquet", [{"prompt": message} for message in messages])


# ---- What is measured ----


class TimedEngine(RolloutEngine):
    """Notes what each step takes, and with how many sequences; a turn that has reached its length ends with `stop`."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.steps: list[tuple[int, int, float]] = []
        """(sequences in the engine, those that are new in it, seconds)."""
        self._running: dict[str, int] = {}
        self._num_new = 0

    def _submit(self, prompt_ids: list[int], params: Any) -> str:
        request = super()._submit(prompt_ids, params)
        self._running[request] = params.n
        self._num_new += params.n
        return request

    def step(self) -> list[Any]:
        num_running, started = sum(self._running.values()), time.perf_counter()
        outputs = super().step()
        self.steps.append((num_running, self._num_new, time.perf_counter() - started))
        self._num_new = 0
        for output in outputs:
            del self._running[output.request_id]
            for response in output.outputs:
                response.finish_reason = "stop"
        return outputs


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured of a row; seconds are those of the slowest replica, counts those of all."""

    wall_s: float
    step_s: float
    """In steps of the engine."""
    waited_s: float
    """For answers, with nothing else to do."""
    outside_ms: float
    """Per turn: outside steps, waiting included."""
    step_ms: tuple[float, float]
    """Medians: of a step without a new turn, of one with."""
    tokens: int
    """Sampled."""
    excluded: int
    """Episodes whose environment failed."""
    cached_tokens: float
    earlier_tokens: int
    """Tokens that episodes had before their last observation, summed over their turns; and of these, and of that
    observation, those which the engine found in its cache."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s


class Bench:
    """An engine, its conversations, and the rows that have been measured with them."""

    def __init__(
        self, cfg: BenchTurnsConfig, workload: Workload, rollout: RolloutConfig, folder: str, world: World
    ) -> None:
        self.cfg, self.workload, self.folder, self.world = cfg, workload, folder, world
        tokenizer = load_tokenizer(f"{folder}/model")
        self.template, self.stop_ids = ChatTemplate(tokenizer), stop_token_ids(tokenizer, f"{folder}/model")
        self.observed = observed_text(self.template, self.stop_ids, workload.observed_len)
        rng = random.Random(cfg.seed)
        self.prompts = [
            [rng.randrange(3, len(tokenizer)) for _ in range(workload.prompt_len)] for _ in range(workload.prompts)
        ]
        self.latencies = draw_latencies(workload, cfg.seed)
        self.rows: dict[str, Row] = {}
        self.told: set[str] = set()
        self.simulated_s: float | None = None
        context = workload.prompt_len + workload.response_len // 2
        started = time.monotonic()
        self.engine = TimedEngine(
            rollout, f"{folder}/model", dtype="bfloat16" if world.device.type == "cuda" else "float32",
            max_prompt_len=context, most_responses=workload.prompts * workload.n, stop_token_ids=self.stop_ids,
            world=world, seed=cfg.seed,
        )  # fmt: skip
        most = len(self.engine.share(self.samples("l0", "threads"))) * (workload.prompt_len + workload.response_len)
        for line in (
            *(f"warning: {warning}" for warning in self.engine.warnings),
            f"{device_name(world)} x {world.size}, an engine over {cfg.tensor_parallel}; built in "
            f"{time.monotonic() - started:.0f} s; its KV cache holds {self.engine.kv_cache_tokens:,} tokens, the "
            f"episodes of a replica have at most {most:,}, of which those of a prompt share its",
        ):
            self.say(line)

    def say(self, text: str) -> None:
        if self.world.rank == 0:
            print(text, flush=True)

    def run(self) -> None:
        """Measures and prints row after row."""
        turns = self.turns_config(self.workload.workers, self.workload.concurrency, self.workload.timeout_s)
        with self.conversations(turns) as conversations:
            self.say("warming up, and timing the engine's steps")
            self.step_s = self.calibrate(conversations)
            self.say(HEADER)
            for name in self.cfg.rows:
                if name != "l1_serial":
                    self.measure_kinds(name, conversations)
        if "l1_serial" in self.cfg.rows:  # no time limit: a call that waits for its turn uses it up
            with self.conversations(self.turns_config(1, 1, HANG_S)) as conversations:
                self.measure_kinds("l1_serial", conversations)
        self.report()

    def turns_config(self, workers: int, concurrency: int, timeout_s: float) -> TurnsConfig:
        return TurnsConfig(
            path=str(Path(__file__).with_name("slow_environments.py")), name=("Threads", "Loop", "Instant"),
            num_workers=workers, concurrency=concurrency, timeout_s=timeout_s,
            max_turns=self.workload.turns, max_turn_len=self.workload.turn_len,
        )  # fmt: skip

    @contextmanager
    def conversations(self, cfg: TurnsConfig) -> Any:
        """As a run has them."""
        trials = {"a sample": self.samples("l0", "threads")[0]}
        kinds = self.world.on_rank_0(lambda: find_kinds(cfg, trials))
        turns = find_turns(cfg, kinds, self.template, self.stop_ids)
        with open_sampler(
            turns, self.engine, lambda: self.template, stop_ids=self.stop_ids, split_prompts=False, say=self.say,
            max_prompt_len=self.workload.prompt_len, log_path=Path(self.folder) / f"turns_{self.world.rank}.log",
        ) as conversations:  # fmt: skip
            yield conversations

    def samples(self, level: str, kind: str) -> list[Sample]:
        """One per episode, since each has latencies of its own; a prompt's are neighbours in a replica, as training's
        are: what attention reads of their prompt is read once."""
        none, replicas = [0.0] * (self.workload.turns - 1), self.engine.num_replicas

        def prompt_ids(uid: int) -> list[int]:
            place, replica = divmod(uid, replicas)
            return self.prompts[(place // self.workload.n * replicas + replica) % self.workload.prompts]

        return [
            Sample(
                uid=uid, prompt_ids=prompt_ids(uid), data_source="bench", ground_truth="",
                extra_info={"latencies": self.latencies.get(level, {}).get(uid, none), "observed": self.observed},
                agent_name=kind.capitalize(),
            )
            for uid in range(self.workload.prompts * self.workload.n)
        ]  # fmt: skip

    def sampling(self, *, n: int = 1, length: int) -> Sampling:
        return Sampling(n=n, max_response_len=length, temperature=1.0, log_probs=True, full_len=True)

    def calibrate(self, conversations: Conversations) -> Callable[[int], float]:
        """Seconds of a step that samples from so many sequences of the episodes' mean length, after a warm-up."""
        short = replace(self.workload, turn_len=min(self.workload.turn_len, 16))
        conversations.max_turn_len = short.turn_len
        for kind in ("threads", "loop", "instant"):
            own = conversations.share(self.samples("l0", kind))
            list(conversations.generate(own, self.sampling(length=short.response_len)))
        conversations.max_turn_len = self.workload.turn_len
        rng = random.Random(self.cfg.seed)
        own = [
            replace(it, prompt_ids=it.prompt_ids + rng.choices(range(3, 256), k=self.workload.response_len // 2))
            for it in self.engine.share(self.samples("l0", "threads"))
        ]
        sizes = sorted({max(1, round(share * len(own))) for share in CALIBRATED})
        length = min(CALIBRATION_LEN, self.workload.response_len // 2)
        for _ in range(2):  # a batch's first kernels are compiled in the first one
            seconds = []
            for size in sizes:
                self.engine.steps = []
                list(self.engine.generate(own[:size], self.sampling(length=length)))
                seconds.append(median(it for num, new, it in self.engine.steps if num == size and not new))
        self.say("ms of a step, by sequences: " + ", ".join(
            f"{size}: {1000 * each:.2f}" for size, each in zip(sizes, seconds, strict=True)
        ))  # fmt: skip
        return lambda size: float(np.interp(size, sizes, seconds))

    def measure_kinds(self, name: RowName, conversations: Conversations) -> None:
        kinds = {"single": ("",), "l0_step": ("instant",), "l1_round": ("threads",), "l1_serial": ("threads",)}
        for kind in kinds.get(name, self.cfg.tools):
            label = f"{name} {kind}".strip()
            self.rows[label] = self.measure(name, kind, conversations)
            if name == "l0_arrival" and self.simulated_s is None:
                self.simulated_s = self.simulate()
            self.tell(label)

    def measure(self, name: str, kind: str, conversations: Conversations) -> Row:
        """A row. Executed by all ranks together."""
        level, _, join = name.partition("_")
        self.engine.sleep()  # drops cached prefixes: each row begins alike
        self.engine.steps, workload = [], self.workload
        conversations.metrics([])
        conversations.join = {"serial": "round"}.get(join, join)
        while conversations.is_leader and not all(it.started for it in conversations.dialogue.hub._workers):
            time.sleep(0.05)  # at the start, and where a row has had some replaced
        self.world.gather(None)
        started = time.perf_counter()
        if name == "single":
            prompts = [
                Sample(uid=uid, prompt_ids=ids, data_source="bench", ground_truth="", extra_info={})
                for uid, ids in enumerate(self.prompts)
            ]
            sampling = self.sampling(n=workload.n, length=workload.turns * workload.turn_len)
            groups = list(self.engine.generate(self.engine.share(prompts), sampling))
        else:
            own = conversations.share(self.samples(level, kind))
            groups = list(conversations.generate(own, self.sampling(length=workload.response_len)))
        wall_s = time.perf_counter() - started
        rollouts = [rollout for group in groups for rollout in group]
        waited_s = conversations.dialogue.waited_s if conversations.dialogue is not None else 0.0
        whole = {workload.turns * workload.turn_len}
        assert {num_sampled(it) for it in rollouts if it.finish_reason != "error"} <= whole, "a turn ended early"
        of_rank = measured(rollouts, self.engine, wall_s, waited_s)
        every = self.world.gather(of_rank if self.engine.is_leader else None)
        return joined([it for it in every if it is not None])

    def simulate(self) -> float:
        """Seconds of L1 with answers on arrival, of the slowest replica, from measured steps alone.

        A step takes what one of so many sequences took; and what L0's steps took beyond that, for prompts and
        observations, is added. Nothing else takes time.
        """
        rest_s = sum(seconds - self.step_s(num) for num, _, seconds in self.engine.steps)
        own = [it.extra_info["latencies"] for it in self.engine.share(self.samples("l1", "threads"))]
        turns_s = simulated_seconds(own, self.workload.turn_len, self.step_s)
        return max(self.world.gather(max(rest_s, 0.0) + turns_s))

    # ---- What comes out ----

    def bars(self) -> list[Bar]:
        """(figure, value, its kind of bar, the bar), of the rows there are."""
        found: list[Bar] = []
        single, instant = self.rows.get("single"), self.rows.get("l0_step instant")
        for kind in self.cfg.tools:
            l0, l1, l2 = (self.rows.get(f"{level}_arrival {kind}") for level in ("l0", "l1", "l2"))
            if l0 and single:
                ratio = l0.tokens_per_s / single.tokens_per_s
                found.append((f"L0 {kind}: tokens/s against single-turn", ratio, ">=", 0.90))
            if l0 and instant:
                ratio = instant.tokens_per_s / l0.tokens_per_s
                found.append((f"L0 {kind}: step against arrival, tokens/s", ratio, ">=", 0.95))
            if l0:
                share = l0.cached_tokens / l0.earlier_tokens
                found.append((f"L0 {kind}: share of earlier tokens from the cache", share, ">=", 0.97))
                found.append((f"L0 {kind}: host ms a turn outside steps", l0.outside_ms, "<=", 0.5))
            if l1 and self.simulated_s is not None:
                found.append((f"L1 {kind}: wall against simulated", l1.wall_s / self.simulated_s, "<=", 1.10))
            if l1 and (serial := self.serial_s()) is not None:
                found.append((f"L1 {kind}: serial round against arrival, seconds", serial / l1.wall_s, ">=", 1.8))
            if l1 and l2:
                found.append((f"L2 {kind}: seconds beyond L1", l2.wall_s - l1.wall_s, "<=", 11.0))
            if l2:
                wrongly = abs(l2.excluded - self.num_hanging)
                found.append((f"L2 {kind}: excluded, off those that hang", wrongly, "<=", 0))
        return found

    @property
    def num_hanging(self) -> int:
        return sum(HANG_S in latencies for latencies in self.latencies["l2"].values())

    def serial_s(self) -> float | None:
        """Seconds of L1 by rounds whose tools answer one after another: measured, or summed up."""
        if "l1_serial threads" in self.rows:
            return self.rows["l1_serial threads"].wall_s
        if "l1_round threads" not in self.rows:
            return None
        row, replicas, samples = self.rows["l1_round threads"], self.engine.num_replicas, self.samples("l1", "threads")
        answers_s = [sum(sum(it.extra_info["latencies"]) for it in samples[k::replicas]) for k in range(replicas)]
        return row.wall_s - row.waited_s + max(answers_s)

    def tell(self, label: str) -> None:
        """Prints a row, and the bars that it settles; writes the file."""
        row = self.rows[label]
        cells = (row.wall_s, row.step_s, row.waited_s, row.tokens_per_s, row.outside_ms, *row.step_ms)
        self.say(f"  {label:20}" + "".join(f"{it:12,.2f}" for it in cells) + f"{row.excluded:12}")
        for bar in self.bars():
            if bar[0] not in self.told:
                self.told.add(bar[0])
                self.say("    " + "  ".join(bar_cells(bar)))
        if self.cfg.out and self.world.rank == 0:
            Path(self.cfg.out).write_text(self.json_line() + "\n")

    def json_line(self) -> str:
        where = {
            "workload": self.cfg.workload, "prompts": self.workload.prompts, "num_gpus": self.world.size,
            "tensor_parallel": self.cfg.tensor_parallel, "device": device_name(self.world),
            "torch": torch.__version__, "simulated_s": self.simulated_s,
        }  # fmt: skip
        bars = {name: value for name, value, _, _ in self.bars()}
        return json.dumps(where | {"rows": {name: asdict(row) for name, row in self.rows.items()}, "bars": bars})

    def report(self) -> None:
        """All bars, and the JSON line."""
        self.say(format_table(("figure", "found", "bar", ""), [bar_cells(bar) for bar in self.bars()]))
        if self.simulated_s is not None:
            self.say(f"  L1 simulated: {self.simulated_s:.2f} s")
        self.say(self.json_line())


def bar_cells(bar: Bar) -> tuple[str, str, str, str]:
    name, value, kind, limit = bar
    is_met = value >= limit if kind == ">=" else value <= limit
    return name, f"{value:.3f}", f"{kind} {limit:g}", "met" if is_met else "NOT MET"


def device_name(world: World) -> str:
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"


# ---- What a row is made of ----


def observed_text(template: ChatTemplate, stop_ids: Sequence[int], length: int, role: str = "user") -> str:
    """A text that becomes `length` tokens between two turns, with what the chat template writes around it."""
    appender = Appender(template, stop_ids)

    def ids(text: str) -> list[int]:
        return appender.ids([{"role": role, "content": text}])

    text = "0" * (length - len(ids("0")) + 1)
    assert len(ids(text)) == length, f"{len(ids(text))} observed tokens instead of {length}"
    return text


def draw_latencies(workload: Workload, seed: int) -> dict[str, dict[int, list[float]]]:
    """By level and episode, the seconds of each answer."""
    rng, (middle, sigma, cap) = random.Random(seed), workload.latency
    num_episodes, num_answers = workload.prompts * workload.n, workload.turns - 1
    l1 = {
        uid: [min(cap, rng.lognormvariate(math.log(middle), sigma)) for _ in range(num_answers)]
        for uid in range(num_episodes)
    }
    l2 = {uid: list(own) for uid, own in l1.items()}
    calls = [(uid, place) for uid in l2 for place in range(num_answers)]
    for uid, place in rng.sample(calls, max(1, round(HANGING * len(calls)))):
        l2[uid][place] = HANG_S
    return {"l1": l1, "l2": l2}


def measured(rollouts: Sequence[Rollout], engine: TimedEngine, wall_s: float, waited_s: float) -> Row:
    """Of one replica."""
    several = [it for it in rollouts if it.spans]
    earlier = sum(
        len(it.sample.prompt_ids) + sum(it.spans[:turn]) for it in several for turn in range(1, len(it.spans), 2)
    )
    alone, with_new = ([s for _, new, s in engine.steps if bool(new) == has] for has in (False, True))
    step_s = sum(seconds for _, _, seconds in engine.steps)
    return Row(
        wall_s=wall_s,
        step_s=step_s,
        waited_s=waited_s,
        outside_ms=1000 * (wall_s - step_s) / sum(len(it.spans) // 2 + 1 for it in rollouts),
        step_ms=(1000 * median(alone or [0.0]), 1000 * median(with_new)),
        tokens=sum(map(num_sampled, rollouts)),
        excluded=sum(it.finish_reason == "error" for it in rollouts),
        cached_tokens=sum(it.metrics.get("cached_tokens", 0.0) for it in several),
        earlier_tokens=earlier,
    )


def num_sampled(rollout: Rollout) -> int:
    return sum(rollout.spans[::2]) if rollout.spans else len(rollout.response_ids)


def joined(replicas: Sequence[Row]) -> Row:
    """Of all replicas."""
    slowest = max(replicas, key=lambda it: it.wall_s)
    sums = {
        name: sum(getattr(it, name) for it in replicas)
        for name in ("tokens", "excluded", "cached_tokens", "earlier_tokens")
    }
    return replace(slowest, **sums)


def simulated_seconds(latencies: Sequence[Sequence[float]], turn_len: int, step_s: Callable[[int], float]) -> float:
    """Seconds of these episodes with answers on arrival. `step_s`: of a step with so many sequences."""
    now, left, turn, waiting = 0.0, dict.fromkeys(range(len(latencies)), turn_len), [0] * len(latencies), []
    while left or waiting:
        if not left:
            now = max(now, waiting[0][0])
        while waiting and waiting[0][0] <= now:
            left[heapq.heappop(waiting)[1]] = turn_len
        seconds, num_steps = step_s(len(left)), min(left.values())
        if waiting:
            num_steps = min(num_steps, max(1, math.ceil((waiting[0][0] - now) / seconds)))
        now += num_steps * seconds
        for episode in list(left):
            left[episode] -= num_steps
            if left[episode] == 0:
                del left[episode]
                if turn[episode] < len(latencies[episode]):
                    heapq.heappush(waiting, (now + latencies[episode][turn[episode]], episode))
                turn[episode] += 1
    return now


if __name__ == "__main__":
    with reporting_errors():
        main(parse_cli(BenchTurnsConfig()))
    shutdown_distributed()
