"""Train a language model with GRPO (DeepSeekMath, https://arxiv.org/abs/2402.03300).

One process per GPU. Every process holds a shard of the policy (FSDP2) and a vLLM engine, and runs this file from top
to bottom; every line of `main` runs on all ranks unless it says otherwise.

    torchrun --nproc_per_node=8 train_grpo.py --model.path DIR --data.train-files a.parquet --data.val-files b.parquet
    torchrun --nproc_per_node=8 -m recipes.NAME --optim.lr 2e-6            # a recipe: defaults for one experiment
"""

from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from typing import Any

from lib.advantages import ADVANTAGES, Advantage
from lib.aggregation import LossAggMode, aggregate, loss_denominator
from lib.batching import balance_stats, iter_micro_batches, iter_mini_batches, make_batch
from lib.config import (
    batch_ladder,
    config_hash,
    either,
    nearest_divisors,
    parse_cli,
    plug_in,
    reporting_errors,
    to_json,
)
from lib.console import StartupTimer
from lib.correction import CORRECTIONS, AutoCorrection, Correction
from lib.data import (
    DataConfig,
    DataFiles,
    Prompts,
    PromptStream,
    check_data_files,
    load_tokenizer,
    stop_token_ids,
    tokenize,
)  # fmt: skip
from lib.dist import World, init_distributed, shutdown_distributed
from lib.errors import UserError
from lib.evaluate import EvalConfig, decode, evaluate
from lib.forward import compute_log_probs, forward_policy
from lib.fsdp import FSDPConfig, begin_micro_batch, load_policy, offload, onload
from lib.kl import KLType, kl_to_reference
from lib.losses import LOSSES, PolicyLoss
from lib.metrics import (
    Metrics,
    constant_reward_warning,
    data_metrics,
    mismatch_metrics,
    perf_metrics,
    update_metrics,
)  # fmt: skip
from lib.model import ModelConfig, check_model_config
from lib.model_files import ModelFiles, check_model_files, expected_shapes
from lib.optim import OptimConfig, build_optimizer, optimizer_step
from lib.parquet import Rows
from lib.rollout import RolloutConfig, RolloutEngine, training_sampling
from lib.scoring import RewardConfig, Scorer, check_error_rate, check_reward, error_counts
from lib.tracking import Run, TrackingConfig, check_run
from lib.weight_sync import WeightSync, check_log_probs_diff, names_to_check


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """Everything that defines a GRPO run. A recipe sets these; --section.field overrides them."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    advantage: Advantage = plug_in(ADVANTAGES, "grpo")
    loss: PolicyLoss = plug_in(LOSSES, "vanilla")
    loss_agg_mode: LossAggMode | None = None
    """How per-token losses become one number: token-mean weighs every token alike (DAPO); None: the loss's own."""
    kl_loss_coef: float = 0.0
    """Weight of the KL to the frozen initial policy in the loss; 0 switches it off and loads no reference."""
    kl_loss_type: KLType = "k3"
    """Estimator of that KL per token."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus in the loss."""
    correction: Correction = plug_in(CORRECTIONS, "auto")

    prompts_per_step: int = 128
    """Prompts per training step, over all ranks."""
    mini_batch_size: int = 1024
    """Responses per optimizer step, over all ranks."""
    update_epochs: int = 1
    """Passes over the responses of a step."""
    max_tokens_per_gpu: int = 16384
    """Most tokens (prompts and responses) in one forward or backward pass of a rank; never changes the gradient."""
    num_steps: int | None = None
    """Training steps (a rollout and its update each); None: as many as --total-epochs gives."""
    total_epochs: int = 1
    """Passes over the training data, used when --num-steps is not given."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    run_dir: str = "runs/grpo"
    """Folder of the run: config, metrics, curves, samples, logs."""
    overwrite: bool = False
    """Move an existing run folder aside and start afresh."""
    seed: int = 0
    """Seed of the data order and of every sampled response."""
    debug: bool = False
    """Show tracebacks also for errors that are the input's."""

    def __post_init__(self) -> None:
        for name in ("prompts_per_step", "mini_batch_size", "update_epochs", "max_tokens_per_gpu", "total_epochs"):
            _require(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        # The engine gets a request for every prompt: more is a slip of the pen.
        _require("prompts_per_step", self.prompts_per_step, self.prompts_per_step <= 2**20, "at most 2**20")
        _require("num_steps", self.num_steps, self.num_steps is None or self.num_steps >= 1, "at least 1")
        _require("seed", self.seed, 0 <= self.seed < 2**63, "from 0 to 2**63 - 1")
        for name in ("kl_loss_coef", "entropy_coef"):
            _require(name, getattr(self, name), 0 <= getattr(self, name) < float("inf"), "0 or more and finite")
        responses = self.prompts_per_step * self.rollout.n
        if responses % self.mini_batch_size:
            raise UserError(
                f"mini_batch_size={self.mini_batch_size} does not divide the {responses} responses of a step; "
                f"--mini-batch-size; found prompts_per_step={self.prompts_per_step} x n={self.rollout.n}; "
                f"use {either(nearest_divisors(responses, self.mini_batch_size))}"
            )
        if self.advantage.needs_group and self.rollout.n < 2:
            raise UserError(
                f"--rollout.n {self.rollout.n} is too small for a group; --advantage; a group advantage compares the "
                "responses of one prompt, expected at least 2; set --rollout.n 8"
            )
        if self.rollout.top_p < 1 or self.rollout.top_k > 0:
            raise UserError(
                "top-p and top-k change the sampler's distribution but not the trainer's, so every ratio would be "
                f"wrong; --rollout.top-p {self.rollout.top_p} --rollout.top-k {self.rollout.top_k}; expected 1.0 and 0 "
                "in training; leave them out (validation has --eval.top-p and --eval.top-k of its own)"
            )
        said = self.correction != AutoCorrection()
        if said and self.correction.needs_rollout_log_probs and not self.rollout.log_probs:
            raise UserError(
                "a correction compares with the engine's log-probs, and there are none; --correction; found "
                "--rollout.log-probs False, expected True; leave it out, or give --correction none"
            )
        longest = self.data.max_prompt_len + self.rollout.max_response_len
        if self.max_tokens_per_gpu < longest:
            raise UserError(
                f"--max-tokens-per-gpu {self.max_tokens_per_gpu} is smaller than one sequence; found "
                f"--data.max-prompt-len {self.data.max_prompt_len} + --rollout.max-response-len "
                f"{self.rollout.max_response_len} = {longest}; expected at least {longest}; raise it"
            )

    @property
    def agg_mode(self) -> LossAggMode:
        """--loss-agg-mode, or the loss's own where that is not given."""
        return self.loss_agg_mode or self.policy_loss.agg_mode

    @property
    def policy_loss(self) -> PolicyLoss:
        """The loss to train with: --loss, unless the correction brings its own."""
        return self.correction.policy_loss(self.loss)


def _require(name: str, value: object, ok: bool, rule: str) -> None:
    if not ok:
        flag = "--" + name.replace("_", "-")
        raise UserError(f"{flag} is out of range; found {value}, expected {rule}; change {flag}")


def check_launch(cfg: GRPOConfig, world: World) -> None:
    """Raises UserError when the config does not fit the number of ranks."""
    tp_size = cfg.rollout.tensor_model_parallel_size
    if world.size % tp_size:
        raise UserError(
            f"--rollout.tensor-model-parallel-size {tp_size} does not divide the {world.size} ranks; torchrun; every "
            f"engine takes that many ranks; use {either(nearest_divisors(world.size, tp_size))}, or start another "
            "number of ranks"
        )
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


def check_input(cfg: GRPOConfig, world: World) -> tuple[DataFiles, ModelFiles]:
    """The data and model files, after every check that needs neither transformers nor a GPU, on all ranks together."""
    hashes = world.gather(config_hash(cfg))
    if len(set(hashes)) > 1:
        raise UserError(
            f"the ranks were started with different options; config.json by rank; found hashes {', '.join(hashes)}, "
            "expected equal ones; give every rank the same command line"
        )
    world.agree(lambda: check_launch(cfg, world))
    files = world.agree(lambda: check_data_files(cfg.data))
    model_files = world.agree(
        lambda: check_model_files(
            cfg.model.path,
            max_prompt_len=cfg.data.max_prompt_len,
            max_response_len=cfg.rollout.max_response_len,
            tensor_parallel_size=cfg.rollout.tensor_model_parallel_size,
        )
    )
    check_run(cfg.run_dir, cfg.tracking, world, overwrite=cfg.overwrite)
    return files, model_files


def try_reward(cfg: GRPOConfig, train: Rows, val: Rows) -> str:
    """A line about the reward function, which can score first rows of both splits and knows every data source."""
    data_sources = train.data_sources(cfg.data.train_max_samples) | val.data_sources(cfg.data.val_max_samples)
    trials = {train.where(row): train[row] for row in range(min(2, len(train)))}
    trials |= {f"{val.where(0)} (validation)": val[0]} if len(val) else {}
    return check_reward(cfg.reward, data_sources, trials)


def load_prompts(
    cfg: GRPOConfig, files: DataFiles, model_files: ModelFiles, world: World
) -> tuple[Any, list[int], Prompts, Prompts]:
    """The tokenizer, the ids that end a response, and both splits under the chat template."""
    check_model_config(str(model_files.folder), expected_shapes(model_files.config))
    tokenizer = load_tokenizer(model_files.folder, chat_template_kwargs=cfg.data.chat_template_kwargs)
    stop_ids = stop_token_ids(tokenizer, model_files.folder)
    train_set = tokenize(cfg.data, files, tokenizer, split="train", show_progress=world.rank == 0)
    return tokenizer, stop_ids, train_set, tokenize(cfg.data, files, tokenizer, split="val")


def check_same_prompts(train_set: Prompts, val_set: Prompts, world: World) -> None:
    """Raises UserError on all ranks when they do not hold the same prompts: a uid must mean the same everywhere."""
    fingerprints = world.gather((train_set.fingerprint, val_set.fingerprint))
    if len(set(fingerprints)) > 1:
        raise UserError(
            "the ranks read different prompts; data files or dataset class; found fingerprints "
            f"{', '.join(first for first, _ in fingerprints)}, expected equal ones; give every node the same files, "
            "and make a dataset class deterministic"
        )


def describe(
    cfg: GRPOConfig, world: World, model_files: ModelFiles, train_set: Prompts, val_set: Prompts, *, num_steps: int
) -> str:
    """What the run is about to do, in words, with every batch size that follows from the config."""
    dropped = f", {train_set.num_filtered} dropped as too long" if train_set.num_filtered else ""
    shortened = f", {train_set.num_truncated} shortened" if train_set.num_truncated else ""
    ladder = batch_ladder(
        prompts_per_step=cfg.prompts_per_step,
        n=cfg.rollout.n,
        mini_batch_size=cfg.mini_batch_size,
        update_epochs=cfg.update_epochs,
        num_ranks=world.size,
        num_replicas=world.size // cfg.rollout.tensor_model_parallel_size,
        max_tokens_per_gpu=cfg.max_tokens_per_gpu,
        max_len=cfg.data.max_prompt_len + cfg.rollout.max_response_len,
        num_steps=num_steps,
        num_prompts=len(train_set),
    )
    return (
        f"model        {model_files.folder} ({model_files.num_parameters / 1e6:,.1f} M parameters), "
        f"{cfg.model.compute_dtype(world)} on {world.size} x {world.device.type}\n"
        f"data         {len(train_set)} training prompts{dropped}{shortened}, longest {train_set.longest} tokens; "
        f"{len(val_set)} validation prompts\n{ladder}\n"
        f"correction   {cfg.correction.in_words(log_probs=cfg.rollout.log_probs)}"
    )


def main(cfg: GRPOConfig) -> None:
    """The whole run; a LockstepError on any rank ends all of them with one line and its exit code."""
    with reporting_errors(debug=cfg.debug):
        train(cfg)


def train(cfg: GRPOConfig) -> None:
    """Setup, then `num_steps` times: rollout, reward, log-probs, advantages, policy update, evaluate and log."""
    # ---- Setup: everything that can be wrong with the input, before a model is loaded ----
    startup = StartupTimer()
    with startup.phase("join the other ranks"):
        world = init_distributed()
    with startup.phase("check the input"):
        files, model_files = check_input(cfg, world)
    with startup.phase("try the reward function"):
        if files.train is not None:  # rows of a dataset class are made with the tokenizer
            reward_note = world.agree(lambda: try_reward(cfg, files.train, files.val))
    with startup.phase("tokenise the prompts"):
        tokenizer, stop_ids, train_set, val_set = world.agree(lambda: load_prompts(cfg, files, model_files, world))
        check_same_prompts(train_set, val_set, world)
        prompts = PromptStream(train_set, seed=cfg.seed, shuffle=cfg.data.shuffle)
        val_samples = val_set.all_samples()
        data_sources = {sample.data_source for sample in (*train_set.all_samples(), *val_samples)}
        if files.train is None:
            reward_note = world.agree(lambda: try_reward(cfg, train_set.rows, val_set.rows))
    num_steps = cfg.num_steps or max(1, len(train_set) * cfg.total_epochs // cfg.prompts_per_step)
    num_updates = cfg.prompts_per_step * cfg.rollout.n // cfg.mini_batch_size * cfg.update_epochs
    policy_loss = cfg.policy_loss

    run = Run(cfg.run_dir, cfg.tracking, world, config=to_json(cfg), num_steps=num_steps, overwrite=cfg.overwrite)
    reward_log = run.dir / "logs" / f"rewards_{world.rank}.log"
    with run, closing(Scorer(cfg.reward, data_sources, log_path=reward_log)) as scorer:
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
                most_responses=max(cfg.prompts_per_step * cfg.rollout.n, len(val_set) * cfg.eval.n),
                stop_token_ids=stop_ids,
                world=world,
                seed=cfg.seed,
            )
            engine.sleep()
        if engine.on_gpu:
            run.say(f"the engine is built and asleep; {engine.device_used_gib():.1f} GiB of GPU memory in use")
        with startup.phase("load the policy"):
            policy = load_policy(
                cfg.model, str(model_files.folder), cfg.fsdp, world, max_tokens_per_gpu=cfg.max_tokens_per_gpu,
                with_reference=cfg.kl_loss_coef > 0,
            )  # fmt: skip
            optimizer, scheduler = build_optimizer(
                policy, cfg.optim, num_steps=num_steps, on_host=cfg.fsdp.optimizer_offload
            )
            reference = None
            if cfg.kl_loss_coef > 0:
                reference = load_policy(cfg.model, str(model_files.folder), cfg.fsdp, world, trainable=False)
                offload(cfg.fsdp, reference)
        gathered = "once per optimizer step" if policy.keeps_gathered else "in every pass"
        activations = "recomputed in" if policy.model.is_gradient_checkpointing else "kept for"
        run.say(f"the policy is loaded; weights are gathered {gathered}, activations {activations} the backward pass")
        with startup.phase("sync the weights and compare all"):
            weight_sync = WeightSync(policy, engine, fsdp=cfg.fsdp)
            num_compared = weight_sync.wake(names=None, time=nullcontext)
        run.say(f"the engine holds the policy's weights: all {num_compared} tensors are equal bit for bit")
        if val_samples and cfg.eval.before_train:
            with startup.phase("validate before training"):
                run.log(0, evaluate(engine, val_samples, scorer, tokenizer, cfg=cfg.eval, rollout=cfg.rollout,
                                    reward=cfg.reward, world=world, run=run, step=0))  # fmt: skip
        engine.sleep()
        run.say(startup.table())

        constant_groups: list[float] = []
        for step in range(1, num_steps + 1):
            metrics = Metrics(world)
            with metrics.time("step"):
                # ---- Rollout: weights go to the engine, the engine samples, its memory comes back ----
                with metrics.time("update_weights"):
                    names = names_to_check(engine, seed=cfg.seed, step=step)
                    weight_sync.wake(names=names, time=metrics.time)
                samples = engine.share(prompts.next(cfg.prompts_per_step))
                with metrics.time("gen"), run.progress(f"step {step}/{num_steps}: sampling", len(samples)) as advance:
                    for group in engine.generate(samples, training_sampling(cfg.rollout)):
                        if engine.is_leader:  # tensor-parallel ranks sample the same; one of them speaks
                            for rollout in group:
                                scorer.submit(rollout, decode(tokenizer, rollout.response_ids))
                        advance()
                with metrics.time("sleep"):
                    engine.sleep()
                metrics.add_max("perf/memory_after_sleep_gb", engine.device_used_gib())

                # ---- Reward: the workers scored during sampling; only the last responses are still missing ----
                with metrics.time("reward"):
                    rollouts = scorer.collect()
                    for name, count in check_error_rate(rollouts, cfg.reward, world).items():
                        metrics.set(name, count)
                for text, count in error_counts(rollouts).items():
                    print(f"step {step}: the reward of {count} responses failed: {text}")
                batch = make_batch(rollouts, world, mini_batch_size=cfg.mini_batch_size)

                # ---- Log-probs of the sampled tokens, under the policy before the update and under the reference ----
                onload(cfg.fsdp, policy, world)
                passes = dict(
                    max_tokens_per_gpu=cfg.max_tokens_per_gpu, temperature=cfg.rollout.temperature, world=world
                )
                # Before a single update the old policy is the current one: the ratio is exactly 1 without a pass.
                if not cfg.correction.bypass and (
                    num_updates > 1 or policy_loss.needs_old_log_probs or cfg.correction.needs_old_log_probs
                ):
                    with metrics.time("old_log_prob"):
                        batch = batch.with_(old_log_probs=compute_log_probs(policy, batch, **passes))  # (B, T)
                if reference is not None:
                    with metrics.time("ref"):
                        onload(cfg.fsdp, reference, world)
                        batch = batch.with_(ref_log_probs=compute_log_probs(reference, batch, **passes))  # (B, T)
                        offload(cfg.fsdp, reference)

                # ---- Correction by what the engine reported, then advantages, 0 outside response_mask ----
                with metrics.time("adv"):
                    batch = cfg.correction.correct(batch, metrics)
                    advantages, returns = cfg.advantage(batch, world)  # (B, T), (B, T)
                    batch = batch.with_(advantages=advantages, returns=returns)

                # ---- Policy update: micro-batches only split a mini-batch to fit memory ----
                with metrics.time("update_actor"):
                    mismatch, num_skipped = Metrics(world), 0
                    for update, mini_batch in enumerate(
                        iter_mini_batches(batch, world, update_epochs=cfg.update_epochs)
                    ):
                        mini_batch = policy_loss.prepare(mini_batch, world)
                        denominator = loss_denominator(
                            mini_batch, cfg.agg_mode, world, max_response_len=cfg.rollout.max_response_len
                        )
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
                            if reference is not None:
                                terms["kl_loss"] = kl_to_reference(log_probs, micro_batch, kl_type=cfg.kl_loss_type)
                            for name, term in terms.items():
                                total = aggregate(term, micro_batch.response_mask, cfg.agg_mode)
                                terms[name] = total / denominator  # a scalar, this micro-batch's share
                            loss = terms["pg_loss"]
                            if cfg.entropy_coef > 0:
                                loss = loss - cfg.entropy_coef * terms["entropy_loss"]
                            if reference is not None:
                                loss = loss + cfg.kl_loss_coef * terms["kl_loss"]
                            loss.backward()  # summed over micro-batches and ranks: the denominator is global
                            update_metrics(
                                metrics, micro_batch.response_mask, terms={**terms, "loss": loss},
                                stats={**stats, "entropy": entropy}, num_updates=num_updates,
                            )  # fmt: skip
                            if update == 0:
                                mismatch_metrics(log_probs, micro_batch, mismatch)
                        if update == 0:  # before anything is learned from responses of another policy
                            differences = mismatch.reduce()
                            check_log_probs_diff(differences, limit=cfg.rollout.max_log_probs_diff)
                        grad_norm, taken = optimizer_step(policy, optimizer, clip_grad=cfg.optim.clip_grad)
                        metrics.add_mean("actor/grad_norm", grad_norm, 1)
                        num_skipped += not taken
                    metrics.set("actor/skipped_updates", num_skipped)
                    if reference is not None:
                        metrics.set("actor/kl_coef", cfg.kl_loss_coef)
                    metrics.set("actor/lr", scheduler.get_last_lr()[0])
                    scheduler.step()

            # ---- Evaluate, log, checkpoint ----
            data_metrics(batch, metrics, max_prompt_len=cfg.data.max_prompt_len)
            values = metrics.reduce() | differences | balance_stats(batch, world)
            values |= perf_metrics(
                batch, values, world, model_config=model_files.config, update_epochs=cfg.update_epochs,
                engine_bytes=engine.pool_bytes,
            )  # fmt: skip
            values |= {"training/global_step": step, "training/epoch": step * cfg.prompts_per_step / len(train_set)}
            if val_samples and cfg.eval.due(step, num_steps):
                weight_sync.wake(names=names, time=nullcontext)
                values |= evaluate(engine, val_samples, scorer, tokenizer, cfg=cfg.eval, rollout=cfg.rollout,
                                   reward=cfg.reward, world=world, run=run, step=step)  # fmt: skip
                engine.sleep()
            run.log(step, values)
            constant_groups.append(values["reward/constant_group_ratio"])
            if warning := constant_reward_warning(constant_groups):
                run.say(f"warning: {warning}")
        run.finish()
    shutdown_distributed()


if __name__ == "__main__":
    main(parse_cli(GRPOConfig()))
