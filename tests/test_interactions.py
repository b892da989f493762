"""Environments of the shape of verl's BaseInteraction, with verl's rows, in their workers."""

import pytest

from lib.errors import UserError
from lib.turns.kinds import BadRow, Kinds, check_rows
from tests.test_hub import ask, call, hub, reply
from tests.test_kinds import EACH_FILE, read
from tests.test_tools import log, texts, wait_for_lines

FILE = '''
import os
from uuid import uuid4


def note(*words):
    with open(os.path.join(os.path.dirname(__file__), "log"), "a") as file:
        file.write(" ".join(map(str, words)) + "\\n")


class BaseInteraction:
    """As verl/interactions/base.py; its last two methods take no instance."""

    def __init__(self, config):
        self.config = config
        self.name = config["name"]

    async def start_interaction(self, instance_id=None, **kwargs):
        note("start", kwargs["name"])
        return instance_id or str(uuid4())

    async def generate_response(self, instance_id, messages, **kwargs):
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self):
        raise AssertionError("nobody asks")

    async def finalize_interaction(self):
        note("finalized without an instance")


class Gsm8kInteraction(BaseInteraction):
    """Says whether the last turn's number is right."""

    def __init__(self, config):
        super().__init__(config)
        self.truths = {}

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        self.truths[instance_id] = ground_truth
        note("start", self.name, kwargs["name"], kwargs["query"])

    async def generate_response(self, instance_id, messages, **kwargs):
        note(*(it["role"] for it in messages), kwargs["ground_truth"])
        said = [it["content"] for it in messages if it["role"] == "assistant"][-1]
        is_right = said.rpartition("#### ")[2] == self.truths[instance_id]
        text = "Your response is correct!" if is_right else "Your response is incorrect!"
        return is_right, text, float(is_right), {"length": len(said), "odd": "text"}

    async def finalize_interaction(self, instance_id, **kwargs):
        del self.truths[instance_id]
        note("finalize", len(self.truths))


class Plain:
    """Synchronous, made with nothing, and does what the model says."""

    def start_interaction(self, instance_id, **kwargs):
        pass

    def generate_response(self, instance_id, messages, **kwargs):
        said = messages[-1]["content"]
        if said == "exit":
            os._exit(3)
        return (True, "x") if said == "pair" else [False, {"count": len(messages)}, None, None]

    def finalize_interaction(self, instance_id):
        raise RuntimeError("cannot end")


class Needy(Plain):
    def __init__(self, config):
        self.limit = config["limit"]


def double(x: int) -> int:
    """Doubles.

    Args:
        x: a number
    """
    return 2 * x
'''
NAMED = {"Gsm8kInteraction": {"config": {"name": "grade_school"}}}


@pytest.fixture
def path(tmp_path):
    (tmp_path / "turns.py").write_text(FILE)
    return str(tmp_path / "turns.py")


def interaction_row(i, name="gsm8k"):
    """As verl's examples/data_preprocess/gsm8k_multiturn_w_interaction.py makes it: no agent_name."""
    question, solution = f"{i} + 1 = ? Let's think step by step and output the final answer after `####`.", str(i + 1)
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "system", "content": "You are a math expert."}, {"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": solution},
        "extra_info": {
            "split": "train", "index": i, "answer": f"#### {solution}", "question": question,
            "interaction_kwargs": {"name": name, "query": question, "ground_truth": solution},
        },
    }  # fmt: skip


def begin(of, rows, place, key):
    """Resets the environment that a row chooses, as a run does, and returns what became of it."""
    kinds, sample = Kinds(of.about), rows.sample(place, uid=place)
    kind = kinds.of(sample.agent_name, sample.extra_info)
    return ask(of, "reset", key, {"kind": kind, "row": kinds.row(sample), "seed": 1})


@EACH_FILE
def test_verls_rows_choose_and_feed_an_interaction(path, tmp_path, kind):
    rows = read(tmp_path, kind, [interaction_row(i) for i in range(2)])
    with hub(path, "Gsm8kInteraction") as it:
        it.wait_until_started()
        assert [*it.about] == ["gsm8k"] and check_rows(Kinds(it.about), rows, 2) == []
        for place, key in enumerate("ab"):
            assert begin(it, rows, place, key).error is None
        found = ask(it, "step", "a", reply("I guess. #### 7"))
        assert found.value["messages"] == [{"role": "user", "content": "Your response is incorrect!"}]
        assert found.value["metrics"] == {"turn_score": 0.0, "length": 15.0} and not found.value["done"]
        assert found.value["reward"] is None and ask(it, "score", "a").value is None  # the reward function scores
        found = ask(it, "step", "a", reply("#### 1"))
        assert found.value["done"] and found.value["metrics"]["turn_score"] == 1.0
        assert found.value["given"] == {"turn_scores": [1.0]}
        assert not ask(it, "step", "b", reply("#### 1")).value["done"]  # of the other row
        it.call("close", "a")
        wait_for_lines(path, 6)
    question = rows[0]["extra_info"]["question"]
    assert log(path)[0] == f"start gsm8k gsm8k {question}"
    assert log(path)[2:] == [
        "system user assistant 1", "system user assistant user assistant 1", "system user assistant 2", "finalize 1",
    ]  # fmt: skip


