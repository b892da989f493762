"""A tiny model with Qwen3's own chat template that calls a tool and then says what it was told: learnt by heart."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from recipes.make_tiny_model import make_model, make_tokenizer

TEMPLATE = Path(__file__).with_name("chat_templates") / "qwen3.jinja"


def make_caller(
    path: Path, question: str, schema: dict[str, Any], arguments: dict[str, Any], answer: str, *, num_steps: int = 60,
    template: dict[str, Any],
) -> Path:  # fmt: skip
    """A model's folder. `template`: variables of the chat template, with which the prompts will be rendered."""
    torch.manual_seed(0)
    words = [json.dumps(schema), question, "<tool_call>", "</tool_call>", "<tool_response>", "user\n", "assistant\n"]
    tokenizer = make_tokenizer(words, TEMPLATE.read_text())
    model = make_model(tokenizer)
    model.config.max_position_embeddings = 2048
    call = f"<tool_call>\n{json.dumps({'name': schema['function']['name'], 'arguments': arguments})}\n</tool_call>"
    asked = {"role": "user", "content": question}
    first = tokenizer.apply_chat_template(
        [asked], tools=[schema], add_generation_prompt=True, tokenize=False, **template
    )  # fmt: skip
    observed = f"\n<|im_start|>user\n<tool_response>\n{answer}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    thought = "<think>\n\n</think>\n\n" if template.get("enable_thinking") is False else ""
    pieces = [(first, False), (call + "<|im_end|>", True), (observed + thought, False), (answer + "<|im_end|>", True)]
    _learn_by_heart(model, *_encode(pieces, tokenizer), num_steps)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def _encode(pieces: Sequence[tuple[str, bool]], tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ids, labels = [], []
    for text, is_learnt in pieces:
        of_piece = tokenizer.encode(text, add_special_tokens=False)
        ids += of_piece
        labels += of_piece if is_learnt else [-100] * len(of_piece)
    return torch.tensor([ids]), torch.tensor([labels])


def _learn_by_heart(model: Any, ids: torch.Tensor, labels: torch.Tensor, num_steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(num_steps):
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert float(loss.detach()) < 0.1, f"not learnt: a loss of {float(loss):.3f}"
