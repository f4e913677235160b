"""The settings of Muon, and of the AdamW beside it. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from lmtrain.config.settings_base import Problem
from lmtrain.errors import own
from lmtrain.optim.adamw_settings import AdamWSettings


@dataclass(frozen=True, kw_only=True)
class MuonSettings(AdamWSettings):
    kind: ClassVar[str] = "muon"

    momentum: float = 0.95
    newton_schulz_rounds: int = 5

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        yield from self.checked(
            (not 0 <= self.momentum < 1, "momentum", "must lie in [0, 1)", f"Use {own(0.95)}."),
            self.at_least(1, "newton_schulz_rounds", f"Use {own(5)}."),
            self.at_most(100, "newton_schulz_rounds", f"Use {own(5)}."),
        )

    def num_slots(self, name: str, shape: tuple[int, ...]) -> int:
        return 1 if is_hidden_matrix(name, len(shape)) else 2


def is_hidden_matrix(name: str, num_dims: int) -> bool:
    """Return True for a matrix inside `blocks`; embeddings, positions and heads are outside `blocks` in every model."""
    return num_dims == 2 and name.startswith("blocks.")
