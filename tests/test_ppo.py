"""train_ppo.py with real engines, once under torchrun: a critic's warm-up, what is compared in it, and wrong input."""

from functools import partial

import pytest

from lib.tracking.run_folder import read_metrics
from tests.prefork import prefork
from tests.ranks import torchrun
from tests.tiny import make_model, make_questions, make_tokenizer

FORKED = partial(prefork, vllm=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, its tokenizer and training questions."""
    folder = tmp_path_factory.mktemp("ppo")
    make_model(folder / "model")
    make_tokenizer(folder / "model")
    make_questions(folder / "train.parquet", count=40, start=0)
    return folder


def ppo(folder, run, *more, launch=FORKED):
    """A finished run of 3 steps on 2 ranks, in the first of which only the critic learns."""
    return launch(
        2, "train_ppo.py", "--model.path", str(folder / "model"), "--data.train-files", str(folder / "train.parquet"),
        "--data.max-prompt-len", "24", "--rollout.max-response-len", "12", "--rollout.n", "2", "--prompts-per-step",
        "8", "--mini-batch-size", "16", "--max-tokens-per-gpu", "80", "--num-steps", "3", "--optim.lr", "1e-3",
        "--critic.optim.lr", "1e-2", "--critic.warmup-steps", "1", "--critic.update-epochs", "2", "--reward.path",
        "recipes/hash_reward.py", "--reward.num-workers", "1", "--run-dir", str(folder / run), *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def steps(folder):
    """The metrics of each step."""
    done = ppo(folder, "run", launch=torchrun)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "critic explains" in done.stdout
    return [row for row in read_metrics(folder / "run") if row["step"] > 0]


def test_only_the_critic_learns_in_its_warm_up(steps):
    assert ["actor/grad_norm" in row for row in steps] == [False, True, True]
    assert all(row["critic/grad_norm"] > 0 and row["critic/skipped_updates"] == 0 for row in steps)
    assert [row["actor/lr"] for row in steps] == [1e-3] * 3 and [row["critic/lr"] for row in steps] == [1e-2] * 3
    assert steps[0]["critic/values/max"] == 0 != steps[1]["critic/values/max"]  # its head starts at zero
    assert steps[2]["critic/vf_loss"] < steps[0]["critic/vf_loss"]


def test_engine_and_trainer_are_compared_in_every_step_also_while_the_policy_rests(steps):
    for row in steps:
        assert row["training/rollout_probs_diff_valid"] == 1
        assert 0 < row["training/rollout_log_probs_diff/max"] < 1e-4


def test_with_bypass_a_pass_compares_engine_and_trainer_only_while_the_policy_rests(folder, steps):
    begin = ("--model.path", str(folder / "run"), "--model.reference-path", str(folder / "model"))
    words = ("--correction", "bypass_ppo_clip", "--num-steps", "2", "--update-epochs", "2", "--kl-loss-coef", "0.01")
    done = ppo(folder, "bypass", *words, *begin)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert f"model        the weights of {folder}/run/global_step_3 (" in done.stdout
    assert f"0.01 x k3 in the loss; the reference is {folder}/model\n" in done.stdout
    rows = [row for row in read_metrics(folder / "bypass") if row["step"] > 0]
    assert ["timing_s/old_log_prob" in row for row in rows] == [True, False]
    assert rows[1]["actor/kl_loss"] > 1e-4  # the policy has learned in that run, its reference has not
    for row in rows:
        assert row["training/rollout_probs_diff_valid"] == 1
        assert 0 < row["training/rollout_log_probs_diff/max"] < 1e-4


def test_in_a_branch_a_rejection_of_every_response_does_not_hide_the_comparison(folder, steps):
    """With another warm-up, so that the policy rests once more."""
    branch = ("--checkpoint.resume", str(folder / "run" / "global_step_3"), "--num-steps", "5")
    words = ("--correction.reject", '{"seq_max_k2": 1e-300}', "--critic.warmup-steps", "4", "--rollout.n", "4")
    done = ppo(folder, "rejected", *branch, *words, "--mini-batch-size", "32")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "global_step_3, with 4 other option(s):\n" in done.stdout
    assert "\n  critic.warmup_steps was 1 and is 4\n" in done.stdout and "\n  rollout.n was 2 and is 4\n" in done.stdout
    assert "step 4 of 5 is next" in done.stdout and "prompt 24 of epoch 0" in done.stdout
    rows = read_metrics(folder / "rejected")
    assert [row["step"] for row in rows] == [4, 5] and rows[0]["critic/values/max"] != 0
    assert ["actor/grad_norm" in row for row in rows] == [False, True]
    assert all(row["training/excluded_ratio"] > 0.9 for row in rows)
    assert all(row["training/rollout_probs_diff_valid"] == 1 for row in rows)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--critic.warmup-steps", "3"), "--critic.warmup-steps 3 leaves the policy no step to learn"),
        (("--critic.model.path", "/nowhere/at/all"), "--critic.model.path"),
        (("--critic.max-tokens-per-gpu", "35"), "--critic.max-tokens-per-gpu 35 is smaller than one sequence"),
        (("--advantage", "grpo"), "--advantage GroupAdvantage reads no values"),
    ],
)
def test_wrong_input_ends_both_ranks_with_one_line(folder, words, said):
    done = ppo(folder, "wrong", *words, launch=prefork)
    assert done.returncode != 0 and not (folder / "wrong").exists()
    lines = [line for line in done.stderr.splitlines() if line.startswith("error[")]
    assert len(lines) == 1 and lines[0].startswith("error[2] ") and said in lines[0], done.stderr[-2000:]
