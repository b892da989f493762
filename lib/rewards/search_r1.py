"""Search-R1's questions: is what stands in the last <answer> one of the right answers?

Compared as SQuAD does (Rajpurkar et al., https://arxiv.org/abs/1606.05250): without case, punctuation, articles and
further spaces. verl's rules, with its quirk: a response with more than 10 such tags earns a quarter. Jin et al.,
https://arxiv.org/abs/2503.09516, for the task.
"""

import re
import string
from collections.abc import Mapping
from typing import Any

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
MOST_TAGS = 10
SOURCES = tuple(
    f"searchR1_{name}" for name in ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
)


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict) -> dict[str, Any]:
    """{score, acc: whether the answer is right, pred: the answer, "" without one}. `ground_truth`: {"target": answers},
    answers, or one. Raises ValueError where there is none."""
    targets = {plain(target) for target in read_targets(ground_truth)}
    found = ANSWER.findall(solution_str)
    answer = found[-1].strip() if found else ""
    is_right = plain(answer) in targets  # none of which is empty
    is_stuffed = max(solution_str.count("<answer>"), solution_str.count("</answer>")) > MOST_TAGS
    return {"score": is_right * (0.25 if is_stuffed else 1.0), "acc": is_right, "pred": answer}


def write_answer(ground_truth: Any) -> str:
    """A response that is right: `<answer>Paris</answer>`. Raises ValueError as `compute_score` does."""
    return f"<answer>{read_targets(ground_truth)[0]}</answer>"


def read_targets(ground_truth: Any) -> list[str]:
    """The right answers that say something. Raises ValueError where there is none."""
    targets = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    targets = [targets] if isinstance(targets, str) else targets
    said = [target for target in targets if isinstance(target, str) and plain(target)] if targets else []
    if not said:
        raise ValueError(f'the ground truth {str(ground_truth)[:80]} has no answer, expected {{"target": [TEXT, ...]}}')
    return said


def plain(text: str) -> str:
    """Small letters, without punctuation, articles and further spaces: "The U.S.A. " -> "usa"."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split())
