"""Numpy arrays as what a process saves."""

from __future__ import annotations

from collections.abc import Iterable

from lmtrain.checkpoint.disk.safetensors_file import RankData, array_bytes, piece_spec, sort_for_file
from lmtrain.layout import Piece


def rank_data(pieces: Iterable[Piece]) -> RankData:
    ordered = sort_for_file(pieces)
    return RankData([piece_spec(p) for p in ordered], [array_bytes(p.block).data for p in ordered])
