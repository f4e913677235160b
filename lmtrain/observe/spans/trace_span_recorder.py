"""Recorder that turns phase marks of a process's main thread into spans in its trace file.

Installed in current_phase while a step is traced. An entered phase lasts until it is left or another phase is entered;
work inside it has its own span. Messages and collectives are numbered from 0 in each step: all members give a
collective the same number, because they reach it in the same order. Times are the host's or the device's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lmtrain.errors import LmtrainError
from lmtrain.observe.spans.span_file import Axis, Flag, Kind, SpanFile
from lmtrain.runtime.processes import current_phase

_MESSAGE_NAMES = ("activations", "gradients")
_SHORT_WAIT_NS = 20_000  # because: most messages were taken long before, and so short a wait is no information
TRACE_NONE, TRACE_SAMPLED, TRACE_ALL = "none", "sampled", "all"
_SAMPLE_PERIOD = 1000
# because: runs save and validate at multiples of 5 or 8, such steps are not typical, and these numbers are no multiples
_SAMPLE_OFFSETS = (333, 334)
REQUESTED_STEPS = 6


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in a GPU stream's work, marked by a CUDA event."""

    event: Any
    aside: bool  # on a stream other than the computation's


@dataclass
class _Step:
    events: list[Any] = field(default_factory=list)
    spans: list[tuple[Moment, Moment, tuple[int, ...]]] = field(default_factory=list)
    reference: tuple[Any, int] | None = None  # an event, and the host's clock when it happened


class DeviceClock:
    """Times of a GPU's streams by events, which are converted to the host's clock once the device has reached them."""

    def __init__(self, cuda: Any) -> None:
        self._cuda, self._compute_stream = cuda, cuda.current_stream()
        self._steps = deque([_Step()])
        self._unused: list[Any] = []
        self._recent: list[Any] = []  # events of the step read last: the next step may have begun with one of them
        self._reference: tuple[Any, int] | None = None

    def record_event(self) -> Moment:
        """Record a CUDA event in the current stream and return it as a Moment. Its time is known only after the GPU has
        reached it.
        """
        stream = self._cuda.current_stream()
        event = self._unused.pop() if self._unused else self._cuda.Event(enable_timing=True)
        event.record(stream)
        self._steps[-1].events.append(event)
        return Moment(event, stream != self._compute_stream)

    def set_reference(self) -> None:
        """Record which host time belongs to the GPU's present time. The GPU must be idle, so that an event recorded now
        happens now.
        """
        self._steps[-1].reference = self.record_event().event, time.monotonic_ns()

    def next_step(self) -> None:
        """Collect the following spans and events in a new step."""
        self._steps.append(_Step())

    def add_span(self, began: Moment, ended: Moment, fields: tuple[int, ...]) -> None:
        """Queue a span until the device reaches it; `fields` are SPAN's fields after the two times, the flags last."""
        self._steps[-1].spans.append((began, ended, fields))

    def finished_spans(self) -> Iterator[tuple[int, ...]]:
        """Yield, and forget, the spans of the steps that the GPU has finished completely, the oldest step first. Each
        span is a tuple of record fields (dtype SPAN), with times in nanoseconds of the host's clock.

        Spans of steps before the first pair of GPU and host time are dropped.
        """
        while self._steps and all(ended.event.query() for _, ended, _ in self._steps[0].spans):
            step = self._steps.popleft()
            self._reference = reference = step.reference or self._reference
            for began, ended, (*fields, flags) in step.spans if reference else ():
                flags |= Flag.DEVICE | (Flag.ASIDE if began.aside else 0)
                yield self._on_host(began), self._on_host(ended), *fields, flags
            self._unused += self._recent
            self._recent = step.events
        if not self._steps:
            self._steps.append(_Step())

    def _on_host(self, moment: Moment) -> int:
        assert self._reference is not None
        event, ns = self._reference
        return ns + round(float(event.elapsed_time(moment.event)) * 1e6)  # because: torch measures milliseconds


_PHASE_KINDS = {
    name: int(Kind[name.upper()]) for name in ("data", "forward", "backward", "input", "weight", "optimizer")
}
_BLOCK_KINDS = {name: int(Kind[name.upper()]) for name in ("save", "validation", "evaluation")}
_AXES = {axis.name.lower(): int(axis) for axis in Axis}
# because: reading an attribute of an enum takes longer than all other work for a span
_DATA, _STEP, _COLLECTIVE, _SEND, _RECEIVE = map(int, (Kind.DATA, Kind.STEP, Kind.COLLECTIVE, Kind.SEND, Kind.RECEIVE))
_PP, _EARLY = int(Axis.PP), int(Flag.EARLY)

