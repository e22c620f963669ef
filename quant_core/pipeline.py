"""Runs tasks in worker threads, a bounded number at a time, and tells the thread that owns them what they did.

A task takes one tensor from reading to writing, so while one worker waits for the disk another computes. What is
written does not depend on the number of threads: every task computes with one thread, and its place in the file is
known beforehand.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any

import torch

MAX_WORKERS = 4
"""More workers gain little: they share the memory bandwidth."""

_WAIT = 0.5  # seconds; a wait without an end cannot be interrupted on Windows


class Cancelled(Exception):
    """Ends a task whose result nobody waits for any more. It never leaves the pipeline."""


def default_workers() -> int:
    """Return how many workers are used when nobody says: one for each CPU that this process may use, up to 4."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_WORKERS, count))


class Pipeline:
    """A bounded pipeline. Use it as a context manager; leaving it normally waits for what is still under way.

    Args:
        workers: threads that run tasks.
        budget: bytes that the tasks under way may take. A task that takes more runs alone.
    """

    def __init__(self, workers: int, budget: int) -> None:
        self._budget = budget
        self._workers = workers
        self._tasks = 0
        self._bytes = 0
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopped = threading.Event()
        # Threads inside an operation would split reductions, whose rounding then depends on their number.
        self._executor = ThreadPoolExecutor(workers, "quant_core", initializer=torch.set_num_threads, initargs=(1,))
        self._threads = torch.get_num_threads()

    # ------------------------------------------------------------------ for the owner

    def submit(self, task: Callable[[], Any], consume: Callable[[Any], None], cost: int) -> None:
        """Run ``task`` in a worker as soon as there is room, and later ``consume(its result)`` in this thread.

        Args:
            cost: bytes that the task takes.

        Raises:
            BaseException: what an earlier task, ``consume``, or something that a task told raised.
        """
        while self._tasks and (self._tasks > self._workers or self._bytes + cost > self._budget):
            self._handle_event()
        self._tasks += 1
        self._bytes += cost
        self._executor.submit(self._run, task, consume, cost)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            while kind is None and self._tasks:
                self._handle_event()
        finally:
            self._stopped.set()
            self._executor.shutdown(wait=True, cancel_futures=True)
            torch.set_num_threads(self._threads)  # the workers' setting is the default of threads made later

    def _handle_event(self) -> None:
        while True:
            try:
                event = self._events.get(timeout=_WAIT)
            except queue.Empty:
                continue
            return event()

    def _finished(self, consume: Callable[[Any], None], cost: int, result: Any) -> None:
        self._tasks -= 1
        self._bytes -= cost
        consume(result)

    @staticmethod
    def _failed(error: BaseException) -> None:
        raise error

    # ------------------------------------------------------------------ for the tasks

    def tell(self, event: Callable[[], None]) -> None:
        """Have the owner call ``event``."""
        self._events.put(event)

    def check(self) -> None:
        """Raise :class:`Cancelled` if the owner has left the pipeline. A long task calls this between its steps."""
        if self._stopped.is_set():
            raise Cancelled

    def _run(self, task: Callable[[], Any], consume: Callable[[Any], None], cost: int) -> None:
        try:
            result = task()
        except BaseException as error:  # raised again in the owner's thread
            self._events.put(partial(self._failed, error))
        else:
            self._events.put(partial(self._finished, consume, cost, result))
