"""Checked rows, in file order, of whatever kind of files, and what is checked across files."""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from lib.data.faults import short
from lib.data.jsonl import JSON_COLUMNS
from lib.data.schema import ID_COLUMNS, kind_of
from lib.errors import UserError
from lib.types import Sample

if TYPE_CHECKING:
    import pyarrow as pa

OF_EPISODES = ("tools_kwargs", "need_tools_kwargs", "tool_selection", "interaction_kwargs")
"""The fields of extra_info by which verl's conversations choose."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Checked rows in file order, in verl's schema. Each file keeps its own Arrow table, so its extra_info may have
    its own fields."""

    tables: tuple["pa.Table", ...]
    """Of a JSONL file `prompt`, `reward_model` and `extra_info` are JSON as text, since two lines may have other fields
    and types, and `line` is where each row stands."""
    sources: tuple[str, ...]
    """For messages: the file, or the custom dataset class, of each table."""
    answer_kinds: tuple[str, ...]
    """Of each table, what its ground truths are: string, int, float, bool, list, struct or null."""

    def __len__(self) -> int:
        return sum(table.num_rows for table in self.tables)

    def __getitem__(self, row: int) -> dict:
        """{prompt, data_source, reward_model, extra_info, agent_name} of one row; a missing extra_info is {}."""
        table, place = self._find(row)
        cells = self.tables[table].slice(place, 1).to_pylist()[0]
        return {
            "prompt": _plain_messages(_value(cells["prompt"])),
            "data_source": cells["data_source"],
            "reward_model": _value(cells["reward_model"]),
            "extra_info": _value(cells.get("extra_info")) or {},
            "agent_name": cells.get("agent_name"),
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
            messages=cells["prompt"],
            agent_name=cells["agent_name"],
        )

    def take(self, rows: Sequence[int], columns: Sequence[str]) -> "pa.Table":
        """The given rows, at least one, in that order, with those of these columns that a file has.

        Raises pyarrow.ArrowException where the columns of two files have types that cannot be one.
        """
        import pyarrow as pa

        found = [self._find(row) for row in rows]
        pieces = [self.tables[table].slice(place, 1) for table, place in found]
        parts = [piece.select([name for name in columns if name in piece.column_names]) for piece in pieces]
        return pa.concat_tables([_without_json(part) for part in parts], promote_options="permissive")

    def where(self, row: int) -> str:
        """`FILE row PLACE` for messages, counted from 0 within the file; of JSONL `FILE line NUMBER`, from 1."""
        table, place = self._find(row)
        if "line" in self.tables[table].column_names:
            return f"{self.sources[table]} line {self.tables[table].column('line')[place].as_py()}"
        return f"{self.sources[table]} row {place}"

    def iter_prompts(self) -> Iterator[list[dict]]:
        """Every row's messages."""
        for table in self.tables:
            for chunk in table.column("prompt").chunks:
                yield from (_plain_messages(_value(messages)) for messages in chunk.to_pylist())

    def iter_choices(self) -> Iterator[dict]:
        """{agent_name, extra_info} of every row, of extra_info only the fields that decide about its episodes."""
        for table in self.tables:
            for batch in table.to_batches():
                has_agents, has_infos = ("agent_name" in batch.schema.names, "extra_info" in batch.schema.names)
                agents = batch.column("agent_name").to_pylist() if has_agents else [None] * len(batch)
                infos = _of_episodes(batch.column("extra_info")) if has_infos else [{}] * len(batch)
                for agent_name, extra_info in zip(agents, infos, strict=True):
                    yield {"agent_name": agent_name, "extra_info": extra_info}

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


def _value(cell: Any) -> Any:
    """A cell as reward functions and templates get it."""
    return json.loads(cell) if isinstance(cell, str) else cell


def _of_episodes(infos: "pa.Array") -> list[dict]:
    """Of each extra_info the fields that it has of OF_EPISODES."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if kind_of(infos.type) != "struct":
        values = ((_value(cell) or {}) for cell in infos.to_pylist())
        return [{name: value[name] for name in OF_EPISODES if name in value} for value in values]
    names = [name for name in OF_EPISODES if infos.type.get_field_index(name) >= 0]
    if not names:
        return [{}] * len(infos)
    return pa.StructArray.from_arrays([pc.struct_field(infos, name) for name in names], names=names).to_pylist()


def _without_json(row: "pa.Table") -> "pa.Table":
    """One row with columns of Arrow's own types. Raises pyarrow.ArrowException where a value has none."""
    import pyarrow as pa

    for place, field in enumerate(row.schema):
        if field.name in JSON_COLUMNS and kind_of(field.type) == "string":
            values = [_value(cell) for cell in row.column(place).to_pylist()]
            values = [None if value == {} else value for value in values]  # parquet has no struct without fields
            row = row.set_column(place, field.name, pa.array(values))
    return row


def _plain_messages(messages: list[dict]) -> list[dict]:
    """Drops what Arrow added: a field that only other messages have is null here, and templates would see it."""
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


# ---- Across files ----


def check_answer_kinds(rows: Rows, flag: str) -> None:
    """Raises UserError when the ground truths are of one type in one file and of another in the next."""
    kinds = [pair for pair in zip(rows.sources, rows.answer_kinds, strict=True) if pair[1] != "null"]
    for source, kind in kinds[1:]:
        if kind != kinds[0][1]:
            raise UserError(
                f"ground truths of two types; {flag}, column 'reward_model.ground_truth'; {kinds[0][0]} has "
                f"{kinds[0][1]}, {source} has {kind}, expected one type; convert one of the files"
            )


def check_ids(rows: Rows, flag: str) -> None:
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
        for prompts in table.column("prompt").chunks:
            if kind_of(prompts.type) == "string":
                texts = ["\0".join(each["content"] for each in _value(messages)) for messages in prompts.to_pylist()]
                joined.append(pa.array(texts, pa.large_string()))
                continue
            contents = pa.ListArray.from_arrays(prompts.offsets, pc.struct_field(prompts.values, "content"))
            joined.append(pc.binary_join(contents, "\0").cast(pa.large_string()))
    return pa.chunked_array(joined, pa.large_string()).combine_chunks()
