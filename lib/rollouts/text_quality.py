"""Whether responses repeat themselves or are garbled, whatever they score: val-aux/SOURCE/repetition and garbled."""

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence

from lib.types import Rollout

N_GRAM = 4
GARBLED = ("Cc", "Cn", "Co", "Cs")
"""Unicode's categories of control characters, unassigned and private ones, and halves of surrogate pairs."""

Quality = tuple[str, int, dict[str, float]]
"""data_source, prompt uid, and a response's numbers by name."""


def text_quality(rollout: Rollout, text: str) -> Quality:
    """A response's repetition and garbled share; `text` is what reward functions see of it."""
    found = {"repetition": repetition(rollout.response_ids), "garbled": garbled(text)}
    return rollout.sample.data_source, rollout.sample.uid, found


def repetition(token_ids: Sequence[int]) -> float:
    """The share of a response's 4-grams of tokens that occurred in it before: 1 - distinct / all. 0 for fewer than 4
    tokens.

    seq-rep-4 of Welleck et al. 2020 (arXiv:1908.04319).
    """
    grams = [tuple(token_ids[at : at + N_GRAM]) for at in range(len(token_ids) - N_GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def garbled(text: str) -> float:
    """The share of characters that no writer means: U+FFFD (bytes that are no UTF-8), control characters other than
    newline, carriage return and tab, unassigned and private ones. 0 for an empty text."""
    wrong = sum(count for sign, count in Counter(text).items() if _is_garbled(sign))
    return wrong / len(text) if text else 0.0


def _is_garbled(sign: str) -> bool:
    return sign == "\ufffd" or (unicodedata.category(sign) in GARBLED and sign not in "\n\r\t")


def quality_metrics(responses: Sequence[Quality], *, n: int) -> dict[str, float]:
    """val-aux/SOURCE/{repetition,garbled}/mean@N of all ranks' responses, scored or not, averaged over prompts."""
    prompts: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for source, uid, values in responses:
        for name, value in values.items():
            prompts[source, name][uid].append(value)
    return {
        f"val-aux/{source}/{name}/mean@{n}": sum(sum(of_prompt) / len(of_prompt) for of_prompt in found.values())
        / len(found)
        for (source, name), found in sorted(prompts.items())
    }
