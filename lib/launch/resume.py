"""What a run continues from: found, proved whole, and compared with its config, all before a model is loaded.

`--checkpoint.resume auto` takes the newest whole checkpoint in RUN. Without one, a run that died begins again there
with the same options, and so does a launch that has already been in RUN (torchrun --max-restarts, or a job started
again under its torchrun run id); otherwise RUN must be new or empty, or moved aside by --overwrite.
`--checkpoint.resume PATH` into another RUN is a branch.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lib.checkpoints.checkpointer import versions
from lib.checkpoints.tensor_files import load_model_, load_optimizer_
from lib.checkpoints.trainer_file import read_trainer
from lib.config.as_json import to_json
from lib.data.chat_template import first_date
from lib.data.prompt_stream import PromptStream
from lib.dist import World
from lib.errors import DamagedCheckpoint, LockstepError, UserError
from lib.launch.branch import NOTHING_LEFT_OVER, begin_branch, changed_options, flat, in_short, in_words, num_left_over
from lib.launch.train_config import TrainConfig
from lib.model.lora import LoRAConfig
from lib.model.networks import CausalPolicy, Critic
from lib.model.optim import lr_factor, schedule_end
from lib.rewards.trial import code_hash
from lib.storage.adapter import check_base, folders_below, read_adapter
from lib.storage.checkpoint_folder import Found, check, find_checkpoints, share, verify
from lib.storage.model_folder import ModelFiles
from lib.storage.model_source import find_actor
from lib.tracking.run_folder import has_ended, launch_id, read_status
from lib.turns.start import Turns


@dataclass(frozen=True, kw_only=True)
class Resume:
    """What a run begins with: a checkpoint, or nothing. The same on all ranks."""

    path: Path | None = None
    trainer: Mapping[str, Any] | None = None
    """trainer.json of the checkpoint; of a branch, without what its changes leave behind."""
    tensors: Mapping[str, Mapping[str, list[int]]] | None = None
    """{"actor/model": {name: shape}, ...} of the checkpoint."""
    in_place: bool = False
    """Whether RUN, which is there already, goes on."""
    is_branch: bool = False
    """Whether the checkpoint is another run's, whose options may differ."""
    finished: bool = False
    """Whether RUN's run came to its end."""
    notes: tuple[str, ...] = ()
    date: str | None = None
    """When the run began, as `first_date` gives it: the date in its prompts."""

    @property
    def step(self) -> int:
        """The last step that was trained; 0: none."""
        return self.trainer["step"] if self.trainer else 0

    @property
    def last_row(self) -> int | None:
        """The step after which RUN's rows are cut off; -1: all are; None: there is nothing to cut."""
        return None if not self.in_place else self.step if self.trainer else -1

    def check_steps(self, num_steps: int) -> None:
        """Raises UserError when the checkpoint leaves nothing to train. A run that died between its last step and its
        end may still end."""
        cut_short = self.in_place and not self.finished
        if self.trainer and (self.step > num_steps or (self.step == num_steps and not cut_short)):
            raise UserError(
                f"nothing is left to train; {self.path}; found a checkpoint of step {self.step}, expected one before "
                f"the last step, {num_steps}; raise --num-steps or --total-epochs to go on, choose another --run-dir, "
                "or add --overwrite to start afresh"
            )

    def check_model(self, role: str, shapes: Mapping[str, tuple[int, ...]], *, option: str = "--model.path") -> None:
        """Raises UserError when the checkpoint's model has not these {name: shape}; before anything is loaded."""
        if self.tensors is None:
            return
        saved = {name: tuple(shape) for name, shape in self.tensors.get(f"{role}/model", {}).items()}
        if saved == shapes:
            return
        name = min(name for name in {*saved, *shapes} if saved.get(name) != shapes.get(name))
        there, here = (list(of[name]) if name in of else "missing" for of in (saved, shapes))
        raise UserError(
            f"the checkpoint is of another model; {self.path / role}; found {name} {there} there and {here} in the "
            f"model of {option}; give the {option} that the checkpoint was trained from, or begin a run from its "
            f"weights alone: --model.path {self.path} without --checkpoint.resume"
        )

    def check_base(self, files: ModelFiles, lora: LoRAConfig) -> None:
        """Raises UserError when the checkpoint's adapter was trained on other weights, whatever their shapes, or with
        another scale, and where one to begin with is given beside it."""
        adapter = None if self.path is None else read_adapter(self.path / "actor" / "huggingface")
        if adapter is None:
            return
        check_base(adapter.tensors, files.tensor_hashes, files.folder, used=files.shapes)
        if adapter.scale != lora.scale:
            raise UserError(
                f"the adapter was trained with another scale; {self.path}; found alpha / rank {lora.scale:g}, expected "
                f"{adapter.scale:g}: its weights would be another model's; give --lora.alpha its value of then"
            )
        began = self.trainer["config"].get("lora", {}).get("path")
        if lora.path is not None and (began is None or not _are_one(lora.path, began)):
            raise UserError(
                f"the checkpoint has an adapter of its own; {self.path}; found --lora.path {lora.path}, expected "
                f"{began or 'none'}, as its run had it: another would not be read; say --lora.rank {lora.rank} "
                f"--lora.alpha {lora.alpha:g} --lora.targets {' '.join(lora.targets)} instead, or leave "
                "--checkpoint.resume out"
            )

    def restore_prompts(self, prompts: PromptStream) -> "Resume":
        """Goes on in the stream where the checkpoint was, and gives what the run begins with. Raises UserError when the
        prompts are others; a branch begins with the first of them then, without responses to the old ones."""
        if not self.trainer:
            return self
        if not self.is_branch or prompts.is_of(self.trainer["prompts"]):
            prompts.restore(self.trainer["prompts"])
            return self
        dropped = num_left_over(self.trainer)
        note = "the prompts are others: the branch begins with the first of theirs"
        note += f", and {dropped} left-over responses to the old ones are dropped" if dropped else ""
        begun = {**self.trainer, **NOTHING_LEFT_OVER, "prompts": prompts.state()}
        return replace(self, trainer=begun, notes=(*self.notes, note))

    def load_(self, role: str, model: CausalPolicy | Critic, optimizer: torch.optim.Optimizer, world: World) -> None:
        """Fills a model and its new optimizer from the checkpoint. Executed by all ranks together."""
        if self.path is not None:
            load_model_(self.path / role / "model", model, world)
            load_optimizer_(self.path / role / "optim", model, optimizer, world)

    def in_words(self, cfg: TrainConfig, num_steps: int, *, reward: str, turns: Turns | None = None) -> str:
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
        lines += _schedule_note(self.trainer, cfg, num_steps)
        of_turns = turns.in_words if turns else ""
        for name, line, whose in (("reward", reward, "reward function's"), ("turns", of_turns, "environments'")):
            there, here = code_hash(self.trainer.get(name, line)), code_hash(line)
            if there != here:
                lines.append(f"warning: the {whose} file is another: sha256 {there} there, {here} here")
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

    Raises UserError when a run that is to go on had other options that matter, or a --checkpoint.resume PATH is no
    checkpoint; DamagedCheckpoint for a damaged PATH, and when no checkpoint of RUN is whole. Executed by all ranks
    together.
    """
    candidates, again, state = world.on_rank_0(lambda: _look(cfg))
    found, trainer, notes = _first_whole(candidates, cfg, world)
    if found is None:
        begins_again = ("the run in this folder has no checkpoint: it begins again",) if again else ()
        return Resume(in_place=again, notes=begins_again)
    is_branch = found.path.parent != _folder(cfg.run_dir)
    begun, changes = world.on_rank_0(lambda: _compare(found.path, trainer, cfg, is_branch=is_branch))
    return Resume(
        path=found.path, trainer=begun, tensors=found.manifest.inventory.get("tensors"), is_branch=is_branch,
        in_place=again or not is_branch, finished=state == "finished", notes=(*notes, *changes),
    )  # fmt: skip


def _first_whole(
    candidates: Sequence[Found], cfg: TrainConfig, world: World
) -> tuple[Found | None, dict[str, Any] | None, list[str]]:
    """The first checkpoint that can be continued, its trainer.json, and warnings about those before it."""
    notes = []
    for found in candidates:
        trainer, problem = _prove(found, world)
        if problem is None:
            return found, trainer, notes
        if cfg.checkpoint.resume not in ("auto", "never") and found is candidates[-1]:
            raise problem  # of the one that was asked for; others are what the run has saved since
        notes.append(f"warning: {found.path.name} is passed over: {problem}")
    if notes:
        raise DamagedCheckpoint(
            f"no checkpoint can be continued; {cfg.run_dir}; found {'; '.join(notes)}; restore one from a copy, or add "
            "--overwrite to start afresh"
        )
    return None, None, notes


def with_date(resume: Resume, cfg: TrainConfig, world: World) -> Resume:
    """With the date that the run began on: its checkpoint's or its folder's, otherwise now. The same on all ranks."""

    def find() -> str:
        status = read_status(_folder(cfg.run_dir)) if resume.in_place else {}
        return first_date((resume.trainer or {}).get("date"), status.get("date"))

    return replace(resume, date=world.on_rank_0(find))


def _look(cfg: TrainConfig) -> tuple[list[Found], bool, str | None]:
    """The checkpoints to try, newest first; whether RUN is this run's own, to go on in; the state of RUN's run.

    It is where this launch has been in RUN before, where nothing was trained yet when it was stopped, where it died
    without a checkpoint and had these options, and where RUN began from the same PATH: the same command again goes on.
    """
    mode, folder = cfg.checkpoint.resume, _folder(cfg.run_dir)
    is_run = folder is not None and (folder / "status.json").is_file()  # which a full disk may have left empty
    status = read_status(folder) if is_run else {}
    again = launch_id() is not None and status.get("launch_id") == launch_id()
    is_restart = again and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    moves_aside = cfg.overwrite and not is_restart
    again = again or (status.get("state"), status.get("step")) == ("stopped", 0)
    if is_run and moves_aside:
        _check_nothing_needed(folder, cfg)
    there = find_checkpoints(folder) if is_run and not moves_aside else []
    found = there if mode != "never" or is_restart else []
    if is_run and not (again or there or moves_aside):
        again = _begins_again(folder, status, cfg)
    if mode in ("auto", "never"):
        return found, again and not moves_aside, status.get("state")
    path = _asked_for(mode)
    if folder is not None and folder.is_dir() and path.parent.samefile(folder):  # by whatever links
        path = folder / path.name
    if moves_aside and path.parent == folder:
        raise UserError(
            f"--overwrite moves the checkpoint away; --checkpoint.resume {mode}; found it in --run-dir "
            f"{cfg.run_dir}, expected one of the two options; leave --overwrite out, or choose another --run-dir"
        )
    began_there = is_run and not moves_aside and _began_from(folder) == mode
    asked = check(path)
    own = [one for one in found if one.step > asked.step] if began_there else []
    candidates = [*own, Found(step=asked.step, path=path, manifest=asked, problem=None)]
    return candidates, again or began_there, status.get("state")


def _check_nothing_needed(folder: Path, cfg: TrainConfig) -> None:
    """Raises UserError where --overwrite would move away what the run begins with."""
    critic = getattr(cfg, "critic", None)
    named = {
        "--model.path": cfg.model.path, "--model.reference-path": cfg.model.reference_path,
        "--critic.model.path": critic and critic.model.path, "--lora.path": cfg.lora.path,
    }  # fmt: skip
    for option, path in named.items():
        place = _folder(path) if path else None
        if place is None or not os.path.exists(place):
            continue  # none, a hub id, or what is refused later
        needed = [place]
        if not _lies_in(place, folder):
            actor, _ = find_actor(path, option)
            needed += [] if actor is None else folders_below(actor / "huggingface")
        if there := [it for it in needed if _lies_in(it, folder)]:
            raise UserError(
                f"--overwrite moves away what the run begins with; {option} {path}; found "
                f"{'it' if there[0] == place else f'the model under its adapter, {there[0]},'} in --run-dir "
                f"{cfg.run_dir}, expected another place; choose another --run-dir, or move the run yourself"
            )


def _lies_in(place: Path, folder: Path) -> bool:
    """Whether it is the folder or within it, by whatever links."""
    place, folder = (Path(os.path.realpath(it)) for it in (place, folder))
    return folder in (place, *place.parents)


def _begins_again(folder: Path, status: Mapping[str, Any], cfg: TrainConfig) -> bool:
    """Whether a run without a checkpoint died in RUN and had these options. Raises UserError where it had others, and
    where it is alive. A run without a config.json, or that has finished, is another matter."""
    saved = _read_config(folder)
    if saved is None or status.get("state") == "finished" or not has_ended(folder):
        return False
    changes, began_from = changed_options(saved, cfg, data_may_move=False), saved["checkpoint"]["resume"]
    if {began_from, cfg.checkpoint.resume} - {"auto", "never"} and began_from != cfg.checkpoint.resume:
        changes["checkpoint.resume"] = (began_from, cfg.checkpoint.resume)
    if changes:
        raise UserError(
            f"the run folder holds another run, which has no checkpoint; --run-dir {folder}; found state "
            f"{status.get('state', 'unknown')} at step {status.get('step', 0)}, {in_short(changes)}; with its own "
            "options it begins again; choose another --run-dir, or add --overwrite to move it aside and start afresh"
        )
    return True


def _asked_for(mode: str) -> Path:
    """The folder that --checkpoint.resume PATH names. Raises UserError when there is none, with those that are."""
    path = _folder(mode)
    if path is not None and path.is_dir():
        return path
    near = [] if path is None else [found.path.name for found in find_checkpoints(path.parent)]
    there = f"only {', '.join(near)} in {path.parent}" if near else f"no folder {path or mode}"
    raise UserError(
        f"no such checkpoint; --checkpoint.resume {mode}; found {there}, expected auto, never, or the path of a "
        "RUN/global_step_N; check the spelling"
    )


def _began_from(folder: Path) -> str | None:
    """The --checkpoint.resume with which RUN was last started."""
    saved = _read_config(folder)
    return saved and saved["checkpoint"]["resume"]


def _read_config(folder: Path) -> dict[str, Any] | None:
    """RUN's config.json; None where it cannot be read."""
    try:
        saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return saved if isinstance(saved["checkpoint"]["resume"], str) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _are_one(path: str, other: str) -> bool:
    """Whether two paths name one folder, or would."""
    places = [_folder(path), _folder(other)]
    return path == other or (None not in places and os.path.realpath(places[0]) == os.path.realpath(places[1]))


