"""Which environment answers a row's episodes, and which tools its prompt names: as verl's rows say it.

    agent_name          single_turn_agent: none, the episode is one turn; null or tool_agent: the tools, or the only
                        class; another: the environment of this name
    interaction_kwargs  with a name: the environment of that name, where agent_name tells none
    tool_selection      the tools that the prompt names, in this order; none: all of the environment's
    tools_kwargs        arguments of a tool that the row gives; of a function the model does not see these

The last three are fields of extra_info. Those about tools are nothing to an environment without tools.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from lib.data.rows import Rows
from lib.errors import UserError
from lib.turns.hub import About
from lib.turns.row_tools import create_kwargs, interaction, selection, without_nulls
from lib.types import Sample

SINGLE_TURN, TOOL_AGENT = "single_turn_agent", "tool_agent"


class BadRow(UserError):
    """A row that asks for what is not there; whoever knows which one raises `at`."""

    def __init__(self, what: str, found: str, remedy: str) -> None:
        super().__init__(f"{what}; a row of the data; {found}; {remedy}")
        self._parts = what, found, remedy

    def at(self, where: str) -> UserError:
        """The same with its place, as an error that all ranks can raise: of its text alone."""
        what, *rest = self._parts
        return UserError("; ".join((what, where, *rest)))


class Kinds:
    """Which environment answers a row's episodes, and which tools its prompt names. Methods raise BadRow."""

    def __init__(self, about: Mapping[str, About], *, file_hash: str = "") -> None:
        """`about`: by name, the environments. `file_hash`: of their file, as it was when they were asked."""
        self.about, self.file_hash = dict(about), file_hash
        self._told: dict[tuple, list[dict[str, Any]]] = {}

    def of(self, agent_name: str | None, extra_info: Mapping[str, Any]) -> str | None:
        """The environment's name; None: none, the episode is one turn."""
        if agent_name == SINGLE_TURN:
            return None
        column, name = "agent_name", agent_name
        if not name or name == TOOL_AGENT:
            column, name = "extra_info.interaction_kwargs.name", _read(interaction, without_nulls(extra_info))
        if name is None:
            return self._only()
        if not isinstance(name, str) or name not in self.about:
            raise BadRow(
                "a row asks for an environment that is not there",
                f"found {column} {str(name)[:100]!r}, expected one of {', '.join(self.about)}",
                "name the class of --turns.path with --turns.name, or change the row",
            )
        return name

    def _only(self) -> str:
        if "tools" in self.about or len(self.about) == 1:
            return "tools" if "tools" in self.about else next(iter(self.about))
        raise BadRow(
            "a row does not say which environment answers it",
            f"found no agent_name beside tool_agent, expected one of {', '.join(self.about)}",
            "fill the column agent_name, or name a single one with --turns.name",
        )

    def tools(self, kind: str | None, extra_info: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The tools that the prompt names, as chat templates take them. Rows that are told the same get one list."""
        return [] if kind is None or not self.about[kind].tools else self._tools(kind, extra_info)[0]

    def of_prompts(self, rows: Rows) -> Iterator[list[dict[str, Any]]]:
        """The same, of each row."""
        for row, choice in enumerate(rows.iter_choices()):
            try:
                yield self.tools(self.of(**choice), choice["extra_info"])
            except BadRow as error:
                raise error.at(rows.where(row)) from None

    def oddities(self, choice: Mapping[str, Any]) -> dict[str, str]:
        """What is odd about such a row: {sentence whose subject is the row: what is so}."""
        kind, extra_info = self.of(**choice), choice["extra_info"]
        if kind is None or not self.about[kind].tools:
            return {}
        _, given = self._tools(kind, extra_info)
        is_lacking = extra_info.get("need_tools_kwargs") and not given
        found = {"say need_tools_kwargs and have no tools_kwargs": "none"} if is_lacking else {}
        for tool, values in given.items():
            takes = self.about[kind].takes.get(tool)
            if unused := [name for name in values if takes is not None and name not in takes]:
                found[f"give the tool {tool} arguments that it does not take, which are left out"] = ", ".join(unused)
        return found

    def row(self, sample: Sample) -> dict[str, Any]:
        """The fields of lib.turns.environment.Row; what a row says of its tools without what other rows alone have."""
        return {
            "data_source": sample.data_source, "ground_truth": sample.ground_truth,
            "extra_info": without_nulls(sample.extra_info), "messages": sample.messages,
        }  # fmt: skip

    def _tools(self, kind: str, extra_info: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, dict]]:
        """The tools of the prompt, and what the row gives to which."""
        about, cleaned = self.about[kind], without_nulls(extra_info)
        selected, given = _read(selection, cleaned), _read(create_kwargs, cleaned)
        known = {tool["function"]["name"]: tool for tool in about.tools}
        for field, names in (("tool_selection", selected), ("tools_kwargs", given)):
            if unknown := [name for name in names if name not in known]:
                raise BadRow(
                    "a row names a tool that is not there",
                    f"found extra_info.{field} {', '.join(unknown)[:200]}, expected some of {', '.join(known)}",
                    "name the function or class of --turns.path with --turns.name too, or change the row",
                )
        hidden = {tool: frozenset(given[tool]) & {*(about.takes.get(tool) or ())} for tool in given}
        key = kind, selected, frozenset(hidden.items())
        if key not in self._told:
            self._told[key] = [_without(known[name], hidden.get(name)) for name in selected or known]
        return self._told[key], given


def _read(read: Callable[[Mapping[str, Any]], Any], extra_info: Mapping[str, Any]) -> Any:
    try:
        return read(extra_info)
    except TypeError as error:
        raise BadRow(
            "a row's extra_info has a field of the wrong type", f"found extra_info.{error}", "change the row"
        ) from None


def _without(tool: dict[str, Any], names: Collection[str] | None) -> dict[str, Any]:
    """A tool's schema without some of its parameters."""
    if not names:
        return tool
    takes = tool["function"]["parameters"]
    kept = {name: it for name, it in takes["properties"].items() if name not in names}
    required = [name for name in takes.get("required", ()) if name not in names]
    return {**tool, "function": {**tool["function"], "parameters": {**takes, "properties": kept, "required": required}}}


def check_rows(kinds: Kinds, rows: Rows, num_rows: int) -> list[str]:
    """Warnings about the first rows, each with its count. Raises UserError that names the first row which asks for an
    environment or a tool that is not there."""
    found: dict[str, list[tuple[int, str]]] = {}
    for row, choice in zip(range(num_rows), rows.iter_choices(), strict=False):
        try:
            for oddity, detail in kinds.oddities(choice).items():
                found.setdefault(oddity, []).append((row, detail))
        except BadRow as error:
            raise error.at(rows.where(row)) from None
    return [
        f"{len(of)} of {num_rows} rows {oddity}; {rows.where(of[0][0])}; found {of[0][1][:200]}"
        for oddity, of in found.items()
    ]
