"""Boxes: rectangular parts of tensors, their intersections, splits and covers. Torch-free.

Called by the writer, to check that pieces cover their tensors, and by the readers, to assemble one box from others.
"""

from __future__ import annotations

import math
import random
import secrets
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

_PRIME = 2**127 - 1
_secret = random.Random(secrets.randbits(128))  # noqa: S311 - who writes a manifest never sees a number of this process
_secret_number = partial(_secret.getrandbits, 126)
_MAX_COMPARISONS = 200_000  # of pairs of pieces, to find two that overlap


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: `shape` elements along its axes, from index `offset` on. The box of a scalar has
    no axes and one element.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def volume(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    def is_inside(self, shape: Sequence[int]) -> bool:
        """Return whether the box has no negative numbers and lies inside a tensor of the shape `shape`."""
        return (
            len(self.offset) == len(self.shape) == len(shape)
            and all(o >= 0 and n >= 0 for o, n in zip(self.offset, self.shape, strict=True))
            and all(end <= size for end, size in zip(self.stop, shape, strict=True))
        )

    def relative_to(self, origin: tuple[int, ...]) -> Box:
        """Return the same box with its offset counted from `origin`."""
        return Box(tuple(o - p for o, p in zip(self.offset, origin, strict=True)), self.shape)

    def slices(self) -> tuple[Any, ...]:
        """Return the index that selects this box in its tensor.

        It ends with an ellipsis: for a scalar that is a view, while the index () is a copy.
        """
        return (*(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True)), ...)


def full_box(shape: Sequence[int]) -> Box:
    """Return the box that is a whole tensor of this shape."""
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes, which are rectangular parts of a tensor, or None if it is empty."""
    offset = tuple(map(max, a.offset, b.offset))
    shape = tuple(min(p, q) - o for p, q, o in zip(a.stop, b.stop, offset, strict=True))
    return Box(offset, shape) if all(n > 0 for n in shape) else None


def is_contiguous(box: Box, shape: Sequence[int]) -> bool:
    """Return whether the elements of a box are contiguous in a tensor of this shape."""
    axis = next((i for i, n in enumerate(box.shape) if n > 1), len(shape))
    return tuple(box.shape[axis + 1 :]) == tuple(shape[axis + 1 :])


def contiguous_runs(box: Box, shape: Sequence[int]) -> Iterator[tuple[int, Box]]:
    """Split a box into parts that are contiguous in memory in its tensor, which has the shape `shape`. Yield each part
    as (index of its first element in the flattened tensor, its box).
    """
    if is_contiguous(box, shape):
        yield sum(o * math.prod(shape[i + 1 :]) for i, o in enumerate(box.offset)), box
        return
    axis = next(i for i, n in enumerate(box.shape) if n > 1)
    for index in range(box.offset[axis], box.stop[axis]):
        offset = (*box.offset[:axis], index, *box.offset[axis + 1 :])
        yield from contiguous_runs(Box(offset, (*box.shape[:axis], 1, *box.shape[axis + 1 :])), shape)


def first_and_last_offset(box: Box, shape: Sequence[int]) -> tuple[int, int]:
    """Return the indices of a box's first and last element in its flattened tensor, which has the shape `shape`."""
    steps = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    first = sum(o * step for o, step in zip(box.offset, steps, strict=True))
    return first, first + sum((n - 1) * step for n, step in zip(box.shape, steps, strict=True))


def split_box(box: Box, max_elements: int) -> Iterator[Box]:
    """Split a box, a rectangular part of a tensor, into boxes of at most `max_elements` elements, along the first axis
    if possible; yield them in order.

    Parts consist of whole rows where these fit, so that each is contiguous in the stored tensor.
    """
    if box.volume <= max(max_elements, 1):
        if box.volume:
            yield box
        return
    axis = next(i for i, n in enumerate(box.shape) if n > 1)
    step = max(1, max_elements // (box.volume // box.shape[axis]))
    for at in range(0, box.shape[axis], step):
        offset = (*box.offset[:axis], box.offset[axis] + at, *box.offset[axis + 1 :])
        shape = (*box.shape[:axis], min(step, box.shape[axis] - at), *box.shape[axis + 1 :])
        yield from split_box(Box(offset, shape), max_elements)


def cover_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Return why the boxes, rectangular parts of a tensor of the shape `shape`, do not cover each of its elements
    exactly once, as text for a message; None if they do.
    """
    for box in boxes:
        if not box.is_inside(shape):
            return f"the piece at {list(box.offset)} of shape {list(box.shape)} is not inside {list(shape)}"
    if list(boxes) == [full_box(shape)] or _fills_exactly(shape, boxes):
        return None
    overlap = _find_overlap([box for box in boxes if box.volume])
    if overlap is not None:
        return f"the pieces at {list(overlap[0].offset)} and {list(overlap[1].offset)} overlap"
    have, need = sum(box.volume for box in boxes), math.prod(shape)
    return f"the pieces hold {have:,} of its {need:,} elements" if have != need else "some of its pieces overlap"


def _fills_exactly(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Return whether boxes that lie inside a tensor of the shape `shape` cover each of its elements exactly once. The
    time is linear in the number of boxes.

    Each coordinate of each axis gets a secret random number; a box's weight is the product over its axes of the number
    at its end minus the number at its start. The weights add up to the tensor's own weight if the boxes cover each
    element once; otherwise they do so with probability below 2^-120, since the sums are then different polynomials.
    """
    axes = [defaultdict[int, int](_secret_number) for _ in shape]

    def weight(box: Box) -> int:
        result = 1
        for numbers, start, size in zip(axes, box.offset, box.shape, strict=True):
            result = result * (numbers[start + size] - numbers[start]) % _PRIME
        return result

    return sum(map(weight, boxes)) % _PRIME == weight(full_box(shape))


def _find_overlap(boxes: list[Box]) -> tuple[Box, Box] | None:
    """Return two of the boxes, rectangular parts of a tensor, that overlap. Return None if none do, or if
    _MAX_COMPARISONS comparisons have found none.

    Sweeps along the axis with the most distinct offsets, on which the fewest boxes are compared with each other.
    """
    if len(boxes) < 2:
        return None
    axis = max(range(len(boxes[0].offset)), key=lambda i: len({box.offset[i] for box in boxes}), default=None)
    if axis is None:
        return boxes[0], boxes[1]
    ordered, comparisons_left = sorted(boxes, key=lambda box: box.offset[axis]), _MAX_COMPARISONS
    for i, box in enumerate(ordered):
        end = box.stop[axis]
        for later in islice(ordered, i + 1, None):
            comparisons_left -= 1
            if later.offset[axis] >= end or not comparisons_left:
                break
            if intersect(box, later) is not None:
                return box, later
        if not comparisons_left:
            break
    return None
