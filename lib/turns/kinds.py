"""Which environment answers a row's episodes, and which tools its prompt names."""

from collections.abc import Mapping
from typing import Any

from lib.turns.hub import About
from lib.types import Sample


class Kinds:
    def __init__(self, about: Mapping[str, About]) -> None:
        self.about = about

    def of(self, agent_name: str | None, extra_info: Mapping[str, Any]) -> str | None:
        return next(iter(self.about))

    def tools(self, kind: str | None, extra_info: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [] if kind is None else self.about[kind].tools

    def row(self, sample: Sample) -> dict[str, Any]:
        return {
            "data_source": sample.data_source, "ground_truth": sample.ground_truth,
            "extra_info": sample.extra_info, "messages": sample.messages,
        }  # fmt: skip
