"""What a worker makes of a user's file: which functions are tools, and what cannot start, told as what it is."""

import pytest

from lib.errors import UserError
from tests.test_hub import ask, call, hub, reply
from tests.test_tools import given, reset, texts

CACHED = '''
import functools
from lib.turns import Environment, Observation


@functools.lru_cache
def double(x: int) -> int:
    """Doubles.

    Args:
        x: a number
    """
    return 2 * x


five = functools.partial(double, 5)
join = str.join  # has no module


class tools(Environment):
    pass


class Bare(Environment):
    tools = (double)


class Nothing(Environment):
    tools = None


class Wants(Environment):
    def __init__(self, word):
        self.word = word
'''


def test_a_function_whose_results_are_kept_is_a_tool(tmp_path):
    (tmp_path / "cached.py").write_text(CACHED)
    with hub(str(tmp_path / "cached.py"), "double") as it:
        reset(it, "a")
        assert texts(ask(it, "step", "a", reply(calls=[call("double", x=2)] * 2))) == ["4", "4"]


@pytest.mark.parametrize(
    ("names", "kwargs", "expected"),
    [
        (["five"], {}, "no such environment or tool; .*found double, tools, .*, five, a partial, expected five"),
        (["tools", "double"], {}, "two environments of one name; .*found a class and, beside it, double, .*expected"),
        (["Bare"], {}, r"tools of another shape; Bare.tools of .*; found _lru_cache_wrapper, expected a tuple; write"),
        (["Nothing"], {}, "tools of another shape; Nothing.tools of .*; found NoneType, expected a tuple; write"),
        (["Wants"], {}, "an environment cannot be made; Wants of .*; found TypeError: .*'word', expected .* no arg"),
        (["Wants"], {"words": 1}, "an environment cannot be made; Wants of .*'words', expected .* that takes words;"),
    ],
)
def test_what_cannot_start_is_told_as_what_it_is(tmp_path, names, kwargs, expected):
    (tmp_path / "cached.py").write_text(CACHED)
    with hub(str(tmp_path / "cached.py"), *names, kwargs=kwargs) as it, pytest.raises(UserError, match=expected):
        it.wait_until_started()


SHAPES = '''
def rest(a: int, *more: int) -> int:
    """Adds.

    Args:
        a: the first
        more: and others
    """


def place(a: int, /, b: int) -> int:
    """Adds.

    Args:
        a: the first
        b: the second
    """


def free(a: int, **options) -> str:
    """Says what it was given.

    Args:
        a: the first
    """
    return f"{a} {options}"
'''


@pytest.mark.parametrize(("name", "found"), [("rest", r"\(a: int, \*more: int\)"), ("place", r"\(a: int, /, b: int\)")])
def test_a_tool_with_arguments_that_have_no_name_is_refused(tmp_path, name, found):
    (tmp_path / "shapes.py").write_text(SHAPES)
    expected = f"a tool's arguments cannot be given by name; {name} of .*; found {found}"
    with hub(str(tmp_path / "shapes.py"), name) as it, pytest.raises(UserError, match=expected):
        it.wait_until_started()


def test_a_tool_that_takes_any_names_is_described_by_those_that_it_names(tmp_path):
    (tmp_path / "shapes.py").write_text(SHAPES)
    with hub(str(tmp_path / "shapes.py"), "free") as it:
        reset(it, "a", **given(free={"k": "x"}))
        [tool] = it.about["tools"].tools
        assert tool["function"]["parameters"] == {
            "type": "object", "properties": {"a": {"type": "integer", "description": "the first"}}, "required": ["a"],
        }  # fmt: skip
        assert texts(ask(it, "step", "a", reply(calls=[call("free", a=1)]))) == ["1 {'k': 'x'}"]
