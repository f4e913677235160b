"""The settings of gradient descent with momentum. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lmtrain.optim.optim_settings import OptimSettings


@dataclass(frozen=True, kw_only=True)
class HeavyBallSettings(OptimSettings):
    kind: ClassVar[str] = "heavy_ball"

    momentum: float = 0.9

    def num_slots(self, name: str, shape: tuple[int, ...]) -> int:
        return 1
