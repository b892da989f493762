"""What a run continues from: found, proved whole, and compared with its config, all before a model is loaded.

`--checkpoint.resume auto` takes the newest whole checkpoint in RUN. Without one, a launch that has already been in RUN
(torchrun --max-restarts, or a job started again under its torchrun run id) begins again there; otherwise RUN must be
new or empty, or moved aside by --overwrite.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from lib.checkpoint import TRAINER, versions
from lib.checkpoint_files import Found, check, find_checkpoints, share, verify
from lib.config import to_json
from lib.data import PromptStream
from lib.dist import World
from lib.errors import DamagedCheckpoint, LockstepError, UserError
from lib.model import CausalPolicy, Critic
from lib.optim import lr_factor
from lib.run_folder import launch_id, read_status
from lib.scoring import code_hash
from lib.tensor_files import load_model_, load_optimizer_
from lib.train_config import TrainConfig

MAY_DIFFER = (
    *(
        "run_dir",
        "overwrite",
        "debug",
        "num_steps",
        "total_epochs",
        "max_minutes",
        "tracking.*",
        "eval.*",
        "checkpoint.*",
    ),
    *("*fsdp.*", "*max_tokens_per_gpu", "*model.gradient_checkpointing", "data.*_files", "data.*_max_samples"),
    *("reward.num_workers", "reward.timeout_s", "reward.max_error_rate", "rollout.max_log_probs_diff"),
    *("rollout.tensor_model_parallel_size", "rollout.gpu_memory_utilization", "rollout.max_num_*"),
    *("rollout.max_cudagraph_capture_size", "rollout.enforce_eager", "rollout.enable_prefix_caching"),
    *("rollout.sleep", "rollout.cpu_kv_cache_gib"),
)
"""Options that a continued run may give anew: they change what it shows, keeps or needs, not what it learns. The data
files may have moved: what is in them is compared by the fingerprint of the prompts."""


@dataclass(frozen=True, kw_only=True)
class Resume:
    """What a run begins with: a checkpoint, or nothing. The same on all ranks."""

    path: Path | None = None
    trainer: Mapping[str, Any] | None = None
    """trainer.json of the checkpoint."""
    in_place: bool = False
    """Whether RUN, which is there already, goes on."""
    finished: bool = False
    """Whether RUN's run came to its end."""
    notes: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """The last step that was trained; 0: none."""
        return self.trainer["step"] if self.trainer else 0

    @property
    def last_row(self) -> int | None:
        """The step after which RUN's rows are cut off; -1: all are; None: there is nothing to cut."""
        return None if not self.in_place else self.step if self.trainer else -1

    def check_steps(self, num_steps: int) -> None:
        """Raises UserError when the checkpoint leaves nothing to train; an end that was cut short is made up for."""
        cut_short = self.in_place and not self.finished
        if self.trainer and (self.step > num_steps or (self.step == num_steps and not cut_short)):
            raise UserError(
                f"nothing is left to train; {self.path}; found a checkpoint of step {self.step}, expected one before "
                f"the last step, {num_steps}; raise --num-steps or --total-epochs to go on, choose another --run-dir, "
                "or add --overwrite to start afresh"
            )

    def restore_prompts(self, prompts: PromptStream) -> None:
        """Goes on in the stream where the checkpoint was. Raises UserError when the prompts are others."""
        if self.trainer:
            prompts.restore(self.trainer["prompts"])

    def load_(self, role: str, model: CausalPolicy | Critic, optimizer: torch.optim.Optimizer, world: World) -> None:
        """Fills a model and its new optimizer from the checkpoint. Executed by all ranks together."""
        if self.path is not None:
            load_model_(self.path / role / "model", model, world)
            load_optimizer_(self.path / role / "optim", model, optimizer, world)

    def in_words(self, cfg: TrainConfig, num_steps: int, *, reward: str) -> str:
        """Where the run goes on, in a line, and what is to be known about it. `reward`: the line of check_reward."""
        if not self.trainer:
            return "\n".join(self.notes)
        start = max(self.step - cfg.frozen_steps, 0)
        lr = cfg.optim.lr * lr_factor(start, cfg.optim, num_steps - cfg.frozen_steps)
        prompts = self.trainer["prompts"]
        lines = [
            *self.notes,
            f"continuing from {self.path}: step {self.step + 1} of {num_steps} is next, learning rate {lr:g}, prompt "
            f"{prompts['place']} of epoch {prompts['epoch']}",
        ]
        if cfg.optim.schedule != "constant" and self.trainer["num_steps"] != num_steps:
            lines.append(f"the learning rate's schedule now ends at step {num_steps}, not {self.trainer['num_steps']}")
        there, here = code_hash(self.trainer.get("reward", reward)), code_hash(reward)
        if there != here:
            lines.append(f"warning: the reward function's file is another: sha256 {there} there, {here} here")
        different = [
            f"{name} {there} there, {here} here"
            for name, here in versions().items()
            if (there := self.trainer["versions"].get(name)) != here
        ]
        if different:
            lines.append(f"warning: other versions may round otherwise: {', '.join(different)}")
        return "\n".join(lines)


