"""A step's scored responses: rounds of sampling and scoring, greedy baselines, what goes on in the next step.

The scripts call `Collector.collect` for the phases Rollout and Reward; which rounds, baselines and leftovers there are
follows from the config, so every algorithm shares one loop.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from lib.algorithms.group_filter import (
    GroupFilterConfig,
    StepGroups,
    Verdict,
    goes_on,
    judge,
    metric_values,
    shortage,
    step_groups,
)
from lib.data.prompt_stream import PromptStream
from lib.data.tokenizer import text_of
from lib.dist import World
from lib.engine.rollout_config import RolloutConfig, Sampling, training_sampling
from lib.engine.sampler import Sampler
from lib.rewards.scoring import (
    RewardConfig,
    Scorer,
    check_error_rate,
    error_counts,
    failed_calls_in_words,
    outgrown_in_words,
)
from lib.stopping import Stopper
from lib.tracking.metrics import Metrics
from lib.tracking.run import Run
from lib.types import Rollout, Sample, Score

Group = list[Rollout]
"""The responses to one prompt, in order of index."""


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What a step trains on. The numbers are the same on all ranks."""

    rollouts: list[Rollout]
    """This rank's responses, scored."""
    mini_batch_size: int
    """Responses per optimizer step, over all ranks; 0: there is nothing to train on."""
    num_mini_batches: int
    any_stale: bool
    """Whether an older policy sampled some of the tokens."""


