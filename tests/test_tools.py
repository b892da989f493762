"""Tools in their workers: what a row gives them, which it has, and classes of the shape of verl's BaseTool."""

import asyncio
import time

import pytest

from lib.errors import UserError
from lib.turns.environment import Call, Calls, Environment
from lib.turns.kinds import Kinds, check_rows
from tests.test_hub import ask, call, hub, reply, results
from tests.test_kinds import GSM8K, SEARCH, gsm8k_row, read, search_r1_row

FILE = '''
import asyncio, os, threading, time
from types import SimpleNamespace
from uuid import uuid4
from lib.turns import Environment, Observation


def note(*words):
    with open(os.path.join(os.path.dirname(__file__), "log"), "a") as file:
        file.write(" ".join(map(str, words)) + "\\n")


class ToolResponse:
    def __init__(self, text=None, image=None, video=None):
        self.text, self.image, self.video = text, image, video


class BaseTool:
    """As verl/tools/base_tool.py."""

    def __init__(self, config, tool_schema):
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        assert self.tool_schema is not None, "Tool schema is not set!"
        self.name = self.tool_schema.function.name
        print(self.tool_schema.model_dump(exclude_unset=True, exclude_none=True))

    def get_openai_tool_schema(self):
        return self.tool_schema

    async def create(self, instance_id=None, **kwargs):
        return str(uuid4()), ToolResponse()

    async def calc_reward(self, instance_id, **kwargs):
        return 0.0

    async def release(self, instance_id, **kwargs):
        pass


class Gsm8kTool(BaseTool):
    """As verl/tools/gsm8k_tool.py."""

    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self._instance_dict = {}

    async def create(self, instance_id=None, ground_truth=None, **kwargs):
        if instance_id is None:
            instance_id = str(uuid4())
        note("create", ground_truth, kwargs["create_kwargs"]["ground_truth"])
        if ground_truth is None:
            ground_truth = kwargs.get("create_kwargs", {}).get("ground_truth", None)
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth, "reward": 0.0}
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        answer = parameters.get("answer", "")
        self._instance_dict[instance_id]["response"] = "#### " + answer
        reward = await self.calc_reward(instance_id)
        tool_reward = 0.0 if reward > self._instance_dict[instance_id]["reward"] else -0.05
        self._instance_dict[instance_id]["reward"] = reward
        return ToolResponse(text=f"Current parsed {answer=} {reward=}"), tool_reward, {"tries": 1, "odd": float("nan")}

    async def calc_reward(self, instance_id, **kwargs):
        state = self._instance_dict[instance_id]
        return 1.0 if state["response"] == "#### " + state["ground_truth"] else 0.0

    async def release(self, instance_id, **kwargs):
        note("release", len(self._instance_dict))
        del self._instance_dict[instance_id]


def schema(name, *parameters):
    takes = {"type": "object", "properties": {it: {"type": "string"} for it in parameters}}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": takes}}


class Counter:
    """Its methods are synchronous, its constructor takes nothing, and it answers with text alone."""

    tool_schema = schema("count")

    def create(self, start=0):
        note("create", threading.current_thread() is threading.main_thread())
        return {"count": start}

    def execute(self, instance, parameters):
        instance["count"] += 1
        return str(instance["count"])

    def release(self, instance):
        note("release", instance["count"])
        raise RuntimeError("cannot be released")


class SearchTool(BaseTool):
    """As verl/tools/search_tool.py, with a page that knows the answer in place of its server."""

    async def create(self, instance_id=None, **kwargs):
        self.given = kwargs
        return "it", ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        created = self.given["create_kwargs"]
        found = [f"{query}: {' or '.join(created['ground_truth']['target'])}" for query in parameters["query_list"]]
        return ToolResponse(text="; ".join([created["data_source"], *found])), 0.0, {"query_count": len(found)}


class Odd:
    """Does what its argument says."""

    fails = True

    def __init__(self, config):
        self.config = config

    def get_openai_tool_schema(self):
        return schema("odd", "how")

    async def create(self, **kwargs):
        if Odd.fails:
            Odd.fails = False
            raise ValueError("no connection")
        return "it"

    def execute(self, instance_id, parameters, **kwargs):
        how = parameters["how"]
        if how == "hang":
            time.sleep(60)
        if how == "exit":
            os._exit(3)
        return {
            "image": (ToolResponse(text="x", image=[b"x"]), 0.0, {}),
            "empty": (ToolResponse(), None, None),
            "pair": ("two", 0.5),
            "config": (self.config, 1, {"calls": 5}),
        }[how]

    async def release(self, instance_id, **kwargs):
        pass


class Slow(Odd):
    def get_openai_tool_schema(self):
        return schema("slow")

    async def create(self, **kwargs):
        await asyncio.sleep(1.2)

    def execute(self, instance_id, parameters):
        time.sleep(1.2)


class Nameless(Odd):
    def get_openai_tool_schema(self):
        return {"type": "function", "function": {"description": "Has no name."}}


class Counting(Environment):
    """Its own step, with a tool."""

    tools = (Counter,)
    started = []

    def __init__(self, word="none"):
        self.word = word

    def setup(self):
        self.started.append(self.word)

    async def step(self, reply):
        texts = [await self.call(call) for call in reply.calls]
        return Observation(messages=f"{self.word} {self.started} {texts}", metrics={"tool_reward": 7})


def scale(value: int, factor: int = 1, function: str = "f", instant: bool = False, grace_s: float = 0.0) -> str:
    """Multiplies.

    Args:
        value: the number
        factor: times this
        function: a name that the worker uses too
        instant: likewise
        grace_s: likewise
    """
    return f"{value * factor} {function} {instant} {grace_s}"


async def lookup(key: str, table: dict) -> str:
    """Looks up.

    Args:
        key: which
        table: in this
    """
    return table.get(key, "none")
'''
OPTIONS = {"Gsm8kTool": {"config": {"type": "native"}, "tool_schema": GSM8K}}


