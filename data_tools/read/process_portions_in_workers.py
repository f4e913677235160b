"""Reads portions ahead and processes them in a pool while earlier results are written.

Called by preprocess_pipeline.py and run_one_corpus_step_in_workers.py. A thread cuts the sources and submits every
portion to the pool; the consumer receives results in input order, and an exception at its place in that order. The
budget bounds the bytes in memory.

Threads share the worker and return results without a copy; processes are for work that holds the interpreter lock.
Worker processes exit when their parent exits, even if it is killed.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from data_tools.read.cut_files_into_chunks import MemoryBudget, Portion, SizeLimits, StoppedError
from lmtrain.errors import OutOfMemoryError

R = TypeVar("R", covariant=True)
Item = tuple[Portion, "Future[R]"]


class PortionWorker(Protocol[R]):
    """Interface of the work on a portion."""

    def run(self, portion: Portion) -> R: ...


def build_budget(workers: int, limits: SizeLimits) -> MemoryBudget:
    """Return a budget of one portion for each worker, one being written and one being read."""
    return MemoryBudget((workers + 2) * limits.slice_bytes)


@contextmanager
def process_portions(
    portions: Iterator[Portion], build_worker: Callable[[], PortionWorker[R]], workers: int, budget: MemoryBudget, *,
    use_processes: bool,
) -> Iterator[Iterator[tuple[Portion, R]]]:  # fmt: skip
    """Process portions in a pool of `workers` threads or processes while the `with` block runs. Yield an iterator over
    (portion, result), in input order. `build_worker` returns the worker: it is called once for all threads or, with
    `use_processes`, pickled and called in each process.

    `budget` must be the one that the iterator `portions` acquires bytes from.
    """
    with _start_pool(build_worker, workers, use_processes) as (pool, run):
        queue: SimpleQueue[Item[R] | BaseException | None] = SimpleQueue()

        def feed() -> None:
            # because: a process that is started here inherits this, and Ctrl-C while it still imports would end it; the
            # executor would then wait for it forever
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                for portion in portions:
                    budget.mark_in_flight(portion.num_bytes)
                    queue.put((portion, pool.submit(run, portion)))
                queue.put(None)
            except StoppedError:
                pass
            except BaseException as error:  # raised in the consumer, after the results before it
                queue.put(error)

        thread = threading.Thread(target=feed, name="read-ahead", daemon=True)
        thread.start()
        try:
            yield _results_in_order(queue, budget)
        finally:
            budget.stop()
            thread.join(timeout=1)  # because: a thread that is blocked on a silent pipe cannot be stopped
            while not queue.empty():
                item = queue.get()
                if isinstance(item, tuple):
                    item[1].cancel()


def _results_in_order(
    queue: SimpleQueue[Item[R] | BaseException | None], budget: MemoryBudget
) -> Iterator[tuple[Portion, R]]:
    """Yield (portion, result) from the queue in input order, or raise the exception in it. A portion's bytes are
    released from the memory budget when the consumer asks for the next result.
    """
    while (item := queue.get()) is not None:
        if isinstance(item, BaseException):
            raise item
        portion, future = item
        result = future.result()
        del item, future  # because: a variable would keep the document in memory while the next one is read
        yield portion, result
        num_bytes = portion.num_bytes
        del portion, result
        budget.release_in_flight(num_bytes)


# ---- the pool


_worker: PortionWorker[Any] | None = None  # the worker of this process


@contextmanager
def _start_pool(
    build_worker: Callable[[], PortionWorker[R]], workers: int, use_processes: bool
) -> Iterator[tuple[Executor, Callable[[Portion], R]]]:
    """Start a pool of threads or processes for the time of the `with` block; yield (pool, function that processes a
    portion, to submit to the pool). `build_worker` returns the worker that the function runs.
    """
    if not use_processes:
        threads = ThreadPoolExecutor(workers, "worker")
        try:
            yield threads, build_worker().run
        finally:
            threads.shutdown(cancel_futures=True)
        return
    # because: a forked child would inherit locks that other threads hold
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_process, (build_worker,))
    try:
        yield pool, _run_in_process
    except BrokenProcessPool as error:
        raise OutOfMemoryError(
            "A worker process was killed, most likely because memory ran out. Give fewer --workers."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_process(build_worker: Callable[[], PortionWorker[Any]]) -> None:
    """Set up a new worker process: ignore Ctrl-C, exit when the parent process exits, and call `build_worker`."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # because: the parent handles Ctrl-C
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = build_worker()


def _run_in_process(portion: Portion) -> Any:
    """Run this process's worker."""
    assert _worker is not None, "_start_process runs first"
    return _worker.run(portion)


def _end_with_parent() -> None:
    """Wait until the parent process exits, then exit this process. Runs in a thread of a worker process."""
    # because: the workers of a killed pool hold both ends of its pipes and would wait forever
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
