"""A queue and a thread in front of each sink, so that a slow, failing or hanging backend costs records, never a step.

The run passes rows and histograms; the thread opens the sink, feeds it from a bounded queue and closes it. Problems are
reported by the training thread, with the next record or at the end, because the view and the log have only one writer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from lmtrain.observe.measure.named_measures import Histogram, row_measures
from lmtrain.observe.safe_text import warn

Histograms = Mapping[str, Histogram]
CAPACITY = 1000  # records; because: at a row per second a backend may then be unavailable for a quarter of an hour
END_S = 30.0  # seconds for the records still in the queue when the run is over
_STEP = {
    "loss": "loss/train", "lr": "optim/lr", "grad_norm": "optim/grad_norm", "loss_scale": "optim/loss_scale",
    "skipped": "optim/skipped", "tokens": "progress/tokens", "samples": "progress/samples",
    "tokens_per_s": "speed/tokens_per_s", "mfu": "speed/mfu", "data_wait_s": "speed/data_wait_s",
    "memory_bytes": "memory/bytes",
}  # fmt: skip
_SAVE = {"write_s": "save/write_s", "stall_s": "save/stall_s"}
_FAMILIES = ("loss/", "straggler_")  # prefixes of keys: terms of the loss, and measurements of slow ranks

# pages of related curves, for a sink that supports a layout: page -> chart -> patterns of names
CHARTS = {
    "loss": {"train and validation": ["loss/train", "loss/valid.*"], "terms": ["loss/(?!train|valid).*"]},
    "quality": {"validation": ["valid/.*"], "evaluation": ["eval/.*"]},
    "optimizer": {"learning rate": ["optim/lr"], "gradient norm": ["optim/grad_norm"], "scale": ["optim/loss_scale"]},
    "machine": {"tokens per second": ["speed/tokens_per_s"], "MFU": ["speed/mfu"],
                "seconds": ["speed/data_wait_s", "save/.*"], "memory": ["memory/bytes"]},
}  # fmt: skip


def scalars_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row that make curves, by the curve's name; missing and unknown values are left out."""
    if row["event"] in ("valid", "eval"):
        return row_measures(row)
    names = {"step": _STEP, "save": _SAVE}.get(row["event"], {})
    found: dict[str, Any] = {name: row.get(key) for key, name in names.items()}
    if row["event"] == "step":
        found |= {key.replace("straggler_", "straggler/"): row[key] for key in row if key.startswith(_FAMILIES)}
    return {name: float(value) for name, value in found.items() if type(value) in (int, float)}


class Sink(Protocol):
    """Interface of a backend. An exception loses one record, and the next record is tried again."""

    def row(self, row: Mapping[str, Any]) -> None: ...
    def histograms(self, step: int, found: Histograms) -> None: ...
    def close(self) -> None: ...


class Behind:
    """Queue in front of a sink, emptied by a thread.

    `open` builds the sink in that thread and may take any time; its argument is a function for the sink's warnings.
    """

    def __init__(
        self, name: str, open: Callable[[Callable[[str], None]], Sink], say: Callable[[str], None] = warn,
        capacity: int = CAPACITY, end_s: float = END_S,
    ) -> None:  # fmt: skip
        self.name, self.given, self.lost = name, 0, 0
        self._open, self._say, self._end_s = open, say, end_s
        self._waiting: deque[Callable[[Sink], None]] = deque()
        self._capacity, self._changed, self._over = capacity, threading.Condition(), False
        self._to_say: deque[str] = deque()
        self._said: set[str] = set()
        self._thread = threading.Thread(target=self._feed, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def row(self, row: Mapping[str, Any]) -> None:
        self._put(lambda sink: sink.row(row))

    def histograms(self, step: int, found: Histograms) -> None:
        self._put(lambda sink: sink.histograms(step, found))

    def close(self) -> None:
        """Wait up to `end_s` seconds for the queue to empty, and report lost records."""
        with self._changed:
            self._over = True
            self._changed.notify()
        self._thread.join(self._end_s)
        lost = self.lost + len(self._waiting)
        self._speak()
        if lost:
            self._say(f"{lost} of {self.given} records did not reach {self.name}; metrics.jsonl has them all.")
        elif self._thread.is_alive():
            self._say(f"{self.name} has not come to its end within {self._end_s:g} s, and is left alone.")

    def _put(self, work: Callable[[Sink], None]) -> None:
        self.given += 1
        with self._changed:
            has_room = len(self._waiting) < self._capacity
            if has_room:
                self._waiting.append(work)
                self._changed.notify()
        if not has_room:
            self.lost += 1
            self._tell("slow", f"{self.name} is too slow: {self._capacity} records wait for it. Further ones are lost.")
        if self._to_say:
            self._speak()

    def _feed(self) -> None:
        sink: Sink | None = None
        try:
            sink = self._open(lambda text: self._tell(text, text))
        except Exception as error:
            self._failed(error)
        while (work := self._next()) is not None:
            try:
                if sink is None:
                    raise ConnectionError("it could not be opened")
                work(sink)
            except Exception as error:
                self.lost += 1
                self._failed(error)
        try:
            if sink is not None:
                sink.close()
        except Exception as error:
            self._failed(error)

    def _next(self) -> Callable[[Sink], None] | None:
        """Return the next record's work, waiting for it; None once the run is over and the queue is empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._over)
            return self._waiting.popleft() if self._waiting else None

    def _failed(self, error: Exception) -> None:
        self._tell("failed", f"{self.name} failed: {error}. Training goes on; records that it does not take are lost.")

    def _tell(self, what: str, text: str) -> None:
        """Queue a message for the training thread to report, once per kind of problem."""
        if what not in self._said:
            self._said.add(what)
            self._to_say.append(text)

    def _speak(self) -> None:
        while self._to_say:
            self._say(self._to_say.popleft())
