"""The current phase of this process, marked where it changes and read by the watchdog even if the process hangs.

Marks: `enter("backward", microbatch=1)`, or `with within("collective", "the norm"):` for work that returns to the
previous phase. `main` is the training thread, `saver` the thread that writes checkpoints. Without a watchdog a mark is
a few assignments; with a watchdog the mark is also packed into shared memory, which the companion process reads without
involving this process.

The same marks become the spans of a traced step: `set_recorder` passes them to a recorder. Without a recorder a mark
only checks that there is none.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from time import monotonic_ns
from zlib import crc32

TYPE_CHECKING = False
if TYPE_CHECKING:  # because: importing typing takes a third of a companion's start time
    from typing import Any, Protocol

    class NamedAxis(Protocol):
        """An axis of the layout."""

        @property
        def name(self) -> str: ...

    class SpanRecorder(Protocol):
        """Recorder of the main thread's work. `current_time` returns an opaque time."""

        def current_time(self, tensor: Any = None) -> Any: ...
        def enter(self, phase: str, half: str, microbatch: int, stage: int) -> None: ...
        def leave(self) -> None: ...
        def begin(self, mark: within) -> Any: ...
        def end(self, mark: within, began: Any) -> None: ...
        def record_message(self, began: Any, kind: str, peer: int, tensor: Any, key: Any) -> None: ...
        def record_collective(
            self, began: Any, name: str, axis: NamedAxis, tensor: Any, peer: int, early: bool
        ) -> None: ...


PHASES = (
    "imports", "rendezvous", "build", "load", "data", "forward", "backward", "collective", "optimizer", "save",
    "validation", "evaluation",
)  # fmt: skip
COLLECTIVE, SAVE = "collective", "save"
MESSAGE = "a message"  # prefix of the names of waits for a message between pipeline stages
DEVICE_WAIT = "what the device has yet to do"  # a point at which the host has synchronized with the device
NUM_BYTES = 4096
_INDEX = {phase: index for index, phase in enumerate(PHASES)}
MESSAGES = len(PHASES)  # index in `ThreadPosition.spent_ns` of collectives that are messages between stages
_MARK = struct.Struct("<QBxxxiiqQQ48sQ")  # the mark number, first and last: equal if no write was in progress
# the newest step whose collectives came in another order than in the step before: step, expected name, actual name
_MISORDERED = struct.Struct("<q48s48s")
_SAVER_AT, _MISORDERED_AT, _NAMES_AT, _NAME_BYTES = 128, 256, 512, 48
_MAX_NAMES = 64 - len(PHASES)  # because: `seen_bits` is a 64-bit mask with one bit per phase and name
# checksums over the order of a step's collectives: step, checksum of the previous step; newest: step, number, checksum
_ORDER, _ORDER_AT, _ORDER_ENTRY, _NUM_ORDER_ENTRIES = struct.Struct("<qI"), 3072, struct.Struct("<qII"), 48

_memory: mmap.mmap | None = None
_names: dict[str, tuple[bytes, int]] = {}  # names of collectives: packed name, bit in `seen_bits`
_recorder: SpanRecorder | None = None  # the recorder, while this step is recorded
_on_step: Callable[[int], None] | None = None  # called with the number of each new step of the main thread


