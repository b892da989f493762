"""An episode as people are shown it: turn by turn, what was sampled apart from what was observed.

A list of entries in order, each with a `role`:
assistant   text (as sampled, special tokens too), num_tokens; where it was answered answer_s (seconds) and calls
            (name, arguments, error: why it could not be made); where the environment gave one for this turn, reward
tool, user  text, name (the tool's): what was observed, as the model was told it
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from lib.types import Rollout


def turns_of(rollout: Rollout, tokenizer: Any) -> list[dict[str, Any]]:
    """The entries of an episode; none for a response that nothing could have answered."""
    entries = []
    for first, ids, told, observed in _turns(rollout):
        entries.append({"role": "assistant", "text": tokenizer.decode(ids), "num_tokens": len(ids)})
        entries[-1] |= about_turn(rollout, first + len(ids) - 1, told)
        entries += observations(told, observed, tokenizer)
    return entries


def about_turn(rollout: Rollout, last: int, told: dict[str, Any] | None) -> dict[str, Any]:
    """What came of a turn, by the place of its last token: its answer's seconds, its calls, its reward."""
    answered = {} if told is None else {"answer_s": told["seconds"], "calls": told["calls"]}
    return answered | {"reward": reward for place, reward in rollout.turn_rewards if place == last}


def observations(told: dict[str, Any] | None, ids: list[int], tokenizer: Any) -> list[dict[str, Any]]:
    """The entries of what was observed after a turn."""
    if not ids:
        return []
    assert told is not None, "something was observed that nobody is told of"
    names = [{"name": it["name"]} if it.get("name") else {} for it in told["messages"]]
    return [
        {"role": it["role"], **name, "text": it["content"]} for it, name in zip(told["messages"], names, strict=True)
    ]


def _turns(rollout: Rollout) -> Iterator[tuple[int, list[int], dict[str, Any] | None, list[int]]]:
    """Of each turn the place of its first token, its ids, what is told of its answer, and the ids observed after it."""
    ends = [0, *accumulate(rollout.spans)]
    spans = [(begin, rollout.response_ids[begin:end]) for begin, end in zip(ends, ends[1:], strict=False)]
    for turn, (first, ids) in enumerate(spans[::2]):
        told = rollout.answers[turn] if turn < len(rollout.answers) else None
        observed = spans[2 * turn + 1][1] if 2 * turn + 1 < len(spans) else []
        yield first, ids, told, observed
