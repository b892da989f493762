r"""Competition mathematics: does math-verify find the response's answer equal to the ground truth?

math-verify reads LaTeX and plain expressions and compares them with sympy, which some answers keep busy for ever
(`9^{9^{9^9}}`). Its own time limits are alarms that user code can swallow, so they are off: the worker process that
runs this file is killed instead (lib/scoring.py).
"""

import logging
from functools import lru_cache
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict) -> dict[str, Any]:
    r"""{score: 1.0 or 0.0, acc: bool, pred: the answer as found, "" without one}.

    `ground_truth` is the answer without `\boxed{}`. Raises ValueError when math-verify reads nothing in it.
    """
    from math_verify import verify

    gold = _parse_gold(str(ground_truth))
    if not gold:
        raise ValueError(f"math-verify finds no expression in the ground truth {ground_truth!r}")
    found = _parse(solution_str)
    correct = bool(found) and verify(gold, found, timeout_seconds=None)
    return {"score": float(correct), "acc": bool(correct), "pred": str(found[-1]) if found else ""}


@lru_cache(maxsize=64)  # the responses of a group share their ground truth
def _parse_gold(ground_truth: str) -> list:
    return _parse(f"\\boxed{{{ground_truth}}}")


def _parse(text: str) -> list:
    """[sympy expression, its text] of the answer in `text`, or [] without one."""
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    return parse(text, parsing_timeout=None)
