"""Before a run starts: what fits together and what does not, told before a model is loaded; and the run in words.

In this order: the scripts call `check_input` and `check_critic`, setup.py calls `try_reward`, `load_prompts`,
`check_same_prompts` and `describe`.
"""

import math
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from lib.algorithms.kl import kl_in_words
from lib.config.as_json import config_hash
from lib.config.values import either, nearest_divisors
from lib.data.chat_template import ChatTemplate
from lib.data.curriculum import WEIGHTS
from lib.data.prompts import DataFiles, Prompts, check_data_files, tokenize
from lib.data.rows import Rows
from lib.data.tokenizer import load_tokenizer, stop_token_ids
from lib.dist import World
from lib.engine.in_process import check_vllm
from lib.engine.rollout_config import EngineConfig
from lib.errors import UserError
from lib.launch.resume import Resume, find_resume, with_date
from lib.launch.train_config import TrainConfig
from lib.model.critic_config import CriticConfig
from lib.model.lora import LoRAConfig
from lib.rewards.scoring import RewardConfig
from lib.rewards.trial import check_reward, rows_to_answer
from lib.storage.adapter import adapted_weights, adapter_shapes
from lib.storage.model_folder import (
    ModelFiles,
    check_critic_files,
    check_model_files,
    check_parameters,
    check_reference,
)
from lib.storage.model_source import find_actor, verify_actor
from lib.storage.peft_folder import read_peft
from lib.storage.weight_headers import Shape, some
from lib.tracking.run import check_run
from lib.turns.kinds import BadRow, Kinds, check_rows
from lib.turns.start import Turns, find_turns
from lib.types import Sample


def check_engines(rollout: EngineConfig, world: World) -> None:
    """Raises UserError when there is no vLLM that can be used, and when the engines do not divide the ranks."""
    check_vllm()
    tp_size = rollout.tensor_model_parallel_size
    if world.size % tp_size:
        raise UserError(
            f"--rollout.tensor-model-parallel-size {tp_size} does not divide the {world.size} ranks; torchrun; every "
            f"engine takes that many ranks; use {either(nearest_divisors(world.size, tp_size))}, or start another "
            "number of ranks"
        )


