"""Whole logits on every rank, for inference: gathered over tp, of batches of any length. Called by ParallelModel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.batch import Batch
from lmtrain.models.layers.heads import MaskedHead
from lmtrain.parallel.mesh import Axis


def whole_logits(
    run: Callable[[Batch], Tensor | None],
    model: Any,
    batch: Batch,
    keep_BT: Tensor | None,
    tp: Axis,
    *,
    sequence: bool,
) -> Tensor | None:
    """[B, T, V] over the padded vocabulary, or [kept, V]; None on a rank that `run` gives no hidden states."""
    if tp.size == 1:
        hidden = run(batch)
        if hidden is None:
            return None
        logits: Tensor = model.logits(hidden if keep_BT is None else hidden[keep_BT])
        return logits
    length = batch.tokens_BT.shape[1]
    # because: tp ranks cut the sequence evenly; what stands on the right is not real, and nobody looks at it
    missing = -length % tp.size if sequence else 0
    if missing and batch.real_BT is None:
        batch = replace(batch, real_BT=torch.ones_like(batch.tokens_BT, dtype=torch.bool))
    hidden_BTD = run(batch.map(lambda array: _pad(array, missing)))
    if hidden_BTD is None:
        return None
    head: Any = model.head
    if isinstance(head, MaskedHead):
        head, hidden_BTD = head.decoder, head.transform(hidden_BTD)
    logits = head.whole(hidden_BTD, None if keep_BT is None else _pad(keep_BT, missing))
    return logits if keep_BT is not None else logits[:, :length]


def _pad(array: Tensor, missing: int) -> Tensor:
    return F.pad(array, (0, missing)) if missing and array.ndim == 2 else array
