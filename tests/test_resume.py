"""What a run goes on from, and what it refuses, before a model is loaded. Runs of a few steps without an engine."""

import errno
import json
import os
import shutil

import pytest

from lib.dist import SINGLE, init_distributed
from lib.errors import DamagedCheckpoint, UserError
from lib.launch.resume import find_resume
from lib.storage.checkpoint_folder import MANIFEST, hash_files, publish
from lib.tracking.run_folder import launch_id, lock_folder, read_metrics, read_status
from tests.checkpoint_worker import config, train
from tests.resumed_run import change_status, done, flip, options, run  # noqa: F401 (fixtures)

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


def test_a_wrong_word_or_a_missing_step_is_told_with_those_that_there_are(model, run):
    with pytest.raises(UserError, match=r"--checkpoint.resume must; found no folder .*/must, expected auto, never, or"):
        find_resume(options(model, run, "--checkpoint.resume", "must"), SINGLE)
    with pytest.raises(UserError, match=r"no such checkpoint; .*; found only global_step_4, global_step_2 in .*/run, "):
        find_resume(options(model, run, "--checkpoint.resume", run / "global_step_7"), SINGLE)


def test_an_empty_status_beside_whole_checkpoints_costs_nothing(model, run):
    (run / "status.json").write_text("")  # as a full disk leaves it
    assert set(train(options(model, run), init_distributed())["losses"]) == {5, 6}


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("step",), "4", 'found "4" as step, expected int'),
        (("config",), None, "found null as config, expected dict"),
        (("prompts", "epoch"), 0.5, "found 0.5 as prompts.epoch, expected int"),
        (("kl_controller",), {}, "found no kl_controller.coef"),
        (("collectors", 0, "carried", 0, 0, "response_ids", 0), True, "carried.0.0.response_ids.0, expected int"),
        (
            ("collectors", 0, "carried", 0, 0, "place"),
            None,
            "found null as collectors.0.carried.0.0.place, expected int",
        ),
        (("prompts", "curriculum"), [0, 1], "as prompts.curriculum, expected str"),
        (("collectors", 0, "carried", 0), [], "collectors.0.carried.0, expected a list with entries"),
        (("constant_groups",), {"0": 1}, "as constant_groups, expected list"),
        (("began_from",), ["model"], "as began_from, expected dict"),
        (("began_from",), {"reference": 5}, "found 5 as began_from.reference, expected str"),
        (("best",), {"metric": "a", "value": "1", "step": 2}, 'found "1" as best.value, expected int'),
        (("reward",), 5, "found 5 as reward, expected str"),
        ((), [], "found [] as all of it, expected dict"),
    ],
)
def test_a_trainer_json_with_wrong_types_is_passed_over_in_one_line(model, run, place, value, said):
    """It is as it was written: whoever wrote it was wrong."""
    path = run / "global_step_4" / "trainer.json"
    holder = [json.loads(path.read_text())]
    inner = holder
    for key in (0, *place)[:-1]:
        inner = inner[key]
    inner[(0, *place)[-1]] = value
    path.write_text(json.dumps(holder[0]))
    manifest = json.loads((path.parent / MANIFEST).read_text())
    (path.parent / MANIFEST).unlink()
    path.parent.rename(run / "staging")
    files = hash_files(run / "staging", manifest["files"])
    publish(run / "staging", path.parent, files, inventory=manifest["inventory"])
    resume = find_resume(options(model, run), SINGLE)
    assert resume.step == 2 and len(resume.notes) == 1 and "trainer.json" in resume.notes[0] and said in resume.notes[0]


# ---- A run without a checkpoint ----


@pytest.fixture
def dead(run):
    """That run as a kill before its first checkpoint leaves it."""
    for step in (2, 4):
        shutil.rmtree(run / f"global_step_{step}")
    return run


def test_a_dead_run_without_a_checkpoint_begins_again_with_its_rows_moved_aside(model, done, dead, capfd):
    found = train(options(model, dead), init_distributed())
    out = capfd.readouterr().out
    assert "the run in this folder has no checkpoint: it begins again\n" in out
    assert "what the run had written is moved aside: metrics.jsonl.replaced-" in out
    assert set(found["losses"]) == {1, 2, 3, 4, 5, 6}
    assert read_metrics(dead)[:4] == read_metrics(done)
    [aside] = dead.glob("metrics.jsonl.replaced-*")
    assert aside.read_bytes() == (done / "metrics.jsonl").read_bytes()
    shutil.rmtree(dead / "global_step_6")
    for state in ("failed", "stopped"):
        change_status(dead, state=state)
        assert find_resume(options(model, dead), SINGLE).last_row == -1


