"""What a row must look like: verl's schema, checked on Arrow types and record batches.

Beside it a prompt may be a text, the answer a column of its own, and what no built-in grader asks for may be missing:
`checked_batch` makes verl's schema of all of these. The first fault raises UserError with file, row, column and remedy.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import lib.data.faults as faults
from lib.data.faults import MAX_CELL_BYTES, MAX_MESSAGES, ROLES
from lib.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

ID_COLUMNS = ("id", "uid")  # not extra_info.index: published verl files repeat it
MEDIA_COLUMNS = ("images", "videos", "audios")
OWN_SOURCE = "own"
"""The data source of rows that name none."""
ANSWER_KINDS = ("string", "int", "float", "bool", "list", "struct", "null")
ANSWER = "text, a number, a list or an object"


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Under which names a file has what a row is made of, and what each row must have."""

    prompt: str = "prompt"
    answer: str | None = None
    """Column with the ground truth; None: `ground_truth` in the column reward_model."""
    needs_grader: bool = True
    """Whether a built-in grader scores: it needs a data_source and a ground truth, other functions do not."""

    @property
    def graded_by(self) -> str:
        """The column that holds the ground truth."""
        return self.answer or "reward_model"

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns that must be there."""
        answer = (self.answer,) if self.answer else ("reward_model",) * self.needs_grader
        return (self.prompt, *("data_source",) * self.needs_grader, *answer)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read."""
        own = (self.prompt, "data_source", "ability", self.graded_by, "extra_info", "agent_name", *ID_COLUMNS)
        return tuple(dict.fromkeys(own))


VERL_KEYS = Keys()


# ---- Checks of the schema ----


def check_schema(schema: "pa.Schema", keys: Keys, where: str) -> None:
    """Raises UserError for duplicate or missing columns, and for columns of a wrong type."""
    for path, names in [("", schema.names), *((field.name + ".", _field_names(field.type)) for field in schema)]:
        twice = sorted({path + name for name in names if names.count(name) > 1})
        if twice:
            raise UserError(f"duplicate column names; {where}; {', '.join(twice)} occurs more than once; rename one")
    if missing := [name for name in keys.needed if name not in schema.names]:
        found = [field.name for field in schema if _is_messages(field.type)]
        raise faults.missing_columns(
            missing, schema.names, found, prompt=keys.prompt, needs_grader=keys.needs_grader, where=where
        )
    types = {field.name: plain_type(field.type) for field in schema}

    def check(column: str, is_right: bool, expected: str) -> None:
        if not is_right:
            raise faults.wrong_type(where, column, str(schema.field(column).type)[:200], expected)

    if kind_of(types[keys.prompt]) != "string":
        item = types[keys.prompt].value_type if kind_of(types[keys.prompt]) == "list" else None
        check(keys.prompt, item is not None and kind_of(item) == "struct", faults.PROMPT)
        for name in ("role", "content"):
            if name not in _field_names(item):
                raise faults.message_lacks_field(f"{where} row 0", 0, name, _field_names(item))
            is_text = kind_of(item.field(name).type) in ("string", "null")
            check(keys.prompt, is_text, f"{faults.MESSAGES}, {name} a string")
    if "data_source" in types:
        check("data_source", kind_of(types["data_source"]) in ("string", "null"), "a string")
    if keys.answer:
        check(keys.answer, kind_of(types[keys.answer]) in ANSWER_KINDS, ANSWER)
    elif "reward_model" in types:
        is_struct = kind_of(types["reward_model"]) == "struct" and "ground_truth" in _field_names(types["reward_model"])
        check("reward_model", is_struct, "a struct {style, ground_truth}")
        check("reward_model", answer_kind(types) in ANSWER_KINDS, f"a ground_truth that is {ANSWER}")
    if "extra_info" in types:
        is_right = kind_of(types["extra_info"]) in ("struct", "string", "null")
        check("extra_info", is_right, "a struct (also as JSON text), or no such column")
    if "agent_name" in types:
        check("agent_name", kind_of(types["agent_name"]) in ("string", "null"), "a string, or no such column")


def _is_messages(kind: "pa.DataType") -> bool:
    kind = plain_type(kind)
    return kind_of(kind) == "list" and {"role", "content"} <= set(_field_names(kind.value_type))


