"""Conversations in the engine's loop: turn after turn of many episodes, each as soon as its answer is there.

An episode is a `Rollout` whose ids are only ever appended to: a turn that was sampled, then what was observed. Every
turn is a request of its own, with a seed that follows from the prompt's uid, the episode's index and the number of ids
before it. So how long an answer takes, and what else the engine samples meanwhile, changes no distribution; with `step`
and `round` it does not even change the batches that are computed together, and with them not a bit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from lib.engine.engine import RolloutEngine
from lib.engine.rollout_config import Sampling
from lib.errors import Stopped
from lib.types import Rollout

Join = Literal["arrival", "step", "round"]
"""When an answered episode goes on: at once; in the step in which its turn ended, for which all wait; when no other
episode runs any more."""
LEAST_TURN = 16  # tokens that an observation leaves, or the episode ends before it
POLL_STEPS = 4  # between two exchanges of answers among the ranks of a replica, while episodes run
WAIT_S = 0.25  # for an answer where nothing runs, before it is asked again whether to stop


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What follows a turn of an episode's."""

    uid: int
    index: int
    ids: Sequence[int] = ()
    """To be appended: what was observed, up to where the next turn begins."""
    finish_reason: str | None = None
    """Why the episode ends with this turn; None: it goes on."""
    reward: float | None = None
    """Of the turn; None: none."""


class Answers(Protocol):
    """Who answers. Called on the replica's leader alone."""

    def ask(self, rollout: Rollout, finish_reason: str) -> None:
        """Takes an episode whose last turn ended so; returns at once."""

    def take(self, *, wait_s: float) -> list[Answer]:
        """The answers that have come since the last call; waits for one where there is none."""


def converse(
    engine: RolloutEngine, rollouts: Sequence[Rollout], sampling: Sampling, answers: Answers, *, join: Join,
    max_turn_len: int | None = None, stream: str = "train", stop: Callable[[], bool] = lambda: False,
) -> Iterator[Rollout]:  # fmt: skip
    """The episodes one by one as they end. `rollouts`: new ones, or ones that were interrupted in a turn.

    An episode ends with `stop` or what its answer says; with `length` where a turn reaches `max_turn_len`, or the
    response `sampling.max_response_len`, sampled and observed, or an observation leaves less than 16 tokens of that.
    Executed by all ranks of a replica with the same episodes; `answers` is asked by its leader. `stop` as in
    `RolloutEngine.generate`.
    """
    turns = _Turns(engine, sampling, answers, max_turn_len=max_turn_len, stream=stream)
    should_stop = engine.agreeing(stop)
    try:
        with engine.sampling():
            for rollout in rollouts:
                turns.submit(rollout)
            while turns.running or turns.waiting:
                if should_stop():
                    raise Stopped("while episodes were going on")
                if turns.collect(join):
                    yield from turns.go_on()
                    yield from turns.step()
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

    def submit(self, rollout: Rollout) -> None:
        """Begins the next turn of an episode, or goes on with one that was interrupted."""
        request = self.engine.submit_turn(rollout, self.sampling, self.stream, max_turn_len=self._room(rollout))
        self.running[request] = rollout

    def _room(self, rollout: Rollout) -> int:
        left = self.sampling.max_response_len - len(rollout.response_ids)
        return left if self.max_turn_len is None else min(left, self.max_turn_len)

    def step(self) -> Iterator[Rollout]:
        """A step of the engine, where one runs; the episodes that end in it."""
        if not self.running:
            return
        for output in self.engine.step():
            [response], before = output.outputs, self.running.pop(output.request_id)
            ids, finish_reason = list(response.token_ids), response.finish_reason
            assert finish_reason in ("stop", "length"), f"the engine ended a turn by {finish_reason}"
            reported = None if response.logprobs is None else response.logprobs.logprobs
            rollout = replace(
                before,
                response_ids=[*before.response_ids, *ids],
                rollout_log_probs=_longer(before.rollout_log_probs, reported),
                spans=[*before.spans, len(ids)],
            )
            if finish_reason == "length":  # nobody sampled an end of this turn: nothing can follow it
                yield replace(rollout, finish_reason="length")
                continue
            self.waiting[rollout.sample.uid, rollout.index] = rollout
            if self.engine.is_leader:
                self.answers.ask(rollout, finish_reason)

    def collect(self, join: Join) -> bool:
        """Takes the answers that have come, and waits a little where there is nothing else to do; whether to go on."""
        self.num_steps += 1
        if not self.waiting or (join == "round" and self.running):
            return True
        must_wait = not self.running or join == "step"
        if must_wait or self.engine.tp_size == 1 or self.num_steps % POLL_STEPS == 0:
            own = []
            if self.engine.is_leader:
                own = self.answers.take(wait_s=WAIT_S if must_wait else 0.0)
            self.arrived += self.engine.of_leader(own)
        unanswered = len(self.waiting) - len(self.arrived)
        return not must_wait or unanswered == 0 or (join == "arrival" and bool(self.arrived))

    def go_on(self) -> Iterator[Rollout]:
        """Lets the answered episodes go on, in the order of uid and index; those that end."""
        arrived, self.arrived = sorted(self.arrived, key=lambda it: (it.uid, it.index)), []
        for answer in arrived:
            yield from self._go_on(self.waiting.pop((answer.uid, answer.index)), answer)

    def _go_on(self, rollout: Rollout, answer: Answer) -> Iterator[Rollout]:
        if answer.reward is not None:
            rollout = replace(
                rollout, turn_rewards=[*rollout.turn_rewards, (len(rollout.response_ids) - 1, answer.reward)]
            )
        left = self.sampling.max_response_len - len(rollout.response_ids) - len(answer.ids)
        if answer.finish_reason is not None or left < min(LEAST_TURN, self.sampling.max_response_len // 4):
            yield replace(rollout, finish_reason=answer.finish_reason or "length")
            return
        blank = [0.0] * len(answer.ids)
        self.submit(
            replace(
                rollout,
                response_ids=[*rollout.response_ids, *answer.ids],
                rollout_log_probs=_longer(rollout.rollout_log_probs, blank),
                spans=[*rollout.spans, len(answer.ids)],
            )
        )


def _longer(log_probs: list[float] | None, more: Sequence[float] | None) -> list[float] | None:
    return None if log_probs is None or more is None else [*log_probs, *more]