class ThreadPosition:
    """The phase, step and position of a thread."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.phase = PHASES[0]
        self.step = self.microbatch = self.stage = -1
        self.packed_name = b""
        self.num_marks = 0  # so far
        self.num_collectives = 0  # so far
        self.seen_bits = 0  # bit mask of the phases and collectives' names passed so far
        self.num_steps = 0  # begun so far
        self.order: list[str] = []  # names of this step's collectives, in order
        self.previous_order: list[str] = []
        self.order_crc = 0  # checksum over the order
        self.spent_ns = [0] * (len(PHASES) + 1)  # nanoseconds in each phase so far, up to the last mark
        self.since_ns = monotonic_ns()
        self.kind = 0  # index in `spent_ns` to which the time now counts

    def enter(
        self, phase: str, step: int | None = None, microbatch: int | None = None, stage: int | None = None,
        half: str = "",
    ) -> None:  # fmt: skip
        """Set this thread's phase, such as "forward", its step (None: unchanged), and its micro-batch and pipeline
        stage (None: none). `half` is "input" or "weight" if the phase is one half of a split backward. While a trace is
        recorded, the phase's span begins.
        """
        self.count_time(_INDEX[phase])
        self.seen_bits |= 1 << _INDEX[self.phase]
        self.phase, self.packed_name = phase, b""
        self.microbatch = -1 if microbatch is None else microbatch
        self.stage = -1 if stage is None else stage
        if step is not None and step != self.step:
            # because: the first step has nothing to compare with
            self.previous_order = self.order if self.num_steps else []
            if _memory is not None and self is main:
                _ORDER.pack_into(_memory, _ORDER_AT, step, self.order_crc if self.num_steps else 0)
            self.order, self.order_crc = [], 0
            self.step = step
            self.num_steps += 1
            if _on_step is not None and self is main:
                _on_step(step)
        if _memory is not None:
            self.write_mark()
        if _recorder is not None and self is main:
            _recorder.enter(phase, half, self.microbatch, self.stage)

    def count_time(self, kind: int) -> int:
        """Add the time since the last call to the counter that has been running, and let the counter with index `kind`
        run from now on. The counters are `spent_ns`, nanoseconds per phase. Return the index of the counter that was
        running.
        """
        now, old_kind = monotonic_ns(), self.kind
        self.spent_ns[old_kind] += now - self.since_ns
        self.since_ns, self.kind = now, kind
        return old_kind

    def count_wait(self, since_ns: int) -> None:
        """Move the time from `since_ns` (a value of `monotonic_ns`) until now from the counter of the current phase to
        that of collectives. Call it after a wait in a collective that no `within` block encloses.
        """
        wait_ns = monotonic_ns() - since_ns
        self.spent_ns[self.kind] -= wait_ns
        self.spent_ns[_INDEX[COLLECTIVE]] += wait_ns

    def write_mark(self) -> None:
        """Write this thread's phase, step, micro-batch, stage and collective to the shared memory that the companion
        process reads.
        """
        assert _memory is not None
        self.num_marks = mark = self.num_marks + 1
        _MARK.pack_into(
            _memory, self.offset, mark, _INDEX[self.phase], self.microbatch, self.stage, self.step,
            self.num_collectives, self.seen_bits, self.packed_name, mark,
        )  # fmt: skip

    def note_collective(self, name: str) -> None:
        """Append a collective's name to the list and the checksum of this step's collectives. If the previous step ran
        another collective at this point, write both names to the shared memory, for the watchdog.

        So a collective that is left out shows at the next collective.
        """
        order, previous_order = self.order, self.previous_order
        if len(order) < len(previous_order) and previous_order[len(order)] != name and _memory is not None:
            expected = previous_order[len(order)]
            _MISORDERED.pack_into(_memory, _MISORDERED_AT, self.step, _pack_name(expected)[0], _pack_name(name)[0])
        order.append(name)
        self.order_crc = crc32(_pack_name(name)[0], self.order_crc)
        if _memory is not None:
            offset = _ORDER_AT + _ORDER.size + len(order) % _NUM_ORDER_ENTRIES * _ORDER_ENTRY.size
            _ORDER_ENTRY.pack_into(_memory, offset, self.step, len(order), self.order_crc)


class within:  # because: lower case, since it reads as a word: `with within("save"):`
    """Context manager that sets this thread's phase for its block. An exception leaves the phase as it is."""

    __slots__ = (
        "axis", "began", "bit", "early", "kind", "kind_before", "name", "packed_name", "phase", "phase_before",
        "tensor", "thread",
    )  # fmt: skip

    def __init__(
        self, phase: str, name: str = "", thread: ThreadPosition | None = None, axis: NamedAxis | None = None,
        tensor: Any = None, *, early: bool = False,
    ) -> None:  # fmt: skip
        """Store the phase, and for a collective its name, its axis and the whole tensor that is summed or gathered.

        `early` marks the wait for a collective that was started before. `thread` is the training thread by default.
        """
        self.phase, self.name, self.thread = phase, name, thread or main
        self.axis, self.tensor, self.early, self.began = axis, tensor, early, None
        self.packed_name, self.bit = _pack_name(name) if name else (b"", 0)
        self.kind = MESSAGES if name.startswith(MESSAGE) else _INDEX[phase]

    def __enter__(self) -> None:
        thread = self.thread
        self.kind_before = thread.count_time(self.kind)
        self.phase_before = thread.phase, thread.packed_name
        thread.phase, thread.packed_name = self.phase, self.packed_name
        if self.name:
            thread.num_collectives += 1
            if thread is main:
                thread.note_collective(self.name)
        if _memory is not None:
            thread.write_mark()
        if _recorder is not None and thread is main:
            self.began = _recorder.begin(self)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return  # because: the watchdog reports the place of the failure
        thread = self.thread
        thread.count_time(self.kind_before)
        if _recorder is not None and self.began is not None:
            _recorder.end(self, self.began)
        thread.seen_bits |= self.bit or 1 << _INDEX[self.phase]
        thread.phase, thread.packed_name = self.phase_before
        if _memory is not None:
            thread.write_mark()


