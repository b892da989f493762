"""Folders of models whose files are written byte by byte, and the checks that tests make of them."""

import json
import struct
import tempfile
from pathlib import Path

import pytest

from lib.errors import UserError
from lib.families.meta_model import build_causal_lm
from lib.storage.model_folder import ModelFiles, check_model_files, check_parameters

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
TOKENIZER = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<end>"}]}


def safetensors(shapes: dict, *, dtype: str = "F32", width: int = 4) -> bytes:
    header, end = {}, 0
    for name, shape in shapes.items():
        size = width
        for n in shape:
            size *= n
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def write(file: Path, value: dict) -> None:
    file.write_text(json.dumps(value))


def expected_shapes(config: dict) -> dict:
    """{name: shape} of what transformers builds."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "config.json", config)
        return {name: tuple(p.shape) for name, p in build_causal_lm(Path(folder)).named_parameters()}


def write_folder(folder: Path) -> Path:
    """A sound one."""
    folder.mkdir()
    write(folder / "config.json", CONFIG)
    (folder / "model.safetensors").write_bytes(safetensors(expected_shapes(CONFIG)))
    write(folder / "tokenizer.json", TOKENIZER)
    write(folder / "tokenizer_config.json", {"chat_template": "{{ messages }}"})
    return folder


def check(folder: Path | str, **changes: int) -> ModelFiles:
    """The files of a folder that passes all checks of a policy's."""
    files = check_model_files(str(folder), **({"max_prompt_len": 32, "max_response_len": 32} | changes))
    check_parameters(files)
    return files


def message(folder: Path | str, **changes: int) -> str:
    """Of the error that `check` raises."""
    with pytest.raises(UserError) as caught:
        check(folder, **changes)
    text = str(caught.value)
    assert text.count(";") >= 2, f"not what; where; found; remedy: {text}"
    return text


def with_tensors(folder: Path, extra: dict[str, tuple[int, ...]], *, config: dict = CONFIG, **values: float) -> None:
    """Writes the model's tensors and more of these shapes; `values`: {embedding, head: what each number of it is}."""
    import torch
    from safetensors.torch import save_file

    tensors = {name: torch.zeros(shape) for name, shape in (expected_shapes(config) | extra).items()}
    for key, name in {"embedding": "model.embed_tokens.weight", "head": "lm_head.weight"}.items():
        if key in values:
            tensors[name] = torch.full_like(tensors[name], values[key])
    save_file(tensors, folder / "model.safetensors")
    write(folder / "config.json", config)
