"""Numpy arrays as what a process saves."""

from __future__ import annotations

from collections.abc import Iterable

from lmtrain.checkpoint.disk.tensor_file import RankData, array_bytes, file_order, spec_of
from lmtrain.layout import Piece


def rank_data(pieces: Iterable[Piece]) -> RankData:
    ordered = file_order(pieces)
    return RankData([spec_of(p) for p in ordered], [array_bytes(p.block).data for p in ordered])
