"""Option values that make no sense, alone or together: told with the option and the numbers, in process."""

from pathlib import Path

import pytest

from lib.config.flags import option_names, parse_args
from lib.errors import UserError
from tests.prefork import prefork
from tests.test_bad_input import command
from train_ppo import PPOConfig


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "0", "1e400", "word", "", "99999999999999999999999999"])
@pytest.mark.parametrize(
    "option", ["--optim.lr", "--optim.clip-grad", "--rollout.temperature", "--rollout.n", "--prompts-per-step",
               "--mini-batch-size", "--data.max-prompt-len", "--reward.timeout-s", "--rollout.max-num-seqs"],
)  # fmt: skip
def test_numbers_that_make_no_sense_name_their_option(tmp_path, option, value):
    if (option, value) in {(f"--optim.{name}", "99999999999999999999999999") for name in ("lr", "clip-grad")}:
        return  # large, but a number
    with pytest.raises(UserError) as caught:
        parse(tmp_path, {option: value})
    assert option in str(caught.value) and str(caught.value).count("; ") >= 2


REFUSED = {
    "--filter-groups.low": ("nan", "inf", "1e400", "word", ""),
    "--filter-groups.high": ("nan", "-inf", "word", ""),
    "--filter-groups.max-rounds": ("nan", "inf", "-1", "0", "1.5", "word", ""),
    "--filter-groups.metric": ("",),
    "--filter-groups.enable": ("word", "", "2"),
    "--filter-groups.keep-surplus": ("word", "", "2"),
    "--overlong.buffer-len": ("nan", "inf", "-1", "1.5", "13", "word", ""),
    "--overlong.factor": ("nan", "inf", "-1", "word", ""),
    "--overlong.mask-truncated": ("word", "", "2"),
    "--loss-scale-factor": ("nan", "inf", "-1", "0", "word", ""),
    "--kl-reward.coef": ("nan", "inf", "-1", "word", ""),
    "--kl-reward.type": ("k4", "", "K1"),
    "--kl-reward.target": ("nan", "inf", "-1", "0", "word", ""),
    "--kl-reward.horizon": ("nan", "inf", "-1", "0", "1.5", "word", ""),
    "--advantage": ("word", "", "GRPO"),
    "--loss": ("word", "", "ppo"),
    "--correction": ("word", "", "token"),
}


@pytest.mark.parametrize(("option", "value"), [(option, value) for option in REFUSED for value in REFUSED[option]])
def test_values_of_dynamic_sampling_shaping_and_kl_that_make_no_sense_name_their_option(tmp_path, option, value):
    with pytest.raises(UserError) as caught:
        parse(tmp_path, {"--kl-reward.coef": "0.1", option: value})
    assert option in str(caught.value) and str(caught.value).count("; ") >= 2, caught.value


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"--mini-batch-size": "3"}, ("mini_batch_size=3", "16 responses", "use 1, 2 or 4")),
        ({"--mini-batch-size": "32"}, ("mini_batch_size=32", "4 x n=4", "use 4, 8 or 16")),
        ({"--prompts-per-step": "1048576", "--rollout.n": "1048573", "--mini-batch-size": "1000"}, ("use 256, 512",)),
        ({"--rollout.n": "1"}, ("--rollout.n 1 is too small for a group", "at least 2")),
        ({"--rollout.top-p": "0.9"}, ("--rollout.top-p 0.9", "--eval.top-p")),
        ({"--rollout.top-k": "50"}, ("--rollout.top-k 50", "--eval.top-k")),
        ({"--rollout.temperature": "0.001"}, ("0.001", "0.01")),
        ({"--rollout.stop": ""}, ("--rollout.stop", "not empty")),
        ({"--max-tokens-per-gpu": "35"}, ("24 + --rollout.max-response-len 12 = 36", "at least 36")),
        ({"--eval.n": "4"}, ("--eval.n 4", "--eval.temperature")),
        ({"--eval.temperature": "0.001"}, ("0.001", "0 (greedy)", "0.01")),
        (
            {"--filter-groups.enable": "True", "--rollout.n": "1", "--advantage": "remax"},
            ("--rollout.n 1 is too small to filter groups", "--rollout.n 8"),
        ),
        (
            {"--filter-groups.enable": "True", "--rollout.log-probs": "False"},
            ("--rollout.log-probs False", "set --filter-groups.keep-surplus False"),
        ),
        ({"--filter-groups.enable": "True", "--loss": "gpg"}, ("GPGLoss has no ratio", "keep-surplus False")),
        ({"--filter-groups.low": "0.6", "--filter-groups.high": "0.5"}, ("--filter-groups.high", "which is 0.6")),
        ({"--kl-reward.target": "0.1"}, ("--kl-reward.coef", "above 0 with a target")),
        ({"--advantage": "gae"}, ("GAEAdvantage needs a critic", "train_ppo.py")),
        ({"--advantage": "optimal_token_baseline", "--correction": "bypass_pg_is"}, ("OptimalTokenBaseline",)),
        ({"--correction": "decoupled_geo_rs", "--rollout.log-probs": "False"}, ("give --correction none",)),
        ({"--data.chat-template-kwargs": "{'a': 1}"}, ("--data.chat-template-kwargs", "a JSON object")),
    ],
)
def test_options_that_do_not_fit_together_print_the_numbers(tmp_path, changes, parts):
    with pytest.raises(UserError) as caught:
        parse(tmp_path, changes)
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize("option", [name for name in option_names(PPOConfig()) if name.startswith("--critic.")])
def test_an_option_of_the_critic_leads_to_the_script_that_has_one(tmp_path, option):
    with pytest.raises(UserError, match=rf"{option}: leave it out, or start train_ppo\.py"):
        parse(tmp_path, {option: "1"})
    with pytest.raises(UserError, match=rf"{option}x: nearest is {option}"):
        parse_args(PPOConfig(), [f"{option}x", "1"])


def parse(folder: Path, changes: dict) -> object:
    from train_grpo import GRPOConfig

    return parse_args(GRPOConfig(), command(folder, changes))


def test_a_config_that_a_recipe_gets_wrong_ends_like_a_wrong_option(tmp_path):
    (tmp_path / "wrong_recipe.py").write_text("from train_grpo import GRPOConfig\nGRPOConfig(prompts_per_step=0)\n")
    done = prefork(2, "-m", "wrong_recipe", PYTHONPATH=str(tmp_path))
    assert done.codes == [2, 2], done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error[")]
    assert line.startswith("error[2] --prompts-per-step is out of range") and "wrong_recipe.py" not in done.stderr
