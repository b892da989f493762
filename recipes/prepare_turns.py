"""Writes data for the tiny recipes whose model is answered between its turns: train.parquet and val.parquet in verl's
schema, and warm_up.jsonl, demonstrations for recipes/make_tiny_model.py.

    python -m recipes.prepare_turns --task calculator --out data/tiny_calculator --seed 0

    calculator  a product such as 347*28. Habit: to estimate, 6000. Demonstrated too: to call the tool `calc`.
    guess       a number from 0 to 15 in five guesses. Habit: any number. Demonstrated too: to write what is left of the
                range, and the middle of it, [8-15]11.
    retry       the quickstart's sum, and a second try where the first was wrong. Habit: without the carry, in both.
                Demonstrated too: to work it out, units 15,75.

Both ways are shown equally often, but the first token of the better one is learnt rarely: so the model knows both and
prefers the habit, whatever the problem. No problem of the warm-up occurs in the other files, nor one of validation in
training; of a game to guess only the number of the game is in the file.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from lib.config import parse_cli, reporting_errors, resolve_path
from lib.data import write_rows
from lib.rewards.arithmetic import OPERANDS, needs_carry, question, sum_without_carry

NUM_TRAIN, NUM_VAL = 1000, 400
CARRY_SHARE = 0.6
ROUND_SHARE = 0.1  # of the products: where an estimate is right, since a tool of the control's is then worse than none
CHOICE_SHARE = {"calculator": 0.25, "guess": 0.15, "retry": 0.12}
"""Of the demonstrations of the better way, those that also teach to choose it; the others only how."""

Problem = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class TurnsDataConfig:
    """What to write, and where."""

    task: Literal["calculator", "guess", "retry"] = "calculator"
    """The game."""
    out: str = "data/tiny_calculator"
    """Folder to write the three files to."""
    seed: int = 0
    """Seed of the split and of the demonstrations."""
    num_demonstrations: int = 12000
    """Lines of warm_up.jsonl."""


def main(cfg: TurnsDataConfig) -> None:
    """Writes the files. Raises UserError when that fails."""
    rng, folder = random.Random(cfg.seed), resolve_path(cfg.out, "--out")
    make_problems, ask, answer, demonstrate = TASKS[cfg.task]
    train, val, others = make_problems(rng)
    for split, problems in (("train", train), ("val", val)):
        write_rows(folder / f"{split}.parquet", [
            {
                "data_source": f"tiny/{cfg.task}",
                "prompt": [{"role": "user", "content": ask(*problem)}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": answer(*problem)},
                "extra_info": {"split": split, "index": index, "problem": list(problem)},
            }
            for index, problem in enumerate(problems)
        ])  # fmt: skip
    path = folder / "warm_up.jsonl"
    with open(path, "w") as file:
        for _ in range(cfg.num_demonstrations):
            problem = rng.choice(others)
            messages = [{"role": "user", "content": ask(*problem)}, *demonstrate(*problem, rng)]
            tools = [{"function": {"name": "calc"}}] if cfg.task == "calculator" else []
            file.write(json.dumps({"messages": messages, "tools": tools}) + "\n")
    print(f"{folder}: {len(train)} problems, {len(val)} for validation, {cfg.num_demonstrations} demonstrations")


def said(content: str, *, teaches_choice: bool = True) -> dict[str, Any]:
    """A turn of the model's, and whether its first token is learnt."""
    return {"role": "assistant", "content": content, "teaches_choice": teaches_choice}


# ---- A product ----


def products(rng: random.Random) -> tuple[list[Problem], ...]:
    """For training, validation, warm-up."""
    all_of_them = [(a, b) for a in range(100, 1000) for b in range(10, 100)]
    is_round = lambda a, b: a % 100 == 0 and b % 10 == 0  # noqa: E731
    exact = [problem for problem in all_of_them if is_round(*problem)]
    rest = [problem for problem in all_of_them if not is_round(*problem)]
    rng.shuffle(exact)
    rng.shuffle(rest)
    num_exact = round(ROUND_SHARE * NUM_VAL)
    val = exact[:num_exact] + rest[: NUM_VAL - num_exact]
    train = exact[num_exact:] * 3
    end = NUM_VAL - num_exact + NUM_TRAIN
    train += rest[NUM_VAL - num_exact : end]
    rng.shuffle(val)
    rng.shuffle(train)
    return train, val, rest[end:]


