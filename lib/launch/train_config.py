"""What defines a training run: the fields that all scripts share, which of them fit together, what follows from them.

A script derives its config from `TrainConfig` and adds what it alone reads.
"""

import math
from dataclasses import dataclass, field

from lib.algorithms.advantages import ADVANTAGES, Advantage
from lib.algorithms.aggregation import LossAggMode
from lib.algorithms.correction import CORRECTIONS, AutoCorrection, Correction
from lib.algorithms.group_filter import GroupFilterConfig
from lib.algorithms.kl import KLRewardConfig, KLType
from lib.algorithms.losses import LOSSES, PolicyLoss
from lib.algorithms.shaping import OverlongConfig
from lib.algorithms.terms import EntropyTerm, KLTerm, LossTerm, PolicyTerm
from lib.checkpoints.checkpointer import CheckpointConfig
from lib.config.flags import plug_in
from lib.config.values import either, nearest_divisors
from lib.data.prompts import DataConfig
from lib.engine.rollout_config import RolloutConfig
from lib.errors import UserError, check_fields
from lib.model.fsdp import FSDPConfig
from lib.model.lora import LoRAConfig
from lib.model.networks import ModelConfig
from lib.model.optim import OptimConfig
from lib.rewards.scoring import RewardConfig
from lib.rollouts.validation import EvalConfig
from lib.tracking.run import TrackingConfig
from lib.turns.config import TurnsConfig


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that defines a run without a critic. A recipe sets these; --section.field overrides them."""

    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    turns: TurnsConfig = field(default_factory=TurnsConfig)
    advantage: Advantage = plug_in(ADVANTAGES, "grpo")
    loss: PolicyLoss = plug_in(LOSSES, "vanilla")
    loss_agg_mode: LossAggMode | None = None
    """How per-token losses become one number: token-mean weighs every token alike (DAPO); None: the loss's own."""
    loss_scale_factor: float | None = None
    """Constant that seq-mean-token-sum-norm divides by, in tokens; None: --rollout.max-response-len."""
    kl_loss_coef: float = 0.0
    """Weight of the KL to the frozen initial policy in the loss, 0: none, and no reference; works: 0 to 0.01."""
    kl_loss_type: KLType = "k3"
    """Estimator of that KL per token."""
    kl_reward: KLRewardConfig = field(default_factory=KLRewardConfig)
    entropy_coef: float = 0.0
    """Weight of the entropy bonus in the loss."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    filter_groups: GroupFilterConfig = field(default_factory=GroupFilterConfig)
    correction: Correction = plug_in(CORRECTIONS, "auto")

    prompts_per_step: int = 128
    """Prompts per training step, over all ranks; works: 32 to 512."""
    mini_batch_size: int = 1024
    """Responses per optimizer step, over all ranks; works: all of a step's responses, or down to a quarter of them."""
    update_epochs: int = 1
    """Passes over the responses of a step."""
    max_tokens_per_gpu: int = 16384
    """Most tokens (prompts and responses) in one forward or backward pass of a rank, which never changes the gradient;
    works: 8192 to 65536, as memory allows."""
    num_steps: int | None = None
    """Training steps (a rollout and its update each); None: as many as --total-epochs gives."""
    total_epochs: int = 1
    """Passes over the training data, at --prompts-per-step a step, used when --num-steps is not given; with dynamic
    sampling, which draws more prompts, more passes."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    max_minutes: float | None = None
    """Minutes after its start by which the run has ended: it saves and stops while another step still fits; None: no
    limit."""
    run_dir: str = "runs/train"
    """Folder of the run: config, metrics, curves, samples, logs."""
    overwrite: bool = False
    """Move an existing run folder aside and start afresh."""
    seed: int = 0
    """Seed of the data order and of every sampled response."""
    debug: bool = False
    """Show tracebacks also for errors that are the input's."""

    def __post_init__(self) -> None:
        counts = ("mini_batch_size", "update_epochs", "max_tokens_per_gpu", "total_epochs")
        check_fields(
            self,
            "",
            # The engine gets a request for every prompt: more is a slip of the pen.
            prompts_per_step=(1 <= self.prompts_per_step <= 2**20, "at least 1, and at most 2**20"),
            **{name: (getattr(self, name) >= 1, "at least 1") for name in counts},
            num_steps=(self.num_steps is None or self.num_steps >= 1, "at least 1"),
            max_minutes=(self.max_minutes is None or 0 < self.max_minutes < math.inf, "above 0 and finite"),
            seed=(0 <= self.seed < 2**63, "from 0 to 2**63 - 1"),
            kl_loss_coef=(0 <= self.kl_loss_coef < math.inf, "0 or more and finite"),
            entropy_coef=(0 <= self.entropy_coef < math.inf, "0 or more and finite"),
            loss_scale_factor=(
                self.loss_scale_factor is None or 0 < self.loss_scale_factor < math.inf,
                "above 0 and finite",
            ),
        )
        if self.advantage.needs_group and self.rollout.n < 2:
            raise UserError(
                f"--rollout.n {self.rollout.n} is too small for a group; --advantage; a group advantage compares the "
                "responses of one prompt, expected at least 2; set --rollout.n 8"
            )
        if self.filter_groups.enable and self.rollout.n < 2:
            raise UserError(
                f"--rollout.n {self.rollout.n} is too small to filter groups; --filter-groups.enable True; the "
                "responses of a prompt must differ, expected at least 2; set --rollout.n 8"
            )
        self._check_curriculum()
        responses = self.prompts_per_step * self.rollout.n
        if responses % self.mini_batch_size:
            raise UserError(
                f"mini_batch_size={self.mini_batch_size} does not divide the {responses} responses of a step; "
                f"--mini-batch-size; found prompts_per_step={self.prompts_per_step} x n={self.rollout.n}; "
                f"use {either(nearest_divisors(responses, self.mini_batch_size))}"
            )
        if self.rollout.temperature == 0:
            raise UserError(
                "greedy responses to one prompt are all the same, and no log-prob can be divided by 0; "
                "--rollout.temperature 0; expected at least 0.01 in training; set --rollout.temperature 1.0"
            )
        if self.rollout.top_p < 1 or self.rollout.top_k > 0:
            raise UserError(
                "top-p and top-k change the sampler's distribution but not the trainer's, so every ratio would be "
                f"wrong; --rollout.top-p {self.rollout.top_p} --rollout.top-k {self.rollout.top_k}; expected 1.0 and 0 "
                "in training; leave them out (validation has --eval.top-p and --eval.top-k of its own)"
            )
        self._check_older_responses()
        self.turns.check_sampling(self.rollout)
        if self.overlong.buffer_len > self.rollout.max_response_len:
            raise UserError(
                f"--overlong.buffer-len {self.overlong.buffer_len} is longer than a response; length shaping; found "
                f"--rollout.max-response-len {self.rollout.max_response_len}, expected at least as much; lower the "
                "buffer"
            )
        keys = self.advantage.reward_keys
        if keys and "score" not in keys and (self.overlong.buffer_len or self.kl_reward.coef):
            raise UserError(
                "the overlong penalty and the KL penalty change the score, which is not learned from; "
                f"--advantage.reward-keys {' '.join(keys)}; found --overlong.buffer-len {self.overlong.buffer_len} and "
                f"--kl-reward.coef {self.kl_reward.coef}, expected both 0 without the key score; add score to the "
                "keys, or leave the penalties out"
            )
        if self.correction.bypass and self.advantage.needs_logit_grad_squared:
            raise UserError(
                "--correction.bypass leaves out the pass that the advantage reads; --advantage; found "
                f"{type(self.advantage).__name__}, expected one that needs no norms of gradients; choose "
                "another correction or advantage"
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

    def _check_curriculum(self) -> None:
        """What is needed to tell from the responses to a prompt whether it is mixed."""
        if not self.data.curriculum:
            return
        if self.rollout.n < 2:
            raise UserError(
                f"--rollout.n {self.rollout.n} is too small for a curriculum; --data.curriculum True; it draws prompts "
                "whose responses differ, expected at least 2; set --rollout.n 8, or leave the curriculum out"
            )
        cfg = self.filter_groups
        if (cfg.low, cfg.high) != (-math.inf, math.inf):
            raise UserError(
                "a curriculum would draw more of what a band drops; --data.curriculum True; found "
                f"--filter-groups.low {cfg.low:g} and --filter-groups.high {cfg.high:g}, expected no bounds; leave out "
                "one of the two"
            )

    def _check_older_responses(self) -> None:
        """What is needed to learn from responses that older weights sampled."""
        if self.rollout.partial_share < 1:
            what = "responses continued in the next step"
            flag, remedy = "--rollout.partial-share", "--rollout.partial-share 1"
            if self.rollout.stop:
                raise UserError(
                    f"a stop string would be missed where a response is interrupted; {flag} "
                    f"{self.rollout.partial_share}; found --rollout.stop {' '.join(map(repr, self.rollout.stop))}, "
                    "expected none; leave out one of the two"
                )
        elif self.filter_groups.enable and self.filter_groups.keep_surplus:
            what = "groups kept for the next step"
            flag, remedy = "--filter-groups.keep-surplus", "--filter-groups.keep-surplus False"
        else:
            return
        if not self.rollout.log_probs:
            raise UserError(
                f"{what} need the log-probs of the policy that sampled them; {flag}; found --rollout.log-probs False, "
                f"expected True; leave that out, or set {remedy}"
            )
        weighed = self.correction.bypass and self.correction.is_level != "none"  # by weights that follow the policy
        if not (self.policy_loss.has_ratio or weighed):
            raise UserError(
                f"--loss {type(self.policy_loss).__name__} has no ratio to correct {what}, which older weights "
                f"sampled; {flag}; expected a loss with a ratio; set {remedy}, or choose another loss"
            )

    @property
    def most_in_flight(self) -> int:
        """About the most training responses that all engines hold at once."""
        return math.ceil(self.prompts_per_step * self.rollout.n / self.rollout.partial_share)

    @property
    def frozen_steps(self) -> int:
        """First training steps in which the policy does not learn."""
        return 0

    def policy_epochs(self, step: int) -> int:
        """Passes of the policy over the responses of this step (1 to num_steps)."""
        return self.update_epochs if step > self.frozen_steps else 0

    @property
    def agg_mode(self) -> LossAggMode:
        """--loss-agg-mode, or the loss's own where that is not given."""
        return self.loss_agg_mode or self.policy_loss.agg_mode

    @property
    def loss_scale(self) -> float:
        """--loss-scale-factor, or the longest response where that is not given."""
        return self.loss_scale_factor or float(self.rollout.max_response_len)

    @property
    def needs_reference(self) -> bool:
        """Whether the frozen initial policy is loaded."""
        return self.kl_loss_coef > 0 or self.kl_reward.coef > 0

    @property
    def is_own_reference(self) -> bool:
        """Whether the policy without its adapter is the reference: no other model is loaded."""
        return self.needs_reference and self.lora.rank > 0 and self.model.reference_path is None

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether the pass for old log-probs runs even before a single update; never with --correction.bypass."""
        return (
            self.policy_loss.needs_old_log_probs
            or self.correction.needs_old_log_probs
            or self.advantage.needs_logit_grad_squared
            or self.kl_reward.coef > 0
        )

    def has_old_log_prob_pass(self, num_updates: int, *, any_stale: bool) -> bool:
        """Whether a pass gives the old policy's log-probs, in a step with that many optimizer steps.

        Before a single update the old policy is the current one: the ratio is exactly 1 without a pass. While the
        policy rests no update compares it with the engine: then a pass does, also with bypass.
        """
        needed = num_updates > 1 or any_stale or self.needs_old_log_probs
        return num_updates == 0 or (needed and not self.correction.bypass)

    @property
    def loss_terms(self) -> list[LossTerm]:
        """What the policy's loss is the sum of."""
        terms: list[LossTerm] = [PolicyTerm(loss=self.policy_loss), EntropyTerm(coef=-self.entropy_coef)]
        return [*terms, KLTerm(coef=self.kl_loss_coef, kl_type=self.kl_loss_type)] if self.kl_loss_coef > 0 else terms

    @property
    def policy_loss(self) -> PolicyLoss:
        """The loss to train with: --loss, unless the correction brings its own."""
        return self.correction.policy_loss(self.loss)
