"""Whole logits on every rank, for inference: gathered over tp, of batches of any length. Called by ParallelModel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.batch import Batch
from lmtrain.parallel.mesh import Axis
from lmtrain.parallel.tensor.vocabulary import whole_scores
from lmtrain.spec import LanguageModel


def whole_logits(
    run: Callable[[Batch], Tensor | None],
    model: LanguageModel | None,
    batch: Batch,
    keep_BT: Tensor | None,
    tp: Axis,
    *,
    sequence: bool,
) -> Tensor | None:
    """[B, T, V] over the padded vocabulary, or [kept, V]; None on a rank where `run` finds no hidden states.

    `model` is the last pipeline stage, on a rank that has it.
    """
    length = batch.tokens_BT.shape[1]
    # because: tp ranks cut the sequence evenly; what stands on the right is not real, and nobody looks at it
    missing = -length % tp.size if sequence else 0
    if missing and batch.real_BT is None:
        batch = replace(batch, real_BT=torch.ones_like(batch.tokens_BT, dtype=torch.bool))
    hidden_BTD = run(batch.map(lambda array: _pad(array, missing)) if missing else batch)
    if hidden_BTD is None or model is None:
        return None
    if tp.size == 1:
        return model.logits(hidden_BTD if keep_BT is None else hidden_BTD[keep_BT])
    assert isinstance(model, nn.Module)
    with whole_scores(model, None if keep_BT is None else _pad(keep_BT, missing)):
        logits = model.logits(hidden_BTD)
    return logits if keep_BT is not None else logits[:, :length]


def _pad(array: Tensor, missing: int) -> Tensor:
    return F.pad(array, (0, missing)) if missing and array.ndim == 2 else array
