"""Runs of the smollm2_words recipes, several at a time on one GPU, and a table of their curves.

    python -m recipes.smollm2_from_package && python -m recipes.prepare_arithmetic_words
    python -m recipes.peers.smollm2_runs --what search --minutes 5 --num-steps 40       # five settings at once
    python -m recipes.peers.smollm2_runs --what seeds --minutes 9                       # seeds 0 to 2, and the control
    python -m recipes.peers.smollm2_runs --what siblings --minutes 9 --num-steps 100
    python -m recipes.peers.smollm2_runs --what beside --minutes 9 --num-steps 60       # ours, then TRL, alone
    python -m recipes.peers.smollm2_runs --what table                                   # of all that is there
    python -m recipes.peers.smollm2_runs --what picture                                 # docs/smollm2.png

What is not finished after the minutes is told to stop: it saves, and goes on when the same command is started again.
Runs that share a GPU have a smaller engine and smaller micro-batches each, and say nothing of its speed; `beside` has
it to itself.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from lib.config import parse_cli, reporting_errors
from lib.errors import UserError
from lib.rewards.last_number import DIFFICULTIES, PREFIX
from lib.tracking import read_metrics
from lib.tracking.console import format_table

SHARES = dict(zip(DIFFICULTIES, (0.3, 0.3, 0.2, 0.2, 0.0), strict=True))
"""Of the mixture that is trained; recipes/prepare_arithmetic_words.py."""
SETTINGS = (
    *({"--optim.lr": lr} for lr in (1e-5, 3e-5, 1e-4, 3e-6)),
    {"--optim.lr": 3e-5, "--rollout.n": 16, "--mini-batch-size": 1024},
)
SHARED = {"--rollout.gpu-memory-utilization": 0.12, "--max-tokens-per-gpu": 8192}  # of five runs, 25 GiB each
MARKERS = "os^"  # of seeds 0 to 2
STOP_S = 60.0  # to save, after SIGTERM


@dataclass(frozen=True, kw_only=True)
class RunsConfig:
    """Which runs, and for how long."""

    what: Literal["search", "seeds", "siblings", "beside", "table", "picture"] = "table"
    """search: learning rates; seeds: three, and the control; siblings: PPO, DAPO, Dr. GRPO; beside: ours, then TRL."""
    minutes: float = 9.0
    """Minutes after which all that still runs is told to stop."""
    num_steps: int = 200
    """Steps of each run."""
    lr: float = 3e-5
    """Learning rate, but for the search."""
    seed: int = 0
    """Seed of siblings and of ours beside TRL."""
    out: str = "runs/smollm2"
    """Folder of the runs and of what they print."""

    def __post_init__(self) -> None:
        if self.minutes <= 0 or self.num_steps < 1:
            raise UserError(
                f"nothing to run; --minutes {self.minutes} --num-steps {self.num_steps}; expected more than 0 of each; "
                "leave them out"
            )


def ours(cfg: RunsConfig, name: str, *, recipe: str = "grpo", port: int, **options: Any) -> tuple[str, list[str]]:
    """(name, command) of a run of ours; options by flag."""
    words = {"--run-dir": f"{cfg.out}/{name}", "--num-steps": cfg.num_steps, "--optim.lr": cfg.lr, **options}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1", f"--master_port={port}"]
    module = f"recipes.{recipe}_smollm2_words"
    return name, [*launcher, "-m", module, *(str(word) for pair in words.items() for word in pair)]


def commands(cfg: RunsConfig) -> list[list[tuple[str, list[str]]]]:
    """Lots of (name, command); a lot runs at once, one lot after the other."""
    if cfg.what == "search":
        return [[
            ours(cfg, f"lr_{each['--optim.lr']:g}_n_{each.get('--rollout.n', 8)}", port=29600 + place, **SHARED, **each)
            for place, each in enumerate(SETTINGS)
        ]]  # fmt: skip
    if cfg.what == "seeds":
        lot = [ours(cfg, f"seed{seed}", port=29600 + seed, **SHARED, **{"--seed": seed}) for seed in range(3)]
        return [[*lot, ours(cfg, "control", recipe="permuted", port=29603, **SHARED)]]
    if cfg.what == "siblings":
        names = ("ppo", "dapo", "dr_grpo")
        shared = SHARED | {"--seed": cfg.seed}
        return [[ours(cfg, name, recipe=name, port=29600 + place, **shared) for place, name in enumerate(names)]]
    if cfg.what == "beside":
        name, command = ours(cfg, f"beside_ours{cfg.seed}", port=29600, **{"--seed": cfg.seed})
        peer = [sys.executable, "-m", "recipes.peers.trl_smollm2_words", "--like", f"{cfg.out}/{name}"]
        return [[(name, command)], [(f"beside_trl{cfg.seed}", [*peer, "--out", f"{cfg.out}/beside_trl{cfg.seed}"])]]
    return []


def run_all(lot: Sequence[tuple[str, list[str]]], out: Path, deadline: float) -> None:
    """Runs a lot's commands at once; what is not finished at the deadline gets SIGTERM, then SIGKILL.

    One starts when the one before has written its first metrics: an engine that starts measures the GPU's memory, and
    would take for its own what another allocates meanwhile.
    """
    out.mkdir(parents=True, exist_ok=True)
    running = {}
    for name, command in lot:
        if time.monotonic() > deadline:
            break
        since, metrics = time.time(), out / name / "metrics.jsonl"
        with (out / f"{name}.log").open("a") as log:
            running[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        while running[name].poll() is None and time.monotonic() < deadline:
            if metrics.exists() and metrics.stat().st_mtime > since:
                break
            time.sleep(0.5)
    while any(each.poll() is None for each in running.values()) and time.monotonic() < deadline:
        time.sleep(1)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for each in running.values():
            if each.poll() is None:
                os.killpg(each.pid, number)
        patience = time.monotonic() + STOP_S
        while any(each.poll() is None for each in running.values()) and time.monotonic() < patience:
            time.sleep(0.5)
    for name, each in running.items():
        print(f"{name}: exit code {each.returncode}", flush=True)


def curve(rows: Sequence[dict[str, Any]]) -> list[tuple[int, dict[str, float]]]:
    """(step, {"T=1", "greedy" and each difficulty at temperature 1: accuracy}) of every validation."""
    found = []
    for row in rows:
        values: dict[str, dict[str, float]] = {"mean": {}, "greedy": {}}
        for name, value in row.items():
            match = re.fullmatch(rf"val-core/{PREFIX}(\w+)/acc/(mean|greedy)(?:@\d+)?", name)
            if match:
                values[match[2]][match[1]] = value
        if values["mean"].keys() >= SHARES.keys():
            mixed = {
                label: sum(share * values[kind].get(difficulty, float("nan")) for difficulty, share in SHARES.items())
                for label, kind in (("T=1", "mean"), ("greedy", "greedy"))
            }
            found.append((int(row["step"]), mixed | values["mean"]))
    return found


def table(out: Path) -> str:
    """Every run's validations, with its median step and the mean difference of log-probs so far."""
    rows = []
    for folder in sorted(path.parent for path in out.glob("*/metrics.jsonl")):
        metrics = read_metrics(folder)
        for step, accuracy in curve(metrics):
            before = [row for row in metrics if 0 < row["step"] <= step and "timing_s/step" in row]
            difference = [row[name] for row in before if (name := "training/rollout_log_probs_diff/mean") in row]
            rows.append([
                folder.name, str(step), *(f"{accuracy[name]:.3f}" for name in ("T=1", "greedy", *DIFFICULTIES)),
                f"{median(row['timing_s/step'] for row in before):.2f}" if before else "",
                f"{sum(difference) / len(difference):.4f}" if difference else "",
            ])  # fmt: skip
    return format_table(["run", "step", "T=1", "greedy", *DIFFICULTIES, "s per step", "mismatch"], rows)