def test_the_name_of_its_config_is_the_rows(path, tmp_path):
    rows = read(tmp_path, "parquet", [interaction_row(0, "grade_school")])
    with hub(path, "Gsm8kInteraction", "Plain", kwargs=NAMED) as it:
        it.wait_until_started()
        assert [*it.about] == ["grade_school", "plain"]
        assert not it.about["grade_school"].in_threads and it.about["plain"].in_threads  # async, and not
        assert begin(it, rows, 0, "a").error is None and log(path)[0].startswith("start grade_school grade_school")
        bad = read(tmp_path, "parquet", [interaction_row(0)])
        with pytest.raises(BadRow, match=r"found .*'gsm8k', expected one of grade_school, plain"):
            Kinds(it.about).of(**next(bad.iter_choices()))


def test_tools_beside_an_interaction_answer_the_turns_that_call_them(path, tmp_path):
    """As in verl: a turn with calls is the tools', any other the interaction's, which sees all of them."""
    rows = read(tmp_path, "parquet", [interaction_row(1), {**interaction_row(2), "agent_name": "tool_agent"}])
    with hub(path, "Gsm8kInteraction", "double") as it:
        it.wait_until_started()
        told = {name: [tool["function"]["name"] for tool in about.tools] for name, about in it.about.items()}
        assert told == {"tools": ["double"], "gsm8k": ["double"]}
        assert it.about["gsm8k"].is_user and not it.about["tools"].is_user
        assert begin(it, rows, 0, "a").error is None
        assert texts(ask(it, "step", "a", reply("let me see", calls=[call("double", x=1)]))) == ["2"]
        assert ask(it, "step", "a", reply("#### 2")).value["done"]
        assert log(path)[-1] == "system user assistant tool assistant 2"


def test_what_an_interaction_does_wrong_costs_its_episode_alone(path, tmp_path):
    rows = read(tmp_path, "parquet", [interaction_row(0, "plain"), interaction_row(1, "plain")])
    with hub(path, "Plain") as it:
        it.wait_until_started()
        assert begin(it, rows, 0, "a").error is None
        found = ask(it, "step", "a", reply("hello"))
        assert texts(found) == ['{"count": 3}'] and found.value["metrics"] == {}
        assert begin(it, rows, 1, "b").error is None
        assert ask(it, "step", "b", reply("exit")).error and it.num_replaced
        found = ask(it, "step", "a", reply("hello"))
        assert texts(found) == ['{"count": 5}'] and found.was_replayed
        found = ask(it, "step", "a", reply("pair"))
        assert "generate_response returned (True, 'x'), expected (done, text, score, metrics)" in found.error
        it.call("close", "a")  # cannot end, which is a line of the log
        assert begin(it, rows, 1, "c").error is None


def test_verls_own_base_class_answers_and_ends_without_an_instance(path, tmp_path):
    rows = read(tmp_path, "parquet", [interaction_row(0, "base")])
    with hub(path, "BaseInteraction") as it:
        it.wait_until_started()
        assert begin(it, rows, 0, "a").error is None
        found = ask(it, "step", "a", reply("hello"))
        assert texts(found) == ["Your current result seems acceptable."]
        assert found.value["metrics"] == {"turn_score": 0.8}
        it.call("close", "a")
        wait_for_lines(path, 2)
        assert log(path) == ["start base", "finalized without an instance"]


@pytest.mark.parametrize(
    ("names", "kwargs", "expected"),
    [
        (["Needy"], {}, r"an interaction cannot be made; Needy of .*KeyError: 'limit'.*'\{\"Needy\": \{\"config\""),
        (
            ["Gsm8kInteraction", "Plain"],
            {"Plain": {"config": {"name": "gsm8k"}}},
            "two environments of one name; Plain of .*; found gsm8k twice",
        ),
        (["Plain"], {"Gsm8kInteraction": {}}, "keyword arguments of no class; .*found Gsm8kInteraction"),
    ],
)
def test_interactions_that_cannot_be_used_are_told(path, names, kwargs, expected):
    with hub(path, *names, kwargs=kwargs) as it, pytest.raises(UserError, match=expected):
        it.wait_until_started()
