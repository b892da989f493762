"""The tool calls in a sampled turn, in the format that the model's chat template writes them in.

    hermes       <tool_call>{"name": NAME, "arguments": {...}}</tool_call>              Qwen 2.5 and 3, Hermes
    qwen3-coder  <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>    Qwen 3.5, Coder
    llama        {"name": NAME, "parameters": {...}}, and nothing else                  Llama 3.1 and 3.2
    pythonic     [NAME(KEY=VALUE)], alone or between <|tool_call_start|> and <|tool_call_end|>        Llama 4, LFM2

A call inside thinking is none. A call that cannot be read is one with an error, which the model is told.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lib.data.chat_template import ChatTemplate
from lib.errors import UserError
from lib.turns.appended import ARGUMENT, ASKED, without_thinking
from lib.turns.environment import Call

Found = tuple[str, list[Call]]
"""A turn's text without its calls, and these."""
Schemas = Mapping[str, Mapping[str, Any]]
"""{tool: the JSON schema of its parameters}."""
MAX_DEPTH = 32  # of arguments; what reads and writes them from here on takes a level of Python's stack for each
TOO_DEEP = "the call is nested too deeply"


def _hermes(text: str, schemas: Schemas) -> Found:
    calls = [_from_json(body, "arguments") for body in _blocks(text)]
    return _without_blocks(text), calls


def _from_json(body: str, key: str) -> Call:
    try:
        value = json.loads(body)
    except RecursionError:
        return Call(name="", arguments={}, error=TOO_DEEP)
    except ValueError as error:
        return Call(name="", arguments={}, error=f"the call is not JSON: {str(error)[:200]}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Call(name="", arguments={}, error="the call is no JSON object with a name")
    arguments = value.get(key, {})
    if isinstance(arguments, str):  # some models write the object as a string
        try:
            arguments = json.loads(arguments)
        except RecursionError:
            return Call(name=value["name"], arguments={}, error=TOO_DEEP)
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict):
        return Call(name=value["name"], arguments={}, error=f"{key} is no JSON object")
    return Call(name=value["name"], arguments=arguments)


def _qwen3_coder(text: str, schemas: Schemas) -> Found:
    return _without_blocks(text), [_from_tags(body, schemas) for body in _blocks(text)]


def _from_tags(body: str, schemas: Schemas) -> Call:
    found = re.fullmatch(r"(?s)\s*<function=([^>\n]+)>(.*?)(?:</function>\s*)?", body)
    if found is None:
        return Call(name="", arguments={}, error="the call is not <function=NAME> ... </function>")
    name, inside = found[1].strip(), found[2]
    pairs = re.findall(r"(?s)<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", inside)
    if re.sub(r"(?s)<parameter=[^>\n]+>.*?</parameter>", "", inside).strip():
        return Call(name=name, arguments={}, error="a parameter is not <parameter=NAME> ... </parameter>")
    kinds = schemas.get(name, {}).get("properties", {})
    try:
        return Call(name=name, arguments={key: _typed(value, kinds.get(key, {})) for key, value in pairs})
    except RecursionError:
        return Call(name=name, arguments={}, error=TOO_DEEP)


def _typed(value: str, schema: Mapping[str, Any]) -> Any:
    """The value of a parameter that is written as text: as it is where the schema wants text, else read as JSON. Raises
    RecursionError."""
    if schema.get("type", "string") == "string":
        return value
    try:
        return json.loads(value)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(value, value)


def _llama(text: str, schemas: Schemas) -> Found:
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not re.match(r'\{\s*"', body):
        return text, []
    call = _from_json(body, "parameters")
    return ("", [call]) if call.error is None or '"name"' in body else (text, [])


