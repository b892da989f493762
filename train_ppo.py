"""Train a language model with PPO (https://arxiv.org/abs/1707.06347): a policy, and a critic that learns its returns.

Like train_grpo.py, which it repeats phase by phase, with three more: values before the advantages, the critic's update
before the policy's, and a warm-up in which only the critic learns.

    torchrun --nproc_per_node=8 train_ppo.py --model.path DIR --data.train-files a.parquet --data.val-files b.parquet
    torchrun --nproc_per_node=8 -m recipes.NAME --optim.lr 2e-6            # a recipe: defaults for one experiment
"""

import gc
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass, field

from lib.algorithms import (
    ADVANTAGES,
    Advantage,
    KLController,
    advantage_metrics,
    aggregate,
    constant_reward_warning,
    data_metrics,
    kl_to_reference,
    loss_denominator,
    mismatch_metrics,
    shape_rewards,
    update_metrics,
)
from lib.algorithms.critic_loss import value_loss
from lib.checkpoints import Checkpointer, Progress, Trained
from lib.config import parse_cli, plug_in, reporting_errors, to_json
from lib.data import PromptStream
from lib.dist import init_distributed, shutdown_distributed
from lib.engine import RolloutEngine, WeightSync, check_log_probs_diff, names_to_check
from lib.errors import Stopped, UserError
from lib.launch import (
    TrainConfig,
    check_critic,
    check_input,
    check_same_prompts,
    data_sources,
    describe,
    load_prompts,
    try_reward,
)
from lib.model import (
    CriticConfig,
    balance_stats,
    begin_micro_batch,
    build_optimizer,
    compute_log_probs,
    compute_values,
    forward_critic,
    forward_policy,
    held_bytes,
    iter_micro_batches,
    iter_mini_batches,
    load_critic,
    load_policy,
    make_batch,
    moments_to_come,
    offload,
    onload,
    optimizer_step,
    perf_metrics,
    reshard,
    set_lr_,
    with_old_log_probs,
)
from lib.rewards import Scorer
from lib.rollouts import Collector, evaluate, save_rollouts
from lib.stopping import Stopper
from lib.tracking import Metrics, Run, StartupTimer


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
    with startup.phase("try the reward function"):
        if files.train is not None:  # rows of a dataset class are made with the tokenizer
            reward_note = world.agree(lambda: try_reward(cfg, files.train, files.val))
    with startup.phase("tokenise the prompts"):
        tokenizer, stop_ids, train_set, val_set = world.agree(
            lambda: load_prompts(cfg, files, model_files, resume, world)
        )
        check_same_prompts(train_set, val_set, world)
        prompts = PromptStream(train_set, seed=cfg.seed, shuffle=cfg.data.shuffle, curriculum=cfg.data.curriculum)
        resume = resume.restore_prompts(prompts)
        val_samples = val_set.all_samples()
        if files.train is None:
            reward_note = world.agree(lambda: try_reward(cfg, train_set.rows, val_set.rows))
    num_steps = cfg.num_steps or max(1, len(train_set) * cfg.total_epochs // cfg.prompts_per_step)
    resume.check_steps(num_steps)
    if cfg.critic.warmup_steps >= num_steps:
        raise UserError(
            f"--critic.warmup-steps {cfg.critic.warmup_steps} leaves the policy no step to learn; --num-steps, or "
            f"--total-epochs; found {num_steps} steps, expected more than the warm-up; change one of them"
        )
    policy_loss = cfg.policy_loss

    run = Run(
        cfg.run_dir, cfg.tracking, world, config=to_json(cfg), num_steps=num_steps, overwrite=cfg.overwrite,
        last_row=resume.last_row, resumable=resume.in_place and resume.path is not None, date=resume.date,
    )  # fmt: skip
    sources = data_sources(cfg, train_set.rows, val_set.rows)
    scoring = dict(reward_keys=cfg.advantage.reward_keys, log_path=run.dir / "logs" / f"rewards_{world.rank}.log")
    with run, stopper, closing(Scorer(cfg.reward, sources, **scoring)) as scorer, ExitStack() as stack:
        run.say(describe(cfg, world, model_files, train_set, val_set, num_steps=num_steps))
        ends = ", ".join(f"{tokenizer.decode([stop_id])!r} ({stop_id})" for stop_id in stop_ids)
        notes = (f"responses end at {ends}", reward_note, *files.warnings, *train_set.warnings, *val_set.warnings)
        for note in dict.fromkeys(notes):  # both splits may give the same warning
            run.say(note)

        # ---- Setup: the engine on the empty GPU, then the policy ----
        run.say(f"building the engine and loading the model; what the libraries say goes to {run.dir}/logs/")
        with startup.phase("build the engine"):
            engine = RolloutEngine(
                cfg.rollout,
                str(model_files.folder),
                dtype=str(cfg.model.compute_dtype(world)).removeprefix("torch."),
                max_prompt_len=cfg.data.max_prompt_len,
                most_responses=max(cfg.most_in_flight, len(val_set) * cfg.eval.n),
                stop_token_ids=stop_ids,
                world=world,
                seed=cfg.seed,
            )
            engine.sleep()
        if engine.on_gpu:
            asleep = " and asleep" if engine.sleeps else ""
            run.say(f"the engine is built{asleep}; {engine.device_used_gib():.1f} GiB of GPU memory in use")
        with startup.phase("load the policy"):
            policy = load_policy(
                cfg.model, str(model_files.folder), cfg.fsdp, world, max_tokens_per_gpu=cfg.max_tokens_per_gpu,
                num_frozen_parameters=model_files.num_frozen_parameters,
                reserved_bytes=held_bytes(critic_files.num_parameters, cfg.critic.fsdp, world),
            )  # fmt: skip
            optimizer = world.agree(lambda: build_optimizer(policy, cfg.optim, on_host=cfg.fsdp.optimizer_offload))
            resume.load_("actor", policy, optimizer, world)
            trained = {"actor": Trained(model=policy, optimizer=optimizer, folder=model_files.folder)}
            reference = None
            if model_files.reference is not None:
                reference = load_policy(cfg.model, str(model_files.reference.folder), cfg.fsdp, world, trainable=False)
                offload(cfg.fsdp, reference)
        with startup.phase("load the critic"):
            critic = load_critic(
                cfg.critic.model, str(critic_files.folder), cfg.critic.fsdp, world,
                max_tokens_per_gpu=cfg.critic_max_tokens_per_gpu,
                reserved_bytes=moments_to_come([optimizer]),
            )  # fmt: skip
            critic_optimizer = world.agree(
                lambda: build_optimizer(critic, cfg.critic.optim, on_host=cfg.critic.fsdp.optimizer_offload)
            )
            resume.load_("critic", critic, critic_optimizer, world)
            trained["critic"] = Trained(model=critic, optimizer=critic_optimizer, folder=critic_files.folder)
            offload(cfg.critic.fsdp, critic)
        gathered = "once per optimizer step" if policy.keeps_gathered else "in every pass"
        activations = "recomputed in" if policy.model.is_gradient_checkpointing else "kept for"
        run.say(f"the policy is loaded; weights are gathered {gathered}, activations {activations} the backward pass")
        if engine.on_gpu:
            engine.decide_to_stay(min(each.model.spare_bytes for each in trained.values()))
            run.say(f"the engine {'sleeps' if engine.sleeps else 'keeps its memory'} during updates")
        with startup.phase("sync the weights and compare all"):
            weight_sync = WeightSync(policy, engine, fsdp=cfg.fsdp)
            to_come = moments_to_come(each.optimizer for each in trained.values())
            num_compared = weight_sync.wake(names=None, time=nullcontext, reserved_bytes=to_come)
        run.say(f"the engine holds the policy's weights: all {num_compared} tensors are equal bit for bit")
        if words := resume.in_words(cfg, num_steps, reward=reward_note):
            run.say(words)
        if val_samples and cfg.eval.before_train and resume.step == 0:
            with startup.phase("validate before training"):
                run.log(0, evaluate(engine, val_samples, scorer, tokenizer, cfg=cfg.eval, rollout=cfg.rollout,
                                    reward=cfg.reward, world=world, run=run, stopper=stopper, step=0))  # fmt: skip
        engine.sleep()
        run.say(startup.table())

        collector = Collector(
            engine, scorer, prompts, tokenizer, rollout=cfg.rollout, reward=cfg.reward,
            filter_groups=cfg.filter_groups, prompts_per_step=cfg.prompts_per_step,
            mini_batch_size=cfg.mini_batch_size, with_greedy=cfg.advantage.needs_greedy,
            mask_truncated=cfg.overlong.mask_truncated, run=run, stopper=stopper, world=world,
        )  # fmt: skip
        kl_controller = KLController(cfg.kl_reward)
        constant_groups: list[float] = []
        progress = Progress(
            prompts=prompts, collector=collector, kl_controller=kl_controller, constant_groups=constant_groups
        )
        progress.restore(resume.trainer)
        checkpointer = stack.enter_context(Checkpointer(
            cfg.checkpoint, run, world, config=to_json(cfg), reward=reward_note, models=trained, progress=progress,
            num_steps=num_steps, resumed=resume.path, trainer=resume.trainer, began_from=model_files.began_from,
        ))  # fmt: skip
        for step in range(resume.step + 1, num_steps + 1):
            metrics = Metrics(world)
            with metrics.time("step"):
                # ---- Rollout and reward: weights to the engine, it samples, workers score, its memory comes back ----
                with metrics.time("update_weights"):
                    names = names_to_check(engine, seed=cfg.seed, step=step)
                    weight_sync.wake(names=names, time=metrics.time)
                collected = collector.collect(metrics, label=f"step {step}/{num_steps}")
                with metrics.time("sleep"):
                    engine.sleep()
                metrics.add_max("perf/memory_after_sleep_gb", engine.device_used_gib())
                batch = make_batch(
                    collected.rollouts, world, mini_batch_size=collected.mini_batch_size,
                    reward_keys=cfg.advantage.reward_keys,
                )  # fmt: skip
                data_metrics(batch, metrics, max_prompt_len=cfg.data.max_prompt_len)
                num_updates = collected.num_mini_batches * cfg.policy_epochs(step)

                # ---- Log-probs of the sampled tokens, under the policy before the update and under the reference ----
                onload(cfg.fsdp, policy, world)
                passes = dict(
                    max_tokens_per_gpu=cfg.max_tokens_per_gpu, temperature=cfg.rollout.temperature, world=world
                )
                # Before a single update the old policy is the current one: the ratio is exactly 1 without a pass.
                mismatch, differences = Metrics(world), {}
                needed = num_updates > 1 or collected.any_stale or cfg.needs_old_log_probs
                # While the policy rests no update compares it with the engine: then a pass does, also with bypass.
                has_pass = num_updates == 0 or (needed and not cfg.correction.bypass)
                if has_pass:
                    with metrics.time("old_log_prob"):
                        batch = with_old_log_probs(
                            policy, batch, with_logit_grad_squared=cfg.advantage.needs_logit_grad_squared, **passes
                        )
                        mismatch_metrics(batch.old_log_probs, batch, mismatch)
                    differences = mismatch.reduce()
                    check_log_probs_diff(differences, limit=cfg.rollout.max_log_probs_diff)
                if reference is not None:
                    with metrics.time("ref"):
                        onload(cfg.fsdp, reference, world)
                        batch = batch.with_(ref_log_probs=compute_log_probs(reference, batch, **passes)[0])  # (B, T)
                        offload(cfg.fsdp, reference)

                # ---- Values of the state before each response token, by the critic before its update ----
                reshard(policy)  # its gathered weights would only take room until it is updated
                onload(cfg.critic.fsdp, critic, world)
                with metrics.time("values"):
                    batch = batch.with_(
                        values=compute_values(
                            critic, batch, max_tokens_per_gpu=cfg.critic_max_tokens_per_gpu, world=world
                        )
                    )  # (B, T)

                # ---- What the engine's log-probs correct, rewards per token, advantages; 0 outside response_mask ----
                with metrics.time("adv"):
                    batch = cfg.correction.correct(batch, metrics)
                    batch = shape_rewards(batch, cfg.overlong, max_response_len=cfg.rollout.max_response_len)
                    batch = kl_controller.penalize(batch, metrics)
                    advantages, returns = cfg.advantage(batch, world)  # (B, T), (B, T)
                    batch = batch.with_(advantages=advantages, returns=returns)
                    advantage_metrics(batch, metrics)

                # ---- Critic update: the same mini-batches, before the policy's ----
                with metrics.time("update_critic"):
                    lr = set_lr_(critic_optimizer, cfg.critic.optim, step=step, num_steps=num_steps)
                    metrics.set("critic/lr", lr)
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
                                num_updates=collected.num_mini_batches * cfg.critic_epochs, role="critic",
                            )  # fmt: skip
                        grad_norm, taken = optimizer_step(
                            critic, critic_optimizer, clip_grad=cfg.critic.optim.clip_grad
                        )
                        metrics.add_mean("critic/grad_norm", grad_norm, 1)
                        num_skipped += not taken
                    metrics.set("critic/skipped_updates", num_skipped)
                offload(cfg.critic.fsdp, critic)

                # ---- Policy update: micro-batches only split a mini-batch to fit memory ----
                with metrics.time("update_actor"):
                    metrics.set(
                        "actor/lr",
                        set_lr_(
                            optimizer, cfg.optim, step=step - cfg.frozen_steps, num_steps=num_steps - cfg.frozen_steps
                        ),
                    )
                    num_skipped = 0
                    for update, mini_batch in enumerate(
                        iter_mini_batches(batch, world, update_epochs=cfg.policy_epochs(step))
                    ):
                        mini_batch = policy_loss.prepare(mini_batch, world)
                        denominator = loss_denominator(mini_batch, cfg.agg_mode, world, scale=cfg.loss_scale)
                        micro_batches = list(iter_micro_batches(mini_batch, cfg.max_tokens_per_gpu, world))
                        for place, micro_batch in enumerate(micro_batches, start=1):
                            begin_micro_batch(policy, last=place == len(micro_batches))
                            log_probs, entropy = forward_policy(
                                policy, micro_batch, temperature=cfg.rollout.temperature
                            )  # (b, t), (b, t)
                            micro_batch = cfg.correction.weigh(log_probs, micro_batch.to(world.device), metrics)
                            token_loss, stats = policy_loss(log_probs, micro_batch)  # (b, t)
                            token_loss = policy_loss.weigh(token_loss, micro_batch)
                            terms = {"pg_loss": token_loss, "entropy_loss": entropy}
                            if cfg.kl_loss_coef > 0:
                                terms["kl_loss"] = kl_to_reference(log_probs, micro_batch, kl_type=cfg.kl_loss_type)
                            for name, term in terms.items():
                                total = aggregate(term, micro_batch.response_mask, cfg.agg_mode)
                                terms[name] = total / denominator  # a scalar, this micro-batch's share
                            loss = terms["pg_loss"]
                            if cfg.entropy_coef > 0:
                                loss = loss - cfg.entropy_coef * terms["entropy_loss"]
                            if cfg.kl_loss_coef > 0:
                                loss = loss + cfg.kl_loss_coef * terms["kl_loss"]
                            loss.backward()  # summed over micro-batches and ranks: the denominator is global
                            update_metrics(
                                metrics, micro_batch.response_mask, terms={**terms, "loss": loss},
                                stats={**stats, "entropy": entropy}, num_updates=num_updates,
                            )  # fmt: skip
                            if update == 0 and not has_pass:
                                mismatch_metrics(log_probs, micro_batch, mismatch)
                        if update == 0 and not has_pass:  # before the policy learns from another policy's responses
                            differences = mismatch.reduce()
                            check_log_probs_diff(differences, limit=cfg.rollout.max_log_probs_diff)
                        grad_norm, taken = optimizer_step(policy, optimizer, clip_grad=cfg.optim.clip_grad)
                        metrics.add_mean("actor/grad_norm", grad_norm, 1)
                        num_skipped += not taken
                    metrics.set("actor/skipped_updates", num_skipped)
                    if cfg.kl_loss_coef > 0:
                        metrics.set("actor/kl_coef", cfg.kl_loss_coef)

            # ---- Evaluate, log, checkpoint ----
            values = metrics.reduce() | differences | balance_stats(batch, world)
            values |= perf_metrics(
                batch, values, world, model_config=model_files.config, update_epochs=cfg.policy_epochs(step),
                engine_bytes=engine.pool_bytes,
            )  # fmt: skip
            values |= {"training/global_step": step, "training/epoch": prompts.num_drawn / len(train_set)}
            if val_samples and cfg.eval.due(step, num_steps):
                weight_sync.wake(names=names, time=nullcontext)
                with suppress(Stopped):  # of this step only the training is logged then; it stops below
                    values |= evaluate(engine, val_samples, scorer, tokenizer, cfg=cfg.eval, rollout=cfg.rollout,
                                       reward=cfg.reward, world=world, run=run, stopper=stopper, step=step)  # fmt: skip
                    engine.sleep()
            values |= save_rollouts(
                step, collected.rollouts, batch, train_set, tokenizer, run=run, shown=not cfg.data.val_files
            )
            run.log(step, values)
            if step == resume.step + 1:
                gc.collect()
                gc.freeze()  # what the first step compiled stays: the collector need not search it in every step
            constant_groups.append(values["reward/constant_group_ratio"])
            if cfg.advantage.needs_group and (warning := constant_reward_warning(constant_groups)):
                run.say(f"warning: {warning}")
            if checkpointer.end_step(step, values):  # the same answer on all ranks
                checkpointer.save()
            seconds = values["timing_s/step"] + values.get("timing_s/testing", 0.0)
            stopped = stopper.step_ended(seconds, save_s=checkpointer.longest_save_s)
            if stopped and step < num_steps:
                raise stopped  # what has not been saved is, on the way out
        checkpointer.finish()
        run.finish()
    shutdown_distributed()


if __name__ == "__main__":
    main(parse_cli(PPOConfig()))
