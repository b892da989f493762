"""Scores for responses, from reward functions in worker processes that can be killed.

A response is sent to a worker as soon as its group is generated; `Scorer.collect` waits for the rest. One thread
serves all workers and sleeps in `select` meanwhile, so generation keeps the interpreter. A worker that takes longer
than the limit, exits or crashes is replaced; its response gets no score, but the error's text. One that has grown too
large is replaced between two responses.

Deliberately absent: threads or alarms as time limits (sympy and `except Exception` swallow them), a shared process
pool (a few hung jobs block it), a sandbox (the reward file is the operator's code), a score of 0 for a failure.
"""

import json
import math
import os
import pickle
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lib.config.values import JsonObject
from lib.data.parquet import resolve_file
from lib.dist import World
from lib.errors import RewardError, Stopped, UserError, check_fields
from lib.rewards.keeper import END
from lib.rewards.last_number import DIFFICULTIES, PREFIX
from lib.rewards.worker import ARGUMENTS, frame
from lib.secret_values import environment_without_secrets
from lib.types import Rollout, Score

GRADERS = {
    "arithmetic": "lib.rewards.arithmetic",
    "openai/gsm8k": "lib.rewards.gsm8k",
    "lighteval/MATH": "lib.rewards.math",
    "DigitalLearningGmbH/MATH-lighteval": "lib.rewards.math",
    "HuggingFaceH4/MATH-500": "lib.rewards.math",
    **{f"{PREFIX}{difficulty}": "lib.rewards.last_number" for difficulty in DIFFICULTIES},
}
"""The built-in graders: data source -> the module whose `compute_score` grades it."""

