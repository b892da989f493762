"""Rows choose the environment and the tools of their episodes, as verl's rows do, in parquet and in JSONL."""

import json

import pytest

from lib.data.parquet import write_rows
from lib.data.prompts import DataConfig, check_data_files, tokenize
from lib.data.reading import read_rows
from lib.errors import UserError
from lib.turns.hub import About
from lib.turns.kinds import Kinds, check_rows
from lib.turns.row_tools import create_kwargs
from lib.types import Sample
from tests.test_turns_appended import template

FLAG = "--data.train-files"


def schema(name, *parameters):
    properties = {it: {"type": "string", "description": f"the {it}"} for it in parameters}
    takes = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": takes}}


def about(*tools, **takes):
    return About(instant=False, replayable=True, scores=False, tools=list(tools), takes=takes)


CALC, SEARCH = schema("calc", "expression", "precision"), schema("search", "query_list")
GSM8K = schema("calc_gsm8k_reward", "answer")
TOOLS = Kinds({"tools": about(CALC, SEARCH, calc=["expression", "precision"], search=None)})


def row(i=0, **changed):
    plain = {
        "prompt": [{"role": "user", "content": f"{i} + 1 = ?"}],
        "data_source": "arithmetic",
        "agent_name": None,
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"index": i},
    }
    return plain | changed


def about_tools(i=0, **info):
    return row(i, extra_info={"index": i, **info})


def gsm8k_row(i, **changed):
    """As verl's examples/data_preprocess/gsm8k_tool_agent_loop.py makes it."""
    question, solution = f"{i} + 1 = ? Let's think step by step.", str(i + 1)
    return {
        "data_source": "openai/gsm8k",
        "agent_name": "tool_agent",
        "prompt": [{"role": "system", "content": "You are a math expert."}, {"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": solution},
        "extra_info": {
            "split": "train", "index": i, "answer": f"#### {solution}", "question": question, "need_tools_kwargs": True,
            "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": solution}}},
            "interaction_kwargs": {"query": question, "ground_truth": solution},
        },
    } | changed  # fmt: skip


