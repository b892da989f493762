"""Statistics of n responses a prompt: pass@k, majority vote, and the confidence interval of a mean over prompts."""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations

import numpy as np

SUBSETS = 1000  # of k responses out of n: all of them up to this many, else this many random ones
Z_95 = 1.959964  # half of a standard normal distribution's middle 95 %


def powers_up_to(n: int) -> list[int]:
    """1, 2, 4, ... below n, and n itself: 6 -> [1, 2, 4, 6]."""
    return [2**power for power in range(n.bit_length()) if 2**power < n] + [n]


def pass_at_k(num: int, num_correct: int, k: int) -> float:
    """The probability that one of k responses at least is correct, drawn without replacement from `num` (>= k).

    An unbiased estimate of pass@k: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, equation 1).
    """
    return 1 - math.comb(num - num_correct, k) / math.comb(num, k)


def majority_at_k(values: Sequence[float], answers: Sequence[str | None], k: int) -> float:
    """The expected value of the most frequent answer among k responses, drawn without replacement.

    An answer is worth the mean of the values of all responses that give it. Equally frequent answers win equally often;
    a response without an answer (None) does not vote, and no vote at all is worth 0. Exact up to 1,000 subsets, else
    the mean over 1,000 random ones, which are the same for every prompt and run.
    """
    names = sorted({answer for answer in answers if answer is not None})
    if not names:
        return 0.0
    gives = np.array([[answer == name for name in names] for answer in answers])  # (n, answers)
    worth = np.array(values, dtype=float) @ gives / gives.sum(axis=0)  # (answers,)
    votes = gives[_subsets(len(answers), k)].sum(axis=1)  # (subsets, answers)
    most = votes.max(axis=1, keepdims=True)  # (subsets, 1)
    wins = (votes == most) & (most > 0)
    return float(np.mean(wins @ worth / np.maximum(wins.sum(axis=1), 1)))


@lru_cache(maxsize=64)
def _subsets(n: int, k: int) -> np.ndarray:
    """(subsets, k) places below n, no two alike in a row."""
    if math.comb(n, k) <= SUBSETS:
        return np.array(list(combinations(range(n), k)))
    # Raw bits, sorted: NumPy promises them for all versions, but not the result of its `permutation`.
    return np.argsort(np.random.PCG64([n, k]).random_raw((SUBSETS, n)), axis=1, kind="stable")[:, :k]


def confidence_interval(values: Sequence[float], *, most: int | None = None) -> tuple[float, float]:
    """The 95 % confidence interval of the mean of one value a prompt, prompts being drawn at random.

    Values in [0, 1]: Wilson's score interval (1927), which holds for few prompts and near 0 and 1 too, with the
    effective number of prompts: as many yes-or-no prompts as would give the mean this variance. That is the prompts'
    own number when all values are 0 or 1, and `most`, the number of yes-or-no responses behind the values, at most:
    few prompts may be alike by chance. Other values: mean +- 1.96 standard errors.
    """
    array = np.array(values, dtype=float)
    num, mean, variance = len(array), float(array.mean()), float(array.var())
    if array.min() < 0 or array.max() > 1:
        half = Z_95 * math.sqrt(variance / max(1, num - 1))
        return mean - half, mean + half
    binary = mean * (1 - mean)
    size = num * binary / variance if variance else math.inf
    size = num if not binary or (math.isinf(size) and most is None) else min(size, most or math.inf)
    spread = Z_95**2 / size
    centre = (mean + spread / 2) / (1 + spread)
    half = math.sqrt(binary * spread + spread**2 / 4) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)
