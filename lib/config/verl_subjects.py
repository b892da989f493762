"""What of a verl command takes more than a row of verl_keys.txt: another unit, or several keys that make one option.

Each function converts one subject. Units and meanings are those of verl 0.10.0.dev (1dda039b).
"""

import json
import re
from collections.abc import Callable
from typing import Any

from lib.config.verl_conversion import Conversion
from lib.config.verl_keys import VERL_DEFAULTS, VERL_KEYS
from lib.config.verl_turns import turns
from lib.config.verl_words import as_json, entries, unquoted
from lib.config.verl_yaml import own_yaml

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.model.", "actor_rollout_ref.rollout."
CORRECTION = "algorithm.rollout_correction."
ADVANTAGES = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
ADVANTAGES |= {"tir_optimal_token_baseline": "optimal_token_baseline"}
BY_RESPONSE = ("gspo", "sapo", "geo_mean")  # verl's average by response, whatever loss_agg_mode says
OVERLONG = (
    "reward.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.overlong_buffer.",
)
NAMES_OF_BF16 = ("bfloat16", "bf16")
NAMES_OF_FP32 = ("float32", "fp32")
KL_NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
NO_LIMIT = 2**20  # rounds of sampling
LEAST_TOKENS = 2048  # of an engine's step


def launcher(conversion: Conversion) -> tuple[str, str]:
    """What starts the ranks, and our script."""
    gpus, nodes = conversion.value("trainer.n_gpus_per_node", "8"), conversion.value("trainer.nnodes", "1")
    meet = f"--nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint=$HEAD_NODE:29500 " if nodes != "1" else ""
    script = "train_ppo.py" if _has_critic(conversion) else "train_grpo.py"
    return f"torchrun {meet}--nproc_per_node={gpus}", script


def _has_critic(conversion: Conversion) -> bool:
    return conversion.value("algorithm.adv_estimator") == "gae"


def _launch(conversion: Conversion) -> None:
    """Where the ranks run, which `launcher` writes; and references to other keys, which Hydra alone resolves."""
    conversion.done.update(("trainer.n_gpus_per_node", "trainer.nnodes"))
    for key, value in conversion.given.items():
        if re.search(r"\$\{[a-z_]+\.", value):
            conversion.refuse(key, "a reference to another key: write its value")


def _advantage(conversion: Conversion) -> None:
    key = "algorithm.adv_estimator"
    name = conversion.value(key)
    name = ADVANTAGES.get(name, name)
    if conversion.chosen("advantage", name, key) is not None:
        conversion.put("--advantage", name, key)


def _batch(conversion: Conversion) -> None:
    """verl's mini-batch counts prompts, ours responses."""
    mini, n = conversion.value(ACTOR + "ppo_mini_batch_size"), conversion.value(ROLLOUT + "n")
    numbers = mini.isdigit() and n.isdigit()
    product = str(int(mini) * int(n)) if numbers else f"$(({mini} * {n}))"
    conversion.put("--mini-batch-size", product, ACTOR + "ppo_mini_batch_size")
    conversion.put("--rollout.n", n, ROLLOUT + "n")


def _tokens(conversion: Conversion) -> None:
    """The budget of a micro-batch: verl's where it has one, ours else; at least one sequence."""
    prompt, response = (
        conversion.number(f"data.max_{which}_length", of_shell=True) or 0 for which in ("prompt", "response")
    )
    longest = int(prompt + response)
    by_tokens = conversion.value(ACTOR + "use_dynamic_bsz", "False")
    for where, option in ((ACTOR, "--max-tokens-per-gpu"), ("critic.", "--critic.max-tokens-per-gpu")):
        key = where + "ppo_max_token_len_per_gpu"
        if key in conversion.given and conversion.holds(where + "use_dynamic_bsz", by_tokens):
            budget = conversion.number(key, of_shell=True)
            words = str(max(int(budget), longest)) if budget else conversion.value(key)
            if where == ACTOR or _has_critic(conversion):
                conversion.put(option, words, key)
        conversion.drop("verl reads it with use_dynamic_bsz alone; micro-batches never change the gradient", key)
    if longest > int(conversion.defaults["--max-tokens-per-gpu"][0]):
        conversion.options.setdefault("--max-tokens-per-gpu", (str(longest),))
    for key in ("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu"):
        why = "not needed: micro-batches are made by tokens (--max-tokens-per-gpu), and never change the gradient"
        conversion.drop(why, ACTOR + key)
    conversion.drop("not needed: micro-batches are always made by tokens", ACTOR + "use_dynamic_bsz")
    _engine_lengths(conversion, longest)


