"""What a row must look like: verl's schema, checked on Arrow types and record batches.

The first fault raises UserError with file, row, column and remedy. Rows are counted from 0 within their file.
"""

from typing import TYPE_CHECKING

from lib.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_CELL_BYTES = 32 * 1024**2
MAX_MESSAGES = 10_000


# ---- Checks of the schema ----


def check_schema(schema: "pa.Schema", prompt_key: str, where: str) -> None:
    """Raises UserError for duplicate or missing columns, and for columns of a wrong type."""
    for path, names in [("", schema.names), *((field.name + ".", _field_names(field.type)) for field in schema)]:
        twice = sorted({path + name for name in names if names.count(name) > 1})
        if twice:
            raise UserError(f"duplicate column names; {where}; {', '.join(twice)} occurs more than once; rename one")
    missing = [name for name in (prompt_key, "data_source", "reward_model") if name not in schema.names]
    if missing:
        raise _missing_error(missing, schema, prompt_key, where)
    types = {field.name: plain_type(field.type) for field in schema}
    messages = "a list of {role, content} messages"
    item = types[prompt_key].value_type if kind_of(types[prompt_key]) == "list" else None
    if item is None or kind_of(item) != "struct":
        raise _type_error(where, prompt_key, schema, messages)
    for name in ("role", "content"):
        if name not in _field_names(item):
            raise UserError(
                f"messages without {name}; {where} row 0 message 0; fields found: {', '.join(_field_names(item))}, "
                f"expected role (one of {', '.join(ROLES)}) and content; add the field"
            )
        if kind_of(item.field(name).type) not in ("string", "null"):
            raise _type_error(where, prompt_key, schema, f"{messages}, {name} a string")
    if kind_of(types["data_source"]) not in ("string", "null"):
        raise _type_error(where, "data_source", schema, "a string")
    if kind_of(types["reward_model"]) != "struct" or "ground_truth" not in _field_names(types["reward_model"]):
        raise _type_error(where, "reward_model", schema, "a struct {style, ground_truth}")
    if answer_kind(types) not in ("string", "int", "float", "bool", "list", "struct", "null"):
        raise _type_error(where, "reward_model", schema, "a ground_truth that is text, a number or a list of these")
    if kind_of(types.get("extra_info", types["reward_model"])) not in ("struct", "null"):
        raise _type_error(where, "extra_info", schema, "a struct, or no such column")


def _missing_error(missing: list[str], schema: "pa.Schema", prompt_key: str, where: str) -> UserError:
    """Names all of them, and how to come by each: a column of messages under another name needs only its option."""
    whats = {"data_source": "a name that selects the reward function", "reward_model": "{style, ground_truth}"}
    whats[prompt_key] = "a list of {role, content} messages"
    remedies = [f"add '{name}', {whats[name]}, to each row" for name in missing if name != prompt_key]
    if prompt_key in missing:
        found = [field.name for field in schema if _is_messages(field.type)]
        what = f"set --data.prompt-key {found[0]}" if found else f"make '{prompt_key}', {whats[prompt_key]}"
        remedies.insert(0, what + ("" if found else ", or name such a column by --data.prompt-key"))
    are = "column {} is missing" if len(missing) == 1 else "columns {} are missing"
    return UserError(
        f"{are.format(' and '.join(map(repr, missing)))}; {where}; columns found: {_listed(schema.names)}; "
        f"{', and '.join(remedies)} (python -m recipes.prepare_gsm8k makes such a file)"
    )


def _is_messages(kind: "pa.DataType") -> bool:
    kind = plain_type(kind)
    return kind_of(kind) == "list" and {"role", "content"} <= set(_field_names(kind.value_type))


def _listed(names: list[str]) -> str:
    """Names for a message, at most 200 characters; what a terminal would obey is escaped."""
    text = ", ".join(name if name.isprintable() else repr(name) for name in names)
    return text if len(text) <= 200 else text[:197] + "..."


def _type_error(where: str, column: str, schema: "pa.Schema", expected: str) -> UserError:
    found = str(schema.field(column).type)
    return UserError(
        f"column '{column}' has the wrong type; {where}; found {found[:200]}, expected {expected}; "
        "write the column in verl's schema"
    )


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


def checked_batch(batch: "pa.RecordBatch", prompt_key: str, where: str, first_row: int) -> "pa.RecordBatch":
    """The batch with plain types. Raises UserError that names the first bad row."""
    import pyarrow as pa

    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if _longest(column) > MAX_CELL_BYTES:
            row = next(row for row in range(batch.num_rows) if _longest(column.slice(row, 1)) > MAX_CELL_BYTES)
            raise UserError(
                f"a cell is too large; {where} row {first_row + row} column '{name}'; found "
                f"{_longest(column.slice(row, 1))} bytes, expected at most {MAX_CELL_BYTES}; shorten it or drop the row"
            )
    _check_utf8(batch, where, first_row)
    fields = [pa.field(field.name, plain_type(field.type)) for field in batch.schema]
    batch = pa.RecordBatch.from_arrays(
        [column.cast(field.type) for column, field in zip(batch.columns, fields, strict=True)], schema=pa.schema(fields)
    )
    _check_messages(batch.column(prompt_key), prompt_key, where, first_row)
    _check_answers(batch, where, first_row)
    return batch


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


