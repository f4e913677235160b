"""A folder of Hugging Face's as a checkpoint of ours: settings, weights in fp32, tokenizer.

Called by `lmtrain reshard --from hf`. Parts of tensors stream from one to the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmtrain.errors import UsageError
from lmtrain.exchange.huggingface.folder import HFFolder
from lmtrain.exchange.imported import save_foreign, tokenizer_of
from lmtrain.exchange.streaming import Report, row_ranges


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
        row_bytes = 4 * torch.Size(match.shape[1:]).numel()
        for index, (_, rows) in enumerate(match.theirs):
            for some in row_ranges(rows, row_bytes):
                yield source.part(match, index, some)

    came_from = {"format": "huggingface", "model_type": source.family}
    return save_foreign(output, source.settings, parts, words, came_from, report=report)
