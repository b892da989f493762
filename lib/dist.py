"""Ranks: who we are, and the few collectives through which ranks meet. Everything else is local.

A rank never raises, continues or returns alone: `World.agree` runs a check on every rank and makes all of them raise
the same error. A world of size 1 needs no process group for any method here.
"""

import atexit
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

from lib.errors import LaunchError, LockstepError, UserError

TIMEOUT = timedelta(minutes=60)  # a replica may wait this long for the slowest rollout of another
JOIN_TIMEOUT = timedelta(minutes=2)  # for ranks started by hand; torchrun has its own limit
REST_TIMEOUT_S = 5.0  # at the very end; a thread that still works then waits for a rank that will never come
PR_SET_PDEATHSIG = 1
GLOO_THREAD = "pt_gloo_runloop"
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"  # how often torchrun has restarted the ranks; it alone sets it
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True)
class World:
    """This process among its peers. `device` is the rank's GPU, or the CPU."""

    rank: int
    size: int
    device: torch.device

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank. For small Python objects; pickles between our own ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        torch_dist.all_gather_object(values, value, group=None)
        return values

    def sum(self, tensor: Tensor) -> Tensor:
        """The element-wise sum over ranks, on every rank. The input is left alone."""
        return self._reduce(tensor, torch_dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """The element-wise maximum over ranks, on every rank. The input is left alone."""
        return self._reduce(tensor, torch_dist.ReduceOp.MAX)

    def all_agree(self, flag: bool) -> bool:
        """True when the flag is True on every rank."""
        return int(self.max(torch.tensor(0 if flag else 1))) == 0

    def agree(self, check: Callable[[], Any]) -> Any:
        """The check's result; if it raises a LockstepError on any rank, every rank raises it.

        The message names the rank when the ranks differ. Executed by all ranks; `check` must hold no collective.
        """
        result, error = None, None
        try:
            result = check()
        except LockstepError as caught:
            error = caught
        if self.size == 1:
            if error is not None:
                raise error.on_all_ranks()
            return result
        raised = self.gather(None if error is None else (type(error), str(error)))
        failed = [(rank, *entry) for rank, entry in enumerate(raised) if entry is not None]
        if not failed:
            return result
        rank, kind, text = failed[0]
        same = len({entry[2] for entry in failed}) == 1
        everywhere = len(failed) == self.size and same
        where = "" if everywhere else f" (on rank {rank}; {len(failed)} of {self.size} ranks failed)"
        raise kind(text + where).on_all_ranks()

    def on_rank_0(self, action: Callable[[], Any]) -> Any:
        """Rank 0's result of the action, on every rank; if it raises a LockstepError there, every rank raises it.

        Executed by all ranks; only rank 0 acts, and the action must hold no collective.
        """
        result, raised = None, None
        if self.rank == 0:
            try:
                result = action()
            except LockstepError as error:
                raised = error
        result, raised = self.gather((result, raised))[0]
        if raised is not None:
            raise raised.on_all_ranks()
        return result

    def _reduce(self, tensor: Tensor, op: Any) -> Tensor:
        result = tensor.clone()
        if self.size > 1:
            torch_dist.all_reduce(result, op=op)
        return result


SINGLE = World(rank=0, size=1, device=torch.device("cpu"))
"""A world of one rank on the CPU, for pure functions and their tests."""


@cache
def init_distributed() -> World:
    """Joins the process group that torchrun described; without torchrun, a group of one rank. Once: later calls give
    the same World. From here on a rank of torchrun's dies with it.

    Raises LaunchError when the environment contradicts itself or the ranks cannot meet, UserError when there are more
    ranks than GPUs.
    """
    if not any(name in os.environ for name in LAUNCH_VARIABLES):
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ["MASTER_PORT"] = "0"  # any that is free: `_join` writes down which
    rank, size, local_rank = _read_launch_environment()
    settle_elementwise()
    if ATTEMPT in os.environ and sys.platform == "linux":  # where torchrun is killed, nobody else would end its ranks
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # what matters in its warnings is an error of ours
    if torch.cuda.is_available():
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
        if num_local > torch.cuda.device_count():  # every rank of the node sees the same numbers, and raises
            raise UserError(
                f"more ranks than GPUs; torchrun --nproc_per_node={num_local}; found {torch.cuda.device_count()} GPUs "
                f"on this node, expected one for each rank; start at most {torch.cuda.device_count()} ranks a node"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        _join(rank, size, backend="cpu:gloo,cuda:nccl", device=device)
    else:
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # nothing is compiled on a CPU, so no compiler is needed
        device = torch.device("cpu")
        _join(rank, size, backend="gloo", device=None)
    return World(rank=rank, size=size, device=device)


def settle_elementwise() -> None:
    """Lets MKL find out which processor this is while one thread alone asks.

    It does so in the process's first exp, cos, sqrt or the like of a CPU tensor. Where several threads share that call,
    as in the first pass over a batch, one of them may compute with half the precision, once and without a word:
    numbers off by 1e-4 (https://github.com/pytorch/pytorch/issues/188792).
    """
    torch.ones(1).exp()


def shutdown_distributed() -> None:
    """Leaves the process group."""
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()
        init_distributed.cache_clear()


@atexit.register
def _wait_for_gloo() -> None:
    """Waits until Gloo's threads rest, before the interpreter ends.

    After a collective such a thread frees its tensors, and where Python has known them it needs Python's lock. From an
    ending interpreter it gets no lock: the process aborts, and a run that has finished seems to have failed
    (https://github.com/pytorch/pytorch/issues/190489). Destroying the groups ends the threads only where nothing holds
    them any more; a DeviceMesh does. The pauses give the lock away; three rests in a row, because a thread that waits
    for it looks as if it rested until it is handed over.
    """
    deadline, rests = time.monotonic() + REST_TIMEOUT_S, 0
    while rests < 3 and (states := _gloo_states()) and time.monotonic() < deadline:
        rests = rests + 1 if states == {"S"} else 0
        time.sleep(0.002)


def _gloo_states() -> set[str]:
    """The states of this process's Gloo threads, as Linux names them: S sleeps, R runs or waits for a processor."""
    states = set()
    for task in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # it has ended
            text = task.read_text()  # 1989 (pt_gloo_runloop) S ...
            if f"({GLOO_THREAD})" in text:
                states.add(text.rpartition(")")[2].split()[0])
    return states


def _read_launch_environment() -> tuple[int, int, int]:
    values = [os.environ.get(name, "") for name in LAUNCH_VARIABLES]
    found = ", ".join(f"{name}={value or 'unset'}" for name, value in zip(LAUNCH_VARIABLES, values, strict=True))
    try:
        rank, size, local_rank = (int(value) for value in values)
    except ValueError:
        rank, size, local_rank = -1, 0, 0
    if not 0 <= rank < size or not 0 <= local_rank <= rank:
        raise LaunchError(
            f"the launch environment contradicts itself; {found}; expected 0 <= LOCAL_RANK <= RANK < WORLD_SIZE; "
            "start with torchrun --nproc_per_node=N, or unset these variables to run as one rank"
        )
    return rank, size, local_rank


def _join(rank: int, size: int, *, backend: str, device: torch.device | None) -> None:
    """Makes the process group at MASTER_ADDR and MASTER_PORT. Raises LaunchError when the ranks do not meet there."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    try:
        if not port.isdecimal():
            raise ValueError("no port number")
        socket.getaddrinfo(address, int(port))  # torch would try an unknown name again until its time is over
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun listens there: else it is gone already
            socket.create_connection((address, int(port)), timeout=JOIN_TIMEOUT.total_seconds()).close()
        store, _, _ = next(torch_dist.rendezvous("env://", rank, size, timeout=JOIN_TIMEOUT))
        store.set_timeout(TIMEOUT)
        if int(port) == 0:  # looked for beforehand, another process could take it before the store does
            os.environ["MASTER_PORT"] = str(store.port)
        attempt = os.environ.get(ATTEMPT, "0")  # in torchrun's store restarted ranks find the old addresses
        torch_dist.init_process_group(
            backend,
            store=torch_dist.PrefixStore(f"default_pg/{attempt}", store),
            rank=rank,
            world_size=size,
            timeout=TIMEOUT,
            device_id=device,
        )
    except (OSError, RuntimeError, ValueError, OverflowError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise LaunchError(
            f"the ranks cannot meet; rank {rank} of {size}, MASTER_ADDR={address or 'unset'}, "
            f"MASTER_PORT={port or 'unset'}; found {reason}, expected an address of rank 0's machine that all ranks "
            "reach, and a port that is free there; start with torchrun --nproc_per_node=N, or choose another port"
        ) from error