def _check_utf8(batch: "pa.RecordBatch", where: str, first_row: int) -> None:
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
                    f"text that is not UTF-8; {where} row {first_row + row} column '{name}'; found byte "
                    f"0x{error.object[error.start]:02x} at {error.start}, expected UTF-8; re-encode the text"
                ) from None


def _check_messages(prompts: "pa.ListArray", prompt_key: str, where: str, first_row: int) -> None:
    """Raises UserError for a prompt without messages, and for a message without a known role or without content."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lengths = pc.fill_null(pc.list_value_length(prompts), 0)
    place = f"{where} row {{row}} column '{prompt_key}'"
    row = _first(pc.equal(lengths, 0))
    if row is not None:
        raise UserError(
            f"a prompt without messages; {place.format(row=first_row + row)}; found null or an empty list, "
            "expected at least 1 message; drop the row"
        )
    row = _first(pc.greater(lengths, MAX_MESSAGES))
    if row is not None:
        raise UserError(
            f"a prompt with too many messages; {place.format(row=first_row + row)}; found {lengths[row].as_py()}, "
            f"expected at most {MAX_MESSAGES}; drop the row"
        )
    parents, messages = pc.list_parent_indices(prompts), prompts.flatten()
    roles, contents = pc.struct_field(messages, "role"), pc.struct_field(messages, "content")
    # No role, or another: null is in no set.
    unknown = pc.invert(
        pc.is_in(roles, value_set=pa.array(ROLES, roles.type if kind_of(roles.type) == "string" else None))
    )
    for bad, what, expected in (
        (unknown, "a message without a known role", f"one of {', '.join(ROLES)}"),
        (pc.is_null(contents), "a message without content", "a string"),
    ):
        message = _first(bad)
        if message is not None:
            row = parents[message].as_py()
            found = (roles if bad is unknown else contents)[message].as_py()
            number = message - pc.index(parents, row).as_py()
            raise UserError(
                f"{what}; {place.format(row=first_row + row)} message {number}; found {short(found)}, "
                f"expected {expected}; mend or drop the row"
            )


def _check_answers(batch: "pa.RecordBatch", where: str, first_row: int) -> None:
    """Raises UserError for a row without data source, without ground truth, or with one that is NaN or infinite."""
    import pyarrow as pa
    import pyarrow.compute as pc

    data_source, reward_model = batch.column("data_source"), batch.column("reward_model")
    row = _first(pc.equal(pc.fill_null(data_source.cast(pa.string()), ""), ""))
    if row is not None:
        raise UserError(
            f"a row without data_source; {where} row {first_row + row}; found null or '', expected the name that "
            "selects the reward function; fill it in"
        )
    for name in data_source.unique().to_pylist():
        if not name.isprintable():  # it names metrics, stands in the terminal and on pages
            row = pc.index(data_source, name).as_py()
            raise UserError(
                f"a data_source with a character that cannot be shown; {where} row {first_row + row}; found "
                f"{short(name)}, expected printable text in one line; rename it in every row"
            )
    answers = pc.struct_field(reward_model, "ground_truth")
    missing = pc.is_null(answers)
    if "style" in _field_names(reward_model.type):  # a reward model judges without a ground truth
        styles = pc.struct_field(reward_model, "style")
        missing = pc.and_not(missing, pc.fill_null(pc.equal(styles, pa.scalar("model", styles.type)), False))
    row = _first(missing)
    if row is not None:
        raise UserError(
            f"a row without ground truth; {where} row {first_row + row} column 'reward_model'; found null, expected an "
            "answer; fill it in ('' if your reward function needs none), or drop the row"
        )
    rows = None
    if kind_of(answers.type) == "list":
        rows, answers = pc.list_parent_indices(answers), answers.flatten()
    if kind_of(answers.type) == "float":
        place = _first(pc.invert(pc.is_finite(answers)))
        if place is not None:
            row = place if rows is None else rows[place].as_py()
            raise UserError(
                f"a ground truth that is no number; {where} row {first_row + row} column 'reward_model'; found "
                f"{answers[place].as_py()}, expected a finite number; mend or drop the row"
            )


def _first(mask: "pa.Array") -> int | None:
    """The first place that is True."""
    import pyarrow.compute as pc

    place = pc.index(mask, True).as_py()
    return None if place < 0 else place


def short(value: object) -> str:
    """A value for a message, at most 200 characters."""
    text = " ".join(str(value).split()) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
