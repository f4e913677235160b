"""Boxes: where a piece stands in its tensor, and how pieces of any layout make up any box of any other. Torch-free.

Called by the writer (do these pieces cover their tensors?) and the reader (which parts of which pieces make this box?).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Box:
    """An axis-aligned part of a tensor. The box of a scalar has no axes and holds one element."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def volume(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    def is_inside(self, shape: Sequence[int]) -> bool:
        return (
            len(self.offset) == len(self.shape) == len(shape)
            and all(o >= 0 and n >= 0 for o, n in zip(self.offset, self.shape, strict=True))
            and all(end <= size for end, size in zip(self.stop, shape, strict=True))
        )

    def relative_to(self, origin: tuple[int, ...]) -> Box:
        return Box(tuple(o - p for o, p in zip(self.offset, origin, strict=True)), self.shape)

    def slices(self) -> tuple[Any, ...]:
        """The index of this box in its tensor. The ellipsis makes a view of a scalar too, where () would copy it."""
        return (*(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True)), ...)


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """What two boxes share, or None when that is nothing."""
    offset = tuple(map(max, a.offset, b.offset))
    shape = tuple(min(p, q) - o for p, q, o in zip(a.stop, b.stop, offset, strict=True))
    return Box(offset, shape) if all(n > 0 for n in shape) else None


def is_run(box: Box, shape: Sequence[int]) -> bool:
    """Whether the elements of a box follow each other in a tensor of this shape."""
    axis = next((i for i, n in enumerate(box.shape) if n > 1), len(shape))
    return tuple(box.shape[axis + 1 :]) == tuple(shape[axis + 1 :])


def runs(box: Box, shape: Sequence[int]) -> Iterator[tuple[int, Box]]:
    """A box of a block of this shape as runs of its elements: the first one's number, and the run as a box."""
    if is_run(box, shape):
        yield sum(o * math.prod(shape[i + 1 :]) for i, o in enumerate(box.offset)), box
        return
    axis = next(i for i, n in enumerate(box.shape) if n > 1)
    for index in range(box.offset[axis], box.stop[axis]):
        offset = (*box.offset[:axis], index, *box.offset[axis + 1 :])
        yield from runs(Box(offset, (*box.shape[:axis], 1, *box.shape[axis + 1 :])), shape)


def cut(box: Box, most: int) -> Iterator[Box]:
    """Parts of at most so many elements: whole rows where they fit, so that parts are runs of the stored bytes."""
    if box.volume <= max(most, 1):
        if box.volume:
            yield box
        return
    axis = next(i for i, n in enumerate(box.shape) if n > 1)
    row = box.volume // box.shape[axis]
    step = max(1, most // row)
    for at in range(0, box.shape[axis], step):
        offset = (*box.offset[:axis], box.offset[axis] + at, *box.offset[axis + 1 :])
        shape = (*box.shape[:axis], min(step, box.shape[axis] - at), *box.shape[axis + 1 :])
        yield from cut(Box(offset, shape), most)


def cover_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why these boxes do not fill a tensor of this shape exactly once; None when they do.

    Boxes inside the tensor that do not overlap fill it exactly when their volumes add up to its own.
    """
    for box in boxes:
        if not box.is_inside(shape):
            return f"the piece at {list(box.offset)} of shape {list(box.shape)} is not inside {list(shape)}"
    overlap = _find_overlap([box for box in boxes if box.volume])
    if overlap is not None:
        return f"the pieces at {list(overlap[0].offset)} and {list(overlap[1].offset)} overlap"
    have, need = sum(box.volume for box in boxes), math.prod(shape)
    return None if have == need else f"the pieces hold {have:,} of its {need:,} elements"


def _find_overlap(boxes: list[Box]) -> tuple[Box, Box] | None:
    """Sweep along the axis with the most starts, where the fewest boxes stand side by side."""
    if len(boxes) < 2:
        return None
    num_axes = len(boxes[0].offset)
    axis = max(range(num_axes), key=lambda i: len({box.offset[i] for box in boxes}), default=None)
    if axis is None:
        return boxes[0], boxes[1]
    ordered = sorted(boxes, key=lambda box: box.offset[axis])
    for i, box in enumerate(ordered):
        end = box.stop[axis]
        for other in ordered[i + 1 :]:
            if other.offset[axis] >= end:
                break
            if intersect(box, other) is not None:
                return box, other
    return None
