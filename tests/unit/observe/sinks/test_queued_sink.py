"""A backend that fails, hangs or is slow costs its own records, is said once, and never holds up who writes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from lmtrain.observe.sinks.queued_sink import QueuedSink
from lmtrain.runfolder.tensorboard_metric_names import Histogram


class Kept:
    """Keeps what it is given; `gate` shut, it hangs, and each of `bad` steps raises."""

    def __init__(self, bad: tuple[int, ...] = (), gate: threading.Event | None = None) -> None:
        self.bad, self.gate, self.steps, self.closed = bad, gate, list[int](), False
        self.busy = threading.Event()

    def write_row(self, row: Mapping[str, Any]) -> None:
        self.busy.set()
        if self.gate is not None:
            self.gate.wait(60)
        if row["step"] in self.bad:
            raise OSError("no route to host")
        self.steps.append(row["step"])

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        self.steps.append(-step)

    def close(self) -> None:
        self.closed = True


def test_everything_arrives_in_order_before_the_end() -> None:
    kept, said = Kept(), list[str]()
    behind = QueuedSink("it", lambda tell: kept, said.append)
    for step in range(1, 300):
        behind.write_row({"event": "step", "step": step})
    behind.write_histograms(7, {})
    behind.close()
    assert kept.steps == [*range(1, 300), -7]
    assert kept.closed
    assert said == []


def test_a_failure_is_said_once_and_counted_and_the_next_record_is_tried() -> None:
    kept, said = Kept(bad=(2, 3, 5)), list[str]()
    behind = QueuedSink("it", lambda tell: kept, said.append)
    for step in range(1, 8):
        behind.write_row({"step": step})
    behind.close()
    assert kept.steps == [1, 4, 6, 7]
    assert said == [
        "it failed: no route to host. Training goes on; records that it does not take are lost.",
        "3 of 7 records did not reach it; metrics.jsonl has them all.",
    ]


def test_one_that_cannot_be_opened_loses_all() -> None:
    said = list[str]()

    def refused(tell: Any) -> Kept:
        raise ConnectionError("no account")

    behind = QueuedSink("it", refused, said.append)
    for step in range(3):
        behind.write_row({"step": step})
    behind.close()
    assert said[0].startswith("it failed: no account. ")
    assert said[1:] == ["3 of 3 records did not reach it; metrics.jsonl has them all."]


def test_one_that_hangs_is_not_waited_for() -> None:
    gate, said = threading.Event(), list[str]()
    kept = Kept(gate=gate)
    behind = QueuedSink("it", lambda tell: kept, said.append, capacity=3, close_timeout_s=0.01)
    behind.write_row({"step": 0})
    assert kept.busy.wait(60)
    for step in range(1, 10):
        behind.write_row({"step": step})
    behind.close()
    gate.set()
    assert said == [
        "it is too slow: 3 records wait for it. Further records are lost.",
        "9 of 10 records did not reach it; metrics.jsonl has them all.",
    ]


def test_what_a_sink_says_of_itself_is_said_by_the_thread_that_trains() -> None:
    speakers, told = set[int](), threading.Event()

    def talking(tell: Any) -> Kept:
        tell("the disk is full")
        told.set()
        return Kept()

    behind = QueuedSink("it", talking, lambda text: speakers.add(threading.get_ident()))
    assert told.wait(60)
    behind.write_row({"step": 1})
    behind.close()
    assert speakers == {threading.get_ident()}
