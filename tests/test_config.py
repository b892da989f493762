"""Every wrong word of a command line gets one line that names the option; the rest reaches the config."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import pytest

from lib.config.as_json import config_hash, to_json
from lib.config.flags import REQUIRED, option_names, parse_args, parse_cli, plug_in
from lib.config.reporting import reporting_errors
from lib.config.values import JsonObject, either, nearest_divisors, resolve_path
from lib.config.verl_keys import VERL_KEYS, verl_hint
from lib.errors import RewardError, UserError
from tests.checkpoint_folders import in_child
from tests.ranks import LIMIT_S

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss."""


@dataclass(frozen=True, kw_only=True)
class Clip(Loss):
    """The clipped loss."""

    clip_low: float = 0.2
    """Lower bound."""


@dataclass(frozen=True, kw_only=True)
class Sequence(Loss):
    """The loss per sequence."""

    clip_high: float = 0.3
    """Upper bound."""


@dataclass(frozen=True, kw_only=True)
class OwnLoss(Loss):
    """A recipe's own loss."""

    tau: float = 1.0
    """Temperature."""


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimizer."""

    lr: float = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Decay of the moments."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Shape of the learning rate."""
    weight_decay: float = 0.1
    """Decay per step."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf"):
            raise UserError(f"--optim.lr is out of range; found {self.lr}, expected above 0; change it")


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data."""

    train_files: tuple[str, ...] = REQUIRED
    """Parquet files."""
    shuffle: bool = True
    """Mix the rows."""
    template: JsonObject = field(default_factory=dict)
    """Arguments of the chat template."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Trains something."""

    optim: Optim = field(default_factory=Optim)
    data: Data = field(default_factory=Data)
    loss: Loss = plug_in({"clip": Clip, "sequence": Sequence}, "clip")
    correction: Clip | None = plug_in({"none": type(None), "tis": Clip}, "none")
    num_steps: int | None = None
    """Training steps."""
    debug: bool = False
    """Show tracebacks."""


def parse(line: str, default: Config | None = None) -> Config:
    return parse_args(default or Config(), ["--data.train-files", "a.parquet", *shlex.split(line)])


def message(line: str) -> str:
    with pytest.raises(UserError) as caught:
        parse(line)
    return str(caught.value)


# ---- Values ----


def test_values_reach_the_config_with_dashes_or_underscores() -> None:
    config = parse("--optim.weight_decay .3 --optim.betas 0.8 0.9 --data.template '{\"a\": [1]}' --num-steps=7")
    assert config.optim == Optim(weight_decay=0.3, betas=(0.8, 0.9))
    assert config.data == Data(train_files=("a.parquet",), template={"a": [1]})
    assert config.num_steps == 7 and parse("--num-steps None").num_steps is None


def test_the_last_of_equal_options_counts() -> None:
    assert parse("--optim.lr 1 --optim.lr 2").optim.lr == 2
    assert parse("--loss clip --loss sequence").loss == Sequence()
    assert parse("--data.train-files b c").data.train_files == ("b", "c")


def test_a_boolean_takes_true_false_or_nothing() -> None:
    for line, expected in {"": False, "--debug": True, "--debug=true": True, "--debug False": False}.items():
        assert parse(line).debug is expected
    config = parse("--debug --data.shuffle false")
    assert config.debug and not config.data.shuffle
    assert "--data.shuffle" in message("--data.shuffle perhaps") and "True, False" in message("--data.shuffle perhaps")


@pytest.mark.parametrize("number", ["-1", "nan", "inf", "-inf", "0"])
@pytest.mark.parametrize("form", ["--optim.lr {}", "--optim.lr={}"])
def test_a_range_error_of_the_config_comes_through_as_it_is(form: str, number: str) -> None:
    assert message(form.format(number)).startswith("--optim.lr is out of range; found")


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("--optim.lr abc", ("--optim.lr", "abc", "a number")),
        ("--optim.lr", ("--optim.lr", "no value")),
        ("--optim.lr --debug", ("--optim.lr", "no value")),
        ("--num-steps 1e3", ("--num-steps", "1e3", "None or an integer")),
        ("--optim.betas 0.9", ("--optim.betas", "0.9", "two numbers")),
        ("--optim.schedule cosin", ("--optim.schedule", "cosin", "constant, cosine", "nearest is cosine")),
        ("--data.template [1]", ("--data.template", "(list)", "a JSON object")),
        ("--data.template {a", ("--data.template", "line 1 column 2", "quote all", "a JSON object")),
        ("--num-steps 1 2", ("'2' belongs to no option",)),
        ("-lr 3", ("-lr",)),
    ],
)
def test_a_value_of_the_wrong_kind_names_option_value_and_rule(line: str, parts: tuple[str, ...]) -> None:
    text = message(line)
    assert all(part in text for part in parts), text
    assert "\n" not in text