def search_r1_row(i):
    """As verl's examples/data_preprocess/preprocess_search_r1_dataset.py makes it: no agent_name."""
    truth, source = {"target": [f"the {i}th", str(i)]}, "searchR1_nq"
    created = {"ground_truth": truth, "question": f"who was number {i}", "data_source": source}
    return {
        "data_source": source,
        "prompt": [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": f"Question: {i}"}],
        "ability": "fact-reasoning",
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {
            "index": i, "need_tools_kwargs": True, "question": created["question"], "split": "train",
            "tools_kwargs": {"search": {"create_kwargs": created}},
        },
        "metadata": None,
    }  # fmt: skip


def save(path, kind, rows):
    if kind == "parquet":
        write_rows(path / "a.parquet", rows)
    elif kind == "text":
        write_rows(path / "a.parquet", [{**it, "extra_info": json.dumps(it["extra_info"])} for it in rows])
    else:
        (path / "a.jsonl").write_text("".join(json.dumps(it) + "\n" for it in rows))
    return str(path / ("a.jsonl" if kind == "jsonl" else "a.parquet"))


def read(path, kind, rows):
    return read_rows((save(path, kind, rows),), FLAG)[0]


def kinds_of(kinds, rows):
    """The environment and the names of the tools of each row, by way of the sample and by way of the column."""
    found = []
    for place, (choice, told) in enumerate(zip(rows.iter_choices(), kinds.of_prompts(rows), strict=True)):
        sample = rows.sample(place, uid=place)
        kind = kinds.of(sample.agent_name, sample.extra_info)
        tools = kinds.tools(kind, sample.extra_info)
        assert kinds.of(**choice) == kind and told == tools
        found.append((kind, [tool["function"]["name"] for tool in tools]))
    return found


EACH_FILE = pytest.mark.parametrize("kind", ["parquet", "text", "jsonl"])


# ---- The environment ----


@EACH_FILE
def test_agent_name_or_interaction_kwargs_choose_the_environment(tmp_path, kind):
    kinds = Kinds({"tools": about(CALC), "Guess": about(), "gsm8k": about()})
    rows = [
        row(0),
        row(1, agent_name="tool_agent"),
        row(2, agent_name="Guess"),
        row(3, agent_name="single_turn_agent"),
        row(4, extra_info={"interaction_kwargs": {"name": "gsm8k", "query": "x"}}),
        row(5, agent_name="tool_agent", extra_info={"interaction_kwargs": {"name": "gsm8k", "query": "x"}}),
        row(6, agent_name="", extra_info={"interaction_kwargs": {"query": "x"}}),
        row(7, agent_name="single_turn_agent", extra_info={"interaction_kwargs": {"name": "gsm8k", "query": "x"}}),
    ]
    written = read(tmp_path, kind, rows)
    expected = ["tools", "tools", "Guess", None, "gsm8k", "gsm8k", "tools", None]
    assert [name for name, _ in kinds_of(kinds, written)] == expected
    assert check_rows(kinds, written, len(written)) == []


def test_rows_that_name_none_have_the_only_one_or_are_refused(tmp_path):
    plain = read(tmp_path, "parquet", [row(0), row(1)])
    assert kinds_of(Kinds({"Guess": about()}), plain) == [("Guess", [])] * 2
    with pytest.raises(
        UserError, match=r"does not say which environment .*a.parquet row 0; .*one of A, B; .*agent_name"
    ):
        check_rows(Kinds({"A": about(), "B": about()}), plain, 2)


@EACH_FILE
@pytest.mark.parametrize(
    ("bad", "found"),
    [
        ({"agent_name": "Gues"}, "agent_name 'Gues', expected one of tools"),
        ({"extra_info": {"interaction_kwargs": {"name": "gsm8k"}}}, "interaction_kwargs.name 'gsm8k', expected one of"),
        ({"extra_info": {"interaction_kwargs": {"name": 7}}}, "interaction_kwargs.name '7'"),
        ({"extra_info": {"interaction_kwargs": "gsm8k"}}, "interaction_kwargs 'gsm8k', expected an object"),
        (
            {"extra_info": {"tools_kwargs": {"clac": {"create_kwargs": {"x": 1}}}}},
            "tools_kwargs clac, expected some of",
        ),
        ({"extra_info": {"tools_kwargs": ["calc"]}}, r"tools_kwargs \['calc'\], expected an object"),
        ({"extra_info": {"tools_kwargs": {"calc": 3}}}, "tools_kwargs.calc 3, expected an object"),
        ({"extra_info": {"tools_kwargs": {"calc": {"create_kwargs": "x"}}}}, "calc.create_kwargs 'x', expected"),
        (
            {"extra_info": {"tool_selection": ["calc", "brwose"]}},
            "tool_selection brwose, expected some of calc, search",
        ),
        ({"extra_info": {"tool_selection": "calc"}}, "tool_selection 'calc', expected a list of names"),
        ({"extra_info": {"tool_selection": [1]}}, r"tool_selection \[1\], expected a list of names"),
    ],
)
def test_a_row_that_asks_for_what_is_not_there_is_named(tmp_path, kind, bad, found):
    empty = {name: None for name in bad.get("extra_info", {})}
    rows = read(tmp_path, kind, [about_tools(i, **empty) for i in range(3)] + [row(3, **bad), row(4, **bad)])
    place = "jsonl line 4" if kind == "jsonl" else "parquet row 3"
    with pytest.raises(UserError, match=rf"{place}; found .*{found}") as raised:
        check_rows(TOOLS, rows, len(rows))
    assert str(type(raised.value)(str(raised.value))) == str(raised.value)  # as every other rank raises it
    assert check_rows(TOOLS, rows, 3) == []  # of the rows that are used


# ---- Its tools ----


@EACH_FILE
def test_mixed_rows_see_their_own_tools_and_nothing_of_each_other(tmp_path, kind):
    rows = read(tmp_path, kind, [
        about_tools(0, tool_selection=["calc"], tools_kwargs={"calc": {"create_kwargs": {"precision": "2"}}}),
        about_tools(1, tool_selection=["search"], tools_kwargs={"search": {"create_kwargs": {"site": {"of": "x"}}}}),
        about_tools(2, tool_selection=["search", "calc", "search"], tools_kwargs=None),
        about_tools(3, tool_selection=[]),
        about_tools(4, tool_selection=None, need_tools_kwargs=True, tools_kwargs={}),
        row(5, agent_name="single_turn_agent", extra_info={"tool_selection": ["elsewhere"], "tools_kwargs": {
            "elsewhere": {"create_kwargs": {"x": "1"}}}}),
    ])  # fmt: skip
    found = kinds_of(TOOLS, rows)
    assert [tools for _, tools in found] == [
        ["calc"], ["search"], ["search", "calc"], ["calc", "search"], ["calc", "search"], [],
    ]  # fmt: skip
    infos = [TOOLS.row(rows.sample(place, uid=0))["extra_info"] for place in range(5)]
    assert [info.get("tools_kwargs") or None for info in infos] == [
        {"calc": {"create_kwargs": {"precision": "2"}}}, {"search": {"create_kwargs": {"site": {"of": "x"}}}},
        None, None, None,
    ]  # fmt: skip
    (note,) = check_rows(TOOLS, rows, len(rows))
    place = "jsonl line 5" if kind == "jsonl" else "parquet row 4"
    assert note.startswith("1 of 6 rows say need_tools_kwargs and have no tools_kwargs; ") and place in note


def test_what_holds_nothing_but_nulls_is_dropped_in_these_fields_alone():
    nothing = {"calc": {"create_kwargs": {"a": None, "b": {"c": None}}}, "search": None}
    some = {"calc": {"create_kwargs": {"a": 0, "b": [None, {"c": None, "d": ""}]}}, "search": {}}
    info = {"index": None, "x": {"y": None}, "tools_kwargs": nothing, "interaction_kwargs": {"name": None}}
    made = TOOLS.row(Sample(uid=0, prompt_ids=[], data_source="a", ground_truth="1", extra_info=info, messages=[{}]))
    assert made == {
        "data_source": "a", "ground_truth": "1", "extra_info": {"index": None, "x": {"y": None}}, "messages": [{}],
    }  # fmt: skip
    kept = {**made, "extra_info": {"tools_kwargs": some}}
    again = TOOLS.row(Sample(uid=0, prompt_ids=[], extra_info=kept["extra_info"], data_source="a", ground_truth="1"))
    expected = {"calc": {"create_kwargs": {"a": 0, "b": [None, {"d": ""}]}}, "search": {}}
    assert again["extra_info"] == {"tools_kwargs": expected}
    assert info["tools_kwargs"] is nothing and "name" in info["interaction_kwargs"]  # what it was, for the reward


def test_what_a_row_gives_a_function_is_not_asked_of_the_model():
    given = {"tools_kwargs": {"calc": {"create_kwargs": {"precision": 2, "unknown": 1}}}}
    calc, search = TOOLS.tools("tools", given)
    assert calc == {**CALC, "function": {**CALC["function"], "parameters": schema("calc", "expression")["function"][
        "parameters"]}} and search == SEARCH  # fmt: skip
    assert TOOLS.tools("tools", {"x": 1}) == [CALC, SEARCH]
    assert TOOLS.tools("tools", {"tools_kwargs": {"search": {"create_kwargs": {"query_list": 1}}}}) == [CALC, SEARCH]
    other = {"tools_kwargs": {"calc": {"create_kwargs": {"precision": 9}}}}
    assert TOOLS.tools("tools", given) is TOOLS.tools("tools", other)  # 100,000 rows keep one copy


def test_what_a_function_does_not_take_is_counted(tmp_path):
    rows = [about_tools(i, tools_kwargs={"calc": {"create_kwargs": {"precision": 2, "truth": "3"}}}) for i in range(3)]
    (note,) = check_rows(TOOLS, read(tmp_path, "jsonl", [row(9), *rows]), 4)
    assert note.startswith("3 of 4 rows give the tool calc arguments that it does not take") and "line 2" in note
    assert note.endswith("found truth")


def test_the_fields_of_tools_are_nothing_to_an_environment_without_any(tmp_path):
    rows = read(
        tmp_path, "jsonl", [about_tools(0, tool_selection=["x"], tools_kwargs={"y": {}}, need_tools_kwargs=True)]
    )
    kinds = Kinds({"Search": about()})
    assert kinds_of(kinds, rows) == [("Search", [])] and check_rows(kinds, rows, 1) == []


# ---- verl's files ----


@EACH_FILE
def test_verls_gsm8k_tool_agent_rows_are_read_as_they_are(tmp_path, kind):
    kinds = Kinds({"tools": about(GSM8K, calc_gsm8k_reward=None)})
    rows = read(tmp_path, kind, [gsm8k_row(i) for i in range(3)])
    assert check_rows(kinds, rows, 3) == []
    assert kinds_of(kinds, rows) == [("tools", ["calc_gsm8k_reward"])] * 3
    sent = kinds.row(rows.sample(2, uid=2))
    assert sent["extra_info"]["tools_kwargs"] == {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "3"}}}
    assert sent["ground_truth"] == "3" and sent["messages"][0]["role"] == "system"