def check_launch(cfg: TrainConfig, world: World) -> None:
    """Raises UserError when the config does not fit the number of ranks."""
    check_engines(cfg.rollout, world)
    tp_size = cfg.rollout.tensor_model_parallel_size
    if cfg.prompts_per_step % (world.size // tp_size):
        raise UserError(
            f"--prompts-per-step {cfg.prompts_per_step} does not divide among {world.size // tp_size} engines; "
            f"{world.size} ranks / tensor-parallel size {tp_size}; expected a multiple of {world.size // tp_size}"
        )
    if cfg.mini_batch_size < world.size:
        raise UserError(
            f"--mini-batch-size {cfg.mini_batch_size} is smaller than the {world.size} ranks; every rank needs a "
            f"response of each optimizer step; expected at least {world.size}; raise it, or start fewer ranks"
        )


def check_same_config(cfg: Any, world: World) -> None:
    """Raises UserError on all ranks when they were started with different options."""
    hashes = world.gather(config_hash(cfg))
    if len(set(hashes)) > 1:
        raise UserError(
            f"the ranks were started with different options; config.json by rank; found hashes {', '.join(hashes)}, "
            "expected equal ones; give every rank the same command line"
        )


def check_input(cfg: TrainConfig, world: World) -> tuple[DataFiles, ModelFiles, Resume]:
    """The data and model files, after every check that needs neither transformers nor a GPU, on all ranks together."""
    check_same_config(cfg, world)
    world.agree(lambda: check_launch(cfg, world))
    files = world.agree(
        lambda: check_data_files(cfg.data, needs_grader=cfg.reward.path is None and cfg.turns.path is None)
    )
    resume = with_date(find_resume(cfg, world), cfg, world)
    model_files = find_models(cfg, resume, world)
    check_run(cfg.run_dir, cfg.tracking, world, overwrite=cfg.overwrite, goes_on=resume.in_place)
    return files, model_files, resume


def find_models(cfg: TrainConfig, resume: Resume, world: World) -> ModelFiles:
    """The policy's model files, with the reference's where a KL needs one, after all checks of folders and headers.

    A run that goes on finds the checkpoints again that it began from. Raises UserError, DamagedCheckpoint. Executed by
    all ranks together, which share the hashing of a checkpoint.
    """
    began_from = (resume.trainer or {}).get("began_from", {})
    option = "--model.path" if cfg.model.reference_path is None else "--model.reference-path"
    pinned = began_from.get("model" if cfg.model.reference_path is None else "reference")
    if cfg.needs_reference and pinned is not None:
        world.agree(lambda: _check_still_there(pinned, option, "reference"))
    if cfg.lora.rank and "model" in began_from:
        world.agree(lambda: _check_still_there(began_from["model"], "--model.path", "model under the adapter"))
    path = began_from.get("model", cfg.model.path)
    path = path if world.on_rank_0(lambda: Path(path).is_dir()) else cfg.model.path  # its config is all that is needed
    policy = _find_model(cfg, path, "--model.path", cfg.rollout.tensor_model_parallel_size, world)
    if not cfg.needs_reference:
        return policy
    reference = policy
    if cfg.model.reference_path is not None:
        reference = _find_model(cfg, pinned or cfg.model.reference_path, option, 1, world)
        world.agree(lambda: check_reference(policy, reference))
    return replace(policy, reference=reference)


def _check_still_there(folder: str, option: str, what: str) -> None:
    if not Path(folder).is_dir():
        raise UserError(
            f"the {what} that the run began with is gone; {option}; found no {folder}, expected that checkpoint; "
            f"restore it from a copy, or branch off with another {option}"
        )


def _find_model(cfg: TrainConfig, path: str, option: str, tensor_parallel_size: int, world: World) -> ModelFiles:
    actor, warnings = world.on_rank_0(lambda: find_actor(path, option))  # the run may save another one meanwhile
    files = world.agree(
        lambda: check_model_files(
            path if actor is None else str(actor / "huggingface"), with_weights=actor is None, option=option,
            max_prompt_len=cfg.data.max_prompt_len, max_response_len=cfg.rollout.max_response_len,
            tensor_parallel_size=tensor_parallel_size,
        )
    )  # fmt: skip
    if actor is not None:
        verify_actor(actor, world)
    return replace(files, warnings=(*files.warnings, *warnings))


def check_critic(
    cfg: TrainConfig, critic: CriticConfig, policy: ModelFiles, resume: Resume, world: World
) -> ModelFiles:
    """The critic's model files, after the checks of `check_input`, on all ranks together."""

    def check() -> ModelFiles:
        files = check_critic_files(
            critic.model.path, policy, max_prompt_len=cfg.data.max_prompt_len,
            max_response_len=cfg.rollout.max_response_len,
        )  # fmt: skip
        longest = cfg.data.max_prompt_len + cfg.rollout.max_response_len
        if critic.max_tokens_per_gpu is not None and critic.max_tokens_per_gpu < longest:
            raise UserError(
                f"--critic.max-tokens-per-gpu {critic.max_tokens_per_gpu} is smaller than one sequence; found "
                f"--data.max-prompt-len {cfg.data.max_prompt_len} + --rollout.max-response-len "
                f"{cfg.rollout.max_response_len} = {longest}; expected at least {longest}; raise it, or leave it out"
            )
        resume.check_model("critic", files.shapes, option="--critic.model.path")
        return files

    return world.agree(check)


def first_samples(cfg: TrainConfig, train: Rows, val: Rows) -> dict[str, Sample]:
    """{where it stands: row} of first rows of both splits, to try things with."""
    num_trials = min(2, len(train), cfg.data.train_max_samples or 2)
    trials = {train.where(row): train.sample(row, uid=row) for row in range(num_trials)}
    return trials | ({f"{val.where(0)} (validation)": val.sample(0, uid=2)} if len(val) else {})


def needs_reward(cfg: RewardConfig, kinds: Kinds | None) -> bool:
    """Whether a reward function may be asked: not where all environments score themselves and none is given."""
    return kinds is None or cfg.path is not None or not all(it.scores for it in kinds.about.values())


def environments_score(kinds: Kinds, *used: tuple[Rows, int | None]) -> str:
    """The line about the reward where environments alone score. `used`: rows, and how many of them at most.

    Raises UserError that names the first row which no environment answers: nothing would score it.
    """
    for rows, limit in used:
        for row, choice in enumerate(islice(rows.iter_choices(), limit)):
            try:
                kind = kinds.of(**choice)
            except BadRow as error:
                raise error.at(rows.where(row)) from None
            if kind is None:
                raise UserError(
                    f"a row that nothing scores; {rows.where(row)}, column 'agent_name'; found "
                    f"{choice['agent_name']!r}, which no environment answers, expected {either(list(kinds.about))}: "
                    "only environments score; change the row, or give a reward function with --reward.path FILE"
                )
    return "reward: the environments score"


def try_reward(cfg: TrainConfig, train: Rows, val: Rows, kinds: Kinds | None = None) -> str:
    """A line about the reward function, which can score first rows of both splits, knows every data source and can be
    answered."""
    if not needs_reward(cfg.reward, kinds):
        return environments_score(kinds, (train, cfg.data.train_max_samples), (val, cfg.data.val_max_samples))
    trials = first_samples(cfg, train, val)
    needed = dict.fromkeys(cfg.advantage.reward_keys, "--advantage.reward-keys")
    is_judged = cfg.filter_groups.enable or cfg.data.curriculum
    needed |= {cfg.filter_groups.metric: "--filter-groups.metric"} if is_judged else {}
    lots = rows_to_answer(cfg.reward, train, cfg.data.train_max_samples)
    lots += rows_to_answer(cfg.reward, val, cfg.data.val_max_samples)
    return check_reward(
        cfg.reward, data_sources(cfg, train, val), trials, to_answer=lots, needed=needed, of_episodes=kinds is not None
    )


def data_sources(cfg: TrainConfig, train: Rows, val: Rows) -> set[str]:
    """What the reward function is asked for: the data sources of the rows that the run uses, of both splits."""
    return train.data_sources(cfg.data.train_max_samples) | val.data_sources(cfg.data.val_max_samples)


def check_networks(cfg: TrainConfig, model_files: ModelFiles, resume: Resume) -> None:
    """Raises UserError unless transformers builds the policy, and the reference, of weights that are theirs and the
    checkpoint's, and its adapter has modules to adapt. Imports transformers."""
    for each in (model_files, model_files.reference):
        if each is not None:
            check_parameters(each)
    adapter = " with its --lora.rank, --lora.targets, --lora.exclude and --lora.init" if cfg.lora.rank else ""
    resume.check_model("actor", trained_shapes(cfg.lora, model_files), option="--model.path" + adapter)


def trained_shapes(lora: LoRAConfig, files: ModelFiles) -> dict[str, Shape]:
    """{name: shape} of what trains: all weights, or the adapters. Raises UserError."""
    if not lora.rank:
        return files.shapes
    if lora.path is not None:
        read_peft(lora.path, "--lora.path").check_fits(files.shapes, files.folder)
    weights = adapted_weights(files.shapes, targets=lora.targets, exclude=lora.exclude)
    smallest = min(weights, key=lambda name: min(files.shapes[name]))
    if lora.path is None and lora.rank > min(files.shapes[smallest]):  # the rank of one that is there is as it is
        raise UserError(
            f"--lora.rank {lora.rank} is more than a matrix has; {smallest} of {files.folder}; found "
            f"{list(files.shapes[smallest])}, expected a rank of {min(files.shapes[smallest])} at most; lower it"
        )
    return adapter_shapes(files.shapes, weights, lora.rank, with_start=lora.init == "pissa")


def load_prompts(
    cfg: TrainConfig, files: DataFiles, model_files: ModelFiles, resume: Resume, kinds: Kinds | None, world: World
) -> tuple[Any, list[int], Turns | None, Prompts, Prompts]:
    """The tokenizer, the ids that end a response, how turns are written, and both splits under the chat template on the
    run's date; after the checks of models that need transformers."""
    check_networks(cfg, model_files, resume)
    tokenizer = load_tokenizer(model_files.folder, chat_template_kwargs=cfg.data.chat_template_kwargs)
    stop_ids = stop_token_ids(tokenizer, model_files.folder)
    template = ChatTemplate(tokenizer, cfg.data.chat_template_kwargs, date=resume.date)
    turns = find_turns(cfg.turns, kinds, template, stop_ids, notes=check_choices(cfg, files, kinds))
    how = dict(date=resume.date, tools=kinds and kinds.of_prompts)
    train_set = tokenize(cfg.data, files, tokenizer, split="train", show_progress=world.rank == 0, **how)
    val_set = tokenize(cfg.data, files, tokenizer, split="val", **how)
    return tokenizer, stop_ids, turns, train_set, val_set


def check_choices(cfg: TrainConfig, files: DataFiles, kinds: Kinds | None) -> list[str]:
    """Warnings about the environments and tools that rows ask for. Raises UserError for one that is not there."""
    used = ((files.train, cfg.data.train_max_samples), (files.val, cfg.data.val_max_samples))
    return [
        warning
        for rows, most in used
        if kinds is not None and rows is not None  # rows of a dataset class are made with the tokenizer
        for warning in check_rows(kinds, rows, len(rows) if most is None else min(most, len(rows)))
    ]


def check_same_prompts(train_set: Prompts, val_set: Prompts, world: World) -> None:
    """Raises UserError on all ranks when they do not hold the same prompts: a uid must mean the same everywhere."""
    fingerprints = world.gather((train_set.fingerprint, val_set.fingerprint))
    if len(set(fingerprints)) > 1:
        raise UserError(
            "the ranks read different prompts; data files or dataset class; found fingerprints "
            f"{', '.join(first for first, _ in fingerprints)}, expected equal ones; give every node the same files, "
            "and make a dataset class deterministic"
        )


def batch_ladder(cfg: TrainConfig, num_ranks: int, *, num_steps: int, num_prompts: int) -> str:
    """The batch sizes that follow from the config, in words, four lines. `num_prompts`: after filtering.

    A micro-batch closes only when the next row does not fit, so it holds at least max_tokens_per_gpu // max_len rows.
    """
    prompts, size, epochs, budget = cfg.prompts_per_step, cfg.mini_batch_size, cfg.update_epochs, cfg.max_tokens_per_gpu
    responses, num_replicas = prompts * cfg.rollout.n, num_ranks // cfg.rollout.tensor_model_parallel_size
    num_updates = responses // size * epochs
    max_len = cfg.data.max_prompt_len + cfg.rollout.max_response_len
    most = math.ceil(math.ceil(size / num_ranks) / max(1, budget // max_len))
    return (
        f"step         {prompts} prompts x {cfg.rollout.n} samples = {responses} responses; "
        f"{prompts / num_replicas:g} prompts on each of {num_replicas} engine(s), "
        f"{responses / num_ranks:g} responses on each of {num_ranks} rank(s)\n"
        f"update       {responses // size} mini-batch(es) of {size} responses x {epochs} epoch(s) = "
        f"{num_updates} optimizer step(s) per rollout\n"
        f"mini-batch   about {size / num_ranks:g} responses a rank in {'1 to about ' * (most > 1)}{most} "
        f"micro-batch(es) of at most {budget} tokens (a response and its prompt: at most {max_len})\n"
        f"run          {num_steps} steps = {num_steps * num_updates} optimizer steps; "
        f"{'at least ' * cfg.filter_groups.enable}{num_steps * prompts} prompts = "
        f"{num_steps * prompts / num_prompts:.3g} epochs of {num_prompts}"
    )


def adapter_in_words(lora: LoRAConfig, files: ModelFiles) -> str:
    """Method, init, rank, and what share of the model trains."""
    weights = adapted_weights(files.shapes, targets=lora.targets, exclude=lora.exclude)
    count = sum(map(math.prod, adapter_shapes(files.shapes, weights, lora.rank, with_start=False).values()))
    start = f"init {lora.init}" if lora.path is None else f"begun at {lora.path}"
    return (
        f"LoRA of rank {lora.rank} on {len(weights)} matrices, alpha {lora.alpha:g}, {start}: "
        f"{count / 1e6:,.2f} M parameters train, {100 * count / files.num_parameters:.2g} % of the model's; its own "
        "weights are frozen" + "; published results of PiSSA in reinforcement learning are bad" * (lora.init == "pissa")
    )


def describe(
    cfg: TrainConfig, world: World, model_files: ModelFiles, train_set: Prompts, val_set: Prompts, *, num_steps: int
) -> str:
    """What the run is about to do, in words, with every batch size that follows from the config."""
    dropped = f", {train_set.num_filtered} dropped as too long" if train_set.num_filtered else ""
    shortened = f", {train_set.num_truncated} shortened" if train_set.num_truncated else ""
    ladder = batch_ladder(cfg, world.size, num_steps=num_steps, num_prompts=len(train_set))
    filtering = f"\ngroups       {cfg.filter_groups.in_words(cfg.prompts_per_step)}" if cfg.filter_groups.enable else ""
    partial = (
        f"\npartial      a step ends when {cfg.rollout.partial_share:.3g} of its responses have; the others go on for "
        f"up to {cfg.rollout.max_continued} more step(s), so steps differ in size"
        if cfg.rollout.partial_share < 1
        else ""
    )
    unused = cfg.loss_scale_factor is not None and cfg.agg_mode != "seq-mean-token-sum-norm"
    scale = f"\nloss         --loss-scale-factor does nothing: {cfg.agg_mode} does not divide by it" if unused else ""
    adapter = f"\nadapter      {adapter_in_words(cfg.lora, model_files)}" if cfg.lora.rank else ""
    code = f"\ncode         neither run nor copied: {some(list(model_files.code))}" if model_files.code else ""
    kl = kl_in_words(cfg.kl_loss_coef, cfg.kl_loss_type, cfg.kl_reward)
    if model_files.reference is not None:
        whose = " without the adapter" * (cfg.lora.rank > 0 and cfg.model.reference_path is None)
        kl += f"; the reference is {model_files.reference.in_words}{whose}"
    elif cfg.model.reference_path is not None:
        kl = f"{kl}{'; ' * bool(kl)}none: --model.reference-path without a KL does nothing"
    kl = f"\nkl           {kl}" if kl else ""
    weights = ", ".join(f"{pool.replace('_', ' ')} {weight}" for pool, weight in WEIGHTS.items())
    order = f"\ncurriculum   a prompt's weight, by the last responses to it: {weights}" if cfg.data.curriculum else ""
    warnings = "".join(f"\nwarning: {text}" for text in model_files.warnings)
    return (
        f"model        {model_files.in_words} ({model_files.num_parameters / 1e6:,.1f} M parameters), "
        f"{cfg.model.compute_dtype(world)} on {world.size} x {world.device.type}{code}{adapter}\n"
        f"data         {len(train_set)} training prompts{dropped}{shortened}, longest {train_set.longest} tokens; "
        f"{len(val_set)} validation prompts\n{ladder}\n"
        f"correction   {cfg.correction.in_words(log_probs=cfg.rollout.log_probs)}"
        f"{scale}{kl}{order}{filtering}{partial}{warnings}"
    )
