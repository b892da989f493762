"""Scores for responses, from reward functions in worker processes that can be killed.

A response is sent to a worker as soon as its group is generated; `Scorer.collect` waits for the rest. A function of
rows gets those that wait when a worker is free, up to --reward.batch-size, in one call. One thread serves all workers
and sleeps in `select` meanwhile, so generation keeps the interpreter. A worker that takes longer than the limit, exits
or crashes is replaced; its response gets no score, but the error's text, and several responses of one call are sent
again, each alone, so that one costs only itself. A worker that has grown too large is replaced between two calls.

Deliberately absent: threads or alarms as time limits (sympy and `except Exception` swallow them), a shared process
pool (a few hung jobs block it), a sandbox (the reward file is the operator's code), a score of 0 for a failure.
"""

import math
import os
import pickle
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lib.config.values import JsonObject
from lib.data.paths import resolve_file
from lib.dist import World
from lib.errors import RewardError, Stopped, UserError, check_fields
from lib.rewards.last_number import DIFFICULTIES, PREFIX
from lib.rewards.process import Request, RewardWorker
from lib.rewards.search_r1 import SOURCES
from lib.rewards.worker import ARGUMENTS, ROWS
from lib.secret_values import environment_without_secrets
from lib.types import Rollout, Score
from lib.workers.child import frame
from lib.workers.pool import WorkerPool

GRADERS = {
    "arithmetic": "lib.rewards.arithmetic",
    "openai/gsm8k": "lib.rewards.gsm8k",
    "lighteval/MATH": "lib.rewards.math",
    "DigitalLearningGmbH/MATH-lighteval": "lib.rewards.math",
    "HuggingFaceH4/MATH-500": "lib.rewards.math",
    **{f"{PREFIX}{difficulty}": "lib.rewards.last_number" for difficulty in DIFFICULTIES},
    **dict.fromkeys(SOURCES, "lib.rewards.search_r1"),
}
"""The built-in graders: data source -> the module whose `compute_score` grades it."""

START_TIMEOUT_S = 120.0  # for a worker's imports; a recipe's file brings torch along
STOP_POLL_S = 0.2  # between two questions whether to stop
TIMED_OUT = "timed out"  # how the error of a response over its time limit begins; no exception's text begins so


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What scores the responses. A recipe with a function of its own writes RewardConfig(path=__file__, name="NAME").

    A worker then imports the recipe's file, and with it the training script: seconds per worker, in the background.
    """

    path: str | None = None
    """Python file with the reward function, for all data sources; None: the built-in graders, by data source."""
    name: str = "compute_score"
    """Function in that file: NAME(data_source, solution_str, ground_truth, extra_info) -> number, dict or None; or
    NAME(rows) -> a list of these, one per row, a dict with these four keys. A file with compute_scores(rows) needs no
    name."""
    kwargs: JsonObject = field(default_factory=dict)
    """Further keyword arguments of the reward function or built-in grader, as JSON."""
    env: tuple[str, ...] = ()
    """Environment variables that its workers get although their names say that they are secret."""
    num_workers: int = 4
    """Worker processes per rank; each makes one call at a time."""
    batch_size: int = 64
    """Most responses in one call of a function of rows, which gets those that wait when a worker is free."""
    timeout_s: float = 10.0
    """Seconds that one call of the function may take; then its worker is killed and the response left out (several
    responses of one call are scored again first, each alone)."""
    max_error_rate: float = 0.05
    """Share of a step's responses whose scoring may fail or time out; above it the run stops. 1 never stops."""
    # 5 %: flaky infrastructure stays below it, broken code far above; in a step of 128 responses, 1 % would be a
    # single failure. Every failure is counted and logged in any case.
    max_memory_gib: float | None = None
    """GiB of its own that a worker may hold after a call; above it the worker is replaced. None: 8, once that is ten
    times what it held after its first call."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            "reward.",
            path=(self.path != "", "a file, or the option left out"),
            name=(self.name.isidentifier(), "the name of a function"),
            num_workers=(1 <= self.num_workers <= 1024, "from 1 to 1024"),
            batch_size=(1 <= self.batch_size <= 2**16, f"from 1 to {2**16}"),
            timeout_s=(0 < self.timeout_s <= 86400, "above 0 and at most 86400 (a day)"),
            max_error_rate=(0 <= self.max_error_rate <= 1, "between 0 and 1"),
            max_memory_gib=(self.max_memory_gib is None or 0 < self.max_memory_gib < math.inf, "above 0 and finite"),
            kwargs=(not set(self.kwargs) & {*ARGUMENTS, ROWS}, f"names other than {', '.join((*ARGUMENTS, ROWS))}"),
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
    of_environments = sum(rollout.finish_reason == "error" for rollout in rollouts)
    local = torch.tensor([len(rollouts), sum(texts.values()) - timeouts, timeouts, excluded, of_environments])
    num, errors, timeouts, excluded, of_environments = world.sum(local).tolist()
    failed, size = errors + timeouts, max(num, at_least)
    if failed > cfg.max_error_rate * size:  # the same numbers, hence the same verdict, on every rank
        everywhere: Counter[str] = Counter()
        for of_rank in world.gather(dict(list(texts.items())[:100])):
            everywhere.update(of_rank)
        [(text, count)] = everywhere.most_common(1)
        what, where, remedy = "scoring", f"--reward.path {cfg.path}", "mend the function, or raise --reward.timeout-s"
        if cfg.path is None:
            where = "the built-in graders"
        if 2 * of_environments > failed:
            what, where, remedy = "an environment", "--turns.path", "mend the file, or raise --turns.timeout-s"
        raise RewardError(
            f"{what} failed for {failed} of the step's {size} responses ({failed / size:.1%}); {where}; {count} times: "
            f"{text}; expected at most {cfg.max_error_rate:.1%}; {remedy} or --reward.max-error-rate"
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


def failed_calls_in_words(num_calls: int, error: str | None) -> str:
    """That so many calls with several rows failed; `error`: the last one's, on this rank."""
    why = f"; the last one: {error}" if error else ""
    return (
        f"{num_calls} call(s) of the reward function with several rows failed, and each of their responses was scored "
        f"again, alone{why}"
    )


