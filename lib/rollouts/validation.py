"""Validation: every validation prompt sampled and scored, with the same engine and reward code as training."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lib.data.tokenizer import decode, text_of
from lib.dist import World
from lib.engine.rollout_config import LOWEST_TEMPERATURE, MAX_GROUP, RolloutConfig, Sampling
from lib.engine.sampler import Sampler
from lib.errors import Stopped, UserError, check_fields
from lib.rewards.scoring import RewardConfig, Scorer, check_error_rate, error_counts
from lib.rollouts.episode_turns import turns_of
from lib.rollouts.shown_samples import VALIDATION_PROMPTS, first_prompts, keep_log_probs_of_shown, validation_rows
from lib.rollouts.text_quality import quality_metrics, text_quality
from lib.rollouts.validation_metrics import MAX_VARIABLES, limit_variables, validation_metrics
from lib.stopping import Stopper
from lib.tracking.console import choose_different
from lib.tracking.run import Run
from lib.types import Rollout, Sample

NUM_SHOWN = 3  # responses on the terminal


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """When and how the policy is validated."""

    every: int = 10
    """Steps between validations, 0 for none in between; there is always one at the end."""
    before_train: bool = True
    """Validate once before training (logged as step 0)."""
    n: int = 1
    """Responses per validation prompt."""
    temperature: float = 0.0
    """Sampling temperature of validation; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus of validation, in (0, 1]."""
    top_k: int = 0
    """Sample among the k likeliest tokens in validation, 0 for all."""
    with_greedy: bool = False
    """Beside the sampled responses, one greedy response per prompt: val-core/.../greedy."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            "eval.",
            every=(self.every >= 0, "0 or more"),
            n=(1 <= self.n <= MAX_GROUP, f"from 1 to {MAX_GROUP}"),
            temperature=(
                self.temperature == 0 or LOWEST_TEMPERATURE <= self.temperature < 100,
                f"0 (greedy), or from {LOWEST_TEMPERATURE} to below 100",
            ),
            top_p=(0 < self.top_p <= 1, "in (0, 1]"),
            top_k=(0 <= self.top_k < 2**31, "0 (all tokens) or more"),
        )
        if self.n > 1 and self.temperature == 0:
            raise UserError(
                f"--eval.n {self.n} with --eval.temperature 0; greedy responses to one prompt are all the same; "
                "expected a temperature above 0; set --eval.temperature, or --eval.n 1"
            )
        if self.with_greedy and self.temperature == 0:
            raise UserError(
                "greedy responses beside greedy ones; --eval.with-greedy True; found --eval.temperature 0, expected "
                "more than 0; leave one of the two out"
            )

    def samplings(self, max_response_len: int) -> list[Sampling]:
        """How each prompt is answered: as the options say, and greedily where that is asked for too."""
        chosen = Sampling(
            n=self.n,
            max_response_len=max_response_len,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
        )
        return [chosen, *[replace(chosen, n=1, temperature=0.0, top_p=1.0, top_k=0)] * self.with_greedy]

    def due(self, step: int, num_steps: int) -> bool:
        """Whether to validate after this step (1 to num_steps)."""
        return step == num_steps or (self.every > 0 and step % self.every == 0)


