"""Every word that belongs to no option is named with the option that was meant, and with no other option."""

import re
import shlex

import pytest

from lib.config.flags import parse_args
from lib.errors import UserError
from tests.test_config import Config, message


@pytest.mark.parametrize(
    ("line", "many", "words"),
    [
        ("+data.foo=1 ~trainer.logger ++algorithm.x=2 a.b=3 c", 5, ("+data.foo: ", "~trainer.logger: ", "'a.b=3 c'")),
        ("++algorithm.x=1 +optim.lr=1 -lr 3", 3, ("++algorithm.x: a verl key", "write --optim.lr", "is --optim.lr")),
        ("--optim.betas 1 2 3 --num-steps 1 '' --debug true x --num-steps=1 2", 4, ("'3  x 2' belongs to no option",)),
    ],
)
def test_words_that_belong_to_no_option_are_named_too(line: str, many: int, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        parse_args(Config(), shlex.split(line))
    assert all(word in str(caught.value) for word in (f"{many} unknown options", *words)), caught.value


def test_no_option_is_called_the_nearest_that_is_not_like_the_word() -> None:
    for word in ("--frobnicate", "--gpus=2", "-q", "--", "---"):
        text = message(word)
        assert "nearest" not in text and "no option is like it (write OPTION=VALUE for a value" in text, text
    for line in ("--loss xyz", "--optim.schedule pxq"):
        assert "nearest" not in message(line) and "expected one of c" in message(line)


def test_a_value_that_begins_with_dashes_is_told_its_spelling() -> None:
    for value, dashes in {"---": "--", "--": "--", "--debugg": "--", "--a=b": "--", "-e": "-"}.items():
        with pytest.raises(UserError) as caught:
            parse_args(Config(), ["--data.train-files", value])
        assert f"(write --data.train-files={value} for a value that begins with {dashes})" in str(caught.value)
        assert parse_args(Config(), [f"--data.train-files={value}", "b"]).data.train_files == (value, "b")
    assert "write" not in message("--debug --shedule")


def test_every_word_of_verls_evaluation_and_merging_is_named_with_its_hint() -> None:
    from eval import EvalScriptConfig
    from merge import MergeConfig

    evaluation = "data.path=x data.n_samples=4 data.output_path=o model.path=m rollout.response_length=5"
    merging = "merge --backend fsdp --hf_upload_path a/b --private --use_cpu_initialization --local_dir A"
    testing = "test --backend=fsdp --local_dir A --test_hf_dir B"
    for config, line, hints in (
        (EvalScriptConfig(), evaluation, "5 data.files rollout.n output model.path rollout.max-response-len"),
        (MergeConfig(), merging, "4 merge:.leave --backend:.not --upload --use_cpu_initialization:.not"),
        (MergeConfig(), testing, "2 test:.use.--test-hf-dir --backend:.not"),
    ):
        with pytest.raises(UserError) as caught:
            parse_args(config, line.split())
        assert re.match(".*".join(hints.split()), str(caught.value)), caught.value
        assert "nearest" not in str(caught.value)


def test_a_tyro_without_its_private_names_still_parses_and_refuses(monkeypatch, capsys):
    import tyro

    monkeypatch.delattr(tyro._errors, "on_parse_error")
    assert parse_args(Config(), ["--num-steps", "3", "--data.train-files", "a"]).num_steps == 3
    with pytest.raises(SystemExit) as ended:
        parse_args(Config(), ["--num-steps", "three", "--data.train-files", "a"])
    assert ended.value.code == 2 and "--num-steps" in "".join(capsys.readouterr())
