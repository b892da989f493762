"""Option values that make no sense, alone or together: told with the option and the numbers, in process."""

from pathlib import Path

import pytest

from lib.config import parse_args
from lib.errors import UserError
from tests.test_bad_input import command


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


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"--mini-batch-size": "3"}, ("mini_batch_size=3", "16 responses", "use 1, 2 or 4")),
        ({"--mini-batch-size": "32"}, ("mini_batch_size=32", "4 x n=4", "use 4, 8 or 16")),
        ({"--prompts-per-step": "1048576", "--rollout.n": "1048573", "--mini-batch-size": "1000"}, ("use 256, 512",)),
        ({"--rollout.n": "1", "--mini-batch-size": "4"}, ("--rollout.n 1", "at least 2")),
        ({"--rollout.top-p": "0.9"}, ("--rollout.top-p 0.9", "--eval.top-p")),
        ({"--rollout.top-k": "50"}, ("--rollout.top-k 50", "--eval.top-k")),
        ({"--rollout.temperature": "0.001"}, ("0.001", "0.01")),
        ({"--rollout.stop": ""}, ("--rollout.stop", "not empty")),
        ({"--max-tokens-per-gpu": "35"}, ("24 + --rollout.max-response-len 12 = 36", "at least 36")),
        ({"--eval.n": "4"}, ("--eval.n 4", "--eval.temperature")),
        ({"--eval.temperature": "0.001"}, ("0.001", "0 (greedy)", "0.01")),
        ({"--data.chat-template-kwargs": "{'a': 1}"}, ("--data.chat-template-kwargs", "a JSON object")),
    ],
)
def test_options_that_do_not_fit_together_print_the_numbers(tmp_path, changes, parts):
    with pytest.raises(UserError) as caught:
        parse(tmp_path, changes)
    assert all(part in str(caught.value) for part in parts), caught.value


def parse(folder: Path, changes: dict) -> object:
    from train_grpo import GRPOConfig

    return parse_args(GRPOConfig(), command(folder, changes))
