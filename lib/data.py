"""From data files to prompts: config, tokenizer, chat template, length limit, and the endless seeded prompt stream.

Rows come checked from lib/parquet.py or from a custom dataset class. Every rank holds all prompts and sees the same
stream; which rank generates what is decided elsewhere.
"""

import hashlib
import json
import re
import traceback
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lib.config import JsonObject
from lib.custom_dataset import check_dataset_class, custom_rows
from lib.errors import UserError, check_fields
from lib.parquet import Rows, answer_kinds, check_answer_kinds, count_overlap, read_rows, resolve_file
from lib.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "val"]
OWN_TEMPLATE_ARGUMENTS = (
    *("conversation", "tools", "documents", "messages", "chat_template", "add_generation_prompt", "tokenize"),
    *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
)
ENCODE_ROWS = 1000
PROGRESS_ROWS = 20_000  # below this many prompts tokenising takes seconds


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which rows are read, and how they become prompts."""

    train_files: tuple[str, ...] = ()
    """Parquet files to train on, in verl's schema (prompt, data_source, reward_model, extra_info); `~` is expanded."""
    val_files: tuple[str, ...] = ()
    """Parquet files to validate on; none: no validation."""
    prompt_key: str = "prompt"
    """Column with the prompt, a list of {role, content} messages."""
    max_prompt_len: int = 512
    """Longest prompt in tokens, chat template included."""
    filter_overlong_prompts: bool = False
    """Drop prompts longer than the limit (counted and reported) before `truncation` is looked at."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What to do with a longer prompt: stop, or cut tokens at its left, its right, or its middle (halves remain)."""
    chat_template_kwargs: JsonObject = field(default_factory=dict)
    """Variables for the chat template, as JSON: '{"enable_thinking": false}'."""
    dataset_path: str | None = None
    """Python file with a dataset class of your own, used for training and validation; see lib/custom_dataset.py."""
    dataset_name: str | None = None
    """Name of the class in --data.dataset-path."""
    train_max_samples: int | None = None
    """Use only the first rows of the training data, this many; None: all."""
    val_max_samples: int | None = None
    """Use only the first rows of the validation data, this many; None: all."""
    shuffle: bool = True
    """Shuffle the training rows anew in every epoch; the order follows from --seed and the epoch alone."""

    def __post_init__(self) -> None:
        limits = {name: getattr(self, name) for name in ("max_prompt_len", "train_max_samples", "val_max_samples")}
        check_fields(self, "data.", **{name: (it is None or it >= 1, "at least 1") for name, it in limits.items()})
        if (self.dataset_path is None) != (self.dataset_name is None):
            raise UserError(
                "half of a custom dataset; --data.dataset-path and --data.dataset-name; found "
                f"{self.dataset_path} and {self.dataset_name}; expected both or neither; give the other one too"
            )
        taken = sorted(set(self.chat_template_kwargs) & set(OWN_TEMPLATE_ARGUMENTS))
        if taken:
            raise UserError(
                f"a template variable that is set already; --data.chat-template-kwargs; found {', '.join(taken)}; "
                "expected variables of the model's own template, such as enable_thinking; leave it out"
            )


# ---- Rows ----


@dataclass(frozen=True, kw_only=True)
class DataFiles:
    """The rows of both splits, checked. None where a custom dataset class makes them, which needs the tokenizer."""

    train: Rows | None
    val: Rows | None
    warnings: tuple[str, ...]


def check_data_files(cfg: DataConfig) -> DataFiles:
    """The rows of --data.train-files and --data.val-files, read once. Raises UserError for any fault in them.

    Needs neither transformers nor a tokenizer. With a custom dataset class, finds the files and the class, runs no
    code of it.
    """
    train_paths = _different_files(cfg.train_files, "--data.train-files")
    val_paths = _different_files(cfg.val_files, "--data.val-files")
    warnings = [f"{path} is given both for training and for validation" for path in sorted(train_paths & val_paths)]
    if cfg.dataset_path is not None:
        check_dataset_class(cfg.dataset_path, cfg.dataset_name)
        no_rows, _ = read_rows((), "--data.val-files")
        return DataFiles(train=None, val=None if cfg.val_files else no_rows, warnings=tuple(warnings))
    if not cfg.train_files:
        raise UserError("no training data; --data.train-files; found no file, expected at least 1; give parquet files")
    train, train_warnings = read_rows(cfg.train_files, "--data.train-files", prompt_key=cfg.prompt_key)
    val, val_warnings = read_rows(cfg.val_files, "--data.val-files", prompt_key=cfg.prompt_key)
    check_answer_kinds(train, "--data.train-files")
    check_answer_kinds(val, "--data.val-files")
    _check_answers_agree(train, val)
    warnings += [*train_warnings, *val_warnings]
    overlap = count_overlap(train, val)
    if overlap:
        warnings.append(f"{overlap} of the {len(val)} validation prompts also occur in the training data")
    return DataFiles(train=train, val=val, warnings=tuple(warnings))