def demonstrate_product(a: int, b: int, rng: random.Random) -> list[dict[str, Any]]:
    """An estimate, or a call and its answer."""
    if rng.random() < 0.5:
        return [said(f"{a // 100 * (b // 10)}000")]
    call = {"name": "calc", "arguments": {"expression": f"{a}*{b}"}}
    return [
        said(f"<tool_call>{json.dumps(call)}</tool_call>", teaches_choice=chosen("calculator", rng)),
        {"role": "tool", "content": str(a * b)},
        said(str(a * b)),
    ]


# ---- A number to guess ----


def games(rng: random.Random) -> tuple[list[Problem], ...]:
    """For training, validation, warm-up: (the game's number,)."""
    numbers = list(range(NUM_TRAIN + NUM_VAL + 600))
    rng.shuffle(numbers)
    problems = [(number,) for number in numbers]
    return problems[:NUM_TRAIN], problems[NUM_TRAIN : NUM_TRAIN + NUM_VAL], problems[NUM_TRAIN + NUM_VAL :]


def demonstrate_guess(game: int, rng: random.Random) -> list[dict[str, Any]]:
    """Up to five guesses, each a blind one or one of the middle."""
    number, low, high, messages = rng.randrange(16), 0, 15, []
    for turn in range(5):
        if rng.random() < 0.5:
            guess = rng.randrange(16)
            messages.append(said(str(guess)))
        else:
            guess = (low + high) // 2
            messages.append(said(f"[{low}-{high}]{guess}", teaches_choice=chosen("guess", rng)))
        if guess == number or turn == 4:
            break
        messages.append({"role": "user", "content": "higher" if number > guess else "lower"})
        low, high = (max(low, guess + 1), high) if number > guess else (low, min(high, guess - 1))
    return messages


# ---- A sum, twice ----


def sums(rng: random.Random) -> tuple[list[Problem], ...]:
    """For training, validation, warm-up; no two numbers are together in two of these."""
    pairs = [(a, b) if rng.random() < 0.5 else (b, a) for a in OPERANDS for b in OPERANDS if a <= b]
    rng.shuffle(pairs)
    carry = [pair for pair in pairs if needs_carry(*pair)]
    plain = [pair for pair in pairs if not needs_carry(*pair)]

    def take(count: int) -> list[Problem]:
        num_carry = round(CARRY_SHARE * count)
        taken = carry[:num_carry] + plain[: count - num_carry]
        del carry[:num_carry], plain[: count - num_carry]
        rng.shuffle(taken)
        return taken

    val, train = take(NUM_VAL), take(NUM_TRAIN)
    left = carry + plain
    return train, val, left + [pair[::-1] for pair in left]


def demonstrate_sum(a: int, b: int, rng: random.Random) -> list[dict[str, Any]]:
    """One try, and another one where that was wrong."""
    messages = []
    for turn in range(2):
        if rng.random() < 0.5:
            messages.append(said(str(sum_without_carry(a, b))))
            is_right = not needs_carry(a, b)
        else:
            messages.append(said(f"units {a % 10 + b % 10},{a + b}", teaches_choice=turn or chosen("retry", rng)))
            is_right = True
        if is_right or turn == 1:
            break
        messages.append({"role": "user", "content": "wrong"})
    return messages


def chosen(task: str, rng: random.Random) -> bool:
    """Whether this demonstration teaches to choose the better way."""
    return rng.random() < CHOICE_SHARE[task]


TASKS: dict[str, tuple[Callable, Callable, Callable, Callable]] = {
    "calculator": (products, lambda a, b: f"{a}*{b}=", lambda a, b: str(a * b), demonstrate_product),
    "guess": (games, lambda game: f"game {game}: 0-15", lambda game: "", demonstrate_guess),
    "retry": (sums, question, lambda a, b: str(a + b), demonstrate_sum),
}
"""Of each task: its problems for training, validation and warm-up; its prompt, answer and demonstration."""

if __name__ == "__main__":
    with reporting_errors():
        main(parse_cli(TurnsDataConfig()))
