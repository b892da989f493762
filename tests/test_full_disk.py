"""A disk that fills up while a run logs costs neither the run nor a row; each body runs on a small tmpfs of its own."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from lib.dist import SINGLE, init_distributed
from lib.errors import LockstepError, NoSpace, Stopped, UserError
from lib.tracking.run import Run, TrackingConfig
from lib.tracking.run_folder import append, read_metrics, read_status
from tests.checkpoint_folders import fill, on_small_disk
from tests.checkpoint_worker import config, train
from tests.ranks import ROOT

SIZE = "160m"  # a run starts with no less than 0.1 GiB


def on_disk(folder: Path, body: str, *words) -> str:
    code = f"import sys; from pathlib import Path; from tests.test_full_disk import *; {body}(*map(Path, sys.argv[1:]))"
    return on_small_disk(folder, SIZE, code, folder, *words)


def start(model: Path, run: Path, num_steps: int, *words, validate=lambda step: None, **hooks):
    """Trains with a validation in each step, for which `validate` is called first; a row is larger than a page."""

    def values(step):
        validate(step)
        return {"val-core/test/acc/mean@1": step / 10} | {f"a/metric/{place}": step / 3 for place in range(200)}

    cfg = config(model, "--run-dir", run, "--num-steps", num_steps, "--checkpoint.every", 2, *words)
    return train(cfg, init_distributed(), validate=values, **hooks)


def tensorboard_steps(run: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return [event.step for event in events.Scalars("x")]


# ---- The disk is full for a while ----


def full_for_two_steps(disk: Path, model: Path) -> None:
    ballast = disk / "ballast"

    def validate(step):
        if step == 3:
            fill(ballast)
        if step == 4:
            print("z" * 20_000)  # as libraries do: it goes to the log
        if step == 5:
            ballast.unlink()

    expected = start(model, disk / "undisturbed", 6)
    print("---- disturbed")
    found = start(model, disk / "run", 6, validate=validate)
    assert found["losses"] == expected["losses"]
    rows = [(disk / name / "metrics.jsonl").read_bytes() for name in ("undisturbed", "run")]
    assert rows[0] == rows[1] and rows[0].count(b"\n") == 6
    assert tensorboard_steps(disk / "run") == [1, 2, 3, 4, 5, 6]
    assert read_status(disk / "run")["state"] == "finished"
    assert sorted(path.name for path in (disk / "run").glob("global_step_*")) == ["global_step_2", "global_step_6"]
    assert not list((disk / "run").glob(".*"))


def test_steps_go_on_and_every_row_is_there_once_there_is_room(tmp_path, model):
    out = on_disk(tmp_path, "full_for_two_steps", model).split("---- disturbed")[1]
    begin, end = "warning: no space for what is logged from step 3 on, and training goes on; ", "there is room again: "
    assert out.count(begin) == out.count(end) == 1
    assert "No space left on device, 0.0 MiB free, expected room for metrics and samples" in out
    assert f"{end}all that was logged up to step 5 is written" in out
    assert "warning: no checkpoint at step 4, and training goes on: no space for what was logged; " in out
    assert "validation at step 4\n" in out and "acc/mean@1  0.400  +0.300 since step 1" in out  # rows that wait count


def room_before_a_save(disk: Path, model: Path) -> None:
    ballast, run = disk / "ballast", disk / "run"

    def validate(step):
        if step == 3:
            fill(ballast)
        if step == 5:
            assert (run / "global_step_4").exists()
            assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4]

    start(model, run, 6, validate=validate, before_save=lambda step: ballast.unlink() if step == 4 else None)


def test_no_checkpoint_is_published_before_the_rows_up_to_it(tmp_path, model):
    on_disk(tmp_path, "room_before_a_save", model)


# ---- The disk is full to the end ----


def full_to_the_end(disk: Path, model: Path) -> None:
    ballast, run = disk / "ballast", disk / "run"
    start(model, disk / "undisturbed", 4)
    with pytest.raises(LockstepError, match="the run's last checkpoint was not written; no space for what was logged"):
        start(model, run, 4, validate=lambda step: fill(ballast) if step == 3 else None)
    assert [row["step"] for row in read_metrics(run)] == [1, 2]
    status = read_status(run)
    assert (status["state"], status["step"], status["resumable"]) == ("failed", 4, True)
    assert status["error"].startswith("error[2] the run's last checkpoint was not written; ")
    assert not list(run.glob(".*"))
    ballast.unlink()
    start(model, run, 4)
    assert (run / "metrics.jsonl").read_bytes() == (disk / "undisturbed" / "metrics.jsonl").read_bytes()
    assert tensorboard_steps(run) == [1, 2, 3, 4]
    assert read_status(run)["state"] == "finished" and (run / "learning_curve.png").exists()
    print("---- without a checkpoint")
    with pytest.raises(NoSpace, match=r"no space for what was logged; .* waiting in memory from step 3 on"):
        start(model, disk / "b", 4, "--checkpoint.at-end", "False", "--checkpoint.every", 0,
              validate=lambda step: fill(ballast) if step == 3 else None)  # fmt: skip


def test_a_run_that_ends_without_room_says_what_is_lost_and_goes_on_from_its_checkpoint(tmp_path, model):
    out = on_disk(tmp_path, "full_to_the_end", model)
    assert out.count("warning: no space for what was logged from step 3 on, and it is lost; ") == 2
    assert out.count("warning: no checkpoint at step 4: no space for what was logged; ") == 1
    assert "acc/mean@1: 0.100 (step 1) -> 0.400 (step 4)" in out.split("---- without a checkpoint")[1]


def stopped_without_room(disk: Path, model: Path) -> None:
    def validate(step):
        if step == 3:
            fill(disk / "ballast")
        if step == 5:
            raise Stopped("asked to")

    with pytest.raises(LockstepError, match="the run's last checkpoint was not written; no space for what was logged"):
        start(model, disk / "run", 6, validate=validate)


def test_a_run_that_is_stopped_without_room_does_not_say_that_training_goes_on(tmp_path, model):
    out = on_disk(tmp_path, "stopped_without_room", model)
    assert out.count("warning: no checkpoint at step 4, and training goes on: no space for what was logged; ") == 1
    assert out.count("warning: no checkpoint at step 4: no space for what was logged; ") == 1


def failing_without_room(disk: Path) -> None:
    for name, error, state in (("a", RuntimeError("x" * 8000), "failed"), ("b", Stopped("asked to"), "stopped")):
        with (
            pytest.raises(type(error)),
            Run(disk / name, TrackingConfig(), SINGLE, config={}, num_steps=2) as run,
        ):
            (disk / "ballast").unlink(missing_ok=True)
            run.log(1, {"x": 1.0})
            fill(disk / "ballast")
            raise error
        status = read_status(run.dir)
        assert (status["state"], status["step"]) == (state, 1) and str(error) in status["error"]
        assert not list(run.dir.glob(".*"))
        (disk / "ballast").unlink()


def test_the_status_tells_the_end_of_a_run_also_where_there_is_no_room(tmp_path):
    on_disk(tmp_path, "failing_without_room")


def failing_with_room_again(disk: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="a bug"),
        Run(disk / "run", TrackingConfig(), SINGLE, config={}, num_steps=2) as run,
    ):
        fill(disk / "ballast")
        run.log(1, {f"a/metric/{place}": place / 3 for place in range(1000)})
        assert not read_metrics(run.dir)
        (disk / "ballast").unlink()
        raise RuntimeError("a bug")
    assert [row["step"] for row in read_metrics(run.dir)] == [1]


def test_a_run_that_fails_once_there_is_room_again_loses_nothing(tmp_path):
    assert "it is lost" not in on_disk(tmp_path, "failing_with_room_again")


def rollouts_without_room(disk: Path) -> None:
    data = b"PAR1" * 50_000
    with Run(disk / "run", TrackingConfig(), SINGLE, config={}, num_steps=2) as run:
        fill(disk / "ballast")
        run.save_rollouts(1, data)
        run.log(1, {"x": 1.0})
        assert not (run.dir / "rollouts" / "step_1.parquet").stat().st_size
        (disk / "ballast").unlink()
        run.log(2, {"x": 1.0})
        assert (run.dir / "rollouts" / "step_1.parquet").read_bytes() == data
        run.finish()


def test_rollouts_for_which_there_is_no_room_are_a_warning_and_written_whole_later(tmp_path):
    out = on_disk(tmp_path, "rollouts_without_room")
    assert out.count("warning: no space for what is logged from step 1 on, and training goes on; ") == 1
    assert "there is room again: all that was logged up to step 2 is written" in out


# ---- One append ----


def torn_append(disk: Path) -> None:
    path = disk / "metrics.jsonl"
    append(path, b"x" * 4000 + b"\n")
    fill(disk / "ballast")
    for size in (90, 2000):  # one fits into what is left of the file's page, the other in part
        before = path.read_bytes()
        if size == 90:
            append(path, b"y" * size)
            assert path.read_bytes() == before + b"y" * size
        else:
            with pytest.raises(OSError) as caught:
                append(path, b"z" * size)
            assert caught.value.errno == errno.ENOSPC and path.read_bytes() == before


def test_a_line_that_fits_in_part_is_cut_off_again(tmp_path):
    on_disk(tmp_path, "torn_append")


def test_any_other_error_of_the_disk_still_ends_the_run(tmp_path):
    with (
        pytest.raises(UserError, match=r"cannot write the run folder; .*metrics\.jsonl; Is a directory"),
        Run(tmp_path / "run", TrackingConfig(), SINGLE, config={}, num_steps=2) as run,
    ):
        (run.dir / "metrics.jsonl").mkdir()
        run.log(1, {"x": 1.0})
    assert read_status(tmp_path / "run")["state"] == "failed"


def test_a_terminal_that_is_a_file_on_a_full_disk_does_not_end_the_run(tmp_path):
    code = (
        "from tests.test_full_disk import *; import sys\n"
        "with Run(sys.argv[1], TrackingConfig(), SINGLE, config={}, num_steps=1) as run:\n"
        "    run.log(1, {'critic/score/mean': 1.0})\n"
        "    run.finish()\n"
    )
    with open("/dev/full", "w") as terminal:
        words = [sys.executable, "-c", code, str(tmp_path / "run")]
        done = subprocess.run(words, cwd=ROOT, stdout=terminal, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    assert read_status(tmp_path / "run")["state"] == "finished" and len(read_metrics(tmp_path / "run")) == 1


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_an_error_told_to_a_full_disk_keeps_its_exit_code(tmp_path, stream):
    code = (
        "from tests.test_full_disk import *; import sys; from lib.config.flags import reporting_errors\n"
        "with reporting_errors(), Run(sys.argv[1], TrackingConfig(), SINGLE, config={}, num_steps=1):\n"
        "    raise NoSpace('no space')\n"
    )
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-c", code, str(tmp_path / "run")]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: full}
        done = subprocess.run(words, cwd=ROOT, text=True, **streams)
    assert done.returncode == 2, (done.stdout, done.stderr)
