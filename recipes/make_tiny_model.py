"""Makes the quickstart's model: a Qwen3 of 1.3 M parameters that can add, but prefers to guess.

    python -m recipes.make_tiny_model --data data/arithmetic --out models/tiny-arithmetic --seed 0

A short supervised warm-up on problems that are in neither data file. Half of the demonstrations answer at once and
forget the carry (27+48= 65); the others first write the sum of the units, then the right answer (27+48= units 15,75).
Only a quarter of those teach their first token, so the model knows both ways but chooses the quick one four times out
of five, whatever the problem (were it the problem's, noise alone would move the greedy accuracy). So that accuracy is
the share of problems without a carry, 0.4, whatever the seed. GRPO has a habit to break, which the reward alone can
teach: work before you answer.
"""

import json
import random
from dataclasses import dataclass
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lib.config import parse_cli, reporting_errors
from lib.errors import UserError
from lib.rewards.arithmetic import OPERANDS, needs_carry, question, sum_without_carry

VOCAB_SIZE = 320  # bytes, special tokens and a few merges, rounded up
CARRY_SHARE = 0.5  # of a batch
WORKED_SHARE = 0.5  # of the demonstrations
CHOICE_SHARE = 0.25  # of the worked ones also teach to work; the others only how
IGNORED = -100  # label of tokens that are not learnt
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class TinyModelConfig:
    """What the warm-up avoids, how long it lasts, and where the model goes."""

    data: str = "data/arithmetic"
    """Folder with train.parquet and val.parquet, whose problems the warm-up leaves out."""
    out: str = "models/tiny-arithmetic"
    """Folder to write the model to."""
    seed: int = 0
    """Seed of the weights and of the warm-up."""
    num_steps: int = 300
    """Optimizer steps of the warm-up."""
    batch_size: int = 64
    """Demonstrations per step."""
    lr: float = 3e-3
    """Peak learning rate; it rises over 20 steps and falls to almost 0."""


def main(cfg: TinyModelConfig) -> None:
    """Trains the model and writes it as an ordinary Hugging Face folder."""
    torch.set_num_threads(1)  # always the same number, or sums would differ in their last bits
    torch.manual_seed(cfg.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    pairs = warm_up_pairs(cfg.data)
    loss = warm_up(model, tokenizer, pairs, cfg)
    save(model, tokenizer, Path(cfg.out))
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{cfg.out}: {size:.1f} M parameters, warmed up on {len(pairs)} problems, loss {loss:.3f}")


def make_tokenizer() -> Any:
    """A byte-level BPE tokenizer for which every digit is a token, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user\n", "assistant\n", "units "] * 10, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )


def make_model(tokenizer: Any) -> Any:
    """A Qwen3 of two layers with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            initializer_range=0.06,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def warm_up_pairs(data: str) -> list[Pair]:
    """All problems, in both orders, whose unordered pair is in neither data file."""
    import pyarrow.parquet

    taken = set()
    for split in ("train", "val"):
        path = Path(data) / f"{split}.parquet"
        if not path.is_file():
            raise UserError(
                f"no {split} problems; --data {data}; found no file {path}, expected one; run "
                "`python -m recipes.prepare_arithmetic` first"
            )
        rows = pyarrow.parquet.read_table(path, columns=["extra_info"]).column("extra_info").to_pylist()
        taken |= {frozenset((row["a"], row["b"])) for row in rows}
    free = [pair for pair in combinations_with_replacement(OPERANDS, 2) if frozenset(pair) not in taken]
    return sorted({order for pair in free for order in (pair, pair[::-1])})


def warm_up(model: Any, tokenizer: Any, pairs: list[Pair], cfg: TinyModelConfig) -> float:
    """Supervised training on demonstrations, right and wrong ones mixed; gives the mean loss of the last 20 steps."""
    from tqdm import tqdm

    rng = random.Random(cfg.seed)
    carry = [pair for pair in pairs if needs_carry(*pair)]
    plain = [pair for pair in pairs if not needs_carry(*pair)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.98), weight_decay=0.01)
    losses: list[float] = []
    num_carry = int(CARRY_SHARE * cfg.batch_size)
    with tqdm(range(cfg.num_steps), desc="warm-up", unit="step", mininterval=1.0) as bar:
        for step in bar:
            factor = min(1.0, (step + 1) / 20) * max(0.02, 1 - step / cfg.num_steps)
            optimizer.param_groups[0]["lr"] = cfg.lr * factor
            batch = rng.choices(carry, k=num_carry) + rng.choices(plain, k=cfg.batch_size - num_carry)
            input_ids, labels = encode([demonstration(a, b, rng) for a, b in batch], tokenizer)
            loss = model(input_ids=input_ids, labels=labels).loss  # padding is on the right, where nothing looks
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    last = losses[-20:]
    return sum(last) / len(last)


def demonstration(a: int, b: int, rng: random.Random) -> tuple[str, str, bool]:
    """The user's message, a response, and whether its first token is taught.

    The response is worked out and right, or a quick answer without the carry.
    """
    if rng.random() < WORKED_SHARE:
        return question(a, b), f"units {a % 10 + b % 10},{a + b}", rng.random() < CHOICE_SHARE
    return question(a, b), str(sum_without_carry(a, b)), True


def encode(demonstrations: list[tuple[str, str, bool]], tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Token ids and labels of prompt, response and end, right-padded: (B, T) each; only the response is learnt."""
    rows = []
    for message, response, teaches_choice in demonstrations:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], add_generation_prompt=True, tokenize=False
        )
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
        response_ids = [*tokenizer.encode(response, add_special_tokens=False), tokenizer.eos_token_id]
        labels = response_ids if teaches_choice else [IGNORED, *response_ids[1:]]
        rows.append((prompt_ids + response_ids, [IGNORED] * len(prompt_ids) + labels))
    width = max(len(ids) for ids, _ in rows)
    input_ids = torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in rows])  # (B, T)
    labels = torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in rows])  # (B, T)
    return input_ids, labels


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes weights, config, tokenizer and chat template."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}) + "\n")


if __name__ == "__main__":
    with reporting_errors():
        main(parse_cli(TinyModelConfig()))
