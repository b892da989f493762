"""The quickstart's task and tiny model: nothing leaks from validation, and a seed fixes every byte."""

import hashlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib.data.prompts import DataConfig, check_data_files, tokenize
from lib.data.reading import read_rows
from lib.data.tokenizer import load_tokenizer, stop_token_ids
from lib.rewards.arithmetic import compute_score, needs_carry, sum_without_carry
from lib.storage.model_folder import check_model_files
from recipes.make_tiny_model import TinyModelConfig, warm_up_pairs
from recipes.make_tiny_model import main as make_tiny_model
from recipes.prepare_arithmetic import ArithmeticConfig
from recipes.prepare_arithmetic import main as prepare_arithmetic


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arithmetic")
    prepare_arithmetic(ArithmeticConfig(out=str(folder), seed=3))
    return folder


def pairs_of(path: Path) -> set[frozenset]:
    rows, _ = read_rows((str(path),), "--data.train-files")
    return {frozenset((row["extra_info"]["a"], row["extra_info"]["b"])) for row in rows}


def test_no_validation_problem_occurs_in_training_or_warm_up(data):
    train, val = pairs_of(data / "train.parquet"), pairs_of(data / "val.parquet")
    warm_up = {frozenset(pair) for pair in warm_up_pairs(str(data))}
    assert len(val) >= 300 and len(train) >= 900 and len(warm_up) > 2000
    assert not val & train and not val & warm_up and not train & warm_up


def test_answers_are_sums_and_three_in_five_need_a_carry(data):
    rows, _ = read_rows((str(data / "val.parquet"),), "--data.val-files")
    rows = list(rows)
    for row in rows:
        a, b = row["extra_info"]["a"], row["extra_info"]["b"]
        assert row["reward_model"]["ground_truth"] == str(a + b)
        assert row["prompt"][0]["content"] == f"{a}+{b}="
    assert sum(needs_carry(r["extra_info"]["a"], r["extra_info"]["b"]) for r in rows) == 0.6 * len(rows)
    assert (sum_without_carry(27, 48), sum_without_carry(12, 34), sum_without_carry(99, 99)) == (65, 46, 188)


@pytest.mark.parametrize(
    ("response", "score", "pred"),
    [
        ("units 15,75", 1, "75"),
        ("75", 1, "75"),
        ("15,65", 0, "65"),
        ("75,", 0, ""),
        ("15,075", 1, "075"),
        ("15,75 ", 1, "75 "),
        ("", 0, ""),
        ("75,15", 0, "15"),
    ],
)
def test_the_answer_stands_after_the_last_comma(response, score, pred):
    assert compute_score("arithmetic", response, "75", {}) == {"score": score, "acc": score, "pred": pred}


@given(st.text())
def test_any_text_gets_a_score(text):
    assert compute_score("arithmetic", text, "75", {})["score"] in (0.0, 1.0)


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_a_seed_fixes_every_byte_and_the_folder_is_an_ordinary_one(data, tmp_path):
    folders = [tmp_path / name for name in ("first", "second", "other")]
    for folder, seed in zip(folders, (5, 5, 6), strict=True):
        make_tiny_model(TinyModelConfig(data=str(data), out=str(folder), seed=seed, num_steps=3, batch_size=8))
    first, second, other = map(digest, folders)
    assert first == second and first["model.safetensors"] != other["model.safetensors"]

    files = check_model_files(str(folders[0]), max_prompt_len=32, max_response_len=12, tensor_parallel_size=2)
    assert 1e6 <= files.num_parameters <= 4e6
    tokenizer = load_tokenizer(folders[0])
    assert stop_token_ids(tokenizer, folders[0]) == [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    ids = tokenizer.encode("units 15,75")
    assert len(ids) == 7 and tokenizer.decode(ids) == "units 15,75"  # every digit a token
    cfg = DataConfig(train_files=(str(data / "train.parquet"),), max_prompt_len=32)
    prompts = tokenize(cfg, check_data_files(cfg), tokenizer, split="train")
    text = tokenizer.decode(prompts.sample(0, 0).prompt_ids)
    assert text.startswith("<|im_start|>user\n") and text.endswith("<|im_end|>\n<|im_start|>assistant\n")

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folders[0])
    assert torch.isfinite(model(torch.tensor([ids])).logits).all()
