"""The weights of a Hugging Face folder, read straight into a model: of each process its own share of them.

Called by `lmtrain eval`, which wants no checkpoint in between. The model is the one that an import would write.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from lmtrain.exchange.huggingface.folder import HFFolder
from lmtrain.exchange.huggingface.names import Match
from lmtrain.exchange.streaming import row_ranges
from lmtrain.models.model_settings import ModelSettings
from lmtrain.piece import Piece


class HFWeights:
    def __init__(self, path: Path) -> None:
        self._folder = HFFolder(path)
        self._matches = {f"model.{match.name}": match for match in self._folder.matches()}

    @property
    def settings(self) -> ModelSettings:
        return self._folder.settings

    @torch.no_grad()
    def load_into(self, pieces: list[Piece]) -> None:
        """Fill the pieces' blocks, rounded to the type that they have."""
        for piece in pieces:
            match = self._matches[piece.name]
            for first, index, rows in _parts(match, range(piece.offset[0], piece.offset[0] + len(piece.block))):
                part = self._folder.part(match, index, rows)
                if part.ndim > 1:
                    part = part[:, piece.offset[1] : piece.offset[1] + piece.block.shape[1]]
                at = first - piece.offset[0]
                piece.block[at : at + len(rows)].copy_(part)


def _parts(match: Match, wanted: range) -> list[tuple[int, int, range]]:
    """Where some of our rows lie: (the first, the number of their tensor, rows of that), a bounded part at a time."""
    found, before = [], 0
    row_bytes = 4 * math.prod(match.shape[1:])
    for index, (_, num_rows) in enumerate(match.theirs):
        start, stop = max(wanted.start - before, 0), min(wanted.stop - before, num_rows)
        for part in row_ranges(max(stop - start, 0), row_bytes):
            found.append((before + start + part.start, index, range(start + part.start, start + part.stop)))
        before += num_rows
    return found
