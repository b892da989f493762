"""From files, or the rows of a dataset class, to checked rows."""

from bisect import bisect_left

from lib.data.faults import short
from lib.data.jsonl import read_jsonl
from lib.data.parquet import read_parquet
from lib.data.paths import data_format, resolve_file
from lib.data.rows import Rows, check_ids
from lib.data.schema import VERL_KEYS, Keys, answer_kind, check_schema, checked_batch
from lib.errors import UserError


def read_rows(names: tuple[str, ...], flag: str, *, keys: Keys = VERL_KEYS) -> tuple[Rows, list[str]]:
    """The checked rows of parquet and JSONL files in the given order, and warnings. Raises UserError for any fault."""
    tables, kinds, warnings = [], [], []
    for name in names:
        path = resolve_file(name, flag)
        where = f"{flag} {name}"
        read = read_parquet if data_format(path, where) == "parquet" else read_jsonl
        table, kind, media = read(path, keys, where)
        tables.append(table)
        kinds.append(kind)
        if media:
            warnings.append(f"{where}: column {', '.join(media)} is ignored, only text is used")
    rows = Rows(tables=tuple(tables), sources=tuple(names), answer_kinds=tuple(kinds))
    check_ids(rows, flag)
    return rows, warnings


def rows_from_dicts(dicts: list[dict], source: str, *, keys: Keys = VERL_KEYS) -> Rows:
    """The rows of a custom dataset, through the same checks as a file's. Raises UserError for any fault."""
    import pyarrow as pa

    if not dicts:
        raise UserError(f"no rows; {source}; found 0, expected at least 1; check the dataset's files and its __len__")
    try:
        batch = pa.RecordBatch.from_struct_array(pa.array(dicts))
    except UnicodeEncodeError:
        row = _first_misfit(dicts)
        name, value = next(cell for cell in dicts[row].items() if not _converts([dict([cell])]))
        raise UserError(
            f"text that is not Unicode; {source} row {row} column {name!r}; found half of a surrogate pair in "
            f"{short(value)}, expected whole characters; mend the text (text.encode(errors='replace').decode())"
        ) from None
    except (pa.ArrowException, OverflowError) as error:
        raise UserError(
            f"a row does not fit the others; {source} row {_first_misfit(dicts)}; {short(error)}; give each field one "
            "type in all rows"
        ) from error
    check_schema(batch.schema, keys, source)
    wanted = [name for name in keys.columns if name in batch.schema.names]
    table = pa.Table.from_batches([checked_batch(batch.select(wanted), keys, lambda row: f"{source} row {row}")])
    kind = answer_kind({field.name: field.type for field in table.schema})
    rows = Rows(tables=(table,), sources=(source,), answer_kinds=(kind,))
    check_ids(rows, source)
    return rows


def _first_misfit(dicts: list[dict]) -> int:
    """The first row that cannot stand behind those before it: a null there says nothing of a field's type."""
    return bisect_left(range(1, len(dicts)), True, key=lambda count: not _converts(dicts[:count]))


def _converts(dicts: list[dict]) -> bool:
    import pyarrow as pa

    try:
        pa.array(dicts)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        return False
    return True
