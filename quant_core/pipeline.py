"""Runs tasks in worker threads, a bounded number at a time, and hands over their results in order.

Reading and quantizing happen in the workers, hashing and writing in the thread that owns the pipeline; so the three
overlap, what is in memory has a limit, and the bytes that are written do not depend on the number of threads: every
task computes with one thread, and results come in the order of their submission.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch

MAX_WORKERS = 4
"""More workers gain little: they share the memory bandwidth."""


def default_workers() -> int:
    """Return how many workers are used when nobody says: one for each CPU that this process may use, up to 4."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_WORKERS, count))


class Pipeline:
    """A bounded pipeline. Use it as a context manager; leaving it normally consumes what is still under way.

    Args:
        workers: threads that run tasks.
        budget: bytes that the tasks under way may take. A task that takes more runs alone.
    """

    def __init__(self, workers: int, budget: int) -> None:
        self._budget = budget
        self._under_way = 0
        self._queue: deque[tuple[Future[Any], Callable[[Any], None], int]] = deque()
        # Threads inside an operation would split reductions, whose rounding then depends on their number.
        self._executor = ThreadPoolExecutor(workers, "quant_core", initializer=torch.set_num_threads, initargs=(1,))
        self._threads = torch.get_num_threads()

    def submit(self, task: Callable[[], Any], consume: Callable[[Any], None], cost: int) -> None:
        """Run ``task`` in a worker, and later ``consume(its result)`` in this thread.

        Args:
            cost: bytes that the task and its result take.

        Raises:
            BaseException: what an earlier task or ``consume`` raised.
        """
        while self._queue and self._under_way + cost > self._budget:
            self.consume_one()
        self._queue.append((self._executor.submit(task), consume, cost))
        self._under_way += cost

    def consume_one(self) -> None:
        """Wait for the oldest task and consume its result."""
        future, consume, cost = self._queue.popleft()
        consume(future.result())
        self._under_way -= cost

    def drain(self) -> None:
        """Consume everything that is under way."""
        while self._queue:
            self.consume_one()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.drain()
        finally:
            self._executor.shutdown(wait=True, cancel_futures=True)
            torch.set_num_threads(self._threads)  # the workers' setting is the default of threads made later
