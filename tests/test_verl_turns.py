"""verl's commands with multi_turn become ours with --turns, whose workers then run the classes of verl's YAML files."""

import re
import subprocess

import pytest
import yaml

from lib.config.flags import parse_args
from lib.errors import UserError
from lib.turns.hub import Hub
from tests.test_hub import ask, call, reply
from tests.test_tools import given, texts
from tests.test_verl_command import ACTOR, BASE, CONFIGS, ROLLOUT, ROOT, converted

TURNS = ROLLOUT + "multi_turn."
TOOLS = ROOT / "tests" / "verl_tools.yaml"
CLASSES = """
class Lookup:
    def __init__(self, config, tool_schema):
        self.table, self.tool_schema = config["table"], tool_schema
        self.name = tool_schema.function.name

    async def create(self, instance_id=None, **kwargs):
        return kwargs["create_kwargs"].get("currency", "$"), None

    async def execute(self, instance_id, parameters, **kwargs):
        return f"{instance_id}{self.table[parameters['thing']]}", 0.5, {}

    async def release(self, instance_id, **kwargs):
        pass


class ShopInteraction:
    def __init__(self, config):
        self.config = config

    async def start_interaction(self, instance_id=None, **kwargs):
        pass

    async def generate_response(self, instance_id, messages, **kwargs):
        return False, f"{self.config['greeting']} {self.config['name']} {kwargs['asked']}", 0.0, {}

    async def finalize_interaction(self, instance_id):
        pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a run starts: with the classes that the YAML files name, and these."""
    (tmp_path / "verl_classes.py").write_text(CLASSES)
    (tmp_path / "tools.yaml").write_text(TOOLS.read_text())
    shop = {"class_name": "verl_classes.ShopInteraction", "config": {"greeting": "hello", "name": "not this one"}}
    (tmp_path / "interaction.yaml").write_text(yaml.safe_dump({"interaction": [shop]}))
    (tmp_path / "named.yaml").write_text(yaml.safe_dump({"interaction": [{**shop, "name": "corner"}]}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(words):
    """What our parser makes of the printed command, all of whose lines a shell has run."""
    lines, conversion = converted([*BASE, *words.split()])
    assert not conversion.refused, lines
    launcher = "torchrun() { printf '%s\\0' \"$@\"; }"
    ran = subprocess.run(["bash", "-c", "\n".join([launcher, *lines])], check=True, capture_output=True, text=True)
    words = ran.stdout.split("\0")[:-1]
    return parse_args(CONFIGS["train_grpo.py"], words[words.index("train_grpo.py") + 1 :]), lines


def begin(of, kind, **extra_info):
    row = {"data_source": "x", "ground_truth": "1", "extra_info": extra_info, "messages": []}
    assert (result := ask(of, "reset", kind, {"kind": kind, "row": row, "seed": 1})).error is None, result.error


def test_the_classes_of_both_yamls_run_in_our_workers(folder):
    """The whole way: verl's command, ours, a shell, and a worker that imports what the YAML files name."""
    cfg, lines = config_of(f"{TURNS}enable=True {TURNS}tool_config_path=tools.yaml "
                           f"{TURNS}interaction_config_path=interaction.yaml {TURNS}max_parallel_calls=2")  # fmt: skip
    assert (cfg.turns.path, cfg.turns.name) == ("verl_turns.py", ("Lookup", "ShopInteraction"))
    assert any("verl_turns.py imports verl_classes" in line for line in lines)
    hub = Hub(cfg.turns, num_workers=1)
    try:
        hub.wait_until_started()
        [tool] = hub.about["tools"].tools
        assert tool == yaml.safe_load(TOOLS.read_text())["tools"][0]["tool_schema"]
        begin(hub, "tools", **given(lookup={"currency": "EUR "}))
        assert texts(ask(hub, "step", "tools", reply(calls=[call("lookup", thing="apple")]))) == ["EUR 3"]
        begin(hub, "shop", interaction_kwargs={"name": "shop", "asked": "twice"})
        assert texts(ask(hub, "step", "shop", reply("hi"))) == ["hello shop twice"]
        assert texts(ask(hub, "step", "shop", reply(calls=[call("lookup", thing="apple")]))) == ["$3"]
    finally:
        hub.close()


def test_the_name_of_an_interactions_entry_is_the_rows(folder):
    cfg, _ = config_of(f"{TURNS}interaction_config_path=named.yaml")
    hub = Hub(cfg.turns, num_workers=1)
    try:
        hub.wait_until_started()
        assert [*hub.about] == ["corner"]
    finally:
        hub.close()


def test_the_functions_of_a_file_are_named(folder):
    marked = "@function_tool\ndef a(x: int): ...\n\n\ndef b(): ...\n\n\n@tools.function_tool()\nasync def c(): ...\n"
    (folder / "tools.py").write_text(marked)
    cfg, lines = config_of(f"{TURNS}function_tool_path=tools.py")
    assert (cfg.turns.path, cfg.turns.name) == ("tools.py", ("a", "c")) and lines[0].startswith("torchrun")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {"max_turns": 512, "max_calls": 1, "max_observation_len": 64, "format": "hermes"}),
        (f"{TURNS}max_assistant_turns=5", {"max_turns": 5}),
        (f"{TURNS}max_user_turns=5", {"max_turns": 6}),
        (f"{TURNS}max_user_turns=1 {TURNS}max_assistant_turns=5", {"max_turns": 2}),
        (f"{TURNS}max_user_turns=null {TURNS}max_assistant_turns=0 data.max_response_length=99", {"max_turns": 99}),
        (f"{TURNS}max_parallel_calls=3", {"max_calls": 3, "max_observation_len": 192}),
        (f"{TURNS}max_tool_response_length=1000", {"max_calls": 1, "max_observation_len": 250}),
        (f"{TURNS}format=qwen3_coder", {"format": "qwen3-coder"}),
        (f"{ROLLOUT}agent.num_workers=16 {ROLLOUT}agent.default_agent_loop=tool_agent", {"num_workers": 4}),
    ],
)  # fmt: skip
def test_limits_keep_verls_meaning(folder, words, expected):
    cfg, lines = config_of(f"{TURNS}tool_config_path={TOOLS} {words}")
    assert {name: getattr(cfg.turns, name) for name in expected} == expected
    assert "# verl gives rows without agent_name one turn" in "\n".join(lines)


