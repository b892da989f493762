"""Makes the quickstart's model: a Qwen3 of 1.3 M parameters that can add, but prefers to guess.

    python -m recipes.make_tiny_model --data data/arithmetic --out models/tiny-arithmetic --seed 0

A short supervised warm-up on problems that are in neither data file. Half of the demonstrations answer at once and
forget the carry (27+48= 65); the others first write the sum of the units, then the right answer (27+48= units 15,75).
Only a quarter of those teach their first token, so the model knows both ways but chooses the quick one four times out
of five, whatever the problem (were it the problem's, noise alone would move the greedy accuracy). So that accuracy is
the share of problems without a carry, 0.4, whatever the seed. GRPO has a habit to break, which the reward alone can
teach: work before you answer.

    python -m recipes.make_tiny_model --demonstrations data/tiny_guess/warm_up.jsonl --out models/tiny-guess --seed 0

The same with demonstrations of recipes/prepare_turns.py: conversations, of which the model's turns are learnt.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lib.config import parse_cli, reporting_errors
from lib.data.paths import resolve_file
from lib.errors import UserError
from lib.rewards.arithmetic import OPERANDS, needs_carry, question, sum_without_carry

BEGIN = "<|im_start|>assistant\n"
VOCAB_SIZE = 320  # bytes, special tokens and a few merges, rounded up
CARRY_SHARE = 0.5  # of a batch
WORKED_SHARE = 0.5  # of the demonstrations
CHOICE_SHARE = 0.25  # of the worked ones also teach to work; the others only how
IGNORED = -100  # label of tokens that are not learnt
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS_TEMPLATE = (  # Qwen's, but of the tools a prompt tells only the names
    "{% if tools %}<|im_start|>system\n{{ tools | map(attribute='function.name') | join(' ') }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'tool' %}"
    "<|im_start|>user\n<tool_response>{{ message['content'] }}</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}{% for call in message['tool_calls'] %}"
    """<tool_call>{"name": "{{ call['function']['name'] }}", "arguments": """
    "{{ call['function']['arguments'] | tojson }}}</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS_WORDS = (
    "user\n", "assistant\n", "system\n", "calc", '{"name": "', ' "arguments": {"expression": "', "units ", "game ",
    "higher", "lower", "wrong",
)  # fmt: skip

Pair = tuple[int, int]
Learnt = tuple[list[int], list[int]]
"""Token ids and labels of a demonstration."""


@dataclass(frozen=True, kw_only=True)
class TinyModelConfig:
    """What the warm-up shows or avoids, how long it lasts, and where the model goes."""

    data: str = "data/arithmetic"
    """Folder with train.parquet and val.parquet, whose problems the warm-up leaves out."""
    demonstrations: str | None = None
    """JSONL file of conversations to learn from; None: sums."""
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
    if cfg.demonstrations is None:
        tokenizer = make_tokenizer(("user\n", "assistant\n", "units "), CHAT_TEMPLATE)
        model = make_model(tokenizer)
        draw, source = draw_sums(warm_up_pairs(cfg.data), tokenizer, cfg.batch_size)
    else:
        tokenizer = make_tokenizer(TURNS_WORDS, TURNS_TEMPLATE)
        tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"])
        model = make_model(tokenizer)
        draw, source = draw_conversations(cfg.demonstrations, tokenizer, cfg.batch_size)
    loss = warm_up(model, tokenizer, draw, cfg)
    save(model, tokenizer, Path(cfg.out))
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{cfg.out}: {size:.1f} M parameters, warmed up on {source}, loss {loss:.3f}")


def make_tokenizer(words: Sequence[str], chat_template: str) -> Any:
    """A byte-level BPE tokenizer for which every digit is a token and these words are few, with a chat template."""
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
    tokenizer.train_from_iterator([*words] * 10, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=chat_template
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


def warm_up(model: Any, tokenizer: Any, draw: Callable[[random.Random], list[Learnt]], cfg: TinyModelConfig) -> float:
    """Supervised training on what `draw` gives for each step; the mean loss of the last 20 steps."""
    from tqdm import tqdm

    rng = random.Random(cfg.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.98), weight_decay=0.01)
    losses: list[float] = []
    with tqdm(range(cfg.num_steps), desc="warm-up", unit="step", mininterval=1.0) as bar:
        for step in bar:
            factor = min(1.0, (step + 1) / 20) * max(0.02, 1 - step / cfg.num_steps)
            optimizer.param_groups[0]["lr"] = cfg.lr * factor
            input_ids, labels = pad(draw(rng), tokenizer.pad_token_id)
            loss = model(input_ids=input_ids, labels=labels).loss  # padding is on the right, where nothing looks
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    last = losses[-20:]
    return sum(last) / len(last)


def draw_sums(pairs: list[Pair], tokenizer: Any, batch_size: int) -> tuple[Callable, str]:
    """A function that gives a batch of sums, right and wrong ones mixed, and what it draws from in words."""
    carry = [pair for pair in pairs if needs_carry(*pair)]
    plain = [pair for pair in pairs if not needs_carry(*pair)]
    num_carry = int(CARRY_SHARE * batch_size)

    def draw(rng: random.Random) -> list[Learnt]:
        batch = rng.choices(carry, k=num_carry) + rng.choices(plain, k=batch_size - num_carry)
        return [encode(demonstration(a, b, rng), tokenizer) for a, b in batch]

    return draw, f"{len(pairs)} problems"


def demonstration(a: int, b: int, rng: random.Random) -> list[dict[str, Any]]:
    """The user's message, and a response that is worked out and right, or quick and without the carry."""
    asked = {"role": "user", "content": question(a, b)}
    if rng.random() < WORKED_SHARE:
        worked = f"units {a % 10 + b % 10},{a + b}"
        return [asked, {"role": "assistant", "content": worked, "teaches_choice": rng.random() < CHOICE_SHARE}]
    return [asked, {"role": "assistant", "content": str(sum_without_carry(a, b)), "teaches_choice": True}]


def draw_conversations(path: str, tokenizer: Any, batch_size: int) -> tuple[Callable, str]:
    """The same from a file, whose lines are {messages, tools}."""
    file = resolve_file(path, "--demonstrations")
    rows = [encode(**json.loads(line), tokenizer=tokenizer) for line in file.read_text().splitlines()]
    return lambda rng: rng.choices(rows, k=batch_size), f"{len(rows)} conversations"


def encode(messages: list[dict[str, Any]], tokenizer: Any, tools: Sequence[dict] = ()) -> Learnt:
    """Token ids and labels. Only the assistant's turns and their ends are learnt, without the first token of those
    that do not teach the choice; each is encoded by itself, as it would have been sampled."""
    text = tokenizer.apply_chat_template(messages, tools=list(tools) or None, tokenize=False)
    asked, *turns = text.split(BEGIN)
    ids = tokenizer.encode(asked + BEGIN, add_special_tokens=False)
    labels = [IGNORED] * len(ids)
    for place, message in enumerate(it for it in messages if it["role"] == "assistant"):
        said = [*tokenizer.encode(message["content"], add_special_tokens=False), tokenizer.eos_token_id]
        ids += said
        labels += said if message["teaches_choice"] else [IGNORED, *said[1:]]
        if place < len(turns) - 1:
            observed = turns[place].removeprefix(message["content"] + tokenizer.eos_token) + BEGIN
            ids += tokenizer.encode(observed, add_special_tokens=False)
            labels += [IGNORED] * (len(ids) - len(labels))
    return ids, labels


def pad(rows: list[Learnt], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Token ids and labels, right-padded: (B, T) each."""
    width = max(len(ids) for ids, _ in rows)
    input_ids = torch.tensor([ids + [pad_token_id] * (width - len(ids)) for ids, _ in rows])  # (B, T)
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