def _pythonic(text: str, schemas: Schemas) -> Found:
    marked = re.findall(r"(?s)<\|tool_call_start\|>(.*?)(?:<\|tool_call_end\|>|$)", text)
    if not marked and not re.fullmatch(r"(?s)\s*\[\s*[\w.]+\(.*\)\s*\]\s*", text):
        return text, []
    calls = [call for body in (marked or [text]) for call in _from_python(body)]
    return re.sub(r"(?s)<\|tool_call_start\|>.*?(?:<\|tool_call_end\|>|$)", "", text) if marked else "", calls


def _from_python(body: str) -> list[Call]:
    try:
        tree = ast.parse(body.strip(), mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_from_node(node) for node in nodes]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        return [Call(name="", arguments={}, error=f"the call is not [NAME(KEY=VALUE)]: {str(error)[:200]}")]


def _from_node(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("expected calls with named arguments")
    arguments = {it.arg: ast.literal_eval(it.value) for it in node.keywords}
    return Call(
        name=ast.unparse(node.func), arguments=json.loads(json.dumps(arguments))
    )  # as in other formats: no sets


def _blocks(text: str) -> list[str]:
    """What stands between <tool_call> and </tool_call>, or the end of the text."""
    return re.findall(r"(?s)<tool_call>(.*?)(?:</tool_call>|$)", text)


def _without_blocks(text: str) -> str:
    return re.sub(r"(?s)<tool_call>.*?(?:</tool_call>|$)", "", text)


FORMATS: dict[str, Callable[[str, Schemas], Found]] = {
    "hermes": _hermes, "qwen3-coder": _qwen3_coder, "llama": _llama, "pythonic": _pythonic,
}  # fmt: skip
"""--turns.format."""


def read_calls(text: str, format: str, schemas: Schemas) -> Found:
    """A turn's text without its calls, and these, in order. `text`: as sampled, without the token that ends it."""
    answer = without_thinking(text)
    rest, calls = FORMATS[format](answer, schemas)
    checked = [_checked(call, schemas) for call in calls]
    return text[: len(text) - len(answer)] + rest, checked


def _checked(call: Call, schemas: Schemas) -> Call:
    if call.error is None and _is_deeper(call.arguments, MAX_DEPTH):
        return Call(name=call.name, arguments={}, error=TOO_DEEP)
    if call.error is not None or call.name in schemas:
        return call
    return Call(
        name=call.name, arguments=call.arguments,
        error=f"there is no tool {call.name[:100]!r}; there are {', '.join(schemas) or 'none'}",
    )  # fmt: skip


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether JSON has more objects and lists in each other than `levels`."""
    if not isinstance(value, dict | list):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(it, levels - 1) for it in inside)


def find_format(template: ChatTemplate) -> str:
    """The format in which a chat template writes calls. Raises UserError for one that is not known."""
    call = {
        "type": "function",
        "id": "call00000",
        "function": {"name": "lockstep_tool", "arguments": {"key": ARGUMENT}},
    }
    where = f"--model.path {template.tokenizer.name_or_path}"
    try:
        text = template.render(
            [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}], answer_follows=False
        )
    except Exception as error:
        raise UserError(
            f"the chat template refuses a tool call; {where}; found {str(error)[:200]}, expected one that writes it; "
            "use a model that was trained with tools"
        ) from error
    if re.search(r"<tool_call>\s*<function=lockstep_tool>", text):
        return "qwen3-coder"
    if re.search(r'<tool_call>\s*\{"name": ?"lockstep_tool"', text):
        return "hermes"
    if re.search(r'\{"name": ?"lockstep_tool", ?"parameters"', text):
        return "llama"
    if re.search(r"\[lockstep_tool\(", text):
        return "pythonic"
    place = text.find("lockstep_tool")
    shown = repr(text[max(0, place - 40) : place + 60]) if place >= 0 else "none of the call"
    raise UserError(
        f"tool calls in a format that is not known; {where}; found {shown}, expected one of {', '.join(FORMATS)}; "
        "name the one that the model writes with --turns.format, or use another model"
    )


def schemas_by_name(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """{tool: the schema of its parameters} of tools as chat templates take them."""
    return {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
