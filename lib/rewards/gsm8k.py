"""GSM8K: is the number after the last `####` (or the last number at all) the ground truth?

verl's rules of where the answer stands, with their quirks. It is compared as a number, where verl compares text.
Cobbe et al., https://arxiv.org/abs/2110.14168, for the format.
"""

import re
from typing import Any

from lib.rewards.numbers import same_number, write_number

TAIL_LEN = 300  # characters of the response that are read; the answer stands at the end
STRICT = re.compile(r"#### (-?[0-9.,]+)")
NUMBER = re.compile(r"-?[0-9.,]+")


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict, *, method: str = "strict"
) -> dict[str, Any]:
    """{score, pred: the extracted answer, "" without one}.

    The score is 1.0 when the answer is the ground truth's number ("72." and "72.0" are 72), else 0.0.
    `method`: "strict" (`#### 72`) or "flexible" (the last number): --reward.kwargs '{"method": "flexible"}'.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f'method={method!r}, expected "strict" or "flexible"')
    extract = extract_strict if method == "strict" else extract_flexible
    answer = extract(solution_str)
    return {"score": float(answer is not None and same_number(answer, ground_truth)), "pred": answer or ""}


def write_answer(ground_truth: Any) -> str:
    """A response that both methods accept: `#### 72`."""
    return f"#### {write_number(ground_truth)}"


def extract_strict(solution_str: str) -> str | None:
    """What follows the last `#### `, without commas: "so #### 1,200 apples" -> "1200"; None without one."""
    found = STRICT.findall(solution_str[-TAIL_LEN:])
    return found[-1].replace(",", "") if found else None


def extract_flexible(solution_str: str) -> str | None:
    """The last run of digits, points and commas other than ".": "72 or 73." -> "73."; commas stay, as in verl."""
    found = NUMBER.findall(solution_str[-TAIL_LEN:])
    return next((number for number in reversed(found) if number != "."), None)
