"""Claims about arithmetic in words: the grader takes the last number, the problems are right and their split clean."""

from collections import Counter

import pyarrow.parquet as pq
import pytest
import torch

from lib.algorithms.advantages import GroupAdvantage
from lib.data.reading import read_rows
from lib.dist import SINGLE
from lib.errors import UserError
from lib.rewards.last_number import DIFFICULTIES, PREFIX, compute_score, write_answer
from lib.rewards.scoring import GRADERS
from recipes import permuted_smollm2_words
from recipes.prepare_arithmetic_words import SHARES, WordsConfig, main, make_rows, split_pairs
from tests.test_advantages import make_batch


@pytest.mark.parametrize(
    ("response", "truth", "pred"),
    [
        ("23 + 48 = 71", "71", "71"),
        ("71 is what you get when you add 23 and 48", "71", "48"),  # an echo is no answer
        ("The answer is 71.", "71", "71"),
        ("**71**", "71", "71"),
        ("\\boxed{71}", "71", "71"),
        ("It is 71.0.", "71", "71.0"),
        ("= 1,234 apples!", "1234", "1,234"),
        ("12,34", "34", "34"),  # a list, not a number
        ("0071", "71", "0071"),
        ("3 - 5 = -2", "-2", "-2"),
        ("9-2", "2", "2"),  # this minus belongs to no number
        ("7.1", "71", "7.1"),
        ("71\n\nThis is step 1 of 2", "71", "2"),
        ("seventy-one", "71", ""),
        ("", "0", ""),
    ],
)
def test_the_last_number_counts(response, truth, pred):
    result = compute_score("", response, truth, {})
    assert result["pred"] == pred
    right = response not in ("71 is what you get when you add 23 and 48", "7.1", "71\n\nThis is step 1 of 2")
    assert result["score"] == result["acc"] == float(right and pred != "")


@pytest.mark.parametrize("truth", ["71", 71, 71.0, "-7", "1,234"])
def test_what_the_grader_writes_is_right(truth):
    assert compute_score("", f"3 + 4 is {write_answer(truth)}.", truth, {})["score"] == 1.0
    assert compute_score("", "5" * 10_000, truth, {})["score"] == 0.0


def test_every_difficulty_has_its_grader():
    assert {GRADERS[f"{PREFIX}{difficulty}"] for difficulty in DIFFICULTIES} == {"lib.rewards.last_number"}


@pytest.mark.parametrize("seed", range(20))
def test_no_operands_are_in_both_files(seed):
    rows = make_rows(WordsConfig(seed=seed, num_train=1000))
    pairs = {
        split: {tuple(sorted((r["extra_info"]["a"], r["extra_info"]["b"]))) for r in rows[split]} for split in rows
    }
    assert not pairs["train"] & pairs["val"]
    texts = [row["prompt"][0]["content"] for row in rows["val"]]
    assert len(texts) == len(set(texts)) == 600


def test_every_pair_is_in_one_split():
    pairs = split_pairs(3)
    assert sorted(pairs["train"] + pairs["val"]) == [(a, b) for a in range(1, 100) for b in range(a, 100)]


def test_the_mixture_is_the_one_that_is_told():
    for split, rows in make_rows(WordsConfig(num_train=1000, num_val=200)).items():
        counts = Counter(row["extra_info"]["difficulty"] for row in rows)
        size = {"train": 1000, "val": 200}[split]
        assert {name: counts[name] / size for name in SHARES} == SHARES
        assert counts["products_2_digits"] == {"train": 0, "val": 40}[split]
        assert all(row["data_source"] == PREFIX + row["extra_info"]["difficulty"] for row in rows)


def test_the_ground_truth_follows_from_the_operands():
    compute = {"sum": int.__add__, "difference": int.__sub__, "product": int.__mul__}
    digits = {
        "sums_1_digit": 9,
        "products_1_digit": 9,
        "sums_2_digits": 99,
        "products_2_digits": 99,
        "word_problems": 20,
    }
    for row in [row for rows in make_rows(WordsConfig()).values() for row in rows]:
        extra, text = row["extra_info"], row["prompt"][0]["content"]
        a, b = extra["a"], extra["b"]
        assert str(a) in text and str(b) in text
        assert row["reward_model"]["ground_truth"] == str(compute[extra["operation"]](a, b))
        assert 0 < max(a, b) <= digits[extra["difficulty"]] and (extra["operation"] != "difference" or a >= b)


def test_equal_seeds_give_equal_files_which_the_trainer_reads(tmp_path):
    for name in ("one", "two"):
        main(WordsConfig(out=str(tmp_path / name), num_train=100, num_val=50))
    for split, count in (("train", 100), ("val", 60)):
        one, two = (pq.read_table(tmp_path / name / f"{split}.parquet") for name in ("one", "two"))
        assert one.equals(two)
        assert len(read_rows((str(tmp_path / "one" / f"{split}.parquet"),), "--data.train-files")[0]) == count


@pytest.mark.parametrize("words", [{"num_train": 15}, {"num_val": 0}, {"num_val": 510}])
def test_a_wrong_number_of_problems_is_refused(words):
    with pytest.raises(UserError, match="expected a multiple of 10"):
        WordsConfig(**words)


# ---- The control ----


def test_the_control_pays_other_responses_as_much_and_knows_neither_who_was_right_nor_who_was_short():
    """Short responses are right, long ones wrong: what GRPO pays follows both, what the control pays neither."""
    right = torch.arange(8000) % 4 > 0
    lens = torch.where(right, 5, 50)
    mask = torch.arange(50) < lens[:, None]
    step = make_batch(right.float(), torch.arange(8000) // 8, torch.ones(8000, dtype=torch.bool), mask)
    paid = permuted_smollm2_words.PermutedAdvantage()(step, SINGLE)[0][:, 0]
    real = GroupAdvantage()(step, SINGLE)[0][:, 0]
    assert float(torch.corrcoef(torch.stack([real, right.float()]))[0, 1]) > 0.99
    assert abs(float(torch.corrcoef(torch.stack([paid, right.float()]))[0, 1])) < 0.04  # 3.6 standard errors
    assert paid.unique().numel() > 4 and abs(float(paid.mean())) < 1e-3
    again = permuted_smollm2_words.PermutedAdvantage()(step, SINGLE)[0][:, 0]
    assert torch.equal(paid, again)
