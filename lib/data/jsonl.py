"""JSON lines: an object per line, read in verl's schema, line by line, with what pyarrow's reader does not tell.

A fault names the line. Each line keeps its own types: in `extra_info` one may have a number where the next one has
text. Allowed: a byte order mark, Windows line ends, blank lines, a last line without its end. Refused: what JSON does
not have (NaN), a key twice in one object, numbers beyond float64.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lib.data.faults as faults
from lib.data.faults import MAX_CELL_BYTES, MAX_MESSAGES, ROLES, is_unicode, short
from lib.data.schema import ID_COLUMNS, MEDIA_COLUMNS, OWN_SOURCE, Keys
from lib.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

MAX_LINE_BYTES = 2 * MAX_CELL_BYTES
BATCH_ROWS, BATCH_BYTES = 8192, 64 * 1024**2  # of a batch of Arrow's
JSON_COLUMNS = ("prompt", "reward_model", "extra_info")
"""The columns that are JSON as text (`Rows.tables`)."""
KINDS = {str: "string", bool: "bool", int: "int", float: "float", list: "list", dict: "struct", type(None): "null"}
"""Of what json makes, the name of its kind, as `Rows.answer_kinds` has it."""
IN_WORDS = {"string": "text", "bool": "true or false", "int": "a number", "float": "a number", "list": "a list"}
IN_WORDS |= {"struct": "an object", "null": "null"}


# ---- Lines ----


def iter_lines(path: Path, where: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(number from 1, bytes, object) of every line that is not blank. Raises UserError for a line that is no object."""
    number = 0
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            at = f"{where} line {number}"
            if len(line) > MAX_LINE_BYTES:
                raise UserError(
                    f"a line is too large; {at}; found more than {MAX_LINE_BYTES} bytes, expected at most that; write "
                    "an object per line, or shorten it"
                )
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if text.strip():
                yield number, len(line), _read_object(text, at)


class _Refused(ValueError):
    """What JSON's reader takes and we do not: (what, found, expected, remedy)."""


def _read_object(line: bytes, at: str) -> dict[str, Any]:
    try:
        text = line.decode().rstrip()
        value = json.loads(
            text, object_pairs_hook=_read_pairs, parse_constant=_refuse_constant, parse_float=_read_float
        )
    except UnicodeDecodeError as error:
        raise UserError(
            f"text that is not UTF-8; {at}; found byte 0x{line[error.start]:02x} at {error.start}, expected UTF-8; "
            "re-encode the file (iconv -f LATIN1 -t UTF-8 FILE)"
        ) from None
    except _Refused as error:
        what, found, expected, remedy = error.args
        raise UserError(f"{what}; {at}; found {found}, expected {expected}; {remedy}") from None
    except json.JSONDecodeError as error:
        remedy = "mend the line" if line.endswith(b"\n") else "the file ends within it: write or copy it again"
        near = error.doc[max(0, error.pos - 20) : error.pos + 20]
        raise UserError(
            f"a line that is no JSON; {at} column {error.colno}; found {error.msg} near {short(near)}, expected one "
            f"whole object {{...}} per line; {remedy}"
        ) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or thousands of brackets
        raise UserError(f"a line that cannot be read; {at}; {short(error)}; shorten what it holds") from None
    if not isinstance(value, dict):
        raise UserError(
            f"a line that is no object; {at}; found {IN_WORDS[KINDS[type(value)]]}, expected {{...}} with a key per "
            "column; write the row so"
        )
    if b"\\u" in line and not is_unicode(value):
        column = next((name for name, cell in value.items() if not is_unicode([name, cell])), "")
        raise UserError(
            f"text that is not Unicode; {at} column {column!a}; found half of a surrogate pair, expected whole "
            "characters; mend the text"
        )
    return value


def _read_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Refused("a key twice in one object", short(twice), "each key once", "rename or drop one")
    return found


def _refuse_constant(name: str) -> Any:
    raise _Refused("a number that is none", name, "a finite number, or null", "mend or drop the row")


def _read_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _Refused("a number that is too large", short(digits), "one that float64 holds", "write it as text")
    return value


# ---- Rows in verl's schema ----


def read_jsonl(path: Path, keys: Keys, where: str) -> tuple["pa.Table", str, list[str]]:
    """One file in verl's schema (`Rows.tables`), the kind of its ground truths, and the media columns left out.

    What the first row has of the columns that may be missing, every row must have. Raises UserError for any fault.
    """
    first: tuple[int, dict[str, Any]] | None = None
    batches, cells, num_bytes = [], [], 0
    kind, kind_line = "null", 0
    for number, size, entry in iter_lines(path, where):
        at = f"{where} line {number}"
        first = first or (number, entry)
        _check_columns(entry, first, keys, at)
        row = _checked_row(entry, keys, at)
        answer = KINDS[type(row["reward_model"]["ground_truth"])]
        if kind == "null":
            kind, kind_line = answer, number
        elif answer != "null" and answer != kind:
            if {answer, kind} != {"int", "float"}:
                found, expected = IN_WORDS[answer], f"{IN_WORDS[kind]} as in line {kind_line}"
                raise faults.two_kinds_of_answers(at, keys.graded_by, found, expected)
            kind = "float"
        texts = {name: json.dumps(row[name], ensure_ascii=False) for name in JSON_COLUMNS}
        cells.append({"line": number, **row, **texts})  # as text at once: Python's objects are many times as large
        num_bytes += size
        if len(cells) == BATCH_ROWS or num_bytes > BATCH_BYTES:
            batches.append(_to_batch(cells))
            cells, num_bytes = [], 0
    if first is None:
        raise UserError(f"no rows; {where}; found blank lines alone, expected at least 1 row; write the file again")
    if cells:
        batches.append(_to_batch(cells))
    import pyarrow as pa

    media = [name for name in MEDIA_COLUMNS if first[1].get(name) is not None]
    table = pa.Table.from_batches(batches)
    unused = [name for name in ("ability", "agent_name", *ID_COLUMNS) if table.column(name).null_count == len(table)]
    return table.drop_columns(unused), kind, media


