"""Checked rows of parquet files in verl's schema, and the writer of such files.

Every fault of a file that needs no tokenizer is found here, fast, with a message that names file, row and remedy.
Columns outside the schema are not read, and binary data is never decoded. Remote paths are not followed.
"""

import difflib
import json
import os
import stat
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from lib.data.schema import answer_kind, check_schema, checked_batch, kind_of, short
from lib.errors import UserError
from lib.storage.writing import write_whole
from lib.types import Sample

if TYPE_CHECKING:
    import pyarrow as pa

ID_COLUMNS = ("id", "uid")  # not extra_info.index: published verl files repeat it
MEDIA_COLUMNS = ("images", "videos", "audios")
BATCH_ROWS = 8192
PLAIN_BATCH_ROWS = 256  # where a repeated text is not kept once in memory: at most this many copies of it


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Checked rows in file order. Each file keeps its own Arrow table, so its extra_info may have its own fields."""

    tables: tuple["pa.Table", ...]
    sources: tuple[str, ...]
    """For messages: the file, or the custom dataset class, of each table."""
    prompt_key: str

    def __len__(self) -> int:
        return sum(table.num_rows for table in self.tables)

    def __getitem__(self, row: int) -> dict:
        """{prompt, data_source, reward_model, extra_info} of one row; a missing extra_info is {}."""
        table, place = self._find(row)
        cells = self.tables[table].slice(place, 1).to_pylist()[0]
        return {
            "prompt": _plain_messages(cells[self.prompt_key]),
            "data_source": cells["data_source"],
            "reward_model": cells["reward_model"],
            "extra_info": cells.get("extra_info") or {},
        }

    def sample(self, row: int, *, uid: int, prompt_ids: Sequence[int] = (), place: int = -1) -> Sample:
        """One row as reward functions need it; with its tokens and place, as the engine and the trainer do."""
        cells = self[row]
        return Sample(
            uid=uid,
            prompt_ids=list(prompt_ids),
            data_source=cells["data_source"],
            ground_truth=cells["reward_model"]["ground_truth"],
            extra_info=cells["extra_info"],
            place=place,
        )

    def take(self, rows: Sequence[int], columns: Sequence[str]) -> "pa.Table":
        """The given rows, at least one, in that order, with those of these columns that a file has.

        Raises pyarrow.ArrowException where the columns of two files have types that cannot be one.
        """
        import pyarrow as pa

        found = [self._find(row) for row in rows]
        pieces = [self.tables[table].slice(place, 1) for table, place in found]
        parts = [piece.select([name for name in columns if name in piece.column_names]) for piece in pieces]
        return pa.concat_tables(parts, promote_options="permissive")

    def where(self, row: int) -> str:
        """`FILE row PLACE` for messages, counted from 0 within the file."""
        table, place = self._find(row)
        return f"{self.sources[table]} row {place}"

    def iter_prompts(self) -> Iterator[list[dict]]:
        """Every row's messages."""
        for table in self.tables:
            for chunk in table.column(self.prompt_key).chunks:
                yield from (_plain_messages(messages) for messages in chunk.to_pylist())

    def data_sources(self, limit: int | None = None) -> set[str]:
        """The distinct data sources, of the first `limit` rows or of all."""
        found: set[str] = set()
        left = len(self) if limit is None else limit
        for table in self.tables:
            found.update(table.column("data_source").slice(0, max(0, left)).unique().to_pylist())
            left -= table.num_rows
        return found

    def spread(self, count: int, *, data_source: str | None = None, limit: int | None = None) -> list[int]:
        """At most `count` rows at even distances, of one data source or of any, among the first `limit` or all."""
        import pyarrow.compute as pc

        rows, start = range(len(self))[:limit], 0
        if data_source is not None:
            found: list[int] = []
            for table in self.tables:
                is_of_it = pc.equal(table.column("data_source"), data_source).combine_chunks()
                found += [start + row for row in pc.indices_nonzero(is_of_it).to_pylist()]
                start += table.num_rows
            rows = found[: bisect_left(found, len(rows))]
        return list(rows[:: max(1, -(-len(rows) // count))])

    def _find(self, row: int) -> tuple[int, int]:
        ends = list(accumulate(table.num_rows for table in self.tables))
        table = bisect_right(ends, row)
        return table, row - (ends[table] - self.tables[table].num_rows)


def _plain_messages(messages: list[dict]) -> list[dict]:
    """Drops what Arrow added: a field that only other messages have is null here, and templates would see it."""
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


# ---- Paths ----


def resolve_file(name: str, flag: str) -> Path:
    """The path of an existing, readable, non-empty regular file, `~` expanded. Raises UserError otherwise."""
    if "://" in name:
        raise UserError(f"a remote path; {flag} {name}; found a URL, expected a local file; download the file first")
    path = Path(os.path.expanduser(name))
    try:
        info = path.stat() if name else None
        if info and stat.S_ISREG(info.st_mode):
            path.open("rb").close()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"no such file; {flag} {name}; nothing there, working directory {Path.cwd()}; {_nearest(path)}"
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"the file cannot be opened; {flag} {name}; {reason}; check the path and its rights") from None
    if info is None:
        raise UserError(f"an empty path; {flag}; found '', expected a file; give the file's name")
    if stat.S_ISDIR(info.st_mode):
        kind = "*.py" if flag.endswith("path") else "*.parquet"
        inside = ", ".join(sorted(entry.name for entry in path.glob(kind))[:5]) or f"no {kind}"
        raise UserError(f"a directory, not a file; {flag} {name}; it holds {inside}; name the files themselves")
    if not stat.S_ISREG(info.st_mode):
        raise UserError(f"not a regular file; {flag} {name}; found a device, pipe or socket; give a file on disk")
    if info.st_size == 0:
        raise UserError(f"an empty file; {flag} {name}; found 0 bytes; write or copy the file again")
    return path


def _nearest(path: Path) -> str:
    """What the user may have meant: the nearest name in the deepest directory that exists."""
    while not path.parent.is_dir() and path.parent != path.parent.parent:
        path = path.parent
    try:
        names = sorted(os.listdir(path.parent))
    except OSError:
        names = []
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {path.parent / close[0]}?"
    return f"{path.parent} holds {', '.join(names[:5]) + (', ...' if len(names) > 5 else '') or 'nothing'}"


def _looks_like(head: bytes) -> str:
    """What a file that is not parquet seems to be, from its first bytes."""
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    magics = {b"PARE": "an encrypted parquet file", b"\x1f\x8b": "a gzip file", b"PK\x03\x04": "a zip file"}
    magics |= {b"ARROW1": "an Arrow IPC file", b"\x80": "a pickle", b"{": "JSON lines", b"[": "a JSON array"}
    for magic, name in magics.items():
        if text.startswith(magic):
            return name
    if text[:1] == b"<":
        return "an HTML or XML page (a failed download?)"
    first_line = text.split(b"\n")[0]
    if not text or any(byte < 9 for byte in head):
        return "binary data of another format"
    return "a CSV or TSV table" if b"," in first_line or b"\t" in first_line else "plain text"


def _check_magic(path: Path, where: str) -> None:
    """Raises UserError unless the file begins and ends as parquet does."""
    with path.open("rb") as file:
        head = file.read(512)
        file.seek(-min(4, path.stat().st_size), os.SEEK_END)
        tail = file.read()
    if head.startswith(b"version https://git-lfs"):
        raise UserError(f"a git LFS pointer, not the data; {where}; found a pointer file; run git lfs pull")
    if not head.startswith(b"PAR1"):
        raise UserError(
            f"not a parquet file; {where}; it looks like {_looks_like(head)}, expected the bytes PAR1; "
            "convert it to parquet (pyarrow.parquet.write_table, or pandas to_parquet)"
        )
    if tail != b"PAR1":
        raise UserError(
            f"a truncated parquet file; {where}; {path.stat().st_size} bytes that do not end with PAR1; copy it again"
        )


# ---- Reading ----


def read_rows(names: tuple[str, ...], flag: str, *, prompt_key: str = "prompt") -> tuple[Rows, list[str]]:
    """The checked rows of several parquet files in the given order, and warnings. Raises UserError for any fault."""
    import pyarrow as pa

    tables, sources, warnings = [], [], []
    for name in names:
        path = resolve_file(name, flag)
        where = f"{flag} {name}"
        _check_magic(path, where)
        try:
            table, media = _read_table(path, prompt_key, where)
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            raise UserError(f"a damaged parquet file; {where}; {short(error)}; write or copy the file again") from error
        tables.append(table)
        sources.append(name)
        if media:
            warnings.append(f"{where}: column {', '.join(media)} is ignored, only text is used")
    rows = Rows(tables=tuple(tables), sources=tuple(sources), prompt_key=prompt_key)
    _check_ids(rows, flag)
    return rows, warnings


def rows_from_dicts(dicts: list[dict], source: str, *, prompt_key: str = "prompt") -> Rows:
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
    check_schema(batch.schema, prompt_key, source)
    wanted = [name for name in _schema_columns(prompt_key) if name in batch.schema.names]
    table = pa.Table.from_batches([checked_batch(batch.select(wanted), prompt_key, source, 0)])
    rows = Rows(tables=(table,), sources=(source,), prompt_key=prompt_key)
    _check_ids(rows, source)
    return rows


def _first_misfit(dicts: list[dict]) -> int:
    """The first row that cannot stand behind those before it: a null there says nothing of a field's type."""
    return bisect_left(range(1, len(dicts)), True, key=lambda count: not _converts(dicts[:count]))


def is_unicode(value: object) -> bool:
    """Whether UTF-8 can hold all text in it: JSON's \\ud83d alone is half of a character."""
    try:
        json.dumps(value, ensure_ascii=False, default=str, skipkeys=True).encode()
    except UnicodeEncodeError:
        return False
    return True


def _converts(dicts: list[dict]) -> bool:
    import pyarrow as pa

    try:
        pa.array(dicts)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        return False
    return True


def _schema_columns(prompt_key: str) -> tuple[str, ...]:
    return (prompt_key, "data_source", "ability", "reward_model", "extra_info", *ID_COLUMNS)


def _read_table(path: Path, prompt_key: str, where: str) -> tuple["pa.Table", list[str]]:
    """One file's schema columns, checked batch by batch, and the media columns that were left out."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        schema, num_rows = file.schema_arrow, file.metadata.num_rows
        leaves = [file.schema.column(leaf) for leaf in range(len(file.schema))]
    check_schema(schema, prompt_key, where)
    if num_rows == 0:
        raise UserError(f"no rows; {where}; found 0, expected at least 1; write the file again")
    wanted = [name for name in _schema_columns(prompt_key) if name in schema.names]
    # Parquet stores a text that many rows repeat once. As a dictionary array it also stays once in memory, until its
    # length is known to be allowed. (The sizes in the footer would tell less; a damaged footer aborts their reader.)
    texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY" and leaf.logical_type.type == "STRING"]
    # Texts written as differences (DuckDB's parquet_version v2) have no such array: pyarrow refuses to make one.
    for once, batch_rows in ((texts, BATCH_ROWS), ([], PLAIN_BATCH_ROWS)):
        batches, first_row = [], 0
        try:
            with pq.ParquetFile(path, page_checksum_verification=True, read_dictionary=once) as file:
                for batch in file.iter_batches(batch_size=batch_rows, columns=wanted):
                    batches.append(checked_batch(batch, prompt_key, where, first_row))
                    first_row += batch.num_rows
            break
        except (OSError, pa.ArrowNotImplementedError) as error:
            if not once or "Not yet implemented" not in str(error):
                raise
    media = [name for name in MEDIA_COLUMNS if name in schema.names and not pa.types.is_null(schema.field(name).type)]
    return pa.Table.from_batches(batches), media


# ---- Across files ----


def answer_kinds(rows: Rows) -> list[tuple[str, str]]:
    """(file, kind of its ground truths) of each file; the kind is string, int, float, bool, list, struct or null."""
    types = [{field.name: field.type for field in table.schema} for table in rows.tables]
    return [(source, answer_kind(fields)) for source, fields in zip(rows.sources, types, strict=True)]


def check_answer_kinds(rows: Rows, flag: str) -> None:
    """Raises UserError when the ground truths are of one type in one file and of another in the next."""
    kinds = [(source, kind) for source, kind in answer_kinds(rows) if kind != "null"]
    for source, kind in kinds[1:]:
        if kind != kinds[0][1]:
            raise UserError(
                f"ground truths of two types; {flag}, column 'reward_model.ground_truth'; {kinds[0][0]} has "
                f"{kinds[0][1]}, {source} has {kind}, expected one type; convert one of the files"
            )


def _check_ids(rows: Rows, flag: str) -> None:
    """Raises UserError when two rows of these files have one id: some sample was copied twice by mistake."""
    for name in ID_COLUMNS:
        seen: dict = {}
        row = 0
        for table in rows.tables:
            has_ids = name in table.schema.names and kind_of(table.schema.field(name).type) in ("string", "int")
            ids = table.column(name).to_pylist() if has_ids else [None] * table.num_rows
            for value in ids:
                if value is not None and seen.setdefault(value, row) != row:
                    raise UserError(
                        f"a duplicate {name}; {flag}; {short(value)} in {rows.where(seen[value])} and in "
                        f"{rows.where(row)}, expected each {name} once; drop one row, or the column '{name}'"
                    )
                row += 1


def count_overlap(train: Rows, val: Rows) -> int:
    """How many validation prompts also occur, with the same contents, in the training rows."""
    import pyarrow.compute as pc

    if not len(train) or not len(val):
        return 0
    train_texts = _texts(train).unique()
    return pc.sum(pc.is_in(_texts(val), value_set=train_texts)).as_py()


def _texts(rows: Rows) -> "pa.LargeStringArray":
    """Each prompt's contents, joined."""
    import pyarrow as pa
    import pyarrow.compute as pc

    joined = []
    for table in rows.tables:
        for prompts in table.column(rows.prompt_key).chunks:
            contents = pa.ListArray.from_arrays(prompts.offsets, pc.struct_field(prompts.values, "content"))
            joined.append(pc.binary_join(contents, "\0").cast(pa.large_string()))
    return pa.chunked_array(joined, pa.large_string()).combine_chunks()


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
