"""Tiny models and scored rollouts for the tests, made on the spot: nothing is downloaded or stored."""

from contextlib import contextmanager
from pathlib import Path

import torch

from lib.types import Rollout, Sample, Score

VOCAB_SIZE = 200


KINDS = ("gemma3", "glm4", "granite", "llama", "mistral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "smollm3")
"""Families of `make_model`, all that lib/families/supported.py lists."""


DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 64,
    "short_factor": [1 + i / 8 for i in range(12)], "long_factor": [2.0 + i for i in range(12)],
}  # fmt: skip
"""Rotary settings that trainer and engine might read in different ways."""


def make_model(
    path: Path, *, kind: str = "qwen3", tied: bool = True, seed: int = 0, intermediate_size: int = 96,
    random_norms: bool = False,
) -> Path:  # fmt: skip
    """A Hugging Face folder with a two-layer model with grouped-query attention; weights large enough to matter."""
    import transformers

    torch.manual_seed(seed)
    shape = dict(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=intermediate_size, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=256,
        tie_word_embeddings=tied, initializer_range=0.2,
    )  # fmt: skip
    if kind in ("qwen2", "phi3", "olmo2", "olmo3", "smollm3", "granite"):
        shape |= dict(hidden_size=shape["num_attention_heads"] * shape.pop("head_dim"), initializer_range=0.14)
        shape |= dict(pad_token_id=1, eos_token_id=0, bos_token_id=0) if kind != "qwen2" else {}
    if kind in ("gemma3", "olmo3"):
        shape |= dict(sliding_window=4, layer_types=["sliding_attention", "full_attention"])
    shape |= {
        "gemma3": dict(query_pre_attn_scalar=32),
        "granite": dict(
            embedding_multiplier=12.0, logits_scaling=6.0, residual_multiplier=0.22, attention_multiplier=0.0625
        ),
        "mistral": dict(sliding_window=4),
        "glm4": dict(pad_token_id=1, eos_token_id=0),
        "olmo3": dict(rope_parameters={"sliding_attention": DEFAULT_ROPE, "full_attention": YARN}),
        "phi3": dict(sliding_window=4, rope_parameters=LONG_ROPE, original_max_position_embeddings=64),
        "smollm3": dict(no_rope_layer_interval=2),
    }.get(kind, {})
    names = {"gemma3": "Gemma3Text", "smollm3": "SmolLM3"}
    config = getattr(transformers, f"{names.get(kind, kind.capitalize())}Config")
    model = transformers.AutoModelForCausalLM.from_config(config(**shape), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if random_norms and ("norm" in name or "bias" in name):  # what all begin with would hide a wrong one
            parameter.data += 0.3 * torch.randn(parameter.shape)
    model.save_pretrained(path)
    return path


def make_rollouts(*, num_groups: int = 4, n: int = 3, seed: int = 0, max_len: int = 12) -> list[Rollout]:
    """Ragged responses with random ids, scores and log-probs; one of them without a score."""
    generator = torch.Generator().manual_seed(seed)

    def ids(low: int) -> list[int]:
        length = int(torch.randint(low, max_len, (), generator=generator))
        return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()

    rollouts = []
    for uid in range(num_groups):
        sample = Sample(uid=uid, prompt_ids=ids(1), data_source="test", ground_truth="", extra_info={})
        for index in range(n):
            response = ids(1)
            score = None if (uid, index) == (1, 1) else float(torch.rand((), generator=generator))
            rollouts.append(
                Rollout(
                    sample=sample,
                    index=index,
                    response_ids=response,
                    rollout_log_probs=(-torch.rand(len(response), generator=generator)).tolist(),
                    finish_reason="stop",
                    score=Score(score=score, error=None if score is not None else "no score"),
                )
            )
    return rollouts


def make_tokenizer(path: Path) -> None:
    """Saves a byte-level tokenizer with a chat template beside the model; its ids fit the model's vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB_SIZE - 2]
    vocabulary = {token: i for i, token in enumerate(["<|end|>", "<|pad|>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>", chat_template=template
    ).save_pretrained(path)


def make_questions(path: Path, *, count: int, start: int) -> None:
    """A parquet file in verl's schema: "what is N", with the answer N."""
    from lib.data.parquet import write_rows

    write_rows(
        path,
        [
            {
                "prompt": [{"role": "user", "content": f"what is {number}"}],
                "data_source": "test",
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(number)},
                "extra_info": {"split": "train" if start == 0 else "val", "index": number},
            }
            for number in range(start, start + count)
        ],
    )


def count_progress(terminal, counts: dict[str, tuple[int, int]]) -> None:
    """From here on counts[label] is what a progress of the terminal was to count, and what it has counted; without one
    that has no total."""
    begin = terminal.progress

    @contextmanager
    def progress(label, total=0):
        if total:
            counts[label] = (total, 0)
        with begin(label, total) as advance:

            def count():
                counts[label] = (total, counts[label][1] + 1)
                advance()

            yield count

    terminal.progress = progress