@pytest.fixture
def path(tmp_path):
    (tmp_path / "turns.py").write_text(FILE)
    return str(tmp_path / "turns.py")


def log(path):
    file = path.replace("turns.py", "log")
    with open(file) as lines:
        return lines.read().split("\n")[:-1]


def reset(of, key, kind="tools", **extra_info):
    row = {"data_source": "test", "ground_truth": "1", "extra_info": extra_info, "messages": []}
    result = ask(of, "reset", key, {"kind": kind, "row": row, "seed": 1})
    assert result.error is None, result.error


def given(**by_tool):
    return {"tools_kwargs": {tool: {"create_kwargs": it} for tool, it in by_tool.items()}}


def texts(result):
    return [message["content"] for message in result.value["messages"]]


# ---- Functions ----


def test_what_a_row_gives_a_function_holds_over_what_the_model_writes(path):
    with hub(path, "scale", "lookup") as it:
        reset(it, "a", **given(scale={"factor": 10, "ground_truth": "7"}, lookup={"table": {"x": "found"}}))
        reset(it, "b", **given(lookup={"table": {"x": "other"}}))
        calls = [call("scale", value=2), call("scale", value=2, factor=3), call("lookup", key="x")]
        assert texts(ask(it, "step", "a", reply(calls=calls))) == ["20 f False 0.0"] * 2 + ["found"]
        assert texts(ask(it, "step", "b", reply(calls=calls))) == ["2 f False 0.0", "6 f False 0.0", "other"]
        names = call("scale", value=1, function="g", instant=True, grace_s=2.0)
        assert texts(ask(it, "step", "a", reply(calls=[names]))) == ["10 g True 2.0"]
        found = ask(it, "step", "a", reply(calls=[call("lookup"), call("scale", value=1, ground_truth="7")]))
        assert "missing a required argument: 'key'" in texts(found)[0] and "ground_truth" in texts(found)[1]
        assert (found.bad_calls, found.tool_errors) == (2, 0)


def test_a_tool_that_a_row_does_not_have_is_unknown(path):
    with hub(path, "scale", "lookup") as it:
        reset(it, "a", tool_selection=["lookup"])
        found = ask(it, "step", "a", reply(calls=[call("scale", value=2), call("lookup", key="x", table={})]))
        assert texts(found) == ["error: there is no tool 'scale'; there are lookup", "none"] and found.bad_calls == 1
        reset(it, "b", tool_selection=[])
        assert texts(ask(it, "step", "b", reply(calls=[call("scale", value=2)]))) == ["2 f False 0.0"]


def test_tools_run_outside_of_workers_too():
    def double(x: int) -> int:
        return 2 * x

    class Own(Environment):
        tools = (double,)

    assert asyncio.run(Own().call(Call(name="double", arguments={"x": 4}))) == "8"


# ---- Classes of verl's shape ----


def wait_for_lines(path, count):
    """Until the file's tools have noted so much: nobody is told that an episode's instances are released."""
    end = time.monotonic() + 20
    while len(log(path)) < count and time.monotonic() < end:
        time.sleep(0.05)