@EACH_FILE
def test_verls_search_r1_rows_are_read_as_they_are(tmp_path, kind):
    kinds = Kinds({"tools": about(SEARCH, search=None)})
    rows = read(tmp_path, kind, [search_r1_row(i) for i in range(3)])
    assert check_rows(kinds, rows, 3) == []
    assert kinds_of(kinds, rows) == [("tools", ["search"])] * 3
    given = kinds.row(rows.sample(1, uid=1))["extra_info"]["tools_kwargs"]["search"]["create_kwargs"]
    assert given["ground_truth"] == {"target": ["the 1th", "1"]} and given["data_source"] == "searchR1_nq"


@pytest.mark.parametrize("depth", ["tools_kwargs", "search", "create_kwargs"])
def test_what_a_row_gives_may_be_json_as_text(tmp_path, depth):
    """At any depth, as some preparations store it to keep Arrow from unifying it."""
    given = {"search": {"create_kwargs": {"top": 3, "filter": None}}}
    created = given["search"]["create_kwargs"]
    as_text = {
        "tools_kwargs": json.dumps(given),
        "search": {"search": json.dumps(given["search"])},
        "create_kwargs": {"search": {"create_kwargs": json.dumps(created)}},
    }[depth]
    kinds = Kinds({"tools": about(CALC, SEARCH, calc=["expression"], search=["query_list", "top"])})
    rows = read(tmp_path, "parquet", [about_tools(0, tools_kwargs=as_text), about_tools(1)])
    assert kinds_of(kinds, rows) == [("tools", ["calc", "search"])] * 2
    [oddity] = check_rows(kinds, rows, 2)
    assert "give the tool search arguments that it does not take" in oddity and "found filter" in oddity
    info = kinds.row(rows.sample(0, uid=0))["extra_info"]
    assert create_kwargs(info) == {"search": created}  # a null that somebody wrote stays one
    bad = read(tmp_path, "parquet", [about_tools(0, tools_kwargs="search")])
    with pytest.raises(UserError, match=r"found extra_info\.tools_kwargs 'search', expected an object"):
        check_rows(kinds, bad, 1)


