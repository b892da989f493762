"""Tool calls are read as the model's chat template writes them, and what is none is told, never raised."""

import asyncio
import json
import random

import pytest

from lib.errors import UserError
from lib.turns.environment import Call, Environment, Observation, Reply, as_text
from lib.turns.tool_calls import FORMATS, find_format, read_calls, schemas_by_name
from tests.test_turns_appended import template

SCHEMAS = {
    "calc": {"properties": {"x": {"type": "string"}, "n": {"type": "integer"}, "all": {"type": "boolean"}}},
    "search": {"properties": {"query": {"type": "string"}}},
}
WRITTEN = {
    "hermes": 'Let me see. <tool_call>\n{"name": "calc", "arguments": {"x": "1+1", "n": 3}}\n</tool_call>',
    "qwen3-coder": "Let me see. <tool_call>\n<function=calc>\n<parameter=x>\n1+1\n</parameter>\n<parameter=n>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
    "llama": '{"name": "calc", "parameters": {"x": "1+1", "n": 3}}',
    "pythonic": '[calc(x="1+1", n=3)]',
}


@pytest.mark.parametrize("format", FORMATS)
def test_a_call_is_read(format):
    rest, calls = read_calls(WRITTEN[format], format, SCHEMAS)
    assert calls == [Call(name="calc", arguments={"x": "1+1", "n": 3})]
    assert rest.strip() == ("Let me see." if format in ("hermes", "qwen3-coder") else "")


@pytest.mark.parametrize("format", FORMATS)
def test_text_without_a_call_is_text(format):
    for text in ("42", "", "a {json: 1} thing", "[1, 2]", "I could call calc(x=1).", '"name"'):
        assert read_calls(text, format, SCHEMAS) == (text, [])


@pytest.mark.parametrize("format", FORMATS)
def test_a_call_inside_thinking_is_none(format):
    written = WRITTEN[format]
    assert read_calls(f"<think>{written}", format, SCHEMAS)[1] == []
    assert read_calls(f"<think>{written}</think>42", format, SCHEMAS) == (f"<think>{written}</think>42", [])
    rest, calls = read_calls(f"<think>no</think>{written}", format, SCHEMAS)
    assert len(calls) == 1 and rest.startswith("<think>no</think>")


@pytest.mark.parametrize(
    ("format", "text", "error"),
    [
        ("hermes", "<tool_call>{bad}</tool_call>", "not JSON"),
        ("hermes", '<tool_call>{"name": "calc", "arguments": {"x"', "not JSON"),
        ("hermes", "<tool_call>[1]</tool_call>", "no JSON object with a name"),
        ("hermes", '<tool_call>{"name": 1}</tool_call>', "no JSON object with a name"),
        ("hermes", '<tool_call>{"name": "calc", "arguments": [1]}</tool_call>', "arguments is no JSON object"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "nested too deeply"),
        ("hermes", '<tool_call>{"name": "rm"}</tool_call>', "there is no tool 'rm'; there are calc, search"),
        ("qwen3-coder", "<tool_call>calc(1)</tool_call>", "the call is not <function=NAME>"),
        ("qwen3-coder", "<tool_call><function=calc>x=1</function></tool_call>", "a parameter is not"),
        ("llama", '{"name": "calc", "parameters": 3}', "parameters is no JSON object"),
        ("llama", '{"name": "calc", "parameters": ', "not JSON"),
        ("pythonic", "[calc(1)]", "named arguments"),
        ("pythonic", "[calc(x=y)]", "the call is not"),
        ("pythonic", "<|tool_call_start|>[calc(x=", "the call is not"),
        ("pythonic", "[calc(x={[]: 1})]", "the call is not"),
        ("pythonic", "[calc(x={1, 2})]", "the call is not"),
        ("pythonic", '[calc(x=b"1")]', "the call is not"),
        ("pythonic", "[calc(x=...)]", "the call is not"),
        ("pythonic", "[calc(x=__import__('os').system('true'))]", "the call is not"),
    ],
)
def test_what_cannot_be_read_is_a_call_with_an_error(format, text, error):
    _, [call] = read_calls(text, format, SCHEMAS)
    assert error in call.error


NESTED = {
    "hermes": '<tool_call>{"name": "calc", "arguments": {"n": %s}}</tool_call>',
    "qwen3-coder": "<tool_call><function=calc><parameter=n>%s</parameter></function></tool_call>",
    "llama": '{"name": "calc", "parameters": {"n": %s}}',
    "pythonic": "[calc(n=%s)]",
}


@pytest.mark.parametrize("levels", [32, 100, 700, 2000])
@pytest.mark.parametrize("format", [*FORMATS, "an object as text"])
def test_a_call_that_is_nested_too_deeply_is_told(format, levels):
    """All that is done with it afterwards, such as sending it to a worker, would raise RecursionError."""

    def read(levels):
        value = "[" * levels + "]" * levels
        if format == "an object as text":
            arguments = json.dumps(f'{{"n": {value}}}')
            return read_calls(f'<tool_call>{{"name": "calc", "arguments": {arguments}}}</tool_call>', "hermes", SCHEMAS)
        return read_calls(NESTED[format] % value, format, SCHEMAS)

    _, [call] = read(levels)
    parser_gave_up = format == "pythonic" and levels > 100  # Python's own, with words of its own
    assert call.arguments == {} and ("nested" if parser_gave_up else "nested too deeply") in call.error
    assert read(31)[1][0].error is None


