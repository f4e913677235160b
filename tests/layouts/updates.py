"""What a worker does for test_optimizers.py: updates from gradients that are the same on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lmtrain.optim.adamw_settings import AdamWSettings
from lmtrain.optim.lamb_settings import LAMBSettings
from lmtrain.optim.muon_settings import MuonSettings
from lmtrain.spec import Start
from lmtrain.train.set_up_run import build_optimizer
from tests.layouts.cases import Case
from tests.layouts.training import build, write_pieces
from tests.unit.models.first_weights import whole

OPTIMIZERS = {"adamw": AdamWSettings(lr=0.01), "lamb": LAMBSettings(lr=0.01), "muon": MuonSettings(lr=0.01)}


STEPS = 3  # because: the second and third have moments of before


def update(name: str, optim: str, before: str, after: str) -> list[list[dict[str, Any]]]:
    """Weights before and after some updates, as pieces in two folders.

    Each whole gradient is drawn by parameter and step, and cut.
    """
    model = build(Case.named(name))
    start = write_pieces(model.pieces(), Path(before))
    optimizer = build_optimizer(OPTIMIZERS[optim], model)
    for step in range(STEPS):
        for parameter in model.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        gradients = {n: p.grad for n, p in model.parameters.items() if p.grad is not None}
        for piece in model.pieces_of(gradients, "grad"):
            gradient = whole(f"{step}:{piece.name}", piece.global_shape, Start(std=1.0), seed=1)
            at = zip(piece.offset, piece.block.shape, strict=True)
            piece.block.copy_(gradient[tuple(slice(start, start + size) for start, size in at)])
        optimizer.step()
    return [start, write_pieces(model.pieces(), Path(after))]