Time = int | Moment  # nanoseconds of the host's monotonic clock, or a moment on the GPU


class Recorder:
    """Writer of the spans of traced steps; implements current_phase.SpanRecorder."""

    def __init__(self, file: SpanFile, device: DeviceClock | None = None) -> None:
        """Open a recorder that writes to `file`. `device` is the clock of a device beside the host, such as a GPU."""
        self.file, self.device = file, device
        self._step = 0
        self._step_began: Time | None = None
        self._kind: int | None = None  # kind of the entered phase
        self._began: Time = 0
        self._microbatch = self._stage = -1
        self._counts: dict[tuple[str | int, int], int] = {}  # of messages and collectives

    def begin_step(self, step: int) -> None:
        """Write the span of the previous step, and begin the span of step number `step`."""
        self._step, self._step_began = step, self.end_step()
        self._counts.clear()

    def end_step(self) -> Time:
        """Write the span of the current step, if one has begun. Return the time of this call: a Moment on the GPU, or
        nanoseconds of the host's clock.
        """
        self.leave()
        if self.device is not None:
            self.device.next_step()
        ended = self.current_time()
        if self._step_began is not None:
            self._write_span(self._step_began, ended, _STEP)
        self._step_began = None
        return ended

    def current_time(self, tensor: Any = None) -> Time:
        """Return the current time where `tensor` is: a Moment on the GPU, or nanoseconds of the host's clock if the
        tensor is on the host or no GPU is used. Without a tensor it is the GPU's time if one is used.
        """
        if self.device is None or not (tensor is None or tensor.is_cuda):
            return time.monotonic_ns()
        return self.device.record_event()

    def enter(self, phase: str, half: str, microbatch: int, stage: int) -> None:
        """End the previous phase's span, and begin the span of `phase` for a micro-batch of a pipeline stage (-1:
        none). `half` is "input" or "weight" for one half of a split backward, else empty.
        """
        self.leave()
        kind = self._kind = _PHASE_KINDS.get(half or phase)
        self._microbatch, self._stage = microbatch, stage
        if kind is not None:
            self._began = time.monotonic_ns() if kind == _DATA else self.current_time()

    def leave(self) -> None:
        """Write the span of the current phase, which ends now; do nothing if no phase has begun."""
        kind, self._kind = self._kind, None
        if kind is not None:
            ended = time.monotonic_ns() if kind == _DATA else self.current_time()
            self._write_span(self._began, ended, kind, "", 0, 0, 0, -1, self._microbatch, self._stage)

    def begin(self, mark: current_phase.within) -> Time | None:
        """Return the start time of a `within` block, to be passed to `end`; `mark` is the block's context manager.
        Return None if blocks of its kind are not traced.
        """
        if mark.axis is not None:
            return time.monotonic_ns() if self.device is None else self.current_time(mark.tensor)
        return time.monotonic_ns() if mark.phase in _BLOCK_KINDS or mark.name is current_phase.DEVICE_WAIT else None

    def end(self, mark: current_phase.within, began: Time) -> None:
        """Write the span of the `within` block that has just ended; `mark` is its context manager and `began` what
        `begin` returned. For a block that waited until the GPU was idle, record instead a pair of equal host and GPU
        times.
        """
        if mark.axis is not None:
            self.record_collective(began, mark.name, mark.axis, mark.tensor, -1, mark.early)
        elif mark.phase in _BLOCK_KINDS:
            self._write_span(began, time.monotonic_ns(), _BLOCK_KINDS[mark.phase])
        elif self.device is not None:
            self.device.set_reference()

    def record_message(self, began: Time, kind: str, peer: int, tensor: Any, key: Any) -> None:
        ended, number = self.current_time(tensor), self._next_number((kind, peer))
        if kind != "send":  # because: after the wait for a message, or for its space, the computation begins
            on_host = self.device is not None and isinstance(ended, int)  # such as a message header
            self._began = self.current_time() if on_host else ended
        flags = _EARLY if kind == "taken" else 0
        if flags and isinstance(began, int) and isinstance(ended, int) and ended - began < _SHORT_WAIT_NS:
            return
        span_kind, name, microbatch, stage = _RECEIVE if kind == "receive" else _SEND, "" if flags else "terms", -1, -1
        if key is not None:
            name, microbatch, stage = _MESSAGE_NAMES[key.backward], key.microbatch, key.stage
        self._write_span(began, ended, span_kind, name, _PP, number, tensor.nbytes, peer, microbatch, stage, flags)

    def record_collective(
        self, began: Time, name: str, axis: current_phase.NamedAxis, tensor: Any, peer: int = -1, early: bool = False
    ) -> None:
        ended = time.monotonic_ns() if self.device is None else self.current_time(tensor)
        axis_number = _AXES.get(axis.name, 0)
        number = self._next_number((axis_number, peer))
        flags = _EARLY if early else 0
        self._write_span(began, ended, _COLLECTIVE, name, axis_number, number, tensor.nbytes, peer, flags=flags)

    def read_device(self) -> None:
        """Write the spans of all steps that the GPU has finished by now to the trace file."""
        if self.device is not None:
            for values in self.device.finished_spans():
                self.file.write(*values)

    def close(self) -> None:
        """Write the span of the current step and the spans that the GPU has finished, and close the file."""
        self.end_step()
        self.read_device()
        self.file.close()

    def _next_number(self, key: tuple[str | int, int]) -> int:
        number = self._counts[key] = self._counts.get(key, -1) + 1
        return number

    def _write_span(
        self, began: Time, ended: Time, kind: int, name: str = "", axis: int = 0, number: int = 0, num_bytes: int = 0,
        peer: int = -1, microbatch: int = -1, stage: int = -1, flags: int = 0,
    ) -> None:  # fmt: skip
        file, device = self.file, self.device
        name_index = file.name_indices.get(name)
        if name_index is None:
            name_index = file.name_index(name)
        if device is None or isinstance(began, int):  # because: both times are of the host's clock
            file.write(
                began, ended,  # type: ignore[arg-type]
                num_bytes, self._step, number, microbatch, peer, stage, name_index, kind, axis, flags,
            )  # fmt: skip
        else:
            device.add_span(
                began, ended,  # type: ignore[arg-type]
                (num_bytes, self._step, number, microbatch, peer, stage, name_index, kind, axis, flags),
            )  # fmt: skip


