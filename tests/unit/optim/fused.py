"""Optimizers made to take the fused way on a CPU, by the kernels' twins."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lmtrain.kernels import adamw, kernel_support
from lmtrain.kernels.collect_adamw_tensors import AdamWTensors, Rates


def asked_of_kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on; grows by the number of tensors at each call for directions."""
    asked: list[int] = []

    def counted(moved: Sequence[AdamWTensors], rates: Rates) -> None:
        asked.append(len(moved))
        adamw.write_directions_in_torch(moved, rates)

    monkeypatch.setattr(kernel_support, "FUSED_DEVICES", {"cpu"})
    monkeypatch.setattr(adamw, "write_directions", counted)
    return asked
