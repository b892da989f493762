"""Errors for people. Each class carries the exit code that every rank ends with.

A message has four parts, separated by semicolons: what is wrong; where; found and expected; how to mend it. Anything
that is not one of these classes is a bug of ours (exit code 1) and keeps its traceback.
"""

import errno
from typing import Any, Self

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What an OSError says where there is no room: on the disk, in a quota, below a limit on file sizes."""

FULL_GPU = (
    "a GPU's memory is full: lower --rollout.gpu-memory-utilization, the engine's share of it, or --max-tokens-per-gpu "
    "where the update was at work; set --model.gradient-checkpointing True or --fsdp.optimizer-offload True; take more "
    "GPUs; or train adapters (--lora.rank 32)"
)


class LockstepError(Exception):
    """A failure with a message for people: shown as one line, without a traceback unless --debug is given."""

    code = 1
    together = False
    """Whether every rank is known to raise it at the same place, so that collectives are possible afterwards."""

    def on_all_ranks(self) -> Self:
        """The same error, raised by every rank: `raise UserError(...).on_all_ranks()`."""
        self.together = True
        return self


class UserError(LockstepError):
    """The input is wrong: a flag, a file, a model folder, a launch environment. Exit code 2."""

    code = 2


class LaunchError(UserError):
    """The ranks could not meet, so none knows whether another one tells why. Exit code 2."""


class NoSpace(UserError):
    """The disk is full, or a quota; what was there before is untouched, so a run may go on. Exit code 2."""


class DamagedCheckpoint(LockstepError):
    """A checkpoint is incomplete or was changed after it was written. Exit code 3."""

    code = 3


class RewardError(LockstepError):
    """The user's reward code failed, or failed too often. Exit code 4."""

    code = 4


class WeightSyncError(LockstepError):
    """The engine does not hold the policy's weights. Exit code 1: never the user's fault, and never to be ignored."""


class RankKilled(LockstepError):
    """A signal has killed another rank; the rank that raises it has told so. Exit code 1: the cause is not known."""


class Stopped(Exception):
    """The run was asked to stop, by a signal or a time limit: no failure. `code` is what every rank exits with."""

    def __init__(self, reason: str, code: int = 0) -> None:
        super().__init__(reason)
        self.code = code


def check_fields(config: Any, section: str, **rules: tuple[bool, str]) -> None:
    """Raises UserError for the first field whose rule, (whether it holds, in words), does not: `--SECTION.FIELD`."""
    for name, (ok, rule) in rules.items():
        if not ok:
            flag = f"--{section}{name.replace('_', '-')}"
            raise UserError(f"{flag} is out of range; found {getattr(config, name)!r}, expected {rule}; change {flag}")


def error_line(error: LockstepError) -> str:
    """The one line that rank 0 prints: `error[2] what; where; found, expected; how to mend it`."""
    return printable(f"error[{error.code}] " + " ".join(str(error).split()))


def bug_line(error: Exception) -> str:
    """The one line for an exception that is none of these classes, with a remedy where a GPU's memory was full."""
    remedy = f"; {FULL_GPU}" if type(error).__name__ == "OutOfMemoryError" else ""  # torch's
    return " ".join(f"error[1] {type(error).__name__}: {error}{remedy}".split())


def printable(text: str) -> str:
    """The text, with escapes for what a terminal would obey or could not show: control codes other than the newline,
    halves of surrogate pairs."""
    return "".join(sign if sign.isprintable() or sign == "\n" else repr(sign)[1:-1] for sign in text)
