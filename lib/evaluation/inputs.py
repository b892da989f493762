"""The files of an evaluation: its input, the groups that a killed one left behind, and its output.

    OUT.parquet  OUT.json  OUT.html       the rows with their responses; the summary; a page to look at
    OUT.parquet.parts/state.json          what defines the responses: another evaluation does not continue this one
    OUT.parquet.parts/rank_R.jsonl        a line a group, written when its last response ends, behind its own checksum
    OUT.parquet.parts/logs/               what the libraries and the reward function said
    .OUT.parquet.lock                     locked and there as long as an evaluation writes these

A line counts when it is whole, so nothing that was generated is lost or generated again, whenever the run is killed.
The parts are deleted once the output is written. Nothing here writes to an input file.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lib.config.values import JsonObject, resolve_path
from lib.data.chat_template import ControlTokens, first_date
from lib.data.faults import short
from lib.data.jsonl import read_columns
from lib.data.parquet import to_parquet
from lib.data.paths import data_format, resolve_file
from lib.data.prompts import DataConfig
from lib.data.reading import read_rows
from lib.data.rows import Rows
from lib.data.schema import kind_of
from lib.dist import World
from lib.errors import UserError, check_fields
from lib.evaluation.episodes import EPISODE_COLUMNS, Episode, columns_of, from_json, read_columns_of
from lib.secret_values import blank
from lib.storage.writing import lock, write_whole
from lib.tracking.run_folder import open_log
from lib.types import Score

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("responses", "scores", "predictions", "finish_reasons", "response_lengths")
"""What an evaluation adds: of each row, lists with an entry for every response (text, number, text, text, number);
and where there are turns, those of lib/evaluation/episodes.py."""


@dataclass(frozen=True, kw_only=True)
class EvalDataConfig:
    """Which rows are evaluated, and how they become prompts."""

    files: tuple[str, ...] = ()
    """Parquet or JSONL files in verl's schema (prompt, data_source, reward_model, extra_info), or without the last
    three where --reward.path scores, evaluated in this order."""
    prompt_key: str = "prompt"
    """Column with the prompt: a text, which a user says, or a list of {role, content} messages."""
    answer_key: str | None = None
    """Column with the right answer, the reward's ground_truth; None: that in the column reward_model."""
    max_prompt_len: int = 512
    """Longest prompt in tokens, chat template included."""
    filter_overlong_prompts: bool = False
    """Leave rows with a longer prompt out of the output (counted and reported) before `truncation` is looked at."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What to do with a longer prompt: stop, or cut tokens at its left, its right, or its middle (halves remain)."""
    chat_template_kwargs: JsonObject = field(default_factory=dict)
    """Variables for the chat template, as JSON: '{"enable_thinking": false}'."""
    control_tokens: ControlTokens = "keep"
    """A message that spells a control token of the model (<|im_end|>): keep that token, split it into ordinary text, or
    stop with an error."""
    max_samples: int | None = None
    """Evaluate only the first rows, this many; None: all."""

    def __post_init__(self) -> None:
        check_fields(self, "data.", max_samples=(self.max_samples is None or self.max_samples >= 1, "at least 1"))
        self.as_validation()

    def as_validation(self) -> DataConfig:
        """The same rows as a training run's validation data: an evaluation makes the very prompts of a validation."""
        shared = {name: value for name, value in vars(self).items() if name not in ("files", "max_samples")}
        return DataConfig(val_files=self.files, val_max_samples=self.max_samples, **shared)


@dataclass(frozen=True, kw_only=True)
class EvalGroup:
    """The responses to one prompt, in index order."""

    uid: int
    """The prompt's place among those that are evaluated, in the order of the input."""
    responses: list[str]
    """As reward functions see them: without special tokens."""
    finish_reasons: list[str | None]
    """`stop` or `length`, of conversations `turns` and `error` too; None: not known (another program's file)."""
    response_lengths: list[int | None]
    """In tokens, the end-of-sequence id included, and what was observed between turns; None: not known."""
    episodes: list[Episode] | None = None
    """None: a response is one turn."""
    scores: list[Score] | None = None
    """None: not scored."""


# ---- Input ----


