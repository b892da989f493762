"""Saving and going on, without an engine: in this process, and on 1 and 2 ranks; tests/checkpoint_worker.py trains."""

import json
import shutil

import pytest
import torch

from lib.checkpoints import checkpointer
from lib.dist import init_distributed
from lib.errors import UserError
from lib.storage.checkpoint_folder import find_checkpoints, verify
from lib.tracking.run_folder import read_metrics, read_status
from tests.checkpoint_worker import config, train
from tests.prefork import prefork
from tests.ranks import torchrun
from tests.tiny import make_model, make_tokenizer

KEEP_ALL = ("--checkpoint.every", 2, "--checkpoint.keep", "None")


@pytest.fixture(scope="module")
def start(model):
    """A function that trains in this process: options as on the command line."""
    world = init_distributed()

    def run(folder, num_steps, *words, **how):
        return train(config(model, "--run-dir", folder, "--num-steps", num_steps, *words), world, **how)

    return run


@pytest.fixture(scope="module")
def straight(start, tmp_path_factory):
    """A run of 6 steps with a checkpoint every second one, and what it computed. Not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "straight"
    return folder, start(folder, 6, *KEEP_ALL)


@pytest.fixture
def killed(straight, tmp_path):
    """A copy of that run as a kill in step 5 leaves it: with a later row, and half a checkpoint."""
    folder = tmp_path / "killed"
    shutil.copytree(straight[0], folder)
    shutil.rmtree(folder / "global_step_6")
    (folder / ".tmp-global_step_5-x").mkdir()
    (folder / "samples" / "step_5.jsonl").write_text("{}\n")
    status = read_status(folder) | {"state": "running", "step": 5}
    (folder / "status.json").write_text(json.dumps(status))
    return folder


def same(found, expected, *, steps):
    assert set(found["losses"]) == set(steps)
    for what in ("uids", "losses"):
        assert found[what] == {step: expected[what][step] for step in steps}
    for name, tensor in expected["weights"].items():
        assert torch.equal(tensor, found["weights"][name]), name
    assert found["state"] == expected["state"]


# ---- Exactness ----


def test_a_killed_run_goes_on_as_if_nothing_had_happened(start, straight, killed):
    found = start(killed, 6)
    same(found, straight[1], steps=(5, 6))  # the second epoch begins within step 3, and the third in step 6
    assert read_metrics(killed) == read_metrics(straight[0])  # no row is lost, or there twice
    assert not (killed / "samples" / "step_5.jsonl").exists() and not list(killed.glob(".tmp-*"))
    assert (killed / "learning_curve.png").exists()
    assert read_status(killed)["run_id"] == read_status(straight[0])["run_id"]
    for name in ("actor/model", "actor/optim"):
        [ours], [expected] = ((run / "global_step_6" / name).iterdir() for run in (killed, straight[0]))
        assert ours.read_bytes() == expected.read_bytes()


def test_tensorboard_shows_every_step_once_after_a_resume(start, killed):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    start(killed, 6)
    events = EventAccumulator(str(killed / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("x")] == [1, 2, 3, 4, 5, 6]


def test_an_earlier_checkpoint_by_path_replaces_the_later_ones(start, straight, killed):
    found = start(killed, 6, "--checkpoint.resume", killed / "global_step_2")
    same(found, straight[1], steps=(3, 4, 5, 6))
    assert len(list(killed.glob("global_step_4.replaced-*"))) == 1 and not (killed / "global_step_4").exists()
    assert read_metrics(killed) == read_metrics(straight[0])


def test_a_checkpoint_of_another_folder_starts_a_new_run_from_it(start, straight, tmp_path):
    found = start(tmp_path / "new", 6, "--checkpoint.resume", straight[0] / "global_step_4")
    same(found, straight[1], steps=(5, 6))
    assert [row["step"] for row in read_metrics(tmp_path / "new")] == [5, 6]
    assert read_status(tmp_path / "new")["run_id"] != read_status(straight[0])["run_id"]


@pytest.fixture(scope="module")
def ranks(model, straight, tmp_path_factory):
    """What 2 ranks computed in 6 steps, then what 1 and then 2 ranks computed from their second step on."""
    folder = tmp_path_factory.mktemp("ranks")
    two, other = folder / "two", folder / "other"

    def run(num_ranks, where, num_steps, *words):
        words = ("--run-dir", where, "--num-steps", num_steps, *KEEP_ALL, *words)
        out = folder / f"{where.name}{num_steps}.pt"
        done = prefork(num_ranks, "-m", "tests.checkpoint_worker", *map(str, (model, out, *words)))
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
        return torch.load(out), done.stdout

    whole, _ = run(2, two, 6)
    shutil.copytree(two, other)
    for step in (4, 6):
        shutil.rmtree(other / f"global_step_{step}")
    (other / "status.json").write_text(json.dumps(read_status(two) | {"state": "running"}))
    return whole, run(1, other, 4), run(2, other, 6, "--checkpoint.every", 1, "full=5:1")


def test_2_ranks_then_1_then_2_see_the_same_data_and_compute_the_same_up_to_rounding(ranks, straight):
    whole, (middle, _), (last, _) = ranks
    assert middle["uids"] | last["uids"] == {step: whole["uids"][step] for step in (3, 4, 5, 6)}
    assert whole["uids"] == straight[1]["uids"]
    losses = middle["losses"] | last["losses"]
    assert losses == pytest.approx({step: whole["losses"][step] for step in losses}, rel=1e-4)
    for name, tensor in whole["weights"].items():
        assert torch.allclose(last["weights"][name], tensor, rtol=1e-3, atol=1e-4), name
    assert last["state"]["kl_controller"] == whole["state"]["kl_controller"]


# ---- What stays ----


def steps(folder):
    return sorted(found.step for found in find_checkpoints(folder))


def test_the_newest_and_the_best_stay(start, tmp_path, capfd):
    scores = {1: 0.2, 2: 0.9, 3: 0.5, 4: 0.4, 5: float("nan")}

    def validate(step):
        return {"val-core/test/acc/mean@1": scores.get(step, 0.1), "val-core/test/acc/best@4/mean": 1.0}

    start(tmp_path / "run", 6, "--checkpoint.every", 1, "--checkpoint.keep", 2, validate=validate)
    assert steps(tmp_path / "run") == [2, 5, 6]
    trainer = json.loads((tmp_path / "run" / "global_step_6" / "trainer.json").read_text())
    assert trainer["best"] == {"metric": "val-core/test/acc/mean@1", "value": 0.9, "step": 2}


def test_older_checkpoints_lose_the_optimizer_on_request_and_cannot_be_continued(start, tmp_path):
    run = tmp_path / "run"
    start(run, 3, "--checkpoint.every", 1, "--checkpoint.keep", 3, "--checkpoint.keep-optimizer", 1)
    assert [(run / f"global_step_{step}" / "actor" / "optim").exists() for step in (1, 2, 3)] == [False, False, True]
    with pytest.raises(UserError, match="no optimizer state any more"):
        start(run, 6, "--checkpoint.resume", run / "global_step_2")


def test_the_end_is_saved_whatever_the_interval_and_nothing_without_at_end(start, tmp_path):
    start(tmp_path / "a", 3)
    start(tmp_path / "b", 3, "--checkpoint.at-end", "False")
    start(tmp_path / "c", 3, "--checkpoint.every-minutes", 1e-9, "--checkpoint.keep", "None")
    assert [steps(tmp_path / name) for name in "abc"] == [[3], [], [1, 2, 3]]


def test_a_checkpoint_holds_a_folder_for_people_and_for_hugging_face(straight, model):
    folder = straight[0] / "global_step_6"
    manifest = verify(folder)
    assert {name.split("/")[0] for name in manifest.files} == {"actor", "trainer.json"}
    kept = {path.name for path in (folder / "actor" / "huggingface").iterdir()}
    assert kept == {path.name for path in model.iterdir()} - {"model.safetensors"}
    assert manifest.inventory["tensors"]["actor/model"]["model.norm.weight"] == [64]
    assert (straight[0] / "latest_checkpointed_iteration.txt").read_text() == "6\n"


# ---- When saving fails ----


@pytest.mark.parametrize("mode", ["False", "True"])
def test_a_full_disk_is_a_warning_and_the_next_save_works(start, tmp_path, capfd, mode):
    words = (*KEEP_ALL, "--checkpoint.async-save", mode)
    found = start(tmp_path / "run", 6, *words, full=(4, 0))
    out = capfd.readouterr().out
    assert "warning: no checkpoint at step 4, and training goes on: no space for a checkpoint" in out
    assert "shard-00001-of-00001.safetensors" in out and set(found["losses"]) == {1, 2, 3, 4, 5, 6}
    assert steps(tmp_path / "run") == [2, 6] and not list((tmp_path / "run").glob(".tmp-*"))
    assert read_status(tmp_path / "run")["resumable"]


def test_a_full_disk_on_one_rank_is_the_same_on_all(ranks):
    _, _, (_, out) = ranks
    assert "warning: no checkpoint at step 5, and training goes on: no space for a checkpoint" in out
    assert "shard-00002-of-00002.safetensors" in out and "(rank 1)" in out
    assert "checkpoint global_step_6" in out


def test_too_little_space_is_told_in_bytes_before_anything_is_written(start, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(checkpointer, "SLACK", 2**60)
    with pytest.raises(UserError, match=r"the run's last checkpoint was not written; not enough disk space .* GiB"):
        start(tmp_path / "run", 2)
    assert steps(tmp_path / "run") == [] and len(read_metrics(tmp_path / "run")) == 2
    status = read_status(tmp_path / "run")
    assert (status["state"], status["resumable"]) == ("failed", False)


def test_an_asynchronous_save_is_of_the_moment_it_was_asked_for(start, straight, tmp_path):
    words = (*KEEP_ALL, "--checkpoint.async-save", "True")
    found = start(tmp_path / "run", 6, *words)
    same(found, straight[1], steps=range(1, 7))
    for step in (2, 4, 6):
        for name in ("actor/model", "actor/optim"):
            folders = (run / f"global_step_{step}" / name for run in (tmp_path / "run", straight[0]))
            [ours], [expected] = (folder.iterdir() for folder in folders)
            assert ours.read_bytes() == expected.read_bytes(), (step, name)


def test_a_rank_without_memory_for_a_copy_makes_all_wait_for_saves_and_ends_no_run(tmp_path):
    model, run = make_model(tmp_path / "model", intermediate_size=30_000), tmp_path / "run"  # 70 MB a rank
    make_tokenizer(model)
    words = ("--run-dir", run, "--num-steps", 4, *KEEP_ALL, "--checkpoint.async-save", "True", "poor=1")
    env = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}  # glibc keeps no freed memory that the copy could fit into
    done = torchrun(2, "-m", "tests.checkpoint_worker", *map(str, (model, tmp_path / "out.pt", *words)), **env)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("warning: training waits for checkpoints from here on; --checkpoint.async-save; ") == 1
    assert "GB of host memory refused (on rank 1)" in done.stdout and "(training waited" not in done.stdout
    assert steps(run) == [2, 4] and read_status(run)["state"] == "finished"


def test_a_run_that_fails_on_all_ranks_first_ends_the_save_that_is_under_way(model, tmp_path):
    run = tmp_path / "run"
    words = ("--run-dir", run, "--num-steps", 6, *KEEP_ALL, "--checkpoint.async-save", "True", "broken=3:1")
    done = prefork(2, "-m", "tests.checkpoint_worker", *map(str, (model, tmp_path / "out.pt", *words)))
    assert done.returncode != 0 and "error[4] the reward function failed" in done.stderr, done.stderr[-3000:]
    assert steps(run) == [2] and not list(run.glob(".tmp-*"))
    status = read_status(run)
    assert (status["state"], status["resumable"]) == ("failed", True)
    words = (*words, "--run-dir", tmp_path / "full", "full=2:1")
    done = prefork(2, "-m", "tests.checkpoint_worker", *map(str, (model, tmp_path / "out.pt", *words)))
    assert "warning: no checkpoint at step 2: no space" in done.stdout and "training goes on" not in done.stdout
