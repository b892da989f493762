"""Environments in worker processes that can be killed, many episodes in each.

An episode stays with its worker, which keeps its environment. A worker that does not answer in time, exits or crashes
is replaced; one that says it is stuck, in a thread that goes on for ever, or that holds ever more memory, is replaced
too, gets no new episode and ends with its last one. Episodes that lose their worker are replayed on another one: their
environment is reset with the same seed and gets the same replies again. Where that gives other answers (`replayable` is
False) they have failed.
A call that would wait for a thread waits here, where its time does not run.
A process that ends does not say by whose call: each call in it is made again, alone in a process, and has failed if
that ends too.
"""

import hashlib
import math
import os
import pickle
import queue
import threading
import time
from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.data.paths import resolve_file
from lib.errors import UserError
from lib.secret_values import environment_without_secrets
from lib.turns.config import TurnsConfig
from lib.workers.child import frame
from lib.workers.pool import WorkerPool
from lib.workers.process import WorkerProcess

START_TIMEOUT_S = 300.0  # for imports and setup(), which may load an index
GRACE_S = 2.0  # after a call's limit, by which a worker says itself that it is over


@dataclass(frozen=True, kw_only=True)
class About:
    """What a worker says of an environment."""

    instant: bool
    replayable: bool
    scores: bool
    """Whether it has a `score` of its own."""
    tools: list[dict[str, Any]]
    """As chat templates take them."""
    takes: dict[str, list[str] | None] = field(default_factory=dict)
    """By tool, the arguments that a row may give it; None: any."""
    is_user: bool = False
    """Whether it answers as a user although it has tools."""
    in_threads: bool = True
    """Whether anything of it runs in threads, of which a worker has not as many as one likes."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a call."""

    key: Hashable
    """Of the episode."""
    verb: str
    value: Any
    """What the environment returned, as JSON; None with an error."""
    error: str | None
    seconds: float = 0.0
    bad_calls: int = 0
    tool_errors: int = 0
    tool_timeouts: int = 0
    notes: tuple[str, ...] = ()
    """What tools raised, in words."""
    was_replayed: bool = False


@dataclass
class _Call:
    job: int
    verb: str
    payload: Any
    is_replay: bool = False
    """Whether only the environment's state is wanted."""


@dataclass
class _Episode:
    """An episode's calls: those that were answered, and that which is not."""

    worker: "_TurnsWorker | None" = None
    history: list[_Call] = field(default_factory=list)
    open: list[_Call] = field(default_factory=list)
    """In the order in which the worker gets them; the last one is what was asked, those before it are replayed."""
    num_replays: int = 0
    is_suspect: bool = False
    """Whether its worker was lost with a call of its: that is made again, with no other one in the process."""
    broken: str | None = None
    """Why no call of it can be answered any more."""


class _TurnsWorker(WorkerProcess):
    """A process that runs lib/turns/worker.py, and the episodes that it holds."""

    def __init__(self, spec: bytes, environment: dict[str, str]) -> None:
        super().__init__("lib.turns.worker", "the worker of --turns.path", spec, environment, START_TIMEOUT_S)
        self.keys: set[Hashable] = set()
        self.calls: dict[int, tuple[Hashable, float]] = {}
        """By job, the calls that are in this process: their episode, and until when."""
        self.is_stuck = False  # or has outgrown its memory
        self.reserved_for: Hashable | None = None
        """The episode that is to be alone in it: others' calls wait."""

    @property
    def next_deadline(self) -> float:
        return min((until for _, until in self.calls.values()), default=self.deadline)