def evaluate(
    sampler: Sampler, samples: list[Sample], scorer: Scorer, tokenizer: Any, *, cfg: EvalConfig,
    rollout: RolloutConfig, reward: RewardConfig, world: World, run: Run, stopper: Stopper, step: int,
) -> dict[str, float]:  # fmt: skip
    """Validation metrics of all samples, on all ranks; writes every response to samples/step_N.jsonl.

    Executed by all ranks with the same samples; the engine is awake and holds the policy's weights. A response whose
    scoring failed is left out of the means and counted in val-aux/num_unscored; too many of them raise RewardError.
    Raises Stopped when the run is to stop, and says how to measure the step afterwards: no later start does.
    """
    start = time.perf_counter()
    values: dict[str, float] = {"val-aux/num_unscored": 0.0, "val-aux/num_variables_left_out": 0.0}
    shown = first_prompts(((sample.uid, sample.data_source) for sample in samples), VALIDATION_PROMPTS)
    for chosen in cfg.samplings(rollout.max_response_len):
        sampling = replace(chosen, log_probs=rollout.log_probs)
        try:
            share = sampler.share(samples)
            own = _sample_and_score(sampler, share, sampling, scorer, tokenizer, run=run, stopper=stopper)
        except Stopped as stopped:
            if step > 0:  # the one before training comes again
                checkpoint = run.dir / f"global_step_{step}"
                run.say(
                    f"warning: the validation of step {step} was broken off and is not in the metrics; {stopped}; "
                    f"eval.py --model.path {checkpoint} --data.files VAL.parquet --output OUT.parquet measures it, if "
                    "that checkpoint is written (with this run's --eval options as --rollout ones)"
                )
            raise
        for text, count in error_counts(own).items():
            print(f"step {step}: the reward of {count} validation responses failed: {text}")
        check_error_rate(own, reward, world)
        qualities = [text_quality(r, text_of(tokenizer, r)) for r in own]
        gathered = world.gather((keep_log_probs_of_shown(own, shown), qualities))
        responses = sorted((r for found, _ in gathered for r in found), key=lambda r: (r.sample.uid, r.index))
        written = responses if world.rank == 0 else []
        rows = [sample_row(r, tokenizer) | {"temperature": sampling.temperature} for r in written]
        run.save_samples(step, rows)
        run.save_tokens(step, validation_rows(written, shown, tokenizer, temperature=sampling.temperature))
        if sampling.temperature == cfg.temperature:  # not of the greedy ones beside
            run.show_samples(rows_to_show(written, tokenizer))
        scored = [
            (r.sample.data_source, r.sample.uid, {**r.score.extras, "reward": r.score.score})
            for r in responses
            if r.score.score is not None
        ]
        scored, num_left_out = limit_variables(scored, run.variables)
        if num_left_out:
            run.say_once(
                "variables",
                f"warning: the reward function returns numbers of more than {MAX_VARIABLES} names, and the metrics of "
                f"{num_left_out} of them are left out; val-aux/num_variables_left_out; expected fewer: names must not "
                "be made of responses, whose texts may be returned as values; samples/ has all of them",
            )
        found = quality_metrics([quality for _, of_rank in gathered for quality in of_rank], n=sampling.n)
        found |= validation_metrics(scored, largest=sampling.n)
        if sampling.temperature != cfg.temperature:  # the greedy ones beside: names of their own
            found = {f"{name.removesuffix('mean@1')}greedy": value for name, value in found.items()}
        values |= found
        values |= {f"val-aux/{name}": value for name, value in sampler.metrics(own).items()}
        values["val-aux/num_unscored"] += len(responses) - len(scored)
        values["val-aux/num_variables_left_out"] += num_left_out
    return values | {"timing_s/testing": time.perf_counter() - start}


def _sample_and_score(
    sampler: Sampler, share: list[Sample], sampling: Sampling, scorer: Scorer, tokenizer: Any, *, run: Run,
    stopper: Stopper,
) -> list[Rollout]:  # fmt: skip
    """This rank's responses with their scores. Raises Stopped on all ranks together."""
    with stopper.together():
        with run.progress("validation", len(share)) as advance:
            for group in sampler.generate(share, sampling, stream="validation", stop=stopper.requested):
                if sampler.is_leader:
                    for response in group:
                        scorer.submit(response, text_of(tokenizer, response))
                advance()
        return scorer.collect(stop=stopper.requested)


def sample_row(rollout: Rollout, tokenizer: Any) -> dict[str, Any]:
    """What people are shown of a response, special tokens included."""
    turns = {"num_turns": rollout.num_turns, "turns": turns_of(rollout, tokenizer)} if rollout.spans else {}
    return {
        "uid": rollout.sample.uid,
        "data_source": rollout.sample.data_source,
        "prompt": tokenizer.decode(rollout.sample.prompt_ids),
        "response": tokenizer.decode(rollout.response_ids),
        "ground_truth": rollout.sample.ground_truth,
        "score": rollout.score.score,
        "extras": rollout.score.extras,
        "error": rollout.score.error,
        "finish_reason": rollout.finish_reason,
        **turns,
    }


def rows_to_show(rollouts: Sequence[Rollout], tokenizer: Any) -> list[dict[str, Any]]:
    """The first responses to a few prompts, of different sources where there are any: the prompts without control
    tokens."""
    in_order = sorted(rollouts, key=lambda r: (r.sample.uid, r.index))
    chosen = choose_different(
        in_order, NUM_SHOWN, source_and_prompt=lambda r: (r.sample.data_source, tuple(r.sample.prompt_ids))
    )
    return [sample_row(r, tokenizer) | {"prompt": _asked(r, tokenizer)} for r in chosen]


def _asked(rollout: Rollout, tokenizer: Any) -> str:
    """The prompt's text; of an episode, whose prompt may be tools for the most part, the dataset's last message."""
    if rollout.spans and rollout.sample.messages:
        return str(rollout.sample.messages[-1]["content"])
    return decode(tokenizer, rollout.sample.prompt_ids)
