"""What a script sets up before its first step: prompts, run folder, engine and models. All of it runs on all ranks."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from lib.algorithms.kl import KLController
from lib.checkpoints.checkpointer import Checkpointer, Progress, Trained
from lib.config.as_json import defaults_of, to_json
from lib.data.chat_template import ChatTemplate
from lib.data.prompt_stream import PromptStream
from lib.data.prompts import DataFiles, Prompts
from lib.dist import World
from lib.engine.engine import RolloutEngine
from lib.engine.function_proof import prove_function
from lib.engine.sampler import Sampler
from lib.engine.weight_sync import WeightSync
from lib.errors import UserError
from lib.launch.checks import (
    check_same_prompts,
    data_sources,
    describe,
    first_samples,
    load_prompts,
    needs_reward,
    try_reward,
)
from lib.launch.resume import Resume
from lib.launch.train_config import TrainConfig
from lib.model.adapter_start import begin_adapter_
from lib.model.critic_config import CriticConfig
from lib.model.frozen import BaseModel, FrozenModel
from lib.model.fsdp import load_critic, load_policy, offload
from lib.model.optim import build_optimizer, moments_to_come
from lib.rewards.scoring import Scorer
from lib.rollouts.collector import Collector
from lib.stopping import Stopper
from lib.storage.adapter import Adapter
from lib.storage.model_folder import ModelFiles
from lib.storage.peft_folder import read_peft
from lib.storage.weight_headers import shards_beside
from lib.storage.weights import hash_tensors
from lib.tracking.run import Run
from lib.tracking.startup import StartupTimer
from lib.turns.start import Turns, find_kinds, open_sampler
from lib.types import Sample

LOW_LR = 5e-6
"""Of adapters: below it a run is likely to have been configured for all weights."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a run trains on and goes on from, checked before a model is loaded. The same on all ranks."""

    model_files: ModelFiles
    resume: Resume
    tokenizer: Any
    stop_ids: list[int]
    """Token ids that end a response."""
    train_set: Prompts
    val_set: Prompts
    val_samples: list[Sample]
    """Every validation prompt, in file order."""
    prompts: PromptStream
    num_steps: int
    reward: str
    """A line about the reward function."""
    warnings: tuple[str, ...]
    """Of the data files, in the order found."""
    turns: Turns | None
    """What answers between the model's turns; None: a response is one turn."""

    @property
    def epochs(self) -> float:
        """Passes over the training prompts so far."""
        return self.prompts.num_drawn / len(self.train_set)


