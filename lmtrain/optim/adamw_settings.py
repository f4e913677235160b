"""The settings of AdamW. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import ClassVar

from lmtrain.config.settings_base import Problem, show
from lmtrain.errors import own
from lmtrain.optim.optim_settings import OptimSettings


@dataclass(frozen=True, kw_only=True)
class AdamWSettings(OptimSettings):
    kind: ClassVar[str] = "adamw"

    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        usual = AdamWSettings.betas
        betas = [beta if 0 <= beta < 1 else other for beta, other in zip_longest(self.betas[:2], usual, fillvalue=-1)]
        yield from self.checked(
            (len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas), "betas",
             "are not two numbers in [0, 1)", f"Use {own(show(betas))}."),
            self.above_0("eps", f"Use {own('1e-8')}."),
        )