class Collector:
    """Samples and scores the prompts of one step after the other. Its state is what a step leaves to the next."""

    def __init__(
        self, sampler: Sampler, scorer: Scorer, prompts: PromptStream, tokenizer: Any, *, rollout: RolloutConfig,
        reward: RewardConfig, filter_groups: GroupFilterConfig, prompts_per_step: int, mini_batch_size: int,
        with_greedy: bool, mask_truncated: bool, run: Run, stopper: Stopper, world: World,
    ) -> None:  # fmt: skip
        """`with_greedy`: also a greedy response to every prompt, whose score becomes `Rollout.greedy_score`.
        `mask_truncated`: responses cut off at the limit will not train, so they are no signal."""
        self.sampler, self.scorer, self.prompts, self.tokenizer = sampler, scorer, prompts, tokenizer
        self.rollout, self.reward, self.filter_groups = rollout, reward, filter_groups
        self.prompts_per_step, self.mini_batch_size = prompts_per_step, mini_batch_size
        self.with_greedy, self.mask_truncated = with_greedy, mask_truncated
        self.run, self.stopper, self.world = run, stopper, world
        self.carried: list[Group] = []
        """Groups with a signal that earlier steps did not need; each on the rank that sampled it."""
        self.unfinished: list[Rollout] = []
        """Partial rollouts: responses that the next step continues; the same on all ranks of a replica."""
        self.open_groups: dict[int, Group] = {}
        """By uid, the scored responses to prompts that also have unfinished ones; on the rank that sampled them."""
        self._num_calls = 0, 0  # workers replaced since they had outgrown, calls that failed; up to the last step
        self._share_kept = 1.0  # of the groups sampled last, those with a signal: how many to ask for

    def collect(self, metrics: Metrics, *, label: str) -> Collected:
        """The step's responses with their scores. The engine is awake and holds the policy's weights.

        Raises RewardError when too many responses could not be scored, Stopped when the run is to stop. Executed by all
        ranks together.
        """
        self._count_interrupted("continued", metrics)
        self.unfinished = [_older(rollout) for rollout in self.unfinished]
        self.open_groups = {uid: [_stale(r) for r in group] for uid, group in self.open_groups.items()}
        choose = self._choose_groups if self.filter_groups.enable else self._take_all
        groups, mini_batch_size, num_groups, scored = choose(metrics, label)
        self._count_interrupted("unfinished", metrics)
        if self.prompts.curriculum is not None:
            self._tell_curriculum(scored, metrics)
        num_responses = num_groups * self.rollout.n
        counts = self._check_errors(scored)
        for name, count in counts.items():
            metrics.set(name, count)
        if counts["reward/num_excluded"] == sum(self.world.gather(len(scored))) > 0:
            declined, excluded = counts["reward/num_declined"], counts["reward/num_excluded"]
            why = f"the reward function returned None {declined:.0f} times (is a return missing?)"
            if not declined:
                why = f"{excluded:.0f} rewards or environments failed; logs/rank_*.log say why"
            self.run.say(f"{label}: warning: no response has a score, so nothing is learned; {why}")
        self._count_calls(metrics, label)
        for name, value in self.sampler.metrics(scored).items():
            metrics.set(name, value)
        for text, count in error_counts(scored).items():
            print(f"{label}: the reward of {count} responses failed: {text}")
        rollouts = [rollout for group in groups for rollout in group]
        return Collected(
            rollouts=rollouts,
            mini_batch_size=mini_batch_size,
            num_mini_batches=math.ceil(num_responses / mini_batch_size) if mini_batch_size else 0,
            any_stale=any(self.world.gather(any(rollout.num_stale for rollout in rollouts))),
        )

    def state(self) -> dict[str, Any]:
        """What the next step goes on from on this rank, as JSON can hold it; samples by their uid and place alone."""
        replica, place = divmod(self.world.rank, self.rollout.tensor_model_parallel_size)
        unfinished = [] if place else self.unfinished  # its replica's other ranks hold the same
        return {
            "replica": replica,
            "share_kept": self._share_kept,
            "carried": [[_to_json(r) for r in group] for group in self.carried],
            "unfinished": [_to_json(r) for r in unfinished],
            "open_groups": [[_to_json(r) for r in group] for group in self.open_groups.values()],
        }

    def restore(self, states: list[dict[str, Any]]) -> None:
        """Goes on from the states of all ranks, however many there were; which rank holds a group changes nothing.

        Interrupted responses stay with their replica, or, where there were more or fewer, are dealt out by prompt.
        """

        def read(entries: list[dict[str, Any]]) -> Group:
            return [_from_json(entry, self.prompts) for entry in entries]

        groups = sorted((group for state in states for group in state["carried"]), key=lambda group: group[0]["uid"])
        self.carried = [read(group) for group in groups[self.world.rank :: self.world.size]]
        self._share_kept = states[0]["share_kept"]
        entries = [(state["replica"], entry) for state in states for entry in state["unfinished"]]
        uids = sorted({entry["uid"] for _, entry in entries})
        replica, place = divmod(self.world.rank, self.rollout.tensor_model_parallel_size)
        num_replicas = self.world.size // self.rollout.tensor_model_parallel_size
        own = set(uids[replica::num_replicas])
        if len({state["replica"] for state in states}) == num_replicas:
            own = {entry["uid"] for before, entry in entries if before == replica}
        self.unfinished = read([entry for _, entry in entries if entry["uid"] in own])
        opened = [group for state in states for group in state["open_groups"] if group[0]["uid"] in own]
        self.open_groups = {group[0]["uid"]: read(group) for group in opened if not place}

    def _take_all(self, metrics: Metrics, label: str) -> tuple[list[Group], int, int, list[Rollout]]:
        groups = self._sample(self.prompts_per_step, metrics, label)
        rollouts = [rollout for group in groups for rollout in group]
        if self.rollout.partial_share == 1:
            return groups, self.mini_batch_size, self.prompts_per_step, rollouts
        # As many groups as happened to end: mini-batches keep about their size, their number follows.
        num_responses = sum(self.world.gather(len(rollouts)))
        if not num_responses:
            self.run.say(f"{label}: no group has all its responses yet: the step is skipped")
        most = max(1, num_responses // self.world.size)  # with a response for every rank
        num_mini_batches = max(1, min(round(num_responses / self.mini_batch_size), most))
        size = math.ceil(num_responses / num_mini_batches)
        return groups, size, num_responses // self.rollout.n, rollouts

    def _count_interrupted(self, name: str, metrics: Metrics) -> None:
        """The responses that go on from an earlier step, or that the next one will continue."""
        if self.rollout.partial_share < 1:
            own = len(self.unfinished) if self.sampler.is_leader else 0  # its replica's other ranks hold the same
            metrics.set(f"partial/{name}", sum(self.world.gather(own)))

    def _choose_groups(self, metrics: Metrics, label: str) -> tuple[list[Group], int, int, list[Rollout]]:
        """Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): rounds until enough groups have a signal."""
        kept, target, scored = self.carried, self.prompts_per_step, []
        rounds, num_kept = 0, self.world.gather(len(kept))
        verdicts: Counter[Verdict] = Counter()
        wasted = 0  # tokens of the groups that were dropped
        num_open = self._num_open_prompts()
        while goes_on(num_kept, target=target, rounds=rounds, cfg=self.filter_groups) or (num_open and not rounds):
            asked = math.ceil((target - sum(num_kept)) / max(self._share_kept, 1 / 8)) - num_open
            of_round = max(0, min(asked, self.prompts_per_step))
            groups = self._sample(of_round, metrics, f"{label}, round {rounds + 1}")
            rounds += 1
            found = self.world.agree(lambda groups=groups: [self._judge(group) for group in groups])
            scored += [rollout for group in groups for rollout in group]
            self._check_errors(scored)  # broken code shows in the first round
            kept = kept + [group for group, verdict in zip(groups, found, strict=True) if verdict == "kept"]
            dropped = [group for group, verdict in zip(groups, found, strict=True) if verdict != "kept"]
            wasted += sum(len(rollout.response_ids) for group in dropped for rollout in group)
            gathered = self.world.gather((len(kept), Counter(found)))
            num_kept = [count for count, _ in gathered]
            of_this_round = sum((counts for _, counts in gathered), Counter())
            verdicts += of_this_round
            if of_this_round:
                self._share_kept = of_this_round["kept"] / of_this_round.total()
            num_open = self._num_open_prompts()
        step = step_groups(
            self.world.gather([group[0].sample.uid for group in kept]), target=target, n=self.rollout.n,
            mini_batch_size=self.mini_batch_size, num_ranks=self.world.size,
        )  # fmt: skip
        chosen = set(step.uids)
        surplus = [group for group in kept if group[0].sample.uid not in chosen]
        self.carried = [[_stale(rollout) for rollout in group] for group in surplus]
        if not self.filter_groups.keep_surplus:
            self.carried = []
            wasted += sum(len(rollout.response_ids) for group in surplus for rollout in group)
        self._report(metrics, label, step, rounds, verdicts, wasted)
        chosen_groups = [group for group in kept if group[0].sample.uid in chosen]
        return chosen_groups, step.mini_batch_size, len(step.uids), scored

    def _num_open_prompts(self) -> int:
        """Prompts, of all ranks, whose group will end in this step or a later one."""
        own = {rollout.sample.uid for rollout in self.unfinished} if self.sampler.is_leader else ()
        return sum(self.world.gather(len(own)))

    def _report(
        self, metrics: Metrics, label: str, step: StepGroups, rounds: int, verdicts: Counter[Verdict], wasted: int
    ) -> None:
        metrics.set("train/num_gen_batches", rounds)
        for verdict in ("kept", "all_right", "all_wrong", "out_of_band", "failed"):
            metrics.set(f"filter_groups/{verdict}", verdicts[verdict])
        metrics.set("filter_groups/trained", len(step.uids))
        keep = self.filter_groups.keep_surplus
        metrics.set("filter_groups/carried", len(step.surplus) if keep else 0)
        metrics.add_sum("filter_groups/wasted_tokens", wasted)
        if line := shortage(step, target=self.prompts_per_step, rounds=rounds, counts=verdicts, keep_surplus=keep):
            self.run.say(f"{label}: {line}")

    def _count_calls(self, metrics: Metrics, label: str) -> None:
        before, scorer = self._num_calls, self.scorer
        counts = self.world.gather((scorer.num_outgrown, scorer.num_failed_calls))
        outgrown, failed = self._num_calls = tuple(map(sum, zip(*counts, strict=True)))
        metrics.set("reward/num_outgrown_workers", outgrown - before[0])
        metrics.set("reward/num_failed_calls", failed - before[1])
        if outgrown > before[0] == 0:
            self.run.say(f"{label}: warning: {outgrown_in_words(outgrown)}")
        if failed > before[1] == 0:
            self.run.say(f"{label}: warning: {failed_calls_in_words(failed, scorer.call_error)}")

    def _tell_curriculum(self, scored: list[Rollout], metrics: Metrics) -> None:
        groups: dict[int, Group] = {}
        for rollout in scored:
            groups.setdefault(rollout.sample.uid, []).append(rollout)
        own = self.world.agree(
            lambda: [(uid, group[0].sample.place, self._judge(group)) for uid, group in groups.items()]
        )
        for name, count in self.prompts.curriculum.record(chain.from_iterable(self.world.gather(own))).items():
            metrics.set(name, count)

    def _check_errors(self, scored: list[Rollout]) -> dict[str, float]:
        """`check_error_rate` of what this step scored; a share of no less than a full step, however few those are."""
        return check_error_rate(scored, self.reward, self.world, at_least=self.prompts_per_step * self.rollout.n)

    def _judge(self, group: Group) -> Verdict:
        trains = [rollout for rollout in group if not (self.mask_truncated and rollout.is_truncated)]
        return judge(metric_values(trains, self.filter_groups.metric), self.filter_groups)

    def _sample(self, num_prompts: int, metrics: Metrics, label: str) -> list[Group]:
        """This rank's scored groups of the next prompts, and older ones that end now, without those that do not.

        None on ranks that only lend a replica their GPU.
        """
        samples = self.sampler.share(self.prompts.next(num_prompts))
        partial = self.rollout.partial_share < 1  # then responses are counted instead of groups
        total = len(self.unfinished) + len(samples) * self.rollout.n if partial else len(samples)
        total += len(samples) if self.with_greedy else 0
        with self.stopper.together():
            with metrics.time("gen"), self.run.progress(f"{label}: sampling", total) as advance:
                if partial:
                    self._generate_partly(samples, advance)
                else:
                    self._generate(samples, training_sampling(self.rollout), "train", advance, offset=0)
                if self.with_greedy:
                    greedy = Sampling(n=1, max_response_len=self.rollout.max_response_len, temperature=0.0)
                    self._generate(samples, greedy, "greedy", advance, offset=self.rollout.n)
            # The workers scored during sampling; only the last responses are missing.
            with metrics.time("reward"), self.run.progress(f"{label}: scoring"):
                for rollout in self.scorer.collect(stop=self.stopper.requested):
                    self.open_groups.setdefault(rollout.sample.uid, []).append(rollout)
        open_uids = {rollout.sample.uid for rollout in self.unfinished}
        ended = sorted(self.open_groups.keys() - open_uids)
        groups = [sorted(self.open_groups.pop(uid), key=lambda r: r.index) for uid in ended]
        if not self.with_greedy:
            return groups
        metrics.add_mean("remax/greedy_score", *_sum_and_count(group[-1] for group in groups))
        return [_with_greedy_score(group[:-1], group[-1]) for group in groups]

    def _generate(
        self, samples: list[Sample], sampling: Sampling, stream: str, advance: Callable[[], None], *, offset: int
    ) -> None:
        """Hands every response to the scorer as it comes, its index raised by `offset`."""
        for group in self.sampler.generate(samples, sampling, stream=stream, stop=self.stopper.requested):
            for rollout in group:
                self._submit(replace(rollout, index=rollout.index + offset))
            advance()

    def _generate_partly(self, samples: list[Sample], advance: Callable[[], None]) -> None:
        """The same for the responses that end in this step, of new prompts and of older ones."""
        new = [
            Rollout(sample=sample, index=index, response_ids=[], rollout_log_probs=[], finish_reason="unfinished")
            for sample in samples
            for index in range(self.rollout.n)
        ]
        older, self.unfinished = self.unfinished, []
        for rollout in self.sampler.generate_partly(
            [*older, *new], training_sampling(self.rollout), share=self.rollout.partial_share,
            max_continued=self.rollout.max_continued, stop=self.stopper.requested,
        ):  # fmt: skip
            if rollout.is_partial:
                self.unfinished.append(rollout)
            else:
                self._submit(rollout)
                advance()

    def _submit(self, rollout: Rollout) -> None:
        if self.sampler.is_leader:  # tensor-parallel ranks sample the same; one of them speaks
            self.scorer.submit(rollout, text_of(self.tokenizer, rollout))


def _older(rollout: Rollout) -> Rollout:
    """An interrupted response as the next step sees it; one without a token is still new."""
    num_tokens = len(rollout.response_ids)
    return replace(rollout, num_stale=num_tokens, num_continued=rollout.num_continued + bool(num_tokens))


def _stale(rollout: Rollout) -> Rollout:
    """The response as the next step sees it: all of it sampled by an older policy."""
    return replace(rollout, num_stale=len(rollout.response_ids))


def _to_json(rollout: Rollout) -> dict[str, Any]:
    fields = {name: value for name, value in vars(rollout).items() if name not in ("sample", "score")}
    return {
        "uid": rollout.sample.uid,
        "place": rollout.sample.place,
        **({"prompt_ids": rollout.sample.prompt_ids} if rollout.spans else {}),  # an environment may have added to them
        **fields,
        "score": rollout.score and vars(rollout.score),
    }


def _from_json(entry: dict[str, Any], prompts: PromptStream) -> Rollout:
    fields = {name: value for name, value in entry.items() if name not in ("uid", "place", "prompt_ids", "score")}
    score, uid = entry["score"] and Score(**entry["score"]), entry["uid"]
    sample = prompts.prompts.sample(entry["place"], uid) if "place" in entry else prompts.sample(uid)  # an older file
    sample = replace(sample, prompt_ids=entry.get("prompt_ids", sample.prompt_ids))
    return Rollout(sample=sample, score=score, **fields)


def _with_greedy_score(group: Group, greedy: Rollout) -> Group:
    """The group with the greedy response's score as baseline; where that has none, no response has one either."""
    assert group and greedy.score is not None
    if greedy.score.score is not None:
        return [replace(rollout, greedy_score=greedy.score.score) for rollout in group]
    failed = Score(score=None, error=greedy.score.error and f"{greedy.score.error} (of the greedy response)")
    return [replace(rollout, score=failed) for rollout in group]


def _sum_and_count(rollouts: Any) -> tuple[float, int]:
    scores = [rollout.score.score for rollout in rollouts if rollout.score.score is not None]
    return math.fsum(scores), len(scores)
