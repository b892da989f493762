"""recipes/calculator.py: what a model may write, what it gets, and that nothing it writes is executed."""

import random
from fractions import Fraction

import pytest

from recipes.calculator import calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(17.5 - 3) * 4", "58"), ("1,234*2", "2468"), ("10/4", "2.5"), ("0.1 + 0.2", "0.3"), ("1/3", "0.3333333333"),
        ("-(-3)", "3"), (" 7 ", "7"), ("2 - 3 - 4", "-5"), ("2 + 3 * 4", "14"),
    ],
)  # fmt: skip
def test_it_computes_exactly_and_writes_whole_numbers_whole(expression, value):
    assert calculate(expression) == value


def test_random_expressions_have_the_value_that_fractions_have():
    rng = random.Random(0)
    for _ in range(300):
        numbers = [rng.randrange(1, 99) for _ in range(4)]
        marks = [rng.choice("+-*/") for _ in range(3)]
        text = f"({numbers[0]} {marks[0]} {numbers[1]}) {marks[1]} ({numbers[2]} {marks[2]} {numbers[3]})"
        try:
            expected = eval("".join(f"Fraction({it})" if it.isdigit() else it for it in text.replace("(", "( ")
                                    .replace(")", " )").split()))  # fmt: skip
        except ZeroDivisionError:
            with pytest.raises(ZeroDivisionError):
                calculate(text)
            continue
        assert Fraction(calculate(text)) == pytest.approx(expected, rel=1e-9), text


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('echo')", "2**9999999999", "9<<9999999", "calculate('1')", "[1]*9", "'a'*9", "True",
        "1j", "1e999", "nan", "", "(" * 150, "1;2", "lambda: 1", "1 if 1 else 2", "x" * 201, "1/0",
    ],
)  # fmt: skip
def test_anything_else_is_refused_with_a_reason(expression):
    with pytest.raises((ValueError, SyntaxError, ArithmeticError)) as refused:
        calculate(expression)
    assert str(refused.value) and "Fraction" not in str(refused.value)
