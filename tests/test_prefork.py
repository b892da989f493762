"""A fork of an image is what torchrun's rank is: its variables, words, exit code, and nothing of another launch."""

import json
import os

from tests.prefork import prefork
from tests.ranks import torchrun

TELL = """
import json, os, sys
import beside
words = ("TORCH", "RANK", "WORLD", "MASTER")
told = {name: value for name, value in os.environ.items() if any(word in name for word in words)}
about = [sys.argv, __name__, os.getcwd(), os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()]
with open(f"{sys.argv[1]}_{os.environ['RANK']}.json", "w") as file:
    json.dump([told, about, os.environ.get("OF_ONE")], file)
"""
ENDS = """
import os, sys, time
if os.environ["RANK"] == "0":
    time.sleep(600)
sys.exit(3)
"""
OWN = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
"""What each launch has of its own; torchrun's error file only its record decorator reads."""


def test_a_rank_is_told_what_torchrun_tells_it_and_nothing_of_the_launch_before(tmp_path):
    (tmp_path / "tell.py").write_text(TELL)
    (tmp_path / "beside.py").touch()
    found = {}
    for name, launch in (("torchrun", torchrun), ("fork", prefork), ("again", prefork)):
        env = {"OF_ONE": "1"} if name == "fork" else {}
        done = launch(2, str(tmp_path / "tell.py"), str(tmp_path / "told"), cwd=tmp_path, **env)
        assert done.returncode == 0, done.stderr
        found[name] = [json.loads((tmp_path / f"told_{rank}.json").read_text()) for rank in range(2)]
    for rank in range(2):
        (theirs, their_about, _), (ours, about, of_one), (_, _, nothing) = (told[rank] for told in found.values())
        assert {**ours, **dict.fromkeys(OWN, "")} == {**theirs, **dict.fromkeys(OWN, "")}
        assert about == their_about and (of_one, nothing) == ("1", None)
    assert len({told[0]["TORCHELASTIC_RUN_ID"] for launch in found.values() for told in launch}) == 3
    assert "RANK" not in os.environ


def test_the_others_are_ended_when_a_rank_fails(tmp_path):
    (tmp_path / "ends.py").write_text(ENDS)
    done = prefork(2, str(tmp_path / "ends.py"))
    assert (done.codes, done.returncode, done.stdout) == ([-15, 3], 1, "")
    (tmp_path / "raises.py").write_text("print('here')\nraise SystemExit('a message')")
    done = prefork(0, str(tmp_path / "raises.py"))
    assert (done.codes, done.returncode, done.stdout, done.stderr) == ([1], 1, "here\n", "a message\n")