def test_nobody_but_tools_is_cut(folder):
    cfg, lines = config_of(f"{TURNS}interaction_config_path=interaction.yaml {TURNS}max_tool_response_length=9")
    assert cfg.turns.max_observation_len == 512 == cfg.rollout.max_response_len and cfg.turns.format is None
    assert any("max_tool_response_length=9: an interaction calls no tool" in line for line in lines)


def test_without_tools_and_interactions_there_is_nothing_to_say():
    cfg, lines = config_of(f"{TURNS}enable=True {TURNS}max_assistant_turns=3 {TURNS}format=gemma4")
    assert cfg.turns.path is None and not any("--turns" in line for line in lines)
    assert any("multi_turn.enable=True: without tools and interactions an episode is one turn" in it for it in lines)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (f"{TURNS}tool_config_path=/not/there.yaml", r"it cannot be read \(No such file or directory\): mend it, or"),
        (f"{TURNS}tool_config_path=$NOT_SET/a.yaml", "a variable of its path is not set here: mend it, or leave it"),
        (f"{TURNS}interaction_config_path={TOOLS}", "it has no list interaction, of objects with class_name"),
        (f"{TURNS}tool_config_path=mcp.yaml", "the tool Search is of the type mcp, expected native"),
        (f"{TURNS}tool_config_path=bare.yaml", "class_name is 'Lookup', expected module.Class"),
        (f"{TURNS}tool_config_path=twice.yaml", "two of its entries have a class Lookup"),
        (f"{TURNS}tool_config_path=refers.yaml", "it refers to other keys"),
        (f"{TURNS}tool_config_path=broken.yaml", "it is no YAML"),
        (f"{TURNS}function_tool_path=renamed.py", "expected functions below @function_tool, without arguments"),
        (f"{TURNS}function_tool_path=renamed.py {TURNS}tool_config_path={TOOLS}", "tools of several files: leave it"),
        (f"{TURNS}tool_config_path={TOOLS} {TURNS}format=gemma4", "no --turns.format of that name; there are hermes"),
        (f"{TURNS}tool_config_path={TOOLS} {TURNS}max_user_turns=$N", "a number is needed here"),
        (f"{TURNS}tool_config_path={TOOLS} {TURNS}tool_response_truncate_side=left", "its middle; .*middle alone"),
        (f"{TURNS}brand_new_knob=3", "not known here, so it may change what is learned"),
        (f"{ROLLOUT}agent.default_agent_loop=mine", "another loop is a class of Environment"),
        (f"{ROLLOUT}agent.agent_loop_config_path=a.yaml", "is a class of Environment"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_is_refused_with_its_reason(folder, words, why):
    files = {
        "mcp": [{"class_name": "a.Search", "config": {"type": "mcp"}}],
        "bare": [{"class_name": "Lookup", "config": {}}],
        "twice": [{"class_name": "a.Lookup"}, {"class_name": "b.Lookup"}],
        "refers": [{"class_name": "a.Lookup", "config": {"url": "${oc.env:URL}"}}],
    }
    for name, tools in files.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"tools": tools}))
    (folder / "broken.yaml").write_text("tools: [")
    (folder / "renamed.py").write_text('@function_tool("b")\ndef a():\n    pass\n')
    lines, conversion = converted([*BASE, *words.split()])
    assert conversion.refused and any(re.match(r"refused: .*" + why, line) for line in lines), lines