def _engine_lengths(conversion: Conversion, longest: int) -> None:
    limit, key = conversion.number(ROLLOUT + "max_model_len"), ROLLOUT + "max_model_len"
    if limit is not None and limit < longest:
        conversion.refuse(key, f"it would cut responses below {longest} tokens: lower data.max_response_length instead")
    conversion.drop(VERL_KEYS[key][1], key)
    key = ROLLOUT + "max_num_batched_tokens"
    if key in conversion.given:
        least = max(LEAST_TOKENS, conversion.number(ROLLOUT + "max_num_seqs", "0", of_shell=True) or 0)
        tokens = conversion.number(key, of_shell=True)
        words = str(int(max(tokens, least))) if tokens else conversion.value(key)
        conversion.put("--rollout.max-num-batched-tokens", words, key)
    key = ROLLOUT + "cudagraph_capture_sizes"
    if key in conversion.given and (sizes := [int(s) for s in entries(conversion.value(key)) if s.isdigit()]):
        conversion.put("--rollout.max-cudagraph-capture-size", str(max(sizes)), key)
    conversion.drop("not needed: the default captures what a step needs", key)


def _loss(conversion: Conversion) -> None:
    """The loss, its bounds (verl's 0.2 for all, ours each loss's own), and how it is averaged."""
    key = ACTOR + "policy_loss.loss_mode"
    name = conversion.value(key)
    loss = conversion.chosen("loss", name, key)
    if loss is None:
        return
    conversion.put("--loss", name, key)
    both, sides = ACTOR + "clip_ratio", [ACTOR + "clip_ratio_low", ACTOR + "clip_ratio_high"]
    for side, option in zip(sides, ("--loss.clip-low", "--loss.clip-high"), strict=True):
        value = conversion.value(side)
        value = conversion.value(both) if value == "null" else value
        if hasattr(loss, option.removeprefix("--loss.").replace("-", "_")):
            conversion.put(option, value, side)
        conversion.drop(f"{name} does not read it, neither verl's nor ours", side)
    if both in conversion.given and conversion.number(both) != 0.2 and not all(map(conversion.given.get, sides)):
        conversion.refuse(both, "verl reads clip_ratio_low and clip_ratio_high, 0.2 where not given: write these two")
    conversion.drop("verl reads clip_ratio_low and clip_ratio_high instead", both)
    key = ACTOR + "clip_ratio_c"
    dual = {"clip_dual": "--loss.clip-dual", "max_ratio": "--loss.max-ratio"}
    for field, option in dual.items():
        if hasattr(loss, field):
            conversion.put(option, conversion.value(key), key)
    conversion.drop(f"{name} does not read it, neither verl's nor ours", key)
    key = ACTOR + "loss_agg_mode"
    if name in BY_RESPONSE:
        conversion.drop(f"verl's {name} averages by response whatever this says, and so does ours", key)
    elif key in conversion.given:
        conversion.put("--loss-agg-mode", conversion.value(key), key)
        if conversion.value(key) == "seq-mean-token-sum-norm" and ACTOR + "loss_scale_factor" not in conversion.given:
            conversion.notes.append(
                "verl divides that loss by the padded length of each micro-batch; ours by --rollout.max-response-len."
            )
    conversion.done.add(key)


