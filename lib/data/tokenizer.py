"""A model folder's tokenizer, its chat template tried, and the ids that end a response."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.data.chat_template import ChatTemplate, first_line, template_line
from lib.errors import UserError
from lib.storage.weight_headers import read_json
from lib.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(
    model_path: str | Path, *, chat_template_kwargs: dict[str, Any] | None = None
) -> "PreTrainedTokenizerBase":
    """The model folder's tokenizer, its chat template tried on one message. Raises UserError. Runs no remote code."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model_path), trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise plain Exception, OSError, KeyError and others
        raise UserError(
            f"the tokenizer does not load; --model.path {model_path}; {type(error).__name__}: {first_line(error)}; "
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
        (ids,) = ChatTemplate(tokenizer, chat_template_kwargs).encode([[{"role": "user", "content": "1 + 1 = ?"}]])
        if not len(ids):
            raise ValueError("it makes no tokens")
    except Exception as error:
        raise UserError(
            f"the chat template fails; --model.path {model_path}, {template_line(error)}; {first_line(error)} for "
            "one user message; mend the template, or check --data.chat-template-kwargs"
        ) from error
    return tokenizer


def stop_token_ids(tokenizer: "PreTrainedTokenizerBase", model_path: str | Path) -> list[int]:
    """The ids that end a response, ascending: the tokenizer's and those of generation_config.json (one or a list)."""
    ids = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    path = Path(model_path) / "generation_config.json"
    if path.is_file():
        found = read_json(path).get("eos_token_id")
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


def text_of(tokenizer: Any, rollout: Rollout) -> str:
    """What the policy wrote, without special tokens, as reward functions see it; a line break between two turns."""
    return "\n".join(decode(tokenizer, turn) for turn in rollout.sampled_turns)


def conversation_of(tokenizer: Any, rollout: Rollout) -> list[dict[str, Any]]:
    """What follows the dataset's prompt: the turns as messages of the assistant, without special tokens, and between
    them the environment's."""
    told: list[dict[str, Any]] = []
    for turn, ids in enumerate(rollout.sampled_turns):
        told += [message for before, message in rollout.observed if before == turn]
        told.append({"role": "assistant", "content": decode(tokenizer, ids)})
    return told


def decode(tokenizer: Any, ids: list[int]) -> str:
    """The text of token ids, without special tokens."""
    return tokenizer.decode(ids, skip_special_tokens=True)
