"""Writes arithmetic in words, `train.parquet` and `val.parquet`, in verl's schema: a ladder of five difficulties.

    python -m recipes.prepare_arithmetic_words --out data/arithmetic_words --seed 0

| data_source arithmetic_words/... | example | share of both files |
|---|---|---|
| sums_1_digit | What is 3 + 4? Subtract 2 from 9. | 30 % |
| sums_2_digits | What is the sum of 27 and 48? | 30 % |
| products_1_digit | Multiply 6 by 7. | 20 % |
| word_problems | Mia has 12 apples and buys 5 more. How many apples does Mia have now? | 20 % |
| products_2_digits | What is 27 times 48? | evaluated only, beside the others |

The difficulty is the data source, hence accuracy is measured for each on its own, and a column of extra_info. The split
is over unordered pairs of operands: if 3 and 4 are a validation pair, no training problem of any kind has these two.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any

from lib.config import parse_cli, reporting_errors, resolve_path
from lib.data import write_rows
from lib.errors import UserError
from lib.rewards.last_number import PREFIX

SHARES = {"sums_1_digit": 0.3, "sums_2_digits": 0.3, "products_1_digit": 0.2, "word_problems": 0.2}
"""What both files hold of each difficulty that is trained."""
EVALUATED_ONLY = "products_2_digits"
VAL_SHARE = 0.3  # of the pairs of one-digit numbers and of the others; with a quarter, 500 rows could lack questions
ONE_DIGIT, TWO_DIGITS, IN_STORIES = range(1, 10), range(10, 100), range(2, 21)

SUMS = (
    *("What is {a} + {b}?", "Calculate {a} + {b}.", "How much is {a} + {b}?", "What is {a} plus {b}?"),
    *("Add {a} and {b}.", "What is the sum of {a} and {b}?"),
)
DIFFERENCES = (
    *("What is {a} - {b}?", "Calculate {a} - {b}.", "How much is {a} - {b}?", "What is {a} minus {b}?"),
    *("Subtract {b} from {a}.", "What is the difference between {a} and {b}?"),
)
PRODUCTS = (
    *("What is {a} x {b}?", "Calculate {a} * {b}.", "How much is {a} * {b}?", "What is {a} times {b}?"),
    *("Multiply {a} by {b}.", "What is the product of {a} and {b}?"),
)
STORIES_OF_SUMS = (
    "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
    "There are {a} {things} in one box and {b} {things} in another box. How many {things} are there in all?",
    "{name} finds {a} {things} in the morning and {b} {things} in the evening. How many {things} does {name} find?",
    "{name} has {a} {things}. A friend has {b} {things}. How many {things} do they have together?",
)
STORIES_OF_DIFFERENCES = (
    "{name} has {a} {things} and gives away {b} of them. How many {things} are left?",
    "There are {a} {things} in a box. {name} takes out {b} of them. How many {things} remain in the box?",
    "{name} needs {a} {things} and has {b}. How many more {things} does {name} need?",
    "{name} has {a} {things}. A friend has {b} {things}. How many more {things} does {name} have than the friend?",
)
NAMES = ("Mia", "Tom", "Sara", "Ben", "Nora", "Leo")
THINGS = ("apples", "books", "coins", "pencils", "stones", "stamps")

Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class WordsConfig:
    """How many problems to write, and where."""

    out: str = "data/arithmetic_words"
    """Folder to write train.parquet and val.parquet to."""
    seed: int = 0
    """Seed of the split and of the problems."""
    num_train: int = 10000
    """Problems in train.parquet; the easy ones are few, so some stand there more than once."""
    num_val: int = 500
    """Problems of the trained difficulties in val.parquet, each there once; as many products of two-digit numbers as
    word problems come on top."""

    def __post_init__(self) -> None:
        for name, least, most in (("num_train", 10, 10**7), ("num_val", 10, 500)):
            if not (least <= getattr(self, name) <= most and getattr(self, name) % 10 == 0):
                raise UserError(
                    f"a wrong number of problems; --{name.replace('_', '-')}; found {getattr(self, name)}, expected a "
                    f"multiple of 10 from {least} to {most}; change it"
                )


def split_pairs(seed: int) -> dict[str, list[Pair]]:
    """{"train": ..., "val": ...}: every unordered pair of numbers from 1 to 99, in one of the two, smaller first."""
    rng = random.Random(seed)
    pairs: dict[str, list[Pair]] = {"train": [], "val": []}
    every = list(combinations_with_replacement(range(1, 100), 2))
    for small in (True, False):
        group = [pair for pair in every if (pair[1] < 10) == small]
        rng.shuffle(group)
        num_val = round(VAL_SHARE * len(group))
        pairs["val"] += group[:num_val]
        pairs["train"] += group[num_val:]
    return pairs


def problems(difficulty: str, pairs: list[Pair], rng: random.Random) -> Iterator[dict]:
    """Endless random problems of a difficulty with operands among `pairs`: {question, answer, a, b, operation}."""
    numbers = {"word_problems": IN_STORIES}.get(
        difficulty, TWO_DIGITS if difficulty.endswith("2_digits") else ONE_DIGIT
    )
    own = [pair for pair in pairs if pair[0] in numbers and pair[1] in numbers]
    while True:
        small, large = rng.choice(own)
        operation = "product" if difficulty.startswith("products") else rng.choice(("sum", "difference"))
        a, b = (large, small) if operation == "difference" else rng.sample((small, large), 2)
        if difficulty == "word_problems":
            texts = {"sum": STORIES_OF_SUMS, "difference": STORIES_OF_DIFFERENCES}[operation]
        else:
            texts = {"sum": SUMS, "difference": DIFFERENCES, "product": PRODUCTS}[operation]
        question = rng.choice(texts).format(a=a, b=b, name=rng.choice(NAMES), things=rng.choice(THINGS))
        answer = {"sum": a + b, "difference": a - b, "product": a * b}[operation]
        yield {"question": question, "answer": answer, "a": a, "b": b, "operation": operation}


def take(count: int, stream: Iterator[dict], *, distinct: bool) -> list[dict]:
    """The next problems, `distinct`: no question twice."""
    taken: dict[Any, dict] = {}
    while len(taken) < count:
        problem = next(stream)
        taken.setdefault(problem["question"] if distinct else len(taken), problem)
    return list(taken.values())


def make_rows(cfg: WordsConfig) -> dict[str, list[dict]]:
    """{"train": rows, "val": rows} in verl's schema, in random order."""
    splits: dict[str, list[dict]] = {}
    for split, pairs in split_pairs(cfg.seed).items():
        rng = random.Random(f"{cfg.seed} {split}")
        size = {"train": cfg.num_train, "val": cfg.num_val}[split]
        counts = {difficulty: round(share * size) for difficulty, share in SHARES.items()}
        if split == "val":
            counts[EVALUATED_ONLY] = counts["word_problems"]
        rows = [
            (difficulty, problem)
            for difficulty, count in counts.items()
            for problem in take(count, problems(difficulty, pairs, rng), distinct=split == "val")
        ]
        rng.shuffle(rows)
        splits[split] = [to_row(*row, split=split, index=index) for index, row in enumerate(rows)]
    return splits


def to_row(difficulty: str, problem: dict, *, split: str, index: int) -> dict:
    """One problem as a row of verl's schema; extra_info also holds the operands and the operation."""
    return {
        "data_source": f"{PREFIX}{difficulty}",
        "prompt": [{"role": "user", "content": problem["question"]}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(problem["answer"])},
        "extra_info": {
            "split": split, "index": index, "difficulty": difficulty,
            **{name: problem[name] for name in ("operation", "a", "b")},
        },
    }  # fmt: skip


def main(cfg: WordsConfig) -> None:
    """Writes both files and says how many problems they hold. Raises UserError when that fails."""
    folder = resolve_path(cfg.out, "--out")
    for split, rows in make_rows(cfg).items():
        path = folder / f"{split}.parquet"
        write_rows(path, rows)
        print(f"{path}: {len(rows)} problems")


if __name__ == "__main__":
    with reporting_errors():
        main(parse_cli(WordsConfig()))
