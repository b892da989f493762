"""What a run goes on from, and what it refuses, before a model is loaded. Runs of a few steps without an engine."""

import json
import os
import shutil

import pytest

from lib.config import to_json
from lib.dist import SINGLE, init_distributed
from lib.errors import DamagedCheckpoint, UserError
from lib.launch import check_input
from lib.resume import MAY_DIFFER, find_resume
from lib.run_folder import launch_id, lock_folder, read_metrics, read_status
from tests.checkpoint_worker import REWARD, config, train
from tests.tiny import make_model, make_questions, make_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = make_model(tmp_path_factory.mktemp("model") / "model")
    make_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def done(model, tmp_path_factory):
    """A run of 4 steps with checkpoints 2 and 4. Not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    cfg = config(model, "--run-dir", folder, "--num-steps", 4, "--checkpoint.every", 2)
    train(cfg, init_distributed())
    return folder


@pytest.fixture
def run(done, tmp_path):
    """A copy of it, killed in its last step."""
    shutil.copytree(done, tmp_path / "run")
    change_status(tmp_path / "run", state="running")
    return tmp_path / "run"


def change_status(folder, **values):
    (folder / "status.json").write_text(json.dumps(read_status(folder) | values))


def options(model, run, *words):
    return config(model, "--run-dir", run, "--num-steps", 6, *words)


def flip(path, place=-5):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


# ---- Which checkpoint ----


def test_auto_takes_the_newest_and_proves_it(model, run):
    resume = find_resume(options(model, run), SINGLE)
    assert (resume.path, resume.step, resume.last_row, resume.in_place) == (run / "global_step_4", 4, 4, True)


def test_auto_names_and_passes_over_what_is_damaged(model, run):
    flip(run / "global_step_4" / "actor" / "optim" / "shard-00001-of-00001.safetensors")
    (run / "global_step_9").mkdir()  # without the marker
    resume = find_resume(options(model, run), SINGLE)
    assert resume.step == 2
    first, second = resume.notes
    assert first.startswith("warning: global_step_9 is passed over") and "no MANIFEST.json" in first
    assert "global_step_4" in second and "optim/shard-00001-of-00001.safetensors" in second


def test_a_damaged_trainer_json_is_never_read(model, run):
    path = run / "global_step_4" / "trainer.json"
    path.write_text(path.read_text().replace('"step": 4', '"step": 3'))
    assert find_resume(options(model, run), SINGLE).step == 2


def test_no_whole_checkpoint_is_an_error_and_never_a_fresh_start(model, run):
    for step in (2, 4):
        flip(run / f"global_step_{step}" / "trainer.json")
    with pytest.raises(DamagedCheckpoint, match=r"no checkpoint can be continued; .*step_4.*step_2.*--overwrite"):
        find_resume(options(model, run), SINGLE)


def test_a_path_is_taken_or_refused_never_replaced(model, run, tmp_path):
    resume = find_resume(options(model, run, "--checkpoint.resume", run / "global_step_2"), SINGLE)
    assert (resume.step, resume.in_place) == (2, True)
    flip(run / "global_step_4" / "trainer.json")
    with pytest.raises(DamagedCheckpoint, match=r"a file was changed after it was .*global_step_4/trainer\.json"):
        find_resume(options(model, run, "--checkpoint.resume", run / "global_step_4"), SINGLE)
    with pytest.raises(UserError, match="no such checkpoint"):
        find_resume(options(model, run, "--checkpoint.resume", run / "global_step_7"), SINGLE)
    with pytest.raises(DamagedCheckpoint, match=r"no MANIFEST\.json"):
        find_resume(options(model, run, "--checkpoint.resume", run), SINGLE)
    with pytest.raises(UserError, match="--overwrite moves the checkpoint away"):
        find_resume(options(model, run, "--checkpoint.resume", run / "global_step_2", "--overwrite"), SINGLE)


@pytest.mark.parametrize("words", [("--checkpoint.resume", "never"), ("--overwrite",)])
def test_never_and_overwrite_look_at_no_checkpoint(model, run, words):
    resume = find_resume(options(model, run, *words), SINGLE)
    assert resume.path is None and resume.step == 0 and not resume.in_place


def test_a_folder_without_a_checkpoint_is_refused_naming_overwrite(model, run):
    for step in (2, 4):
        shutil.rmtree(run / f"global_step_{step}")
    with pytest.raises(UserError, match=r"the run folder is not empty; .* state running at step 4, .* --overwrite"):
        train(options(model, run), init_distributed())


def test_nothing_left_to_train_is_an_error_unless_the_end_was_cut_short(model, done, run):
    world = init_distributed()
    with pytest.raises(UserError, match=r"nothing is left to train; .*global_step_4; found a checkpoint of step 4"):
        train(config(model, "--run-dir", done, "--num-steps", 4), world)
    with pytest.raises(UserError, match="raise --num-steps"):
        train(config(model, "--run-dir", run, "--num-steps", 3), world)
    found = train(config(model, "--run-dir", run, "--num-steps", 4), world)
    assert not found["losses"] and read_status(run)["state"] == "finished"


# ---- The same launch ----


@pytest.fixture
def launched(run, monkeypatch):
    """That run without its checkpoints, as a torchrun with this id has left it."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-1")
    change_status(run, launch_id="job-1")
    for step in (2, 4):
        shutil.rmtree(run / f"global_step_{step}")
    return run


