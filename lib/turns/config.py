"""What answers the model between its turns, as options."""

from dataclasses import dataclass, field
from typing import Literal

from lib.config.values import JsonObject
from lib.engine.conversations import Join
from lib.engine.rollout_config import SamplingConfig
from lib.errors import UserError, check_fields

Format = Literal["hermes", "qwen3-coder", "llama", "pythonic"]


@dataclass(frozen=True, kw_only=True)
class TurnsConfig:
    """What answers the model between its turns; without a path a response is one turn."""

    path: str | None = None
    """Python file with environments or tools."""
    name: tuple[str, ...] = ()
    """Classes of Environment in that file, from which rows choose by agent_name; or its tools: functions, and classes
    of the shape of verl's BaseTool."""
    kwargs: JsonObject = field(default_factory=dict)
    """Keyword arguments of the class, as JSON; of a class of tools below its name: '{"Gsm8kTool": {"config": {}}}'."""
    env: tuple[str, ...] = ()
    """Environment variables that its workers get although their names say that they are secret."""
    num_workers: int = 4
    """Worker processes per rank, among which the episodes are dealt."""
    concurrency: int = 32
    """Most turns that one worker answers in threads at once (async and instant ones need none); more wait, and their
    time does not run."""
    timeout_s: float = 10.0
    """Seconds that a tool, or a method of the environment, may take."""
    max_turns: int = 8
    """Most turns of the model in an episode."""
    max_turn_len: int | None = None
    """Most tokens of one turn; None: as many as --rollout.max-response-len leaves, which holds all turns and what is
    observed between them."""
    max_calls: int = 4
    """Most tool calls of one turn, below 100; the model is told how many more were not made."""
    max_observation_len: int = 512
    """Most tokens of text that is observed after one turn, without what the chat template writes around it; longer
    texts lose their middle."""
    join: Join | None = None
    """When an answered episode goes on: within 16 steps of the engine, fewer where many episodes wait (arrival), in the
    step in which its turn ended, for which all wait (step), or when no other episode runs (round); only the last two
    reproduce a run to the bit; None: step where all environments are `instant`, else arrival."""
    format: Format | None = None
    """How the model writes tool calls; None: as its chat template does."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            "turns.",
            path=(self.path != "", "a file, or the option left out"),
            num_workers=(1 <= self.num_workers <= 1024, "from 1 to 1024"),
            concurrency=(1 <= self.concurrency <= 1024, "from 1 to 1024"),
            timeout_s=(0 < self.timeout_s <= 86400, "above 0 and at most 86400 (a day)"),
            max_turn_len=(self.max_turn_len is None or self.max_turn_len >= 1, "at least 1"),
            max_calls=(1 <= self.max_calls < 100, "from 1 to 99"),  # a step returns at most 100 messages
            **{name: (getattr(self, name) >= 1, "at least 1") for name in ("max_turns", "max_observation_len")},
        )
        if self.path is None and self.name:
            raise UserError(
                f"environments without their file; --turns.name {' '.join(self.name)}; found no --turns.path, expected "
                "the file that holds them; give --turns.path FILE, or leave --turns.name out"
            )

    def check_sampling(self, rollout: SamplingConfig) -> None:
        """Raises UserError for responses whose turns have no end of their own."""
        found = ["--rollout.stop"] * bool(rollout.stop) + ["--rollout.ignore-eos"] * rollout.ignore_eos
        if self.path is not None and found:
            raise UserError(
                f"a turn must end as the model's chat template ends it; --turns.path {self.path}; found "
                f"{' and '.join(found)}, expected neither; leave them out"
            )
