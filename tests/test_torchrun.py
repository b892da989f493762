"""Claims about torchrun's report: it ends with our line, and after a stop with the command that goes on."""

import json
import os
import shlex
import signal
import subprocess
import sys

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from lib.errors import FULL_GPU
from lib.torchrun import ERROR_FILE, leave_word
from tests.ranks import LIMIT_S, ROOT, Job, torchrun

HEADER = """
import sys
from lib.config.reporting import reporting_errors
from lib.dist import init_distributed, shutdown_distributed
from lib.errors import Stopped, UserError
with reporting_errors():
    world = init_distributed()
"""


def last_lines(stderr: str) -> list[str]:
    """What stands below the heading of the report's last field, less the border that ends it."""
    *lines, border = stderr.rstrip().splitlines()
    assert set(border) == {"="}
    heading = max(place for place, line in enumerate(lines) if line.startswith("  traceback :"))
    return [line.strip() for line in lines[heading + 1 :]]


def test_the_word_of_a_rank_is_the_end_of_torchruns_report(tmp_path, monkeypatch):
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    monkeypatch.setenv("MY_API_KEY", "canary-2f9c41d7")
    leave_word("error[2] what; where \x1b[2J canary-2f9c41d7\nsecond line")
    told = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(tmp_path / "error.json"))
    other = ProcessFailure(local_rank=1, pid=2, exitcode=2, error_file="<N/A>")
    other.timestamp += 1
    report = str(ChildFailedError("script.py", {1: other, 0: told}))
    assert last_lines(report) == ["error[2] what; where \\x1b[2J [MY_API_KEY]", "second line"]
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "no" / "folder"))
    leave_word("cannot be written")


def test_the_command_is_the_one_that_was_typed_with_more_behind_it():
    code = "from lib.torchrun import command; print(command('--overwrite', 'False'))"
    typed = [sys.executable, "-c", code, "--x", "it's a word"]
    done = subprocess.run(typed, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert shlex.split(done.stdout) == [*typed, "--overwrite", "False"], done.stderr


@pytest.mark.parametrize(
    ("body", "code", "expected"),
    [
        ("raise UserError('what; where; found, expected; mend it').on_all_ranks()", 2,
         "error[2] what; where; found, expected; mend it"),
        ("if world.rank == 1: raise KeyError('a bug')\n    import time; time.sleep(1e6)", 1,
         "error[1] KeyError: 'a bug'"),
        ("import torch; raise torch.OutOfMemoryError('CUDA out of memory.\\nTried')", 1,
         f"error[1] OutOfMemoryError: CUDA out of memory. Tried; {FULL_GPU}"),
    ],
)  # fmt: skip
def test_an_error_is_the_last_thing_that_torchrun_says(tmp_path, body, code, expected):
    (tmp_path / "script.py").write_text(f"{HEADER}    {body}\n")
    done = torchrun(2, str(tmp_path / "script.py"), PYTHONPATH=str(ROOT))
    assert done.returncode == 1 and f"exitcode  : {code} " in done.stderr
    assert last_lines(done.stderr) == [expected], done.stderr


def test_after_a_stop_by_a_signal_to_a_rank_the_last_thing_is_the_command_that_goes_on(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"{HEADER}    import json, os, pathlib, time\n"
        "    from lib.stopping import Stopper\n"
        "    from lib.tracking import Run, TrackingConfig\n"
        f"    folder = pathlib.Path({str(tmp_path)!r})\n"
        "    stopper = Stopper(world)\n"
        "    run = Run(folder / 'run', TrackingConfig(), world, config={}, num_steps=9, overwrite=True)\n"
        "    with run, stopper:\n"
        "        run.step, run.resumable = 4, True\n"
        "        (folder / f'{world.rank}.json').write_text(str(os.getpid()))\n"
        "        with stopper.together():\n"
        "            while not stopper.requested(): time.sleep(0.01)\n"
    )
    with Job(2, str(script), "--note", "two words", PYTHONPATH=str(ROOT)) as running:
        running.until(lambda: all((tmp_path / f"{rank}.json").exists() for rank in (0, 1)))
        pid = json.loads((tmp_path / "1.json").read_text())
        os.kill(pid, signal.SIGTERM)
        assert running.wait() == 1
        stopped, go_on = last_lines(running.stderr)
        assert stopped == "stopped after step 4 of 9: SIGTERM on rank 1; it can be resumed"
        assert go_on.startswith("go on with: ") and go_on.endswith(f"{script} --note 'two words' --overwrite False")
        assert go_on in running.stdout
        words = shlex.split(go_on.removeprefix("go on with: "))
        assert words[1:4] == ["-m", "torch.distributed.run", "--nproc_per_node=2"]
