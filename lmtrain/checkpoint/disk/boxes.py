"""Boxes: where a piece lies in its tensor, and how pieces of any layout make up any box of any other. Torch-free.

Called by the writer (do these pieces cover their tensors?) and the readers (what of which pieces makes up this box?).
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
_MOST_COMPARED = 200_000  # pairs of pieces, to find two that overlap


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a tensor. The box of a scalar has no axes and holds one element."""

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
        """Return the index of this box in its tensor; the ellipsis makes a view of a scalar, which () would copy."""
        return (*(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True)), ...)


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    offset = tuple(map(max, a.offset, b.offset))
    shape = tuple(min(p, q) - o for p, q, o in zip(a.stop, b.stop, offset, strict=True))
    return Box(offset, shape) if all(n > 0 for n in shape) else None


def is_run(box: Box, shape: Sequence[int]) -> bool:
    """Return whether the elements of a box are contiguous in a tensor of this shape."""
    axis = next((i for i, n in enumerate(box.shape) if n > 1), len(shape))
    return tuple(box.shape[axis + 1 :]) == tuple(shape[axis + 1 :])


def runs(box: Box, shape: Sequence[int]) -> Iterator[tuple[int, Box]]:
    """Yield the contiguous runs of a box in a tensor of this shape: the first element's offset, and the run."""
    if is_run(box, shape):
        yield sum(o * math.prod(shape[i + 1 :]) for i, o in enumerate(box.offset)), box
        return
    axis = next(i for i, n in enumerate(box.shape) if n > 1)
    for index in range(box.offset[axis], box.stop[axis]):
        offset = (*box.offset[:axis], index, *box.offset[axis + 1 :])
        yield from runs(Box(offset, (*box.shape[:axis], 1, *box.shape[axis + 1 :])), shape)


def ends(box: Box, shape: Sequence[int]) -> tuple[int, int]:
    """Return the offsets of the first and the last element of a box in a tensor of this shape."""
    steps = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    first = sum(o * step for o, step in zip(box.offset, steps, strict=True))
    return first, first + sum((n - 1) * step for n, step in zip(box.shape, steps, strict=True))


def cut(box: Box, most: int) -> Iterator[Box]:
    """Boxes of at most so many elements: whole rows where they fit, so that each is a run of the stored bytes."""
    if box.volume <= max(most, 1):
        if box.volume:
            yield box
        return
    axis = next(i for i, n in enumerate(box.shape) if n > 1)
    step = max(1, most // (box.volume // box.shape[axis]))
    for at in range(0, box.shape[axis], step):
        offset = (*box.offset[:axis], box.offset[axis] + at, *box.offset[axis + 1 :])
        shape = (*box.shape[:axis], min(step, box.shape[axis] - at), *box.shape[axis + 1 :])
        yield from cut(Box(offset, shape), most)


def cover_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Return why the boxes do not fill a tensor of this shape exactly once; None if they do."""
    for box in boxes:
        if not box.is_inside(shape):
            return f"the piece at {list(box.offset)} of shape {list(box.shape)} is not inside {list(shape)}"
    if list(boxes) == [whole(shape)] or _fills(shape, boxes):
        return None
    overlap = _find_overlap([box for box in boxes if box.volume])
    if overlap is not None:
        return f"the pieces at {list(overlap[0].offset)} and {list(overlap[1].offset)} overlap"
    have, need = sum(box.volume for box in boxes), math.prod(shape)
    return f"the pieces hold {have:,} of its {need:,} elements" if have != need else "some of its pieces overlap"


def _fills(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Return whether boxes inside a tensor fill it exactly once, in time linear in their number.

    Along each axis every place gets a secret random number; a box weighs the product over its axes of the number at
    its end less the one at its beginning. Weights add up to the tensor's own where each element lies in one box, and
    else but once in 2^120 times, since sums of such products are equal as polynomials only then.
    """
    axes = [defaultdict[int, int](_secret_number) for _ in shape]

    def weight(box: Box) -> int:
        result = 1
        for numbers, start, size in zip(axes, box.offset, box.shape, strict=True):
            result = result * (numbers[start + size] - numbers[start]) % _PRIME
        return result

    return sum(map(weight, boxes)) % _PRIME == weight(whole(shape))


def _find_overlap(boxes: list[Box]) -> tuple[Box, Box] | None:
    """Two of them for the message, or None where they are not soon found.

    A sweep along the axis with the most starts, where the fewest boxes stand side by side.
    """
    if len(boxes) < 2:
        return None
    axis = max(range(len(boxes[0].offset)), key=lambda i: len({box.offset[i] for box in boxes}), default=None)
    if axis is None:
        return boxes[0], boxes[1]
    ordered, left = sorted(boxes, key=lambda box: box.offset[axis]), _MOST_COMPARED
    for i, box in enumerate(ordered):
        end = box.stop[axis]
        for other in islice(ordered, i + 1, None):
            left -= 1
            if other.offset[axis] >= end or not left:
                break
            if intersect(box, other) is not None:
                return box, other
        if not left:
            break
    return None
