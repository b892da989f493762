"""An episode as people are shown it: turn by turn, what was sampled apart from what was observed.

A list of entries in order, each with a `role`:
assistant   content (as sampled, special tokens too), num_tokens; where it was answered answer_s (seconds) and calls
            (name, arguments, error: why it could not be made); where the environment gave one for this turn, reward;
            where classes of verl's shapes gave some, lists tool_rewards and turn_scores
tool, user  content, name (the tool's): what was observed, as the model was told it
"""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from lib.data.tokenizer import decode
from lib.types import Rollout

OF_VERL = ("tool_rewards", "turn_scores")
OF_THE_CACHE = ("prompt_tokens", "cached_tokens")
"""Measured numbers that say how this launch sampled, not what."""


def turns_of(rollout: Rollout, tokenizer: Any) -> list[dict[str, Any]]:
    """The entries of an episode; none for a response that nothing could have answered."""
    return described(rollout, lambda begin, end: _text(tokenizer, rollout.response_ids[begin:end]))


def whole_turns_of(rollout: Rollout, tokenizer: Any) -> list[dict[str, Any]]:
    """The entries for who has the dataset's prompt and no tokenizer: first what the environment's reset said, and with
    each turn its `text`, without special tokens, as reward functions see it."""

    def describe(begin: int, end: int) -> dict[str, Any]:
        ids = rollout.response_ids[begin:end]
        return {**_text(tokenizer, ids), "text": decode(tokenizer, ids)}

    begun = [_observed(message) for after, message in rollout.observed if after == 0]
    return [*begun, *described(rollout, describe)]


def metrics_of(rollout: Rollout) -> dict[str, float]:
    """What was counted and measured of an episode, but for what says how this launch sampled."""
    return {name: value for name, value in rollout.metrics.items() if name not in OF_THE_CACHE}


def described(rollout: Rollout, describe: Callable[[int, int], dict[str, Any]]) -> list[dict[str, Any]]:
    """The same, with what `describe` says of sampled tokens by their places (begin, end) in place of their content."""
    ends = [0, *accumulate(rollout.spans)]
    rewards = dict(rollout.turn_rewards)
    entries: list[dict[str, Any]] = []
    for turn, (begin, end) in enumerate(zip(ends[::2], ends[1::2], strict=False)):
        told = rollout.answers[turn] if turn < len(rollout.answers) else None
        about = {} if told is None else {"answer_s": told["seconds"], "calls": told["calls"]}
        about |= {name: told[name] for name in OF_VERL if told is not None and name in told}
        about |= {"reward": rewards[end - 1]} if end - 1 in rewards else {}
        entries.append({"role": "assistant", **describe(begin, end), **about})
        entries += [_observed(message) for after, message in rollout.observed if after == turn + 1]
    return entries


def _text(tokenizer: Any, ids: list[int]) -> dict[str, Any]:
    return {"content": tokenizer.decode(ids), "num_tokens": len(ids)}


def _observed(message: dict[str, Any]) -> dict[str, Any]:
    named = {"name": message["name"]} if message.get("name") else {}
    return {"role": message["role"], **named, "content": message["content"]}
