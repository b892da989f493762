"""Numbers in text: graders compare `72`, `72.0`, `1,200` and 72.0 as numbers, whatever type a ground truth came in."""

import re
from decimal import Decimal
from typing import Any

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)", re.ASCII)


def read_number(value: Any) -> Decimal | None:
    """72, 72.0, "72." and " 1,200" -> the number, exactly; None for null, NaN, True and text that is no number."""
    text = format(Decimal(repr(value)), "f") if isinstance(value, float) else str(value).strip().replace(",", "")
    return Decimal(text) if NUMBER.fullmatch(text) else None


def same_number(answer: str, ground_truth: Any) -> bool:
    """Whether both are numbers, and the same one."""
    number = read_number(ground_truth)
    return number is not None and read_number(answer) == number


def write_number(ground_truth: Any) -> str:
    """72, 72.0 and "72.0" -> "72"; 1e16 -> all its digits; what is no number as its text."""
    number = read_number(ground_truth)
    if number is None:
        return str(ground_truth)
    whole, _, decimals = format(number, "f").partition(".")
    decimals = decimals.rstrip("0")
    return f"{whole}.{decimals}" if decimals else whole
