"""From data files to prompts: config, rows, chat template and length limit.

Rows come checked from lib/data/reading.py or from a custom dataset class. Every rank holds all prompts.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from lib.config.values import JsonObject
from lib.data.chat_template import CannotSplit, ChatTemplate, ControlTokens, first_line, template_line
from lib.data.custom_dataset import check_dataset_class, custom_rows
from lib.data.faults import is_unicode
from lib.data.paths import resolve_file
from lib.data.reading import read_rows
from lib.data.rows import Rows, check_answer_kinds, count_overlap
from lib.data.schema import VERL_KEYS, Keys
from lib.errors import UserError, check_fields
from lib.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "val"]
Tools = Callable[[Rows], Iterable[Sequence[dict]]]
Conversation = tuple[list[dict], Sequence[dict]]
"""Messages, and the schemas of the tools that the model is told of."""
OWN_TEMPLATE_ARGUMENTS = (
    *("conversation", "tools", "documents", "messages", "chat_template", "add_generation_prompt", "tokenize"),
    *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs", "strftime_now"),
)
ENCODE_ROWS = 1000
PROGRESS_ROWS = 20_000  # below this many prompts tokenising takes seconds


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which rows are read, and how they become prompts."""

    train_files: tuple[str, ...] = ()
    """Parquet or JSONL files to train on, in verl's schema (prompt, data_source, reward_model, extra_info), or without
    the last three where --reward.path scores; `~` is expanded."""
    val_files: tuple[str, ...] = ()
    """Parquet or JSONL files to validate on; none: no validation."""
    prompt_key: str = "prompt"
    """Column with the prompt: a text, which a user says, or a list of {role, content} messages."""
    answer_key: str | None = None
    """Column with the right answer, the reward's ground_truth; None: that in the column reward_model."""
    max_prompt_len: int = 512
    """Longest prompt in tokens, chat template included."""
    filter_overlong_prompts: bool = False
    """Drop prompts longer than the limit (counted and reported) before `truncation` is looked at."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What to do with a longer prompt: stop, or cut tokens at its left, its right, or its middle (halves remain)."""
    chat_template_kwargs: JsonObject = field(default_factory=dict)
    """Variables for the chat template, as JSON: '{"enable_thinking": false}'."""
    control_tokens: ControlTokens = "keep"
    """A message that spells a control token of the model (<|im_end|>): keep that token, split it into ordinary text, or
    stop with an error."""
    dataset_path: str | None = None
    """Python file with your own dataset class, used for training and validation; see lib/data/custom_dataset.py."""
    dataset_name: str | None = None
    """Name of the class in --data.dataset-path."""
    train_max_samples: int | None = None
    """Use only the first rows of the training data, this many; None: all."""
    val_max_samples: int | None = None
    """Use only the first rows of the validation data, this many; None: all."""
    shuffle: bool = True
    """Shuffle the training rows anew in every epoch; the order follows from --seed and the epoch alone."""
    curriculum: bool = False
    """Draw prompts by what the policy made of them last, instead of epochs: most often those of which some responses
    were right and others wrong; see lib/data/curriculum.py."""

    def __post_init__(self) -> None:
        limits = {name: getattr(self, name) for name in ("max_prompt_len", "train_max_samples", "val_max_samples")}
        check_fields(self, "data.", **{name: (it is None or it >= 1, "at least 1") for name, it in limits.items()})
        if (self.dataset_path is None) != (self.dataset_name is None):
            raise UserError(
                "half of a custom dataset; --data.dataset-path and --data.dataset-name; found "
                f"{self.dataset_path} and {self.dataset_name}; expected both or neither; give the other one too"
            )
        if self.curriculum and not self.shuffle:
            raise UserError(
                "two orders of the training rows; --data.curriculum True and --data.shuffle False; found both, "
                "expected one of them; leave out the other"
            )
        taken = sorted(set(self.chat_template_kwargs) & set(OWN_TEMPLATE_ARGUMENTS))
        if taken:
            raise UserError(
                f"a template variable that is set already; --data.chat-template-kwargs; found {', '.join(taken)}; "
                "expected variables of the model's own template, such as enable_thinking; leave it out"
            )
        if not is_unicode(self.chat_template_kwargs):
            raise UserError(
                f"text that is not Unicode; --data.chat-template-kwargs; found {self.chat_template_kwargs!a}, "
                "expected whole characters; write the other half of the surrogate pair too"
            )

    def keys(self, *, needs_grader: bool) -> Keys:
        """What a row is made of. `needs_grader`: whether built-in graders score."""
        return Keys(prompt=self.prompt_key, answer=self.answer_key, needs_grader=needs_grader)


# ---- Rows ----


@dataclass(frozen=True, kw_only=True)
class DataFiles:
    """The rows of both splits, checked. None where a custom dataset class makes them, which needs the tokenizer."""

    train: Rows | None
    val: Rows | None
    warnings: tuple[str, ...]
    keys: Keys = VERL_KEYS