def _kl(conversion: Conversion) -> None:
    """The KL in the loss and in the reward: verl switches each by a key of its own, here a weight of 0 does."""
    switch, coef, kind = ACTOR + "use_kl_loss", ACTOR + "kl_loss_coef", ACTOR + "kl_loss_type"
    if conversion.holds(switch):
        conversion.put("--kl-loss-coef", conversion.value(coef), switch, coef)
        conversion.put("--kl-loss-type", KL_NAMES.get(conversion.value(kind), conversion.value(kind)), kind)
    conversion.drop("use_kl_loss is False, which is a weight of 0 here", switch, coef, kind)
    switch, control = "algorithm.use_kl_in_reward", "algorithm.kl_ctrl."
    adapts = ("type", "target_kl", "horizon")
    if conversion.holds(switch):
        conversion.put("--kl-reward.coef", conversion.value(control + "kl_coef"), switch, control + "kl_coef")
        estimator = conversion.value("algorithm.kl_penalty")
        conversion.put("--kl-reward.type", KL_NAMES.get(estimator, estimator), "algorithm.kl_penalty")
        if (kind := conversion.value(control + "type")) not in ("fixed", "adaptive"):
            conversion.refuse(control + "type", "fixed or adaptive is needed here")
        if kind == "adaptive":
            target = control + "target_kl"
            conversion.put("--kl-reward.target", conversion.value(target), control + "type", target)
            conversion.put("--kl-reward.horizon", conversion.value(control + "horizon"), control + "horizon")
        conversion.drop("the weight is fixed, as here without --kl-reward.target", *(control + key for key in adapts))
    rest = ("algorithm.kl_penalty", *(control + key for key in ("kl_coef", *adapts)))
    conversion.drop("use_kl_in_reward is False, which is a weight of 0 here", switch, *rest)


def _correction(conversion: Conversion) -> None:
    """verl corrects nothing where nothing is said; ours weighs tokens."""
    preset = CORRECTION.rstrip(".")
    if preset in conversion.given:
        name = conversion.value(preset)
        if conversion.chosen("correction", name, preset) is not None:
            conversion.put("--correction", name, preset)
        return
    keys = [key for key in VERL_KEYS if key.startswith(CORRECTION)]
    old = ACTOR + "tis_imp_ratio_cap"
    conversion.put("--correction", "none", *(CORRECTION + key for key in ("rollout_is", "rollout_rs", "bypass_mode")))
    level, bypass = conversion.value(CORRECTION + "rollout_is"), conversion.holds(CORRECTION + "bypass_mode")
    loss_type = conversion.value(CORRECTION + "loss_type")
    if bypass:
        conversion.put("--correction.bypass", "True", CORRECTION + "bypass_mode")
        conversion.put("--correction.loss-type", loss_type, CORRECTION + "loss_type")
    if level != "null" and not (bypass and loss_type == "ppo_clip"):  # there verl's loss takes no weights either
        low, _, high = conversion.value(CORRECTION + "rollout_is_threshold").rpartition("_")
        conversion.put("--correction.is-level", level, CORRECTION + "rollout_is")
        conversion.put("--correction.is-threshold", high, CORRECTION + "rollout_is_threshold")
        if low:
            conversion.put("--correction.icepop-low", low, CORRECTION + "rollout_is_threshold")
        if conversion.holds(CORRECTION + "rollout_is_batch_normalize"):
            conversion.put("--correction.batch-normalize", "True", CORRECTION + "rollout_is_batch_normalize")
    elif old in conversion.given and (conversion.number(old) or 0) > 0:
        conversion.put("--correction.is-level", "token", old)
        conversion.put("--correction.is-threshold", conversion.value(old), old)
    if (statistics := conversion.value(CORRECTION + "rollout_rs")) != "null":
        bounds = CORRECTION + "rollout_rs_threshold"
        try:
            rejected = _rejection(statistics, conversion.value(bounds))
        except (ValueError, ZeroDivisionError):
            return conversion.refuse(bounds, f"a bound above 0, or LOW_HIGH, is needed for each of {statistics}")
        conversion.put("--correction.reject", rejected, CORRECTION + "rollout_rs", bounds)
    conversion.drop("no correction of this command reads it", old, *keys)


def _rejection(statistics: str, thresholds: str) -> str:
    """`token_k1,seq_max_k2` and `0.6_1.6,2.5` as JSON. verl's bounds of a k1 are those of the inverse ratio."""
    names, bounds = ([part.strip() for part in text.split(",")] for text in (statistics, thresholds))
    bounds = bounds * len(names) if len(bounds) == 1 else bounds
    rejected: dict[str, float | list[float]] = {}
    for name, bound in zip(names, bounds, strict=True):
        if name.endswith("k1"):
            low, _, high = bound.partition("_")
            low, high = (low, high) if high else (str(1 / float(low)), low)
            rejected[name] = [1 / float(high), 1 / float(low)]
        else:
            rejected[name] = float(bound)
    return json.dumps(rejected)