def _different_files(names: tuple[str, ...], flag: str) -> set[Path]:
    """The resolved paths of these files. Raises UserError when one is given twice: its rows would count double."""
    found: dict[Path, str] = {}
    for name in names:
        path = resolve_file(name, flag).resolve()
        if path in found:
            raise UserError(
                f"a file is given twice; {flag}; found {found[path]} and {name}, expected each file once; leave one out"
            )
        found[path] = name
    return set(found)


def _check_answers_agree(train: Rows, val: Rows) -> None:
    """Raises UserError when training has numbers where validation has text, or the reverse.

    Lists beside text are left alone: a benchmark may have several right answers.
    """
    scalars = ("string", "int", "float", "bool")
    trained = next(((name, kind) for name, kind in answer_kinds(train) if kind in scalars), None)
    validated = next(((name, kind) for name, kind in answer_kinds(val) if kind in scalars), None)
    if trained and validated and trained[1] != validated[1]:
        raise UserError(
            "ground truths of two types; --data.train-files and --data.val-files, column 'reward_model.ground_truth'; "
            f"{trained[0]} has {trained[1]}, {validated[0]} has {validated[1]}, expected one type; convert one of them"
        )


# ---- Tokenizer ----


def load_tokenizer(
    model_path: str | Path, *, chat_template_kwargs: dict[str, Any] | None = None
) -> "PreTrainedTokenizerBase":
    """The model folder's tokenizer, its chat template tried on one message. Raises UserError. Runs no remote code."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model_path), trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise plain Exception, OSError, KeyError and others
        raise UserError(
            f"the tokenizer does not load; --model.path {model_path}; {type(error).__name__}: {_first_line(error)}; "
            "copy the model's tokenizer files (tokenizer.json, tokenizer_config.json) again"
        ) from error
    try:
        tokenizer.get_chat_template()
    except ValueError as error:
        raise UserError(
            f"no chat template; --model.path {model_path}; found none in tokenizer_config.json or chat_template.jinja, "
            "expected one; use an instruction-tuned model, or copy chat_template.jinja of one into the folder"
        ) from error
    try:
        (ids,) = _encode(tokenizer, [[{"role": "user", "content": "1 + 1 = ?"}]], chat_template_kwargs or {})
        if not len(ids):
            raise ValueError("it makes no tokens")
    except Exception as error:
        raise UserError(
            f"the chat template fails; --model.path {model_path}, {_template_line(error)}; {_first_line(error)} for "
            "one user message; mend the template, or check --data.chat-template-kwargs"
        ) from error
    return tokenizer


def stop_token_ids(tokenizer: "PreTrainedTokenizerBase", model_path: str | Path) -> list[int]:
    """The ids that end a response, ascending: the tokenizer's and those of generation_config.json (one or a list)."""
    ids = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    path = Path(model_path) / "generation_config.json"
    if path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise UserError(f"not a JSON object; {path}; {error}; copy the model's generation config again") from error
        entries = found if isinstance(found, list) else [] if found is None else [found]
        if not all(type(entry) is int and 0 <= entry < len(tokenizer) for entry in entries):
            raise UserError(
                f"a wrong eos_token_id; {path}; found {found}, expected ids from 0 to {len(tokenizer) - 1}; correct it"
            )
        ids |= set(entries)
    if not ids:
        raise UserError(
            f"no end-of-sequence token; {model_path}; found none in the tokenizer and generation_config.json, expected "
            "at least 1; set eos_token in tokenizer_config.json"
        )
    return sorted(ids)


def _encode(tokenizer: "PreTrainedTokenizerBase", conversations: list[list[dict]], kwargs: dict) -> list[np.ndarray]:
    """Token ids of each conversation, up to where the assistant begins."""
    encoded = tokenizer.apply_chat_template(
        conversations, add_generation_prompt=True, tokenize=True, return_dict=True, **kwargs
    )
    return [np.array(ids, dtype=np.int32) for ids in encoded["input_ids"]]