def test_verls_gsm8k_tool_answers_verls_rows(path, tmp_path):
    """An instance lives as long as its episode: the reward for no improvement needs what was tried before."""
    with hub(path, "Gsm8kTool", kwargs=OPTIONS) as it:
        it.wait_until_started()
        kinds = Kinds(it.about)
        assert kinds.about["tools"].tools == [GSM8K]
        rows = read(tmp_path, "parquet", [gsm8k_row(i) for i in range(2)])
        for place, key in enumerate("ab"):
            sample = rows.sample(place, uid=place)
            kind = kinds.of(sample.agent_name, sample.extra_info)
            it.call("reset", key, {"kind": kind, "row": kinds.row(sample), "seed": 1})
        assert all(result.error is None for result in results(it, 2).values())
        right, wrong = call("calc_gsm8k_reward", answer="1"), call("calc_gsm8k_reward", answer="5")
        found = ask(it, "step", "a", reply(calls=[wrong]))
        assert texts(found) == ["Current parsed answer='5' reward=0.0"]
        assert found.value["metrics"] == {"tool_reward": -0.05, "tries": 1.0} and found.value["reward"] is None
        found = ask(it, "step", "a", reply(calls=[right]))
        assert texts(found) == ["Current parsed answer='1' reward=1.0"] and found.value["metrics"]["tool_reward"] == 0.0
        found = ask(it, "step", "a", reply(calls=[right, right]))
        assert found.value["metrics"] == {"tool_reward": -0.1, "tries": 2.0}
        assert found.value["given"] == {"tool_rewards": [-0.05, -0.05]}
        assert texts(ask(it, "step", "b", reply(calls=[right]))) == ["Current parsed answer='1' reward=0.0"]
        assert log(path) == ["create 1 1", "create 2 2"]
        assert ask(it, "step", "a", reply("#### 1")).value["done"]
        it.call("close", "a")
        it.call("close", "b")
        wait_for_lines(path, 4)
        assert log(path)[2:] == ["release 2", "release 1"]


def test_verls_search_tool_answers_verls_search_r1_rows(path, tmp_path):
    with hub(path, "SearchTool", kwargs={"SearchTool": {"config": {"timeout": 30}, "tool_schema": SEARCH}}) as it:
        it.wait_until_started()
        kinds, rows = Kinds(it.about), read(tmp_path, "parquet", [search_r1_row(i) for i in range(3)])
        assert check_rows(kinds, rows, 3) == []
        sample = rows.sample(2, uid=2)
        kind = kinds.of(sample.agent_name, sample.extra_info)
        assert ask(it, "reset", "a", {"kind": kind, "row": kinds.row(sample), "seed": 1}).error is None
        found = ask(it, "step", "a", reply(calls=[call("search", query_list=["who", "when"])]))
        assert texts(found) == ["searchR1_nq; who: the 2th or 2; when: the 2th or 2"]
        assert found.value["metrics"] == {"tool_reward": 0.0, "query_count": 2.0}


def test_synchronous_methods_run_in_threads_and_an_instance_is_made_once(path):
    with hub(path, "Counter", "Gsm8kTool", kwargs=OPTIONS, timeout_s=5.0) as it:
        reset(it, "a", **given(count={"start": 10}, calc_gsm8k_reward={"ground_truth": "x"}))
        reset(it, "b")
        found = ask(it, "step", "a", reply(calls=[call("count")] * 4))
        assert sorted(texts(found)) == ["11", "12", "13", "14"] and found.value["metrics"] == {}
        assert texts(ask(it, "step", "b", reply(calls=[call("count")]))) == ["1"]
        ask(it, "step", "a", reply(calls=[call("calc_gsm8k_reward", answer="x")]))
        assert log(path) == ["create False", "create False", "create x x"]
        reset(it, "c")
        for key in "abc":  # the last one used none
            it.call("close", key)
        wait_for_lines(path, 6)
        assert sorted(log(path)[3:]) == ["release 1", "release 1", "release 14"]  # one of them of the other tool
        reset(it, "d")
        assert texts(ask(it, "step", "d", reply(calls=[call("count")]))) == ["1"] and it.num_replaced == 0


def test_an_instance_comes_back_by_replay_when_its_worker_is_lost(path):
    with hub(path, "Counter", "Odd", timeout_s=5.0) as it:
        for key in "ab":
            reset(it, key, **given(count={"start": 5}))
        ask(it, "step", "a", reply(calls=[call("count"), call("count")]))
        assert ask(it, "step", "b", reply(calls=[call("odd", how="exit")])).value is not None  # no connection, once
        assert ask(it, "step", "b", reply(calls=[call("odd", how="exit")])).error
        found = ask(it, "step", "a", reply(calls=[call("count")]))
        assert texts(found) == ["8"] and found.was_replayed