def _groups(conversion: Conversion) -> None:
    where = "algorithm.filter_groups."
    switch, metric, rounds = (where + key for key in ("enable", "metric", "max_num_gen_batches"))
    if conversion.holds(switch):
        conversion.put("--filter-groups.enable", "True", switch)
        name = conversion.value(metric, "score")
        conversion.put("--filter-groups.metric", "score" if name == "seq_reward" else name, metric)
        limit = conversion.value(rounds)
        conversion.put("--filter-groups.max-rounds", str(NO_LIMIT) if limit in ("0", "null") else limit, rounds)
        conversion.put("--filter-groups.keep-surplus", "False")
    conversion.drop("filter_groups.enable is False", switch, metric, rounds)


def _schedule(conversion: Conversion) -> None:
    """Warm-up in steps; verl's share of the run needs the number of steps, which the command must say."""
    steps, epochs = "trainer.total_training_steps", "trainer.total_epochs"
    total = conversion.number(steps, of_shell=True)
    if conversion.value(steps) != "null":
        conversion.put("--num-steps", conversion.value(steps), steps)
        conversion.drop("the number of steps is given; verl would end earlier where its epochs do", epochs)
    conversion.drop("total_training_steps is null: the epochs count", steps)
    conversion.drop("verl sets it from trainer.total_training_steps", ACTOR + "optim.total_training_steps")
    for where, section in ((ACTOR, "--optim."), ("critic.", "--critic.optim.")):
        if where == "critic." and not _has_critic(conversion):
            continue
        absolute, share = where + "optim.lr_warmup_steps", where + "optim.lr_warmup_steps_ratio"
        count, ratio = conversion.number(absolute) or 0, conversion.number(share) or 0
        if count > 0:
            conversion.put(section + "warmup-steps", conversion.value(absolute), absolute)
            conversion.drop("lr_warmup_steps is given", share)
        elif ratio > 0 and total:
            conversion.put(section + "warmup-steps", str(int(ratio * total)), share)
        elif ratio > 0:
            steps_of_run = f"rows // {conversion.value('data.train_batch_size')} x {conversion.value(epochs)} epochs"
            why = f"the run's steps are not said ({steps_of_run}): give lr_warmup_steps, {ratio:g} of them"
            conversion.refuse(share, why)
        conversion.drop("no warm-up is the default", absolute, share)
    kind, old = ACTOR + "optim.lr_scheduler_type", ACTOR + "optim.warmup_style"
    named = old if conversion.value(old) != "null" else kind
    conversion.put("--optim.schedule", conversion.value(named), named)
    conversion.drop("lr_scheduler_type counts", old, kind)


def _lora(conversion: Conversion) -> None:
    rank, path = MODEL + "lora_rank", MODEL + "lora_adapter_path"
    own = {"lora_alpha": "--lora.alpha", "target_modules": "--lora.targets", "exclude_modules": "--lora.exclude"}
    keys = [MODEL + key for key in own]
    if conversion.value(path) != "null":
        conversion.put("--lora.path", conversion.value(path), path)
        conversion.drop("the adapter's folder says it, in verl too", rank, *keys)
    elif conversion.value(rank) != "0":
        conversion.put("--lora.rank", conversion.value(rank), rank)
        for key, option in zip(keys, own.values(), strict=True):
            conversion.put(option, entries(conversion.given.get(key, VERL_DEFAULTS[key])), key)
    conversion.drop("lora_rank is 0: all weights train", rank, *keys)


def _precision(conversion: Conversion) -> None:
    """Trainer and engine compute in one type here, --model.dtype, whose default is bfloat16 on a GPU."""
    trainer, engine = ACTOR + "fsdp_config.dtype", ROLLOUT + "dtype"
    names = {key: conversion.value(key) for key in (trainer, engine)}
    for key, name in names.items():
        if name not in NAMES_OF_BF16 + NAMES_OF_FP32:
            conversion.refuse(key, "not offered: --model.dtype is bfloat16 or float32")
    if len({name in NAMES_OF_BF16 for name in names.values()}) > 1:
        said = trainer if trainer in conversion.given else engine
        conversion.refuse(said, "trainer and engine compute in one type here (--model.dtype): give both the same")
    if names[trainer] in NAMES_OF_FP32:
        conversion.put("--model.dtype", "float32", trainer, engine)
    conversion.drop("bfloat16 is the default on a GPU", trainer, engine)
    key = ACTOR + "fsdp_config.model_dtype"
    if conversion.value(key) not in (*NAMES_OF_FP32, "null"):
        conversion.refuse(key, "master weights are always float32 here: leave it out if that suits you")
    conversion.drop(VERL_KEYS[key][1], key)


