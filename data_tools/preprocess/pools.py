"""Who does the work: threads where the compiled encoder lets them run at once, else processes. Called by pipeline.py.

A thread shares the tokenizer and gives its ids without a copy; a process is for the twin, which holds the interpreter,
and for filters that look at texts. Processes end with their parent, however that ends.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from multiprocessing.process import BaseProcess

from data_tools.preprocess.work import Job, Result, Worker
from data_tools.read.pieces import Portion
from lmtrain.errors import OutOfMemoryError
from lmtrain.tokenizer.fast import Encoder, TwinEncoder

_worker: Worker | None = None  # of this process


@contextmanager
def worker_pool(
    job: Job, encoder: Encoder, workers: int
) -> Iterator[tuple[Executor, Callable[[Portion], Result]]]:
    needs_interpreter = job.looks_at_texts or isinstance(encoder, TwinEncoder)
    if workers == 1 or not needs_interpreter:
        threads = ThreadPoolExecutor(workers, "worker")
        try:
            yield threads, Worker(job, encoder).run
        finally:
            threads.shutdown(cancel_futures=True)
        return
    # because: a forked child would inherit threads' locks in whatever state they are
    processes = ProcessPoolExecutor(workers, get_context("spawn"), _start_process, (job,))
    try:
        yield processes, _run_in_process
    except BrokenProcessPool as error:
        raise OutOfMemoryError("A worker process was killed, most likely for memory. Use fewer --workers.") from error
    finally:
        processes.shutdown(cancel_futures=True)


def _start_process(job: Job) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _worker = Worker(job)


def _run_in_process(portion: Portion) -> Result:
    assert _worker is not None, "_start_process runs first"
    return _worker.run(portion)


def _end_with(parent: BaseProcess) -> None:
    # because: the workers of a killed pool hold both ends of its pipes and would wait for ever
    parent.join()
    os._exit(1)
