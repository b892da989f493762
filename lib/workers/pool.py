"""Workers of one kind, and the thread that serves them, which sleeps in `select`: the caller keeps the interpreter."""

import math
import selectors
import socket
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any, Generic, TypeVar

from lib.workers.process import WorkerProcess

W = TypeVar("W", bound=WorkerProcess)


class WorkerPool(ABC, Generic[W]):
    """`num_workers` processes. What a caller asks lies in queues of the subclass, which the thread reads in `_assign`;
    it alone touches workers. The subclass calls `_begin` when it has all that its methods need."""

    def __init__(self, name: str, num_workers: int) -> None:
        self.start_error: str | None = None
        """Why workers did not start, a four-part message."""
        self._workers: list[W] = []
        self._num_workers = num_workers
        self._stopped: list[subprocess.Popen] = []
        self._closing = self._is_called = False
        self._crash: BaseException | None = None
        self._selector = selectors.DefaultSelector()
        self._alarm, self._alarm_receiver = socket.socketpair()
        self._alarm.setblocking(False)
        self._selector.register(self._alarm_receiver, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def _begin(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Kills the workers. May be called twice."""
        self._closing = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        """Has the thread look at what is asked; once for all that is asked until it does."""
        if self._is_called:
            return
        self._is_called = True
        with suppress(OSError):  # full: it wakes anyway; closed: no worker to wake
            self._alarm.send(b"\0")

    # What follows runs in the pool's thread.

    @abstractmethod
    def _make_worker(self) -> W:
        """A new worker. Raises OSError where there is no memory, process or descriptor for it."""

    @abstractmethod
    def _cannot_start(self, error: OSError) -> None:
        """Notes that `_make_worker` raised."""

    @abstractmethod
    def _assign(self) -> None:
        """Gives what is asked to workers, by `_post`."""

    @abstractmethod
    def _read(self, worker: W, message: dict[str, Any]) -> None:
        """Takes a worker's message."""

    @abstractmethod
    def _lose(self, worker: W, reason: str) -> None:
        """Gives up a worker that ended, or that is over its time."""

    @abstractmethod
    def _expire(self, now: float) -> None:
        """Gives up the workers over a time limit; all messages that have come were read."""

    def _ended(self) -> None:
        """Tells whoever waits that nothing will come any more."""

    def _serve(self) -> None:
        try:
            for _ in range(self._num_workers):
                self._start_worker()
            while not self._closing:
                self._is_called = False  # before it looks: what is asked from now on calls it again
                self._assign()
                self._send_posted()
                for key, events in self._selector.select(self._seconds_to_deadline()):
                    if key.data is None:
                        self._alarm_receiver.recv(4096)
                    else:
                        self._talk(key.data, events)
                self._expire(time.monotonic())
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
            self._ended()

    def _start_worker(self) -> None:
        self._stopped = [process for process in self._stopped if process.poll() is None]  # reaps the others
        try:
            worker = self._make_worker()
        except OSError as error:
            self._cannot_start(error)
            return
        self._workers.append(worker)
        self._selector.register(worker.channel, selectors.EVENT_READ | selectors.EVENT_WRITE, worker)

    def _stop(self, worker: W) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.channel)
        worker.kill()
        self._stopped.append(worker.process)

    def _post(self, worker: W, request: bytes) -> None:
        """Has `_send_posted` send a frame, with others: whoever sends gives the interpreter to the caller, and waits
        until it comes back."""
        worker.outgoing += request

    def _send_posted(self) -> None:
        for worker in self._workers:
            if worker.outgoing:
                self._send(worker)

    def _send(self, worker: W) -> None:
        with suppress(OSError):  # a dead worker is noticed when its end of the channel reads as closed
            worker.send()
        writing = selectors.EVENT_WRITE if worker.outgoing else 0
        self._selector.modify(worker.channel, selectors.EVENT_READ | writing, worker)

    def _talk(self, worker: W, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._send(worker)
        if events & selectors.EVENT_READ:
            try:
                messages = worker.receive()
            except (OSError, ValueError) as error:
                self._lose(worker, str(error))
                return
            for message in messages:
                self._read(worker, message)
            self._send_posted()  # a worker whose end is read next may take seconds

    def _seconds_to_deadline(self) -> float | None:
        deadline = min((worker.next_deadline for worker in self._workers), default=math.inf)
        return None if deadline == math.inf else max(0.0, deadline - time.monotonic())
