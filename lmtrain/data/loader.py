"""The training data loader: a thread reads steps ahead. The step number is the loader's whole state.

Called by train. Every rank computes the sample ids of the whole global batch and reads its own share: micro-batch m is
dp_size * micro_batch consecutive samples, of which rank r takes the r-th group of micro_batch samples. Thus the samples
of a step do not depend on dp_size, and a loader started at step k returns what an uninterrupted loader returns at k.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from numpy.typing import NDArray

from lmtrain.batch import StepBatches
from lmtrain.data.batch_size_per_step import BatchPlan
from lmtrain.data.sample_dataset_interface import Dataset, SampleOrder, labels_per_term
from lmtrain.data.samples.blend import counts_by_source, total_counts
from lmtrain.errors import SettingsError
from lmtrain.runtime.processes import current_phase
from lmtrain.runtime.processes.fault_injection import fault_point


class Loader:
    """Iterator over training steps for one data-parallel rank, number `dp_index` of `dp_size`.

    `prefetch_steps`: steps that a thread reads ahead, 0 for none. `pin`: put batches into page-locked memory.
    Raises SettingsError unless every batch size of the plan from `first_step` on is a multiple of micro_batch *
    dp_size.
    """

    def __init__(
        self,
        dataset: Dataset,
        order: SampleOrder,
        plan: BatchPlan,
        micro_batch: int,
        dp_index: int = 0,
        dp_size: int = 1,
        prefetch_steps: int = 2,
        pin: bool = False,
        first_step: int = 0,
    ) -> None:
        for size in plan.sizes_between(first_step):
            if size % (micro_batch * dp_size):
                raise SettingsError([
                    f"A global batch of {size} samples is not a multiple of micro_batch={micro_batch} x dp={dp_size}. "
                    f"Give a multiple of {micro_batch * dp_size}."
                ])
        self.dataset, self.order, self.plan = dataset, order, plan
        self.micro_batch, self.dp_index, self.dp_size = micro_batch, dp_index, dp_size
        self.prefetch_steps, self.pin = prefetch_steps, pin
        self.data_wait_s = 0.0  # seconds that the consumer waited for the last step
        self._prefetcher: _Prefetcher | None = None

    def read(self, step: int) -> StepBatches:
        """Return this rank's micro-batches of one training step, read in the calling thread."""
        first, num_samples = self.plan.range_of(step)
        ids = self.order.ids(first, num_samples)
        own_ids = ids.reshape(-1, self.dp_size, self.micro_batch)[:, self.dp_index]
        microbatches = [self.dataset.batch(row).map(self._to_torch) for row in own_ids]
        by_source = counts_by_source(self.dataset, ids)
        labels, tokens = total_counts(by_source) if by_source else self.dataset.counts(ids)
        counts = labels_per_term(labels, num_samples, microbatches[0])
        return StepBatches(step, microbatches, num_samples, counts, ids, tokens, by_source)

    def steps(self, start: int, stop: int) -> Iterator[StepBatches]:
        """Yield this rank's batches of the training steps start to stop - 1. With `prefetch_steps`, a thread reads them
        ahead; if reading fails in the thread, the exception is raised here, at the step it belongs to.
        """
        self.close()
        prefetcher = self._prefetcher = _Prefetcher(self, start, stop) if self.prefetch_steps else None
        try:
            for step in range(start, stop):
                current_phase.enter("data", step + 1)
                began = time.perf_counter()
                fault_point("data.next")
                batches = prefetcher.get() if prefetcher else self.read(step)
                self.data_wait_s = time.perf_counter() - began
                current_phase.leave()
                yield batches
        finally:
            if prefetcher:
                prefetcher.close()

    def close(self) -> None:
        """Stop the thread that reads ahead, if there is one; `steps` may be called again afterwards."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    def _to_torch(self, array: NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self.pin else tensor


class _Prefetcher:
    """Thread that reads steps start to stop - 1 ahead and keeps up to `prefetch_steps` of them in a bounded queue."""

    def __init__(self, loader: Loader, start: int, stop: int) -> None:
        self._ready: queue.Queue[StepBatches | BaseException] = queue.Queue(maxsize=loader.prefetch_steps)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(loader, start, stop), name="loader", daemon=True)
        self._thread.start()

    def get(self) -> StepBatches:
        """Return the batches of the next step, waiting until they are read. Raise the exception that the thread raised,
        if any.
        """
        if self._closed.is_set():
            raise RuntimeError("The loader is closed. Call steps() again.")
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        self._closed.set()
        while self._thread.is_alive():  # because: the thread may be blocked on a full queue until an item is removed
            try:
                self._ready.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)

    def _run(self, loader: Loader, start: int, stop: int) -> None:
        """Read the batches of steps start to stop - 1 into the queue; the target of the thread. It ends at `close`, or
        at the first exception, which is put into the queue.
        """
        for step in range(start, stop):
            try:
                item: StepBatches | BaseException = loader.read(step)
            except BaseException as error:
                item = error
            if self._closed.is_set():
                return
            self._ready.put(item)
            if self._closed.is_set() or isinstance(item, BaseException):
                return
