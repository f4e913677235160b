"""A rectangle of a named tensor that one process holds: what `parallel` and `checkpoint` say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Piece:
    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    block: Any  # a torch tensor or a numpy array; its shape is the piece's extent