def answer_kind(types: dict[str, "pa.DataType"]) -> str:
    return kind_of(types["reward_model"].field("ground_truth").type)


def kind_of(kind: "pa.DataType") -> str:
    """string, int, float, bool, list, struct, null, or Arrow's name for anything else."""
    import pyarrow.types as types

    kind = plain_type(kind)
    tests = {"string": types.is_string, "int": types.is_integer, "float": types.is_floating, "bool": types.is_boolean}
    tests |= {"list": types.is_list, "struct": types.is_struct, "null": types.is_null}
    return next((name for name, test in tests.items() if test(kind)), str(kind))


def plain_type(kind: "pa.DataType") -> "pa.DataType":
    """The type with plain strings and lists for large, view, fixed-size and dictionary ones, at every depth."""
    import pyarrow as pa
    import pyarrow.types as types

    if types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    if any(test(kind) for test in (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view)):
        return pa.list_(plain_type(kind.value_type))
    if types.is_struct(kind):
        return pa.struct([pa.field(field.name, plain_type(field.type)) for field in kind])
    return kind


def _field_names(kind: "pa.DataType") -> list[str]:
    import pyarrow.types as types

    return [field.name for field in kind] if types.is_struct(kind) else []


# ---- Checks of the rows ----


At = Callable[[int], str]
"""The place of a batch's row, in words: `--data.train-files FILE row 7`."""


def checked_batch(batch: "pa.RecordBatch", keys: Keys, at: At) -> "pa.RecordBatch":
    """The batch in verl's schema, with plain types. Raises UserError that names the first bad row."""
    import pyarrow as pa

    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if _longest(column) > MAX_CELL_BYTES:
            row = next(row for row in range(batch.num_rows) if _longest(column.slice(row, 1)) > MAX_CELL_BYTES)
            raise faults.too_large(at(row), name, _longest(column.slice(row, 1)))
    _check_utf8(batch, at)
    columns = {
        field.name: column.cast(plain_type(field.type))
        for field, column in zip(batch.schema, batch.columns, strict=True)
    }
    prompts = columns.pop(keys.prompt)
    prompts = _as_messages(prompts) if kind_of(prompts.type) == "string" else prompts
    _check_messages(prompts, keys.prompt, at)
    if "data_source" in columns:
        _check_sources(columns["data_source"], at)
    else:
        columns["data_source"] = pa.array([OWN_SOURCE] * len(prompts))
    if "extra_info" in columns and kind_of(columns["extra_info"].type) == "string":
        _check_json(columns["extra_info"], at)
    if keys.answer:
        answers = columns.pop(keys.answer) if keys.answer not in ID_COLUMNS else columns[keys.answer]
        columns["reward_model"] = pa.StructArray.from_arrays([answers], names=["ground_truth"])
    if "reward_model" in columns:
        _check_answers(columns["reward_model"], keys.graded_by, at)
    else:
        columns["reward_model"] = pa.StructArray.from_arrays([pa.nulls(len(prompts))], names=["ground_truth"])
    return pa.RecordBatch.from_pydict({"prompt": prompts, **columns})


def _as_messages(texts: "pa.StringArray") -> "pa.ListArray":
    """Each text as the only message of a user; of null, null."""
    import pyarrow as pa

    users = pa.array(["user"] * len(texts), pa.string())
    messages = pa.StructArray.from_arrays([users, texts], names=["role", "content"])
    offsets = pa.array(range(len(texts) + 1), pa.int32())
    return pa.ListArray.from_arrays(offsets, messages, mask=texts.is_null())


def _longest(array: "pa.Array") -> int:
    """Bytes of the longest text or binary value at any depth. A repeated value of a dictionary array is not copied."""
    import pyarrow.compute as pc
    import pyarrow.types as types

    kind = array.type
    if types.is_dictionary(kind):
        return _longest(array.dictionary.take(array.indices.drop_null().unique()))
    if types.is_struct(kind):
        return max((_longest(pc.struct_field(array, [field])) for field in range(kind.num_fields)), default=0)
    if types.is_map(kind) or kind_of(kind) == "list":
        return _longest(array.flatten())
    if types.is_string_view(kind):
        return _longest(array.cast("string"))
    if any(test(kind) for test in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)):
        return pc.max(pc.binary_length(array)).as_py() or 0
    return 0


