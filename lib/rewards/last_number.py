"""Is the last number of a response the ground truth? `recipes/prepare_arithmetic_words.py` writes such problems.

The last one, because the first teaches a model to echo the problem: in "23 + 48 = 71" only the last is an answer.
"""

import re
from typing import Any

from lib.rewards.numbers import same_number, write_number

PREFIX = "arithmetic_words/"
DIFFICULTIES = ("sums_1_digit", "sums_2_digits", "products_1_digit", "word_problems", "products_2_digits")
"""After the prefix, the data sources of that recipe."""
NUMBER = re.compile(r"(?<![\d.])-?\d+(?:,\d{3})*(?:\.\d+)?", re.ASCII)


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict) -> dict[str, Any]:
    """{score, acc, pred: the last number as written, "" without one}: 1 if it is the ground truth's number, else 0.

    7, 7.0, 007 and "is 7." are the same, 1,234 is 1234, and the minus of 9-2 belongs to no number.
    """
    found = NUMBER.findall(solution_str)
    pred = found[-1] if found else ""
    acc = float(same_number(pred, ground_truth))
    return {"score": acc, "acc": acc, "pred": pred}


def write_answer(ground_truth: Any) -> str:
    """A response that is right: `72`."""
    return write_number(ground_truth)
