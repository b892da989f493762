"""Writes the quickstart's data: sums of two two-digit numbers, `train.parquet` and `val.parquet`, in verl's schema.

    python -m recipes.prepare_arithmetic --out data/arithmetic --seed 0

The split is over unordered pairs, so that if 27+48 is a validation problem, neither 27+48 nor 48+27 is in training.
Three problems in five need a carry, in each file: the tiny model forgets it, so its greedy accuracy before GRPO is the
share of the others, about 0.4, whatever the seed. About half of all pairs stay in neither file; the tiny model's
warm-up uses those.
"""

import random
from dataclasses import dataclass
from itertools import combinations_with_replacement

from lib.config import parse_cli, reporting_errors, resolve_path
from lib.data import write_rows
from lib.errors import UserError
from lib.rewards.arithmetic import DATA_SOURCE, OPERANDS, needs_carry, question

CARRY_SHARE = 0.6
MAX_PAIRS = 2000  # leaves more than half of the 4,095 unordered pairs to the warm-up

Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class ArithmeticConfig:
    """How many problems to write, and where."""

    out: str = "data/arithmetic"
    """Folder to write train.parquet and val.parquet to."""
    seed: int = 0
    """Seed of the split."""
    num_train_pairs: int = 1000
    """Unordered pairs of numbers in train.parquet; each gives the problems a+b and b+a."""
    num_val: int = 400
    """Problems in val.parquet, one for an unordered pair."""

    def __post_init__(self) -> None:
        if min(self.num_train_pairs, self.num_val) < 1 or self.num_train_pairs + self.num_val > MAX_PAIRS:
            raise UserError(
                "wrong number of problems; --num-train-pairs and --num-val; "
                f"found {self.num_train_pairs} and {self.num_val}, expected 1 or more each and at most {MAX_PAIRS} "
                "together, since the warm-up needs the others; lower one of them"
            )


def main(cfg: ArithmeticConfig) -> None:
    """Writes both files and says how many problems they hold. Raises UserError when that fails."""
    folder = resolve_path(cfg.out, "--out")
    for split, problems in split_problems(cfg).items():
        rows = [make_row(a, b, split=split, index=index) for index, (a, b) in enumerate(problems)]
        path = folder / f"{split}.parquet"
        write_rows(path, rows)
        print(f"{path}: {len(rows)} problems")


def split_problems(cfg: ArithmeticConfig) -> dict[str, list[Pair]]:
    """{"train": problems in both orders of the operands, "val": problems in one order}; no unordered pair in both."""
    rng = random.Random(cfg.seed)
    pairs = [pair if rng.random() < 0.5 else pair[::-1] for pair in combinations_with_replacement(OPERANDS, 2)]
    rng.shuffle(pairs)
    carry = [pair for pair in pairs if needs_carry(*pair)]
    plain = [pair for pair in pairs if not needs_carry(*pair)]

    def take(count: int) -> list[Pair]:
        num_carry = round(CARRY_SHARE * count)
        taken = carry[:num_carry] + plain[: count - num_carry]
        del carry[:num_carry], plain[: count - num_carry]
        rng.shuffle(taken)
        return taken

    val, train = take(cfg.num_val), take(cfg.num_train_pairs)
    both_orders = sorted({order for pair in train for order in (pair, pair[::-1])})
    rng.shuffle(both_orders)
    return {"train": both_orders, "val": val}


def make_row(a: int, b: int, *, split: str, index: int) -> dict:
    """One problem as a row of verl's schema; extra_info also holds the operands."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": question(a, b)}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"split": split, "index": index, "a": a, "b": b},
    }


if __name__ == "__main__":
    with reporting_errors():
        main(parse_cli(ArithmeticConfig()))