def read_input(
    cfg: EvalDataConfig, *, with_responses: bool, needs_grader: bool = True, with_turns: bool = False
) -> tuple["pa.Table", Rows, list[str]]:
    """All columns of the input, its rows as checked for training, and warnings. Raises UserError for any fault.

    `with_responses`: the rows must have a column of responses; otherwise they must not. `needs_grader`: whether
    built-in graders score. `with_turns`: whether the responses will be conversations.
    """
    import pyarrow as pa

    if not cfg.files:
        raise UserError("no data; --data.files; found no file, expected at least 1; give parquet or JSONL files")
    rows, warnings = read_rows(cfg.files, "--data.files", keys=cfg.as_validation().keys(needs_grader=needs_grader))
    try:
        tables = [_read_columns(name, warnings) for name in cfg.files]
        table = pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"the input's columns cannot be read together; --data.files {' '.join(cfg.files)}; {short(error)}; "
            "evaluate the files one by one, or give each column one type"
        ) from error
    added = (*COLUMNS, *EPISODE_COLUMNS) if with_turns else COLUMNS
    own = [name for name in added if name in table.column_names]
    if own and not with_responses:
        raise UserError(
            f"the input has columns that the output adds; --data.files {' '.join(cfg.files)}; found {', '.join(own)}, "
            "expected rows without responses; add --score-only to score these, or drop the columns"
        )
    if with_responses:
        _check_responses(table, " ".join(cfg.files))
    num_rows = len(table) if cfg.max_samples is None else min(cfg.max_samples, len(table))
    return table.slice(0, num_rows), rows, warnings


def _read_columns(name: str, warnings: list[str]) -> "pa.Table":
    """All columns of one file. Adds a warning for those that are JSON as text in the output."""
    import pyarrow.parquet as pq

    path, where = resolve_file(name, "--data.files"), f"--data.files {name}"
    if data_format(path, where) == "parquet":
        return pq.read_table(path)
    table, as_text = read_columns(path, where)
    if as_text:
        listed = ", ".join(as_text)
        warnings.append(f"{where}: column {listed} has values of several types, and is JSON as text in the output")
    return table


def _check_responses(table: "pa.Table", files: str) -> None:
    where = f"--data.files {files}"
    if "responses" not in table.column_names:
        raise UserError(
            f"no responses to score; --score-only, {where}; found columns {', '.join(table.column_names)}, expected "
            "'responses'; leave --score-only out to generate them, or rename the column"
        )
    kind = table.schema.field("responses").type
    if kind_of(kind) != "list" or kind_of(kind.value_type) != "string":
        raise UserError(
            f"column 'responses' has the wrong type; {where}; found {short(str(kind))}, expected a list of strings; "
            "write one list a row"
        )
    for row, responses in enumerate(table.column("responses").to_pylist()):
        if not responses or None in responses:
            raise UserError(
                f"a row without responses; {where} row {row}; found {short(responses)}, expected at least 1 text; "
                "generate them again, or drop the row"
            )


def groups_of(table: "pa.Table", where: str = "--data.files") -> dict[int, EvalGroup]:
    """The groups in a table that has responses, by uid = row. What else it says of them stays known if it fits them.
    Raises UserError for turns that cannot be read."""
    columns = {name: table.column(name).to_pylist() for name in table.column_names if name in COLUMNS}
    fits = {
        "finish_reasons": lambda value: isinstance(value, str),
        "response_lengths": lambda value: type(value) is int and 0 <= value < 2**31,  # no bool; `write_output`'s int32
    }
    groups = []
    episodes = read_columns_of(table, where) or [None] * len(table)
    for uid, responses in enumerate(columns["responses"]):
        known = {}
        for name, fit in fits.items():
            found = columns.get(name, [None] * len(table))[uid]
            is_whole = isinstance(found, list) and len(found) == len(responses)
            is_known = is_whole and all(value is None or fit(value) for value in found)
            known[name] = found if is_known else [None] * len(responses)
        groups.append(EvalGroup(uid=uid, responses=responses, episodes=episodes[uid], **known))
    return dict(enumerate(groups))


# ---- Parts ----