def test_what_goes_wrong_in_a_class_of_tools_is_told_and_counted(path):
    with hub(path, "Odd") as it:
        reset(it, "a")
        found = ask(it, "step", "a", reply(calls=[call("odd", how="pair")]))
        assert texts(found) == ["error: odd: ValueError: no connection"] and found.tool_errors == 1
        hows = ("pair", "empty", "config", "image", "unknown")
        found = ask(it, "step", "a", reply(calls=[call("odd", how=how) for how in hows]))
        assert texts(found)[:3] == ["two", "", "{}"] and found.value["metrics"] == {"tool_reward": 1.5, "calls": 5.0}
        assert "picture or video, expected text" in texts(found)[3] and "KeyError" in texts(found)[4]
        assert found.tool_errors == 2 and any("turns.py" in note for note in found.notes)


def test_making_and_using_an_instance_have_one_limit_together(path):
    with hub(path, "Odd", "Slow", "scale") as it:  # 2 s
        reset(it, "a")
        found = ask(it, "step", "a", reply(calls=[call("slow"), call("scale", value=1)]))
        assert texts(found) == ["error: slow timed out after 2 s", "1 f False 0.0"] and found.tool_timeouts == 1
        it.call("close", "a")
        reset(it, "b")
        assert it.num_replaced  # its thread goes on


def test_an_environment_has_tools_of_classes_and_keyword_arguments_beside_theirs(path):
    with hub(path, "Counting", "Gsm8kTool", kwargs={"word": "yes", **OPTIONS}) as it:
        it.wait_until_started()
        assert {name: [tool["function"]["name"] for tool in kind.tools] for name, kind in it.about.items()} == {
            "Counting": ["count"], "tools": ["calc_gsm8k_reward"],
        }  # fmt: skip
        reset(it, "a", "Counting", **given(count={"start": 1}))
        found = ask(it, "step", "a", reply(calls=[call("count"), call("count")]))
        assert texts(found) == ["yes ['yes'] ['2', '3']"] and found.value["metrics"] == {"tool_reward": 7.0}
        reset(it, "b", "tools", **given(calc_gsm8k_reward={"ground_truth": "3"}))
        assert "reward=1.0" in texts(ask(it, "step", "b", reply(calls=[call("calc_gsm8k_reward", answer="3")])))[0]


def test_a_class_of_tools_that_another_file_defines_is_taken_by_name(path, tmp_path):
    (tmp_path / "mine.py").write_text("from turns import Counter, scale\n")
    with hub(str(tmp_path / "mine.py"), "Counter", "scale") as it:
        it.wait_until_started()
        assert [tool["function"]["name"] for tool in it.about["tools"].tools] == ["count", "scale"]


@pytest.mark.parametrize(
    ("names", "kwargs", "expected"),
    [
        (
            ["Gsm8kTool"],
            {},
            r"a tool cannot be made; Gsm8kTool of .*AttributeError.*--turns.kwargs '\{\"Gsm8kTool\": \{",
        ),
        (["Gsm8kTool"], {"Gsm8kTool": {"schema": {}}}, "a tool cannot be made; .*unexpected keyword argument 'schema'"),
        (["Gsm8kTool"], {"Gsm8kTool": {"tool_schema": {"name": "x"}}}, "a tool cannot be made; .*AttributeError"),
        (["Nameless"], {}, r"a tool does not say what it takes; Nameless; found 'name', expected a tool_schema \{"),
        (["scale"], {"Gsm8kTool": {}}, "keyword arguments of no class; --turns.kwargs; found Gsm8kTool"),
        (["Gsm8kTools"], {}, "no such environment or tool; .*found .*Gsm8kTool, .*Counting.*, expected Gsm8kTools"),
    ],
)
def test_classes_of_tools_that_cannot_be_used_are_told(path, names, kwargs, expected):
    with hub(path, *names, kwargs=kwargs) as it, pytest.raises(UserError, match=expected):
        it.wait_until_started()


def test_a_file_that_needs_verl_says_so_where_it_is_not_installed(tmp_path):
    (tmp_path / "turns.py").write_text("from verl_is_not_here.tools.gsm8k_tool import Gsm8kTool\n")
    with hub(str(tmp_path / "turns.py"), "Gsm8kTool") as it, pytest.raises(UserError, match="No module named 'verl_is"):
        it.wait_until_started()


def test_what_tools_measure_is_a_sum_of_finite_numbers():
    calls = Calls()
    for name, value in (("a", 1), ("a", 0.5), ("b", float("inf")), ("b", None), ("b", "1"), ("c", True)):
        calls.measure(name, value)
    assert calls.measured == {"a": 1.5, "c": 1.0}
