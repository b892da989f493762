"""Claims about the run folder and the terminal. Whole lives of runs happen in processes of their own."""

import copy
import json
import math
import os
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from lib.config.reporting import reporting_errors
from lib.dist import SINGLE
from lib.errors import UserError
from lib.tracking.console import plot_learning_curve
from lib.tracking.run import Run, TrackingConfig
from lib.tracking.run_folder import read_metrics, read_status, step_files
from tests.ranks import LIMIT_S, free_port

ROOT = Path(__file__).parent.parent
HEADER = """
import ctypes, os, sys, logging, warnings
from lib.dist import SINGLE, init_distributed, shutdown_distributed
from lib.errors import UserError
from lib.tracking import Run, TrackingConfig
"""


def outcome(status: dict) -> tuple:
    return tuple(status[name] for name in ("state", "step", "resumable", "error"))


def run_script(body: str, folder: Path, *, ranks: int = 1, env: dict | None = None) -> list[tuple[int, str, str]]:
    """Exit code, standard output and standard error of each rank that executes the body in `folder`."""
    port = free_port()
    base = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]]),
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    base.pop("PYTHONUNBUFFERED", None)  # it would also switch off C's buffer, which must not leak into the terminal
    processes = []
    for rank in range(ranks):
        launch = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        launch |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", HEADER + textwrap.dedent(body)],
                cwd=folder,
                env=base | (launch if ranks > 1 else {}),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
    return [(process.returncode, out, err) for process, (out, err) in zip(processes, outputs, strict=True)]


def open_run(path: Path | str, **options) -> Run:
    return Run(path, TrackingConfig(), SINGLE, config=options.pop("config", {}), num_steps=3, **options)


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())


NOISE = """
    print("noise of print")
    sys.stderr.write("noise of stderr\\n")
    os.write(1, b"noise of fd 1\\n")
    ctypes.CDLL(None).printf(b"noise of printf\\n")
    logging.getLogger("vllm").warning("noise of logging")
    warnings.warn("noise of warnings")
    os.system("echo noise of a child")
"""


