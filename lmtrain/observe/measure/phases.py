"""The current phase of this process, marked where it changes and read by the watchdog even if the process hangs.

Marks: `enter("backward", microbatch=1)`, or `with within("collective", "the norm"):` for work that returns to the
previous phase. `main` is the training thread, `saver` the thread that writes checkpoints. Without a watchdog a mark is
a few assignments; with a watchdog the mark is also packed into shared memory, which the companion process reads without
involving this process.

The same marks become the spans of a traced step: `record` passes them to a recorder. Without a recorder a mark only
checks that there is none.
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

    class Named(Protocol):
        """An axis of the layout."""

        @property
        def name(self) -> str: ...

    class Spans(Protocol):
        """Recorder of the main thread's work. `now` returns an opaque time."""

        def now(self, tensor: Any = None) -> Any: ...
        def enter(self, phase: str, half: str, microbatch: int, stage: int) -> None: ...
        def leave(self) -> None: ...
        def begin(self, mark: within) -> Any: ...
        def end(self, mark: within, began: Any) -> None: ...
        def message(self, began: Any, kind: str, peer: int, tensor: Any, letter: Any) -> None: ...
        def exchange(
            self, began: Any, what: str, axis: Named, tensor: Any, peer: int, early: bool
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
MESSAGES = len(PHASES)  # index in `Place.spent_ns` of collectives that are messages between stages
_MARK = struct.Struct("<QBxxxiiqQQ48sQ")  # the mark number, first and last: equal if no write was in progress
_ODD = struct.Struct("<q48s48s")  # the newest step whose collectives came in another order than in the step before
_SAVER_AT, _ODD_AT, _NAMES_AT, _NAME_BYTES = 128, 256, 512, 48
_MOST_NAMES = 64 - len(PHASES)  # because: `seen` is a 64-bit mask with one bit per phase and name
# checksums over the order of a step's collectives: step, checksum of the previous step; newest: step, number, checksum
_WAY, _WAY_AT, _STOP, _NUM_STOPS = struct.Struct("<qI"), 3072, struct.Struct("<qII"), 48

_memory: mmap.mmap | None = None
_names: dict[str, tuple[bytes, int]] = {}  # names of collectives: packed name, bit in `seen`
_spans: Spans | None = None  # the recorder, while this step is recorded
_on_step: Callable[[int], None] | None = None  # called with the number of each new step of the main thread


class Place:
    """The phase, step and position of a thread."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.phase = PHASES[0]
        self.step = self.microbatch = self.stage = -1
        self.what = b""
        self.number = 0  # number of marks so far
        self.count = 0  # number of collectives so far
        self.seen = 0  # bit mask of the phases and collectives' names passed so far
        self.steps = 0  # number of steps begun so far
        self.order: list[str] = []  # names of this step's collectives, in order
        self.order_before: list[str] = []
        self.way = 0  # checksum over the order
        self.spent_ns = [0] * (len(PHASES) + 1)  # nanoseconds in each phase so far, up to the last mark
        self.since_ns = monotonic_ns()
        self.kind = 0  # index in `spent_ns` to which the time now counts

    def enter(
        self, phase: str, step: int | None = None, microbatch: int | None = None, stage: int | None = None,
        half: str = "",
    ) -> None:  # fmt: skip
        """Set this thread's phase. The step stays unchanged unless `step` is given; micro-batch and stage are reset."""
        self.count_time(_INDEX[phase])
        self.seen |= 1 << _INDEX[self.phase]
        self.phase, self.what = phase, b""
        self.microbatch = -1 if microbatch is None else microbatch
        self.stage = -1 if stage is None else stage
        if step is not None and step != self.step:
            self.order_before = self.order if self.steps else []  # because: the first step has nothing to compare with
            if _memory is not None and self is main:
                _WAY.pack_into(_memory, _WAY_AT, step, self.way if self.steps else 0)
            self.order, self.way = [], 0
            self.step = step
            self.steps += 1
            if _on_step is not None and self is main:
                _on_step(step)
        if _memory is not None:
            self.write()
        if _spans is not None and self is main:
            _spans.enter(phase, half, self.microbatch, self.stage)

    def count_time(self, kind: int) -> int:
        """Add the time since the last mark to the current kind; then make `kind` current, and return the old one."""
        now, was = monotonic_ns(), self.kind
        self.spent_ns[was] += now - self.since_ns
        self.since_ns, self.kind = now, kind
        return was

    def has_waited(self, since_ns: int) -> None:
        """Move the time since `since_ns` to the collectives, for a wait in a collective that has no mark of its own."""
        waited = monotonic_ns() - since_ns
        self.spent_ns[self.kind] -= waited
        self.spent_ns[_INDEX[COLLECTIVE]] += waited

    def write(self) -> None:
        assert _memory is not None
        self.number = number = self.number + 1
        _MARK.pack_into(
            _memory, self.at, number, _INDEX[self.phase], self.microbatch, self.stage, self.step, self.count, self.seen,
            self.what, number,
        )  # fmt: skip

    def note_order(self, what: str) -> None:
        """Record a collective in the step's order.

        A name that differs from the previous step's name at the same position is stored as odd; so a collective that is
        left out shows at the next collective.
        """
        order, before = self.order, self.order_before
        if len(order) < len(before) and before[len(order)] != what and _memory is not None:
            _ODD.pack_into(_memory, _ODD_AT, self.step, _packed(before[len(order)])[0], _packed(what)[0])
        order.append(what)
        self.way = crc32(_packed(what)[0], self.way)
        if _memory is not None:
            at = _WAY_AT + _WAY.size + len(order) % _NUM_STOPS * _STOP.size
            _STOP.pack_into(_memory, at, self.step, len(order), self.way)


class within:  # because: lower case, since it reads as a word: `with within("save"):`
    """Context manager that sets this thread's phase for its block. An exception leaves the phase as it is."""

    __slots__ = (
        "axis", "began", "bit", "early", "kind", "kind_was", "packed", "phase", "place", "tensor", "was", "what",
    )  # fmt: skip

    def __init__(
        self, phase: str, what: str = "", place: Place | None = None, axis: Named | None = None, tensor: Any = None,
        *, early: bool = False,
    ) -> None:  # fmt: skip
        """Store the phase, and for a collective its axis and the whole tensor that is summed or gathered.

        `early` marks the wait for a collective that was started before.
        """
        self.phase, self.what, self.place = phase, what, place or main
        self.axis, self.tensor, self.early, self.began = axis, tensor, early, None
        self.packed, self.bit = _packed(what) if what else (b"", 0)
        self.kind = MESSAGES if what.startswith(MESSAGE) else _INDEX[phase]

    def __enter__(self) -> None:
        place = self.place
        self.kind_was = place.count_time(self.kind)
        self.was = place.phase, place.what
        place.phase, place.what = self.phase, self.packed
        if self.what:
            place.count += 1
            if place is main:
                place.note_order(self.what)
        if _memory is not None:
            place.write()
        if _spans is not None and place is main:
            self.began = _spans.begin(self)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return  # because: the place of the failure is what the watchdog reports
        place = self.place
        place.count_time(self.kind_was)
        if _spans is not None and self.began is not None:
            _spans.end(self, self.began)
        place.seen |= self.bit or 1 << _INDEX[self.phase]
        place.phase, place.what = self.was
        if _memory is not None:
            place.write()


main, saver = Place(0), Place(_SAVER_AT)
saver.phase, saver.kind = SAVE, _INDEX[SAVE]
enter = main.enter


def record(spans: Spans | None) -> None:
    """Pass the marks of the main thread to this recorder from now on, or to none."""
    global _spans
    _spans = spans


def tell_steps(told: Callable[[int], None] | None) -> None:
    """Set a callback that receives the number of each step that begins, before its first span is recorded."""
    global _on_step
    _on_step = told


def leave() -> None:
    """End the current phase's span, so that the time up to the next `enter` has none. The mark stays unchanged."""
    if _spans is not None:
        _spans.leave()


def now(tensor: Any = None) -> Any:
    """Return the start time of a message or collective of this tensor, or None if nothing is recorded."""
    return None if _spans is None else _spans.now(tensor)


def message(began: Any, kind: str, peer: int, tensor: Any, letter: Any = None) -> None:
    """Record a message's span: it was sent ("send"), has arrived ("receive"), or was taken by the peer ("taken")."""
    if _spans is not None and began is not None:
        _spans.message(began, kind, peer, tensor, letter)


def exchange(
    began: Any, what: str, axis: Named, tensor: Any, peer: int = -1, *, early: bool = False
) -> None:
    """Record a collective that has just ended, for code that `within` cannot enclose.

    With `peer` the collective is an exchange of two ranks. With `early` it was started before, and the span is the wait
    for it.
    """
    if _spans is not None and began is not None:
        _spans.exchange(began, what, axis, tensor, peer, early)


def _packed(what: str) -> tuple[bytes, int]:
    found = _names.get(what)
    if found is None:
        bit = 1 << (len(PHASES) + len(_names)) if len(_names) < _MOST_NAMES else 0
        found = _names[what] = what.encode()[:_NAME_BYTES], bit
        if _memory is not None:
            _write_names()
    return found


def _write_names() -> None:
    assert _memory is not None
    for number, (name, bit) in enumerate(_names.values()):
        if bit:
            struct.pack_into(f"{_NAME_BYTES}s", _memory, _NAMES_AT + number * _NAME_BYTES, name)


def open_memory() -> int:
    """Create the shared memory for marks, and return the descriptor by which another process reads it."""
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
    main.write()
    return fd


def close_memory() -> None:
    global _memory
    if _memory is not None:
        memory, _memory = _memory, None
        memory.close()


class Mark:
    """The last mark that a process has written, as another process reads it."""

    def __init__(self, memory: mmap.mmap, at: int = 0) -> None:
        for _ in range(100):
            first, phase, microbatch, stage, step, count, seen, what, last = _MARK.unpack_from(memory, at)
            if first == last:  # because: a process stopped in mid-write never becomes consistent
                break
        self.number, self.phase, self.step, self.microbatch, self.stage = first, PHASES[phase], step, microbatch, stage
        self.count, self.seen, self.what = count, seen, _text(what)


def read_mark(memory: mmap.mmap) -> Mark:
    """Return the main thread's mark, or the saving thread's mark while the main thread waits for it."""
    mark, saving = Mark(memory), Mark(memory, _SAVER_AT)
    if mark.phase != SAVE or saving.number == 0 or saving.step < 0:
        return mark
    saving.number += mark.number
    saving.count += mark.count
    saving.seen |= mark.seen
    return saving


def read_seen(memory: mmap.mmap, seen: int) -> list[str]:
    """Return the phases and names of collectives whose bits are set in `seen`."""
    names_at = (_NAMES_AT + n * _NAME_BYTES for n in range(_MOST_NAMES) if seen >> len(PHASES) + n & 1)
    return [phase for index, phase in enumerate(PHASES) if seen >> index & 1] + [
        _text(memory[at : at + _NAME_BYTES]) for at in names_at
    ]


def read_odd(memory: mmap.mmap) -> tuple[int, str, str]:
    """Return (step, expected name, actual name) of the newest collective that came out of order."""
    step, expected, came = _ODD.unpack_from(memory, _ODD_AT)
    return step, _text(expected), _text(came)


def read_way(memory: mmap.mmap) -> tuple[int, int, list[tuple[int, int]]]:
    """Return (step, checksum of the step before or 0, [(number of collectives so far, checksum)])."""
    step, before = _WAY.unpack_from(memory, _WAY_AT)
    at = _WAY_AT + _WAY.size
    stops = _STOP.iter_unpack(memory[at : at + _NUM_STOPS * _STOP.size])
    return step, before, [(number, total) for of, number, total in stops if of == step and number]


def _text(packed: bytes) -> str:
    return packed.rstrip(b"\0").decode(errors="replace")