def test_values_of_tags_have_the_types_of_the_schema():
    text = (
        "<tool_call><function=calc><parameter=x>3</parameter><parameter=n>3</parameter><parameter=all>True</parameter>"
        "</function></tool_call>"
    )
    assert read_calls(text, "qwen3-coder", SCHEMAS)[1][0].arguments == {"x": "3", "n": 3, "all": True}


def test_tuples_and_numbers_as_keys_are_what_json_has_for_them():
    _, [call] = read_calls("[calc(x=(1, 2), y={1: 2.5})]", "pythonic", SCHEMAS)
    assert call.arguments == {"x": [1, 2], "y": {"1": 2.5}}


def test_several_calls_are_read_in_order():
    text = "".join(f'<tool_call>{{"name": "calc", "arguments": {{"n": {n}}}}}</tool_call>\n' for n in range(3))
    assert [call.arguments for call in read_calls(text, "hermes", SCHEMAS)[1]] == [{"n": 0}, {"n": 1}, {"n": 2}]
    text = '<|tool_call_start|>[calc(n=0), search(query="a")]<|tool_call_end|>'
    assert [call.name for call in read_calls(text, "pythonic", SCHEMAS)[1]] == ["calc", "search"]


@pytest.mark.parametrize("format", FORMATS)
def test_no_text_makes_it_raise(format):
    rng = random.Random(0)
    pieces = ("<tool_call>", "</tool_call>", "<function=calc>", "</function>", "<parameter=x>", "</parameter>", "{",
              "}", '"name"', ":", '"calc"', ",", "[", "]", "calc(", ")", "x=", "\x00", "<think>", "</think>", "1e999",
              "\n", "<|tool_call_start|>", "é", "{", "}", "[calc(x=", "1")  # fmt: skip
    for _ in range(2000):
        rest, calls = read_calls("".join(rng.choice(pieces) for _ in range(rng.randrange(20))), format, SCHEMAS)
        assert isinstance(rest, str) and all(isinstance(call, Call) for call in calls)
        assert json.loads(json.dumps([call.arguments for call in calls])) == [call.arguments for call in calls]


@pytest.mark.parametrize(("name", "format"), [
    ("qwen2_5", "hermes"), ("qwen3", "hermes"), ("qwen3_instruct_2507", "hermes"), ("qwen3_5_think", "qwen3-coder"),
    ("qwen3_6", "qwen3-coder"), ("nemotron_3_nano", "qwen3-coder"), ("llama3_1", "llama"), ("llama3_2", "llama"),
])  # fmt: skip
def test_the_format_is_found_from_the_template(name, format):
    assert find_format(template(name)) == format


@pytest.mark.parametrize("name", ["glm4moe", "deepseekv3", "gemma3", "lfm2"])
def test_other_formats_are_named_as_unknown(name):
    with pytest.raises(UserError, match=r"in a format that is not known; --model.path|refuses a tool call"):
        find_format(template(name))


# ---- Environments ----


def shout(text: str, times: int = 1) -> str:
    """Says it louder.

    Args:
        text: what to say
        times: how often
    """
    return text.upper() * times


class Shouting(Environment):
    tools = (shout,)


def reply(*calls):
    return Reply(text="", calls=calls, turn=0, finish_reason="stop")


def test_an_environment_of_tools_answers_calls_and_ends_without_any():
    env = Shouting()
    answer = asyncio.run(env.step(reply(Call(name="shout", arguments={"text": "a", "times": 2}))))
    assert answer == Observation(messages=[{"role": "tool", "name": "shout", "content": "AA"}])
    assert asyncio.run(env.step(reply())).done and env.score() is None and env.reset(None, 0) is None


@pytest.mark.parametrize(("call", "text"), [
    (Call(name="whisper", arguments={}), "error: there is no tool 'whisper'; there are shout"),
    (Call(name="shout", arguments={}), "error: shout: missing a required argument: 'text'"),
    (Call(name="shout", arguments={"text": "a", "loud": 1}), "error: shout: got an unexpected keyword argument 'loud'"),
    (Call(name="", arguments={}, error="the call is not JSON"), "error: the call is not JSON"),
])  # fmt: skip
def test_a_call_that_is_none_is_told_to_the_model(call, text):
    assert asyncio.run(Shouting().step(reply(call))).messages[0]["content"] == text


def test_what_a_tool_returns_becomes_text():
    for value, text in (("a", "a"), (1.5, "1.5"), (None, "null"), ({"a": [1]}, '{"a": [1]}'), (b"\xff", "\\xff"),
                        ({1, 2}, str({1, 2})), (float("nan"), "NaN"), ("é", "é")):  # fmt: skip
        assert as_text(value) == text


def test_schemas_are_found_by_name():
    from transformers.utils import get_json_schema

    found = schemas_by_name([get_json_schema(shout)])
    assert json.loads(json.dumps(found))["shout"]["properties"]["times"]["type"] == "integer"