def test_files_of_both_have_the_rows_of_each(tmp_path):
    """One table of Arrow's: each row has the other's tool as null."""
    kinds = Kinds({"tools": about(GSM8K, SEARCH, calc_gsm8k_reward=None, search=None)})
    plain = {"reward_model": {"style": "rule", "ground_truth": "1"}}
    mixed = [gsm8k_row(0, **plain), {**search_r1_row(1), **plain}]  # of one type of answer
    rows = read(tmp_path, "parquet", mixed)
    assert rows[0]["extra_info"]["tools_kwargs"]["search"] is None  # the trap
    assert check_rows(kinds, rows, 2) == []
    sent = [kinds.row(rows.sample(place, uid=0))["extra_info"]["tools_kwargs"] for place in range(2)]
    assert [[*it] for it in sent] == [["calc_gsm8k_reward"], ["search"]]
    assert sent[0]["calc_gsm8k_reward"]["create_kwargs"] == {"ground_truth": "1"}  # not the other's question


# ---- The prompt ----


def prompts(tmp_path, made, rows, *, kinds=TOOLS, kind="parquet", date="2026-11-24", **options):
    cfg = DataConfig(train_files=(save(tmp_path, kind, rows),), **{"max_prompt_len": 9000, **options})
    tools = None if kinds is None else kinds.of_prompts
    return tokenize(cfg, check_data_files(cfg), made.tokenizer, split="train", tools=tools, date=date)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "lfm2"])