def read_task(
    cfg: TrainConfig, files: DataFiles, model_files: ModelFiles, resume: Resume, world: World, startup: StartupTimer
) -> Task:
    """The prompts, tokenised, and the reward function, tried; after `check_input`. Raises UserError, RewardError."""
    reward, kinds = None, None
    trials = {} if files.train is None else first_samples(cfg, files.train, files.val)
    if cfg.turns.path is not None:
        with startup.phase("try the environments"):
            kinds = world.on_rank_0(lambda: find_kinds(cfg.turns, trials))
    with startup.phase("try the reward function"):
        if files.train is not None:  # rows of a dataset class are made with the tokenizer
            reward = world.agree(lambda: try_reward(cfg, files.train, files.val, kinds))
    with startup.phase("tokenise the prompts"):
        tokenizer, stop_ids, turns, train_set, val_set = world.agree(
            lambda: load_prompts(cfg, files, model_files, resume, kinds, world)
        )
        check_same_prompts(train_set, val_set, world)
        prompts = PromptStream(train_set, seed=cfg.seed, shuffle=cfg.data.shuffle, curriculum=cfg.data.curriculum)
        resume = resume.restore_prompts(prompts)
        val_samples = val_set.all_samples()
        if reward is None:
            reward = world.agree(lambda: try_reward(cfg, train_set.rows, val_set.rows, kinds))
    if cfg.lora.rank:
        with startup.phase("hash the base model"):
            model_files = replace(model_files, tensor_hashes=hash_tensors(model_files.folder, world))
            world.agree(lambda: resume.check_base(model_files, cfg.lora))
            if cfg.lora.path is not None:
                peft = read_peft(cfg.lora.path, "--lora.path")
                hashes, used = model_files.tensor_hashes, model_files.shapes
                world.on_rank_0(lambda: peft.check_base(hashes, model_files.folder, used=used))
    num_steps = cfg.num_steps or max(1, len(train_set) * cfg.total_epochs // cfg.prompts_per_step)
    resume.check_steps(num_steps)
    if cfg.frozen_steps >= num_steps:
        raise UserError(
            f"--critic.warmup-steps {cfg.frozen_steps} leaves the policy no step to learn; --num-steps, or "
            f"--total-epochs; found {num_steps} steps, expected more than the warm-up; change one of them"
        )
    return Task(
        model_files=model_files, resume=resume, tokenizer=tokenizer, stop_ids=stop_ids, train_set=train_set,
        val_set=val_set, val_samples=val_samples, prompts=prompts, num_steps=num_steps, reward=reward,
        warnings=files.warnings, turns=turns,
    )  # fmt: skip


def open_run(cfg: TrainConfig, task: Task, world: World, startup: StartupTimer) -> Run:
    """The run folder with its loggers; a folder that goes on loses its rows after the checkpoint."""
    resume = task.resume
    run = Run(
        cfg.run_dir, cfg.tracking, world, config=to_json(cfg), num_steps=task.num_steps, overwrite=cfg.overwrite,
        last_row=resume.last_row, resumable=resume.in_place and resume.path is not None, date=resume.date,
        defaults=defaults_of(cfg),
    )  # fmt: skip
    startup.terminal = run.terminal
    return run


def open_scorer(cfg: TrainConfig, task: Task, run: Run) -> Scorer:
    """The worker processes of this rank that run the reward function."""
    kinds = task.turns and task.turns.kinds
    sources = data_sources(cfg, task.train_set.rows, task.val_set.rows) if needs_reward(cfg.reward, kinds) else set()
    log = run.dir / "logs" / f"rewards_{run.world.rank}.log"
    return Scorer(cfg.reward, sources, reward_keys=cfg.advantage.reward_keys, log_path=log)


def say_what_begins(cfg: TrainConfig, task: Task, run: Run) -> None:
    """The run in words, and what was found about its input."""
    train_set, val_set = task.train_set, task.val_set
    what = describe(cfg, run.world, task.model_files, train_set, val_set, num_steps=task.num_steps)
    run.say(run.terminal.fitted(what))
    ends = ", ".join(f"{task.tokenizer.decode([stop_id])!r} ({stop_id})" for stop_id in task.stop_ids)
    if cfg.lora.rank and shards_beside(task.model_files.folder) is not None:
        run.say(
            f"warning: the adapter's base is another run's checkpoint, {task.model_files.folder.parent.parent}: that "
            "must stay as long as this run is used; or merge it first, and begin from the merged model"
        )
    if cfg.lora.rank and cfg.optim.lr < LOW_LR:
        run.say(
            f"warning: adapters hardly learn at --optim.lr {cfg.optim.lr:g}; about ten times the learning rate that "
            "suits all weights, 1e-5 say, suits them"
        )
    turns = (task.turns.in_words, *task.turns.notes) if task.turns else ()
    notes = (f"responses end at {ends}", task.reward, *turns, *task.warnings, *train_set.warnings, *val_set.warnings)
    for note in dict.fromkeys(notes):  # both splits may give the same warning
        run.say(note)
    run.say(f"building the engine and loading the model; what the libraries say goes to {run.dir}/logs/")


def build_engine(cfg: TrainConfig, task: Task, run: Run) -> RolloutEngine:
    """The engine, built on the empty GPU and asleep."""
    engine = RolloutEngine(
        cfg.rollout,
        str(task.model_files.folder),
        dtype=str(cfg.model.compute_dtype(run.world)).removeprefix("torch."),
        max_prompt_len=cfg.data.max_prompt_len,
        most_responses=max(cfg.most_in_flight, len(task.val_set) * cfg.eval.n),
        stop_token_ids=task.stop_ids,
        world=run.world,
        seed=cfg.seed,
    )
    for warning in engine.warnings:
        run.say(f"warning: {warning}")
    engine.sleep()
    if engine.on_gpu:
        asleep = " and asleep" if engine.sleeps else ""
        run.say(f"the engine is built{asleep}; {engine.device_used_gib():.1f} GiB of GPU memory in use")
    return engine


def load_actor(cfg: TrainConfig, task: Task, world: World, *, reserved_bytes: int = 0) -> Trained:
    """The policy with its optimizer, as the checkpoint has them. `reserved_bytes`: as `load_policy`'s."""
    policy = load_policy(
        cfg.model, str(task.model_files.folder), cfg.fsdp, world, max_tokens_per_gpu=cfg.max_tokens_per_gpu,
        lora=cfg.lora, seed=cfg.seed, reserved_bytes=reserved_bytes,
        num_frozen_parameters=0 if cfg.is_own_reference else task.model_files.num_frozen_parameters,
    )  # fmt: skip
    if cfg.lora.rank and task.resume.path is None:  # else the checkpoint has them
        begin_adapter_(policy, cfg.lora, task.model_files.tensor_hashes, world)
    optimizer = world.agree(lambda: build_optimizer(policy, cfg.optim, on_host=cfg.fsdp.optimizer_offload))
    task.resume.load_("actor", policy, optimizer, world)
    adapter = None
    if cfg.lora.rank:
        files = task.model_files
        adapter = Adapter(
            base=str(files.folder), scale=cfg.lora.scale,
            tensors={name: files.tensor_hashes[name] for name in files.shapes},  # a folder may hold more
            dtype=str(cfg.model.compute_dtype(world)).removeprefix("torch."),
        )  # fmt: skip
    return Trained(model=policy, optimizer=optimizer, folder=task.model_files.folder, adapter=adapter)


def load_frozen(cfg: TrainConfig, task: Task, world: World, actor: Trained) -> list[FrozenModel | BaseModel]:
    """The models that score every batch and do not learn: the KL's reference, where there is a KL."""
    files = task.model_files.reference
    if files is None:
        return []
    if cfg.is_own_reference:
        return [BaseModel(name="ref", field="ref_log_probs", model=actor.model)]
    reference = load_policy(cfg.model, str(files.folder), cfg.fsdp, world, trainable=False)
    offload(cfg.fsdp, reference)
    return [FrozenModel(name="ref", field="ref_log_probs", model=reference, fsdp=cfg.fsdp)]


def load_trained_critic(
    cfg: CriticConfig, files: ModelFiles, task: Task, world: World, *, max_tokens_per_gpu: int, actor: Trained
) -> Trained:
    """The critic with its optimizer, as the checkpoint has them, offloaded; beside the actor's moments to come."""
    critic = load_critic(
        cfg.model, str(files.folder), cfg.fsdp, world, max_tokens_per_gpu=max_tokens_per_gpu,
        reserved_bytes=moments_to_come([actor.optimizer]),
    )  # fmt: skip
    optimizer = world.agree(lambda: build_optimizer(critic, cfg.optim, on_host=cfg.fsdp.optimizer_offload))
    task.resume.load_("critic", critic, optimizer, world)
    offload(cfg.fsdp, critic)
    return Trained(model=critic, optimizer=optimizer, folder=files.folder)


def sync_and_compare(
    cfg: TrainConfig, engine: RolloutEngine, trained: Mapping[str, Trained], run: Run, startup: StartupTimer
) -> WeightSync:
    """The policy's weights in the engine, all of them proved equal, and proved to compute the same.

    Decides before whether the engine stays beside updates.
    """
    policy = trained["actor"].model
    gathered = "once per optimizer step" if policy.placement.keeps_gathered else "in every pass"
    activations = "recomputed in" if policy.model.is_gradient_checkpointing else "kept for"
    run.say(f"the policy is loaded; weights are gathered {gathered}, activations {activations} the backward pass")
    if engine.on_gpu:
        engine.decide_to_stay(min(each.model.placement.spare_bytes for each in trained.values()))
        run.say(f"the engine {'sleeps' if engine.sleeps else 'keeps its memory'} during updates")
    with startup.phase("sync the weights and compare all"):
        weight_sync = WeightSync(policy, engine, fsdp=cfg.fsdp)
        to_come = moments_to_come(each.optimizer for each in trained.values())
        num_compared = weight_sync.wake(names=None, time=nullcontext, reserved_bytes=to_come)
    run.say(f"the engine holds the policy's weights: all {num_compared} tensors are equal bit for bit")
    if weight_sync.computed:
        run.say(
            f"warning: the engine's loader computes {len(weight_sync.computed)} of them, such as "
            f"{min(weight_sync.computed)}: every sync loads all weights again, which takes longer than a copy"
        )
    with startup.phase("compare engine and trainer"):
        proof = prove_function(
            weight_sync, str(trained["actor"].folder), dtype=cfg.model.compute_dtype(run.world),
            max_prompt_len=cfg.data.max_prompt_len, reserved_bytes=to_come,
        )  # fmt: skip
    run.say(
        f"engine and trainer compute the same: {proof.num_tokens} tokens, mean |log-prob difference| {proof.mean:.1e} "
        f"nats (at most {proof.limit:.2g})"
    )
    return weight_sync


def open_conversations(
    cfg: TrainConfig, task: Task, engine: RolloutEngine, run: Run
) -> AbstractContextManager[Sampler]:
    """What answers prompts: the engine, or with --turns.path conversations with it."""
    return open_sampler(
        task.turns, engine,
        lambda: ChatTemplate(task.tokenizer, cfg.data.chat_template_kwargs, date=task.resume.date),
        stop_ids=task.stop_ids, max_prompt_len=cfg.data.max_prompt_len, say=run.say,
        split_prompts=cfg.data.control_tokens == "split", log_path=run.dir / "logs" / f"turns_{run.world.rank}.log",
    )  # fmt: skip


def make_collector(
    cfg: TrainConfig, task: Task, sampler: Sampler, scorer: Scorer, run: Run, stopper: Stopper
) -> Collector:
    """What collects each step's scored responses."""
    return Collector(
        sampler, scorer, task.prompts, task.tokenizer, rollout=cfg.rollout, reward=cfg.reward,
        filter_groups=cfg.filter_groups, prompts_per_step=cfg.prompts_per_step, mini_batch_size=cfg.mini_batch_size,
        with_greedy=cfg.advantage.needs_greedy, mask_truncated=cfg.overlong.mask_truncated, run=run, stopper=stopper,
        world=run.world,
    )  # fmt: skip


def make_progress(cfg: TrainConfig, task: Task, collector: Collector) -> Progress:
    """Where the run is, beside its tensors: at its start, or where the checkpoint was."""
    progress = Progress(
        prompts=task.prompts, collector=collector, kl_controller=KLController(cfg.kl_reward), constant_groups=[]
    )
    progress.restore(task.resume.trainer)
    return progress


def make_checkpointer(
    cfg: TrainConfig, task: Task, trained: Mapping[str, Trained], progress: Progress, run: Run
) -> Checkpointer:
    """What writes the run's checkpoints."""
    resume = task.resume
    return Checkpointer(
        cfg.checkpoint, run, run.world, config=to_json(cfg), reward=task.reward, models=trained, progress=progress,
        num_steps=task.num_steps, resumed=resume.path, trainer=resume.trainer, began_from=task.model_files.began_from,
        turns=task.turns and task.turns.in_words,
    )  # fmt: skip