def _template_line(error: BaseException) -> str:
    """`template line 12`: where Jinja was when it failed."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
    return f"template line {line}" if line else "template line unknown"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


# ---- Prompts ----


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Tokenised rows, in file order."""

    rows: Rows
    kept: list[int]
    """Of each prompt, its place in `rows`."""
    token_ids: list[np.ndarray]
    """Of each prompt, int32 ids, at most --data.max-prompt-len."""
    num_filtered: int
    """Rows that --data.filter-overlong-prompts dropped."""
    num_truncated: int
    """Prompts that --data.truncation shortened."""
    longest: int
    """Tokens of the longest prompt before either."""
    warnings: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.kept)

    def sample(self, place: int, uid: int) -> Sample:
        """The prompt at a place in file order, under the given uid."""
        return self.rows.sample(self.kept[place], uid=uid, prompt_ids=self.token_ids[place].tolist())

    def all_samples(self) -> list[Sample]:
        """Every prompt in file order, uid = place. For validation."""
        return [self.sample(place, place) for place in range(len(self))]

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with any prompt's tokens, any answer, or the order of the rows."""
        digest = hashlib.sha256()
        for place, ids in enumerate(self.token_ids):
            row = self.rows[self.kept[place]]
            answer = [row["data_source"], row["reward_model"], row["extra_info"]]
            digest.update(ids.tobytes() + json.dumps(answer, sort_keys=True, default=str).encode() + b"\n")
        return digest.hexdigest()[:16]


def tokenize(
    cfg: DataConfig,
    files: DataFiles,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    split: Split,
    files_flag: str | None = None,
    show_progress: bool = False,
) -> Prompts:
    """The prompts of a split under the chat template, within --data.max-prompt-len. Raises UserError.

    `files_flag`: the option that messages name, None: the split's. Validation without files gives no prompts.
    Truncation of ids 0..9 to 5: left 5-9, right 0-4, middle 0 1 7 8 9.
    """
    rows = files.train if split == "train" else files.val
    files_flag = files_flag or f"--data.{split}-files"
    if rows is None:
        rows = custom_rows(
            cfg.dataset_path,
            cfg.dataset_name,
            data_files=cfg.train_files if split == "train" else cfg.val_files,
            files_flag=files_flag,
            tokenizer=tokenizer,
            config=cfg,
        )
    limit = cfg.train_max_samples if split == "train" else cfg.val_max_samples
    num_rows = len(rows) if limit is None else min(limit, len(rows))
    token_ids = _encode_rows(cfg, rows, num_rows, tokenizer, show_progress)
    lens = [len(ids) for ids in token_ids]
    kept, warning = _apply_limit(cfg, rows, lens, files_flag)
    return Prompts(
        rows=rows,
        kept=kept,
        token_ids=[_truncated(token_ids[row], cfg.max_prompt_len, cfg.truncation) for row in kept],
        num_filtered=num_rows - len(kept),
        num_truncated=sum(lens[row] > cfg.max_prompt_len for row in kept),
        longest=max(lens, default=0),
        warnings=(*_unused_variables(cfg, tokenizer), *warning),
    )


def _apply_limit(cfg: DataConfig, rows: Rows, lens: list[int], files_flag: str) -> tuple[list[int], list[str]]:
    """The rows that are used, and a warning with the counts. Raises UserError: too long a prompt, or no row left."""
    all_rows, limit = list(range(len(lens))), cfg.max_prompt_len
    if 0 in lens:
        raise UserError(
            f"a prompt without tokens; {rows.where(lens.index(0))}; the chat template made nothing of it, expected at "
            "least 1 token; mend the row or the template"
        )
    overlong = [row for row in all_rows if lens[row] > limit]
    if not overlong:
        return all_rows, []
    if cfg.truncation == "error" and not cfg.filter_overlong_prompts:
        raise UserError(
            f"a prompt is too long; {rows.where(overlong[0])}, and {len(overlong) - 1} more of {len(lens)} rows; "
            f"found {lens[overlong[0]]} tokens (the longest: {max(lens)}), expected at most --data.max-prompt-len "
            f"{limit}; raise it, or set --data.filter-overlong-prompts True or --data.truncation left"
        )
    if cfg.filter_overlong_prompts and len(overlong) == len(lens):
        raise UserError(
            f"all prompts are too long; {files_flag}; all {len(lens)} rows have {min(lens)} to {max(lens)} "
            f"tokens, expected at most --data.max-prompt-len {limit}; raise it"
        )
    done = "dropped" if cfg.filter_overlong_prompts else f"truncated ({cfg.truncation})"
    warning = (
        f"{len(overlong)} of {len(lens)} prompts of {files_flag} have more than --data.max-prompt-len {limit} tokens "
        f"(the longest: {max(lens)}) and were {done}"
    )
    dropped = set(overlong) if cfg.filter_overlong_prompts else set()
    return [row for row in all_rows if row not in dropped], [warning]


