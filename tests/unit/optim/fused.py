"""Optimizers made to take the fused way on a CPU, by the kernels' twins."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lmtrain.kernels import adamw, triton_availability
from lmtrain.kernels.adamw_tensors_and_rates import AdamWTensors, Rates


def asked_of_kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on; grows by the number of tensors at each call for directions."""
    asked: list[int] = []

    def counted(moved: Sequence[AdamWTensors], rates: Rates) -> None:
        asked.append(len(moved))
        adamw.write_directions_in_torch(moved, rates)

    monkeypatch.setattr(triton_availability, "FUSED_DEVICES", {"cpu"})
    monkeypatch.setattr(adamw, "write_directions", counted)
    return asked
