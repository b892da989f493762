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
from lib.torchrun import ATTEMPT

TIMEOUT = timedelta(minutes=60)  # a replica may wait this long for the slowest rollout of another
JOIN_TIMEOUT = timedelta(minutes=2)  # for a scheduler's ranks; torchrun has its own limit
HAND_TIMEOUT = timedelta(seconds=15)  # for ranks started by hand
SCHEDULERS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")  # what starts ranks sets one of these
REST_TIMEOUT_S = 5.0  # at the very end; a thread that still works then waits for a rank that will never come
PR_SET_PDEATHSIG = 1
GLOO_THREAD = "pt_gloo_runloop"
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

    def gather_to_rank_0(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on rank 0, nothing elsewhere. For larger objects that it alone writes."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        torch_dist.gather_object(value, values, dst=0, group=None)
        return values or []

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
        os.environ["MASTER_PORT"] = "0"  # at which no process listens
    rank, size, local_rank = _read_launch_environment()
    settle_elementwise()
    # Where torchrun is killed, no other process would end its ranks.
    if ATTEMPT in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ["USE_HUB_KERNELS"] = "NO"  # transformers would download code and run it
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
    them any more; a DeviceMesh does. A pause gives the lock away, which wakes a thread that waits for it: so all rest
    where none has moved in several pauses.
    """
    deadline, rests, before = time.monotonic() + REST_TIMEOUT_S, 0, None
    while rests < 3 and (threads := _gloo_threads()) and time.monotonic() < deadline:
        all_sleep = all(state == "S" for state, _ in threads.values())
        rests, before = rests + 1 if all_sleep and threads == before else 0, threads
        time.sleep(0.002)


def _gloo_threads() -> dict[str, tuple[str, str]]:
    """{id: (state, how often it has waited)} of this process's Gloo threads, as Linux notes them: S sleeps, R runs or
    waits for a processor."""
    threads = {}
    for task in Path("/proc/self/task").glob("*/status"):
        with suppress(OSError):  # it has ended
            noted = dict(line.split(":\t", 1) for line in task.read_text().splitlines() if ":\t" in line)
            if noted["Name"] == GLOO_THREAD:
                threads[task.parent.name] = (noted["State"][0], noted.get("voluntary_ctxt_switches", ""))
    return threads


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
    """Makes the process group. Raises LaunchError when the ranks do not meet at MASTER_ADDR and MASTER_PORT."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    try:
        if ATTEMPT in os.environ:
            store = _torchruns_store(rank, size, address, port)
        elif size > 1:
            store = _store_of_ranks(rank, size, address, port)
        else:  # no rank to meet: nothing listens on the network
            store = torch_dist.HashStore()
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        store.set_timeout(TIMEOUT)
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


def _torchruns_store(rank: int, size: int, address: str, port: str) -> torch_dist.Store:
    _check_address(address, port)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun listens there: else it is gone already
        socket.create_connection((address, int(port)), timeout=JOIN_TIMEOUT.total_seconds()).close()
    return next(torch_dist.rendezvous("env://", rank, size, timeout=JOIN_TIMEOUT))[0]


def _store_of_ranks(rank: int, size: int, address: str, port: str) -> torch_dist.Store:
    """The store that rank 0 holds, once all ranks are there. Raises LaunchError with those that have not come."""
    _check_address(address, port)
    limit = JOIN_TIMEOUT if any(name in os.environ for name in SCHEDULERS) else HAND_TIMEOUT
    deadline = time.monotonic() + limit.total_seconds()
    places, missing = [f"lockstep/here/{each}" for each in range(size)], [0]  # until rank 0's store is found
    store = None
    while missing and time.monotonic() < deadline:
        with suppress(ConnectionRefusedError, TimeoutError):
            if rank != 0 and store is None:  # torch would tell of every attempt
                socket.create_connection((address, int(port)), timeout=limit.total_seconds()).close()
            if store is None:
                store = torch_dist.TCPStore(address, int(port), size, rank == 0, timeout=limit, wait_for_workers=False)
                store.set(places[rank], "")
            missing = [] if store.check(places) else [each for each in range(size) if not store.check([places[each]])]
        time.sleep(0.1 if missing else 0)
    if missing:
        who = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing[:8]))}{', ...' * (len(missing) > 8)}"
        raise LaunchError(
            f"not all ranks have come; rank {rank} of {size}, MASTER_ADDR={address}, MASTER_PORT={port}; found no "
            f"{who} after {limit.total_seconds():g} s, expected all {size}; start them together, with torchrun "
            f"--nproc_per_node=N or a scheduler ({JOIN_TIMEOUT.total_seconds():g} s), or unset RANK, WORLD_SIZE and "
            "LOCAL_RANK to run as one rank"
        )
    return store


def _check_address(address: str, port: str) -> None:
    if not port.isdecimal():
        raise ValueError("no port number")
    socket.getaddrinfo(address, int(port))  # torch would try an unknown name again until its time is over
