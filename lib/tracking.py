"""The run folder, the terminal, and the loggers: everything a run leaves behind except checkpoints.

    RUN/config.json  metrics.jsonl  tensorboard/  learning_curve.png  samples/step_N.jsonl  logs/rank_R.log  status.json

metrics.jsonl has one JSON object a line, `step` first (0 = before training). JSON has no NaN or infinity, so these are
the strings "NaN", "Infinity" and "-Infinity", which `float` reads. Values of environment variables that look like
secrets are blanked in everything this file writes; what libraries print goes to the logs as it is.
"""

import importlib.util
import json
import os
import secrets
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from lib.console import (
    VALIDATION_NAME,
    plot_learning_curve,
    shorten,
    training_line,
    validation_table,
    validation_values,
)
from lib.dist import World
from lib.errors import LockstepError, Stopped, UserError, error_line
from lib.run_folder import (
    append_lines,
    cannot_write,
    check_folder,
    claim_folder,
    cut_after,
    launch_id,
    lock_folder,
    open_log,
    plain,
    read_metrics,
    read_status,
    redact,
    secret_values,
    to_json,
)
from lib.terminal import Terminal


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Where a run is logged besides its folder. Keys come from the environment or `wandb login`, never from here."""

    wandb_project: str | None = None
    """Weights & Biases project to log to; none by default. WANDB_MODE=offline is honoured."""
    name: str | None = None
    """Name of the run in Weights & Biases; the run folder's name by default."""

    def __post_init__(self) -> None:
        for flag, value in (("wandb-project", self.wandb_project), ("name", self.name)):
            if value is not None and not (value.strip() and value.isprintable()):
                raise UserError(
                    f"not a usable name; --tracking.{flag}; found {value!r}, expected printable text, not blank; give "
                    "a name, or leave the option out"
                )