class Parts:
    """The groups that are finished, on disk. Every rank writes its own file; all nodes must see the folder.

    Executed by all ranks together, but for `add`.
    """

    def __init__(self, folder: Path, state: Mapping[str, Any], world: World, *, overwrite: bool) -> None:
        """Takes the folder. `groups` are those that an earlier launch finished, by uid; `log` is this rank's.

        `state`: what defines the responses. Raises UserError when the folder belongs to another evaluation (unless
        `overwrite`, which starts afresh), is being written by another process, or cannot be written.
        """
        self.folder, self.world = folder, world
        self.problem: UserError | None = None
        text = json.dumps(state, indent=2, sort_keys=True)
        is_same = world.agree(lambda: _check_state(folder, json.loads(text), overwrite=overwrite))
        world.agree(lambda: _start(folder, text, keep=is_same) if world.rank == 0 else None)
        self._file = world.agree(self._open)  # the ranks have met: rank 0 is done
        self.groups = world.agree(self.read)
        world.gather(None)  # no rank adds before all have read

    def _open(self) -> Any:
        try:
            if not (self.folder / "state.json").is_file():
                raise UserError(
                    f"a node does not see the folder of finished responses; {self.folder}; found nothing on rank "
                    f"{self.world.rank}, expected rank 0's files; put --output on a disk that all nodes share"
                )
            file = _locked(self.folder / f"rank_{self.world.rank}.jsonl")
            self.log = open_log(self.folder / "logs" / f"rank_{self.world.rank}.log")
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            if file.read(1) not in (b"", b"\n"):
                file.write(b"\n")  # the last line was cut short; the next one begins anew
            return file
        except OSError as error:
            raise cannot_write(self.folder, error) from None

    def read(self) -> dict[int, EvalGroup]:
        """All finished groups, by uid."""
        groups = {}
        for path in sorted(self.folder.glob("rank_*.jsonl")):
            for line in path.read_bytes().split(b"\n"):
                checksum, _, text = line.partition(b" ")
                if text and checksum == _checksum(text):
                    group = EvalGroup(**json.loads(text))
                    kept = group.episodes and [from_json(entry) for entry in group.episodes]
                    groups[group.uid] = replace(group, episodes=kept)
        return groups

    def add(self, group: EvalGroup) -> None:
        """Appends a finished group. A failure is kept in `problem`: the rank's peers are inside the engine."""
        if self.problem is not None:
            return
        entry = blank({name: value for name, value in asdict(group).items() if name != "scores"})
        text = json.dumps(entry).encode()
        line = _checksum(text) + b" " + text + b"\n"
        try:
            if self._file.write(line) < len(line):
                raise OSError(None, "the disk is full")
        except OSError as error:
            self.problem = cannot_write(self.folder, error)

    def check(self) -> None:
        """Raises the `problem` of any rank on all ranks."""

        def check() -> None:
            if self.problem is not None:
                raise self.problem

        self.world.agree(check)

    def delete(self) -> None:
        """Removes the folder, now that the output is written; files that are not ours stay. Executed by rank 0."""
        _clear(self.folder)


def _checksum(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=8).hexdigest().encode()


def _check_state(folder: Path, state: dict[str, Any], *, overwrite: bool) -> bool:
    """Whether the folder's groups belong to this evaluation. Changes nothing."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"a file is in the way; {folder}; expected a folder or nothing; choose another --output")
    try:
        found = dict(json.loads((folder / "state.json").read_text()))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, TypeError, RecursionError) as error:
        if overwrite:
            return False
        raise UserError(
            f"what an earlier evaluation left cannot be read; {folder / 'state.json'}; {short(error)}; add "
            "--overwrite to generate all responses again"
        ) from None
    names = {*found, *state} - {"date"}  # which stands in the prompts, or nowhere
    different = [name for name in sorted(names) if found.get(name) != state.get(name)]
    if different and not overwrite:
        changes = ", ".join(f"{name} {short(found.get(name))} (now {short(state.get(name))})" for name in different)
        raise UserError(
            f"an unfinished evaluation with other settings; {folder}; found {changes}, expected the same; give these "
            "to continue it, add --overwrite to start afresh, or choose another --output"
        )
    return not different


def _start(folder: Path, state: str, *, keep: bool) -> None:
    try:
        if not keep:
            for path in folder.glob("rank_*.jsonl"):
                _locked(path).close()  # not from under an evaluation that runs
            _clear(folder)
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "state.json", state.encode())
    except OSError as error:
        raise cannot_write(folder, error) from None


def _locked(path: Path) -> Any:
    """The file, open to append, locked until it is closed or the process ends. Raises UserError when another has it."""
    file = path.open("a+b", buffering=0)
    if not lock(file.fileno()) or os.fstat(file.fileno()).st_nlink == 0:  # 0: an evaluation that just ended deleted it
        file.close()
        raise UserError(
            f"another evaluation writes here; {path.parent}; found a lock on {path.name}, expected none; wait for it "
            "or end it, or choose another --output"
        )
    return file


def _clear(folder: Path) -> None:
    """Removes what an evaluation writes, its state first: half a folder is then no evaluation's."""
    for path in (folder / "state.json", *folder.glob("rank_*.jsonl"), *folder.glob("logs/*.log")):
        path.unlink(missing_ok=True)
    for path in (folder / "logs", folder):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