def test_a_required_option_is_named() -> None:
    with pytest.raises(UserError, match=r"missing --data\.train-files"):
        parse_args(Config(), ["--optim.lr", "1"])


# ---- Unknown options ----


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("--optim.shedule", "--optim.schedule"),
        ("--schedule", "--optim.schedule"),
        ("--lr", "--optim.lr"),
        ("--learning_rat", "--optim.lr"),
        ("--train_file", "--data.train-files"),
        ("--no-debug", "--debug"),
        ("--los", "--loss"),
        ("--num_step=3", "--num-steps"),
        ("optim.lr=3", "--optim.lr"),
    ],
)
def test_an_unknown_option_names_the_nearest(word: str, nearest: str) -> None:
    text = message(word)
    assert re.search(rf"(nearest is|write) {nearest}[;,]", text), text


def test_all_unknown_options_are_named_in_one_line() -> None:
    text = message("data.train_batch_size=256 --optim.shedule x trainer.n_gpus_per_node=8")
    assert text.startswith("3 unknown options") and "\n" not in text
    assert "--prompts-per-step" in text and "--optim.schedule" in text and "--nproc_per_node" in text


@pytest.mark.parametrize("form", ["{}=8", "+{}=8", "++{}=8", "--{} 8", "--{}=8"])
def test_every_pasted_verl_key_gets_its_own_hint(form: str) -> None:
    for key, (option, note) in VERL_KEYS.items():
        if key.startswith("--") and not form.startswith("--"):
            continue  # `--config-name` is an option of Hydra itself
        hint = verl_hint(form.format(key.lstrip("-")).split()[0])
        assert hint is not None and option in hint and note in hint, key


def test_a_verl_key_with_another_unit_says_so() -> None:
    text = verl_hint("actor_rollout_ref.actor.ppo_mini_batch_size=64") or ""
    assert "use --mini-batch-size" in text and "responses" in text and "prompts" in text


def test_verl_keys_outside_the_table_are_recognised_by_their_section() -> None:
    assert verl_hint("actor_rollout_ref.rollout.new_knob=3") == "a verl key without a counterpart"
    assert "--reward.kwargs" in (verl_hint("custom_reward_function.reward_kwargs.strict=True") or "")
    assert "--prompts-per-step" in (verl_hint("--train_batch_size") or "")
    assert verl_hint("--path") is None, "the last part alone could be any of several keys"
    assert verl_hint("data.v=2/train.parquet") is None and verl_hint("--optim.lr") is None
    assert parse("--data.train-files data.v=2/train.parquet").data.train_files == ("data.v=2/train.parquet",)


# ---- Plug-ins ----


def test_a_named_plug_in_brings_its_own_options() -> None:
    assert parse("--loss sequence --loss.clip-high 4e-4").loss == Sequence(clip_high=4e-4)
    assert parse("--loss=sequence").loss == Sequence()
    assert parse("--correction tis --correction.clip-low 1").correction == Clip(clip_low=1)
    assert parse("").correction is None
    assert "nearest is --loss.clip-high" in message("--loss sequence --loss.clip-low 1")


def test_an_unknown_plug_in_lists_the_names_and_the_nearest() -> None:
    text = message("--loss sequenze")
    assert "clip, sequence" in text and "nearest is sequence" in text and "--loss" in text
    assert "clip, sequence" in message("--loss")


def test_a_recipes_own_object_shows_its_fields_and_keeps_its_values() -> None:
    assert parse("--loss.tau 3", Config(loss=OwnLoss(tau=2))).loss == OwnLoss(tau=3)
    assert parse("--loss clip", Config(loss=OwnLoss(tau=2))).loss == Clip()
    assert parse("--loss clip", Config(loss=Clip(clip_low=0.1))).loss == Clip(clip_low=0.1)


def test_the_default_config_is_left_alone() -> None:
    default = Config()
    parse("--loss sequence --optim.lr 3", default)
    assert default == Config()


# ---- Help and exit codes ----


def test_help_into_a_reader_that_leaves_early_ends_without_a_word() -> None:
    script = f"{sys.executable} eval.py --help | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert (
        done.stdout.splitlines() == ["usage: eval.py [--help [SECTION]] [--OPTION VALUE ...]", "0"]
        and done.stderr == ""
    )


