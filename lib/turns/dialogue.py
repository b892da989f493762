"""Answers a replica's episodes: their environments say what follows a turn, and it becomes ids.

An episode that was interrupted goes on by replay: its environment is reset with the same seed and gets the turns that
it had been given before.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lib.data.chat_template import ChatTemplate
from lib.engine.conversations import Answer
from lib.engine.engine import request_seed
from lib.turns.appended import ASKED, Appender
from lib.turns.config import Format, TurnsConfig
from lib.turns.hub import Hub, Result
from lib.turns.kinds import Kinds
from lib.turns.tool_calls import read_calls, schemas_by_name
from lib.types import Rollout, Score

OWN_METRICS = (
    "calls", "bad_calls", "tool_errors", "tool_timeouts", "truncated_observations", "replayed", "prompt_tokens",
    "cached_tokens", "per_episode", "calls_per_episode", "excluded", "max_turns_ratio", "cached_prompt_ratio",
    "waiting_share", "tool_latency_s/p50", "tool_latency_s/p99", "tool_latency_s/max",
)  # fmt: skip
"""What is counted here, or made of that in lib/turns/conversations.py: environments cannot give it."""
LEFT_OUT = "\n[{} tokens left out]\n"
CHARS_PER_TOKEN = 32  # of a text that is cut: what is far beyond need not be tokenised


@dataclass
class _Episode:
    """What has been asked about an episode."""

    key: int
    """Its name in the hub, where answers to one that was interrupted may still come."""
    rollout: Rollout
    kind: str | None
    """Its environment's name; None: nothing answers, it is over after one turn."""
    tools: list[dict[str, Any]]
    num_replayed: int = 0
    """Answers that are still to come and known already."""
    finish_reason: str | None = None
    """Why it is over; then its score is awaited."""
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Of the turn that is being answered, as people are told of them."""
    told: dict[str, Any] | None = None
    """All four for the next answer."""


class Dialogue:
    """The `Answers` of `converse`."""

    def __init__(
        self, hub: Hub, cfg: TurnsConfig, kinds: Kinds, template: ChatTemplate, *, format: Format | None,
        stop_ids: Sequence[int], max_prompt_len: int, split_prompts: bool, seed: int, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`format`: how tool calls are written; None: there are no tools. `split_prompts`: control tokens that the
        dataset's prompts spell are ordinary text. `say` tells people, once, what a tool raised."""
        self.hub, self.cfg, self.kinds, self.template, self.format = hub, cfg, kinds, template, format
        self.appender, self.stop_ids = Appender(template, stop_ids), set(stop_ids)
        begun = template.render([ASKED]).rpartition(ASKED["content"])[2] if format is not None else ""
        self._thinking = "<think>" if "<think>" in begun.rpartition("</think>")[2] else ""
        """Begun by the prompt: a turn goes on with it."""
        self.max_prompt_len, self.split_prompts, self.seed, self.say = max_prompt_len, split_prompts, seed, say
        self.seconds: list[float] = []
        """That calls of `step` took."""
        self.waited_s = 0.0
        """In which there was nothing to do but to wait for answers."""
        self.stream = "train"
        """Of the prompts that are asked about, as in `Sampler.generate`."""
        self._episodes: dict[tuple[int, int], _Episode] = {}
        """By uid and index."""
        self._open: dict[int, _Episode] = {}
        """The same by key."""
        self._num_begun = 0
        self._ready: list[Answer] = []
        self._told: set[str] = set()

    # ---- What is asked ----

    def begin(self, rollout: Rollout) -> None:
        """Resets the environment, and gives it again what it had been given."""
        sample = rollout.sample
        kind = self.kinds.of(sample.agent_name, sample.extra_info)
        self._num_begun += 1
        episode = _Episode(self._num_begun, rollout, kind, self.kinds.tools(kind, sample.extra_info))
        self._episodes[sample.uid, rollout.index] = self._open[episode.key] = episode
        if kind is not None:
            # The uids of training and of validation are the same numbers, their tasks must not be. Whatever else
            # samples a training prompt, a greedy baseline, is given the same task.
            stream = "validation environment" if self.stream == "validation" else "environment"
            seed = request_seed(self.seed, sample.uid, stream=stream)
            self._call(episode, "reset", {"kind": kind, "row": self.kinds.row(sample), "seed": seed})
        turns = rollout.sampled_turns if rollout.response_ids else []
        is_answered = [turn[-1] in self.stop_ids for turn in turns]
        num_answered = len(rollout.spans) // 2 if rollout.finish_reason != "ending" else sum(is_answered)
        for turn in range(num_answered if kind is not None else 0):
            self._call(episode, "step", self._reply(episode, turns[turn], turn))
            episode.num_replayed += 1
        if rollout.finish_reason == "waiting":
            self.ask(rollout)
        elif rollout.finish_reason == "ending":
            self.end(rollout)
        elif kind is None:
            self._ready.append(Answer(uid=sample.uid, index=rollout.index))

    def ask(self, rollout: Rollout) -> None:
        """Gives the environment the last turn."""
        episode = self._episodes[rollout.sample.uid, rollout.index]
        episode.rollout = rollout
        if episode.kind is None:
            self._over(episode, "stop")
            return
        turns = rollout.sampled_turns
        reply = self._reply(episode, turns[-1], len(turns) - 1)
        episode.metrics["calls"] = float(sum(call["count"] for call in reply["calls"]))
        shown = ("name", "arguments", "error")
        episode.calls = [{name: call[name] for name in shown if call[name] is not None} for call in reply["calls"]]
        self._call(episode, "step", reply)

    def end(self, rollout: Rollout) -> None:
        """Asks for the score of an episode that has no room for more."""
        episode = self._episodes[rollout.sample.uid, rollout.index]
        episode.rollout = rollout
        self._finish(episode, "length")

    def forget(self) -> None:
        """Ends all episodes: what is asked from now on belongs to others."""
        for episode in list(self._episodes.values()):
            self._close(episode)
        self._ready = []

    def _call(self, episode: _Episode, verb: str, payload: Any = None) -> None:
        self.hub.call(verb, episode.key, payload)

    def _finish(self, episode: _Episode, finish_reason: str) -> None:
        episode.finish_reason = finish_reason
        if episode.kind is None:
            self._over(episode, finish_reason)
        else:
            self._call(episode, "score")

    def _reply(self, episode: _Episode, ids: list[int], turn: int) -> dict[str, Any]:
        """A turn as environments get it."""
        text = self.template.tokenizer.decode(ids[:-1] if ids[-1] in self.stop_ids else ids)
        calls = []
        if self.format is not None and episode.tools:
            text, calls = read_calls(self._thinking + text, self.format, schemas_by_name(episode.tools))
            text = text.removeprefix(self._thinking)
        most = self.cfg.max_calls
        told = [{**vars(call)} for call in calls[:most]]
        if more := calls[most:]:  # told at once: a turn may have hundreds
            error = f"only {most} calls of a turn are made, {len(more)} more were not"
            told.append({**vars(more[0]), "error": error, "count": len(more)})
        return {"text": self.template.without_control(text), "calls": told, "turn": turn, "finish_reason": "stop"}

    # ---- What is answered ----

    def take(self, *, wait_s: float) -> list[Answer]:
        """The answers that have come since the last call; waits for one where there is none."""
        start = time.monotonic()
        for result in self.hub.take(wait_s=0.0 if self._ready else wait_s):
            if result.key in self._open:
                self._read(self._open[result.key], result)
        if self.hub.num_outgrown:
            self._tell("memory", "workers of --turns.path held ever more memory and are replaced; mend what it keeps")
        if wait_s:
            self.waited_s += time.monotonic() - start
        ready, self._ready = self._ready, []
        return ready

    def _read(self, episode: _Episode, result: Result) -> None:
        if result.was_replayed:
            episode.metrics["replayed"] = 1.0 - episode.rollout.metrics.get("replayed", 0.0)
        if result.error is not None:
            failed = Score(score=None, error=f"{episode.kind}.{result.verb}: {result.error}")
            self._over(episode, "error", score=failed)
        elif result.verb == "reset":
            self._read_reset(episode, result.value)
        elif result.verb == "score":
            self._over(episode, episode.finish_reason, score=result.value and Score(**result.value))
        elif episode.num_replayed:
            episode.num_replayed -= 1
            self._go_on_if_replayed(episode)
        else:
            self._read_step(episode, result)

    def _read_reset(self, episode: _Episode, value: Mapping[str, Any]) -> None:
        if episode.rollout.response_ids:
            self._go_on_if_replayed(episode)
            return
        prompt_ids, error = None, None
        if value["done"]:
            error = "it was done before the first turn"
        elif value["messages"]:
            try:
                prompt_ids = self.prompt_ids(episode.rollout.sample.messages, value["messages"], episode.tools)
                if len(prompt_ids) > self.max_prompt_len:
                    error = (
                        f"with what it returned the prompt has {len(prompt_ids)} tokens, above --data.max-prompt-len "
                        f"{self.max_prompt_len}"
                    )
            except Exception as problem:  # the template's own kinds
                error = f"the chat template refuses what it returned: {problem}"
        if error is not None:
            self._over(episode, "error", score=Score(score=None, error=f"{episode.kind}.reset: {error}"))
        else:
            self._answer(episode, prompt_ids=prompt_ids, messages=value["messages"])

    def prompt_ids(self, messages: Sequence[Mapping], added: Sequence[Mapping], tools: Sequence[Mapping]) -> list[int]:
        """A prompt with messages behind it, whose control tokens are ordinary text. Raises what the template raises."""
        asked, added = [dict(it) for it in messages], self.template.mask([dict(it) for it in added])
        asked = self.template.mask(asked) if self.split_prompts else asked
        return self.template.encode_masked(self.template.render([*asked, *added], tools=tools))

    def _go_on_if_replayed(self, episode: _Episode) -> None:
        if not episode.num_replayed and episode.rollout.finish_reason == "unfinished":
            self._answer(episode)

    def _read_step(self, episode: _Episode, result: Result) -> None:
        self.seconds.append(result.seconds)
        for note in result.notes:
            kind_and_place = note.partition(":")[0] + note.rpartition(" [")[2]  # the text may be the model's
            self._tell(kind_and_place, f"a tool failed, the model is told so: {note}")
        value = result.value
        for name in value["metrics"]:
            if name in OWN_METRICS:
                self._tell(name, f"{episode.kind} measures {name}, a name of ours: it is left out; rename it")
        measured = {name: number for name, number in value["metrics"].items() if name not in OWN_METRICS}
        counts = {name: float(getattr(result, name)) for name in ("bad_calls", "tool_errors", "tool_timeouts")}
        episode.metrics |= {**measured, **counts}
        episode.reward = value["reward"]
        episode.told = {"calls": episode.calls, "seconds": round(result.seconds, 6), **value["given"]}
        if value["done"]:
            self._finish(episode, "stop")
        elif len(episode.rollout.sampled_turns) >= self.cfg.max_turns:
            self._finish(episode, "turns")
        else:
            try:
                messages, ids, was_cut = self._observation(value["messages"])
            except Exception as problem:  # the template's own kinds
                error = f"{episode.kind}.step: the chat template refuses what it returned: {problem}"
                self._over(episode, "error", score=Score(score=None, error=error))
                return
            episode.metrics["truncated_observations"] = float(was_cut)
            self._answer(episode, ids=ids, messages=messages)

    def _observation(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[int], bool]:
        """Messages as the model sees them, their ids with what the template writes around them, whether any was cut."""
        most, whole = self.cfg.max_observation_len, [dict(message) for message in messages]
        if sum(len(message["content"]) for message in whole) <= CHARS_PER_TOKEN * most:
            ids = self.appender.ids(whole)
            if len(ids) <= most:  # then so is the text alone, whose tokens need not be counted
                return whole, ids, False
        shorter, was_cut = self._cut(whole)
        return shorter, self.appender.ids(shorter), was_cut

    def _tell(self, what: str, warning: str) -> None:
        """Warns, once."""
        if what not in self._told and len(self._told) < 20:
            self._told.add(what)
            self.say(f"warning: {warning}")

    def _cut(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
        """The messages with at most --turns.max-observation-len tokens of text; whether any was cut."""
        left, cut = self.cfg.max_observation_len, [dict(message) for message in messages]
        lens = [self._len(message["content"]) for message in messages]
        was_cut = False
        order = sorted(range(len(lens)), key=lens.__getitem__)
        for done, place in enumerate(order):  # the shortest first: what they leave is the others'
            share = left // (len(order) - done)
            if lens[place] > share:
                cut[place]["content"], was_cut = self._shortened(cut[place]["content"], share), True
            left -= min(lens[place], share)
        return cut, was_cut

    def _len(self, text: str) -> int:
        most = CHARS_PER_TOKEN * self.cfg.max_observation_len
        return len(text) if len(text) > most else len(self.template.encode_text(text))

    def _shortened(self, text: str, most: int) -> str:
        """The text without its middle, of at most so many tokens."""
        half = CHARS_PER_TOKEN * most // 2
        text = text if len(text) <= 2 * half else text[:half] + text[-half:]
        ids, kept = self.template.encode_text(text), most
        decode = self.template.tokenizer.decode
        while kept > 1:
            head, tail = ids[: kept // 2], ids[len(ids) - kept // 2 :]
            shorter = decode(head) + LEFT_OUT.format(len(ids) - len(head) - len(tail)) + decode(tail)
            if (over := len(self.template.encode_text(shorter)) - most) <= 0:
                return shorter
            kept -= max(over, 2)
        return decode(ids[:most])

    def _answer(self, episode: _Episode, **answer: Any) -> None:
        uid, index = episode.rollout.sample.uid, episode.rollout.index
        of_turn = {"reward": episode.reward, "metrics": episode.metrics, "told": episode.told}
        self._ready.append(Answer(uid=uid, index=index, **of_turn, **answer))
        episode.reward, episode.metrics, episode.told = None, {}, None

    def _over(self, episode: _Episode, finish_reason: str, *, score: Score | None = None) -> None:
        self._answer(episode, finish_reason=finish_reason, score=score)
        self._close(episode)

    def _close(self, episode: _Episode) -> None:
        del self._open[episode.key], self._episodes[episode.rollout.sample.uid, episode.rollout.index]
        if episode.kind is not None:
            self._call(episode, "close")
