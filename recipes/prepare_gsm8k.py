"""Write GSM8K (Cobbe et al. 2021, https://arxiv.org/abs/2110.14168) as train.parquet and test.parquet.

    python -m recipes.prepare_gsm8k                                        # downloads openai/gsm8k from the hub
    python -m recipes.prepare_gsm8k --local-dir DIR --out data/gsm8k       # from the original JSONL files

7,473 and 1,319 rows, each with the prompt and the ground truth that verl's own script makes, so results compare.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from lib.config import parse_cli, reporting_errors, resolve_path
from lib.data import write_rows
from lib.data.paths import resolve_file
from lib.errors import UserError

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
REPOSITORY = "openai/gsm8k"
NUM_ROWS = {"train": 7473, "test": 1319}
LOCAL_NAMES = ("{split}.jsonl", "gsm8k_{split}.jsonl", "main/{split}-00000-of-00001.parquet")


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Where GSM8K comes from and where it goes."""

    local_dir: str | None = None
    """Folder with train.jsonl and test.jsonl (or gsm8k_train.jsonl ...); None: download from the hub."""
    out: str = "data/gsm8k"
    """Folder for train.parquet and test.parquet."""


def to_row(problem: dict, *, split: str, index: int) -> dict:
    """One row in verl's schema. Raises ValueError when the problem has no question or no answer after `#### `."""
    question, answer = problem.get("question"), problem.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str) or not question:
        raise ValueError("found no text under 'question' and 'answer'")
    final = re.search(r"#### (-?[0-9.,]+)", answer)
    if final is None:
        raise ValueError(f"found no number after '#### ' in the answer {answer[-60:]!r}")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final.group(1).replace(",", "")},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def find_source(local_dir: str | None, split: str) -> Path:
    """The file with a split's problems, in the local folder or downloaded. Raises UserError."""
    name = f"main/{split}-00000-of-00001.parquet"
    if local_dir is None:
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(REPOSITORY, name, repo_type="dataset"))
        except Exception as error:  # no network, no such host, a proxy's page: many classes
            raise UserError(
                f"GSM8K cannot be downloaded; {REPOSITORY} {name}; {str(error).splitlines()[0][:200]}; give the "
                "original files with --local-dir"
            ) from error
    folder = resolve_path(local_dir, "--local-dir")
    candidates = [folder / pattern.format(split=split) for pattern in LOCAL_NAMES]
    found = next((path for path in candidates if path.exists()), candidates[0])
    return resolve_file(str(found), "--local-dir")


def read_problems(path: Path) -> list[tuple[str, dict]]:
    """(place, {question, answer}) of each problem of a JSONL or parquet file. Raises UserError."""
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            problems = pq.read_table(path).to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"not a parquet file; {path}; {error}; download it again") from error
        return [(f"row {row}", problem) for row, problem in enumerate(problems)]
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: U+2028 may stand inside a JSON string
    except UnicodeDecodeError as error:
        raise UserError(f"text that is not UTF-8; {path}; {error}; download it again") from error
    problems = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            problem = json.loads(line)
        except ValueError as error:
            raise UserError(f"not JSON lines; {path} line {number}; {error}; download the file again") from error
        if not isinstance(problem, dict):
            raise UserError(
                f"not a problem; {path} line {number}; found {type(problem).__name__}, expected an object with "
                "question and answer; download the file again"
            )
        problems.append((f"line {number}", problem))
    return problems


def prepare(cfg: PrepareConfig) -> None:
    """Writes both files; neither when one of the sources is bad."""
    rows: dict[str, list[dict]] = {}
    folder = resolve_path(cfg.out, "--out")
    for split in NUM_ROWS:
        path = find_source(cfg.local_dir, split)
        rows[split] = []
        for place, problem in read_problems(path):
            try:
                rows[split].append(to_row(problem, split=split, index=len(rows[split])))
            except ValueError as error:
                raise UserError(
                    f"not a GSM8K problem; {path} {place}; {error}, expected e.g. '... #### 72'; mend or drop it"
                ) from error
        if not rows[split]:
            raise UserError(f"no problems; {path}; found 0, expected {NUM_ROWS[split]}; download the file again")
    for split, split_rows in rows.items():
        path = folder / f"{split}.parquet"
        write_rows(path, split_rows)
        note = "" if len(split_rows) == NUM_ROWS[split] else f" (the original has {NUM_ROWS[split]})"
        print(f"{path}: {len(split_rows)} rows{note}")


def main(cfg: PrepareConfig) -> None:
    with reporting_errors():
        prepare(cfg)


if __name__ == "__main__":
    main(parse_cli(PrepareConfig()))
