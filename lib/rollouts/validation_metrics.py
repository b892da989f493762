"""val-core/* and val-aux/* of scored responses. docs/metrics.md defines each number; names are verl's."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

ScoredResponse = tuple[str, int, Mapping[str, float | str | bool]]
"""data_source, prompt uid, and `reward` with what else the reward function returned; `pred` is the extracted answer."""


MAX_VARIABLES = 100  # of a run


def limit_variables(responses: Sequence[ScoredResponse], known: set[str]) -> tuple[list[ScoredResponse], int]:
    """The responses without the numbers whose names are not in `known`, and how many names that leaves out.

    First `known` gets the names that are new, those that most responses have first, until it has MAX_VARIABLES: a
    reward function may make names of a response's text, and each becomes columns of metrics.
    """
    names = Counter(name for _, _, values in responses for name, value in values.items() if not isinstance(value, str))
    for name in sorted(names.keys() - known, key=lambda name: (-names[name], name))[: MAX_VARIABLES - len(known)]:
        known.add(name)
    kept = [
        (source, uid, {name: value for name, value in values.items() if isinstance(value, str) or name in known})
        for source, uid, values in responses
    ]
    return kept, len(names.keys() - known)


def validation_metrics(responses: Sequence[ScoredResponse], *, largest: int) -> dict[str, float]:
    """val-core/* and val-aux/* of all ranks' scored responses, per data source and variable, averaged over prompts.

    Variables are `reward` and every number or bool beside it. With N responses per prompt (`largest`, of which some may
    have no score): mean@N; for N > 1 also std@N and, for n = 2, 4, 8, ... below N and for N itself, best@n, worst@n and
    (where there are answers) maj@n: mean and standard deviation over 1000 draws of n responses with replacement (numpy
    seed 42). The core variable of a source is `acc` if there is one, else `reward`.
    """
    result = {}
    for source in sorted({source for source, _, _ in responses}):
        prompts: dict[int, list[Mapping[str, float | str | bool]]] = defaultdict(list)
        for _, uid, values in (response for response in responses if response[0] == source):
            prompts[uid].append(values)
        values_of_all = [values for group in prompts.values() for values in group]
        names = {name for values in values_of_all for name, value in values.items() if not isinstance(value, str)}
        names.discard("pred")  # an answer, even where it is a number
        core = "acc" if "acc" in names else "reward"
        for name in sorted(names):
            for metric, value in _variable_metrics(prompts.values(), name, largest).items():
                is_core = name == core and re.fullmatch(rf"(mean|best|maj)@{largest}(/.*)?", metric)
                result[f"{'val-core' if is_core else 'val-aux'}/{source}/{name}/{metric}"] = value
    return result


def _variable_metrics(prompts: Iterable[Sequence[Mapping[str, Any]]], name: str, largest: int) -> dict[str, float]:
    """mean@N and its companions of one variable of one source, averaged over prompts."""
    per_prompt: dict[str, list[float]] = defaultdict(list)
    sizes = [2**k for k in range(1, largest.bit_length()) if 2**k < largest] + [largest]
    for responses in prompts:
        having = [values for values in responses if not isinstance(values.get(name, ""), str)]
        if not having:
            continue
        values, preds = np.array([float(values[name]) for values in having]), [values.get("pred") for values in having]
        per_prompt[f"mean@{largest}"].append(values.mean())
        if largest == 1:
            continue
        per_prompt[f"std@{largest}"].append(values.std())
        for n in sizes:
            draws = _draws(len(values), n)  # (1000, n)
            picked = {f"best@{n}": values[draws].max(axis=1), f"worst@{n}": values[draws].min(axis=1)}
            if None not in preds:
                picked[f"maj@{n}"] = _majority_values(values, preds, draws)
            for metric, of_draws in picked.items():
                per_prompt[f"{metric}/mean"].append(of_draws.mean())
                per_prompt[f"{metric}/std"].append(of_draws.std())
    return {metric: float(np.mean(values)) for metric, values in per_prompt.items()}


@lru_cache(maxsize=64)
def _draws(size: int, n: int) -> np.ndarray:
    """(1000, n) indices below `size`, drawn with replacement; the same for every prompt."""
    return np.random.RandomState(42).choice(size, size=(1000, n), replace=True)


def _majority_values(values: np.ndarray, preds: Sequence[Any], draws: np.ndarray) -> np.ndarray:
    """(draws,) the value of each draw's most frequent answer; of equally frequent ones, of the first drawn."""
    answers = np.unique([str(pred) for pred in preds], return_inverse=True)[1][draws]  # (draws, n)
    counts = (answers[:, :, None] == answers[:, None, :]).sum(axis=2)  # (draws, n), how often the answer was drawn
    first = counts.argmax(axis=1)  # argmax takes the first of equals
    return values[draws[np.arange(len(draws)), first]]