def test_two_ranks_write_one_folder_and_their_noise_goes_to_a_log_each(tmp_path):
    body = f"""
from lib.dist import World
world = init_distributed()
print("before")
with Run("runs/a", TrackingConfig(), world, config={{"seed": 1}}, num_steps=2) as run:
    {textwrap.indent(textwrap.dedent(NOISE), "    ").strip()}
    run.say("hello from the run")
    run.log(0, {{"val-core/arithmetic/acc/mean@1": 0.25}})
    for step in (1, 2):
        run.log(step, {{"critic/score/mean": 0.1 * step, "actor/grad_norm": 0.5, "timing_s/step": 2.0}})
    run.log(2, {{"val-core/arithmetic/acc/mean@1": 0.75}})
    run.finish()
try:
    Run("runs/a", TrackingConfig(), world, config={{}}, num_steps=2)
except UserError as error:
    print(run.state, str(error)[-40:])
shutdown_distributed()
"""
    ranks = run_script(body, tmp_path, ranks=2)
    run = tmp_path / "runs" / "a"
    assert [code for code, _, _ in ranks] == [0, 0], ranks
    assert "noise" not in "".join(out + err for _, out, err in ranks)
    said = ranks[0][1]
    assert said.startswith("before\nhello from the run\nvalidation at step 0\n")
    for _, out, _ in ranks:
        last = out.splitlines()[-1]
        assert out.startswith("before\n") and last.startswith("finished ") and last.endswith("to a.old-TIME"), out
    assert len(ranks[1][1].splitlines()) == 2
    assert " 1/2  0.100      -    -     -   0.5   2.0 " in said
    assert "+0.500" in said and "0.250 (step 0) -> 0.750 (step 2)" in said
    for rank in (0, 1):
        log = (run / "logs" / f"rank_{rank}.log").read_text()
        sources = ("print", "stderr", "fd 1", "printf", "logging", "warnings", "a child")
        assert all(f"noise of {source}" in log for source in sources), log
    assert outcome(read_json(run / "status.json")) == ("finished", 2, False, None)
    assert read_json(run / "config.json") == {"seed": 1}
    assert [row["step"] for row in read_metrics(run)] == [0, 1, 2, 2]
    assert (run / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    names = {"config.json", "metrics.jsonl", "tensorboard", "learning_curve.png", "samples", "logs", "status.json",
             "rollouts", "tokens", "report.html"}  # fmt: skip
    assert {path.name for path in run.iterdir()} == names
    assert tensorboard_scalars(run, "critic/score/mean") == {1: pytest.approx(0.1), 2: pytest.approx(0.2)}


def tensorboard_scalars(run: Path, name: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(name)}


def test_a_bug_on_one_rank_reaches_the_terminal_with_its_rank_and_log(tmp_path):
    body = """
    world = init_distributed()
    with Run("r", TrackingConfig(), world, config={}, num_steps=2) as run:
        run.log(1, {"x": 1.0})
        print("noise")
        if world.rank == 1:
            raise KeyError("no such layer")
    """
    _, (code, out, err) = run_script(body, tmp_path, ranks=2)
    assert code == 1 and "noise" not in out
    assert "on rank 1; what the libraries said is in" in err and "logs/rank_1.log" in err
    assert "Traceback" in err and "no such layer" in err
    assert "Traceback" in (tmp_path / "r" / "logs" / "rank_1.log").read_text()
    status = read_json(tmp_path / "r" / "status.json")
    assert (status["state"], status["step"], status["resumable"]) == ("failed", 1, False)
    assert status["error"] == "error[1] KeyError: 'no such layer'; on rank 1"


@pytest.mark.parametrize(
    ("error", "line"),
    [("UserError('what; where; found; mend')", "error[2] what; where; found; mend"),
     ("KeyError('bug')", "error[1] KeyError: 'bug'; on rank 1")],
)  # fmt: skip
def test_the_status_holds_the_error_of_the_rank_that_failed_first(tmp_path, error, line):
    body = f"""
    world = init_distributed()
    with Run("r", TrackingConfig(), world, config={{}}, num_steps=2) as run:
        run.log(1, {{"x": 1.0}})
        if world.rank == 1:
            raise {error}
        world.gather(None)  # rank 0 fails here, because rank 1 has left
    """
    codes = [code for code, _, _ in run_script(body, tmp_path, ranks=2)]
    status = read_json(tmp_path / "r" / "status.json")
    assert codes == [1, 1] and outcome(status) == ("failed", 1, False, line)


def test_an_error_of_the_input_is_left_to_the_entry_point_and_written_to_the_status(tmp_path):
    with pytest.raises(UserError), open_run(tmp_path / "r"):
        raise UserError("what; where;\nfound; mend")
    status = read_json(tmp_path / "r" / "status.json")
    assert outcome(status) == ("failed", 0, False, "error[2] what; where; found; mend")


def test_ctrl_c_is_a_stop_and_an_error_after_the_end_does_not_undo_the_end(tmp_path):
    with pytest.raises(KeyboardInterrupt), open_run(tmp_path / "a"):
        raise KeyboardInterrupt
    assert read_json(tmp_path / "a" / "status.json")["state"] == "stopped"
    with pytest.raises(ZeroDivisionError), open_run(tmp_path / "b") as run:
        run.finish()
        raise ZeroDivisionError
    assert read_json(tmp_path / "b" / "status.json")["state"] == "finished"


def test_an_older_run_is_refused_and_overwrite_moves_it_aside(tmp_path):
    folder = tmp_path / "my runs" / "über"
    with open_run(folder) as run:
        run.log(7, {"x": 1.0})
        run.finish()
    with pytest.raises(UserError) as refused:
        open_run(folder)
    message = str(refused.value)
    assert all(part in message for part in ("--run-dir", str(folder), "finished at step 7", "--overwrite"))
    assert read_json(folder / "status.json")["step"] == 7
    with open_run(folder, overwrite=True):
        pass
    with open_run(folder, overwrite=True):  # within the same second: a name of its own
        pass
    aside = sorted(path for path in folder.parent.iterdir() if path.name.startswith("über.old-"))
    assert len(aside) == 2 and [read_json(path / "status.json")["step"] for path in aside] == [7, 0]
    assert not (folder / "metrics.jsonl").exists()


def test_a_folder_that_is_no_run_is_neither_used_nor_moved(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"thesis\.tex"):
            open_run(tmp_path, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("path", ["{tmp}/file", "{tmp}/file/run", "/proc/run", "/sys/run", "~nobody_here/run"])
def test_a_folder_that_cannot_be_made_is_a_user_error(tmp_path, path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r".+; .+; .+; .+"):
        open_run(path.format(tmp=tmp_path))


def test_too_little_disk_space_is_told_in_numbers(tmp_path):
    free = shutil.disk_usage(tmp_path).free / 2**30
    with pytest.raises(UserError, match=r"at least 1000000\.00 GiB") as refused:
        open_run(tmp_path / "r", needed_gib=1e6)
    found = re.search(r"found ([\d.]+) GiB free", str(refused.value))
    assert float(found.group(1)) == pytest.approx(free, rel=0.2)  # others write to this disk too
    assert not (tmp_path / "r").exists()


def test_home_and_relative_paths_are_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for path, expected in (("~/a", "a"), ("x/../b c", "b c"), (Path("d"), "d")):
        with open_run(path) as run:
            assert run.dir == tmp_path / expected
    assert not (tmp_path / "x").exists()


def test_metrics_lines_are_valid_json_that_restores_nan_and_infinities(tmp_path):
    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.1 + 0.2, "source\u2028": 1.0}
    with open_run(tmp_path / "r") as run:
        run.log(3, values)
    (line,) = (tmp_path / "r" / "metrics.jsonl").read_text().split("\n")[:-1]
    assert line.startswith('{"step": 3, "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 0.30000000000000004')
    (row,) = read_metrics(tmp_path / "r")
    assert row == pytest.approx({"step": 3, **values}, nan_ok=True, abs=0)


def test_what_is_written_again_is_moved_aside_and_what_is_not_the_runs_stays(tmp_path, capfd):
    folder, samples = tmp_path / "r", tmp_path / "r" / "samples"
    with Run(folder, TrackingConfig(), SINGLE, config={}, num_steps=4) as run:
        for step in (1, 2, 3, 4):
            run.log(step, {"x": math.nan})
            run.save_samples(step, [{"uid": step}])
            run.save_rollouts(step, b"PAR1")
    (samples / "step_4.bak.jsonl").write_text("mine")
    metrics = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(metrics.replace("\n", "\n\n"))  # an editor's blank lines
    Run(folder, TrackingConfig(), SINGLE, config={}, num_steps=4, last_row=2).restore()
    lines = metrics.splitlines(keepends=True)
    assert (folder / "metrics.jsonl").read_text() == "".join(lines[:2])
    [aside] = folder.glob("metrics.jsonl.replaced-*")
    assert aside.read_text() == "".join(lines[2:])
    names = sorted(path.name.split(".replaced-")[0] for path in samples.iterdir())
    assert names == ["step_1.jsonl", "step_2.jsonl", "step_3.jsonl", "step_4.bak.jsonl", "step_4.jsonl"]
    assert sorted(path.name for path in samples.glob("*.jsonl")) == ["step_1.jsonl", "step_2.jsonl", "step_4.bak.jsonl"]
    names = sorted(path.name.split(".replaced-")[0] for path in (folder / "rollouts").iterdir())
    assert names == [f"step_{step}.parquet" for step in (1, 2, 3, 4)]
    assert [step for step, _ in step_files(folder / "rollouts", "parquet")] == [1, 2]
    said = capfd.readouterr().out
    assert f"what the run had written of steps after 2 is moved aside: {aside.name}, samples/step_3.jsonl.rep" in said


@pytest.mark.parametrize("line", ["{", "7", "{}", '{"step": "a"}', "[" * 100_000], ids="{7}a[")
def test_a_damaged_line_of_metrics_is_named_before_anything_is_changed(tmp_path, line):
    folder = tmp_path / "r"
    with Run(folder, TrackingConfig(), SINGLE, config={}, num_steps=4) as run:
        run.log(1, {"x": 1.0})
        run.finish()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(line + "\n")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"damaged; .*metrics.jsonl; found .* in line 2, expected"):
        Run(folder, TrackingConfig(), SINGLE, config={}, num_steps=4, last_row=0)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_newest_fifty_files_of_rollouts_stay(tmp_path):
    with open_run(tmp_path / "r") as run:
        (run.dir / "rollouts" / "step_3.mine.parquet").write_text("mine")
        for step in (1, *range(5, 300, 5)):
            run.save_rollouts(step, b"PAR1")
        run.save_rollouts(300, b"")  # a step that was skipped
    kept = [step for step, _ in step_files(tmp_path / "r" / "rollouts", "parquet")]
    assert kept == list(range(50, 300, 5))
    assert (tmp_path / "r" / "rollouts" / "step_3.mine.parquet").exists()