def _encode_rows(
    cfg: DataConfig, rows: Rows, num_rows: int, tokenizer: "PreTrainedTokenizerBase", show_progress: bool
) -> list[np.ndarray]:
    """Token ids of the first rows. Repeated conversations (DAPO's file: each 100 times) are encoded once."""
    from tqdm import tqdm

    numbers: dict[str, int] = {}
    conversations, first_rows, number_of_row = [], [], []
    for row, messages in zip(range(num_rows), rows.iter_prompts(), strict=False):
        number = numbers.setdefault(json.dumps(messages, default=str), len(conversations))
        if number == len(conversations):
            conversations.append(messages)
            first_rows.append(row)
        number_of_row.append(number)
    encoded: list[np.ndarray] = []
    hidden = not show_progress or len(conversations) < PROGRESS_ROWS
    with tqdm(total=len(conversations), desc="tokenising", unit="prompt", disable=hidden) as bar:
        for start in range(0, len(conversations), ENCODE_ROWS):
            part = conversations[start : start + ENCODE_ROWS]
            try:
                encoded += _encode(tokenizer, part, cfg.chat_template_kwargs)
            except Exception:  # templates raise what they like; the row that did is found one by one
                for offset, messages in enumerate(part):
                    _encode_alone(cfg, messages, rows.where(first_rows[start + offset]), tokenizer)
                raise
            bar.update(len(part))
    return [encoded[number] for number in number_of_row]


def _encode_alone(cfg: DataConfig, messages: list[dict], where: str, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raises UserError when the template refuses this row."""
    try:
        _encode(tokenizer, [messages], cfg.chat_template_kwargs)
    except Exception as error:
        roles = ", ".join(message["role"] for message in messages[:8])
        raise UserError(
            f"the chat template refuses a row; {where}, {_template_line(error)}; {_first_line(error)}, with the roles "
            f"{roles}; change the row's messages, or use a model whose template takes them"
        ) from error


def _truncated(ids: np.ndarray, limit: int, how: str) -> np.ndarray:
    """At most `limit` ids; `how` says which side is cut."""
    if len(ids) <= limit:
        return ids
    first = {"left": 0, "right": limit, "middle": limit // 2}[how]
    return np.concatenate([ids[:first], ids[len(ids) - (limit - first) :]])


def _unused_variables(cfg: DataConfig, tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """A warning for each template variable that the template never mentions."""
    template = tokenizer.get_chat_template()
    return [
        f"--data.chat-template-kwargs {name} has no effect: the chat template does not mention it"
        for name in cfg.chat_template_kwargs
        if not re.search(rf"\b{re.escape(name)}\b", template)
    ]


# ---- Order ----


class PromptStream:
    """The endless stream of training prompts: epoch after epoch, each row once an epoch, uid = epoch x rows + place.

    The order is a function of (seed, epoch) alone, so every rank has the same stream and no global generator is used.
    """

    def __init__(self, prompts: Prompts, *, seed: int, shuffle: bool = True) -> None:
        assert len(prompts) > 0 and seed >= 0
        self.prompts = prompts
        self.seed = seed
        self.shuffle = shuffle
        self._position = 0  # the next uid
        self._order = (-1, np.empty(0, dtype=np.int64))  # an epoch, and its places in file order

    def next(self, count: int) -> list[Sample]:
        """The next samples of the stream, across an epoch's end if need be."""
        uids = range(self._position, self._position + count)
        self._position += count
        return [self.sample(uid) for uid in uids]

    def sample(self, uid: int) -> Sample:
        """The sample at a position of the stream, wherever the stream is now."""
        return self.prompts.sample(self._place(uid), uid)

    @property
    def num_drawn(self) -> int:
        """How many prompts were taken since the first epoch began."""
        return self._position

    def state(self) -> dict[str, Any]:
        """The position, as JSON can hold it, and what it is a position in."""
        epoch, place = divmod(self._position, len(self.prompts))
        return {"epoch": epoch, "place": place, **self._identity()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken. Raises UserError when the data, the seed or the shuffling differ."""
        for name, value in self._identity().items():
            if state[name] != value:
                raise UserError(
                    f"the prompts are not those of the checkpoint: another {name}; data stream; found {value}, "
                    f"expected {state[name]}; give the same data, tokenizer, options and --seed, or start a new run"
                )
        self._position = state["epoch"] * len(self.prompts) + state["place"]

    def _identity(self) -> dict[str, Any]:
        fingerprint, rows = self.prompts.fingerprint, len(self.prompts)
        return {"rows": rows, "fingerprint": fingerprint, "seed": self.seed, "shuffle": self.shuffle}

    def _place(self, uid: int) -> int:
        """The row, in file order, of a position in the stream."""
        epoch, place = divmod(uid, len(self.prompts))
        if not self.shuffle:
            return place
        if self._order[0] != epoch:
            # Raw bits, sorted: NumPy promises them for all versions, but not the result of its `permutation`.
            keys = np.random.PCG64([self.seed, epoch]).random_raw(len(self.prompts))
            self._order = (epoch, np.argsort(keys, kind="stable"))
        return int(self._order[1][place])