class Hub(WorkerPool[_TurnsWorker]):
    """The environments of a replica's episodes. Raises UserError for a file that is not there."""

    def __init__(
        self, cfg: TurnsConfig, *, about: Mapping[str, About] | None = None, num_workers: int | None = None,
        log_path: Path | None = None,
    ) -> None:  # fmt: skip
        """`about`: what is known of the environments; None: the first worker that starts is asked."""
        super().__init__("turns", num_workers or cfg.num_workers)
        self.about = dict(about or {})
        """By name, of the environments, once a worker has started."""
        self.num_replaced = 0
        """Workers that were lost and replaced."""
        self.num_outgrown = 0
        """Of these, workers that held ever more memory."""
        self._cfg = cfg
        path = resolve_file(cfg.path, "--turns.path").resolve()
        source = path.read_bytes()
        self.file_hash = hashlib.sha256(source).hexdigest()[:16]
        """Of the environments' file."""
        spec = {
            "path": str(path), "source": source, "names": cfg.name, "kwargs": dict(cfg.kwargs),
            "timeout_s": cfg.timeout_s, "describe": about is None,
            "log_path": os.devnull if log_path is None else str(log_path),
        }  # fmt: skip
        self._spec = frame(pickle.dumps(spec))
        self._environment = environment_without_secrets(cfg.env)
        self._asked: queue.SimpleQueue[tuple[str, Hashable, Any]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._episodes: dict[Hashable, _Episode] = {}
        self._held: dict[Hashable, None] = {}
        """Episodes whose next call waits for a worker, in order."""
        self._num_jobs = 0
        self._started = threading.Event()
        self._begin()

    def wait_until_started(self) -> None:
        """Until a worker has, or none can. Raises UserError then."""
        self._started.wait()
        if self.start_error is not None:
            raise UserError(self.start_error)

    def call(self, verb: str, key: Hashable, payload: Any = None) -> None:
        """Asks the environment of an episode, and returns at once: reset, step or score. `close` has no result."""
        self._asked.put((verb, key, payload))
        self._wake()

    def take(self, *, wait_s: float = 0.0) -> list[Result]:
        """The results that have come since the last call; waits for one where there is none."""
        found = []
        with suppress(queue.Empty):
            found.append(self._results.get(timeout=wait_s) if wait_s else self._results.get_nowait())
            while True:
                found.append(self._results.get_nowait())
        if self._crash is not None:
            raise RuntimeError("the hub's thread ended, no environment answers any more") from self._crash
        return found

    # What follows runs in the pool's thread, which alone touches episodes too.

    def _ended(self) -> None:
        self._started.set()

    def _make_worker(self) -> _TurnsWorker:
        return _TurnsWorker(self._spec, self._environment)

    def _cannot_start(self, error: OSError) -> None:
        self._give_up(f"a worker of --turns.path did not start; {self._cfg.path}; {error}; free memory or processes")

    def _give_up(self, reason: str) -> None:
        self.start_error = self.start_error or reason
        self._started.set()
        for key, episode in self._episodes.items():
            if episode.open and episode.worker is None:
                self._fail(key, episode, reason)

    def _assign(self) -> None:
        while not self._asked.empty():
            verb, key, payload = self._asked.get_nowait()
            if verb == "close":
                self._forget(key)
                continue
            episode = self._episodes.setdefault(key, _Episode())
            episode.open.append(_Call(self._next_job(), verb, payload))
            if episode.broken is not None:
                self._fail(key, episode, episode.broken)
            else:
                self._send_open(key, episode)

    def _next_job(self) -> int:
        self._num_jobs += 1
        return self._num_jobs

    def _forget(self, key: Hashable) -> None:
        episode = self._episodes.pop(key, None)
        if episode is not None and episode.worker is not None:
            episode.worker.keys.discard(key)
            if episode.worker.reserved_for == key:
                episode.worker.reserved_for = None
            self._post(episode.worker, frame(pickle.dumps((0, "close", key, None))))
            self._end_if_stuck(episode.worker)

    def _send_open(self, key: Hashable, episode: _Episode) -> None:
        """Gives an episode's next call to its worker, or to the one with fewest episodes."""
        if episode.worker is None:
            able = [worker for worker in self._workers if worker.started and not worker.is_stuck]
            if not able:
                if not self._workers:
                    self._fail(key, episode, self.start_error or "no worker is left")
                return  # as soon as one has started
            episode.worker = min(able, key=lambda worker: (worker.reserved_for is not None, len(worker.keys)))
            episode.worker.keys.add(key)
        call, worker = episode.open[0], episode.worker
        if call.job in worker.calls:
            return
        if episode.is_suspect and worker.reserved_for is None:
            worker.reserved_for = key
        kind = self.about[(episode.history or episode.open)[0].payload["kind"]]
        has_room = not kind.in_threads or len(worker.calls) < self._cfg.concurrency
        if (has_room and worker.reserved_for is None) or (worker.reserved_for == key and not worker.calls):
            self._held.pop(key, None)
            try:
                request = frame(pickle.dumps((call.job, call.verb, key, call.payload)))
            except Exception as error:  # each type has its own; what is in the payload is its episode's alone
                self._fail(key, episode, f"the call cannot be sent: {type(error).__name__}: {str(error)[:200]}")
                return
            worker.calls[call.job] = (key, time.monotonic() + self._cfg.timeout_s + GRACE_S)
            self._post(worker, request)
        else:
            self._held[key] = None

    def _send_held(self) -> None:
        """Tries again what waits for a worker."""
        for key in list(self._held):
            episode = self._episodes.get(key)
            del self._held[key]
            if episode is not None and episode.open:
                self._send_open(key, episode)

    def _read(self, worker: _TurnsWorker, message: dict[str, Any]) -> None:
        if not worker.started:
            if "start_error" in message:
                self._lose(worker, message["start_error"], is_message=True)
                return
            worker.started, worker.deadline = True, math.inf
            self.about = {name: About(**about) for name, about in message["about"].items()} or self.about
            self._started.set()
            for key, episode in self._episodes.items():
                if episode.worker is None and episode.open:
                    self._send_open(key, episode)
            return
        key, _ = worker.calls.pop(message["job"], (None, 0.0))
        worker.first_memory = worker.first_memory or message["memory"]
        has_outgrown = worker.has_outgrown(None, message["memory"])
        if (message["is_stuck"] or has_outgrown) and not worker.is_stuck:
            worker.is_stuck = True
            self.num_replaced += 1
            self.num_outgrown += has_outgrown
            self._start_worker()
        episode = self._episodes.get(key)
        if episode is not None and episode.open and episode.open[0].job == message["job"]:
            self._answered(key, episode, message)
        if worker.reserved_for == key and not (episode and episode.open):
            worker.reserved_for = None
        self._end_if_stuck(worker)
        self._send_held()

    def _end_if_stuck(self, worker: _TurnsWorker) -> None:
        """Ends a worker with a thread that goes on, which has been replaced, as soon as its last episode is over."""
        if worker.is_stuck and not worker.keys and not worker.calls and worker in self._workers:
            self._stop(worker)

    def _answered(self, key: Hashable, episode: _Episode, message: dict[str, Any]) -> None:
        call = episode.open.pop(0)
        if call.is_replay:
            if message["error"] is not None:
                episode.open = episode.open[-1:]
                self._fail(key, episode, f"the replay failed: {message['error']}")
                return
        else:
            about = {name: message[name] for name in ("seconds", "bad_calls", "tool_errors", "tool_timeouts")}
            self._results.put(Result(
                key=key, verb=call.verb, value=message["value"], error=message["error"], notes=tuple(message["notes"]),
                was_replayed=episode.num_replays > 0, **about,
            ))  # fmt: skip
            episode.is_suspect, episode.broken = False, message["error"]
        episode.history.append(call)
        if episode.open:
            self._send_open(key, episode)

    def _fail(self, key: Hashable, episode: _Episode, reason: str) -> None:
        """Ends what was asked, if anything was, with an error: the episode is over."""
        episode.broken = reason
        for call in [call for call in episode.open if not call.is_replay]:
            self._results.put(Result(key=key, verb=call.verb, value=None, error=reason))
        episode.open = []

    def _expire(self, now: float) -> None:
        for worker in list(self._workers):
            late = [job for job, (_, deadline) in worker.calls.items() if deadline <= now]
            if not worker.started and worker.deadline <= now:
                self._lose(worker, f"it took over {START_TIMEOUT_S:g} s to start")
            elif late:
                self._lose(worker, f"timed out after {self._cfg.timeout_s:g} s, and its worker with it", late=late)

    def _lose(
        self, worker: _TurnsWorker, reason: str, *, late: list[int] | None = None, is_message: bool = False
    ) -> None:
        """Replaces a worker. Its episodes go on elsewhere by replay; those with a call in it alone in a process, and
        where they were so already, they fail for this reason. Of `late` calls, where these are named, it is known."""
        self._stop(worker)
        if not worker.started:
            self._give_up(reason if is_message else (
                f"a worker of --turns.path ended before it was ready; {self._cfg.path}; found that {reason}, expected "
                "the file to import, and setup() to return, in a process of its own; mend what they do"
            ))  # fmt: skip
            return
        if not worker.is_stuck:  # else it has been replaced
            self.num_replaced += 1
            self._start_worker()
        for key in list(worker.keys):
            episode = self._episodes[key]
            episode.worker = None
            job = episode.open[0].job if episode.open else None
            if job in (late or ()) or (late is None and job in worker.calls and episode.is_suspect):
                self._fail(key, episode, reason)
            else:
                episode.is_suspect |= late is None and job in worker.calls
                self._replay(key, episode, reason)
        self._send_held()

    def _replay(self, key: Hashable, episode: _Episode, reason: str) -> None:
        """Has an episode's calls made again, before the next one that is asked."""
        asked = [call for call in episode.open if not call.is_replay]
        if episode.history and not self.about[episode.history[0].payload["kind"]].replayable:
            self._fail(key, episode, f"{reason}, and its environment cannot be replayed")
            return
        past = [*episode.history, *(call for call in episode.open if call.is_replay)]
        again = [_Call(self._next_job(), call.verb, call.payload, is_replay=True) for call in past]
        episode.history, episode.open = [], [*again, *asked]
        episode.num_replays += 1
        if episode.open:
            self._send_open(key, episode)
