"""Claims about `--help`, of every script: what comes first, one section, lines that fit, an option in a sentence."""

import re
import subprocess
import sys
from itertools import pairwise

import pytest

from eval import EvalScriptConfig
from lib.algorithms.advantages import ADVANTAGES
from lib.algorithms.correction import CORRECTIONS
from lib.algorithms.losses import LOSSES
from lib.config.flags import _plug_ins, option_names, parse_args
from lib.config.help import field_texts, help_text
from lib.errors import UserError
from tests.ranks import LIMIT_S, ROOT
from train_grpo import GRPOConfig
from train_ppo import PPOConfig

CONFIGS = (GRPOConfig, PPOConfig, EvalScriptConfig)
TUNED = (
    "optim.lr", "rollout.n", "rollout.temperature", "rollout.max-response-len", "prompts-per-step", "mini-batch-size",
    "max-tokens-per-gpu", "rollout.gpu-memory-utilization", "kl-loss-coef", "loss.clip-high",
)  # fmt: skip


def shown(config, section="", width=100):
    return help_text(config, _plug_ins(config), section, width=width)


def entries(text):
    """{option: its sentence and default} of a help, lines put together again."""
    found = re.findall(r"^  (--\S+) .*\n(?: {10}.*\n)*((?: {6}\S.*\n?)+)", text, re.MULTILINE)
    return {name: " ".join(body.split()) for name, body in found}


@pytest.mark.parametrize("make", CONFIGS)
@pytest.mark.parametrize("width", [80, 200])
def test_every_line_fits_and_is_as_full_as_its_words_allow(make, width):
    lines = shown(make(), width=width).splitlines()
    limit = min(width, 100)
    assert max(map(len, lines)) < limit
    for line, following in pairwise(lines):
        if re.match(r" {6}\S", line) and re.match(r" {6}\S", following):  # of one paragraph: no break within
            assert len(line) + 1 + len(following.split()[0]) >= limit, (line, following)


@pytest.mark.parametrize("make", CONFIGS)
def test_every_option_is_there_once_with_one_sentence_and_its_default(make):
    config = make()
    text = shown(config, width=80)
    names = re.findall(r"^  (--\S+) ", text, re.MULTILINE)
    assert sorted(names) == sorted(option_names(config))
    for name, body in entries(text).items():
        sentence, _, default = body.rpartition(" (default: ")
        assert sentence.endswith(".") and default.endswith(")"), name
        if not name.startswith("--reward."):
            assert not re.search(r"(?<!Dr)\. [A-Z]", sentence), sentence


def test_the_fields_of_every_object_that_can_be_chosen_have_their_sentence():
    for make in (make for table in (ADVANTAGES, LOSSES, CORRECTIONS) for make in table.values()):
        chosen = make()
        texts = field_texts(type(chosen))
        assert all(texts[name] for name in vars(chosen)), type(chosen)


def test_model_and_data_come_first_and_what_has_no_section_next():
    headings = re.findall(r"^([A-Z-]+)(?::|$)", shown(PPOConfig()), re.MULTILINE)
    assert headings[:3] == ["MODEL", "DATA", "RUN"] and {"ROLLOUT", "LOSS", "OPTIM", "CRITIC"} < set(headings)
    assert all(f"{heading.lower()}" in shown(PPOConfig()).partition("MODEL")[0] for heading in headings)


def test_what_people_tune_has_a_range_that_works():
    ranges = {
        name: re.search("works: (.*?)[.]? [(]default", body) for name, body in entries(shown(GRPOConfig())).items()
    }
    assert all(ranges[f"--{name}"] for name in TUNED)


def test_a_section_a_part_of_one_or_an_option_is_shown_alone():
    config = PPOConfig()
    for section, prefix in (("rollout", "--rollout."), ("critic.optim", "--critic.optim."), ("--optim", "--optim.")):
        names = list(entries(shown(config, section)))
        assert names and all(name.startswith(prefix) for name in names)
    assert "usage" not in shown(config, "rollout")
    assert list(entries(shown(config, "rollout.max_response_len"))) == ["--rollout.max-response-len"]
    assert next(iter(entries(shown(config, "run")))) == "--loss-agg-mode"
    with pytest.raises(
        UserError, match=r"no section of options is called 'rolout'; .*; nearest is rollout; see --help"
    ):
        shown(config, "rolout")


@pytest.mark.parametrize(
    "words", [["--help", "loss"], ["--help=loss"], ["-h", "loss"], ["--optim.lr", "1", "-h", "loss"]]
)
def test_the_command_line_may_name_the_section_and_what_is_plugged_in(words, capsys):
    with pytest.raises(SystemExit) as end:
        parse_args(GRPOConfig(), ["--loss", "gspo", *words])
    out = capsys.readouterr().out
    assert end.value.code == 0 and out.startswith("LOSS: ") and "--loss.clip-low FLOAT" in out
    assert "(default: gspo)" in out and "0.0003" in out and "--optim.lr" not in out


def test_a_section_that_does_not_exist_ends_with_one_line_and_code_2():
    done = subprocess.run(
        [sys.executable, "merge.py", "--help", "nothing"], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error[2] no section of options is called 'nothing'; ")
