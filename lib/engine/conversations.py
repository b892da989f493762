"""Conversations in the engine's loop: turn after turn of many episodes, each as soon as its answer is there.

An episode is a `Rollout` whose ids are only ever appended to: a turn that was sampled, then what was observed. Every
turn is a request of its own, with a seed that follows from the prompt's uid, the episode's index and the number of ids
before it. So how long an answer takes, and what else the engine samples meanwhile, changes no distribution; with `step`
and `round` it does not even change the batches that are computed together, and with them not a bit.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from lib.engine.engine import RolloutEngine
from lib.engine.rollout_config import Sampling
from lib.errors import Stopped
from lib.types import Rollout, Score

Join = Literal["arrival", "step", "round"]
"""When an answered episode goes on: within some steps; in the step in which its turn ended, for which all wait; when
no other episode runs any more."""
LEAST_TURN = 16  # tokens that an observation leaves, or the episode ends before it
MOST_STEPS = 16
"""Steps of the engine between two looks for answers where nearly all episodes run, fewer where fewer do: on a GPU a
step in which turns begin takes 20 ms more (measured with 512 episodes), and all that run wait for it. Where such a step
takes no more than another, as on a CPU, this costs some hundredths (EXPERIMENTS.md)."""
WAIT_S = 0.25  # for an answer where nothing runs, before it is asked again whether to stop


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What an episode goes on with, or that it is over."""

    uid: int
    index: int
    prompt_ids: Sequence[int] | None = None
    """Of an episode that begins, where they are not its sample's."""
    ids: Sequence[int] = ()
    """To be appended: what was observed, up to where the next turn begins."""
    messages: Sequence[Mapping[str, Any]] = ()
    """What `ids`, or what is new in `prompt_ids`, were made of."""
    finish_reason: str | None = None
    """Why the episode is over; None: it goes on."""
    reward: float | None = None
    """Of the last turn; None: none."""
    score: Score | None = None
    """Of the episode that is over; None: the reward function's affair."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Added to the episode's."""
    told: Mapping[str, Any] | None = None
    """Of the last turn, an entry of `Rollout.answers`; None: it was not answered."""


class Answers(Protocol):
    """Who answers. Called on the replica's leader alone; each call returns at once and has one answer."""

    def begin(self, rollout: Rollout) -> None:
        """Takes an episode before its first turn, or one that was interrupted: in a turn (`unfinished`), before the
        answer to one (`waiting`), or when it was over (`ending`)."""

    def ask(self, rollout: Rollout) -> None:
        """Takes an episode whose last turn has ended."""

    def end(self, rollout: Rollout) -> None:
        """Takes an episode that has no room for more; its answer ends it with `length`."""

    def take(self, *, wait_s: float) -> list[Answer]:
        """The answers that have come since the last call; waits for one where there is none."""


def converse(
    engine: RolloutEngine, rollouts: Sequence[Rollout], sampling: Sampling, answers: Answers, *, join: Join,
    max_turn_len: int | None = None, stream: str = "train", stop: Callable[[], bool] = lambda: False,
    enough: Callable[[Collection[Rollout]], bool] = lambda left: False,
) -> Iterator[Rollout]:  # fmt: skip
    """The episodes one by one as they end; at last, once it is `enough` with those left, these as they are.

    `rollouts`: new ones, or ones that were interrupted. An episode ends with what its answer says; with `length` where
    a turn reaches `max_turn_len`, or the response `sampling.max_response_len`, sampled and observed, or an observation
    leaves less than 16 tokens of that. What is left is `unfinished`, `waiting` or `ending`, as `Answers.begin` says.
    Executed by all ranks of a replica with the same episodes; `answers` is asked by its leader. `stop` as in
    `RolloutEngine.generate`.
    """
    turns = _Turns(engine, sampling, answers, max_turn_len=max_turn_len, stream=stream)
    should_stop = engine.agreeing(stop)
    try:
        with engine.sampling():
            for rollout in rollouts:
                turns.begin(rollout)
            while (left := turns.left) and not enough(left):
                if should_stop():
                    raise Stopped("while episodes were going on")
                if turns.collect(join):
                    yield from turns.go_on()
                    turns.step()
            yield from turns.interrupt()
    except BaseException:  # whoever iterates has stopped early: nothing may run on into the next call
        engine.abort(list(turns.running))
        raise