# ---- Worker processes ----


class Scorer(WorkerPool[RewardWorker]):
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
        super().__init__("scorer", cfg.num_workers)
        self.warnings: list[str] = []
        self.num_outgrown = 0
        """Workers that were replaced since they had grown too large."""
        self.num_failed_calls = 0
        """Calls with several rows that failed; each of these got a call of its own then."""
        self.call_error: str | None = None
        """Why the last of them failed."""
        self.function: str | None = None
        """The name of the reward file's function, once a worker has started."""
        self.takes_rows = False
        """Whether it scores many responses in one call."""
        self._cfg, self._reward_keys, self._start_timeout_s = cfg, reward_keys, max(start_timeout_s, cfg.timeout_s)
        self._spec = frame(pickle.dumps(_worker_spec(cfg, data_sources, log_path)))
        self._environment = environment_without_secrets(cfg.env)
        self._rollouts: list[Rollout] = []  # by job number
        self._scores: dict[int, Score] = {}  # by job number
        self._queue: deque[Request] = deque()
        self._progress = threading.Condition()
        self._begin()

    def submit(self, rollout: Rollout, solution_str: str | None) -> None:
        """Queues a response (`solution_str`: its text without special tokens) and returns at once.

        None asks whether the grader accepts what its own `write_answer` makes of the ground truth: the score is then 1
        or 0 (None: it has no such function), the answer is in the extras. An episode that its environment has scored
        keeps that score.
        """
        self._rollouts.append(rollout)
        if rollout.score is not None:
            self._finish(len(self._rollouts) - 1, _with_all(self._reward_keys, rollout.score))
            return
        self._queue.append(Request(len(self._rollouts) - 1, solution_str, alone=solution_str is None))
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

    # What follows runs in the pool's thread.

    def _ended(self) -> None:
        with self._progress:
            self._progress.notify_all()

    def _make_worker(self) -> RewardWorker:
        return RewardWorker(self._spec, self._environment, self._start_timeout_s)

    def _cannot_start(self, error: OSError) -> None:
        self.start_error = f"a reward worker did not start; {sys.executable}; {error}; free memory or processes"

    def _assign(self) -> None:
        """Gives queued responses to idle workers; with no worker left, gives them the reason as their error."""
        for worker in self._workers:
            while worker.idle and self._queue:
                requests, rows = self._take(self._cfg.batch_size if worker.takes_rows else 1)
                if not requests:
                    continue
                first = self._rollouts[requests[0].job]
                seed = first.sample.uid * 1_000_003 + first.index
                worker.requests, worker.deadline = requests, time.monotonic() + self._cfg.timeout_s
                self._post(worker, frame(pickle.dumps((requests[0].job, seed, rows))))
        while self._queue and not self._workers:
            self._finish(self._queue.popleft().job, Score(score=None, error=self.start_error))

    def _take(self, most: int) -> tuple[list[Request], list[bytes]]:
        """The queue's next requests for one call, with what the function gets of each. Empty: none can be sent."""
        requests: list[Request] = []
        rows: list[bytes] = []
        while self._queue and len(requests) < most and not (requests and (requests[0].alone or self._queue[0].alone)):
            request = self._queue.popleft()
            sample = self._rollouts[request.job].sample
            values = (sample.data_source, request.response, sample.ground_truth, sample.extra_info)
            try:
                rows.append(pickle.dumps(dict(zip(ARGUMENTS, values, strict=True))))
            except Exception as error:  # a custom dataset's objects
                self._finish(request.job, Score(score=None, error=f"cannot be sent to a worker: {error}"))
                continue
            requests.append(request)
        return requests, rows

    def _read(self, worker: RewardWorker, message: dict[str, Any]) -> None:
        if not worker.started:
            if "start_error" in message:
                self._lose(worker, message["start_error"], is_message=True)
                return
            worker.started, worker.deadline, self.warnings = True, math.inf, message["warnings"]
            self.function, self.takes_rows = message["function"], message["takes_rows"]
            worker.takes_rows = self.takes_rows
        elif worker.requests and message.get("job") == worker.requests[0].job:
            requests, memory = worker.requests, message["memory"]
            worker.requests, worker.deadline = [], math.inf
            if message["failed"] is not None:
                self._fail(requests, message["failed"])
            for request, score in zip(requests, message["scores"], strict=message["failed"] is None):
                self._finish(request.job, _with_all(self._reward_keys, Score(**score)))
            worker.first_memory = worker.first_memory or memory
            if worker.has_outgrown(self._cfg.max_memory_gib, memory):
                self.num_outgrown += 1
                self._stop(worker)
                self._start_worker()

    def _expire(self, now: float) -> None:
        for worker in [worker for worker in self._workers if worker.deadline <= now]:
            limit = self._cfg.timeout_s if worker.started else self._start_timeout_s
            slow = f"it took over {limit:g} s (a longer --reward.timeout-s allows more)"
            self._lose(worker, f"{TIMED_OUT} after {limit:g} s" if worker.started else slow)

    def _lose(self, worker: RewardWorker, reason: str, *, is_message: bool = False) -> None:
        """Kills a worker, whose call has failed for this reason. One that had started is replaced.

        `is_message`: the reason has all four parts of a message already.
        """
        self._stop(worker)
        self._fail(worker.requests, reason)
        if worker.started:
            self._start_worker()
        else:
            where = "the built-in graders" if self._cfg.path is None else f"--reward.path {self._cfg.path}"
            self.start_error = reason if is_message else (
                f"a reward worker ended before it was ready; {where}; found that {reason}, expected the file to import "
                f"in a process of its own; mend what it does when it is imported"
            )  # fmt: skip

    def _fail(self, requests: Sequence[Request], reason: str) -> None:
        """Gives a call's only response the reason as error; several are sent again, each alone, before all others."""
        if len(requests) > 1:
            self.num_failed_calls += 1
            self.call_error = reason
            self._queue.extendleft(replace(request, alone=True) for request in reversed(requests))
            return
        for request in requests:
            self._finish(request.job, Score(score=None, error=reason))

    def _finish(self, job: int, score: Score) -> None:
        with self._progress:
            self._scores[job] = score
            if len(self._scores) == len(self._rollouts):
                self._progress.notify_all()


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