main, saver = ThreadPosition(0), ThreadPosition(_SAVER_AT)
saver.phase, saver.kind = SAVE, _INDEX[SAVE]
enter = main.enter


def set_recorder(recorder: SpanRecorder | None) -> None:
    """Pass each change of the main thread's phase to `recorder` from now on; None stops that."""
    global _recorder
    _recorder = recorder


def set_step_callback(on_step: Callable[[int], None] | None) -> None:
    """Set a callback that receives the number of each step that begins, before its first span is recorded."""
    global _on_step
    _on_step = on_step


def leave() -> None:
    """End the current phase's span, so that the time up to the next `enter` has none. The mark stays unchanged."""
    if _recorder is not None:
        _recorder.leave()


def span_start(tensor: Any = None) -> Any:
    """Return the present time as the start of a message or collective of `tensor`; None if nothing is recorded."""
    return None if _recorder is None else _recorder.current_time(tensor)


def record_message(began: Any, kind: str, peer: int, tensor: Any, key: Any = None) -> None:
    """Record the span of a message that began at `began`; do nothing if that is None. `kind` says whether the message
    was sent ("send"), has arrived ("receive"), or was taken by the peer ("taken"). `key` has its direction, micro-batch
    and stage.
    """
    if _recorder is not None and began is not None:
        _recorder.record_message(began, kind, peer, tensor, key)


def record_collective(
    began: Any, name: str, axis: NamedAxis, tensor: Any, peer: int = -1, *, early: bool = False
) -> None:
    """Record the span of a collective that began at `began` and has just ended, for code that `within` cannot enclose.
    With `peer` only this rank and that one exchange data. With `early` the collective was started before, and the span
    is the wait for it.
    """
    if _recorder is not None and began is not None:
        _recorder.record_collective(began, name, axis, tensor, peer, early)


def _pack_name(name: str) -> tuple[bytes, int]:
    packed = _names.get(name)
    if packed is None:
        bit = 1 << (len(PHASES) + len(_names)) if len(_names) < _MAX_NAMES else 0
        packed = _names[name] = name.encode()[:_NAME_BYTES], bit
        if _memory is not None:
            _write_names()
    return packed


def _write_names() -> None:
    assert _memory is not None
    for number, (packed_name, bit) in enumerate(_names.values()):
        if bit:
            struct.pack_into(f"{_NAME_BYTES}s", _memory, _NAMES_AT + number * _NAME_BYTES, packed_name)


