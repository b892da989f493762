r"""Competition mathematics: does math-verify find the response's answer equal to the ground truth?

math-verify reads LaTeX and plain expressions and compares them with sympy, which some answers keep busy for ever
(`9^{9^{9^9}}`). Its own time limits are alarms that user code can swallow, so they are off: the worker process that
runs this file is killed instead (lib/rewards/scoring.py).
"""

import logging
from functools import lru_cache
from typing import Any

from lib.rewards.numbers import write_number


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict) -> dict[str, Any]:
    r"""{score: 1.0 or 0.0, acc: bool, pred: the answer as found, "" without one}.

    `ground_truth` is the answer without `\boxed{}`. Raises ValueError when there is none (null, NaN), or math-verify
    reads nothing in it.
    """
    from math_verify import verify

    text = _as_text(ground_truth)
    missing = ground_truth is None or text.lower() == "nan"  # math-verify would read products of letters
    if missing or not (gold := _parse_gold(text)):
        raise ValueError(f"math-verify finds no expression in the ground truth {ground_truth!r}")
    found = _parse(solution_str)
    correct = bool(found) and verify(gold, found, timeout_seconds=None)
    return {"score": float(correct), "acc": bool(correct), "pred": str(found[-1]) if found else ""}


def write_answer(ground_truth: Any) -> str:
    r"""A response that is right: `\boxed{72}`."""
    return f"\\boxed{{{_as_text(ground_truth)}}}"


def _as_text(ground_truth: Any) -> str:
    return write_number(ground_truth) if isinstance(ground_truth, float) else str(ground_truth)


@lru_cache(maxsize=64)  # the responses of a group share their ground truth
def _parse_gold(ground_truth: str) -> list:
    return _parse(f"\\boxed{{{ground_truth}}}")


def _parse(text: str) -> list:
    """[sympy expression, its text] of the answer in `text`, or [] without one."""
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    return parse(text, parsing_timeout=None)
