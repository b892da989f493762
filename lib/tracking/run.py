"""The run folder, the terminal, and the loggers: everything a run leaves behind except checkpoints.

    RUN/config.json  metrics.jsonl  tensorboard/  learning_curve.png  logs/rank_R.log  status.json  report.html
    RUN/samples/step_N.jsonl  rollouts/step_N.parquet  tokens/step_N.jsonl

metrics.jsonl has one JSON object a line, `step` first (0 = before training). JSON has no NaN or infinity, so these are
the strings "NaN", "Infinity" and "-Infinity", which `float` reads. Secrets (lib/secret_values.py) are blanked in all of
it; only what libraries print without Python's streams goes to the logs as it is.

A full disk does not end a run: metrics, samples, rollouts and TensorBoard's events wait in memory, in order, until
there is room; lines of the logs are lost. How a run ended is in status.json all the same: a hidden file keeps room for
that.
"""

import importlib.util
import json
import os
import secrets
import shutil
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from lib.dist import World
from lib.errors import FULL, LockstepError, NoSpace, Stopped, UserError, bug_line, check_fields, error_line
from lib.secret_values import blank
from lib.storage.writing import write_whole
from lib.torchrun import command, leave_word, under_torchrun
from lib.tracking.console import (
    VALIDATION_NAME,
    in_words,
    plot_learning_curve,
    sample_lines,
    tensorboard_record,
    validation_table,
    validation_values,
)
from lib.tracking.report import PAGE, TOKENS, launch_command, read_view, run_page, surplus
from lib.tracking.run_folder import (
    METRICS,
    append,
    cannot_write,
    check_folder,
    check_shared,
    claim_folder,
    cut_after,
    launch_id,
    lock_folder,
    open_log,
    plain,
    read_metrics,
    read_status,
    step_files,
    to_json,
    to_lines,
)
from lib.tracking.step_table import StepTable
from lib.tracking.terminal import Terminal

ROOM = ".room"
ROOM_BYTES = 2**14  # of a last status, whose error may be long
ROLLOUTS_KEPT = 50  # files


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Where a run is logged besides its folder. Keys come from the environment or `wandb login`, never from here."""

    wandb_project: str | None = None
    """Weights & Biases project to log to, also with WANDB_MODE=offline; None: none."""
    name: str | None = None
    """Name of the run in Weights & Biases; the run folder's name by default."""
    rollouts_every: int = 10
    """Steps between those whose rollouts are saved as rollouts/step_N.parquet, for eval.py --score-only; also those of
    the first; the newest 50 files stay; 0: none."""

    def __post_init__(self) -> None:
        check_fields(self, "tracking.", rollouts_every=(self.rollouts_every >= 0, "0 or more"))
        for flag, value in (("wandb-project", self.wandb_project), ("name", self.name)):
            if value is not None and not (value.strip() and value.isprintable()):
                raise UserError(
                    f"not a usable name; --tracking.{flag}; found {value!r}, expected printable text, not blank; give "
                    "a name, or leave the option out"
                )


