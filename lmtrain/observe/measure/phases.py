"""What this process does now, in one call where it changes; read by the watch, even of a process that stands still.

Called wherever the work changes: `enter("backward", microbatch=1)`, or `with within("collective", "the norm"):` for
what returns to the phase before. `main` is the thread that trains, `saver` the one that writes checkpoints. Without a
watch a mark is a few assignments; with one it is also packed into memory that another process reads without asking.

The same marks are the spans of a step that is traced: `record` hands them to a recorder. While there is none, a mark
asks for it and does nothing else.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from time import monotonic_ns
from zlib import crc32

TYPE_CHECKING = False
if TYPE_CHECKING:  # because: importing typing takes a third of a companion's start
    from typing import Any, Protocol

    class Named(Protocol):
        """An axis of the layout."""

        @property
        def name(self) -> str: ...

    class Spans(Protocol):
        """Records what the main thread does. What `now` returns is a time, whatever it is made of."""

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
MESSAGE = "a message"  # so begins the name of what a stage of a pipeline waits for
DEVICE_WAIT = "what the device has yet to do"  # where the host knows that the device has done all of it
NUM_BYTES = 4096
_INDEX = {phase: index for index, phase in enumerate(PHASES)}
MESSAGES = len(PHASES)  # in `Place.spent`: of the collectives, those that are messages between stages
_MARK = struct.Struct("<QBxxxiiqQQ48sQ")  # its number first and last: between two equal ones nobody was writing
_ODD = struct.Struct("<q48s48s")  # the newest step in which the collectives came in another order than in the last
_SAVER_AT, _ODD_AT, _NAMES_AT, _NAME_BYTES = 128, 256, 512, 48
_MOST_NAMES = 64 - len(PHASES)  # because: what has been seen is a bit each
# the way through a step's collectives: the step, a sum over those of the step before; of the newest: step, number, sum
_WAY, _WAY_AT, _STOP, _NUM_STOPS = struct.Struct("<qI"), 3072, struct.Struct("<qII"), 48

_memory: mmap.mmap | None = None
_names: dict[str, tuple[bytes, int]] = {}  # of collectives: as they are packed, and their bit
_spans: Spans | None = None  # while this step is recorded
_on_step: Callable[[int], None] | None = None  # is told of each new step of the main thread


class Place:
    """One thread's phase, step and so on."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.phase = PHASES[0]
        self.step = self.microbatch = self.stage = -1
        self.what = b""
        self.number = 0  # of marks so far
        self.count = 0  # of collectives so far
        self.seen = 0  # a bit for each phase, and each name of a collective, that has been gone through
        self.steps = 0  # begun so far
        self.order: list[str] = []  # of collectives, in this step
        self.order_before: list[str] = []
        self.way = 0  # a sum over the order
        self.spent_ns = [0] * (len(PHASES) + 1)  # in each phase so far, up to the last mark
        self.since_ns = monotonic_ns()
        self.kind = 0  # of `spent_ns`, what counts now

    def enter(
        self, phase: str, step: int | None = None, microbatch: int | None = None, stage: int | None = None,
        half: str = "",
    ) -> None:  # fmt: skip
        """From now on this thread does this. The step stays what it was, unless another is given."""
        self.count_time(_INDEX[phase])
        self.seen |= 1 << _INDEX[self.phase]
        self.phase, self.what = phase, b""
        self.microbatch = -1 if microbatch is None else microbatch
        self.stage = -1 if stage is None else stage
        if step is not None and step != self.step:
            self.order_before = self.order if self.steps else []  # because: before the first step all is different
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
        """Until now belongs to what was counted, from now on to this; returns what was."""
        now, was = monotonic_ns(), self.kind
        self.spent_ns[was] += now - self.since_ns
        self.since_ns, self.kind = now, kind
        return was

    def has_waited(self, since_ns: int) -> None:
        """Since then, in a collective that had no mark of its own."""
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
        """Remember the order of a step's collectives; one that is left out shows in the next one."""
        order, before = self.order, self.order_before
        if len(order) < len(before) and before[len(order)] != what and _memory is not None:
            _ODD.pack_into(_memory, _ODD_AT, self.step, _packed(before[len(order)])[0], _packed(what)[0])
        order.append(what)
        self.way = crc32(_packed(what)[0], self.way)
        if _memory is not None:
            at = _WAY_AT + _WAY.size + len(order) % _NUM_STOPS * _STOP.size
            _STOP.pack_into(_memory, at, self.step, len(order), self.way)


