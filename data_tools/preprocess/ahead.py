"""Portions are read ahead and worked on by a pool while earlier ones are written. Called by pipeline.py.

A thread cuts the sources and hands every portion to the pool; who iterates gets the results in the order of the input
and an exception where it belongs in that order. The budget bounds what is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from threading import Thread

from data_tools.preprocess.work import Result
from data_tools.read.budget import Budget, StoppedError
from data_tools.read.pieces import Portion

Item = tuple[Portion, "Future[Result]"]


@contextmanager
def worked_ahead(
    portions: Iterator[Portion], pool: Executor, run: Callable[[Portion], Result], budget: Budget
) -> Iterator[Iterator[tuple[Portion, Result]]]:
    queue: SimpleQueue[Item | BaseException | None] = SimpleQueue()

    def feed() -> None:
        try:
            for portion in portions:
                budget.hand_on(portion.num_bytes)
                queue.put((portion, pool.submit(run, portion)))
            queue.put(None)
        except StoppedError:
            pass
        except BaseException as error:  # is raised where it belongs
            queue.put(error)

    thread = Thread(target=feed, name="read-ahead", daemon=True)
    thread.start()
    try:
        yield _results(queue, budget)
    finally:
        budget.stop()
        thread.join(timeout=1)  # because: a pipe that says nothing cannot be interrupted
        _cancel(queue)


def _results(queue: SimpleQueue[Item | BaseException | None], budget: Budget) -> Iterator[tuple[Portion, Result]]:
    while (item := queue.get()) is not None:
        if isinstance(item, BaseException):
            raise item
        portion, future = item
        result = future.result()
        del item, future  # because: a name keeps a document alive while the next one is read
        yield portion, result
        num_bytes = portion.num_bytes
        del portion, result
        budget.give_back(num_bytes)


def _cancel(queue: SimpleQueue[Item | BaseException | None]) -> None:
    try:
        while True:
            item = queue.get_nowait()
            if isinstance(item, tuple):
                item[1].cancel()
    except Empty:
        return