def _check_columns(entry: dict[str, Any], first: tuple[int, dict[str, Any]], keys: Keys, at: str) -> None:
    """Raises UserError for a line without a column that is needed, or that the first row has and others need not."""
    if missing := [name for name in keys.needed if name not in entry]:
        messages = [name for name, value in entry.items() if _is_messages(value)]
        raise faults.missing_columns(
            missing, list(entry), messages, prompt=keys.prompt, needs_grader=keys.needs_grader, where=at
        )
    for name in ("data_source", keys.graded_by):
        if (name in entry) != (name in first[1]):
            here, there = ("there", "not there") if name in entry else ("not there", "there")
            raise UserError(
                f"column '{name}' is in some rows alone; {at}; found it {here}, and {there} in line {first[0]}, "
                "expected it in every row or in none; add or drop it"
            )


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and {"role", "content"} <= {*value[0]}


def _checked_row(entry: dict[str, Any], keys: Keys, at: str) -> dict[str, Any]:
    """{prompt, data_source, ability, reward_model, extra_info, agent_name, id, uid} in verl's schema."""
    prompt = entry[keys.prompt]
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    _check_messages(prompt, keys.prompt, at)
    source = entry.get("data_source", OWN_SOURCE)
    if source is None or source == "":
        raise faults.no_data_source(at)
    _check_type(source, str, "data_source", "a text", at)
    if not source.isprintable():
        raise faults.unprintable_data_source(at, source)
    extra_info = entry.get("extra_info")
    _check_type(extra_info, dict | None, "extra_info", "an object, or no such key", at)
    agent_name = entry.get("agent_name")
    _check_type(agent_name, str | None, "agent_name", "a text, or no such key", at)
    return {
        "prompt": prompt,
        "data_source": source,
        "ability": entry["ability"] if isinstance(entry.get("ability"), str) else None,
        "reward_model": _reward_model(entry, keys, at),
        "extra_info": extra_info or {},
        "agent_name": agent_name,
        **{name: None if entry.get(name) is None else str(entry[name]) for name in ID_COLUMNS},
    }


def _check_messages(messages: Any, column: str, at: str) -> None:
    if messages is None or messages == []:
        raise faults.no_messages(at, column)
    _check_type(messages, list, column, faults.PROMPT, at)
    if len(messages) > MAX_MESSAGES:
        raise faults.too_many_messages(at, column, len(messages))
    for number, message in enumerate(messages):
        _check_type(message, dict, column, faults.MESSAGES, at)
        for name in ("role", "content"):
            if name not in message:
                raise faults.message_lacks_field(at, number, name, list(message))
        if not isinstance(message["role"], str) or message["role"] not in ROLES:
            raise faults.unknown_role(at, column, number, message["role"])
        if not isinstance(message["content"], str):
            raise faults.no_content(at, column, number, message["content"])


def _reward_model(entry: dict[str, Any], keys: Keys, at: str) -> dict[str, Any]:
    if keys.answer:
        found = {"ground_truth": entry[keys.answer]}
    elif "reward_model" not in entry:
        return {"ground_truth": None}
    else:
        found = {} if entry["reward_model"] is None else entry["reward_model"]
        _check_type(found, dict, "reward_model", "an object {style, ground_truth}", at)
        found = {**found, "ground_truth": found.get("ground_truth")}
    if found["ground_truth"] is None and found.get("style") != "model":  # a reward model judges without one
        raise faults.no_answer(at, keys.graded_by)
    return found


def _check_type(value: Any, kind: Any, column: str, expected: str, at: str) -> None:
    if not isinstance(value, kind):
        raise faults.wrong_type(at, column, f"{IN_WORDS[KINDS[type(value)]]}, {short(value)[:80]}", expected)


def _to_batch(cells: list[dict[str, Any]]) -> "pa.RecordBatch":
    import pyarrow as pa

    def column(name: str) -> "pa.Array":
        return pa.array([cell[name] for cell in cells], pa.int64() if name == "line" else pa.large_string())

    return pa.RecordBatch.from_pydict({name: column(name) for name in cells[0]})


# ---- All columns, as Arrow's ----


def read_columns(path: Path, where: str) -> tuple["pa.Table", list[str]]:
    """All columns of a file in Arrow's types, and those that are JSON as text since no one type holds their values."""
    import pyarrow as pa

    rows = [entry for _, _, entry in iter_lines(path, where)]
    columns, as_text = {}, []
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        try:
            array = pa.array(values)
            if _has_empty_struct(array.type):
                raise pa.ArrowInvalid("parquet has no struct without fields")
        except (pa.ArrowException, OverflowError):
            array = pa.array([None if value is None else json.dumps(value, ensure_ascii=False) for value in values])
            as_text.append(name)
        columns[name] = array
    return pa.table(columns), as_text


def _has_empty_struct(kind: "pa.DataType") -> bool:
    import pyarrow.types as types

    if types.is_struct(kind):
        return not kind.num_fields or any(_has_empty_struct(field.type) for field in kind)
    return types.is_list(kind) and _has_empty_struct(kind.value_type)
