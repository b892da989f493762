"""Every recipe holds together: its config passes all checks as it stands, and its tiny variant trains."""

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pyarrow.parquet as pq
import pytest
import torch
from transformers.utils import get_json_schema

from lib.algorithms.advantages import ADVANTAGES
from lib.algorithms.aggregation import LossAggMode
from lib.algorithms.correction import CORRECTIONS
from lib.algorithms.kl import KLType
from lib.algorithms.losses import LOSSES
from lib.config.flags import parse_args
from lib.data.parquet import write_rows
from lib.dist import World
from lib.errors import UserError
from lib.launch.checks import check_launch
from lib.tracking.run_folder import read_metrics
from recipes import plot_algorithms
from recipes.calculator import calculate
from recipes.prepare_gsm8k import to_row
from tests.ranks import LIMIT_S, ROOT, torchrun
from tests.tool_caller import make_caller

ALGORITHMS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "remax", "ppo")
FULL_SIZE = [f"{name}_qwen3_1_7b_gsm8k" for name in ALGORITHMS]
OF_TOOLS = ["tools_qwen3_1_7b_gsm8k"]
OF_ADAPTERS = ["lora_qwen3_4b_gsm8k", "lora_qwen3_8b_gsm8k"]
TINY = [*(f"{name}_tiny_arithmetic" for name in (*ALGORITHMS, "lora", "pissa")), "example_custom_everything"]
SMALL = [f"{name}_smollm2_words" for name in ("grpo", "dr_grpo", "dapo", "ppo", "permuted")]
GAMES = ["tools_tiny_calculator", "turns_tiny_guess", "turns_tiny_retry"]
RANKS = {
    **dict.fromkeys(FULL_SIZE + OF_TOOLS, 8), **dict.fromkeys(OF_ADAPTERS, 1), **dict.fromkeys(TINY, 2),
    **dict.fromkeys(SMALL, 1), **dict.fromkeys(GAMES, 2),
}  # fmt: skip
QUESTION = "What is 3 times 4?"
ACCURACY = "val-core/arithmetic/acc/mean@1"


def load(name):
    return importlib.import_module(f"recipes.{name}")


# ---- As it stands ----


def test_every_recipe_is_known_here():
    found = {path.stem for path in (ROOT / "recipes").glob("*.py") if "\nconfig = " in path.read_text()}
    assert found == set(RANKS)


@pytest.mark.parametrize("name", RANKS)
def test_a_recipe_passes_every_check_and_shows_its_help(name, capsys):
    config = load(name).config
    assert parse_args(config, []) == config
    check_launch(config, World(rank=0, size=RANKS[name], device=torch.device("cpu")))
    with pytest.raises(SystemExit) as end:
        parse_args(config, ["--help"])
    assert end.value.code == 0
    assert "--optim.lr" in capsys.readouterr().out


@pytest.mark.parametrize("name", RANKS)
def test_a_docstring_says_how_to_run_the_recipe(name):
    text = load(name).__doc__
    assert f"torchrun --nproc_per_node={RANKS[name]} -m recipes.{name}\n" in text
    assert "https://arxiv.org/abs/" in text or name.startswith("example")
    assert name not in FULL_SIZE + OF_TOOLS + OF_ADAPTERS or "no score is claimed" in " ".join(text.split())


def test_no_two_recipes_write_to_one_run_folder():
    assert len({load(name).config.run_dir for name in RANKS}) == len(RANKS)


def test_the_tiny_recipes_differ_in_their_algorithm_alone():
    configs = {name: load(name).config for name in TINY[:-1]}
    for part in ("model", "data", "reward", "max_tokens_per_gpu", "seed"):
        assert len({repr(getattr(config, part)) for config in configs.values()}) == 1, part
    assert len({repr(config.optim) for config in configs.values() if not config.lora.rank}) == 1
    # Adapters want ten times the learning rate.
    [lr] = {config.optim.lr for config in configs.values() if config.lora.rank}
    assert lr == pytest.approx(10 * configs["grpo_tiny_arithmetic"].optim.lr)
    assert {config.prompts_per_step * config.rollout.n for config in configs.values()} == {256}


