"""Recorder that turns phase marks of a process's main thread into spans in its trace file.

Installed in phases while a step is traced. An entered phase lasts until it is left or another phase is entered; work
inside it has its own span. Messages and collectives are numbered from 0 in each step: all members give a collective the
same number, because they reach it in the same order. Times are the host's or the device's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lmtrain.errors import LmtrainError
from lmtrain.observe.measure import phases
from lmtrain.observe.spans.format import Axis, Flag, Kind, SpanFile

_LETTERS = ("activations", "gradients")
_AT_ONCE_NS = 20_000  # because: most messages were taken long before, and so short a wait has no information
NONE, SAMPLED, ALL = "none", "sampled", "all"
_EVERY = 1000
# because: runs save and validate at multiples of 5 or 8, such steps are not typical, and these numbers are no multiples
_OFF_BEAT = (333, 334)
ASKED_STEPS = 6


@dataclass(frozen=True, slots=True)
class Moment:
    event: Any
    aside: bool  # on a stream other than the computation's


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
        self._resting: list[Any] = []  # events of the step read last: the next step may have begun with one of them
        self._known: tuple[Any, int] | None = None

    def now(self) -> Moment:
        stream = self._cuda.current_stream()
        event = self._free.pop() if self._free else self._cuda.Event(enable_timing=True)
        event.record(stream)
        self._steps[-1].events.append(event)
        return Moment(event, stream != self._computing)

    def set(self) -> None:
        """Record the pair of device and host time; the device is idle, so an event recorded now happens now."""
        self._steps[-1].known = self.now().event, time.monotonic_ns()

    def next_step(self) -> None:
        self._steps.append(_Step())

    def add(self, began: Moment, ended: Moment, rest: tuple[int, ...]) -> None:
        """Queue a span until the device reaches it; `rest` are SPAN's fields after the two times, the flags last."""
        self._steps[-1].spans.append((began, ended, rest))

    def read(self) -> Iterator[tuple[int, ...]]:
        """Yield SPAN's fields of the spans of whole steps that the device has finished, oldest first."""
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


_ENTERED = {name: int(Kind[name.upper()]) for name in ("data", "forward", "backward", "input", "weight", "optimizer")}
_WITHIN = {name: int(Kind[name.upper()]) for name in ("save", "validation", "evaluation")}
_AXES = {axis.name.lower(): int(axis) for axis in Axis}
# because: reading an attribute of an enum takes longer than all other work for a span
_DATA, _STEP, _COLLECTIVE, _SEND, _RECEIVE = map(int, (Kind.DATA, Kind.STEP, Kind.COLLECTIVE, Kind.SEND, Kind.RECEIVE))
_PP, _EARLY = int(Axis.PP), int(Flag.EARLY)

Time = int | Moment


