"""The built-in graders: hand-worked answers, verl's quirks, and random text."""

import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.rewards import arithmetic, gsm8k
from lib.rewards import math as math_grader
from lib.rewards.numbers import same_number, write_number

NUMBER_CHARS = set("0123456789.,")


def grade_gsm8k(text: str, truth: str = "72", method: str = "strict") -> float:
    return gsm8k.compute_score("openai/gsm8k", text, truth, {}, method=method)["score"]


def grade_math(text: str, truth: str) -> float:
    return math_grader.compute_score("lighteval/MATH", text, truth, {})["score"]


# ---- GSM8K ----


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("48 / 2 = 24, 48 + 24 = 72\n#### 72", 1),
        ("#### 72 apples", 1),
        ("#### 71, no: #### 72", 1),  # the last one counts
        ("#### 72, no: #### 71", 0),
        ("#### 7,2", 1),  # commas go, wherever they stand
        ("#### 72,", 1),
        ("#### 72.", 1),  # verl compares text, and scores this and the next two 0
        ("#### 72.0", 1),
        ("#### 072", 1),
        ("#### 7.2", 0),
        ("#### 72.01", 0),
        ("#### 7.2.0", 0),  # no number
        ("####72", 0),  # exactly one space
        ("####  72", 0),
        ("#### $72", 0),
        ("#### -72", 0),
        ("### 72", 0),
        ("The answer is 72", 0),
        ("", 0),
        ("#### 72" + " " * 293, 1),  # its 7 characters are the first of the last 300
        ("#### 72" + " " * 294, 0),
    ],
)
def test_gsm8k_strict_scores_as_worked_by_hand(text, score):
    assert grade_gsm8k(text) == score


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("So she has 72", "72", 1),
        ("first 10, then 72 apples", "72", 1),
        ("72 apples for 10 people", "72", 0),
        ("I think 72 .", "72", 1),  # a lone point is skipped
        ("I think 72.", "72", 1),
        ("I think 72 , then", "72", 0),  # a lone comma is not skipped: verl's quirk
        ("1,200", "1200", 1),
        ("-5", "-5", 1),
        ("...", ".", 0),
        (".", ".", 0),
        ("no number", "72", 0),
        ("72" + "x" * 299, "2", 1),  # the cut at 300 characters goes through the number
    ],
)
def test_gsm8k_flexible_takes_the_last_number(text, truth, score):
    assert grade_gsm8k(text, truth, "flexible") == score


FORMS = ("72", 72, 72.0, " 72 ", "72.0", "1,200", "1200", 1200.0, -5, "-5.50", 0.1, 1e16, 2**70)
"""What a ground truth may be in a file."""


@pytest.mark.parametrize("grader", [arithmetic, gsm8k, math_grader], ids=lambda grader: grader.__name__)
def test_a_grader_accepts_the_answer_that_it_writes_in_every_form_of_a_number(grader):
    for truth in FORMS:
        answer = grader.write_answer(truth)
        assert grader.compute_score("any", answer, truth, {})["score"] == 1.0, (truth, answer)
        wrong = grader.write_answer(7)
        assert grader.compute_score("any", wrong, truth, {})["score"] == 0.0, truth


@pytest.mark.parametrize("grader", [arithmetic, gsm8k, math_grader], ids=lambda grader: grader.__name__)
@pytest.mark.parametrize("truth", [None, float("nan"), "nan", "", "  "])
def test_no_answer_is_right_where_the_ground_truth_is_missing(grader, truth):
    for answer in (grader.write_answer(truth), "", "#### 0", "0", str(truth)):
        with suppress(ValueError):
            assert grader.compute_score("any", answer, truth, {})["score"] == 0.0, answer


def test_answers_are_written_as_the_graders_read_them():
    assert gsm8k.write_answer(72.0) == "#### 72" and arithmetic.write_answer("72.50") == "72.5"
    assert math_grader.write_answer(r"\frac{1}{2}") == r"\boxed{\frac{1}{2}}"
    assert gsm8k.write_answer("1,200") == "#### 1200" and gsm8k.write_answer(1e16) == "#### 10000000000000000"


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_is_compared_exactly_and_written_back(number):
    text = write_number(number)
    assert float(text) == number and same_number(text, number) and same_number(text, text)
    assert not same_number(text, math.nextafter(number, math.inf))


