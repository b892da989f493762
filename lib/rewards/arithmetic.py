"""The quickstart's task: the sum of two two-digit numbers, and its grader.

A response may work before its answer, which stands after the last comma: 27+48= units 15,75. The typical mistake is to
guess and forget the carry of the units: 65. `recipes/prepare_arithmetic.py` writes the problems,
`recipes/make_tiny_model.py` makes a model with that habit, and GRPO breaks it.
"""

from typing import Any

from lib.rewards.numbers import same_number, write_number

DATA_SOURCE = "arithmetic"
OPERANDS = range(10, 100)


def question(a: int, b: int) -> str:
    """The user's message: `27+48=`."""
    return f"{a}+{b}="


def needs_carry(a: int, b: int) -> bool:
    """True where the units sum to ten or more."""
    return a % 10 + b % 10 >= 10


def sum_without_carry(a: int, b: int) -> int:
    """The sum of someone who forgets to carry from the units to the tens: 27, 48 -> 65; 12, 34 -> 46."""
    return a + b - 10 * needs_carry(a, b)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """{score, acc, pred: what follows the last comma}: 1 if pred is the ground truth's number, else 0."""
    pred = solution_str.rpartition(",")[2]
    acc = float(same_number(pred, ground_truth))
    return {"score": acc, "acc": acc, "pred": pred}


def write_answer(ground_truth: Any) -> str:
    """A response that is right: `72`."""
    return write_number(ground_truth)