class Run:
    """The folder of one run and the terminal it was started from.

    From construction to `restore`, file descriptors 1 and 2 of every rank lead to logs/rank_R.log, so that the noise of
    vLLM, torch and their C++ libraries goes there; what the run itself says goes through `say` to the terminal. Use it
    as a context manager: an exception then ends up in status.json and its traceback on the terminal.

        with Run(run_dir, cfg.tracking, world, config=config, num_steps=60) as run:
            run.log(step, metrics.reduce())
            run.finish()

    Every method but `fail` and `restore` is executed by all ranks; rank 0 writes.
    """

    def __init__(
        self,
        run_dir: str | Path,
        cfg: TrackingConfig,
        world: World,
        *,
        config: Mapping[str, Any],
        num_steps: int,
        overwrite: bool = False,
        last_row: int | None = None,
        resumable: bool = False,
        needed_gib: float = 0.1,
    ):
        """Makes the folder, and logs to it from here on. `config` must hold no secrets (dataclass fields only).

        With `last_row` the run that is there goes on: rows and samples of later steps are cut off (-1: all are).
        `resumable`: whether a checkpoint is there. Raises UserError when the folder is not empty (unless it goes on, or
        `overwrite` moves it aside), cannot be written, or has less than `needed_gib` free, and when wandb is asked for
        but does not work.
        """
        self.world, self.cfg, self.num_steps, self.resumable = world, cfg, num_steps, resumable
        self.step, self.state = max(0, last_row or 0), "running"
        goes_on = last_row is not None
        check_run(run_dir, cfg, world, overwrite=overwrite, goes_on=goes_on, needed_gib=needed_gib)
        self.dir: Path = self._on_rank_0(
            lambda: claim_folder(run_dir, overwrite=overwrite, goes_on=goes_on, needed_gib=needed_gib)
        )
        self._lock: int | None = None  # a file descriptor, on rank 0
        self._on_rank_0(self._take_lock)
        self.run_id: str = self._on_rank_0(lambda: read_status(self.dir).get("run_id") or secrets.token_hex(4))
        """Of the run, however often it is continued."""
        self.log_file = self.dir / "logs" / f"rank_{world.rank}.log"
        self._log = world.agree(lambda: open_log(self.log_file))
        self._tensorboard, self._wandb = None, None
        self.terminal = Terminal(world, self._log)
        try:
            self._on_rank_0(lambda: self._start(config, last_row))
        except BaseException as error:
            self.fail(error)
            raise

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.fail(error)
        self.restore()

    # ---- Terminal ----

    def say(self, text: str) -> None:
        """Prints a line (or several) on the terminal the run was started from, and in rank 0's log."""
        self.terminal.say(redact(text, secret_values()))

    def progress(self, label: str, total: int) -> AbstractContextManager[Callable[[], None]]:
        """A bar on a terminal, else a line every 10 seconds: call the yielded function for every one that is done."""
        return self.terminal.progress(label, total)

    def restore(self) -> None:
        """Gives file descriptors 1 and 2 back to the terminal; `say` goes on working."""
        self.terminal.restore()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # ---- What a run writes ----

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends the metrics of a step to metrics.jsonl, TensorBoard and wandb, and says the main ones.

        Raises UserError on all ranks when rank 0 cannot write.
        """
        self.step = step
        self._on_rank_0(lambda: self._write_metrics(step, metrics))

    def save_samples(self, step: int, rows: Sequence[Mapping[str, Any]], *, show: int = 0) -> None:
        """Appends all ranks' sample rows (already gathered) to samples/step_N.jsonl; says the first `show` of them.

        Keys: uid, data_source, prompt, response, ground_truth, score, extras, finish_reason.
        """
        self._on_rank_0(lambda: append_lines(self.dir / "samples" / f"step_{step}.jsonl", rows))
        for row in rows[:show]:
            prompt, response = shorten(str(row["prompt"])), shorten(str(row["response"]))
            expected, score = shorten(str(row["ground_truth"]), 30), row["score"]
            self.say(f"  {prompt} -> {response}  (score {score}, expected {expected}, {row['finish_reason']})")

    def finish(self) -> None:
        """Draws learning_curve.png, says what came of the run, and writes the state "finished"."""
        self._on_rank_0(self._finish)
        self.state = "finished"

    def fail(self, error: BaseException) -> None:
        """Writes the state "failed" (or "stopped", also on Ctrl-C) with the first error's line, restores the terminal.

        Says why a run stopped; the caller prints a LockstepError. Of a bug, the rank and its log are said here and the
        traceback goes to the log; raised further, it reaches the terminal too. Holds no collective: it may be called by
        one rank alone.
        """
        if self.state == "running":
            self.state = "stopped" if isinstance(error, Stopped | KeyboardInterrupt) else "failed"
            if isinstance(error, Stopped):
                line = str(error)
                again = "it can be resumed" if self.resumable else "there is no checkpoint to resume from"
                self.say(f"stopped after step {self.step} of {self.num_steps}: {line}; {again}")
            elif isinstance(error, LockstepError):
                line = error_line(error)
            else:
                line = " ".join(f"error[1] {type(error).__name__}: {error}".split()) + f"; on rank {self.world.rank}"
                print(redact("".join(traceback.format_exception(error)), secret_values()), file=self._log)
            with suppress(OSError):  # a full disk must not hide the error that is being reported
                if json.loads((self.dir / "status.json").read_text(encoding="utf-8"))["state"] == "running":
                    self._write_status(error=line)  # once a rank has failed, others only lose their peer
                self._close()
            if not isinstance(error, LockstepError | Stopped | KeyboardInterrupt):
                text = f"{redact(line, secret_values())}; what the libraries said is in {self.log_file}\n"
                self.terminal.write_error(text)
        self.restore()

    def _take_lock(self) -> None:
        self._lock = lock_folder(self.dir)

    def _start(self, config: Mapping[str, Any], last_row: int | None) -> None:
        self._write_status()  # before the import, which takes a moment: a folder without it is nobody's run

        from torch.utils.tensorboard import SummaryWriter

        (self.dir / "samples").mkdir(exist_ok=True)
        (self.dir / "config.json").write_text(to_json(config, indent=2) + "\n", encoding="utf-8")
        if last_row is not None:
            cut_after(self.dir, last_row)
        purge = None if last_row is None else last_row + 1  # TensorBoard then hides the later steps of older files
        self._tensorboard = SummaryWriter(str(self.dir / "tensorboard"), purge_step=purge)
        if self.cfg.wandb_project is not None:
            self._wandb = _start_wandb(self.cfg, self.dir, config, self.run_id)

    def _write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {"step": step, **{name: float(value) for name, value in metrics.items()}}
        append_lines(self.dir / "metrics.jsonl", [row])
        for name, value in metrics.items():
            self._tensorboard.add_scalar(name, value, step)
        self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(dict(metrics), step=step)
        self._write_status()
        if "critic/score/mean" in metrics:
            self.say(training_line(row, self.num_steps))
        if any(VALIDATION_NAME.fullmatch(name) for name in metrics):
            self.say(validation_table(read_metrics(self.dir)))

    def _finish(self) -> None:
        history = read_metrics(self.dir)
        plot_learning_curve(history, self.dir / "learning_curve.png")
        self._close()
        self.state = "finished"
        self._write_status()
        for name, values in validation_values(history).items():
            (first_step, first), (last_step, last) = values[0], values[-1]
            self.say(f"{name}: {first:.3f} (step {first_step}) -> {last:.3f} (step {last_step})")
        self.say(f"run folder: {self.dir}\nlearning curve: {self.dir / 'learning_curve.png'}")

    def _write_status(self, *, error: str | None = None) -> None:
        """Replaces status.json in one move: a reader sees the old one or the new one, never half of it."""
        status = {"state": self.state, "step": self.step, "resumable": self.resumable, "error": error}
        status |= {"run_id": self.run_id, "launch_id": launch_id()}
        path, temporary = self.dir / "status.json", self.dir / f".status.json.{self.world.rank}"
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(to_json(status) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)

    def _close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(self.state == "failed"))
        self._tensorboard, self._wandb = None, None

    def _on_rank_0(self, action: Callable[[], Any]) -> Any:
        return _on_rank_0(self.world, action)


def _on_rank_0(world: World, action: Callable[[], Any]) -> Any:
    """`World.on_rank_0`, with an OSError as UserError."""

    def act() -> Any:
        try:
            return action()
        except OSError as error:
            raise UserError(cannot_write(error)) from None

    return world.on_rank_0(act)


# ---- The folder ----


def check_run(
    run_dir: str | Path, cfg: TrackingConfig, world: World, *, overwrite: bool, goes_on: bool = False,
    needed_gib: float = 0.1,
) -> None:  # fmt: skip
    """Raises UserError, on all ranks, when a `Run` with these arguments would; makes and moves nothing."""
    if cfg.wandb_project is not None:
        _on_rank_0(world, lambda: _check_wandb(cfg.wandb_project))
    _on_rank_0(world, lambda: check_folder(run_dir, overwrite=overwrite, goes_on=goes_on, needed_gib=needed_gib))


# ---- wandb ----


def _check_wandb(project: str) -> None:
    spec = importlib.util.find_spec("wandb")
    if spec is None or spec.origin is None:  # no origin: a ./wandb/ folder that an older run left
        raise UserError(
            f"wandb is not installed; --tracking.wandb-project {project}; found no such package, expected one; run "
            "`pip install wandb`, or leave the option out (metrics.jsonl and TensorBoard are always written)"
        )


def _start_wandb(cfg: TrackingConfig, run_dir: Path, config: Mapping[str, Any], run_id: str) -> Any:
    import wandb

    settings = wandb.Settings(  # neither the command line, nor the code, nor the terminal leaves the machine
        x_disable_meta=True, x_disable_machine_info=True, disable_git=True, save_code=False, console="off"
    )
    name = cfg.name or run_dir.name
    try:
        return wandb.init(
            project=cfg.wandb_project, name=name, id=run_id, resume="allow", dir=str(run_dir),
            config=plain(config, secret_values()), settings=settings,
        )  # fmt: skip
    except wandb.Error as error:
        raise UserError(
            f"wandb did not start; --tracking.wandb-project {cfg.wandb_project}; {' '.join(str(error).split())}; "
            "run `wandb login`, set WANDB_MODE=offline, or leave the option out"
        ) from None
