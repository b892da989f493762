"""A calculator for models, as a tool: for worker processes, the standard library alone.

What a model writes is parsed and walked, never executed. Without powers and names a short text can neither take long
nor make a large number.
"""

import ast
import math
import operator
from fractions import Fraction

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
SIGNS = {ast.UAdd: operator.pos, ast.USub: operator.neg}
MAX_LEN = 200  # characters


def calculate(expression: str) -> str:
    """Evaluates arithmetic.

    Args:
        expression: numbers, + - * / and parentheses, such as (17.5 - 3) * 4
    """
    text = expression.replace(",", "").strip()  # 1,234 is a number
    if len(text) > MAX_LEN:
        raise ValueError(f"the expression has {len(text)} characters, at most {MAX_LEN} are read")
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


def _value(node: ast.expr) -> Fraction:
    """Exactly, so that 0.1 + 0.2 is 0.3."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in SIGNS:
        return SIGNS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.Constant) and type(node.value) in (int, float) and abs(node.value) < math.inf:
        return Fraction(repr(node.value))
    raise ValueError(f"{ast.unparse(node)[:50]!r} is not a number, + - * / or parentheses")
