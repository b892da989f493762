"""What answers the turns of recipes/bench_turns.py: after the seconds that its row tells, and nothing that matters.

A row's extra_info has `latencies`, seconds of each answer, and `observed`, its text. The turn behind the last of them
ends the episode, at once. The model writes what it likes: it calls no tool, its turns are answered as messages.
"""

import asyncio
import time

from lib.turns import Environment, Observation


class Threads(Environment):
    """Answers in threads of its worker, as synchronous tools do."""

    def reset(self, row, seed):
        self.latencies, self.text = row.extra_info["latencies"], row.extra_info["observed"]

    def step(self, reply):
        if reply.turn < len(self.latencies):
            time.sleep(self.latencies[reply.turn])
        return self.answer(reply)

    def answer(self, reply):
        if reply.turn < len(self.latencies):
            return Observation(messages=self.text)
        return Observation(done=True)


class Loop(Threads):
    """Answers in its worker's loop, as asynchronous tools do."""

    async def step(self, reply):
        if reply.turn < len(self.latencies):
            await asyncio.sleep(self.latencies[reply.turn])
        return self.answer(reply)


class Instant(Threads):
    """Answers in the step of the engine in which the turn ended."""

    instant = True
