"""Optimizers made to take the fused way on a CPU, by the kernels' twins."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lmtrain.kernels import adamw, on_gpu
from lmtrain.kernels.moved import Moved, Rates


def asked_of_kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on; grows by the number of tensors at each call for directions."""
    asked: list[int] = []

    def counted(moved: Sequence[Moved], rates: Rates) -> None:
        asked.append(len(moved))
        adamw.directions_twin(moved, rates)

    monkeypatch.setattr(on_gpu, "FUSES_ON", {"cpu"})
    monkeypatch.setattr(adamw, "directions", counted)
    return asked
