"""Writes a model folder with the shape of a known model and random weights, to try a machine without downloads.

    python -m recipes.make_random_model --shape 0.6b --texts data/gsm8k/train.parquet --out models/random-0.6b

The tokenizer is trained on the prompts of the given parquet file, so prompts have realistic lengths. Such a model
solves nothing; `--reward.path recipes/hash_reward.py` gives it rewards that differ within every group.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lib.config import parse_cli, reporting_errors
from lib.errors import UserError

QWEN3 = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SHAPES = {  # config class of transformers, SIZES, tied, the rest
    "tiny": ("Qwen3Config", (4096, 128, 256, 2, 8), True, QWEN3),
    "0.6b": ("Qwen3Config", (151936, 1024, 3072, 28, 16), True, QWEN3),
    "1.7b": ("Qwen3Config", (151936, 2048, 6144, 28, 16), True, QWEN3),
    "4b": ("Qwen3Config", (151936, 2560, 9728, 36, 32), True, QWEN3),
    "8b": ("Qwen3Config", (151936, 4096, 12288, 36, 32), False, QWEN3),
    "gemma-3-1b": (
        "Gemma3TextConfig", (262144, 1152, 6912, 26, 4), True,
        {"num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512, "max_position_embeddings": 32768},
    ),
    "phi-4-mini": (
        "Phi3Config", (200064, 3072, 8192, 32, 24), True,
        {
            "num_key_value_heads": 8, "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
                "original_max_position_embeddings": 4096, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48,
            },
        },
    ),
    "olmo-3-7b": (
        "Olmo3Config", (100278, 4096, 11008, 32, 32), False,
        {"num_key_value_heads": 32, "sliding_window": 4096, "max_position_embeddings": 65536},
    ),
}  # fmt: skip
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class RandomModelConfig:
    """What to write, and where."""

    shape: Literal["tiny", "0.6b", "1.7b", "4b", "8b", "gemma-3-1b", "phi-4-mini", "olmo-3-7b"] = "0.6b"
    """Which model's shape; a size: that Qwen3's (tiny: none's, for a CPU)."""
    texts: str = "data/gsm8k/train.parquet"
    """Parquet file whose prompts train the tokenizer."""
    out: str = "models/random-0.6b"
    """Folder to write."""
    mean_len: int = 0
    """Mean response length to aim at, in tokens: so many ids end a response that lengths are geometric; 0: one id."""
    seed: int = 0
    """Seed of the weights."""
    weights: bool = True
    """Write weights; without them the folder is enough for an engine alone, which makes its own."""


def main(cfg: RandomModelConfig) -> None:
    """Writes the folder and says what it holds."""
    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()

    config_class, sizes, tied, rest = SHAPES[cfg.shape]
    vocabulary = sizes[0]
    tokenizer = train_tokenizer(cfg.texts, min(16384, vocabulary))
    # Random weights choose every id about as often, so the share of the ids that end a response is the chance to end.
    num_ends = round(vocabulary / cfg.mean_len) if cfg.mean_len else 1
    if num_ends >= len(tokenizer):
        raise UserError(
            f"too short; --mean-len {cfg.mean_len}; {num_ends} of the tokenizer's {len(tokenizer)} ids would end a "
            f"response; expected 0, or at least {vocabulary // len(tokenizer) + 1}; raise it"
        )
    ends = [tokenizer.eos_token_id, *range(len(tokenizer) - num_ends + 1, len(tokenizer))]
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    words = dict(zip(SIZES, sizes, strict=True)) | rest | special
    config = getattr(transformers, config_class)(**words, tie_word_embeddings=tied)
    torch.manual_seed(cfg.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device if cfg.weights else "meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if cfg.weights:
        model.to("cpu").save_pretrained(cfg.out)
    else:
        model.config.architectures = [type(model).__name__]  # as save_pretrained has it
        model.config.save_pretrained(cfg.out)
    tokenizer.save_pretrained(cfg.out)
    (Path(cfg.out) / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    print(f"{cfg.out}: {sum(p.numel() for p in model.parameters()) / 1e9:.2f} B parameters, {len(tokenizer)} tokens")


def train_tokenizer(parquet: str, vocabulary: int) -> Any:
    """A byte-level BPE tokenizer with a chat template, trained on the prompts of a parquet file."""
    import pyarrow.parquet
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    prompts = pyarrow.parquet.read_table(parquet, columns=["prompt"]).column("prompt").to_pylist()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator((message["content"] for prompt in prompts for message in prompt), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )


if __name__ == "__main__":
    with reporting_errors():
        main(parse_cli(RandomModelConfig()))