def test_samples_are_appended_and_those_to_be_shown_stand_below_the_steps_numbers(tmp_path, capfd):
    row = {"uid": 1, "data_source": "s", "prompt": "1+1\n=", "response": "2" * 100, "ground_truth": "2"}
    row |= {"score": None, "extras": {"acc": math.nan}, "finish_reason": "length"}
    with open_run(tmp_path / "r") as run:
        run.save_samples(5, [row, row])
        run.show_samples([row])
        run.save_samples(5, [{**row, "response": "é \udc80"}])
        run.log(5, {"val-core/s/acc/mean@1": 0.25})
        run.log(6, {"val-core/s/acc/mean@1": 0.5})
    lines = (tmp_path / "r" / "samples" / "step_5.jsonl").read_text().splitlines()
    read = [json.loads(line) for line in lines]
    assert read[0] == {**row, "extras": {"acc": "NaN"}} and read[2]["response"] == "é \udc80"
    assert "é" in lines[2]
    said = capfd.readouterr().out.splitlines()
    place = said.index("samples of validation at step 5")
    assert said[place - 1].split() == ["s", "acc/mean@1", "0.250"]
    assert said[place + 1] == "  s | 1+1 =" and said[place + 2].startswith("    -> 222") and len(said[place + 2]) <= 100
    assert said[place + 3] == "validation at step 6" and said[-1].split()[-4:] == ["+0.250", "since", "step", "5"]