def test_help_shows_every_option_with_sentence_and_default(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse_cli(Config(), ["--loss", "sequence", "--help"])
    text = capsys.readouterr().out
    assert exit_.value.code == 0
    assert all(name in text for name in option_names(replace(Config(), loss=Sequence())))
    assert "Peak learning rate. (default: 1e-06)" in text
    assert "--loss NAME\n      One of clip, sequence; the options below are its own. (default: sequence)" in text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bad_command_line_is_one_line_on_rank_0_and_code_2_on_all(rank: int) -> None:
    code = "from lib.config.flags import *; from tests.test_config import Config; parse_cli(Config())"
    env = {"RANK": str(rank), "WORLD_SIZE": "2", "PATH": "", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", code, "--data.train-files", "a", "--optim.lr", "x"]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == (rank == 0) and all(line.startswith("error[2] wrong value for --optim.lr") for line in lines)


def test_an_error_ends_with_its_code_and_one_line(capfd: pytest.CaptureFixture) -> None:
    for error, code in ((UserError("a;\nb"), 2), (RewardError("a; b"), 4)):
        with pytest.raises(SystemExit) as exit_, reporting_errors():
            raise error
        assert exit_.value.code == code
        assert capfd.readouterr().err == f"error[{code}] a; b\n"
    with pytest.raises(SystemExit) as exit_, reporting_errors():
        raise KeyboardInterrupt
    assert exit_.value.code == 130 and capfd.readouterr().err == ""


def test_tracebacks_are_for_bugs_and_debug(capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit_, reporting_errors():
        raise ZeroDivisionError("ours")
    assert exit_.value.code == 1 and "Traceback" in capfd.readouterr().err
    with pytest.raises(SystemExit), reporting_errors(debug=True):
        raise UserError("theirs")
    assert "Traceback" in (text := capfd.readouterr().err) and "error[2] theirs" in text
    with pytest.raises(SystemExit):
        parse_cli(Config(), ["--debug", "--optim.lr", "x"])
    assert "Traceback" in capfd.readouterr().err
    for words in (["--debug", "false"], ["--debug", "False"], ["--debug", "--debug=false"]):
        with pytest.raises(SystemExit):
            parse_cli(Config(), [*words, "--optim.lr", "x"])
        assert "Traceback" not in capfd.readouterr().err


def test_the_line_reaches_the_terminal_when_stderr_was_moved_to_a_log() -> None:
    code = (
        "import os; from lib.config.flags import *; from lib.errors import *\n"
        "with reporting_errors():\n"
        "    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)\n"
        "    raise UserError('seen')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr == "error[2] seen\n"


# ---- JSON and hash ----


def test_json_holds_every_value_by_name() -> None:
    config = replace(parse("--correction tis"), optim=Optim(weight_decay=float("inf")))
    assert to_json(config) == {
        "optim": {"lr": 1e-6, "betas": [0.9, 0.99], "schedule": "constant", "weight_decay": "inf"},
        "data": {"train_files": ["a.parquet"], "shuffle": True, "template": {}},
        "loss": {"name": "Clip", "clip_low": 0.2},
        "correction": {"name": "Clip", "clip_low": 0.2},
        "num_steps": None,
        "debug": False,
    }
    json.dumps(to_json(config), allow_nan=False)


def test_functions_are_named_by_file() -> None:
    @dataclass(frozen=True, kw_only=True)
    class WithFunction:
        score: Callable = message

    assert to_json(WithFunction())["score"].endswith("test_config.py:message")


def test_equal_configs_hash_alike_and_others_do_not() -> None:
    assert config_hash(parse("")) == config_hash(parse(""))
    both_orders = [f"--data.template '{text}'" for text in ('{"a": 1, "b": 2}', '{"b": 2, "a": 1}')]
    assert len({config_hash(parse(line)) for line in both_orders}) == 1
    lines = ["", "--optim.lr 2e-6", "--loss sequence", "--correction tis", "--data.template '{\"a\": 1}'"]
    assert len({config_hash(parse(line)) for line in lines}) == len(lines)


# ---- Batch sizes in words ----


def test_nearest_divisors_and_multiples() -> None:
    assert nearest_divisors(128, 96) == [32, 64, 128]
    assert [either(v) for v in ([], [1], [1, 2], [32, 64, 128])] == ["none", "1", "1 or 2", "32, 64 or 128"]


def test_the_batch_ladder_counts_as_by_hand() -> None:
    from lib.data.prompts import DataConfig
    from lib.engine.rollout_config import RolloutConfig
    from lib.launch.checks import batch_ladder
    from lib.launch.train_config import TrainConfig

    cfg = TrainConfig(
        prompts_per_step=16, mini_batch_size=32, update_epochs=2, max_tokens_per_gpu=3500,
        data=DataConfig(max_prompt_len=400),
        rollout=RolloutConfig(n=8, max_response_len=600, tensor_model_parallel_size=2),
    )  # fmt: skip
    text = batch_ladder(cfg, 4, num_steps=100, num_prompts=3200)
    assert "16 prompts x 8 samples = 128 responses" in text
    assert "8 prompts on each of 2" in text and "32 responses on each of 4" in text
    assert "4 mini-batch(es) of 32 responses x 2 epoch(s) = 8 optimizer step(s)" in text
    assert "about 8 responses a rank in 1 to about 3 micro-batch(es) of at most 3500 tokens" in text  # ceil(8 / 3)
    assert "100 steps = 800 optimizer steps; 1600 prompts = 0.5 epochs of 3200" in text


# ---- docs/from_verl.md ----


def test_the_migration_page_holds_the_tables_that_are_printed_in_any_folder(tmp_path: Path) -> None:
    words, env = [sys.executable, "-m", "lib.config.verl_keys"], {**os.environ, "PYTHONPATH": str(ROOT)}
    printed = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout
    page = (ROOT / "docs" / "from_verl.md").read_text()
    assert page.endswith(printed.removesuffix("\n")), "print the tables again: python -m lib.config.verl_keys"
    assert printed.count("\n| `") == len(VERL_KEYS) > 270, "a key stands in two sections"
    _, *rows = re.findall(r"^\S.* \|.* \|", (ROOT / "lib" / "config" / "verl_keys.txt").read_text(), re.MULTILINE)
    assert len(rows) == len(VERL_KEYS), "a key stands twice in a section"


def test_every_option_named_for_verl_users_exists() -> None:
    from eval import EvalScriptConfig
    from lib.algorithms.advantages import GDPOAdvantage
    from lib.algorithms.losses import LOSSES
    from merge import MergeConfig
    from train_grpo import GRPOConfig
    from train_ppo import PPOConfig

    configs = [GRPOConfig(), PPOConfig(), EvalScriptConfig(), MergeConfig()]
    configs += [GRPOConfig(loss=loss()) for loss in LOSSES.values()] + [GRPOConfig(advantage=GDPOAdvantage())]
    existing = {name for config in configs for name in option_names(config)}
    text = " ".join(f"{option} {note}" for option, note in VERL_KEYS.values())
    torchruns = {"--nnodes", "--nproc_per_node"}
    named = set(re.findall(r"--[a-z][a-z0-9._-]*[a-z0-9]|--[a-z]\b", text)) - torchruns
    assert named - existing == set()


def test_the_migration_pages_example_is_complete_and_parses() -> None:
    from merge import MergeConfig
    from train_grpo import GRPOConfig

    page = (ROOT / "docs" / "from_verl.md").read_text().replace("\\\n", "")
    verl, ours, _, merging = re.findall(
        r"```\n(.*?)```", page, re.DOTALL
    )  # tests/test_verl_command.py makes the second
    keys = [word.partition("=")[0] for word in shlex.split(verl) if "=" in word]
    assert len(keys) > 25 and set(keys) <= set(VERL_KEYS)
    words = shlex.split(ours.replace("$HOME", "/home"))
    parse_args(GRPOConfig(), words[words.index("train_grpo.py") + 1 :])
    merge = next(line for line in merging.splitlines() if line.startswith("python merge.py "))
    parse_args(MergeConfig(), shlex.split(merge)[2:])


# ---- Paths ----


def test_a_path_that_cannot_be_looked_at_is_the_users_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "long").symlink_to("x" * 300)
    (tmp_path / "closed" / "inside").mkdir(parents=True)
    (tmp_path / "link").symlink_to("closed/inside")
    (tmp_path / "dangling").symlink_to("nothing")
    for path in ("here", "dangling", "here/too", "closed/inside", "link"):
        assert resolve_path(path, "--x") == tmp_path / path
    for path in ("loop", "long", "x" * 300, "~no-such-user/x", "a\0b"):
        with pytest.raises(UserError, match="--x cannot be opened"):
            resolve_path(path, "--x")

    def as_another_user() -> None:
        for path, match in {"closed": "may not be read", "closed/inside": "cannot be", "link": "cannot be"}.items():
            with pytest.raises(UserError, match=f"--x {match}"):
                resolve_path(path, "--x")

    for folder in [folder for folder in (tmp_path, *tmp_path.parents) if "pytest-" in str(folder)]:
        folder.chmod(0o755)
    (tmp_path / "closed").chmod(0)
    status = in_child(as_another_user, user=65534 if os.getuid() == 0 else None)
    (tmp_path / "closed").chmod(0o755)
    assert status == 0
