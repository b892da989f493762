"""Train a language model with PPO (https://arxiv.org/abs/1707.06347): a policy, and a critic that learns its returns.

Like train_grpo.py, which it repeats phase by phase, with three more: values before the advantages, the critic's update
before the policy's, and a warm-up in which only the critic learns.

    torchrun --nproc_per_node=8 train_ppo.py --model.path DIR --data.train-files a.parquet --data.val-files b.parquet
    torchrun --nproc_per_node=8 -m recipes.NAME --optim.lr 2e-6            # a recipe: defaults for one experiment
"""

import gc
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial

from lib.algorithms import (
    ADVANTAGES,
    Advantage,
    advantage_metrics,
    aggregate,
    constant_reward_warning,
    data_metrics,
    loss_denominator,
    shape_rewards,
    update_metrics,
    value_loss,
)
from lib.config import parse_cli, plug_in, reporting_errors
from lib.dist import init_distributed, shutdown_distributed
from lib.engine import Mismatch, names_to_check
from lib.errors import Stopped, UserError
from lib.launch import (
    TrainConfig,
    build_engine,
    check_critic,
    check_input,
    load_actor,
    load_frozen,
    load_trained_critic,
    make_checkpointer,
    make_collector,
    make_progress,
    open_conversations,
    open_run,
    open_scorer,
    read_task,
    say_what_begins,
    sync_and_compare,
)
from lib.model import (
    CriticConfig,
    balance_stats,
    begin_micro_batch,
    compute_values,
    forward_critic,
    forward_policy,
    held_bytes,
    iter_micro_batches,
    iter_mini_batches,
    make_batch,
    offload,
    onload,
    optimizer_step,
    perf_metrics,
    reshard,
    set_lr_,
    with_old_log_probs,
)
from lib.rollouts import evaluate, save_rollouts
from lib.stopping import Stopper
from lib.tracking import Metrics, StartupTimer


@dataclass(frozen=True, kw_only=True)
class PPOConfig(TrainConfig):
    """Everything that defines a PPO run. A recipe sets these; --section.field overrides them."""

    advantage: Advantage = plug_in(ADVANTAGES, "gae")
    critic: CriticConfig = field(default_factory=CriticConfig)
    run_dir: str = "runs/ppo"
    """Folder of the run: config, metrics, curves, samples, logs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.advantage.needs_critic:
            raise UserError(
                f"--advantage {type(self.advantage).__name__} reads no values, so the critic would learn for nothing; "
                "train_ppo.py; expected gae; start train_grpo.py instead, or leave --advantage out"
            )

    @property
    def frozen_steps(self) -> int:
        """First training steps in which only the critic learns."""
        return self.critic.warmup_steps

    @property
    def critic_epochs(self) -> int:
        """The critic's passes over the responses of a step."""
        return self.critic.update_epochs or self.update_epochs

    @property
    def critic_max_tokens_per_gpu(self) -> int:
        """Most tokens in one pass of the critic on a rank."""
        return self.critic.max_tokens_per_gpu or self.max_tokens_per_gpu


def main(cfg: PPOConfig) -> None:
    """The whole run; a LockstepError on any rank ends all of them with one line and its exit code."""
    with reporting_errors(debug=cfg.debug):
        train(cfg)


