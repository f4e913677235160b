"""A learning rate that falls in stairs. Torch-free; a schedule is all settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lmtrain.optim.schedule_settings import ScheduleSettings


@dataclass(frozen=True, kw_only=True)
class StairsSettings(ScheduleSettings):
    kind: ClassVar[str] = "stairs"

    stairs: int = 4

    def after_warmup(self, step: int, total_steps: int) -> float:
        return float(0.5 ** int(self.progress(step, total_steps) * self.stairs))