def _folder(path: str) -> Path | None:
    try:
        return Path(os.path.abspath(Path(path).expanduser()))
    except (RuntimeError, ValueError):  # ~NAME of no user; a null byte; what makes the folder says so
        return None


def _prove(found: Found, world: World) -> tuple[dict[str, Any] | None, LockstepError | None]:
    """trainer.json of a checkpoint every byte of which is as it was written; else why it cannot be continued. The same
    on all ranks."""
    if found.manifest is None:
        return None, DamagedCheckpoint(found.problem)
    if not found.manifest.has_optimizer:
        return None, UserError(
            f"the checkpoint has no optimizer state any more; {found.path}; it can be merged and evaluated, not "
            "continued; use a newer one"
        )
    names = share(found.manifest.files, world.rank, world.size)
    try:
        world.agree(lambda: verify(found.path, names))
        return world.on_rank_0(lambda: read_trainer(found.path)), None
    except DamagedCheckpoint as error:  # a disk that cannot be read for now is another matter, and ends the run
        return None, error


def _compare(
    path: Path, trainer: dict[str, Any], cfg: TrainConfig, *, is_branch: bool
) -> tuple[dict[str, Any], list[str]]:
    """trainer.json as the run begins with it, and lines about what is new. Raises UserError when a run that goes on in
    its own folder has other options that matter."""
    changes = changed_options(trainer["config"], cfg)
    if is_branch:
        begun, notes = begin_branch(trainer, changes, cfg)
        told = [f"a branch of {path}, with {len(changes)} other option(s):"] if changes else []
        return begun, [*told, *(f"  {line}" for line in in_words(changes)), *notes]
    if changes:
        raise UserError(
            f"the checkpoint's run had other options; {path}; {in_short(changes)}; give the same ones to go on, or "
            f"branch off with these: --checkpoint.resume {path} and a new --run-dir; or add --overwrite to start afresh"
        )
    return trainer, []


def _schedule_note(trainer: Mapping[str, Any], cfg: TrainConfig, num_steps: int) -> list[str]:
    """A line where a learning rate falls otherwise than before: to another step.

    Checkpoints without `schedule_end` are of a time when schedules ended with the last step, not one after it.
    """
    there, here = trainer.get("schedule_end", trainer["num_steps"]), schedule_end(num_steps)
    schedules = [value for name, value in flat(to_json(cfg)).items() if name.endswith("optim.schedule")]
    if there == here or set(schedules) == {"constant"}:
        return []
    return [f"the learning rate's schedule now ends at step {here}, not {there}"]