START_TIMEOUT_S = 120.0  # for a worker's imports; a recipe's file brings torch along
END_TIMEOUT_S = 5.0  # from a closed channel to the end of its worker, which tells why; others are not served meanwhile
GROWN_GIB, GROWN_TIMES = 8.0, 10  # a worker beyond this, and so many times what it held first, has a leak
STOP_POLL_S = 0.2  # between two questions whether to stop
TIMED_OUT = "timed out"  # how the error of a response over its time limit begins; no exception's text begins so
ROOT = Path(__file__).resolve().parents[2]
BOOT = (
    "import sys; sys.path.insert(0, sys.argv[3]); from lib.rewards.worker import main; main(*map(int, sys.argv[1:3]))"
)


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What scores the responses. A recipe with a function of its own writes RewardConfig(path=__file__, name="NAME").

    A worker then imports the recipe's file, and with it the training script: seconds per worker, in the background.
    """

    path: str | None = None
    """Python file with the reward function, for all data sources; None: the built-in graders, by data source."""
    name: str = "compute_score"
    """Function in that file: NAME(data_source, solution_str, ground_truth, extra_info) -> number, dict or None."""
    kwargs: JsonObject = field(default_factory=dict)
    """Further keyword arguments of the reward function or built-in grader, as JSON."""
    env: tuple[str, ...] = ()
    """Environment variables that its workers get although their names say that they are secret."""
    num_workers: int = 4
    """Worker processes per rank; each scores one response at a time."""
    timeout_s: float = 10.0
    """Seconds that scoring one response may take; then its worker is killed and the response left out."""
    max_error_rate: float = 0.05
    """Share of a step's responses whose scoring may fail or time out; above it the run stops. 1 never stops."""
    # 5 %: flaky infrastructure stays below it, broken code far above; in a step of 128 responses, 1 % would be a
    # single failure. Every failure is counted and logged in any case.
    max_memory_gib: float | None = None
    """GiB of its own that a worker may hold after a response; above it the worker is replaced. None: 8, once that is
    ten times what it held after its first response."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            "reward.",
            path=(self.path != "", "a file, or the option left out"),
            name=(self.name.isidentifier(), "the name of a function"),
            num_workers=(1 <= self.num_workers <= 1024, "from 1 to 1024"),
            timeout_s=(0 < self.timeout_s <= 86400, "above 0 and at most 86400 (a day)"),
            max_error_rate=(0 <= self.max_error_rate <= 1, "between 0 and 1"),
            max_memory_gib=(self.max_memory_gib is None or 0 < self.max_memory_gib < math.inf, "above 0 and finite"),
            kwargs=(not set(self.kwargs) & set(ARGUMENTS), f"names other than {', '.join(ARGUMENTS)}"),
        )
        if self.path is None and self.name != "compute_score":
            raise UserError(
                f"a reward function without its file; --reward.name {self.name}; found no --reward.path, expected the "
                "file that holds the function; give --reward.path FILE, or leave --reward.name out"
            )


# ---- Failures of a step ----


def check_error_rate(
    rollouts: Sequence[Rollout], cfg: RewardConfig, world: World, *, at_least: int = 0
) -> dict[str, float]:
    """reward/num_{errors,timeouts,declined,excluded} of the step, over all ranks. Executed by all ranks.

    errors: exceptions, crashes, wrong values; declined: the function returned None; excluded: all without a score.
    Raises RewardError on all ranks when errors and timeouts are more than `max_error_rate` of all responses, or of
    `at_least` where those are more.
    """
    texts = error_counts(rollouts)
    timeouts = sum(count for text, count in texts.items() if text.startswith(TIMED_OUT))
    excluded = sum(rollout.score.score is None for rollout in rollouts)
    local = torch.tensor([len(rollouts), sum(texts.values()) - timeouts, timeouts, excluded])
    num, errors, timeouts, excluded = world.sum(local).tolist()
    failed, size = errors + timeouts, max(num, at_least)
    if failed > cfg.max_error_rate * size:  # the same numbers, hence the same verdict, on every rank
        everywhere: Counter[str] = Counter()
        for of_rank in world.gather(dict(list(texts.items())[:100])):
            everywhere.update(of_rank)
        [(text, count)] = everywhere.most_common(1)
        raise RewardError(
            f"scoring failed for {failed} of the step's {size} responses ({failed / size:.1%}); "
            f"{'the built-in graders' if cfg.path is None else '--reward.path ' + cfg.path}; {count} times: {text}; "
            f"expected at most {cfg.max_error_rate:.1%}; mend the function, or raise --reward.timeout-s or "
            "--reward.max-error-rate"
        ).on_all_ranks()
    return {
        "reward/num_errors": float(errors),
        "reward/num_timeouts": float(timeouts),
        "reward/num_declined": float(excluded - failed),
        "reward/num_excluded": float(excluded),
    }


def error_counts(rollouts: Sequence[Rollout]) -> dict[str, int]:
    """{error text: how often} of this rank's responses, the most frequent first: for the run's log."""
    return dict(Counter(r.score.error for r in rollouts if r.score.error is not None).most_common())


def outgrown_in_words(num_workers: int) -> str:
    """That so many workers were replaced since they had grown too large."""
    return (
        f"{num_workers} reward worker(s) held too much memory and were replaced, their scores are kept; the reward "
        "function keeps something of every response (--reward.max-memory-gib sets the limit)"
    )


# ---- Worker processes ----


class Scorer:
    """Scores responses in `cfg.num_workers` processes while the caller goes on generating.

    `data_sources`: all that will be submitted. A response that lacks a number for one of `reward_keys` has failed. What
    the functions print goes to `log_path`, else nowhere. Results do not depend on the number of workers. Raises
    UserError for an unknown data source or a missing reward file.
    """

    def __init__(
        self,
        cfg: RewardConfig,
        data_sources: Set[str],
        *,
        reward_keys: Sequence[str] = (),
        log_path: Path | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self.start_error: str | None = None
        """Why workers did not start, a four-part message; once none is left, every response gets it as its error."""
        self.warnings: list[str] = []
        self.num_outgrown = 0
        """Workers that were replaced since they had grown too large."""
        self._cfg, self._reward_keys, self._start_timeout_s = cfg, reward_keys, max(start_timeout_s, cfg.timeout_s)
        self._spec = frame(pickle.dumps(_worker_spec(cfg, data_sources, log_path)))
        self._environment = environment_without_secrets(cfg.env)
        self._rollouts: list[Rollout] = []  # by job number
        self._scores: dict[int, Score] = {}  # by job number
        self._queue: deque[tuple[int, str | None]] = deque()  # (job number, response)
        self._workers: list[_Worker] = []
        self._stopped: list[subprocess.Popen] = []
        self._progress = threading.Condition()
        self._closing = False
        self._crash: BaseException | None = None
        self._selector = selectors.DefaultSelector()
        self._alarm, self._alarm_receiver = socket.socketpair()
        self._alarm.setblocking(False)
        self._selector.register(self._alarm_receiver, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="scorer", daemon=True)
        self._thread.start()

    def submit(self, rollout: Rollout, solution_str: str | None) -> None:
        """Queues a response (`solution_str`: its text without special tokens) and returns at once.

        None asks whether the grader accepts what its own `write_answer` makes of the ground truth: the score is then 1
        or 0 (None: it has no such function), the answer is in the extras.
        """
        self._rollouts.append(rollout)
        self._queue.append((len(self._rollouts) - 1, solution_str))
        self._wake()

    def collect(self, *, stop: Callable[[], bool] = lambda: False) -> list[Rollout]:
        """All rollouts submitted since the last call, in that order, with their scores. Waits for the last one.

        Raises Stopped, with responses left unscored, when `stop` says so meanwhile; the scorer is good for nothing then
        but to be closed.
        """
        with self._progress:
            while len(self._scores) < len(self._rollouts) and not (self._crash or self._closing):
                if stop():
                    raise Stopped("while responses were being scored")
                self._progress.wait(STOP_POLL_S)
        if len(self._scores) < len(self._rollouts):
            raise RuntimeError("the scorer's thread ended before all responses had a score") from self._crash
        scored = [replace(rollout, score=self._scores[job]) for job, rollout in enumerate(self._rollouts)]
        self._rollouts, self._scores = [], {}
        return scored

    @property
    def num_waiting(self) -> int:
        """How many submitted responses have no score yet; 0 once they will get none."""
        return 0 if self._crash or self._closing else len(self._rollouts) - len(self._scores)

    def close(self) -> None:
        """Kills the workers. May be called twice."""
        self._closing = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with suppress(OSError):  # full: it wakes anyway; closed: no worker to wake
            self._alarm.send(b"\0")

    # What follows runs in the scorer's thread, which alone touches the workers.

    def _serve(self) -> None:
        try:
            for _ in range(self._cfg.num_workers):
                self._start_worker()
            while not self._closing:
                self._assign()
                for key, events in self._selector.select(self._seconds_to_deadline()):
                    if key.data is None:
                        self._alarm_receiver.recv(4096)
                    else:
                        self._talk(key.data, events)
                self._expire()
        except BaseException as error:
            self._crash = error
        finally:
            for worker in list(self._workers):
                self._stop(worker)
            for process in self._stopped:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=5)
            self._selector.close()
            self._alarm.close()
            self._alarm_receiver.close()
            with self._progress:
                self._progress.notify_all()

    def _start_worker(self) -> None:
        self._stopped = [process for process in self._stopped if process.poll() is None]  # reaps the others
        try:
            worker = _Worker(self._spec, self._environment, self._start_timeout_s)
        except OSError as error:  # out of memory, processes or descriptors
            self.start_error = f"a reward worker did not start; {sys.executable}; {error}; free memory or processes"
            return
        self._workers.append(worker)
        self._selector.register(worker.channel, selectors.EVENT_READ | selectors.EVENT_WRITE, worker)

    def _stop(self, worker: "_Worker") -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.channel)
        worker.kill()
        self._stopped.append(worker.process)

    def _assign(self) -> None:
        """Gives queued responses to idle workers; with no worker left, gives them the reason as their error."""
        for worker in self._workers:
            while worker.idle and self._queue:
                job, response = self._queue.popleft()
                sample, index = self._rollouts[job].sample, self._rollouts[job].index
                values = (sample.data_source, response, sample.ground_truth, sample.extra_info)
                seed = sample.uid * 1_000_003 + index
                try:
                    request = pickle.dumps((job, seed, dict(zip(ARGUMENTS, values, strict=True))))
                except Exception as error:  # a custom dataset's objects
                    self._finish(job, Score(score=None, error=f"cannot be sent to a worker: {error}"))
                    continue
                worker.job, worker.deadline = job, time.monotonic() + self._cfg.timeout_s
                worker.outgoing = frame(request)
                self._send(worker)
        while self._queue and not self._workers:
            self._finish(self._queue.popleft()[0], Score(score=None, error=self.start_error))

    def _talk(self, worker: "_Worker", events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._send(worker)
        if events & selectors.EVENT_READ:
            try:
                message = worker.receive()
            except (OSError, ValueError) as error:
                self._lose(worker, str(error))
                return
            if message is not None:
                self._read(worker, message)

    def _send(self, worker: "_Worker") -> None:
        with suppress(OSError):  # a dead worker is noticed when its end of the channel reads as closed
            worker.send()
        writing = selectors.EVENT_WRITE if worker.outgoing else 0
        self._selector.modify(worker.channel, selectors.EVENT_READ | writing, worker)

    def _read(self, worker: "_Worker", message: dict[str, Any]) -> None:
        if not worker.started:
            if "start_error" in message:
                self._lose(worker, message["start_error"], is_message=True)
                return
            worker.started, worker.deadline, self.warnings = True, math.inf, message["warnings"]
        elif message.get("job") == worker.job:
            memory = message.pop("memory")
            self._finish(message.pop("job"), _with_all(self._reward_keys, Score(**message)))
            worker.job, worker.deadline = None, math.inf
            worker.first_memory = worker.first_memory or memory
            if worker.has_outgrown(self._cfg.max_memory_gib, memory):
                self.num_outgrown += 1
                self._stop(worker)
                self._start_worker()

    def _expire(self) -> None:
        """Kills the workers over their time limit. Runs after all replies that have come were read."""
        now = time.monotonic()
        for worker in [worker for worker in self._workers if worker.deadline <= now]:
            limit = self._cfg.timeout_s if worker.started else self._start_timeout_s
            slow = f"it took over {limit:g} s (a longer --reward.timeout-s allows more)"
            self._lose(worker, f"{TIMED_OUT} after {limit:g} s" if worker.started else slow)

    def _lose(self, worker: "_Worker", reason: str, *, is_message: bool = False) -> None:
        """Kills a worker and gives its response the reason as error. One that had started is replaced.

        `is_message`: the reason has all four parts of a message already.
        """
        self._stop(worker)
        if worker.job is not None:
            self._finish(worker.job, Score(score=None, error=reason))
        if worker.started:
            self._start_worker()
        else:
            where = "the built-in graders" if self._cfg.path is None else f"--reward.path {self._cfg.path}"
            self.start_error = reason if is_message else (
                f"a reward worker ended before it was ready; {where}; found that {reason}, expected the file to import "
                f"in a process of its own; mend what it does when it is imported"
            )  # fmt: skip

    def _finish(self, job: int, score: Score) -> None:
        with self._progress:
            self._scores[job] = score
            if len(self._scores) == len(self._rollouts):
                self._progress.notify_all()

    def _seconds_to_deadline(self) -> float | None:
        deadline = min((worker.deadline for worker in self._workers), default=math.inf)
        return None if deadline == math.inf else max(0.0, deadline - time.monotonic())


def _with_all(reward_keys: Sequence[str], score: Score) -> Score:
    for key in reward_keys:
        if key != "score" and score.score is not None and isinstance(score.extras.get(key, ""), str):
            error = f"returned no finite number {key!r}, which --advantage.reward-keys asks for"
            return replace(score, score=None, error=error)
    return score


def _worker_spec(cfg: RewardConfig, data_sources: Set[str], log_path: Path | None) -> dict[str, Any]:
    """What a worker needs to know. The reward file is read once: a worker started later runs the same code."""
    path = None if cfg.path is None else resolve_file(cfg.path, "--reward.path").resolve()
    unknown = sorted(set(data_sources) - set(GRADERS))
    if path is None and unknown:
        raise UserError(
            f"no built-in grader for data source {', '.join(map(repr, unknown))}; data column data_source; "
            f"expected one of {', '.join(GRADERS)}; give a reward function with --reward.path FILE"
        )
    return {
        "path": None if path is None else str(path),
        "source": None if path is None else path.read_bytes(),
        "name": cfg.name,
        "graders": {} if path else {source: GRADERS[source] for source in sorted(data_sources)},
        "kwargs": dict(cfg.kwargs),
        "log_path": os.devnull if log_path is None else str(log_path),
    }


class _Worker:
    """A process behind its keeper, its channel, and the response that it is scoring."""

    def __init__(self, spec: bytes, environment: dict[str, str], start_timeout_s: float) -> None:
        self.channel, theirs = socket.socketpair()
        self.channel.setblocking(False)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", BOOT, str(theirs.fileno()), str(os.getpid()), str(ROOT)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=environment,
            )
        self.outgoing = spec
        self.incoming = bytearray()
        self.started = False
        self.job: int | None = None
        self.first_memory = 0  # bytes after its first response: a model that this one loaded is no leak
        self.deadline = time.monotonic() + start_timeout_s

    @property
    def idle(self) -> bool:
        """Whether it waits for a response."""
        return self.started and self.job is None

    def has_outgrown(self, max_gib: float | None, memory: int) -> bool:
        """Whether the worker, which holds `memory` bytes after a response, is to be replaced."""
        if max_gib is None and memory <= GROWN_TIMES * self.first_memory:
            return False
        return memory > 2**30 * (max_gib or GROWN_GIB)

    def send(self) -> None:
        """Sends as much of `outgoing` as the channel takes."""
        with suppress(BlockingIOError):
            self.outgoing = self.outgoing[self.channel.send(self.outgoing) :]

    def receive(self) -> dict[str, Any] | None:
        """The next complete message, if it has arrived. Raises OSError or ValueError when none can come any more."""
        received = self.channel.recv(1 << 16)
        if not received:
            raise OSError(self._how_it_ended())
        self.incoming += received
        if len(self.incoming) < 8:
            return None
        end = 8 + struct.unpack(">Q", self.incoming[:8])[0]
        if len(self.incoming) < end:
            return None
        message = json.loads(bytes(self.incoming[8:end]))
        del self.incoming[:end]
        return message

    def kill(self) -> None:
        """Has the process ended by its keeper, with everything that it started."""
        self.channel.close()
        self.process.send_signal(END)

    def _how_it_ended(self) -> str:
        try:
            code = self.process.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "the reward worker closed its channel"
        return f"the reward worker was killed by {signal.Signals(-code).name}" if code < 0 else (
            f"the reward worker exited with code {code}"
        )  # fmt: skip