def train(cfg: PPOConfig) -> None:
    """Setup, then `num_steps` times: rollout, reward, log-probs, values, advantages, both updates, evaluate and log."""
    # ---- Setup: everything that can be wrong with the input, before a model is loaded ----
    startup = StartupTimer()
    with startup.phase("join the other ranks"):
        world = init_distributed()
        stopper = Stopper(world, max_minutes=cfg.max_minutes)
    with startup.phase("check the input"):
        files, model_files, resume = check_input(cfg, world)
        critic_files = check_critic(cfg, cfg.critic, model_files, resume, world)
    task = read_task(cfg, files, model_files, resume, world, startup)
    del resume  # task.resume has the place among the prompts
    first_step, num_steps = task.resume.step + 1, task.num_steps

    run = open_run(cfg, task, world, startup)
    with run, stopper, closing(open_scorer(cfg, task, run)) as scorer, ExitStack() as stack:
        # ---- Setup: the engine on the empty GPU, then the models ----
        say_what_begins(cfg, task, run)
        with startup.phase("build the engine"):
            engine = build_engine(cfg, task, run)
            sampler = stack.enter_context(open_conversations(cfg, task, engine, run))
        with startup.phase("load the policy"):
            beside = held_bytes(critic_files.num_parameters, cfg.critic.fsdp, world)
            actor = load_actor(cfg, task, world, reserved_bytes=beside)
            frozen = load_frozen(cfg, task, world, actor)
            trained = {"actor": actor}
        with startup.phase("load the critic"):
            trained["critic"] = load_trained_critic(
                cfg.critic, critic_files, task, world, max_tokens_per_gpu=cfg.critic_max_tokens_per_gpu, actor=actor
            )
        policy, optimizer = actor.model, actor.optimizer
        critic, critic_optimizer = trained["critic"].model, trained["critic"].optimizer
        weight_sync = sync_and_compare(cfg, engine, trained, run, startup)
        if words := task.resume.in_words(cfg, num_steps, reward=task.reward, turns=task.turns):
            run.say(words)
        validate = partial(
            evaluate, sampler, task.val_samples, scorer, task.tokenizer, cfg=cfg.eval, rollout=cfg.rollout,
            reward=cfg.reward, world=world, run=run, stopper=stopper,
        )  # fmt: skip
        if task.val_samples and cfg.eval.before_train and first_step == 1:
            with startup.phase("validate before training"):
                run.log(0, validate(step=0))
        engine.sleep()
        run.say(startup.table())
        collector = make_collector(cfg, task, sampler, scorer, run, stopper)
        progress = make_progress(cfg, task, collector)
        checkpointer = stack.enter_context(make_checkpointer(cfg, task, trained, progress, run))
        passes = dict(max_tokens_per_gpu=cfg.max_tokens_per_gpu, temperature=cfg.rollout.temperature, world=world)
        policy_loss, loss_terms = cfg.policy_loss, cfg.loss_terms

        for step in range(first_step, num_steps + 1):
            metrics, label = Metrics(world), f"step {step}/{num_steps}"
            with metrics.time("step"):
                # ---- Rollout and reward: weights to the engine, it samples, workers score, its memory comes back ----
                with metrics.time("update_weights"):
                    names = names_to_check(engine, seed=cfg.seed, step=step)
                    weight_sync.wake(names=names, time=metrics.time)
                collected = collector.collect(metrics, label=label)
                with metrics.time("sleep"):
                    engine.sleep()
                metrics.add_max("perf/memory_after_sleep_gb", engine.device_used_gib())
                batch = make_batch(
                    collected.rollouts, world, mini_batch_size=collected.mini_batch_size,
                    reward_keys=cfg.advantage.reward_keys,
                )  # fmt: skip
                data_metrics(batch, metrics, max_prompt_len=cfg.data.max_prompt_len)
                num_updates = collected.num_mini_batches * cfg.policy_epochs(step)

                # ---- Log-probs of the sampled tokens, under the policy before the update and under frozen models ----
                onload(cfg.fsdp, policy, world)
                mismatch = Mismatch(world, limit=cfg.rollout.max_log_probs_diff)
                if cfg.has_old_log_prob_pass(num_updates, any_stale=collected.any_stale):
                    with metrics.time("old_log_prob"), run.progress(f"{label}: log-probs"):
                        with_squared = cfg.advantage.needs_logit_grad_squared
                        batch = with_old_log_probs(policy, batch, with_logit_grad_squared=with_squared, **passes)
                        mismatch.add(batch.old_log_probs, batch)
                    mismatch.close()
                for model in frozen:
                    with metrics.time(model.name), run.progress(f"{label}: {model.name} log-probs"):
                        batch = model.score(batch, **passes)

                # ---- Values of the state before each response token, by the critic before its update ----
                reshard(policy)  # its gathered weights would only take room until it is updated
                onload(cfg.critic.fsdp, critic, world)
                with metrics.time("values"), run.progress(f"{label}: values"):
                    values = compute_values(
                        critic, batch, max_tokens_per_gpu=cfg.critic_max_tokens_per_gpu, world=world
                    )  # (B, T)
                    batch = batch.with_(values=values)

                # ---- What the engine's log-probs correct, rewards per token, advantages; 0 outside response_mask ----
                with metrics.time("adv"):
                    batch = cfg.correction.correct(batch, metrics)
                    batch = shape_rewards(batch, cfg.overlong, max_response_len=cfg.rollout.max_response_len)
                    batch = progress.kl_controller.penalize(batch, metrics)
                    advantages, returns = cfg.advantage(batch, world)  # (B, T), (B, T)
                    batch = batch.with_(advantages=advantages, returns=returns)
                    advantage_metrics(batch, metrics)

                # ---- Critic update: the same mini-batches, before the policy's ----
                num_critic_updates = collected.num_mini_batches * cfg.critic_epochs
                shown = run.progress(f"{label}: critic's update", num_critic_updates)
                with metrics.time("update_critic"), shown as advance:
                    lr = set_lr_(critic_optimizer, cfg.critic.optim, step=step, num_steps=num_steps)
                    num_skipped = 0
                    for mini_batch in iter_mini_batches(batch, world, update_epochs=cfg.critic_epochs):
                        denominator = loss_denominator(mini_batch, cfg.agg_mode, world, scale=cfg.loss_scale)
                        micro_batches = list(iter_micro_batches(mini_batch, cfg.critic_max_tokens_per_gpu, world))
                        for place, micro_batch in enumerate(micro_batches, start=1):
                            begin_micro_batch(critic, last=place == len(micro_batches))
                            values = forward_critic(critic, micro_batch)  # (b, t)
                            micro_batch = micro_batch.to(world.device)
                            token_loss, stats = value_loss(values, micro_batch, clip=cfg.critic.value_clip)  # (b, t)
                            loss = aggregate(token_loss, micro_batch.response_mask, cfg.agg_mode) / denominator
                            loss.backward()
                            update_metrics(
                                metrics, micro_batch.response_mask, terms={"vf_loss": loss}, stats=stats,
                                num_updates=num_critic_updates, role="critic",
                            )  # fmt: skip
                            advance(1 / len(micro_batches))
                        clip_grad = cfg.critic.optim.clip_grad
                        grad_norm, taken = optimizer_step(critic, critic_optimizer, clip_grad=clip_grad)
                        metrics.add_mean("critic/grad_norm", grad_norm, 1)
                        num_skipped += not taken
                    metrics.set("critic/lr", lr)
                    metrics.set("critic/skipped_updates", num_skipped)
                offload(cfg.critic.fsdp, critic)

                # ---- Policy update: micro-batches only split a mini-batch to fit memory ----
                with metrics.time("update_actor"), run.progress(f"{label}: update", num_updates) as advance:
                    learning_step, learning_steps = step - cfg.frozen_steps, num_steps - cfg.frozen_steps
                    lr = set_lr_(optimizer, cfg.optim, step=learning_step, num_steps=learning_steps)
                    num_skipped = 0
                    for mini_batch in iter_mini_batches(batch, world, update_epochs=cfg.policy_epochs(step)):
                        mini_batch = policy_loss.prepare(mini_batch, world)
                        denominator = loss_denominator(mini_batch, cfg.agg_mode, world, scale=cfg.loss_scale)
                        micro_batches = list(iter_micro_batches(mini_batch, cfg.max_tokens_per_gpu, world))
                        for place, micro_batch in enumerate(micro_batches, start=1):
                            begin_micro_batch(policy, last=place == len(micro_batches))
                            log_probs, entropy = forward_policy(
                                policy, micro_batch, temperature=cfg.rollout.temperature
                            )  # (b, t), (b, t)
                            micro_batch = cfg.correction.weigh(log_probs, micro_batch.to(world.device), metrics)
                            loss, terms, stats = 0.0, {}, {}
                            for term in loss_terms:
                                token_loss, term_stats = term(log_probs, entropy, micro_batch)  # (b, t)
                                share = aggregate(token_loss, micro_batch.response_mask, cfg.agg_mode) / denominator
                                terms[term.name], stats = share, stats | term_stats  # this micro-batch's share
                                if term.coef:  # else it is only measured
                                    loss = loss + term.coef * share
                            loss.backward()  # summed over micro-batches and ranks: the denominator is global
                            update_metrics(
                                metrics, micro_batch.response_mask, terms=terms | {"loss": loss}, stats=stats,
                                num_updates=num_updates,
                            )  # fmt: skip
                            mismatch.add(log_probs, micro_batch)
                            advance(1 / len(micro_batches))
                        mismatch.close()  # before the policy learns from another policy's responses
                        grad_norm, taken = optimizer_step(policy, optimizer, clip_grad=cfg.optim.clip_grad)
                        metrics.add_mean("actor/grad_norm", grad_norm, 1)
                        num_skipped += not taken
                    metrics.set("actor/lr", lr)
                    metrics.set("actor/skipped_updates", num_skipped)

            # ---- Evaluate, log, checkpoint ----
            values = metrics.reduce() | mismatch.values | balance_stats(batch, world)
            values |= perf_metrics(
                batch, values, world, model=task.model_files, update_epochs=cfg.policy_epochs(step),
                engine_bytes=engine.pool_bytes,
            )  # fmt: skip
            values |= {"training/global_step": step, "training/epoch": task.epochs}
            for term in loss_terms:
                values |= term.metrics()
            if task.val_samples and cfg.eval.due(step, num_steps):
                weight_sync.wake(names=names, time=nullcontext)
                with suppress(Stopped):  # of this step only the training is logged then; it stops below
                    values |= validate(step=step)
                    engine.sleep()
            values |= save_rollouts(
                step, collected.rollouts, batch, task.train_set, task.tokenizer, run=run, show=not task.val_samples
            )
            run.log(step, values)
            if step == first_step:
                gc.collect()
                gc.freeze()  # what the first step compiled stays: the collector need not search it in every step
            progress.constant_groups.append(values["reward/constant_group_ratio"])
            if cfg.advantage.needs_group and (warning := constant_reward_warning(progress.constant_groups)):
                run.say(f"warning: {warning}")
            if checkpointer.end_step(step, values):  # the same answer on all ranks
                checkpointer.save()
            seconds = values["timing_s/step"] + values.get("timing_s/testing", 0.0)
            stopped = stopper.step_ended(seconds, save_s=checkpointer.longest_save_s)
            if stopped and step < num_steps:
                raise stopped  # what has not been saved is, on the way out
        checkpointer.finish()
        if cfg.advantage.needs_group and (warning := constant_reward_warning(progress.constant_groups, at_end=True)):
            run.say(f"warning: {warning}")
        run.finish()
    shutdown_distributed()


if __name__ == "__main__":
    main(parse_cli(PPOConfig()))