def check_data_files(cfg: DataConfig, *, needs_grader: bool = True) -> DataFiles:
    """The rows of --data.train-files and --data.val-files, read once. Raises UserError for any fault in them.

    `needs_grader`: whether built-in graders score. Needs neither transformers nor a tokenizer. With a custom dataset
    class, finds the files and the class, runs no code of it.
    """
    keys = cfg.keys(needs_grader=needs_grader)
    train_paths = _different_files(cfg.train_files, "--data.train-files")
    val_paths = _different_files(cfg.val_files, "--data.val-files")
    warnings = [f"{path} is given both for training and for validation" for path in sorted(train_paths & val_paths)]
    if cfg.dataset_path is not None:
        check_dataset_class(cfg.dataset_path, cfg.dataset_name)
        no_rows, _ = read_rows((), "--data.val-files")
        return DataFiles(train=None, val=None if cfg.val_files else no_rows, warnings=tuple(warnings), keys=keys)
    if not cfg.train_files:
        raise UserError(
            "no training data; --data.train-files; found no file, expected at least 1; give parquet or JSONL files"
        )
    train, train_warnings = read_rows(cfg.train_files, "--data.train-files", keys=keys)
    val, val_warnings = read_rows(cfg.val_files, "--data.val-files", keys=keys)
    check_answer_kinds(train, "--data.train-files")
    check_answer_kinds(val, "--data.val-files")
    _check_answers_agree(train, val)
    warnings += [*train_warnings, *val_warnings]
    overlap = count_overlap(train, val)
    if overlap:
        warnings.append(f"{overlap} of the {len(val)} validation prompts also occur in the training data")
    return DataFiles(train=train, val=val, warnings=tuple(warnings), keys=keys)


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
    trained, validated = (
        next((pair for pair in zip(rows.sources, rows.answer_kinds, strict=True) if pair[1] in scalars), None)
        for rows in (train, val)
    )
    if trained and validated and trained[1] != validated[1]:
        raise UserError(
            "ground truths of two types; --data.train-files and --data.val-files, column 'reward_model.ground_truth'; "
            f"{trained[0]} has {trained[1]}, {validated[0]} has {validated[1]}, expected one type; convert one of them"
        )


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
    date: str | None = None
    """The date that the chat template was given, if it printed it."""

    def __len__(self) -> int:
        return len(self.kept)

    def sample(self, place: int, uid: int) -> Sample:
        """The prompt at a place in file order, under the given uid."""
        return self.rows.sample(self.kept[place], uid=uid, prompt_ids=self.token_ids[place].tolist(), place=place)

    def all_samples(self) -> list[Sample]:
        """Every prompt in file order, uid = place. For validation."""
        return [self.sample(place, place) for place in range(len(self))]

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with any prompt's tokens, answer or agent_name, or the rows' order."""
        digest = hashlib.sha256()
        for place, ids in enumerate(self.token_ids):
            row = self.rows[self.kept[place]]
            answer = [row["data_source"], row["reward_model"], row["extra_info"]]
            answer += [row["agent_name"]] * (row["agent_name"] is not None)
            digest.update(ids.tobytes() + json.dumps(answer, sort_keys=True, default=str).encode() + b"\n")
        return digest.hexdigest()[:16]


def tokenize(
    cfg: DataConfig,
    files: DataFiles,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    split: Split,
    tools: Tools | None = None,
    date: str | None = None,
    files_flag: str | None = None,
    show_progress: bool = False,
) -> Prompts:
    """The prompts of a split under the chat template, within --data.max-prompt-len. Raises UserError.

    `tools`: the schemas that the prompt of each of the rows tells of; None: of none. `date`: what `first_date` gives;
    None: now. `files_flag`: the option that messages name; None: the split's. Validation without files gives no
    prompts. Truncation of ids 0..9 to 5: left 5-9, right 0-4, middle 0 1 7 8 9.
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
            keys=files.keys,
        )
    limit = cfg.train_max_samples if split == "train" else cfg.val_max_samples
    num_rows = len(rows) if limit is None else min(limit, len(rows))
    template = ChatTemplate(tokenizer, cfg.chat_template_kwargs, date=date)
    token_ids, warnings = _encode_rows(cfg, rows, num_rows, template, files_flag, show_progress, tools)
    lens = [len(ids) for ids in token_ids]
    kept, warning = _apply_limit(cfg, rows, lens, files_flag)
    return Prompts(
        rows=rows,
        kept=kept,
        token_ids=[_truncated(token_ids[row], cfg.max_prompt_len, cfg.truncation) for row in kept],
        num_filtered=num_rows - len(kept),
        num_truncated=sum(lens[row] > cfg.max_prompt_len for row in kept),
        longest=max(lens, default=0),
        warnings=(*_unused_variables(cfg, tokenizer), *warnings, *warning),
        date=template.date if template.printed_dates else None,
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
    cfg: DataConfig, rows: Rows, num_rows: int, template: ChatTemplate, files_flag: str, show_progress: bool,
    tools: Tools | None,
) -> tuple[list[np.ndarray], list[str]]:  # fmt: skip
    """Token ids of the first rows, and warnings. Repeated conversations (DAPO's file: each 100 times) are encoded once.

    Raises UserError for a row that the template refuses, or that --data.control-tokens does.
    """
    from tqdm import tqdm

    conversations, first_rows, number_of_row = _distinct(rows, num_rows, tools)
    warnings = _check_control_tokens(cfg, rows, conversations, number_of_row, template, files_flag)
    same_tools: dict[int, list[int]] = {}
    for place, (_, told) in enumerate(conversations):
        same_tools.setdefault(id(told), []).append(place)
    encoded: dict[int, np.ndarray] = {}
    hidden = not show_progress or len(conversations) < PROGRESS_ROWS
    with tqdm(total=len(conversations), desc="tokenising", unit="prompt", disable=hidden) as bar:
        for places in same_tools.values():
            for start in range(0, len(places), ENCODE_ROWS):
                part = places[start : start + ENCODE_ROWS]
                batch, told = [conversations[place][0] for place in part], conversations[part[0]][1]
                try:
                    ids = template.encode(batch, tools=told, split=cfg.control_tokens == "split")
                except Exception:  # templates raise what they like; the row that did is found one by one
                    for place in part:
                        _encode_alone(cfg, *conversations[place], rows.where(first_rows[place]), template)
                    raise
                encoded |= zip(part, ids, strict=True)
                bar.update(len(part))
    if template.printed_dates:
        dates = " and ".join(sorted(template.printed_dates))
        warnings.append(f"the chat template prints the date, {dates}: prompts keep it, on whichever day this goes on")
    return [encoded[number] for number in number_of_row], [*warnings, *_untold_tools(conversations, template)]


