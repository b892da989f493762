"""What is found out about the environments before a model is loaded, and the conversations that begin then."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lib.data.chat_template import ChatTemplate
from lib.engine.conversations import Join
from lib.engine.engine import RolloutEngine, request_seed
from lib.engine.sampler import Sampler
from lib.errors import UserError
from lib.turns.appended import Appender
from lib.turns.config import Format, TurnsConfig
from lib.turns.conversations import Conversations
from lib.turns.dialogue import Dialogue
from lib.turns.hub import Hub
from lib.turns.kinds import BadRow, Kinds
from lib.turns.tool_calls import find_format
from lib.types import Sample


def find_kinds(cfg: TurnsConfig, trials: Mapping[str, Sample]) -> Kinds:
    """The environments of --turns.path, which import and can be reset for these rows, by where they stand. Raises
    UserError."""
    with closing(Hub(cfg, num_workers=1)) as hub:
        hub.wait_until_started()
        kinds = Kinds(hub.about, file_hash=hub.file_hash)
        for number, (where, sample) in enumerate(trials.items()):
            try:
                kind = kinds.of(sample.agent_name, sample.extra_info)
            except BadRow as error:
                raise error.at(where) from None
            if kind is None:
                continue
            seed = request_seed(0, sample.uid, stream="environment")
            hub.call("reset", number, {"kind": kind, "row": kinds.row(sample), "seed": seed})
            [result] = hub.take(wait_s=cfg.timeout_s + 60.0) or [None]
            if result is None or result.error is not None:
                raise UserError(
                    f"an environment cannot be reset; --turns.path {cfg.path}, {kind}, {where}; found "
                    f"{result.error if result else 'no answer'}, expected it to return; mend the file, or the row"
                )
    return kinds


@dataclass(frozen=True, kw_only=True)
class Turns:
    """What a run's conversations are like; found out before a model is loaded."""

    cfg: TurnsConfig
    kinds: Kinds
    format: Format | None
    """How tool calls are written; None: no environment has tools."""
    notes: tuple[str, ...]
    """About the rows and the chat template."""

    @property
    def join(self) -> Join:
        """--turns.join, or what follows from the environments."""
        return self.cfg.join or ("step" if all(it.instant for it in self.kinds.about.values()) else "arrival")

    @property
    def in_words(self) -> str:
        """A line, with the hash of the file."""
        tools = dict.fromkeys(tool["function"]["name"] for it in self.kinds.about.values() for tool in it.tools)
        named = f"; tools {', '.join(tools)}, called as {self.format}" if tools else ""
        workers = "1 worker" if self.cfg.num_workers == 1 else f"{self.cfg.num_workers} workers"
        return (
            f"turns: {', '.join(self.kinds.about)} in {self.cfg.path} (sha256 {self.kinds.file_hash}){named}; at most "
            f"{self.cfg.max_turns} turns, joined by {self.join}; {workers} per rank"
        )


def find_turns(
    cfg: TurnsConfig, kinds: Kinds | None, template: ChatTemplate, stop_ids: Sequence[int], *, notes: Sequence[str] = ()
) -> Turns | None:
    """Raises UserError for a chat template that cannot be appended to, or whose tool calls are not known. `notes`: to
    be told too."""
    if kinds is None:
        return None
    has_tools = any(it.tools for it in kinds.about.values())
    call_format = (cfg.format or find_format(template)) if has_tools else None
    appender = Appender(template, stop_ids)
    appender.check([*["tool"] * has_tools, *["user"] * any(it.is_user or not it.tools for it in kinds.about.values())])
    return Turns(cfg=cfg, kinds=kinds, format=call_format, notes=(*notes, *sorted(appender.notes)))


@contextmanager
def open_sampler(
    turns: Turns | None, engine: RolloutEngine, template: Callable[[], ChatTemplate], *, stop_ids: Sequence[int],
    max_prompt_len: int, split_prompts: bool, log_path: Path, say: Callable[[str], None],
) -> Iterator[Sampler]:  # fmt: skip
    """What answers prompts: conversations, with their workers on the leaders of replicas; or the engine, without
    turns."""
    if turns is None:
        yield engine
        return
    about = dict(kinds=turns.kinds, join=turns.join, max_turn_len=turns.cfg.max_turn_len, world=engine.world)
    if not engine.is_leader:
        yield Conversations(engine, None, **about)
        return
    with closing(Hub(turns.cfg, about=turns.kinds.about, log_path=log_path)) as hub:
        dialogue = Dialogue(
            hub, turns.cfg, turns.kinds, template(), format=turns.format, stop_ids=stop_ids, seed=engine.seed,
            max_prompt_len=max_prompt_len, split_prompts=split_prompts, say=say,
        )  # fmt: skip
        yield Conversations(engine, dialogue, **about)