@pytest.mark.parametrize(
    ("text", "method", "pred"),
    [
        ("#### 1,200 apples", "strict", "1200"),
        ("1,200 apples", "strict", ""),
        ("1,200 apples", "flexible", "1,200"),
        ("no number", "flexible", ""),
    ],
)
def test_gsm8k_tells_the_answer_that_it_read(text, method, pred):
    assert gsm8k.compute_score("openai/gsm8k", text, "72", {}, method=method) == {"score": 0.0, "pred": pred}


def test_gsm8k_refuses_an_unknown_method():
    with pytest.raises(ValueError, match="flexible"):
        grade_gsm8k("#### 72", method="loose")


@given(st.text(alphabet="#0123456789.,- $x\n", max_size=60))
def test_gsm8k_strict_equals_a_scan_by_hand(text):
    """Reads the tail character by character, without regular expressions, as verl's pattern says."""
    expected, i = None, 0
    while i < len(text):
        j = i + 5 if text.startswith("#### ", i) else None
        if j is not None:
            start = j
            j += text.startswith("-", j)
            digits = j
            while j < len(text) and text[j] in NUMBER_CHARS:
                j += 1
            if j > digits:
                expected, i = text[start:j].replace(",", ""), j
                continue
        i += 1
    assert gsm8k.extract_strict(text) == expected


@given(st.text(max_size=400), st.integers().map(str))
def test_gsm8k_finds_a_final_answer_behind_any_text(text, answer):
    assert grade_gsm8k(f"{text}#### {answer}", answer) == 1.0
    assert grade_gsm8k(f"{text} {answer}", answer, "flexible") == 1.0


@given(st.text(max_size=400))
def test_gsm8k_answers_are_numbers_whatever_the_text(text):
    for answer in (gsm8k.extract_strict(text), gsm8k.extract_flexible(text)):
        assert answer is None or set(answer.removeprefix("-")) <= NUMBER_CHARS


# ---- MATH ----


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        (r"so the answer is $\boxed{\frac{1}{2}}$.", "0.5", 1),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1),
        (r"\boxed{\dfrac12}", r"\frac{1}{2}", 1),
        (r"\boxed{2}", r"\frac{1}{2}", 0),
        (r"I tried $\boxed{3}$. That does not fit the second condition. It is $\boxed{4}$.", "4", 1),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", 1),
        (r"\boxed{x^2 + 2x}", "(x+1)^2", 0),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1),
        (r"\boxed{(1, 2)}", "(1,2)", 1),
        (r"\boxed{(2, 1)}", "(1,2)", 0),
        (r"\boxed{[0, 1)}", "[0,1)", 1),
        (r"\boxed{[0, 1]}", "[0,1)", 0),
        (r"\boxed{1{,}000}", "1000", 1),
        (r"\boxed{90^\circ}", "90", 1),
        (r"\boxed{\text{Monday}}", r"\text{Monday}", 1),
        (r"\boxed{\text{Tuesday}}", r"\text{Monday}", 0),
        ("The answer is 12", "12", 1),
        ("I do not know", "12", 0),
        ("", "12", 0),
        (r"\boxed{" * 30, "12", 0),
    ],
)
def test_math_scores_as_worked_by_hand(text, truth, score):
    assert grade_math(text, truth) == score


def test_math_reports_the_answer_it_found():
    result = math_grader.compute_score("lighteval/MATH", r"it is \boxed{\frac{1}{2}}", "0.5", {})
    assert result == {"score": 1.0, "acc": True, "pred": r"\frac{1}{2}"}


def test_math_raises_for_a_ground_truth_that_it_cannot_read():
    with pytest.raises(ValueError, match="ground truth ''"):
        grade_math(r"\boxed{1}", "")
