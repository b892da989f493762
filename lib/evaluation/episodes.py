"""What an evaluation keeps of conversations, beside what it keeps of every response.

In out.parquet, of each row lists with an entry for every response:
turns           its conversation behind the prompt: a list of {role, content, name}, of the roles assistant, user and
                tool; name is the tool's, where the environment says it
num_turns       as verl counts: the prompt, the model's turns, what was observed between them; two for each turn
tool_calls      calls that it wrote
turn_rewards    a list of numbers: what the environment gave for turns
tool_rewards    the same of classes of the shape of verl's BaseTool, for calls; in no reward
turn_scores     the same of classes of the shape of verl's BaseInteraction, for turns; in no reward
turn_metrics    what was counted and measured, as JSON
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lib.data.tokenizer import conversation_of
from lib.secret_values import blank
from lib.types import Rollout, Score

if TYPE_CHECKING:
    import pyarrow as pa

EPISODE_COLUMNS = (
    "turns", "num_turns", "tool_calls", "turn_rewards", "tool_rewards", "turn_scores", "turn_metrics",
)  # fmt: skip
OF_THE_CACHE = ("prompt_tokens", "cached_tokens")
"""Measured numbers that say how this launch sampled, not what."""


@dataclass(frozen=True, kw_only=True)
class Episode:
    """A response with several turns."""

    turns: list[dict[str, Any]]
    """Messages of the roles assistant, user and tool, in order."""
    turn_rewards: list[float]
    tool_rewards: list[float] = field(default_factory=list)
    turn_scores: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    """As `Rollout.metrics`."""
    score: Score | None = None
    """The environment's; without a number: the environment failed. None: the reward function's affair."""

    @property
    def num_turns(self) -> int:
        """As `Rollout.num_turns`."""
        return 2 * sum(message["role"] == "assistant" for message in self.turns)

    @property
    def tool_calls(self) -> int:
        """Calls that the model wrote."""
        return int(self.metrics.get("calls", 0))

    @property
    def extra_info(self) -> dict[str, Any]:
        """What a reward function is told of it beside the row's own, as in training."""
        replies = [message["content"] for message in self.turns if message["role"] == "assistant"]
        return {
            "reply": replies[-1], "num_turns": self.num_turns, "tool_calls": self.tool_calls,
            "turn_rewards": self.turn_rewards, "tool_rewards": self.tool_rewards, "turn_scores": self.turn_scores,
        }  # fmt: skip


def episode_of(rollout: Rollout, tokenizer: Any) -> Episode:
    """What is kept of an episode that is over."""
    return Episode(
        turns=conversation_of(tokenizer, rollout),
        turn_rewards=[reward for _, reward in rollout.turn_rewards],
        tool_rewards=rollout.given("tool_rewards"),
        turn_scores=rollout.given("turn_scores"),
        metrics={name: value for name, value in rollout.metrics.items() if name not in OF_THE_CACHE},
        score=rollout.score,
    )


def from_json(entry: Mapping[str, Any]) -> Episode:
    """The episode of a line that `dataclasses.asdict` made."""
    return Episode(**{**entry, "score": entry["score"] and Score(**entry["score"])})


# ---- Columns ----


def columns_of(episodes: Sequence[Sequence[Episode]]) -> dict[str, "pa.Array"]:
    """The columns, of each prompt's episodes."""
    import pyarrow as pa

    text = pa.string()
    message = pa.struct({"role": text, "content": text, "name": text})
    kinds = {
        "turns": pa.list_(message), "num_turns": pa.int32(), "tool_calls": pa.int32(),
        **dict.fromkeys(("turn_rewards", "tool_rewards", "turn_scores"), pa.list_(pa.float64())), "turn_metrics": text,
    }  # fmt: skip
    values = {name: [[_cell(it, name) for it in of_prompt] for of_prompt in episodes] for name in EPISODE_COLUMNS}
    return {name: pa.array(values[name], pa.list_(kind)) for name, kind in kinds.items()}


def _cell(episode: Episode, name: str) -> Any:
    if name == "turns":
        return [{key: blank(it.get(key)) for key in ("role", "content", "name")} for it in episode.turns]
    return json.dumps(episode.metrics) if name == "turn_metrics" else getattr(episode, name)


def read_columns_of(table: "pa.Table") -> list[list[Episode]] | None:
    """The episodes that `columns_of` wrote; None where the table has no such columns."""
    if not set(EPISODE_COLUMNS) <= {*table.column_names}:
        return None
    try:
        names = ("responses", "turns", "turn_rewards", "tool_rewards", "turn_scores", "turn_metrics")
        columns = (table.column(name).to_pylist() for name in names)
        rows = [[_read(*of_one) for of_one in zip(*row, strict=True)] for row in zip(*columns, strict=True)]
        return rows if all(it.extra_info for row in rows for it in row) else None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None  # another program's columns of these names


def _read(
    _: str, turns: list[dict[str, Any]], turn_rewards: list[float], tool_rewards: list[float],
    turn_scores: list[float], metrics: str,
) -> Episode:  # fmt: skip
    return Episode(
        turns=turns, turn_rewards=turn_rewards, tool_rewards=tool_rewards, turn_scores=turn_scores,
        metrics=json.loads(metrics),
    )  # fmt: skip