def _sampling(conversion: Conversion) -> None:
    """Sampling of training; and of validation, which in verl is greedy unless do_sample says otherwise."""
    for key, plain in (("top_k", ("-1", "0")), ("top_p", ("1", "1.0"))):
        if conversion.value(ROLLOUT + key) not in plain:
            conversion.refuse(
                ROLLOUT + key, "the sampler would draw from another distribution than the trainer's: leave it out"
            )
        conversion.drop("all tokens are sampled from", ROLLOUT + key)
    where = ROLLOUT + "val_kwargs."
    keys = {key: where + key for key in ("do_sample", "temperature", "top_p", "top_k", "n")}
    if conversion.holds(keys["do_sample"], "False"):
        conversion.put("--eval.temperature", conversion.value(keys["temperature"], "0"), keys["temperature"])
        conversion.put("--eval.top-p", conversion.value(keys["top_p"], "1.0"), keys["top_p"])
        top_k = conversion.value(keys["top_k"], "-1")
        conversion.put("--eval.top-k", "0" if top_k == "-1" else top_k, keys["top_k"])
        conversion.put("--eval.n", conversion.value(keys["n"], "1"), keys["n"])
        conversion.drop("--eval.temperature above 0 samples", keys["do_sample"])
    conversion.drop("validation is greedy without do_sample, and so it is here", *keys.values())
    sleeps = {ROLLOUT + "free_cache_engine", ROLLOUT + "enable_sleep_mode"} & set(conversion.given)
    for key in sleeps:
        words = "None" if conversion.holds(key) else "False"  # verl's True is what ours does where memory asks for it
        conversion.put("--rollout.sleep", words, key)


def _rewards(conversion: Conversion) -> None:
    """The length penalty, which verl's reward manager dapo alone reads."""
    managers = ("reward.reward_manager.name", "reward_model.reward_manager")
    is_dapo = any(unquoted(conversion.given.get(key, "")) == "dapo" for key in managers)
    for where in OVERLONG:
        switch, length, factor = where + "enable", where + "len", where + "penalty_factor"
        if conversion.holds(switch) and is_dapo:
            conversion.put("--overlong.buffer-len", conversion.value(length), switch, length)
            conversion.put("--overlong.factor", conversion.value(factor), factor)
        why = "verl's reward manager dapo alone reads it" if conversion.holds(switch) else "enable is False"
        conversion.drop(why, switch, length, factor)
    conversion.drop("another unit: --reward.num-workers counts processes per rank, 4 by default", "reward.num_workers")


def _json(conversion: Conversion) -> None:
    """Dictionaries, given whole or key by key."""
    for top, option in (
        ("data.apply_chat_template_kwargs", "--data.chat-template-kwargs"),
        ("custom_reward_function.reward_kwargs", "--reward.kwargs"),
        ("reward.custom_reward_function.reward_kwargs", "--reward.kwargs"),
    ):
        keys = [key for key in conversion.given if key == top or key.startswith(top + ".")]
        content: dict = {}
        for key in keys:
            value = as_json(conversion.given[key])
            for part in reversed(key.removeprefix(top).split(".")[1:]):
                value = {part: value}
            if value is not None and not isinstance(value, dict):
                conversion.refuse(key, "a dictionary is needed here: {name: value}")
            content = _merged(content, value or {})
        if keys:
            conversion.put(option, json.dumps(content), *keys)


def _merged(first: Any, second: Any) -> Any:
    """Two dictionaries as one, however deep; what the second says counts."""
    if not (isinstance(first, dict) and isinstance(second, dict)):
        return second
    return first | {key: _merged(first.get(key), value) for key, value in second.items()}


