"""What answers the tiny models between their turns, and for each a control that answers without telling anything."""

import random
import re
from functools import wraps

from lib.turns import Environment, Observation

# ---- recipes/tools_tiny_calculator.py ----


def calc(expression: str) -> str:
    """Multiplies two numbers.

    Args:
        expression: such as 347*28
    """
    left, right = expression.split("*")
    return str(int(left) * int(right))


@wraps(calc)
def garbage(expression):  # the control: the model sees the same tool, by the name calc
    return str(random.Random(expression).randrange(1000, 90000))


def score_product(data_source, solution_str, ground_truth, extra_info):
    """1 where the last turn is the product; beside it, whether the episode called a tool."""
    acc = float(extra_info["reply"].strip() == ground_truth)
    return {"score": acc, "acc": acc, "called": float(extra_info["tool_calls"] > 0)}


# ---- recipes/turns_tiny_guess.py ----


class Guess(Environment):
    """Thinks of a number from 0 to 15, and says of five guesses whether it is higher or lower. The guess is the last
    number of a turn."""

    instant = True

    def reset(self, row, seed):
        self.rng = random.Random(seed)
        self.number, self.tries, self.is_found = self.rng.randrange(16), 0, False

    def step(self, reply):
        self.tries += 1
        guess = re.findall(r"\d+", reply.text)[-1:]
        self.is_found = guess == [str(self.number)]
        if self.is_found or self.tries == 5:
            return Observation(done=True)
        return Observation(messages=self.hint(int(guess[0])) if guess else "?", reward=-0.05)

    def hint(self, guess):
        return "higher" if self.number > guess else "lower"

    def score(self):
        return {"score": float(self.is_found), "acc": float(self.is_found), "tries": self.tries}


class RandomHints(Guess):
    """The control: hints of a coin."""

    def hint(self, guess):
        return self.rng.choice(("higher", "lower"))


# ---- recipes/turns_tiny_retry.py ----


class Retry(Environment):
    """Says that a sum is wrong, once; a second try that is right counts half. The sum stands behind the last comma."""

    instant = True

    def reset(self, row, seed):
        self.seed, self.answer, self.tries, self.verdicts = seed, row.ground_truth, [], []

    def step(self, reply):
        self.tries.append(reply.text.rpartition(",")[2] == self.answer)
        self.verdicts.append(self.verdict(reply))
        if self.verdicts[-1] or len(self.verdicts) == 2:
            return Observation(done=True)
        return Observation(messages="wrong")

    def verdict(self, reply):
        return self.tries[-1]

    def score(self):
        return {"score": worth(self.verdicts), "acc": worth(self.tries), "first": float(self.tries[:1] == [True])}


def worth(tries):  # none where the first turn was cut off
    return 1.0 if tries[:1] == [True] else 0.5 * (tries[-1:] == [True])


class CoinRetry(Retry):
    """The control: a coin says what is right, the same for the same words, since equal episodes get equal answers."""

    def verdict(self, reply):
        return random.Random(f"{self.seed} {len(self.tries)} {reply.text}").random() < 0.5
