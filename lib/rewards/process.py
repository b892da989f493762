"""A reward worker as the scorer sees it: a process, and the call that it is in."""

from dataclasses import dataclass

from lib.workers.process import WorkerProcess


@dataclass(frozen=True)
class Request:
    """A response that waits for its score."""

    job: int
    """Its number among those that were submitted."""
    response: str | None
    """None: whether the grader accepts its own answer (`Scorer.submit`)."""
    alone: bool = False
    """Whether it has a call of its own: a call with others failed."""


class RewardWorker(WorkerProcess):
    """A process that runs lib/rewards/worker.py."""

    def __init__(self, spec: bytes, environment: dict[str, str], start_timeout_s: float) -> None:
        super().__init__("lib.rewards.worker", "the reward worker", spec, environment, start_timeout_s)
        self.takes_rows = False
        """Whether its function scores many responses in one call."""
        self.requests: list[Request] = []
        """Of the call that it is in; empty: none."""

    @property
    def idle(self) -> bool:
        """Whether it waits for a call."""
        return self.started and not self.requests