# ---- Output ----


def check_output(output: str, files: Sequence[str], *, overwrite: bool) -> Path:
    """The absolute path of the output. Raises UserError when it exists, is an input file, or cannot be written.

    With unfinished parts beside it, an output is that of an evaluation killed while it wrote, and is written again.
    """
    path = Path(os.path.abspath(resolve_path(output, "--output")))
    if path.suffix != ".parquet":
        raise UserError(f"not a parquet file's name; --output {output}; expected NAME.parquet; add the ending")
    if path.resolve() in {resolve_file(name, "--data.files").resolve() for name in files}:
        raise UserError(
            f"the output is an input; --output {output}; found it in --data.files, expected another file; the input is "
            "never changed: choose another name"
        )
    existing = next(parent for parent in path.parents if parent.exists())
    if not existing.is_dir() or path.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            f"the output cannot be written; --output {output}; found {existing} without permission, or not of the "
            "right kind; choose another folder"
        )
    present = [file.name for file in (path, path.with_suffix(".json"), path.with_suffix(".html")) if file.exists()]
    if present and not overwrite and not (parts_folder(path) / "state.json").exists():
        raise UserError(
            f"the output exists; --output {output}; found {', '.join(present)}, expected none of them; choose another "
            "name, or add --overwrite"
        )
    return path


@contextmanager
def only_writer(output: Path) -> Iterator[None]:
    """Keeps other evaluations away from the output until the body ends, or the process. Executed by rank 0.

    Raises UserError when another one is there, or when nothing can be written there.
    """
    path = output.with_name(f".{output.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _locked(path)
    except OSError as error:
        raise cannot_write(path, error) from None
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # while it is locked: another one may have the next file of this name
        file.close()


def parts_folder(output: Path) -> Path:
    """Where an evaluation keeps what it has finished."""
    return output.with_name(output.name + ".parts")


def date_of(output: str) -> str:
    """The date that chat templates print: of the unfinished evaluation that goes on, otherwise now."""
    try:
        state = json.loads((parts_folder(resolve_path(output, "--output")) / "state.json").read_text())
        return first_date(state["date"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return first_date()


def write_output(path: Path, table: "pa.Table", groups: Sequence[EvalGroup]) -> None:
    """Writes the rows with the columns of their groups, in the order of the input, whole or not at all."""
    import pyarrow as pa

    columns: dict[str, pa.Array] = {
        "responses": pa.array([blank(group.responses) for group in groups], pa.list_(pa.string())),
        "finish_reasons": pa.array([group.finish_reasons for group in groups], pa.list_(pa.string())),
        "response_lengths": pa.array([group.response_lengths for group in groups], pa.list_(pa.int32())),
    }
    if groups[0].scores is not None:
        scores = [[score.score for score in group.scores] for group in groups]
        predictions = [[prediction_of(score) for score in group.scores] for group in groups]
        columns["scores"] = pa.array(scores, pa.list_(pa.float64()))
        columns["predictions"] = pa.array(predictions, pa.list_(pa.string()))
    if groups[0].episodes is not None:
        columns |= columns_of([group.episodes for group in groups])
    table = table.drop_columns([name for name in {*COLUMNS, *columns} if name in table.column_names])
    for name in (name for name in (*COLUMNS, *EPISODE_COLUMNS) if name in columns):
        table = table.append_column(name, columns[name])
    write_atomically(path, to_parquet(table))


def prediction_of(score: Score) -> str | None:
    """The answer that the reward function read in the response (`pred`); None: it reported none."""
    found = score.extras.get("pred")
    return None if found is None or found == "" else str(blank(found))


def write_atomically(path: Path, data: Any) -> None:
    """`write_whole`, with an OSError as UserError; makes the folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    except OSError as error:
        raise cannot_write(path, error) from None


def cannot_write(path: Path, error: OSError) -> UserError:
    """The error for people of a write that failed."""
    return UserError(
        f"cannot write the evaluation; {error.filename or path}; {error.strerror or error}; expected a folder that can "
        "be written; free space or mend the permissions, and start again: finished responses are kept; or choose "
        "another --output"
    )
