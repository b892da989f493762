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

from lib.data.faults import short
from lib.data.tokenizer import conversation_of
from lib.errors import UserError
from lib.rollouts.episode_turns import metrics_of
from lib.secret_values import blank
from lib.types import Rollout, Score

if TYPE_CHECKING:
    import pyarrow as pa

EPISODE_COLUMNS = (
    "turns", "num_turns", "tool_calls", "turn_rewards", "tool_rewards", "turn_scores", "turn_metrics",
)  # fmt: skip
GIVEN = ("turn_rewards", "tool_rewards", "turn_scores")
"""Those of what was given for turns and calls."""


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
        metrics=metrics_of(rollout),
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
        **dict.fromkeys(GIVEN, pa.list_(pa.float64())), "turn_metrics": text,
    }  # fmt: skip
    values = {name: [[_cell(it, name) for it in of_prompt] for of_prompt in episodes] for name in EPISODE_COLUMNS}
    return {name: pa.array(values[name], pa.list_(kind)) for name, kind in kinds.items()}


def _cell(episode: Episode, name: str) -> Any:
    if name == "turns":
        return [{key: blank(it.get(key)) for key in ("role", "content", "name")} for it in episode.turns]
    return json.dumps(episode.metrics) if name == "turn_metrics" else getattr(episode, name)


def read_columns_of(table: "pa.Table", where: str) -> list[list[Episode]] | None:
    """The episodes of an evaluation's output, or of a run's rollouts; None where the responses have no turns. Raises
    UserError for turns that cannot be read: without them a reward function would be told less than in training."""
    names = ("responses", "turns", *GIVEN, "turn_metrics")
    rows = table.select([name for name in names if name in table.column_names]).to_pylist()
    if not any(_has_turns(row.get("turns"), row["responses"]) for row in rows):
        return None
    return [_read_row(row, f"{where} row {place}") for place, row in enumerate(rows)]


def _has_turns(turns: Any, responses: list[str]) -> bool:
    """Whether they are the responses'; otherwise the column is the data's own."""
    return isinstance(turns, list) and len(turns) == len(responses) and all(_are_messages(it) for it in turns)


def _are_messages(turns: Any) -> bool:
    """Whether they are a response's turns, or none, as eval.py or a run writes them, of whatever version."""
    try:
        messages = json.loads(turns) if isinstance(turns, str) else turns
    except (ValueError, RecursionError):
        return False
    are_read = messages is None or isinstance(messages, list)
    return are_read and all(isinstance(it, dict) and "role" in it for it in messages or ())


def _read_row(row: Mapping[str, Any], where: str) -> list[Episode]:
    try:
        entries = [dict(zip(row, of_one, strict=True)) for of_one in zip(*row.values(), strict=True)]
        episodes = [(_read if isinstance(it["turns"], list) else _read_saved)(it) for it in entries]
        if all(it.extra_info for it in episodes):
            return episodes
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        pass
    raise UserError(
        f"the turns of responses cannot be read; {where} column 'turns'; found {short(row['turns'])}, expected them as "
        "this version's eval.py or rollouts/step_N.parquet has them, with the columns beside them; score files of both "
        "kinds one by one, or drop the column to score each response as one turn"
    )


def _read(entry: Mapping[str, Any]) -> Episode:
    """Of what `columns_of` wrote."""
    given = {name: entry[name] for name in GIVEN}
    return Episode(turns=entry["turns"], **given, metrics=json.loads(entry["turn_metrics"]))


def _read_saved(entry: Mapping[str, Any]) -> Episode:
    """Of what lib/rollouts/saved_rollouts.py wrote."""
    saved = [] if entry["turns"] is None else json.loads(entry["turns"])
    said = [
        {"role": it["role"], "content": it["text" if it["role"] == "assistant" else "content"], "name": it.get("name")}
        for it in saved
    ]
    return Episode(
        turns=said or [{"role": "assistant", "content": entry["responses"]}],
        turn_rewards=[it["reward"] for it in saved if "reward" in it],
        tool_rewards=[value for it in saved for value in it.get("tool_rewards", ())],
        turn_scores=[value for it in saved for value in it.get("turn_scores", ())],
        metrics=json.loads(entry["turn_metrics"]),
    )
