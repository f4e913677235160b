"""A folder of Hugging Face's as a checkpoint of ours: settings, weights in fp32, tokenizer.

Called by `lmtrain reshard --from hf`. Parts of tensors stream from one to the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmtrain.exchange.huggingface.folder import HFFolder
from lmtrain.exchange.imported import save_foreign, tokenizer_of
from lmtrain.exchange.streaming import Report, row_ranges


def import_hf(
    folder: Path, output: Path, *, tokenizer: Path | None = None, report: Report | None = None
) -> dict[str, Any]:
    """Write output/step_00000000; gives what it is."""
    source = HFFolder(folder)
    words = tokenizer_of(tokenizer or folder)
    known = {match.name: match for match in source.matches()}

    def parts(name: str) -> Iterator[Tensor]:
        match = known[name]
        row_bytes = 4 * torch.Size(match.shape[1:]).numel()
        for index, (_, rows) in enumerate(match.theirs):
            for some in row_ranges(rows, row_bytes):
                yield source.part(match, index, some)

    came_from = {"format": "huggingface", "model_type": source.family}
    return save_foreign(output, source.settings, parts, words, came_from, report=report)