def open_memory() -> int:
    """Create the shared memory into which this process writes its phase and step from now on, and return a file
    descriptor by which the companion process maps the same memory.
    """
    global _memory
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("lmtrain-phases")
    else:
        import tempfile  # because: tempfile is slow to import, and only needed on a system without memory files

        fd, path = tempfile.mkstemp(prefix="lmtrain-phases-")
        os.unlink(path)
    os.ftruncate(fd, NUM_BYTES)
    _memory = mmap.mmap(fd, NUM_BYTES)
    _write_names()
    main.write_mark()
    return fd


def close_memory() -> None:
    global _memory
    if _memory is not None:
        memory, _memory = _memory, None
        memory.close()


class Mark:
    """The position of a rank (phase, step, micro-batch, stage, collective) as another process reads it from shared
    memory.
    """

    def __init__(self, memory: mmap.mmap, offset: int = 0) -> None:
        for _ in range(100):
            first, phase, microbatch, stage, step, num_collectives, seen_bits, packed_name, last = (
                _MARK.unpack_from(memory, offset)
            )
            if first == last:  # because: a process stopped in mid-write never becomes consistent
                break
        self.num_marks, self.phase, self.step = first, PHASES[phase], step
        self.microbatch, self.stage = microbatch, stage
        self.num_collectives, self.seen_bits, self.name = num_collectives, seen_bits, unpack_text(packed_name)


def read_mark(memory: mmap.mmap) -> Mark:
    """Return the position (phase, step, micro-batch, collective) that a rank has last written to its shared memory:
    that of its main thread, or of its checkpoint-saving thread while the main thread waits for a save.
    """
    mark, saving = Mark(memory), Mark(memory, _SAVER_AT)
    if mark.phase != SAVE or saving.num_marks == 0 or saving.step < 0:
        return mark
    saving.num_marks += mark.num_marks
    saving.num_collectives += mark.num_collectives
    saving.seen_bits |= mark.seen_bits
    return saving


def read_seen_names(memory: mmap.mmap, seen_bits: int) -> list[str]:
    """Return the names of the phases and collectives that a rank has passed so far. `seen_bits` is the bit mask in the
    rank's last mark; `memory` is the rank's shared memory, which has the names of collectives.
    """
    offsets = (_NAMES_AT + n * _NAME_BYTES for n in range(_MAX_NAMES) if seen_bits >> len(PHASES) + n & 1)
    return [phase for index, phase in enumerate(PHASES) if seen_bits >> index & 1] + [
        unpack_text(memory[offset : offset + _NAME_BYTES]) for offset in offsets
    ]


def read_misordered(memory: mmap.mmap) -> tuple[int, str, str]:
    """Return (step, expected name, actual name) of the newest collective that came out of order."""
    step, expected, actual = _MISORDERED.unpack_from(memory, _MISORDERED_AT)
    return step, unpack_text(expected), unpack_text(actual)


def read_order(memory: mmap.mmap) -> tuple[int, int, list[tuple[int, int]]]:
    """Return (step, checksum of the previous step's collectives, [(n, checksum of this step's first n collectives)])
    from a rank's shared memory. The checksums show whether ranks ran the same collectives in the same order; 0 for no
    previous step.
    """
    step, previous = _ORDER.unpack_from(memory, _ORDER_AT)
    offset = _ORDER_AT + _ORDER.size
    entries = _ORDER_ENTRY.iter_unpack(memory[offset : offset + _NUM_ORDER_ENTRIES * _ORDER_ENTRY.size])
    return step, previous, [(number, crc) for entry_step, number, crc in entries if entry_step == step and number]


def unpack_text(packed: bytes) -> str:
    """Return a text that was packed into a field of fixed size, without the zero bytes behind it."""
    return packed.rstrip(b"\0").decode(errors="replace")