class Recorder:
    def __init__(self, file: SpanFile, device: DeviceClock | None = None) -> None:
        """Open a recorder that writes to `file`. `device` is the clock of a device beside the host, such as a GPU."""
        self.file, self.device = file, device
        self._step = 0
        self._began_step: Time | None = None
        self._kind: int | None = None  # kind of the entered phase
        self._began: Time = 0
        self._microbatch = self._stage = -1
        self._counts: dict[tuple[str | int, int], int] = {}  # of messages and collectives

    def begin_step(self, step: int) -> None:
        """End the previous step and begin this one."""
        now = self.end_step()
        self._step, self._began_step = step, now
        self._counts.clear()

    def end_step(self) -> Time:
        self.leave()
        if self.device is not None:
            self.device.next_step()
        now = self.now()
        if self._began_step is not None:
            self._add(self._began_step, now, _STEP)
        self._began_step = None
        return now

    def now(self, tensor: Any = None) -> Time:
        """Return the device's time, or the host's if the tensor is on the host or there is no device."""
        if self.device is None or not (tensor is None or tensor.is_cuda):
            return time.monotonic_ns()
        return self.device.now()

    def enter(self, phase: str, half: str, microbatch: int, stage: int) -> None:
        self.leave()
        kind = self._kind = _ENTERED.get(half or phase)
        self._microbatch, self._stage = microbatch, stage
        if kind is not None:
            self._began = time.monotonic_ns() if kind == _DATA else self.now()

    def leave(self) -> None:
        kind, self._kind = self._kind, None
        if kind is not None:
            now = time.monotonic_ns() if kind == _DATA else self.now()
            self._add(self._began, now, kind, "", 0, 0, 0, -1, self._microbatch, self._stage)

    def begin(self, mark: phases.within) -> Time | None:
        if mark.axis is not None:
            return time.monotonic_ns() if self.device is None else self.now(mark.tensor)
        return time.monotonic_ns() if mark.phase in _WITHIN or mark.what is phases.DEVICE_WAIT else None

    def end(self, mark: phases.within, began: Time) -> None:
        if mark.axis is not None:
            self.exchange(began, mark.what, mark.axis, mark.tensor, -1, mark.early)
        elif mark.phase in _WITHIN:
            self._add(began, time.monotonic_ns(), _WITHIN[mark.phase])
        elif self.device is not None:
            self.device.set()

    def message(self, began: Time, kind: str, peer: int, tensor: Any, letter: Any) -> None:
        now, number = self.now(tensor), self._count((kind, peer))
        if kind != "send":  # because: after the wait for a message, or for its space, the computation begins
            on_host = self.device is not None and isinstance(now, int)  # such as a message header, which is on the host
            self._began = self.now() if on_host else now
        flags = _EARLY if kind == "taken" else 0
        if flags and isinstance(began, int) and isinstance(now, int) and now - began < _AT_ONCE_NS:
            return
        of, name, microbatch, stage = _RECEIVE if kind == "receive" else _SEND, "" if flags else "terms", -1, -1
        if letter is not None:
            name, microbatch, stage = _LETTERS[letter.backward], letter.microbatch, letter.stage
        self._add(began, now, of, name, _PP, number, tensor.nbytes, peer, microbatch, stage, flags)

    def exchange(
        self, began: Time, what: str, axis: phases.Named, tensor: Any, peer: int = -1, early: bool = False
    ) -> None:
        now = time.monotonic_ns() if self.device is None else self.now(tensor)
        of = _AXES.get(axis.name, 0)
        number = self._count((of, peer))
        self._add(began, now, _COLLECTIVE, what, of, number, tensor.nbytes, peer, -1, -1, _EARLY if early else 0)

    def read_device(self) -> None:
        """Write the spans that the device has finished by now."""
        if self.device is not None:
            for values in self.device.read():
                self.file.write(*values)

    def close(self) -> None:
        self.end_step()
        self.read_device()
        self.file.close()

    def _count(self, key: tuple[str | int, int]) -> int:
        number = self._counts[key] = self._counts.get(key, -1) + 1
        return number

    def _add(
        self, began: Time, ended: Time, kind: int, name: str = "", axis: int = 0, number: int = 0, num_bytes: int = 0,
        peer: int = -1, microbatch: int = -1, stage: int = -1, flags: int = 0,
    ) -> None:  # fmt: skip
        file, device = self.file, self.device
        named = file.names.get(name)
        if named is None:
            named = file.number_of(name)
        if device is None or isinstance(began, int):  # because: both times are of the host's clock
            file.write(
                began, ended, num_bytes, self._step, number, microbatch, peer, stage, named, kind, axis, flags  # type: ignore[arg-type]
            )  # fmt: skip
        else:
            device.add(began, ended, (num_bytes, self._step, number, microbatch, peer, stage, named, kind, axis, flags))  # type: ignore[arg-type]


_SOON = range(10, 16)  # steps of each start; caches and buffers are allocated by then


class Tracer:
    def __init__(self, which: str, open_recorder: Callable[[], Recorder], say: Callable[[str], None]) -> None:
        self.which, self._open, self._say = which, open_recorder, say
        self.recorder: Recorder | None = None  # None until there is a file
        self._records = self._failed = False
        self._before, self._until = phases.main.steps, 0

    @property
    def _count(self) -> int:
        """The number of steps of this start that have begun."""
        return phases.main.steps - self._before

    def ask(self) -> None:
        """Trace the next few steps, whatever the setting. All ranks must call it after the same step."""
        self._until, self._failed = self._count + ASKED_STEPS, False

    def begin_step(self, step: int) -> None:
        wanted = not self._failed and self._wants(step)
        if wanted and self.recorder is None:
            self._open_file()
        recorder = self.recorder
        if recorder is None:
            return
        if recorder.file.problem is not None:
            self._fail(recorder.file.problem)
            self._end_file()
        elif wanted:
            recorder.begin_step(step)
            self._record(recorder)
        elif self._records:
            recorder.end_step()
            self._record(None)
        if self.which == ALL or not self._records:
            recorder.read_device()

    def close(self) -> None:
        phases.tell_steps(None)
        self._end_file()

    def _wants(self, step: int) -> bool:
        return (
            self.which == ALL
            or self._count <= self._until
            or (self.which == SAMPLED and (self._count in _SOON or step % _EVERY in _OFF_BEAT))
        )

    def _open_file(self) -> None:
        try:
            self.recorder = self._open()
        except LmtrainError as error:
            self._fail(str(error))

    def _end_file(self) -> None:
        self._record(None)
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.close()

    def _record(self, recorder: Recorder | None) -> None:
        self._records = recorder is not None
        phases.record(recorder)

    def _fail(self, why: str) -> None:
        self._failed = True
        self._say(f"{why} No step is traced from here on; training goes on.")
