"""The settings of AdamW. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from lmtrain.config.settings_base import Problem
from lmtrain.optim.optim_settings import OptimSettings


@dataclass(frozen=True, kw_only=True)
class AdamWSettings(OptimSettings):
    kind: ClassVar[str] = "adamw"

    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        yield from self.checked(
            (len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas), "betas",
             "are not two numbers in [0, 1)", "Use [0.9,0.95]."),
            self.above_0("eps", "Use 1e-8."),
        )