def test_a_dead_run_of_other_options_is_refused_naming_them(model, dead, tmp_path):
    words = ("--optim.lr", 0.02, "--data.train-files", "other.parquet", "--eval.every", 3)
    with pytest.raises(UserError) as caught:
        find_resume(options(model, dead, *words), SINGLE)
    text = str(caught.value)
    assert "state running at step 4, " in text and "optim.lr was 0.01 and is 0.02" in text and "--overwrite" in text
    assert "data.train_files was [] and is" in text and "eval" not in text
    assert not find_resume(options(model, dead, *words, "--overwrite"), SINGLE).in_place
    with pytest.raises(UserError, match=r'checkpoint.resume was "auto" and is ".*/run/global_step_2"'):
        find_resume(options(model, dead, "--checkpoint.resume", tmp_path / "copy" / "run" / "global_step_2"), SINGLE)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"checkpoint": {"resume": []}}'], ids=["deep", "list"])
def test_a_dead_run_whose_config_or_status_cannot_be_read_does_not_begin_again(model, dead, text):
    (dead / "config.json").write_text(text)
    assert not find_resume(options(model, dead), SINGLE).in_place
    (dead / "status.json").write_text(text)
    with pytest.raises(UserError, match=r"the run folder is not empty; .*found one without a status"):
        train(options(model, dead), init_distributed())


def test_a_run_that_lives_or_has_finished_does_not_begin_again(model, dead, monkeypatch):
    descriptor = lock_folder(dead)
    with pytest.raises(UserError, match="another run is writing to the run folder"):
        find_resume(options(model, dead), SINGLE)
    os.close(descriptor)
    change_status(dead, state="finished")
    with pytest.raises(UserError, match=r"the run folder is not empty; .* state finished at step 4, .* --overwrite"):
        train(options(model, dead), init_distributed())
    change_status(dead, state="running")
    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(UserError, match=r"the run folder is not empty; .* state running at step 4, "):
        train(options(model, dead), init_distributed())
    change_status(dead, state="failed")
    assert find_resume(options(model, dead), SINGLE).in_place


def no_locks(*_):
    raise OSError(errno.ENOSYS, "Function not implemented")


def test_a_run_folder_whose_name_is_not_utf_8_is_refused(model, tmp_path):
    with pytest.raises(UserError, match=r"not a usable path; --run-dir .*; its name has bytes that are not UTF-8"):
        train(options(model, f"{tmp_path}/\udcff"), init_distributed())
    assert not list(tmp_path.iterdir())


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


def test_the_same_launch_starts_again_where_it_has_no_checkpoint_yet(model, launched):
    world = init_distributed()
    found = train(options(model, launched), world)
    assert set(found["losses"]) == {1, 2, 3, 4, 5, 6}
    assert [row["step"] for row in read_metrics(launched)] == [1, 2, 3, 4, 5, 6]


def test_another_launch_with_other_options_does_not(model, launched, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-2")
    with pytest.raises(UserError, match=r"the run folder holds another run.*seed was 0 and is 1"):
        train(options(model, launched, "--seed", 1), init_distributed())


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


def test_a_path_through_a_link_to_its_own_run_is_no_branch(model, run, tmp_path):
    (tmp_path / "link").symlink_to(run)
    for path, folder in ((tmp_path / "link", run), (run, tmp_path / "link")):
        words = ("--checkpoint.resume", path / "global_step_2")
        resume = find_resume(options(model, folder, *words), SINGLE)
        assert (resume.path, resume.is_branch, resume.in_place) == (folder / "global_step_2", False, True)
        with pytest.raises(UserError, match="--overwrite moves the checkpoint away"):
            find_resume(options(model, folder, *words, "--overwrite"), SINGLE)


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
    cfg = options(model, run, "--seed", 1)
    change_status(run, state="stopped", step=0)
    assert find_resume(cfg, SINGLE).in_place
    change_status(run, state="stopped", step=1)
    with pytest.raises(UserError, match="the run folder holds another run"):
        find_resume(cfg, SINGLE)


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