def draw(out: Path, path: Path) -> None:
    """Writes a picture: the accuracy of seeds and control over steps, ours beside TRL's over seconds of training."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves = {folder.parent.name: read_metrics(folder.parent) for folder in sorted(out.glob("*/metrics.jsonl"))}
    style = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True}
    with pyplot.rc_context({**style, "grid.alpha": 0.25, "legend.frameon": False}):
        figure, (steps, seconds) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="tight", sharey=True)
        for name, rows in curves.items():
            points = curve(rows)
            if name.startswith("seed") or name == "control":
                style = {"color": "0.6", "marker": "x"} if name == "control" else {"marker": MARKERS[int(name[4:]) % 3]}
                x = [step for step, _ in points]
                [line] = steps.plot(x, [each["T=1"] for _, each in points], markersize=5, label=name, **style)
                steps.plot(x, [each["greedy"] for _, each in points], "--", color=line.get_color(), linewidth=1)
            elif name.startswith("beside"):
                spent = {
                    row["step"]: sum(r.get("timing_s/step", 0) for r in rows[: at + 1]) for at, row in enumerate(rows)
                }
                system, seed = ("ours" if "ours" in name else "TRL 1.16"), re.findall(r"\d+$", name)[0]
                color, marker = ("C0" if system == "ours" else "C3"), MARKERS[int(seed) % 3]
                x = [spent[step] for step, _ in points]
                y = [each["T=1"] for _, each in points]
                seconds.plot(x, y, color=color, marker=marker, markersize=5, label=f"{system}, seed {seed}")
        steps.set(xlabel="step", ylabel="accuracy, held-out operands", title="at temperature 1; dashed: greedy", ylim=0)
        seconds.set(
            xlabel="seconds of training, without loading and validation", title="the same steps, ours and TRL's"
        )
        for axes in (steps, seconds):
            axes.legend(loc="lower right")
        figure.savefig(path, dpi=110)
        pyplot.close(figure)
    print(f"wrote {path}")


def main(cfg: RunsConfig) -> None:
    """Runs what is asked for, then prints the table."""
    with reporting_errors():
        if cfg.what == "picture":
            return draw(Path(cfg.out), Path("docs/smollm2.png"))
        lots = commands(cfg)
        for place, lot in enumerate(lots, start=1):
            run_all(lot, Path(cfg.out), time.monotonic() + 60 * cfg.minutes / len(lots))
            print(f"{place} of {len(lots)} lots done", flush=True)
        print(table(Path(cfg.out)))


if __name__ == "__main__":
    main(parse_cli(RunsConfig()))
