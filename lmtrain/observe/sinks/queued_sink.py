"""A queue and a thread in front of each sink, so that a slow, failing or hanging backend costs records, never a step.

The run passes rows and histograms; the thread opens the sink, feeds it from a bounded queue and closes it. Problems are
reported by the training thread, with the next record or at the end, because the view and the log have only one writer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from lmtrain.runfolder.tensorboard_metric_names import Histogram, row_measures, source_measures
from lmtrain.runtime.terminal_safe_text import warn

Histograms = Mapping[str, Histogram]
CAPACITY = 1000  # records; because: at a row per second a backend may then be unavailable for a quarter of an hour
CLOSE_TIMEOUT_S = 30.0  # seconds for the records still in the queue when the run is over
_CURVES = {  # event -> key of a row -> name of its curve
    "step": {
        "loss": "loss/train", "z_loss": "loss/z", "lr": "optim/lr", "grad_norm": "optim/grad_norm",
        "loss_scale": "optim/loss_scale", "skipped": "optim/skipped", "tokens": "progress/tokens",
        "samples": "progress/samples", "stage_number": "progress/stage", "tokens_per_s": "speed/tokens_per_s",
        "mfu": "speed/mfu", "data_wait_s": "speed/data_wait_s", "memory_bytes": "memory/bytes",
    },
    "save": {"write_s": "save/write_s", "stall_s": "save/stall_s"},
}  # fmt: skip
_KEY_PREFIXES = ("loss/", "straggler_")  # prefixes of keys: terms of the loss, and measurements of slow ranks

# pages of related curves, for a sink that supports a layout: page -> chart -> patterns of names
CHARTS = {
    "loss": {"train and validation": ["loss/train$", "loss/valid.*", "loss/ema.*"],
             "terms": ["loss/(?!train|valid|ema).*"], "by source": ["loss/train/.*"]},
    "quality": {"validation": ["valid/.*", "ema/.*"], "evaluation": ["eval/.*"]},
    "optimizer": {"learning rate": ["optim/lr"], "gradient norm": ["optim/grad_norm"], "scale": ["optim/loss_scale"]},
    "machine": {"tokens per second": ["speed/tokens_per_s"], "MFU": ["speed/mfu"],
                "seconds": ["speed/data_wait_s", "save/.*"], "memory": ["memory/bytes"]},
}  # fmt: skip


def row_scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return curve name -> number for the values of a metrics row that are drawn as curves, such as "loss/train".
    Values that are missing or not numbers are left out.
    """
    if row["event"] in ("valid", "eval"):
        return row_measures(row)
    numbers: dict[str, Any] = {name: row.get(key) for key, name in _CURVES.get(row["event"], {}).items()}
    if row["event"] == "step":
        numbers |= {key.replace("straggler_", "straggler/"): row[key] for key in row if key.startswith(_KEY_PREFIXES)}
        numbers |= source_measures(row)
    return {name: float(value) for name, value in numbers.items() if type(value) in (int, float)}


class Sink(Protocol):
    """Interface of a backend. An exception loses one record, and the next record is tried again."""

    def write_row(self, row: Mapping[str, Any]) -> None: ...
    def write_histograms(self, step: int, histograms: Histograms) -> None: ...
    def close(self) -> None: ...


class QueuedSink:
    """Queue in front of a sink, emptied by a thread.

    `open` builds the sink in that thread and may take any time; its argument is a function for the sink's warnings.
    """

    def __init__(
        self, name: str, open: Callable[[Callable[[str], None]], Sink], report: Callable[[str], None] = warn,
        capacity: int = CAPACITY, close_timeout_s: float = CLOSE_TIMEOUT_S,
    ) -> None:  # fmt: skip
        self.name, self.num_records, self.num_lost = name, 0, 0
        self._open, self._report, self._close_timeout_s = open, report, close_timeout_s
        self._queue: deque[Callable[[Sink], None]] = deque()
        self._capacity, self._changed, self._is_closing = capacity, threading.Condition(), False
        self._messages: deque[str] = deque()
        self._reported_kinds: set[str] = set()
        self._thread = threading.Thread(target=self._feed, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def write_row(self, row: Mapping[str, Any]) -> None:
        self._enqueue(lambda sink: sink.write_row(row))

    def write_histograms(self, step: int, histograms: Histograms) -> None:
        self._enqueue(lambda sink: sink.write_histograms(step, histograms))

    def close(self) -> None:
        """Wait until all queued records are written, for at most the `close_timeout_s` of the constructor. Then report
        messages, and how many records were lost, through the callback of the constructor.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(self._close_timeout_s)
        num_lost = self.num_lost + len(self._queue)
        self._report_messages()
        if num_lost:
            self._report(
                f"{num_lost} of {self.num_records} records did not reach {self.name}; metrics.jsonl has them all."
            )
        elif self._thread.is_alive():
            self._report(f"{self.name} has not finished within {self._close_timeout_s:g} s; the run ends without it.")

    def _enqueue(self, work: Callable[[Sink], None]) -> None:
        self.num_records += 1
        with self._changed:
            has_room = len(self._queue) < self._capacity
            if has_room:
                self._queue.append(work)
                self._changed.notify()
        if not has_room:
            self.num_lost += 1
            self._queue_message(
                "slow", f"{self.name} is too slow: {self._capacity} records wait for it. Further records are lost."
            )
        if self._messages:
            self._report_messages()

    def _feed(self) -> None:
        sink: Sink | None = None
        try:
            sink = self._open(lambda text: self._queue_message(text, text))
        except Exception as error:
            self._queue_failure(error)
        while (work := self._next()) is not None:
            try:
                if sink is None:
                    raise ConnectionError(f"the sink {self.name} could not be opened")
                work(sink)
            except Exception as error:
                self.num_lost += 1
                self._queue_failure(error)
        try:
            if sink is not None:
                sink.close()
        except Exception as error:
            self._queue_failure(error)

    def _next(self) -> Callable[[Sink], None] | None:
        """Wait for the next queued record, and return the function that writes it to a sink. Return None once the queue
        is closed and empty.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closing)
            return self._queue.popleft() if self._queue else None

    def _queue_failure(self, error: Exception) -> None:
        self._queue_message(
            "failed", f"{self.name} failed: {error}. Training goes on; records that it does not take are lost."
        )

    def _queue_message(self, kind: str, text: str) -> None:
        """Queue the warning `text`, which the training thread will report. Only the first warning of each `kind` of
        problem is kept.
        """
        if kind not in self._reported_kinds:
            self._reported_kinds.add(kind)
            self._messages.append(text)

    def _report_messages(self) -> None:
        while self._messages:
            self._report(self._messages.popleft())