def test_a_prompt_tells_of_its_rows_tools_as_the_template_does(tmp_path, name):
    made = template(name)
    rows = [
        about_tools(0, tool_selection=["calc"]),
        about_tools(1, tool_selection=["search"]),
        about_tools(0),
        row(0, agent_name="single_turn_agent"),
        about_tools(0, tool_selection=["calc"]),
    ]
    told = [[CALC], [SEARCH], [CALC, SEARCH], None, [CALC]]
    found = prompts(tmp_path, made, rows)
    for place, tools in enumerate(told):
        text = made.render(rows[place]["prompt"]) if tools is None else made.tokenizer.apply_chat_template(
            rows[place]["prompt"], tools=tools, add_generation_prompt=True, tokenize=False,
            strftime_now=lambda _: "24 Nov 2026",
        )  # fmt: skip
        assert found.token_ids[place].tolist() == made.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len({ids.tobytes() for ids in found.token_ids}) == 4  # equal messages with other tools are another prompt
    assert not [it for it in found.warnings if "tools" in it]
    untold = prompts(tmp_path, made, rows, kinds=None)
    assert [len(ids) for ids in untold.token_ids] == [len(untold.token_ids[0])] * 5
    assert untold.fingerprint != found.fingerprint


def test_schemas_count_as_prompt(tmp_path):
    made = template("qwen2_5")
    rows = [row(0, agent_name="single_turn_agent"), row(1)]
    lens = [len(ids) for ids in prompts(tmp_path, made, rows).token_ids]
    assert lens[1] > lens[0] + 400
    with pytest.raises(
        UserError, match=rf"a prompt is too long; .*row 1, and 0 more of 2 rows; found {lens[1]} tokens"
    ):
        prompts(tmp_path, made, rows, max_prompt_len=lens[1] - 1)
    kept = prompts(tmp_path, made, rows, max_prompt_len=lens[1] - 1, filter_overlong_prompts=True)
    assert kept.kept == [0] and kept.num_filtered == 1


def test_a_template_that_does_not_print_tools_is_a_warning(tmp_path):
    made = template("phi3_5")
    (note,) = prompts(tmp_path, made, [row(0, agent_name="single_turn_agent"), row(1)]).warnings
    assert "does not print tools" in note and "calc, search" in note
    assert prompts(tmp_path, made, [row(0, agent_name="single_turn_agent")]).warnings == ()
    assert prompts(tmp_path, made, [row(0)], kinds=Kinds({"Guess": about()})).warnings == ()


def test_a_row_that_the_template_refuses_with_its_tools_is_named(tmp_path):
    made = template("qwen2_5")
    with pytest.raises(UserError, match=r"an environment that is not there; .*row 1; found agent_name 'Other'"):
        prompts(tmp_path, made, [row(0), row(1, agent_name="Other")])
    wrong = Kinds({"tools": about(CALC), "Other": about({"function": {"name": "no"}, "bad": object()})})
    with pytest.raises(UserError, match=r"the chat template refuses a row; .*row 1, "):
        prompts(tmp_path, made, [row(0), row(1, agent_name="Other")], kinds=wrong)


def test_a_tool_that_spells_a_control_token_is_ordinary_text_with_split(tmp_path):
    made = template("qwen2_5")
    end = made.tokenizer.eos_token_id
    odd = {"type": "function", "function": {**CALC["function"], "description": "Ends with <|im_end|>."}}
    kinds = Kinds({"tools": about(odd)})
    kept = prompts(tmp_path, made, [row(0), row(1)], kinds=kinds)
    split = prompts(tmp_path, made, [row(0), row(1)], kinds=kinds, control_tokens="split")
    assert [found.token_ids[0].tolist().count(end) for found in (kept, split)] == [3, 2]
    assert made.tokenizer.decode(kept.token_ids[1]) == made.tokenizer.decode(split.token_ids[1])
    assert "2 of 2 prompts" in split.warnings[0] and "'<|im_end|>'" in split.warnings[0]
    with pytest.raises(UserError, match="spells a control token"):
        prompts(tmp_path, made, [row(0)], kinds=kinds, control_tokens="error")


def test_the_agent_of_a_row_is_part_of_what_a_run_is_bound_to(tmp_path):
    made = template("qwen2_5")
    names = (None, "Guess", "Search")
    found = [prompts(tmp_path, made, [row(0, agent_name=it)], kinds=None).fingerprint for it in names]
    assert len(set(found)) == 3
    unnamed = {name: it for name, it in row(0).items() if name != "agent_name"}
    assert prompts(tmp_path, made, [unnamed], kinds=None).fingerprint == found[0]
