"""How a process ends by an error: one line, printed once, and the error's exit code on every rank."""

import os
import signal
import sys
import time
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TextIO

from lib.config.words import wants_debug
from lib.errors import FULL_GPU, LaunchError, LockstepError, RankKilled, Stopped, bug_line, error_line, printable
from lib.secret_values import blank_message
from lib.torchrun import ATTEMPT, leave_word, under_torchrun

LEAVE_TIMEOUT_S = 15.0  # for ranks that are slow to fail in the same way, while they import


@contextmanager
def reporting_errors(*, debug: bool = False) -> Iterator[None]:
    """Ends the process as the contract says: rank 0 prints one line, and every rank exits with the error's code.

    Writes to the standard error stream as it is on entry, even if file descriptor 2 is moved to a log file inside.
    With `debug`, and for any exception that is a bug of ours (exit code 1), every rank prints its traceback.
    """
    terminal = _copy_of_stderr()

    def tell(text: str) -> None:
        with suppress(OSError):  # into a file on a full disk: the exit code must still be the error's
            print(printable(blank_message(text)), file=terminal, flush=True)

    try:
        yield
    except RankKilled as error:  # it is told; no rank waits for one that cannot come
        leave_word(error_line(error))
        raise SystemExit(error.code) from error
    except LockstepError as error:
        if debug:
            tell(traceback.format_exc())
        leave_word(error_line(error))  # every rank's own: torchrun reports whichever it saw end first
        told = is_first_rank() or (isinstance(error, LaunchError) and not under_torchrun())
        if told:
            tell(error_line(error))
        if not _leave_together() and not told:  # this rank failed alone: no other will say why
            tell(error_line(error))
        raise SystemExit(error.code) from error
    except Stopped as error:  # all ranks raise it together, and the run has said why
        _leave_together()
        raise SystemExit(error.code) from error
    except KeyboardInterrupt as error:
        raise SystemExit(130) from error
    except Exception as error:
        tell(traceback.format_exc())
        leave_word(line := bug_line(error))
        if FULL_GPU in line:
            tell(line)
        raise SystemExit(1) from error
    finally:
        if terminal is not sys.stderr:
            with suppress(OSError):
                terminal.close()


def _end_by_the_contract(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """For `sys.excepthook`: a LockstepError outside `reporting_errors`, as a recipe's config raises it at import."""
    if isinstance(error, LockstepError) and not hasattr(sys, "ps1"):  # at a prompt, Python must not end
        with reporting_errors(debug=wants_debug(sys.argv)):
            raise error
    _previous_hook(kind, error, trace)


_previous_hook, sys.excepthook = sys.excepthook, _end_by_the_contract


def _copy_of_stderr() -> TextIO:
    try:
        return os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1, errors="backslashreplace")
    except OSError:  # a stream without a file descriptor, as in a notebook
        return sys.stderr


def _leave_together() -> bool:
    """Waits until all of torchrun's ranks come here; False when rank 0 has not come after some seconds.

    torchrun kills the other ranks as soon as one has ended: without the wait, rank 0 could die before it has printed
    the error, and ranks would end with the signal's code instead of the error's.
    """
    import torch.distributed as torch_dist

    size = int(os.environ["WORLD_SIZE"]) if under_torchrun() else 1
    if size > 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        attempt = os.environ[ATTEMPT]
        present, first = f"lockstep/{attempt}/leaving", f"lockstep/{attempt}/rank_0_leaving"
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        try:
            store = torch_dist.TCPStore(  # torchrun's own; it outlives the ranks
                os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=LEAVE_TIMEOUT_S)
            )
            store.add(first, int(is_first_rank()))
            store.add(present, 1)
            while store.add(present, 0) < size:
                if time.monotonic() > deadline:
                    return store.add(first, 0) > 0
                time.sleep(0.05)
        except RuntimeError:  # no such store: torchrun itself is ending
            return True
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()  # all ranks are here; NCCL complains when the process ends without it
    return True


def is_first_rank() -> bool:
    """Whether this is rank 0, or the only one; asked before the ranks meet."""
    return os.environ.get("RANK", "0") == "0"
