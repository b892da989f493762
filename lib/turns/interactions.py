"""Environments of the shape of verl's BaseInteraction: a user who answers each turn. For workers: the standard library
alone.

    class Gsm8kInteraction:
        def __init__(self, config): ...                                what --turns.kwargs '{"Gsm8kInteraction": {...}}'
        def start_interaction(self, instance_id, **kwargs): ...        with the row's interaction_kwargs
        def generate_response(self, instance_id, messages, **kwargs): ...
                                                                       whether to end, text, score, metrics
        def finalize_interaction(self, instance_id): ...               at the episode's end
Each of the last three may be async. A worker process has one object of the class. As in verl, scores are measured
(`turn_score`) and added to no reward, and `calculate_score` is never called by us.
"""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar
from uuid import uuid4

from lib.turns.environment import CALLS, Environment, Observation, Reply, Row, as_text
from lib.turns.row_tools import interaction_kwargs
from lib.turns.tools import arguments_of


class Interaction(Environment):
    """The episodes of an object of verl's shape, with the tools that are named beside its class: a turn that calls
    some is answered by them, any other by the object."""

    interaction: ClassVar[Any]

    def __init__(self, **kwargs: Any) -> None:
        """Keyword arguments are those of classes beside it."""

    async def reset(self, row: Row, seed: int) -> None:
        """Starts an instance with what the row gives it."""
        self.instance_id, self.given = uuid4().hex, interaction_kwargs(row.extra_info)
        self.messages = [dict(message) for message in row.messages]
        await CALLS.get().run(partial(self.interaction.start_interaction, self.instance_id, **self.given))

    async def step(self, reply: Reply) -> Observation:
        """What its tools answer, or the object; done where that says so. Raises ValueError for another shape."""
        self.messages.append({"role": "assistant", "content": reply.text})
        if reply.calls:
            answered = await super().step(reply)
        else:
            answered = await self._respond()
        self.messages += answered.messages
        return answered

    async def _respond(self) -> Observation:
        calls, messages = CALLS.get(), [dict(message) for message in self.messages]
        found = await calls.run(partial(self.interaction.generate_response, self.instance_id, messages, **self.given))
        if not isinstance(found, tuple | list) or len(found) != 4:
            raise ValueError(f"generate_response returned {str(found)[:80]}, expected (done, text, score, metrics)")
        done, text, score, metrics = found
        calls.measure_given("turn_score", score)
        for name, number in metrics.items() if isinstance(metrics, Mapping) else ():
            calls.measure(str(name), number)
        return Observation(messages=[{"role": "user", "content": as_text(text)}], done=bool(done))

    async def close(self) -> None:
        """Ends the instance."""
        finalize = self.interaction.finalize_interaction
        takes_none = arguments_of(finalize) == []  # verl's own base class
        await CALLS.get().run(finalize if takes_none else partial(finalize, self.instance_id))


def is_interaction(value: Any) -> bool:
    """Whether it is a class of this shape."""
    methods = ("start_interaction", "generate_response", "finalize_interaction")
    return inspect.isclass(value) and all(callable(getattr(value, name, None)) for name in methods)


def interaction_name(kind: type, options: Mapping[str, Any]) -> str:
    """By which rows ask for it, as in verl: the name in its config, else the class's in small letters, without
    Interaction at its end."""
    config = options.get("config")
    return (isinstance(config, Mapping) and config.get("name")) or kind.__name__.removesuffix("Interaction").lower()