class _Turns:
    """The episodes of a call: those in the engine, and those that wait for an answer."""

    def __init__(
        self, engine: RolloutEngine, sampling: Sampling, answers: Answers, *, max_turn_len: int | None, stream: str
    ) -> None:
        self.engine, self.sampling, self.answers = engine, sampling, answers
        self.max_turn_len, self.stream = max_turn_len, stream
        self.running: dict[str, Rollout] = {}
        """By request."""
        self.waiting: dict[tuple[int, int], Rollout] = {}
        """By uid and index."""
        self.arrived: list[Answer] = []
        """Of some of those."""
        self.num_steps = 0
        """Since the last look for answers, or since an episode waits."""

    @property
    def left(self) -> list[Rollout]:
        return [*self.running.values(), *self.waiting.values()]

    def begin(self, rollout: Rollout) -> None:
        """An episode that is new, or was interrupted."""
        self._wait(rollout)
        if self.engine.is_leader:
            self.answers.begin(rollout)

    def _wait(self, rollout: Rollout) -> None:
        self.waiting[rollout.sample.uid, rollout.index] = rollout

    def _end(self, rollout: Rollout) -> None:
        """An episode that has no room for more."""
        self._wait(replace(rollout, finish_reason="ending"))
        if self.engine.is_leader:
            self.answers.end(rollout)

    def _submit(self, rollout: Rollout) -> None:
        """Begins an episode's next turn, or goes on with one that was interrupted."""
        room = self.sampling.max_response_len - len(rollout.response_ids)
        if self.max_turn_len is not None:
            room = min(room, self.max_turn_len - _len_of_open_turn(rollout))
        self.running[self.engine.submit_turn(rollout, self.sampling, self.stream, max_turn_len=room)] = rollout

    def step(self) -> None:
        """A step of the engine, where one runs; the episodes whose turns end in it wait from then on."""
        if not self.running:
            return
        for output in self.engine.step():
            [response] = output.outputs
            assert response.finish_reason in ("stop", "length"), f"the engine ended a turn by {response.finish_reason}"
            before = self.running.pop(output.request_id)
            rollout = _sampled(before, response.token_ids, response.logprobs)
            if before.spans:  # what the engine has computed of it already lies in its cache, or nearly
                num_cached = float(output.num_cached_tokens or 0)
                num_before = len(before.sample.prompt_ids) + len(before.response_ids)
                rollout = _measured(rollout, {"prompt_tokens": float(num_before), "cached_tokens": num_cached})
            if response.finish_reason == "length":  # nobody sampled an end of this turn: nothing can follow it
                self._end(rollout)
                continue
            self._wait(rollout)
            if self.engine.is_leader:
                self.answers.ask(rollout)

    def collect(self, join: Join) -> bool:
        """Takes the answers that have come, and waits a little where there is nothing else to do; whether to go on."""
        if not self.waiting or (join == "round" and self.running):
            self.num_steps = 0
            return True
        self.num_steps += 1
        must_wait = not self.running or join == "step"
        if must_wait or self.num_steps >= MOST_STEPS * len(self.running) / (len(self.running) + len(self.waiting)):
            self.num_steps, own = 0, []
            if self.engine.is_leader:
                own = self.answers.take(wait_s=WAIT_S if must_wait else 0.0)
            self.arrived += self.engine.of_leader(own)
        unanswered = len(self.waiting) - len(self.arrived)
        return not must_wait or unanswered == 0 or (join == "arrival" and bool(self.arrived))

    def go_on(self) -> Iterator[Rollout]:
        """Lets the answered episodes go on, in the order of uid and index; those that end."""
        arrived, self.arrived = sorted(self.arrived, key=lambda it: (it.uid, it.index)), []
        for answer in arrived:
            yield from self._go_on(_answered(self.waiting.pop((answer.uid, answer.index)), answer), answer)

    def _go_on(self, rollout: Rollout, answer: Answer) -> Iterator[Rollout]:
        if answer.finish_reason is not None:
            yield replace(rollout, finish_reason=answer.finish_reason, score=answer.score)
            return
        left = self.sampling.max_response_len - len(rollout.response_ids) - len(answer.ids)
        if answer.ids and left < min(LEAST_TURN, self.sampling.max_response_len // 4):
            self._end(rollout)
            return
        self._submit(_observed(rollout, answer) if answer.ids else rollout)

    def interrupt(self) -> Iterator[Rollout]:
        """The episodes that are left, as they are."""
        found = self.engine.unfinished() if self.running else []
        assert {request for request, _, _ in found} == set(self.running), "the engine lost a request"
        self.engine.abort(list(self.running))
        for request, ids, log_probs in found:
            rollout = self.running.pop(request)
            yield replace(_sampled(rollout, ids, log_probs) if ids else rollout, finish_reason="unfinished")
        for rollout in self.waiting.values():
            waits = "waiting" if rollout.response_ids else "unfinished"
            yield rollout if rollout.finish_reason == "ending" else replace(rollout, finish_reason=waits)
        self.waiting = {}


def _len_of_open_turn(rollout: Rollout) -> int:
    """Tokens of the turn that an episode was interrupted in; 0: a turn begins."""
    return rollout.spans[-1] if len(rollout.spans) % 2 else 0


def _sampled(rollout: Rollout, ids: Sequence[int], log_probs: object) -> Rollout:
    """The episode with what was sampled of a turn, its first part or a further one."""
    spans = rollout.spans
    reported = None if log_probs is None else log_probs.logprobs
    return replace(
        rollout,
        response_ids=[*rollout.response_ids, *ids],
        rollout_log_probs=_longer(rollout.rollout_log_probs, reported),
        spans=[*spans[:-1], spans[-1] + len(ids)] if len(spans) % 2 else [*spans, len(ids)],
    )


def _observed(rollout: Rollout, answer: Answer) -> Rollout:
    spans = [*rollout.spans, len(answer.ids)]
    return replace(
        rollout,
        response_ids=[*rollout.response_ids, *answer.ids],
        rollout_log_probs=_longer(rollout.rollout_log_probs, [0.0] * len(answer.ids)),
        spans=spans,
        observed=[*rollout.observed, *((len(spans) // 2, dict(message)) for message in answer.messages)],
    )


def _answered(rollout: Rollout, answer: Answer) -> Rollout:
    """The episode with what its answer says of it."""
    rollout = _measured(rollout, answer.metrics)
    if answer.reward is not None:
        at_last = (len(rollout.response_ids) - 1, answer.reward)
        rollout = replace(rollout, turn_rewards=[*rollout.turn_rewards, at_last])
    if answer.told is not None:
        rollout = replace(rollout, answers=[*rollout.answers, dict(answer.told)])
    if answer.prompt_ids is not None:
        sample = replace(rollout.sample, prompt_ids=list(answer.prompt_ids))
        rollout = replace(rollout, sample=sample, observed=[(0, dict(message)) for message in answer.messages])
    return rollout


def _measured(rollout: Rollout, metrics: Mapping[str, float]) -> Rollout:
    sums = {name: rollout.metrics.get(name, 0.0) + value for name, value in metrics.items()}
    return replace(rollout, metrics={**rollout.metrics, **sums})


def _longer(log_probs: list[float] | None, more: Sequence[float] | None) -> list[float] | None:
    return None if log_probs is None or more is None else [*log_probs, *more]
