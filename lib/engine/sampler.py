"""Who answers prompts: the engine itself, or conversations with it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from lib.engine.rollout_config import Sampling
from lib.types import Rollout, Sample


class Sampler(Protocol):
    """What `RolloutEngine` and `Conversations` have in common; as the engine's methods."""

    @property
    def is_leader(self) -> bool: ...

    def share(self, samples: list[Sample]) -> list[Sample]: ...

    def generate(
        self, samples: list[Sample], sampling: Sampling, *, stream: str = "train",
        stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[list[Rollout]]: ...  # fmt: skip

    def generate_partly(
        self, rollouts: list[Rollout], sampling: Sampling, *, share: float, max_continued: int,
        stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[Rollout]: ...  # fmt: skip

    def metrics(self, rollouts: Sequence[Rollout]) -> dict[str, float]: ...
