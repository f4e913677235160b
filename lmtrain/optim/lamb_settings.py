"""The settings of LAMB. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lmtrain.optim.adamw_settings import AdamWSettings


@dataclass(frozen=True, kw_only=True)
class LAMBSettings(AdamWSettings):
    kind: ClassVar[str] = "lamb"

    eps: float = 1e-6
