"""Claims about GSM8K's files: the prompt and the ground truth are those of verl's own script."""

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lib.config.flags import parse_args
from lib.data.prompts import DataConfig, check_data_files
from lib.errors import UserError
from recipes import prepare_arithmetic
from recipes.prepare_gsm8k import PrepareConfig, prepare, read_problems, to_row

NATALIA = {
    "question": "Natalia sold clips to 48 of her friends. How many?",
    "answer": "She sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72",
}


def write_jsonl(path, problems):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(problem) + "\n" for problem in problems))


def local_files(folder, *, prefix=""):
    """Two small splits whose answers have a thousands separator, a sign and a fraction."""
    answers = ["#### 1,234", "x\n#### -7", "#### 2.50", "a #### 5\n#### 6"]
    train = [{"question": f"q{i}?", "answer": answer} for i, answer in enumerate(answers)]
    write_jsonl(folder / f"{prefix}train.jsonl", train)
    write_jsonl(folder / f"{prefix}test.jsonl", [NATALIA])
    return train


def refusal(call, *parts):
    with pytest.raises(UserError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in: {caught.value}"


def test_a_row_is_the_hand_written_one():
    assert to_row(NATALIA, split="train", index=3) == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": "Natalia sold clips to 48 of her friends. How many? "
                'Let\'s think step by step and output the final answer after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"split": "train", "index": 3, "answer": NATALIA["answer"], "question": NATALIA["question"]},
    }


@pytest.mark.parametrize("prefix", ["", "gsm8k_"])
def test_both_files_keep_rows_columns_and_order(tmp_path, prefix):
    train = local_files(tmp_path / "in", prefix=prefix)
    prepare(PrepareConfig(local_dir=str(tmp_path / "in"), out=str(tmp_path / "out")))
    table = pq.read_table(tmp_path / "out" / "train.parquet")
    assert table.column_names == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    rows = table.to_pylist()
    # The first #### counts, as in verl's regular expression.
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["1234", "-7", "2.50", "5"]
    assert [row["extra_info"]["question"] for row in rows] == [problem["question"] for problem in train]
    assert [row["extra_info"]["index"] for row in rows] == [0, 1, 2, 3]
    assert pq.read_table(tmp_path / "out" / "test.parquet").to_pylist() == [to_row(NATALIA, split="test", index=0)]
    assert sorted(os.listdir(tmp_path / "out")) == ["test.parquet", "train.parquet"]


def test_the_files_pass_the_training_checks(tmp_path):
    local_files(tmp_path)
    prepare(PrepareConfig(local_dir=str(tmp_path), out=str(tmp_path / "out")))
    names = [str(tmp_path / "out" / f"{split}.parquet") for split in ("train", "test")]
    files = check_data_files(DataConfig(train_files=(names[0],), val_files=(names[1],)))
    assert (len(files.train), len(files.val), files.warnings) == (4, 1, ())


def test_the_hub_s_parquet_files_give_the_same_rows(tmp_path):
    train = local_files(tmp_path / "in")
    for split, problems in (("train", train), ("test", [NATALIA])):
        path = tmp_path / "hub" / "main" / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(problems), path)
    for source in ("in", "hub"):
        prepare(PrepareConfig(local_dir=str(tmp_path / source), out=str(tmp_path / "out" / source)))
    assert pq.read_table(tmp_path / "out/in/train.parquet").equals(pq.read_table(tmp_path / "out/hub/train.parquet"))


def test_a_line_separator_inside_a_question_does_not_split_the_line(tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({"question": "a\u2028b"}, ensure_ascii=False) + "\n\n")
    assert read_problems(tmp_path / "x.jsonl") == [("line 1", {"question": "a\u2028b"})]


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ('{"question": "q", "answer": "no marker 5"}', ["line 3", "####"]),
        ('{"question": "q", "answer": "#### five"}', ["line 3", "####"]),
        ('{"question": "q"}', ["line 3", "answer"]),
        ('{"question": 3, "answer": "#### 5"}', ["line 3", "question"]),
        ('{"question": "q", ', ["line 3", "not JSON lines"]),
        ("[1, 2]", ["line 3", "list"]),
    ],
)
def test_a_bad_problem_names_its_line_and_writes_nothing(tmp_path, line, parts):
    write_jsonl(tmp_path / "train.jsonl", [NATALIA])
    (tmp_path / "test.jsonl").write_text(f"{json.dumps(NATALIA)}\n\n{line}\n")
    cfg = PrepareConfig(local_dir=str(tmp_path), out=str(tmp_path / "out"))
    refusal(lambda: prepare(cfg), str(tmp_path / "test.jsonl"), *parts)
    assert not (tmp_path / "out").exists()


def test_a_missing_or_empty_source_is_refused(tmp_path):
    cfg = PrepareConfig(local_dir=str(tmp_path / "no"), out=str(tmp_path / "out"))
    refusal(lambda: prepare(cfg), "no such file", "--local-dir")
    refusal(lambda: prepare(PrepareConfig(local_dir="~no-such-user/x")), "--local-dir cannot be opened")
    local_files(tmp_path)
    (tmp_path / "test.jsonl").write_text("\n")
    refusal(lambda: prepare(PrepareConfig(local_dir=str(tmp_path), out=str(tmp_path / "out"))), "no problems")


@pytest.mark.parametrize("out", ["file", "file/in", "/proc/xx", "~no-such-user/x", "x" * 300])
def test_an_output_that_cannot_be_written_is_refused_by_both_recipes(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    local_files(tmp_path)
    (tmp_path / "file").write_text("a file")
    arithmetic = prepare_arithmetic.ArithmeticConfig(out=out)
    problem = ("--out cannot be opened",) if out[0] in "~x" else ("cannot write the parquet file", "another folder")
    refusal(lambda: prepare(PrepareConfig(local_dir=str(tmp_path), out=out)), *problem, out)
    refusal(lambda: prepare_arithmetic.main(arithmetic), *problem, out)


def test_the_command_line_takes_both_folders():
    cfg = parse_args(PrepareConfig(), ["--local-dir", "x y", "--out", "z"])
    assert (cfg.local_dir, Path(cfg.out)) == ("x y", Path("z"))
