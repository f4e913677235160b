"""A folder of Hugging Face's as a checkpoint of ours: settings, weights in fp32, tokenizer.

Called by `lmtrain reshard --from hf`. Parts of tensors stream from one to the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmtrain.errors import UsageError
from lmtrain.exchange.huggingface.folder import HFFolder
from lmtrain.exchange.huggingface.names import Match
from lmtrain.exchange.streaming import Report, row_ranges, save_foreign, tokenizer_of
from lmtrain.layout import Piece
from lmtrain.models.model_settings import ModelSettings


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


def import_hf(
    folder: Path,
    output: Path,
    *,
    tokenizer: Path | None = None,
    overrides: Mapping[str, object] | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """Write output/step_00000000; returns what it is. Of a model's settings `overrides` may name its dropout."""
    others = (overrides or {}).keys() - {"dropout"}
    if others:
        raise UsageError(f"--set {min(others)}: config.json says it already. With --from hf only dropout can be set.")
    source = HFFolder(folder, (overrides or {}).get("dropout"))
    words = tokenizer_of(tokenizer or folder)
    known = {match.name: match for match in source.matches()}

    def parts(name: str) -> Iterator[Tensor]:
        match = known[name]
        for _, index, rows in _parts(match, range(match.shape[0])):
            yield source.part(match, index, rows)

    came_from = {"format": "huggingface", "model_type": source.family}
    return save_foreign(output, source.settings, parts, words, came_from, report=report)