def _critic(conversion: Conversion) -> None:
    """PPO's critic; without one its keys are nothing. verl's warm-up of N steps holds the policy still in N - 1."""
    warmup, path = "trainer.critic_warmup", "critic.model.path"
    steps = conversion.number(warmup) or 0
    if _has_critic(conversion):
        conversion.put("--critic.warmup-steps", str(max(0, int(steps) - 1)), warmup)
        if path not in conversion.given:
            conversion.refuse(path, f"not given, and verl's is {VERL_DEFAULTS[path]}: say which model it begins from")
        conversion.drop("train_ppo.py has a critic", "critic.enable")
        mini = ACTOR + "ppo_mini_batch_size"
        if conversion.value("critic.ppo_mini_batch_size") != conversion.value(mini):
            conversion.refuse("critic.ppo_mini_batch_size", "the critic uses the policy's mini-batches: give it theirs")
        conversion.drop("the policy's", "critic.ppo_mini_batch_size")
        if conversion.value("critic.ppo_epochs") == conversion.value(ACTOR + "ppo_epochs"):
            conversion.drop("the policy's", "critic.ppo_epochs")
        return
    if steps > 1:
        conversion.refuse(warmup, "there is no critic, and verl would hold the policy still: leave it out")
    conversion.drop(f"--advantage {conversion.value('algorithm.adv_estimator')} has no critic", warmup)
    critics = [key for key in conversion.given if key.startswith("critic.")]
    conversion.drop(f"--advantage {conversion.value('algorithm.adv_estimator')} has no critic", *critics)
    conversion.done.update(key for key, (option, _) in VERL_KEYS.items() if option.startswith("--critic."))


def _run(conversion: Conversion) -> None:
    """The run's folder, when it validates and saves, where it goes on from, and what logs it."""
    for key, option in (("trainer.test_freq", "--eval.every"), ("trainer.save_freq", "--checkpoint.every")):
        if key in conversion.given:
            freq = conversion.number(key, of_shell=True)
            conversion.put(option, "0" if freq is not None and freq <= 0 else conversion.value(key), key)
    if "trainer.save_freq" in conversion.given and "trainer.max_actor_ckpt_to_keep" not in conversion.given:
        conversion.notes.append("verl keeps every checkpoint; ours the newest 2 and the best: --checkpoint.keep None.")
    names = [conversion.value(f"trainer.{key}", "") for key in ("project_name", "experiment_name")]
    if "trainer.default_local_dir" not in conversion.given and any(names):
        conversion.put("--run-dir", "/".join(["runs", *filter(None, names)]))
        conversion.unsaid.discard("--run-dir")
    mode, path = conversion.value("trainer.resume_mode"), conversion.value("trainer.resume_from_path", "null")
    words = {"auto": "auto", "disable": "never", "resume_path": path}.get(mode, mode)
    conversion.put("--checkpoint.resume", words, "trainer.resume_mode")
    conversion.drop("verl reads it with resume_mode=resume_path alone", "trainer.resume_from_path")
    loggers, project = entries(conversion.given.get("trainer.logger", "wandb")), "trainer.project_name"
    if "wandb" in loggers and {"trainer.logger", project} & set(conversion.given):
        conversion.put(
            "--tracking.wandb-project", conversion.value(project, "verl_examples"), project, "trainer.logger"
        )
    conversion.drop("console, JSONL and TensorBoard are always on; no wandb is asked for", project, "trainer.logger")
    if "trainer.max_actor_ckpt_to_keep" in conversion.given:
        conversion.drop("policy and critic are saved together", "trainer.max_critic_ckpt_to_keep")


def _seed(conversion: Conversion) -> None:
    keys = [key for key in ("data.seed", ACTOR + "data_loader_seed", ROLLOUT + "seed") if key in conversion.given]
    said = [key for key in keys if conversion.value(key) != "null"]
    for key in said[:1]:
        conversion.put("--seed", conversion.value(key), key)
    conversion.drop("one seed for the data's order and the rollouts", *keys)


SUBJECTS: tuple[Callable[[Conversion], None], ...] = (
    own_yaml, _launch, _advantage, _batch, _tokens, _loss, _kl, _correction, _groups, _schedule, _lora, _precision,
    _sampling, turns, _rewards, _json, _critic, _run, _seed,
)  # fmt: skip
