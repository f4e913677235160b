"""The clock of a device that works beside the host, as a GPU does: moments in its queues, read once it has passed them.

Called by the recorder. A moment is an event in the stream that is current; nobody waits for one. Once in a step the
device has done all it was given, and the host knows: an event recorded there ties the device's clock to the host's.
Must not import torch: it is handed `torch.cuda`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lmtrain.observe.spans.format import Flag


@dataclass(frozen=True, slots=True)
class Moment:
    event: Any
    aside: bool  # in another stream than that of the computation


@dataclass
class _Step:
    events: list[Any] = field(default_factory=list)
    spans: list[tuple[Moment, Moment, tuple[int, ...]]] = field(default_factory=list)
    known: tuple[Any, int] | None = None  # an event, and the host's clock when it happened


class DeviceClock:
    def __init__(self, cuda: Any) -> None:
        self._cuda, self._computing = cuda, cuda.current_stream()
        self._steps = deque([_Step()])
        self._free: list[Any] = []
        self._resting: list[Any] = []  # of the step read last: the next one may have begun with one of them
        self._known: tuple[Any, int] | None = None

    def now(self) -> Moment:
        stream = self._cuda.current_stream()
        event = self._free.pop() if self._free else self._cuda.Event(enable_timing=True)
        event.record(stream)
        self._steps[-1].events.append(event)
        return Moment(event, stream != self._computing)

    def set(self) -> None:
        """The device is idle: what is recorded now happens now."""
        self._steps[-1].known = self.now().event, time.monotonic_ns()

    def next_step(self) -> None:
        self._steps.append(_Step())

    def add(self, began: Moment, ended: Moment, rest: tuple[int, ...]) -> None:
        """`rest` are SPAN's fields behind the two times; the flags are the last of them."""
        self._steps[-1].spans.append((began, ended, rest))

    def read(self) -> Iterator[tuple[int, ...]]:
        """SPAN's fields of the spans of whole steps, oldest first, as far as the device has come."""
        while self._steps and all(ended.event.query() for _, ended, _ in self._steps[0].spans):
            step = self._steps.popleft()
            self._known = known = step.known or self._known
            for began, ended, (*rest, flags) in step.spans if known else ():
                flags |= Flag.DEVICE | (Flag.ASIDE if began.aside else 0)
                yield self._on_host(began), self._on_host(ended), *rest, flags
            self._free += self._resting
            self._resting = step.events
        if not self._steps:
            self._steps.append(_Step())

    def _on_host(self, moment: Moment) -> int:
        assert self._known is not None
        event, ns = self._known
        elapsed_ms: float = event.elapsed_time(moment.event)
        return ns + round(elapsed_ms * 1e6)