class within:  # because: small, as it is read as a word: `with within("save"):`
    """For the time of the block this thread does this; afterwards what it did before, unless the block has failed."""

    __slots__ = (
        "axis", "began", "bit", "early", "kind", "kind_was", "packed", "phase", "place", "tensor", "was", "what",
    )  # fmt: skip

    def __init__(
        self, phase: str, what: str = "", place: Place | None = None, axis: Named | None = None, tensor: Any = None,
        *, early: bool = False,
    ) -> None:  # fmt: skip
        """Of a collective: its axis, and what it sums or gathers as a whole. `early`: it was begun before."""
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
            return  # because: where it failed is what is asked for
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
    """To this recorder, or to none, from here on."""
    global _spans
    _spans = spans


def tell_steps(told: Callable[[int], None] | None) -> None:
    """Of each step that begins, before anything of it is recorded."""
    global _on_step
    _on_step = told


def leave() -> None:
    """What was entered is done, and what follows has no name: for spans alone."""
    if _spans is not None:
        _spans.leave()


def now(tensor: Any = None) -> Any:
    """When a message or an exchange of this tensor begins; None while nothing is recorded."""
    return None if _spans is None else _spans.now(tensor)


def message(began: Any, kind: str, peer: int, tensor: Any, letter: Any = None) -> None:
    """It has been handed over ("send"), has come ("receive"), or has been taken by the peer ("taken")."""
    if _spans is not None and began is not None:
        _spans.message(began, kind, peer, tensor, letter)


def exchange(
    began: Any, what: str, axis: Named, tensor: Any, peer: int = -1, *, early: bool = False
) -> None:
    """What `within` cannot surround: a collective of the axis, or with a peer alone, that has just ended. `early`: it
    was begun before, and this is the wait for it."""
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
    """Marks go there from now on; returns the descriptor by which another process reads them."""
    global _memory
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("lmtrain-phases")
    else:
        import tempfile  # because: it is slow to import, and only needed where the system has no memory files

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
    """What a process had last written, as another one reads it."""

    def __init__(self, memory: mmap.mmap, at: int = 0) -> None:
        for _ in range(100):
            first, phase, microbatch, stage, step, count, seen, what, last = _MARK.unpack_from(memory, at)
            if first == last:  # because: a process may be stopped amid writing, and then this is all there will be
                break
        self.number, self.phase, self.step, self.microbatch, self.stage = first, PHASES[phase], step, microbatch, stage
        self.count, self.seen, self.what = count, seen, _text(what)


def read_mark(memory: mmap.mmap) -> Mark:
    """Of the main thread; where that waits for the one that saves, of that one."""
    mark, saving = Mark(memory), Mark(memory, _SAVER_AT)
    if mark.phase != SAVE or saving.number == 0 or saving.step < 0:
        return mark
    saving.number += mark.number
    saving.count += mark.count
    saving.seen |= mark.seen
    return saving


def read_seen(memory: mmap.mmap, seen: int) -> list[str]:
    """The phases, and the names of collectives, that these bits stand for."""
    names_at = (_NAMES_AT + n * _NAME_BYTES for n in range(_MOST_NAMES) if seen >> len(PHASES) + n & 1)
    return [phase for index, phase in enumerate(PHASES) if seen >> index & 1] + [
        _text(memory[at : at + _NAME_BYTES]) for at in names_at
    ]


def read_odd(memory: mmap.mmap) -> tuple[int, str, str]:
    """The newest step in which a collective came in another's place: (step, the one expected, the one that came)."""
    step, expected, came = _ODD.unpack_from(memory, _ODD_AT)
    return step, _text(expected), _text(came)


def read_way(memory: mmap.mmap) -> tuple[int, int, list[tuple[int, int]]]:
    """(step, sum over the step before or 0, [(number, sum after so many of its collectives)])."""
    step, before = _WAY.unpack_from(memory, _WAY_AT)
    at = _WAY_AT + _WAY.size
    stops = _STOP.iter_unpack(memory[at : at + _NUM_STOPS * _STOP.size])
    return step, before, [(number, total) for of, number, total in stops if of == step and number]


def _text(packed: bytes) -> str:
    return packed.rstrip(b"\0").decode(errors="replace")