def test_what_a_terminal_would_obey_reaches_it_as_text(tmp_path, capfd):
    harmful = "\x1b[2J\x07\r\x9b31m \ud800 \u202e"
    row = {"uid": 1, "data_source": "s", "prompt": harmful, "response": harmful, "ground_truth": harmful}
    row |= {"score": 1.0, "extras": {harmful: 1.0}, "finish_reason": harmful}
    with pytest.raises(KeyError), open_run(tmp_path / "r") as run:
        run.say(f"two\nlines {harmful}")
        run.say_once("topic", "once")
        run.say_once("topic", "twice")
        run.log(1, {"val-core/\x1b[2J/\x1b[2J/mean@1": 1.0, "critic/score/mean": 1.0})
        run.save_samples(1, [row])
        run.show_samples([row])
        run.log(2, {"critic/score/mean": 1.0})
        raise KeyError(harmful)
    with pytest.raises(SystemExit), reporting_errors():
        raise UserError(f"bad; {harmful}")
    with pytest.raises(SystemExit), reporting_errors():
        raise RuntimeError(harmful)
    out, err = capfd.readouterr()
    assert "two\nlines \\x1b[2J\\x07\\r\\x9b31m \\ud800 \\u202e\n" in out
    assert out.count("once") == 1 and "twice" not in out
    assert "error[2] bad; \\x1b[2J" in err and "RuntimeError: \\x1b[2J" in err
    assert all(sign.isprintable() or sign == "\n" for sign in out + err)


def test_no_secret_of_the_environment_reaches_a_file_or_the_terminal(tmp_path, capfd, monkeypatch):
    canary = "canary-2f9c41d7"
    monkeypatch.setenv("HF_TOKEN", canary)
    monkeypatch.setenv("SHORT_KEY", "abc")
    row = {"uid": 1, "data_source": "s", "prompt": canary, "ground_truth": [canary], "score": 1.0}
    row["response"] = "r" * 20 + canary + "r" * 30  # of which the terminal shows both ends
    config = {"url": f"https://{canary}@host", "eos_token": "abc"}
    with pytest.raises(KeyError), open_run(tmp_path / "r", config=config) as run:
        run.say(f"say {canary}")
        run.save_samples(1, [{**row, "extras": {canary: canary}, "finish_reason": "stop"}])
        run.show_samples([{**row, "finish_reason": "stop"}])
        run.log(1, {"critic/score/mean": 1.0})
        raise KeyError(f"bad {canary}")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    out, err = capfd.readouterr()
    assert len(files) == 7 and "say [HF_TOKEN]" in out
    assert not [path for path in files if canary.encode() in path.read_bytes()]
    assert canary[:8] not in out + err
    assert read_json(tmp_path / "r" / "config.json")["eos_token"] == "abc"


