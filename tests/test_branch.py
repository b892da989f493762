"""A branch: a new run that begins with another one's checkpoint, its options changed. Steps without an engine."""

import json
import shutil

import pytest
import torch

from lib.dist import SINGLE, init_distributed
from lib.errors import UserError
from lib.launch.checks import check_input, check_networks
from lib.launch.resume import find_resume
from lib.tracking.run_folder import read_metrics, read_status
from tests import checkpoint_worker
from tests.checkpoint_worker import config, train
from tests.tiny import make_model, make_questions, make_tokenizer


@pytest.fixture(scope="module")
def parent(model, tmp_path_factory):
    """A run of 5 steps with checkpoints 4 and 5, and its weights after them. Not to be changed."""
    folder, world = tmp_path_factory.mktemp("runs") / "run", init_distributed()
    cfg = config(model, "--run-dir", folder, "--num-steps", 4)
    before = train(cfg, world)
    after = train(config(model, "--run-dir", folder, "--num-steps", 5), world)
    return folder, before, after


@pytest.fixture
def branch(model, parent, tmp_path, capfd):
    """A function that trains a branch of checkpoint 4 to step 5: what it found, and what it said."""

    def run(*words, num_steps=5):
        options = ("--run-dir", tmp_path / "branch", "--num-steps", num_steps)
        words = ("--checkpoint.resume", parent[0] / "global_step_4", *words)
        found = train(config(model, *options, *words), init_distributed())
        return found, capfd.readouterr().out

    return run


def trainer(run, step):
    return json.loads((run / f"global_step_{step}" / "trainer.json").read_text())


# ---- What goes on ----


def test_another_learning_rate_moves_the_weights_by_the_same_moments(branch, parent, tmp_path):
    _, before, after = parent
    found, said = branch("--optim.lr", 0.02, "--loss", "gspo", "--correction", "none")
    for name, start in before["weights"].items():  # AdamW's step is linear in the learning rate
        torch.testing.assert_close(found["weights"][name] - start, 2 * (after["weights"][name] - start))
    assert (found["uids"], found["losses"]) == ({5: after["uids"][5]}, {5: after["losses"][5]})
    assert found["state"] == after["state"]  # position, KL weight, left-over responses
    lines = said.splitlines()
    [place] = [place for place, line in enumerate(lines) if line.startswith("a branch of ")]
    assert lines[place].endswith("global_step_4, with 7 other option(s):")
    assert "  optim.lr was 0.01 and is 0.02" in lines
    assert any(line.startswith('  loss.name was "Clip') for line in lines)
    assert "learning rate 0.02" in said and "dropped" not in said
    assert [row["step"] for row in read_metrics(tmp_path / "branch")] == [5]
    assert trainer(tmp_path / "branch", 5)["best"] == {}


def test_other_responses_leave_the_old_ones_behind_and_go_on_with_the_next_prompts(branch, parent):
    _, before, after = parent
    new = set(after["uids"][5]) - {before["state"]["collector"]["carried"][0][0]["uid"]}
    found, said = branch("--rollout.n", 3, "--prompts-per-step", 2, "--mini-batch-size", 6)
    assert set(found["uids"][5]) == {min(new)}  # the second one is left over in turn
    assert "  rollout.n was 2 and is 3\n" in said and "  prompts_per_step was 4 and is 2\n" in said
    assert "2 responses that the run had left over are dropped: other options sampled them" in said


def test_other_answers_between_turns_leave_the_old_responses_behind(branch):
    _, said = branch("--turns.max-turns", 3, "--turns.num-workers", 2)
    assert "with 1 other option(s):\n  turns.max_turns was 8 and is 3\n" in said
    assert "2 responses that the run had left over are dropped: other options sampled them" in said


def test_other_data_begins_with_its_first_prompt(branch, monkeypatch):
    monkeypatch.setattr(checkpoint_worker, "NUM_PROMPTS", 11)
    found, said = branch()
    assert found["uids"] == {5: [0, 1, 2]} and found["state"]["prompts"]["place"] == 4
    assert "the prompts are others: the branch begins with the first of theirs, and 2 left-over responses" in said
    assert "step 5 of 5 is next, learning rate 0.01, prompt 0 of epoch 0" in said


def test_another_seed_is_another_stream(branch):
    found, said = branch("--seed", 1)
    assert found["uids"] == {5: [0, 1, 2]} and "  seed was 0 and is 1\n" in said
    assert said.count("dropped") == 1


def test_a_kl_weight_that_is_given_anew_is_taken(branch, parent):
    found, _ = branch("--kl-reward.coef", 2.0, "--kl-reward.target", "None")
    assert found["state"]["kl_controller"] == {"coef": 2.0}


# ---- The same command again ----


def test_the_same_branch_again_goes_on_and_another_one_is_refused_there(branch, parent, tmp_path):
    words, folder = ("--optim.lr", 0.02, "--checkpoint.every", 1), tmp_path / "branch"
    first, _ = branch(*words, num_steps=6)

    def as_killed(*steps):
        for step in steps:
            shutil.rmtree(folder / f"global_step_{step}")
        (folder / "status.json").write_text(json.dumps(read_status(folder) | {"state": "running"}))

    as_killed(6)
    again, said = branch(*words, num_steps=6)
    assert again["losses"] == {6: first["losses"][6]} and "a branch" not in said
    as_killed(6)
    with pytest.raises(UserError, match=r"the checkpoint's run had other options; .*global_step_5; optim.lr was 0.02"):
        branch(num_steps=6)
    as_killed(5)  # before its first checkpoint
    with pytest.raises(
        UserError, match=r"the run folder holds another run, .*; found state running.*optim.lr was 0.02"
    ):
        branch(num_steps=6)
    again, said = branch(*words, num_steps=6)
    assert again["losses"] == first["losses"] and "  optim.lr was 0.01 and is 0.02\n" in said
    assert [row["step"] for row in read_metrics(folder)] == [5, 6]


def test_in_its_own_folder_a_run_keeps_its_options_and_names_the_command_of_a_branch(model, parent):
    with pytest.raises(UserError) as caught:
        find_resume(config(model, "--run-dir", parent[0], "--num-steps", 9, "--optim.lr", 0.02), SINGLE)
    assert f"--checkpoint.resume {parent[0] / 'global_step_5'} and a new --run-dir" in str(caught.value)


# ---- Another model ----


def test_a_model_of_another_shape_is_refused_before_it_is_loaded_naming_model_path(parent, tmp_path):
    other = make_model(tmp_path / "other", tied=False)
    make_tokenizer(other)
    make_questions(tmp_path / "train.parquet", count=4, start=0)
    words = (
        "--run-dir", tmp_path / "new", "--checkpoint.resume", parent[0] / "global_step_5", "--data.train-files",
        tmp_path / "train.parquet", "--data.max-prompt-len", 16, "--rollout.max-response-len", 16,
    )  # fmt: skip
    with pytest.raises(UserError, match=r"the checkpoint is of another model; .*actor; found lm_head.weight missing "
                       r"there and \[200, 64\] in the model of --model.path; give the --model.path"):  # fmt: skip
        cfg = config(other, *words)
        check_networks(cfg, *check_input(cfg, SINGLE)[1:])
    with pytest.raises(UserError, match=r"the checkpoint is of another model; .*critic; found .* missing there"):
        find_resume(config(other, *words), SINGLE).check_model("critic", {"score.weight": (1, 64)})