def _check_utf8(batch: "pa.RecordBatch", at: At) -> None:
    """Raises UserError with row and column of the first text that is not UTF-8 (Arrow reads it without complaint)."""
    import pyarrow as pa

    try:
        batch.validate(full=True)
        return
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        for row in range(batch.num_rows):
            try:
                column[row].as_py()
            except UnicodeDecodeError as error:
                raise UserError(
                    f"text that is not UTF-8; {at(row)} column '{name}'; found byte "
                    f"0x{error.object[error.start]:02x} at {error.start}, expected UTF-8; re-encode the text"
                ) from None


def _check_messages(prompts: "pa.ListArray", column: str, at: At) -> None:
    """Raises UserError for a prompt without messages, and for a message without a known role or without content."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lengths = pc.fill_null(pc.list_value_length(prompts), 0)
    row = _first(pc.equal(lengths, 0))
    if row is not None:
        raise faults.no_messages(at(row), column)
    row = _first(pc.greater(lengths, MAX_MESSAGES))
    if row is not None:
        raise faults.too_many_messages(at(row), column, lengths[row].as_py())
    parents, messages = pc.list_parent_indices(prompts), prompts.flatten()
    roles, contents = pc.struct_field(messages, "role"), pc.struct_field(messages, "content")
    # No role, or another: null is in no set.
    unknown = pc.invert(
        pc.is_in(roles, value_set=pa.array(ROLES, roles.type if kind_of(roles.type) == "string" else None))
    )
    for bad, values, fault in (
        (unknown, roles, faults.unknown_role),
        (pc.is_null(contents), contents, faults.no_content),
    ):
        message = _first(bad)
        if message is not None:
            row = parents[message].as_py()
            raise fault(at(row), column, message - pc.index(parents, row).as_py(), values[message].as_py())


def _check_sources(sources: "pa.StringArray", at: At) -> None:
    """Raises UserError for a row without data source, or with one that cannot be shown."""
    import pyarrow as pa
    import pyarrow.compute as pc

    row = _first(pc.equal(pc.fill_null(sources.cast(pa.string()), ""), ""))
    if row is not None:
        raise faults.no_data_source(at(row))
    for name in sources.unique().to_pylist():
        if not name.isprintable():
            raise faults.unprintable_data_source(at(pc.index(sources, name).as_py()), name)


def _check_json(texts: "pa.StringArray", at: At) -> None:
    """Raises UserError for a text that is no JSON object: an evaluation writes those whose rows have other types so."""
    for row, text in enumerate(texts.to_pylist()):
        try:
            is_object = text is None or isinstance(json.loads(text), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            raise faults.wrong_type(at(row), "extra_info", f"text, {faults.short(text)[:80]}", "a JSON object")


def _check_answers(reward_model: "pa.StructArray", column: str, at: At) -> None:
    """Raises UserError for a row without ground truth, or with one that is NaN or infinite."""
    import pyarrow as pa
    import pyarrow.compute as pc

    answers = pc.struct_field(reward_model, "ground_truth")
    missing = pc.is_null(answers)
    if "style" in _field_names(reward_model.type):  # a reward model judges without a ground truth
        styles = pc.struct_field(reward_model, "style")
        missing = pc.and_not(missing, pc.fill_null(pc.equal(styles, pa.scalar("model", styles.type)), False))
    row = _first(missing)
    if row is not None:
        raise faults.no_answer(at(row), column)
    rows = None
    if kind_of(answers.type) == "list":
        rows, answers = pc.list_parent_indices(answers), answers.flatten()
    if kind_of(answers.type) == "float":
        place = _first(pc.invert(pc.is_finite(answers)))
        if place is not None:
            raise faults.no_number(at(place if rows is None else rows[place].as_py()), column, answers[place].as_py())


def _first(mask: "pa.Array") -> int | None:
    """The first place that is True."""
    import pyarrow.compute as pc

    place = pc.index(mask, True).as_py()
    return None if place < 0 else place
