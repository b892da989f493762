"""Episodes in place of responses: what the collector, validation and eval.py sample with where there are turns."""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from lib.data.tokenizer import decode
from lib.dist import World
from lib.engine.conversations import Join, converse
from lib.engine.engine import RolloutEngine
from lib.engine.rollout_config import Sampling
from lib.turns.dialogue import Dialogue
from lib.turns.kinds import Kinds
from lib.types import Rollout, Sample

SUMS = ("bad_calls", "tool_errors", "tool_timeouts", "truncated_observations", "replayed")
"""Of the numbers that an episode has, those of which a step shows the sum; of all others, the mean over episodes."""


class Conversations:
    """Samples episodes with an engine, as the engine samples responses."""

    def __init__(
        self, engine: RolloutEngine, dialogue: Dialogue | None, kinds: Kinds, *, join: Join, max_turn_len: int | None,
        world: World,
    ) -> None:  # fmt: skip
        """`dialogue`: of the replica's leader; its other ranks have none."""
        self.engine, self.dialogue, self.kinds, self.world = engine, dialogue, kinds, world
        self.join, self.max_turn_len = join, max_turn_len
        self._sampled_s = 0.0

    @property
    def is_leader(self) -> bool:
        """As the engine's."""
        return self.engine.is_leader

    def share(self, samples: list[Sample]) -> list[Sample]:
        """As the engine's."""
        return self.engine.share(samples)

    def generate(
        self, samples: list[Sample], sampling: Sampling, *, stream: str = "train",
        stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[list[Rollout]]:  # fmt: skip
        """As `RolloutEngine.generate`: the groups of episodes, each as soon as its last one ends."""
        log_probs = [] if sampling.log_probs else None
        new = [
            Rollout(sample=it, index=index, response_ids=[], rollout_log_probs=log_probs, finish_reason="unfinished")
            for it in samples
            for index in range(sampling.n)
        ]
        groups: dict[int, list[Rollout]] = {}
        for rollout in self._converse(new, sampling, stream=stream, stop=stop):
            group = groups.setdefault(rollout.sample.uid, [])
            group.append(rollout)
            if len(group) == sampling.n:
                yield sorted(groups.pop(rollout.sample.uid), key=lambda it: it.index)
        assert not groups, f"{len(groups)} groups have too few episodes"

    def generate_partly(
        self, rollouts: list[Rollout], sampling: Sampling, *, share: float, max_continued: int,
        stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[Rollout]:  # fmt: skip
        """As `RolloutEngine.generate_partly`; an episode that waits for an answer, or for its score, is unfinished. One
        whose environment cannot be replayed ends in this step."""
        most = len(rollouts) - math.ceil(share * len(rollouts))

        def enough(left: Collection[Rollout]) -> bool:
            return len(left) <= most and all(it.num_continued < max_continued and self._may_wait(it) for it in left)

        yield from self._converse(rollouts, sampling, stop=stop, enough=enough)

    def _may_wait(self, rollout: Rollout) -> bool:
        kind = self.kinds.of(rollout.sample.agent_name, rollout.sample.extra_info)
        return kind is None or self.kinds.about[kind].replayable

    def _converse(
        self, rollouts: Sequence[Rollout], sampling: Sampling, *, stop: Callable[[], bool], stream: str = "train",
        enough: Callable[[Collection[Rollout]], bool] = lambda left: False,
    ) -> Iterator[Rollout]:  # fmt: skip
        start = time.monotonic()
        if self.dialogue is not None:
            self.dialogue.stream = stream
        try:
            for rollout in converse(
                self.engine, rollouts, replace(sampling, n=1), self.dialogue, join=self.join,
                max_turn_len=self.max_turn_len, stream=stream, stop=stop, enough=enough,
            ):  # fmt: skip
                yield rollout if rollout.is_partial or not self.is_leader else self._for_reward(rollout)
        finally:
            if self.dialogue is not None:
                self.dialogue.forget()
            self._sampled_s += time.monotonic() - start

    def _for_reward(self, rollout: Rollout) -> Rollout:
        """With what a reward function is told of an episode, in its extra_info."""
        said = {
            "reply": decode(self.dialogue.template.tokenizer, rollout.sampled_turns[-1]),
            "num_turns": rollout.num_turns,
            "tool_calls": int(rollout.metrics.get("calls", 0)),
            "turn_rewards": [reward for _, reward in rollout.turn_rewards],
            "tool_rewards": rollout.given("tool_rewards"), "turn_scores": rollout.given("turn_scores"),
        }  # fmt: skip
        return replace(rollout, sample=replace(rollout.sample, extra_info={**rollout.sample.extra_info, **said}))

    def metrics(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Of these episodes, of all ranks, and of the calls since the last time. Executed by all ranks together."""
        seconds, waited = ([], 0.0) if self.dialogue is None else (self.dialogue.seconds, self.dialogue.waited_s)
        own = [(it.num_turns, it.finish_reason, it.metrics) for it in rollouts]
        gathered = self.world.gather((own, seconds, (waited, self._sampled_s)))
        self._sampled_s = 0.0
        if self.dialogue is not None:
            self.dialogue.seconds, self.dialogue.waited_s = [], 0.0
        episodes = [episode for of_rank, _, _ in gathered for episode in of_rank]
        return (
            of_episodes(episodes)
            | _of_calls(sorted(it for _, of_rank, _ in gathered for it in of_rank))
            | {"turns/waiting_share": max((waited / total for _, _, (waited, total) in gathered if total), default=0.0)}
        )


def of_episodes(episodes: Sequence[tuple[int, str, Mapping[str, float]]]) -> dict[str, float]:
    """The metrics of episodes, given as (`Rollout.num_turns`, finish reason, `Rollout.metrics`)."""
    num = len(episodes)
    if not num:
        return {}
    num_turns = [turns for turns, _, _ in episodes]
    reasons, totals = Counter(reason for _, reason, _ in episodes), Counter()
    for _, _, metrics in episodes:
        totals.update(metrics)
    prompt_tokens, cached = totals.pop("prompt_tokens", 0.0), totals.pop("cached_tokens", 0.0)
    calls = totals.pop("calls", 0.0)
    return {
        "num_turns/mean": sum(num_turns) / num, "num_turns/max": max(num_turns), "num_turns/min": min(num_turns),
        "turns/per_episode": sum(num_turns) / 2 / num,
        "turns/calls_per_episode": calls / num,
        "turns/excluded": reasons["error"],
        "turns/max_turns_ratio": reasons["turns"] / num,
        **({"turns/cached_prompt_ratio": cached / prompt_tokens} if prompt_tokens else {}),
        **{f"turns/{name}": totals.pop(name, 0.0) for name in SUMS},
        **{f"turns/{name}": total / num for name, total in totals.items()},
    }  # fmt: skip


def _of_calls(seconds: list[float]) -> dict[str, float]:
    """`seconds`: ascending."""
    if not seconds:
        return {}
    last = len(seconds) - 1
    return {f"turns/tool_latency_s/p{share}": seconds[round(last * share / 100)] for share in (50, 99)} | {
        "turns/tool_latency_s/max": seconds[-1]
    }
