"""Methods of an environment that are its tools: what they see, how a row chooses among them, and a derived class."""

from lib.turns.kinds import Kinds
from tests.ranks import ROOT
from tests.test_hub import ask, call, hub, reply
from tests.test_kinds import read
from tests.test_tools import given, reset, texts

SHELF = '''
import asyncio
from lib.turns import Environment, Observation, tool


class Shelf(Environment):
    def reset(self, row, seed):
        self.boxes = dict(row.extra_info["boxes"])

    @tool
    def take(self, box: str) -> str:
        """Takes a thing out of a box.

        Args:
            box: the name of the box
        """
        return self.boxes.pop(box, "it is empty")

    @tool
    async def count(self) -> int:
        """Counts what is left."""
        return len(self.boxes)


class Larger(Shelf):
    def take(self, box: str, number: int = 1) -> str:
        """Takes things out of a box.

        Args:
            box: the name of the box
            number: how many
        """
        return f"{number} {super().take(box)}"

    @tool
    @staticmethod
    def twice(x: int) -> int:
        """Doubles.

        Args:
            x: a number
        """
        return 2 * x

    async def step(self, reply):
        told = await super().step(reply)
        return Observation(messages=told.messages, done=not self.boxes)
'''


def test_methods_are_tools_that_see_their_own_episode_alone(tmp_path):
    (tmp_path / "shelf.py").write_text(SHELF)
    with hub(str(tmp_path / "shelf.py"), "Shelf", "Larger") as it:
        it.wait_until_started()
        schemas = {name: {tool["function"]["name"]: tool["function"] for tool in kind.tools}
                   for name, kind in it.about.items()}  # fmt: skip
        assert {name: [*of] for name, of in schemas.items()} == {
            "Shelf": ["take", "count"], "Larger": ["take", "count", "twice"],
        }  # fmt: skip
        assert [*schemas["Shelf"]["take"]["parameters"]["properties"]] == ["box"]
        assert [*schemas["Larger"]["take"]["parameters"]["properties"]] == ["box", "number"]
        assert [*schemas["Larger"]["twice"]["parameters"]["properties"]] == ["x"]
        reset(it, "a", "Shelf", boxes={"x": "a nail", "y": "a cup"})
        reset(it, "b", "Shelf", boxes={"x": "a key"})
        reset(it, "c", "Larger", boxes={"x": "a coin"})
        take = [call("take", box="x")]
        assert texts(ask(it, "step", "a", reply(calls=take))) == ["a nail"]
        assert texts(ask(it, "step", "a", reply(calls=[*take, call("count")]))) == ["it is empty", "1"]
        assert texts(ask(it, "step", "b", reply(calls=take))) == ["a key"]
        found = ask(it, "step", "c", reply(calls=[call("take", box="x", number=3), call("twice", x=4)]))
        assert texts(found) == ["3 a coin", "8"] and found.value["done"]
        wrong = ask(it, "step", "a", reply(calls=[call("take"), call("boxes")]))
        assert "missing a required argument: 'box'" in texts(wrong)[0] and wrong.bad_calls == 2
        assert "there is no tool 'boxes'; there are take, count" in texts(wrong)[1]


def test_a_row_chooses_among_methods_and_gives_them_arguments(tmp_path):
    (tmp_path / "shelf.py").write_text(SHELF)
    with hub(str(tmp_path / "shelf.py"), "Shelf") as it:
        reset(it, "a", "Shelf", boxes={"x": "a nail"}, tool_selection=["take"], **given(take={"box": "x"}))
        found = ask(it, "step", "a", reply(calls=[call("take"), call("count")]))
        assert texts(found) == ["a nail", "error: there is no tool 'count'; there are take"]


def test_the_shelf_of_the_docs_has_only_its_rows_boxes_when_the_rows_are_of_a_parquet_file(tmp_path):
    page = (ROOT / "docs" / "conversations.md").read_text()
    (tmp_path / "shelf.py").write_text(page[page.index("# shelf.py") :].partition("```")[0])
    boxes = [{"x": "a nail"}, {"y": "a key"}]
    row = {"prompt": "Take it.", "data_source": "test", "reward_model": {"ground_truth": ""}}
    rows = read(tmp_path, "parquet", [row | {"extra_info": {"boxes": it}} for it in boxes])
    with hub(str(tmp_path / "shelf.py"), "Shelf") as it:
        it.wait_until_started()
        seen = Kinds(it.about).row(rows.sample(0, uid=0))
        assert seen["extra_info"]["boxes"] == {"x": "a nail", "y": None}
        assert ask(it, "reset", "a", {"kind": "Shelf", "row": seen, "seed": 1}).error is None
        assert texts(ask(it, "step", "a", reply(calls=[call("take", box="y")]))) == ["it is empty"]
        assert texts(ask(it, "step", "a", reply(calls=[call("take", box="x")]))) == ["a nail"]


MIXED = (
    SHELF
    + '''

class Lends:
    @tool
    def lend(self, box: str) -> str:
        """Lends a thing.

        Args:
            box: the name of the box
        """
        return f"lent {self.boxes[box]}"

    @tool
    async def count(self) -> str:
        """Counts otherwise."""
        return "never asked"


class Names(Environment):
    @classmethod
    @tool
    def name(cls) -> str:
        """Names the shelf."""
        return cls.__name__

    @staticmethod
    @tool
    def half(x: int) -> int:
        """Halves.

        Args:
            x: a number
        """
        return x // 2


class Library(Larger, Lends, Names):
    async def step(self, reply):
        return await Environment.step(self, reply)
'''
)


def test_methods_of_all_classes_that_an_environment_derives_from_are_tools(tmp_path):
    (tmp_path / "shelf.py").write_text(MIXED)
    with hub(str(tmp_path / "shelf.py"), "Library") as it:
        reset(it, "a", "Library", boxes={"x": "a nail"})
        names = {tool["function"]["name"] for tool in it.about["Library"].tools}
        assert names == {"take", "count", "twice", "lend", "name", "half"}
        calls = [call("lend", box="x"), call("count"), call("name"), call("half", x=5), call("twice", x=5)]
        assert texts(ask(it, "step", "a", reply(calls=calls))) == ["lent a nail", "1", "Library", "2", "10"]