def find_resume(cfg: TrainConfig, world: World) -> Resume:
    """What this run begins with. Reads every byte of the checkpoint, shared among the ranks, to prove it whole.

    Raises UserError when the checkpoint's run had other options that matter, or a --checkpoint.resume PATH is none;
    DamagedCheckpoint for a damaged PATH, and when no checkpoint of RUN is whole. Executed by all ranks together.
    """
    candidates, again, state = world.on_rank_0(lambda: _look(cfg))
    notes = []
    for found in candidates:
        problem = _problem(found, world)
        if problem is None:
            trainer = world.on_rank_0(lambda found=found: _read_trainer(found.path, cfg))
            in_place = again or found.path.parent == _folder(cfg.run_dir)
            return Resume(
                path=found.path, trainer=trainer, in_place=in_place, finished=state == "finished", notes=tuple(notes)
            )
        if cfg.checkpoint.resume not in ("auto", "never") and found is candidates[-1]:
            raise problem  # of the one that was asked for; others are what the run has saved since
        notes.append(f"warning: {found.path.name} is passed over: {problem}")
    if notes:
        raise DamagedCheckpoint(
            f"no checkpoint can be continued; {cfg.run_dir}; found {'; '.join(notes)}; restore one from a copy, or add "
            "--overwrite to start afresh"
        )
    return Resume(in_place=again, notes=("starting again in the folder of this run",) if again else ())


def _look(cfg: TrainConfig) -> tuple[list[Found], bool, str | None]:
    """The checkpoints to try, newest first; whether RUN is this run's own, to go on in; the state of RUN's run.

    It is where this launch has been in RUN before, where nothing was trained yet when it was stopped, and where RUN
    began from the same PATH: the same command again goes on.
    """
    mode, folder = cfg.checkpoint.resume, _folder(cfg.run_dir)
    status = {} if folder is None else read_status(folder)
    again = launch_id() is not None and status.get("launch_id") == launch_id()
    is_restart = again and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    moves_aside = cfg.overwrite and not is_restart
    again = again or (status.get("state"), status.get("step")) == ("stopped", 0)
    found = find_checkpoints(folder) if (mode != "never" or is_restart) and status and not moves_aside else []
    if mode in ("auto", "never"):
        return found, again and not moves_aside, status.get("state")
    path = _folder(mode)
    if path is None:
        raise UserError(f"not a usable path; --checkpoint.resume {mode}; name a RUN/global_step_N")
    if moves_aside and path.parent == folder:
        raise UserError(
            f"--overwrite moves the checkpoint away; --checkpoint.resume {mode}; found it in --run-dir "
            f"{cfg.run_dir}, expected one of the two options; leave --overwrite out, or choose another --run-dir"
        )
    began_there = bool(status) and not moves_aside and _began_from(folder) == mode
    asked = check(path)
    own = [one for one in found if one.step > asked.step] if began_there else []
    candidates = [*own, Found(step=asked.step, path=path, manifest=asked, problem=None)]
    return candidates, again or began_there, status.get("state")


def _began_from(folder: Path) -> str | None:
    """The --checkpoint.resume with which RUN was last started."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))["checkpoint"]["resume"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _folder(path: str) -> Path | None:
    try:
        return Path(os.path.abspath(Path(path).expanduser()))
    except (RuntimeError, ValueError):  # ~name of nobody; a null byte; whoever makes the folder says so
        return None


def _problem(found: Found, world: World) -> LockstepError | None:
    """Why a checkpoint cannot be continued; None when every byte is as it was written. The same on all ranks."""
    if found.manifest is None:
        return DamagedCheckpoint(found.problem)
    if not found.manifest.has_optimizer:
        return UserError(
            f"the checkpoint has no optimizer state any more; {found.path}; it can be merged and evaluated, not "
            "continued; use a newer one"
        )
    names = share(found.manifest.files, world.rank, world.size)
    try:
        world.agree(lambda: verify(found.path, names))
    except DamagedCheckpoint as error:  # a disk that cannot be read for now is another matter, and ends the run
        return error
    return None


def _read_trainer(path: Path, cfg: TrainConfig) -> dict[str, Any]:
    """trainer.json. Raises UserError, naming the fields, when its config differs from ours in what matters."""
    trainer = json.loads((path / TRAINER).read_text(encoding="utf-8"))
    saved, ours = _flat(trainer["config"]), _flat(json.loads(json.dumps(to_json(cfg))))
    different = [
        f"{name} was {json.dumps(saved.get(name))} and is {json.dumps(ours.get(name))}"
        for name in dict.fromkeys((*saved, *ours))
        if saved.get(name) != ours.get(name) and not any(fnmatch(name, free) for free in MAY_DIFFER)
    ]
    if different:
        raise UserError(
            f"the checkpoint's run had other options; {path}; {'; '.join(different[:8])}"
            f"{f'; and {len(different) - 8} more' if len(different) > 8 else ''}; give the same ones to go on, choose "
            "another --run-dir, or add --overwrite to start afresh"
        )
    return trainer


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"optim.lr": 1e-06, ...} of nested dicts."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
