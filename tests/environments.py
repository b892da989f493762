"""Environments for runs on the tiny arithmetic model: files like those that users write."""

import random
import re
import time

from lib.turns import Environment, Observation


class Retry(Environment):
    """Says no to a wrong sum, and scores by how many tries it took."""

    instant = True

    def reset(self, row, seed):
        self.answer, self.tries, self.is_right = str(row.ground_truth), 0, False

    def step(self, reply):
        self.tries += 1
        self.is_right = re.findall(r"\d+", reply.text)[-1:] == [self.answer]
        if self.is_right:
            return Observation(done=True, metrics={"tries": self.tries})
        return Observation(messages="no", reward=-0.01)

    def score(self):
        return {"score": 1.0 / self.tries if self.is_right else 0.0, "acc": self.is_right}


class Begins(Retry):
    """Adds to the prompt, answers in a thread."""

    instant = False

    def reset(self, row, seed):
        super().reset(row, seed)
        return Observation(messages=f"{seed % 7}")


class Remembers(Retry):
    """Answers by what it drew at its beginning, which no replay brings back."""

    instant = replayable = False

    def reset(self, row, seed):
        super().reset(row, seed)
        self.drawn = random.SystemRandom().randrange(10, 99)

    def step(self, reply):
        found = super().step(reply)
        return found if found.done else Observation(messages=f"no{self.drawn}")


class Waits(Retry):
    """Answers after up to `most_s` seconds, which depend on nothing."""

    instant = False

    def __init__(self, most_s=0.0):
        self.most_s = most_s

    def step(self, reply):
        time.sleep(random.SystemRandom().random() * self.most_s)
        return super().step(reply)


class Sleeps(Environment):
    """Answers a minute later, and says so before and after."""

    def step(self, reply):
        print("asked", flush=True)
        time.sleep(60)
        print("answered", flush=True)
        return Observation(done=True)

    def score(self):
        return 0.0