def test_another_reward_file_is_told(model, run):
    cfg = options(model, run)
    resume = find_resume(cfg, SINGLE)
    assert "reward function" not in resume.in_words(cfg, 6, reward=REWARD)
    words = resume.in_words(cfg, 6, reward=REWARD.replace("sha256 ab", "sha256 cd"))
    assert "warning: the reward function's file is another: sha256 ab there, cd here" in words


def test_the_same_launch_starts_again_where_it_has_no_checkpoint_yet(model, launched):
    world = init_distributed()
    found = train(options(model, launched), world)
    assert set(found["losses"]) == {1, 2, 3, 4, 5, 6}
    assert [row["step"] for row in read_metrics(launched)] == [1, 2, 3, 4, 5, 6]


def test_another_launch_does_not(model, launched, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-2")
    with pytest.raises(UserError, match="the run folder is not empty"):
        train(options(model, launched), init_distributed())


def test_a_restart_by_the_same_torchrun_goes_on_in_spite_of_overwrite(model, run, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-1")
    change_status(run, launch_id="job-1")
    assert find_resume(options(model, run, "--overwrite"), SINGLE).path is None  # asked for once more, by hand
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert find_resume(options(model, run, "--overwrite"), SINGLE).step == 4
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-2")
    assert find_resume(options(model, run, "--overwrite"), SINGLE).path is None


def test_a_launch_without_an_id_is_known_by_its_process(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert launch_id() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert launch_id() == launch_id() != "none"


# ---- The same config ----


def test_options_that_matter_are_named_field_by_field(model, run):
    words = ("--optim.lr", "3e-2", "--rollout.temperature", "0.5", "--loss", "gspo", "--eval.every", "7")
    with pytest.raises(UserError) as caught:
        find_resume(options(model, run, *words), SINGLE)
    text = str(caught.value)
    assert "the checkpoint's run had other options; " in text and str(run / "global_step_4") in text
    for part in ("optim.lr was 0.01 and is 0.03", "rollout.temperature was 1.0 and is 0.5", "loss.name was "):
        assert part in text
    assert "eval.every" not in text and "num_steps" not in text


def test_options_that_may_differ_are_options():
    from fnmatch import fnmatch

    from lib.resume import _flat
    from train_grpo import GRPOConfig
    from train_ppo import PPOConfig

    names = {*_flat(to_json(GRPOConfig())), *_flat(to_json(PPOConfig()))}
    assert not [free for free in MAY_DIFFER if not any(fnmatch(name, free) for name in names)]
    free = {name for name in names if any(fnmatch(name, pattern) for pattern in MAY_DIFFER)}
    assert not {name for name in free if name.startswith(("optim", "loss", "advantage", "correction", "kl", "filter"))}
    assert {"critic.fsdp.param_offload", "critic.max_tokens_per_gpu", "model.gradient_checkpointing"} <= free
    assert not {"seed", "model.path", "model.dtype", "rollout.n", "prompts_per_step", "data.max_prompt_len"} & free


def test_other_data_is_refused_by_what_is_in_it(model, run, monkeypatch):
    from tests import checkpoint_worker

    monkeypatch.setattr(checkpoint_worker, "NUM_PROMPTS", 11)
    with pytest.raises(UserError, match=r"the prompts are not those of the checkpoint: another rows"):
        train(options(model, run), init_distributed())


def test_a_checkpoint_of_another_model_is_refused_before_it_is_loaded(model, tmp_path):
    """The path is the same, but another model lies there now."""
    world, folder = init_distributed(), tmp_path / "model"
    shutil.copytree(model, folder)
    words = ("--run-dir", tmp_path / "run", "--num-steps")
    train(config(folder, *words, 1), world)
    make_model(folder, tied=False)
    with pytest.raises(UserError, match=r"the checkpoint is of another model; .*; it lacks lm_head\.weight; give"):
        train(config(folder, *words, 2), world)


def test_the_whole_command_says_so_before_a_model_is_loaded(model, run, tmp_path):
    make_questions(tmp_path / "train.parquet", count=4, start=0)
    lens = ("--data.max-prompt-len", 16, "--rollout.max-response-len", 16)
    cfg = options(model, run, *lens, "--data.train-files", tmp_path / "train.parquet", "--seed", 5)
    with pytest.raises(UserError, match="seed was 0 and is 5"):
        check_input(cfg, SINGLE)


# ---- The same command again ----


def test_the_same_path_again_goes_on_from_what_the_run_has_saved_since(model, run):
    words = ("--checkpoint.resume", run / "global_step_2", "--num-steps", 6, "--checkpoint.every", 1)
    world = init_distributed()
    first = train(config(model, "--run-dir", run, *words), world)
    assert set(first["losses"]) == {3, 4, 5, 6}
    change_status(run, state="running")
    shutil.rmtree(run / "global_step_6")  # as killed after step 5
    again = train(config(model, "--run-dir", run, *words), world)
    assert set(again["losses"]) == {6} and again["losses"][6] == first["losses"][6]
    for step, damage in ((6, flip), (5, os.remove)):  # one that its size does not tell, and one that it does
        damage(run / f"global_step_{step}" / "trainer.json")
    change_status(run, state="running")
    resume = find_resume(config(model, "--run-dir", run, *words), world)
    assert resume.step == 2 and [note.split()[1] for note in resume.notes] == ["global_step_6", "global_step_5"]
    flip(run / "global_step_2" / "trainer.json")
    with pytest.raises(DamagedCheckpoint, match="global_step_2"):  # the one that was asked for
        find_resume(config(model, "--run-dir", run, *words), world)


def test_the_same_path_of_another_run_again_goes_on_in_the_new_folder(model, done, tmp_path):
    words = ("--checkpoint.resume", done / "global_step_2", "--num-steps", 4, "--checkpoint.every", 1)
    world = init_distributed()
    cfg = config(model, "--run-dir", tmp_path / "new", *words)
    first = train(cfg, world)
    change_status(tmp_path / "new", state="running")
    shutil.rmtree(tmp_path / "new" / "global_step_4")
    assert set(train(cfg, world)["losses"]) == {4}
    change_status(tmp_path / "new", state="running")
    for step in (3, 4):  # as killed before the first save
        shutil.rmtree(tmp_path / "new" / f"global_step_{step}")
    again = train(cfg, world)
    assert again["losses"] == first["losses"] and set(again["losses"]) == {3, 4}
    assert [row["step"] for row in read_metrics(tmp_path / "new")] == [3, 4]


def test_never_goes_on_where_the_same_torchrun_restarts_its_ranks(model, run, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-1")
    change_status(run, launch_id="job-1")
    cfg = options(model, run, "--checkpoint.resume", "never")
    assert find_resume(cfg, SINGLE).step == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert find_resume(cfg, SINGLE).step == 4


def test_a_run_that_was_stopped_before_its_first_step_starts_again(model, run):
    for step in (2, 4):
        shutil.rmtree(run / f"global_step_{step}")
    change_status(run, state="stopped", step=0)
    assert find_resume(options(model, run), SINGLE).in_place
    change_status(run, state="stopped", step=1)
    assert not find_resume(options(model, run), SINGLE).in_place


def test_a_disk_that_cannot_be_read_is_no_damage(model, run, monkeypatch):
    def fail(*_):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr("hashlib.file_digest", fail)
    with pytest.raises(UserError, match="Stale file handle"):
        find_resume(options(model, run), SINGLE)


def test_a_folder_that_a_run_is_writing_to_is_refused(model, run):
    descriptor = lock_folder(run)
    with pytest.raises(UserError, match="another run is writing to the run folder"):
        train(options(model, run), init_distributed())
    os.close(descriptor)
    assert set(train(options(model, run), init_distributed())["losses"]) == {5, 6}
