"""The whole command with real engines, workers and files: a recipe elsewhere, under torchrun and as plain python."""

import json
import math
import os
import re
import string
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from lib.pages.samples import read_rows
from lib.tracking.run_folder import read_metrics
from tests.ranks import LIMIT_S, ROOT, torchrun
from tests.tiny import make_model, make_questions, make_tokenizer

NUM_STEPS = 3


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a model, its tokenizer, training and validation questions, and a reward for random weights."""
    folder = tmp_path_factory.mktemp("end_to_end")
    make_model(folder / "model")
    make_tokenizer(folder / "model")
    make_questions(folder / "train.parquet", count=40, start=0)
    make_questions(folder / "val.parquet", count=7, start=100)
    (folder / "broken.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if extra_info['split'] == 'train' and solution_str not in ('', 'The answer is 0.'):\n"
        "        raise KeyError('no such column')\n"
        "    return 0.0\n"
    )
    (folder / "second_validation.py").write_text(
        "seen = []\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    seen.extend([1] if extra_info['split'] == 'val' else [])\n"
        "    if len(seen) > 35:\n"
        "        raise KeyError('no such column')\n"
        "    of_text = {f'{i} \\x1b[2J\\ud800\\n {solution_str}': 1.0 for i in range(9)}\n"
        "    return {'score': float(len(solution_str)), **of_text}\n"
    )
    return folder


def options(folder, run, *more, script="train_grpo.py"):
    return (
        str(script), "--model.path", str(folder / "model"), "--data.train-files", str(folder / "train.parquet"),
        "--data.val-files", str(folder / "val.parquet"), "--data.max-prompt-len", "24", "--rollout.max-response-len",
        "12", "--rollout.n", "4", "--rollout.max-num-seqs", "32", "--prompts-per-step", "4", "--mini-batch-size", "8",
        "--max-tokens-per-gpu", "80", "--num-steps", str(NUM_STEPS), "--eval.every", "2", "--optim.lr", "1e-3",
        "--kl-loss-coef", "0.01", "--entropy-coef", "0.001", "--reward.path", str(ROOT / "recipes/hash_reward.py"),
        "--reward.num-workers", "1", "--tracking.rollouts-every", "2", "--run-dir", str(folder / run), *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def recipe(files):
    """A recipe in a folder of its own."""
    path = files / "elsewhere" / "my_recipe.py"
    path.parent.mkdir()
    path.write_text(
        "from lib.config.flags import parse_cli\n"
        "from train_grpo import GRPOConfig, main\n"
        "config = GRPOConfig(seed=7)\n"
        "if __name__ == '__main__':\n"
        "    main(parse_cli(config))\n"
    )
    return path


@pytest.fixture(scope="module")
def two_ranks(files, recipe):
    words = options(files, "two", script=recipe.name)
    return torchrun(2, *words, cwd=recipe.parent, PYTHONPATH=str(ROOT)), files / "two"


@pytest.fixture(scope="module")
def one_process(files, recipe):
    command, env = [sys.executable, *options(files, "one", script=recipe)], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=files, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    return done, files / "one"


def test_a_recipe_in_any_folder_runs_by_the_readmes_command(recipe, two_ranks, one_process):
    command = "`PYTHONPATH=/path/to/lockstep torchrun --nproc_per_node=8 my_recipe.py`"
    assert command in (ROOT / "README.md").read_text() and recipe.name in command
    for done, run in (two_ranks, one_process):
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
        assert json.loads((run / "config.json").read_text())["seed"] == 7


def test_run_folder_holds_everything_that_the_readme_names(two_ranks):
    done, run = two_ranks
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    names = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert {"config.json", "metrics.jsonl", "learning_curve.png", "status.json", "logs/rank_0.log", "logs/rank_1.log",
            "samples/step_0.jsonl", "samples/step_2.jsonl", "samples/step_3.jsonl", "report.html"} <= names  # fmt: skip
    assert {f"tokens/step_{step}.jsonl" for step in range(4)} == {name for name in names if name.startswith("tokens/")}
    assert {name for name in names if "rollouts" in name} == {"rollouts/step_1.parquet", "rollouts/step_2.parquet"}
    assert any(name.startswith("tensorboard/") for name in names)
    status = json.loads((run / "status.json").read_text())
    named = ("state", "step", "resumable", "error")
    assert tuple(status[name] for name in named) == ("finished", NUM_STEPS, True, None)
    assert json.loads((run / "config.json").read_text())["rollout"]["n"] == 4
    rows = [json.loads(line) for line in (run / "samples/step_3.jsonl").read_text().splitlines()]
    assert len(rows) == 7 and all(row["score"] is not None and row["prompt"] for row in rows)


def test_the_few_responses_on_the_runs_page_have_the_numbers_of_their_tokens(two_ranks, one_process):
    page = (two_ranks[1] / "report.html").read_text()
    assert "data-log-probs=" in page and "data-advantages=" in page and "Options that are not the defaults" in page
    assert f"<td>--num-steps</td><td>{NUM_STEPS}</td><td>None</td>" in page and "--seed 7" not in page
    of_steps = [read_rows((two_ranks[1] / f"tokens/step_{step}.jsonl").read_bytes()) for step in range(3)]
    assert [row["uid"] for row in of_steps[0]] == [0, 1, 2, 3]
    assert all(row["kind"] == "validation" and len(row["log_probs"]) == row["num_tokens"] for row in of_steps[0])
    saved = pq.read_table(two_ranks[1] / "rollouts/step_1.parquet").to_pylist()
    for row in of_steps[1]:  # no validation follows the first step
        [group] = [group for group in saved if group["uid"] == row["uid"]]
        assert group["scores"][row["index"]] == row["score"] and row["num_tokens"] == len(row["texts"])
        assert group["responses"][row["index"]] == "".join(row["texts"]).replace("<|end|>", "").replace("<|pad|>", "")
        mean = sum(row["advantages"]) / row["num_tokens"]
        assert mean == pytest.approx(group["advantages"][row["index"]], abs=1e-3)
    scores = [score for group in saved[:2] for score in group["scores"]]
    assert {min(scores), max(scores)} <= {row["score"] for row in of_steps[1]}
    ours, theirs = (read_rows((run / "tokens/step_1.jsonl").read_bytes()) for _, run in (two_ranks, one_process))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["texts"] == other["texts"]
        assert mine["log_probs"] == pytest.approx(other["log_probs"], abs=1e-3)
        assert mine["advantages"] == pytest.approx(other["advantages"], abs=1e-3)


def test_every_step_trains_on_rollouts_of_the_current_policy(two_ranks):
    rows = read_metrics(two_ranks[1])
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert {"val-core/test/reward/mean@1"} <= set(rows[0]) & set(rows[2]) & set(rows[3])
    for row in rows[1:]:
        assert row["training/rollout_log_probs_diff/max"] < 1e-4
        assert row["actor/grad_norm"] > 0 and math.isfinite(row["actor/loss"])
        assert row["reward/constant_group_ratio"] < 1 and row["reward/num_excluded"] == 0
        assert row["actor/lr"] == 1e-3 and row["actor/skipped_updates"] == 0
    assert rows[1]["actor/kl_loss"] != rows[3]["actor/kl_loss"] > 0  # the policy has left the reference


def test_the_loss_is_the_policys_less_the_entropy_bonus_plus_the_kl(two_ranks, other_options):
    for row in [row for _, run in (two_ranks, other_options) for row in read_metrics(run)[1:]]:
        bonus, kl = 1e-3 * row["actor/entropy_loss"], 0.01 * row["actor/kl_loss"]
        assert row["actor/loss"] == pytest.approx(row["actor/pg_loss"] - bonus + kl, abs=1e-6)
        assert bonus > 1e-5 and abs(kl) > 1e-5  # or a wrong sign would not show


def test_the_loss_terms_follow_the_options_of_aggregation_and_kl(two_ranks, other_options):
    """From the means over tokens. In step 1 the policy before the update is the reference: -ppo_kl is the mean k1."""
    row = read_metrics(other_options[1])[1]
    share = row["response_length/mean"] / 7  # a response's tokens over --loss-scale-factor
    assert row["actor/entropy_loss"] == pytest.approx(share * row["actor/entropy"], rel=1e-5)
    assert row["actor/kl_loss"] == pytest.approx(-share * row["actor/ppo_kl"], rel=1e-3)
    row = read_metrics(two_ranks[1])[1]
    assert row["actor/entropy_loss"] == pytest.approx(row["actor/entropy"], rel=0.01)  # means of unequal mini-batches
    assert row["actor/kl_loss"] > 0 > -row["actor/ppo_kl"]  # of k3, which is never negative


def test_the_terminal_shows_the_run_and_not_the_libraries(two_ranks):
    done, run = two_ranks
    lines = done.stdout.splitlines()
    header = next(line for line in lines if line.split()[:2] == ["step", "reward"])
    row = next(line for line in lines if line.split()[:1] == ["3/3"])
    assert len(row.split()) == len(header.split()) and row.split()[-1] == "0s"
    samples = lines[lines.index("samples of validation at step 3") + 1 :]
    assert samples[0].startswith("  test | ") and samples[1].startswith("    -> ") and "<|" not in samples[0]
    assert any("launch -> first step" in line for line in lines)
    assert any("all 18 tensors are equal bit for bit" in line for line in lines)
    assert any("engine and trainer compute the same: " in line for line in lines)
    for noise in ("INFO", "WARNING", "Warning", "Traceback", "nanobind"):
        assert noise not in done.stdout + done.stderr, done.stdout + done.stderr
    assert "INFO" in (run / "logs/rank_1.log").read_text()  # it went there


def test_one_process_and_two_ranks_are_the_same_run(two_ranks, one_process):
    done, run = one_process
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    one, two = read_metrics(run), read_metrics(two_ranks[1])
    first = ("critic/score/mean", "response_length/mean", "prompt_length/mean", "reward/constant_group_ratio")
    assert [one[1][name] for name in first] == [two[1][name] for name in first]  # the same responses, exactly
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "actor/kl_loss", "critic/advantages/max"):
        assert one[1][name] == pytest.approx(two[1][name], rel=1e-3, abs=1e-6), name
    same = [(run / "samples/step_0.jsonl").read_text() for run in (run, two_ranks[1])]
    assert same[0] == same[1]
    rollouts = [(run / "rollouts/step_1.parquet").read_bytes() for run in (run, two_ranks[1])]
    assert rollouts[0] == rollouts[1]


def test_rollouts_are_what_the_step_learned_from_and_are_scored_again_without_a_model(two_ranks, tmp_path):
    file, out = two_ranks[1] / "rollouts" / "step_2.parquet", tmp_path / "again.parquet"
    row = next(row for row in read_metrics(two_ranks[1]) if row["step"] == 2)
    rows = pq.read_table(file).to_pylist()
    assert len(rows) == 4 and len({row["uid"] for row in rows}) == 4 and {row["step"] for row in rows} == {2}
    scores = [score for row in rows for score in row["scores"]]
    lengths = [length for row in rows for length in row["response_lengths"]]
    assert sum(scores) / 16 == pytest.approx(row["critic/score/mean"]) and len(set(scores)) > 2
    assert sum(lengths) / 16 == row["response_length/mean"]
    assert row["timing_s/dump_rollout_generations"] > 0
    words = ("eval.py", "--score-only", "--data.files", str(file), "--output", str(out), "--reward.num-workers", "1")
    command = [sys.executable, *words, "--reward.path", "recipes/hash_reward.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    again = pq.read_table(out).to_pylist()
    for before, after in zip(rows, again, strict=True):
        assert after == before | {"predictions": after["predictions"]}


def test_a_disagreement_between_engine_and_trainer_stops_every_rank(files):
    done = torchrun(2, *options(files, "mismatch", "--rollout.max-log-probs-diff", "1e-12", "--eval.every", "0"))
    lines = [line for line in done.stderr.splitlines() if line.startswith("error[")]
    assert done.returncode == 1 and len(lines) == 1, done.stderr
    assert lines[0].startswith("error[1] engine and trainer disagree about the sampled tokens")
    assert done.stderr.count("exitcode  : 1") == 2 and "lib/config/reporting.py" not in done.stderr
    status = json.loads((files / "mismatch" / "status.json").read_text())
    assert status["state"] == "failed" and status["error"] == lines[0]


def test_reward_code_that_fails_in_training_stops_with_its_text(files):
    words = options(files, "broken", "--eval.before-train", "False", "--reward.path", str(files / "broken.py"))
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 4, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error[4]")]
    assert len(lines) == 1 and "KeyError" in lines[0] and "no such column" in lines[0]
    assert json.loads((files / "broken" / "status.json").read_text())["state"] == "failed"


@pytest.fixture(scope="module")
def other_options(files):
    """Options that the other runs leave alone, and a reward that fails from the second validation on."""
    words = options(
        files, "other", "--rollout.stop", *string.ascii_lowercase, "--rollout.log-probs", "False", "--update-epochs",
        "2", "--model.gradient-checkpointing", "True", "--eval.n", "4", "--eval.temperature", "1.0",
        "--eval.with-greedy",
        "--loss-agg-mode", "seq-mean-token-sum-norm", "--loss-scale-factor", "7", "--kl-loss-type", "k1",
        "--reward.path", str(files / "second_validation.py"),
    )  # fmt: skip
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S), files / "other"


def test_a_stop_string_ends_a_response(other_options):
    done, run = other_options
    rows = [json.loads(line) for line in (run / "samples/step_0.jsonl").read_text().splitlines()]
    assert len(rows) == 35, done.stdout + done.stderr[-3000:]
    ended = 0
    for row in rows:
        text = row["response"].removesuffix("<|end|>").replace("<|pad|>", "")
        assert not set(text[:-1]) & set(string.ascii_lowercase), row
        by_string, by_id = text[-1:].islower() and text[-1:].isascii(), row["response"].endswith("<|end|>")
        assert row["finish_reason"] == ("stop" if by_string or by_id else "length"), row
        ended += by_string
    assert ended > 5


def test_a_validation_that_samples_has_greedy_responses_too_where_asked(other_options):
    done, run = other_options
    rows = [json.loads(line) for line in (run / "samples/step_0.jsonl").read_text().splitlines()]
    sampled, greedy = ([row["score"] for row in rows if row["temperature"] == t] for t in (1.0, 0.0))
    assert (len(sampled), len(greedy)) == (28, 7)
    first = read_metrics(run)[0]
    assert first["val-core/test/reward/mean@4"] == pytest.approx(sum(sampled) / 28)
    assert (
        first["val-core/test/reward/greedy"] == pytest.approx(sum(greedy) / 7) != first["val-core/test/reward/mean@4"]
    )
    assert first["val-aux/num_unscored"] == 0 and "reward/greedy" in done.stdout


def test_names_made_of_responses_are_limited_told_once_and_nothing_a_terminal_obeys(other_options):
    done, run = other_options
    first = read_metrics(run)[0]
    kinds = r"(?:mean@4|std@4|greedy|(?:best|worst|maj)@\d/(?:mean|std))"
    names = {re.fullmatch(rf"val-\w+/test/(.*)/{kinds}", name) for name in first} - {None}
    of_rewards = {name[1] for name in names} - {"repetition", "garbled"}
    assert len(of_rewards) == 100 and first["val-aux/num_variables_left_out"] > 28
    assert done.stdout.count("numbers of more than 100 names") == 1
    assert all(sign.isprintable() or sign == "\n" for sign in done.stdout + done.stderr)


def test_several_updates_train_on_their_own_old_log_probs_without_the_engines(other_options):
    done, run = other_options
    assert "2 mini-batch(es) of 8 responses x 2 epoch(s) = 4 optimizer step(s)" in done.stdout, done.stderr[-3000:]
    first, step = read_metrics(run)  # the second step ends before it is logged
    assert (first["step"], step["step"]) == (0, 1) and step["timing_s/old_log_prob"] > 0
    assert not [name for name in step if name.startswith("training/rollout_")]
    assert step["actor/grad_norm"] > 0 and step["actor/skipped_updates"] == 0
    assert step["actor/ppo_kl"] != 0 and abs(step["actor/ppo_kl"]) < 1  # ratios leave 1 as the updates go on


def test_reward_code_that_fails_in_validation_stops_with_its_text(other_options):
    done, run = other_options
    assert done.returncode == 4, done.stdout + done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error[4]")]
    assert "28 of the step's 28 responses" in line and "no such column" in line
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["step"], status["error"]) == ("failed", 1, line)
    assert not (run / "samples/step_2.jsonl").exists()