class Run:
    """The folder of one run and the terminal it was started from.

    From construction to `restore`, file descriptors 1 and 2 and Python's streams lead to logs/rank_R.log on every rank,
    so that the noise of vLLM, torch and their C++ libraries goes there; what the run itself says goes through `say` to
    the terminal. Use it as a context manager: an exception then ends up in status.json and its traceback on the
    terminal.

        with Run(run_dir, cfg.tracking, world, config=config, num_steps=60) as run:
            run.log(step, metrics.reduce())
            run.finish()

    Every method but `catch_up`, `fail` and `restore` is executed by all ranks; rank 0 writes.
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
        date: str | None = None,
        needed_gib: float = 0.1,
        defaults: Mapping[str, Any] | None = None,
    ):
        """Makes the folder, and logs to it from here on. `config` must hold no secrets (dataclass fields only);
        `defaults` is that of a run which sets nothing, from which report.html tells what was set.

        With `last_row` the run that is there goes on: rows and samples of later steps are moved aside (-1: all are).
        `resumable`: whether a checkpoint is there. `date`: when the run began, kept in status.json. Raises UserError
        when the folder is not empty (unless it goes on, or `overwrite` moves it aside), cannot be written, has less
        than `needed_gib` free, or is not the same one on all ranks, and when wandb is asked for but does not work.
        """
        self.world, self.cfg, self.num_steps, self.resumable = world, cfg, num_steps, resumable
        self.step, self.state, self.date = max(0, last_row or 0), "running", date
        self._overwrite = overwrite
        self.variables: set[str] = set()
        """Names of the numbers that its validations report."""
        self._topics: set[str] = set()  # of what was said once
        self._table = StepTable(num_steps)
        self._samples: list[str] = []  # to be said below the step's numbers
        self._waiting: list[tuple[int, Path, bytes]] = []  # (step, file, what is to be appended), while it is full
        self._is_full = False
        self._defaults = defaults or {}
        self._has_news, self._validates = False, False  # for report.html
        goes_on = last_row is not None
        check_run(run_dir, cfg, world, overwrite=overwrite, goes_on=goes_on, needed_gib=needed_gib)
        self.dir: Path = self._on_rank_0(
            lambda: claim_folder(run_dir, overwrite=overwrite, goes_on=goes_on, needed_gib=needed_gib)
        )
        self._lock: int | None = None  # a file descriptor, on rank 0
        self._on_rank_0(self._take_lock)
        check_shared(self.dir, world)
        self.run_id: str = self._on_rank_0(lambda: read_status(self.dir).get("run_id") or secrets.token_hex(4))
        """Of the run, however often it is continued."""
        self.log_file = self.dir / "logs" / f"rank_{world.rank}.log"
        self._log = world.agree(lambda: _telling(lambda: open_log(self.log_file)))
        self._wandb = None
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
        self.terminal.say(text)

    def say_once(self, topic: str, text: str) -> None:
        """Says it unless something of this topic was said before."""
        if topic not in self._topics:
            self._topics.add(topic)
            self.say(text)

    def progress(self, label: str, total: float = 0) -> AbstractContextManager[Callable[..., None]]:
        """Shows, while its body lasts, that it does; as `Terminal.progress`."""
        return self.terminal.progress(label, total)

    def restore(self) -> None:
        """Gives file descriptors 1 and 2 and Python's streams back to the terminal; `say` goes on working."""
        self.terminal.restore()
        if self._lock is not None:
            with suppress(OSError):
                (self.dir / ROOM).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    # ---- What a run writes ----

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends the metrics of a step to metrics.jsonl, TensorBoard and wandb, and says the main ones.

        Raises UserError on all ranks when rank 0 cannot write, unless it is for want of space.
        """
        self.step = step
        self._on_rank_0(lambda: self._write_metrics(step, metrics))

    def save_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Appends all ranks' sample rows (already gathered) to samples/step_N.jsonl.

        Keys: uid, data_source, prompt, response, ground_truth, score, extras, finish_reason, temperature; of an episode
        num_turns, turns (lib/rollouts/episode_turns.py).
        """
        path = self.dir / "samples" / f"step_{step}.jsonl"
        self._on_rank_0(lambda: self._write((step, path, to_lines(rows))))

    def show_samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Notes these rows, which `log` shows below the step's numbers: data_source, prompt, response, ground_truth,
        score, finish_reason; of an episode turns."""
        self._samples += [
            sample_lines(row, width=self.terminal.width) for row in blank(rows)
        ]  # while secrets are whole

    def save_rollouts(self, step: int, data: bytes) -> None:
        """Writes what rank 0 has made to rollouts/step_N.parquet, unless it is empty; the newest 50 files stay."""
        self._on_rank_0(lambda: self._write_rollouts(step, data) if data else None)

    def save_tokens(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Appends rows that rank 0 has made (lib/rollouts/shown_samples.py) to tokens/step_N.jsonl, for report.html."""
        self._on_rank_0(lambda: self._write_tokens(step, rows) if rows else None)

    def catch_up(self) -> None:
        """Raises NoSpace unless all that was logged is in the files: without it there may be no checkpoint, since the
        run that goes on from there would never write it. Executed by rank 0."""
        if self._is_full:
            _telling(self._write)
        if self._is_full:
            raise NoSpace(
                f"no space for what was logged; {self.dir}; found it waiting in memory from step "
                f"{self._first_waiting()} on, expected all of it in files; free some space or raise the quota"
            )

    def finish(self) -> None:
        """Says what came of the run, draws learning_curve.png, and writes the state "finished".

        Raises UserError on all ranks when rank 0 cannot write, also for want of space.
        """
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
                last_words = f"stopped after step {self.step} of {self.num_steps}: {line}; {again}"
                if self.resumable:  # of equal options the last one counts
                    last_words += f"\ngo on with: {command(*['--overwrite', 'False'] * self._overwrite)}"
                report = "\nwhat torchrun prints below is its own report of the stop, and says no more"
                self.say(last_words + report * bool(error.code and under_torchrun()))
                leave_word(last_words)
            elif isinstance(error, LockstepError):
                line = error_line(error)
            else:
                line = f"{bug_line(error)}; on rank {self.world.rank}"
                print("".join(traceback.format_exception(error)), file=self._log)
            with suppress(OSError):  # a full disk must not hide the error that is being reported
                self._append_waiting()
            with suppress(OSError):
                if json.loads((self.dir / "status.json").read_text(encoding="utf-8"))["state"] == "running":
                    with suppress(OSError):  # a rank that fails at the same moment may have taken it
                        os.replace(self.dir / ROOM, self._new_status)
                    self._write_status(error=line)  # once a rank has failed, others only lose their peer
                    if self.world.rank == 0:
                        self._write_report()
                self._close()
            if self._waiting:
                self.say(
                    f"warning: no space for what was logged from step {self._first_waiting()} on, and it is lost; "
                    f"{self.dir}; free some space: a run that goes on from a checkpoint here logs it again"
                )
            if not isinstance(error, LockstepError | Stopped | KeyboardInterrupt):
                self.terminal.write_error(f"{line}; what the libraries said is in {self.log_file}\n")
        self.restore()

    def _take_lock(self) -> None:
        self._lock = lock_folder(self.dir)

    def _start(self, config: Mapping[str, Any], last_row: int | None) -> None:
        self._write_status()  # first: without it the folder would belong to no run
        (self.dir / ROOM).write_bytes(os.urandom(ROOM_BYTES))  # zeros might take no room
        for name in ("samples", "rollouts", TOKENS, "tensorboard"):
            (self.dir / name).mkdir(exist_ok=True)
        (self.dir / "config.json").write_text(to_json(config, indent=2) + "\n", encoding="utf-8")
        if last_row is not None and (moved := cut_after(self.dir, last_row)):
            more = f" and {len(moved) - 6} more" if len(moved) > 6 else ""
            later = "" if last_row < 0 else f" of steps after {last_row}"
            self.say(f"what the run had written{later} is moved aside: {', '.join(moved[:6])}{more}")
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"  # read in this order
        self._tensorboard = self.dir / "tensorboard" / name
        append(self._tensorboard, tensorboard_record(file_version="brain.Event:2"))
        if last_row is not None:  # TensorBoard then hides the later steps of older files
            append(self._tensorboard, tensorboard_record(step=last_row + 1, session_log={"status": "START"}))
        if self.cfg.wandb_project is not None:
            self._wandb = _start_wandb(self.cfg, self.dir, config, self.run_id)

    def _write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        row = {"step": step, **values}
        scalars = [{"tag": name, "simple_value": value} for name, value in values.items()]
        self._write(
            (step, self.dir / METRICS, to_lines([row])),
            (step, self._tensorboard, tensorboard_record(step=step, summary={"value": scalars})),
        )
        if self._wandb is not None:
            self._wandb.log(dict(metrics), step=step)
        if "critic/score/mean" in metrics:
            self.say(self._table.lines(row))
        is_validation = any(VALIDATION_NAME.fullmatch(name) for name in metrics)
        if is_validation:
            self.say(validation_table(self._history()))
        if self._samples:
            whose = "validation at " if is_validation else ""
            self.say("\n".join([f"samples of {whose}step {step}", *self._samples]))
        if is_validation or self._samples:
            self._table.interrupted()
        self._samples = []
        self._validates |= is_validation
        if is_validation or (self._has_news and not self._validates):
            self._write_report()

    def _write_rollouts(self, step: int, data: bytes) -> None:
        folder = self.dir / "rollouts"
        older = [path for earlier, path in step_files(folder, "parquet") if earlier < step]
        for path in older[: max(0, len(older) - ROLLOUTS_KEPT + 1)]:
            path.unlink()
        self._write((step, folder / f"step_{step}.parquet", data))

    def _write_tokens(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        files = step_files(self.dir / TOKENS, "jsonl")
        for path in surplus([file for file in files if file[0] < step]):
            path.unlink()
        self._write((step, self.dir / TOKENS / f"step_{step}.jsonl", to_lines(rows)))
        self._has_news = True

    def _write_report(self) -> None:
        """Writes report.html anew, or says once why it cannot: no page is worth a run. Executed by rank 0."""
        try:
            view = read_view(self.dir, history=self._history())
            page = run_page(view, defaults=self._defaults, command=launch_command())
            write_whole(self.dir / PAGE, page.encode(errors="backslashreplace"))
            self._has_news = False
        except Exception as error:
            told = " ".join(f"{type(error).__name__}: {error}".split())
            self.say_once("report", f"warning: the run's page is not written, and training goes on; {PAGE}; {told}")

    def _write(self, *entries: tuple[int, Path, bytes]) -> None:
        """Appends to files and renews status.json. While the disk is full, entries wait in memory behind those that do
        already, and are tried again with the next ones. Executed by rank 0."""
        self._waiting += entries
        try:
            self._append_waiting()
            self._write_status()
        except OSError as error:
            if error.errno not in FULL:
                raise
            if not self._is_full:
                self.say(
                    f"warning: no space for what is logged from step {self._first_waiting()} on, and training goes on; "
                    f"{self.dir}; found {error.strerror}, {shutil.disk_usage(self.dir).free / 2**20:.1f} MiB free, "
                    "expected room for metrics and samples, which wait in memory now, while lines of logs/ are lost; "
                    "free some space or raise the quota"
                )
            self._is_full = True
            return
        if self._is_full:
            self.say(f"there is room again: all that was logged up to step {self.step} is written")
        self._is_full = False

    def _append_waiting(self) -> None:
        while self._waiting:
            _, path, data = self._waiting[0]
            append(path, data)
            del self._waiting[0]

    def _first_waiting(self) -> int:
        return self._waiting[0][0] if self._waiting else self.step

    def _history(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, with those that wait."""
        unwritten = b"".join(data for _, path, data in self._waiting if path.name == METRICS)
        return read_metrics(self.dir, unwritten=unwritten)

    def _finish(self) -> None:
        history = self._history()
        self._close()
        for name, values in validation_values(history).items():
            self.say(in_words(name, values))
        self.catch_up()
        plot_learning_curve(history, self.dir / "learning_curve.png")
        self._write_status(state="finished")
        self._write_report()
        self.say(
            f"run folder: {self.dir}\nlearning curve: {self.dir / 'learning_curve.png'}\nreport: {self.dir / PAGE}"
        )

    def _write_status(self, *, state: str | None = None, error: str | None = None) -> None:
        """Replaces status.json in one move: a reader sees the old one or the new one, never half of it. The new one's
        file may be there already, with room for it."""
        status = {"state": state or self.state, "step": self.step, "resumable": self.resumable, "error": error}
        status |= {"run_id": self.run_id, "launch_id": launch_id(), "date": self.date}
        data = (to_json(status) + "\n").encode(errors="backslashreplace")
        write_whole(self.dir / "status.json", data, staged=self._new_status)

    @property
    def _new_status(self) -> Path:
        return self.dir / f".status.json.{self.world.rank}"

    def _close(self) -> None:
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(self.state == "failed"))
        self._wandb = None

    def _on_rank_0(self, action: Callable[[], Any]) -> Any:
        return _on_rank_0(self.world, action)


def _on_rank_0(world: World, action: Callable[[], Any]) -> Any:
    """`World.on_rank_0`, with an OSError as UserError."""
    return world.on_rank_0(lambda: _telling(action))


def _telling(action: Callable[[], Any]) -> Any:
    """The action's result, with an OSError as UserError."""
    try:
        return action()
    except OSError as error:
        raise UserError(cannot_write(error)) from None


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
            project=cfg.wandb_project, name=blank(name), id=run_id, resume="allow", dir=str(run_dir),
            config=plain(config), settings=settings,
        )  # fmt: skip
    except wandb.Error as error:
        raise UserError(
            f"wandb did not start; --tracking.wandb-project {cfg.wandb_project}; {' '.join(str(error).split())}; "
            "run `wandb login`, set WANDB_MODE=offline, or leave the option out"
        ) from None
