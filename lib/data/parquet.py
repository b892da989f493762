"""Parquet files: read in verl's schema, and written.

Every fault of a file that needs no tokenizer is found here, fast, with a message that names file, row and remedy.
Columns outside the schema are not read, and binary data is never decoded. Remote paths are not followed.
"""

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lib.data.faults import short
from lib.data.schema import MEDIA_COLUMNS, Keys, answer_kind, check_schema, checked_batch
from lib.errors import UserError
from lib.storage.writing import write_whole

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 8192
PLAIN_BATCH_ROWS = 256  # where a repeated text is not kept once in memory: at most this many copies of it


# ---- Reading ----


def read_parquet(path: Path, keys: Keys, where: str) -> tuple["pa.Table", str, list[str]]:
    """One file in verl's schema, checked batch by batch; the kind of its ground truths; the media columns left out.

    Raises UserError for any fault.
    """
    import pyarrow as pa

    _check_end(path, where)
    try:
        table, media = _read_table(path, keys, where)
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise UserError(f"a damaged parquet file; {where}; {short(error)}; write or copy the file again") from error
    return table, answer_kind({field.name: field.type for field in table.schema}), media


def _check_end(path: Path, where: str) -> None:
    """Raises UserError unless the file ends as parquet does."""
    with path.open("rb") as file:
        file.seek(-min(4, path.stat().st_size), os.SEEK_END)
        tail = file.read()
    if tail != b"PAR1":
        raise UserError(
            f"a truncated parquet file; {where}; {path.stat().st_size} bytes that do not end with PAR1; copy it again"
        )


def _read_table(path: Path, keys: Keys, where: str) -> tuple["pa.Table", list[str]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        schema, num_rows = file.schema_arrow, file.metadata.num_rows
        leaves = [file.schema.column(leaf) for leaf in range(len(file.schema))]
    check_schema(schema, keys, where)
    if num_rows == 0:
        raise UserError(f"no rows; {where}; found 0, expected at least 1; write the file again")
    wanted = [name for name in keys.columns if name in schema.names]
    # Parquet stores a text that many rows repeat once. As a dictionary array it also stays once in memory, until its
    # length is known to be allowed. (The sizes in the footer would tell less; a damaged footer aborts their reader.)
    texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY" and leaf.logical_type.type == "STRING"]
    # Texts written as differences (DuckDB's parquet_version v2) have no such array: pyarrow refuses to make one.
    for once, batch_rows in ((texts, BATCH_ROWS), ([], PLAIN_BATCH_ROWS)):
        batches, first_row = [], 0
        try:
            with pq.ParquetFile(path, page_checksum_verification=True, read_dictionary=once) as file:
                for batch in file.iter_batches(batch_size=batch_rows, columns=wanted):
                    batches.append(checked_batch(batch, keys, partial(_at, where, first_row)))
                    first_row += batch.num_rows
            break
        except (OSError, pa.ArrowNotImplementedError) as error:
            if not once or "Not yet implemented" not in str(error):
                raise
    media = [name for name in MEDIA_COLUMNS if name in schema.names and not pa.types.is_null(schema.field(name).type)]
    return pa.Table.from_batches(batches), media


def _at(where: str, first_row: int, row: int) -> str:
    return f"{where} row {first_row + row}"


# ---- Writing ----


def to_parquet(table: "pa.Table") -> bytes:
    """The table as a parquet file, with a checksum for every page (found again by read_rows)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, write_page_checksum=True)
    return sink.getvalue().to_pybytes()


def write_rows(path: Path, rows: list[dict]) -> None:
    """Writes rows as `to_parquet` does, whole or not at all.

    Raises UserError when the folder cannot be made or written.
    """
    import pyarrow as pa

    data = to_parquet(pa.Table.from_pylist(rows))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    except OSError as error:
        raise UserError(
            f"cannot write the parquet file; {path}; found {error.strerror or error}, expected a folder that can be "
            "made and written; free some space, or choose another folder"
        ) from error
