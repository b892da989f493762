"""What a rank knows of the torchrun that started it, and the last word that it leaves with it."""

import json
import os
import shlex
import time
from contextlib import suppress
from pathlib import Path

from lib.errors import printable
from lib.secret_values import blank_message

ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
"""How often torchrun has restarted the ranks; it alone sets this variable."""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # https://docs.pytorch.org/docs/stable/elastic/errors.html


def under_torchrun() -> bool:
    return ATTEMPT in os.environ


def leave_word(text: str) -> None:
    """Has torchrun end its report of a failed rank, some 25 lines which come after all of ours, with this text.

    It is the file that torchrun gives each rank for that. torchrun reports the rank that failed first in full, and
    writes nothing where all ranks end with code 0. Where torchrun itself got the signal, it ends with a traceback of
    its own, and reports no rank.
    """
    if path := os.environ.get(ERROR_FILE):
        told = {"message": f"\n{printable(blank_message(text))}", "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):  # on a full disk the exit code must still be the error's
            Path(path).write_text(json.dumps({"message": told}), encoding="utf-8")


def command(*more: str) -> str:
    """The command line that started this run, as a shell reads it, with more words behind it."""
    return shlex.join([*command_words(), *more])


def command_words() -> list[str]:
    """The words of the command line that started this run, torchrun's where there is one."""
    pid = os.getppid() if under_torchrun() else os.getpid()
    words = [os.fsdecode(word) for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]]
    if len(words) > 1 and Path(words[1]).name == "torchrun":  # a script, and its interpreter before it
        words = ["torchrun", *words[2:]]
    return words