def test_a_secret_of_a_tools_config_is_not_shown(folder, capsys):
    text = TOOLS.read_text().replace("table:", "api_key: [abcdefghi]\n      table:")
    (folder / "tools.yaml").write_text(text)
    with pytest.raises(UserError):
        parse_args(CONFIGS["train_grpo.py"], [*BASE, f"{TURNS}tool_config_path=tools.yaml"])
    shown = capsys.readouterr().out
    assert "abcdefghi" not in shown and "[api_key]" in shown and "stands for a secret" in shown


# ---- A YAML of one's own ----


def own(folder, text, **defaults):
    (folder / "mine.yaml").write_text(yaml.safe_dump({"defaults": ["ppo_trainer", "_self_"], **defaults}) + text)


def test_the_keys_of_a_yaml_count_where_the_command_has_not_the_same(folder):
    own(folder, "data: {train_batch_size: 256, max_response_length: 1024}\nhydra: {searchpath: [file://x]}\n"
                "actor_rollout_ref: {rollout: {multi_turn: {enable: True, max_assistant_turns: 5}}, actor: "
                "{use_kl_loss: true, optim: {lr: 1e-5}}}\n")  # fmt: skip
    words = f"--config-path={folder} --config-name=mine data.train_batch_size=64 {TURNS}tool_config_path={TOOLS}"
    cfg, lines = config_of(words + f" {ACTOR}ppo_mini_batch_size=64")
    assert (cfg.prompts_per_step, cfg.rollout.max_response_len, cfg.turns.max_turns) == (64, 1024, 5)
    assert (cfg.optim.lr, cfg.kl_loss_coef) == (1e-5, 0.001)
    assert any(
        "the 7 keys of" in line and "mine.yaml are read as if they stood in the command" in line for line in lines
    )
    cfg, _ = config_of("-cd . -cn mine.yaml " + f"{ACTOR}ppo_mini_batch_size=64")  # a folder beside verl's own
    assert cfg.rollout.max_response_len == 1024


@pytest.mark.parametrize(
    ("words", "text", "why"),
    [
        ("--config-name=mine", "", "its folder is not said"),
        ("--config-path=config --config-name=mine", "", "its folder is not said"),  # below verl's own code
        ("--config-path={} --config-name=none", "", r"none.yaml: it cannot be read \(No such file"),
        ("--config-path={} --config-name=mine", "data: {train_batch_size: '${x.y}'}", "it refers to other keys"),
        ("--config-path={} --config-name=mine", "data: {train_batches: 4}", "data.train_batches=4: not known here"),
        ("--config-path={} --config-name=megatron", "", "megatron.yaml: its defaults are .*'ppo_megatron_trainer'"),
    ],
)  # fmt: skip
def test_a_yaml_that_is_not_understood_is_refused(folder, words, text, why):
    own(folder, text)
    (folder / "megatron.yaml").write_text(yaml.safe_dump({"defaults": ["ppo_megatron_trainer", "_self_"]}))
    lines, conversion = converted([*BASE, *words.format(folder).split()])
    assert conversion.refused and any(re.search(why, line) for line in lines), lines