def test_wandb_is_asked_for_at_the_start_only_where_it_is_installed(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()  # what an offline run leaves behind is not the package
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(UserError, match="pip install wandb"):
        Run(tmp_path / "r", TrackingConfig(wandb_project="p"), SINGLE, config={}, num_steps=1)
    assert not (tmp_path / "r").exists()


def test_wandb_offline_gets_the_metrics_and_no_key_nor_command_line(tmp_path):
    pytest.importorskip("wandb")
    body = """
    sys.argv.append("--canary-argument")
    cfg = TrackingConfig(wandb_project="p", name="n")
    with Run("r", cfg, SINGLE, config={"seed": 12345}, num_steps=1) as run:
        run.log(1, {"critic/score/mean": 0.5})
        run.finish()
    """
    canary = "0123456789abcdef" * 2 + "canary42"
    env = {"WANDB_MODE": "offline", "WANDB_API_KEY": canary}
    ((code, out, err),) = run_script(body, tmp_path, env=env)
    assert code == 0 and len(out.splitlines()) == 3 and err == "", out + err
    content = b"".join(path.read_bytes() for path in (tmp_path / "r").rglob("*") if path.is_file())
    assert b"critic/score/mean" in content and b"12345" in content
    assert canary.encode() not in content and b"canary-argument" not in content


def test_wandb_gets_no_secret_in_config_or_name(tmp_path, monkeypatch):
    """A stand-in for the package: it is not in the tests' environment."""
    (tmp_path / "wandb.py").write_text(
        "class Error(Exception): ...\nclass Settings(dict): ...\nclass Run:\n    def finish(self, exit_code): ...\n"
        "def init(**told):\n    global found\n    found = told\n    return Run()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("HF_TOKEN", "canary-2f9c41d7")
    config = {"reward": {"url": "https://me:hunter2@host", "note": "with canary-2f9c41d7"}}
    cfg = TrackingConfig(wandb_project="p", name="of canary-2f9c41d7")
    Run(tmp_path / "r", cfg, SINGLE, config=config, num_steps=1).restore()
    told = sys.modules.pop("wandb").found
    assert told["config"] == {"reward": {"url": "https://me:[password]@host", "note": "with [HF_TOKEN]"}}
    assert (told["project"], told["name"]) == ("p", "of [HF_TOKEN]")


def test_ranks_that_fail_at_one_moment_write_their_status_to_files_of_their_own(tmp_path, monkeypatch):
    run, fsync = open_run(tmp_path / "r"), os.fsync
    other = copy.copy(run)
    other.world, other._lock = replace(SINGLE, rank=1), None

    def after_the_other(file):
        monkeypatch.setattr(os, "fsync", fsync)
        other.fail(UserError("of rank 1"))
        assert outcome(read_status(run.dir))[3] == "error[2] of rank 1"
        fsync(file)

    monkeypatch.setattr(os, "fsync", after_the_other)
    run.fail(UserError("of rank 0"))
    assert outcome(read_status(run.dir)) == ("failed", 0, False, "error[2] of rank 0")  # the last one
    assert not list(run.dir.glob(".status*"))


@pytest.mark.parametrize("value", ["", "  ", "a\nb"])
def test_names_must_be_printable(value):
    with pytest.raises(UserError, match=r"--tracking\.wandb-project"):
        TrackingConfig(wandb_project=value)


def test_the_learning_curve_is_drawn_from_any_history(tmp_path):
    histories = {
        "empty": [],
        "training only": [{"step": step, "critic/score/mean": step / 50} for step in range(1, 50)],
        "gaps": [{"step": 0, "val-core/openai/gsm8k/acc/best@4/mean": math.nan}, {"step": 1, "x": 1.0}],
    }
    for name, history in histories.items():
        plot_learning_curve(history, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