def _distinct(rows: Rows, num_rows: int, tools: Tools | None) -> tuple[list[Conversation], list[int], list[int]]:
    """The different conversations of the first rows, of each its first row, and of each row its conversation."""
    schemas: list[Sequence[dict]] = []  # few different ones
    numbers: dict[tuple[str, int], int] = {}
    conversations, first_rows, number_of_row = [], [], []
    told_in = repeat(()) if tools is None else tools(rows)
    for row, messages, told in zip(range(num_rows), rows.iter_prompts(), told_in, strict=False):
        if told not in schemas:
            schemas.append(told)
        kind = schemas.index(told)
        number = numbers.setdefault((json.dumps(messages, default=str), kind), len(conversations))
        if number == len(conversations):
            conversations.append((messages, schemas[kind]))
            first_rows.append(row)
        number_of_row.append(number)
    return conversations, first_rows, number_of_row


def _untold_tools(conversations: list[Conversation], template: ChatTemplate) -> list[str]:
    """A warning where the template does not print the tools."""
    for messages, tools in conversations:
        if tools:
            if template.render(messages, tools=tools) != template.render(messages):
                return []
            names = ", ".join(tool["function"]["name"] for tool in tools)
            return [f"the chat template does not print tools: the model is not told of {names}, unless messages tell"]
    return []


def _encode_alone(
    cfg: DataConfig, messages: list[dict], tools: Sequence[dict], where: str, template: ChatTemplate
) -> None:
    """Raises UserError when the template refuses this row."""
    try:
        template.encode([messages], tools=tools, split=cfg.control_tokens == "split")
    except CannotSplit as error:
        raise UserError(
            f"a control token cannot be split; --data.control-tokens split, {where}; found "
            f"{template.spelled([*messages, *tools])[0]!r} where {error}, expected text that stays as it is; mend or "
            "drop the row, or choose keep or error"
        ) from error
    except Exception as error:
        roles = ", ".join(message["role"] for message in messages[:8])
        raise UserError(
            f"the chat template refuses a row; {where}, {template_line(error)}; {first_line(error)}, with the roles "
            f"{roles}; change the row's messages, or use a model whose template takes them"
        ) from error


def _check_control_tokens(
    cfg: DataConfig, rows: Rows, conversations: list[Conversation], number_of_row: list[int], template: ChatTemplate,
    files_flag: str,
) -> list[str]:  # fmt: skip
    """A warning with the number of rows that spell control tokens; an error, with --data.control-tokens error."""
    spelled = [template.spelled([*messages, *tools]) for messages, tools in conversations]
    found = [row for row, number in enumerate(number_of_row) if spelled[number]]
    if not found:
        return []
    where, name = rows.where(found[0]), spelled[number_of_row[found[0]]][0]
    if cfg.control_tokens == "error":
        raise UserError(
            f"a prompt spells a control token of the model; {where}, and {len(found) - 1} more of "
            f"{len(number_of_row)} rows; found {name!r}, expected none with --data.control-tokens error; mend or drop "
            "the rows, or choose split (ordinary text) or keep (that token)"
        )
    becomes = (
        "ordinary text, split into its characters' tokens"
        if cfg.control_tokens == "split"
        else "that token, unless --data.control-tokens split makes it ordinary text"
    )
    return [
        f"{len(found)} of {len(number_of_row)} prompts of {files_flag} spell a control token of the model, {where} "
        f"{name!r}: it becomes {becomes}"
    ]


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