_EARLY_STEPS = range(10, 16)  # steps of each start; caches and buffers are allocated by then


class Tracer:
    """Selection of the steps to trace, by `observe.trace` or by request; opens and closes the recorder."""

    def __init__(self, mode: str, open_recorder: Callable[[], Recorder], report: Callable[[str], None]) -> None:
        self.mode, self._open_recorder, self._report = mode, open_recorder, report
        self.recorder: Recorder | None = None  # None until there is a file
        self._is_recording = self._failed = False
        self._steps_before, self._requested_until = current_phase.main.num_steps, 0

    @property
    def _num_begun(self) -> int:
        """The number of steps of this start that have begun."""
        return current_phase.main.num_steps - self._steps_before

    def request_steps(self) -> None:
        """Trace the next few steps, whatever the setting. All ranks must call it after the same step."""
        self._requested_until, self._failed = self._num_begun + REQUESTED_STEPS, False

    def begin_step(self, step: int) -> None:
        """Begin step number `step`: record its spans if the trace mode or a request for a trace selects it, else stop
        recording. If the trace file cannot be written, report that once and trace no more.
        """
        is_traced = not self._failed and self._is_traced(step)
        if is_traced and self.recorder is None:
            self._open_file()
        recorder = self.recorder
        if recorder is None:
            return
        if recorder.file.problem is not None:
            self._fail(recorder.file.problem)
            self._end_file()
        elif is_traced:
            recorder.begin_step(step)
            self._set_recorder(recorder)
        elif self._is_recording:
            recorder.end_step()
            self._set_recorder(None)
        if self.mode == TRACE_ALL or not self._is_recording:
            recorder.read_device()

    def close(self) -> None:
        current_phase.set_step_callback(None)
        self._end_file()

    def _is_traced(self, step: int) -> bool:
        return (
            self.mode == TRACE_ALL
            or self._num_begun <= self._requested_until
            or (
                self.mode == TRACE_SAMPLED
                and (self._num_begun in _EARLY_STEPS or step % _SAMPLE_PERIOD in _SAMPLE_OFFSETS)
            )
        )

    def _open_file(self) -> None:
        try:
            self.recorder = self._open_recorder()
        except LmtrainError as error:
            self._fail(str(error))

    def _end_file(self) -> None:
        self._set_recorder(None)
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.close()

    def _set_recorder(self, recorder: Recorder | None) -> None:
        self._is_recording = recorder is not None
        current_phase.set_recorder(recorder)

    def _fail(self, why: str) -> None:
        self._failed = True
        self._report(f"{why} No step is traced from here on; training goes on.")