def test_the_recipes_of_a_real_model_differ_in_their_algorithm_alone():
    configs = [load(name).config for name in SMALL]
    for part in ("model", "data", "reward", "optim", "eval", "num_steps", "max_tokens_per_gpu", "seed"):
        assert len({repr(getattr(config, part)) for config in configs}) == 1, part
    assert {config.prompts_per_step * config.rollout.n for config in configs} == {512}


def test_the_full_size_recipes_stop_at_the_missing_model_alone(tmp_path):
    row = {"question": "How many?", "answer": "One and one. #### 2"}
    for split in ("train", "test"):
        write_rows(tmp_path / f"{split}.parquet", [to_row(row | {"question": split}, split=split, index=0)])
    words = [
        *("--model.path", str(tmp_path / "nothing"), "--data.train-files", str(tmp_path / "train.parquet")),
        *("--data.val-files", str(tmp_path / "test.parquet"), "--run-dir", str(tmp_path / "run")),
    ]
    names = FULL_SIZE + OF_TOOLS + OF_ADAPTERS
    cases = {name: {"words": words, "env": {}, "recipe": f"recipes.{name}"} for name in names}
    done = subprocess.run(
        [sys.executable, "-m", "tests.bad_input_worker"], input=json.dumps(cases), cwd=ROOT, capture_output=True,
        text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for name, result in json.loads(done.stdout).items():
        assert result["code"] == 2, (name, result["stderr"])
        assert f"no such model folder; --model.path {tmp_path / 'nothing'}" in result["stderr"], name


# ---- The page about them ----


def test_the_page_has_every_name_that_the_command_line_takes():
    text = (ROOT / "docs/algorithms.md").read_text()
    names = [*ADVANTAGES, *LOSSES, *CORRECTIONS, *get_args(LossAggMode), *get_args(KLType)]
    assert [name for name in names if f"`{name}`" not in text] == []


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_page_says_what_the_full_size_recipe_does(name):
    lines = (ROOT / "docs/algorithms.md").read_text().splitlines()
    row = next(line for line in lines if line.startswith(f"| {name} |"))
    _, advantage, loss, agg_mode, kl, updates, _ = (cell.strip() for cell in row.strip("|").split("|"))
    config = load(f"{name}_qwen3_1_7b_gsm8k").config
    assert type(config.advantage) is ADVANTAGES[advantage]
    assert type(config.loss) is LOSSES[loss.split(",")[0]]
    assert config.agg_mode == agg_mode
    assert config.needs_reference == (kl != "none")
    assert config.prompts_per_step * config.rollout.n == int(updates) * config.mini_batch_size


# ---- Trained ----


@pytest.fixture(scope="module")
def tiny_task(tmp_path_factory):
    """The options that lead a tiny recipe to the quickstart's data and model."""
    folder = tmp_path_factory.mktemp("arithmetic")
    data, model = str(folder / "data"), str(folder / "model")
    for words in (("prepare_arithmetic", "--out", data), ("make_tiny_model", "--data", data, "--out", model)):
        subprocess.run([sys.executable, "-m", f"recipes.{words[0]}", *words[1:]], cwd=ROOT, check=True, timeout=LIMIT_S)
    files = {"train": f"{data}/train.parquet", "val": f"{data}/val.parquet"}
    return ["--model.path", model, *(word for split in files for word in (f"--data.{split}-files", files[split]))]


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_a_tiny_recipe_trains_two_steps(name, tiny_task, tmp_path):
    short = ("--num-steps", "2", "--data.val-max-samples", "20", "--run-dir", str(tmp_path / "run"))
    learns_at_once = ("--critic.warmup-steps", "0") if name.startswith("ppo") else ()
    done = torchrun(2, "-m", f"recipes.{name}", *tiny_task, *short, *learns_at_once)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    before, *steps = read_metrics(tmp_path / "run")
    assert [row["step"] for row in steps] == [1, 2] and ACCURACY in before and ACCURACY in steps[-1]
    for row in steps:
        assert 0 < row["actor/grad_norm"] < math.inf
        # GSPO clips whole responses: of a small mini-batch sometimes all, on some processors, and nothing is to learn.
        assert row["actor/skipped_updates"] <= (name == "gspo_tiny_arithmetic")
        assert row["training/rollout_log_probs_diff/max"] < 1e-3


@pytest.mark.slow
def test_the_recipe_with_a_tool_trains_two_steps_on_what_the_tool_said(tmp_path):
    rows = [to_row({"question": QUESTION, "answer": "#### 12"}, split="train", index=index) for index in range(8)]
    write_rows(tmp_path / "rows.parquet", rows)
    question = rows[0]["prompt"][0]["content"]
    config = load(OF_TOOLS[0]).config
    model = make_caller(
        tmp_path / "model", question, get_json_schema(calculate), {"expression": "3*4"}, "#### 12",
        template=config.data.chat_template_kwargs,
    )  # fmt: skip
    words = [
        *("--model.path", str(model), "--data.train-files", str(tmp_path / "rows.parquet"), "--num-steps", "2"),
        *("--data.val-files", str(tmp_path / "rows.parquet"), "--prompts-per-step", "4", "--mini-batch-size", "32"),
        *("--rollout.max-response-len", "256", "--rollout.gpu-memory-utilization", "0.1", "--tracking.rollouts-every"),
        *("1", "--rollout.max-num-batched-tokens", "4096", "--run-dir", str(tmp_path / "run")),
    ]
    done = torchrun(1, "-m", f"recipes.{OF_TOOLS[0]}", *words)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    before, *steps = read_metrics(tmp_path / "run")
    assert [row["step"] for row in steps] == [1, 2] and "val-core/openai/gsm8k/reward/mean@1" in before
    for row in steps:
        assert row["turns/calls_per_episode"] > 0.25 and row["training/rollout_log_probs_diff/max"] < 1e-3
    episodes = [
        json.loads(turns)
        for row in pq.read_table(tmp_path / "run" / "rollouts" / "step_1.parquet").to_pylist()
        for turns in row["turns"]
    ]
    several = [turns for turns in episodes if len(turns) > 1]
    told = [(turns[0]["calls"], turns[1]) for turns in several if "error" not in turns[1]["content"]]
    assert len(episodes) == 32 and told
    for calls, observed in told:
        texts = [calculate(**call["arguments"]) for call in calls]
        assert observed["role"] == "tool" and observed["name"] == "calculate" and observed["content"] == texts[0]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "calls calculate(" in page and "observed, tool calculate" in page and "turns/calls_per_episode" in page


# ---- The picture ----


def write_run(folder: Path, values: list[float], metric: str = ACCURACY) -> str:
    folder.mkdir()
    lines = [json.dumps({"step": 5 * place, metric: value}) + "\n" for place, value in enumerate(values)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return str(folder)


def test_the_picture_shows_every_run(tmp_path, capsys):
    runs = tuple(write_run(tmp_path / name, [0.4, 0.5, 1.0]) for name in ("grpo_tiny", "dapo_tiny"))
    plot_algorithms.main(plot_algorithms.PlotConfig(runs=runs, out=str(tmp_path / "deep" / "all.png")))
    assert (tmp_path / "deep" / "all.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "grpo_tiny: 0.400 0.500 1.000" in out and "dapo_tiny: 0.400 0.500 1.000" in out


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: (), "expected at least 1"),
        (lambda folder: (str(folder / "nothing"),), "found no validation"),
        (lambda folder: (write_run(folder / "run", [0.1], "val-core/math/acc/mean@1"),), "val-core/math/acc/mean@1"),
    ],
)
def test_a_run_without_the_metric_is_refused(tmp_path, make, words):
    with pytest.raises(UserError, match=words):
        plot_algorithms.main(plot_algorithms.PlotConfig(runs=make(tmp_path), out=str(tmp_path / "all.png")))
