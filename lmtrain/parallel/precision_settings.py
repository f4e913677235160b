"""In which numbers a run computes. Weights that the optimizer owns are always fp32. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from lmtrain.config.base import Choice, Problem
from lmtrain.config.build import quantity


@dataclass(frozen=True, kw_only=True)
class PrecisionSettings(Choice):
    room: ClassVar[str] = "lmtrain.parallel"


@dataclass(frozen=True, kw_only=True)
class Fp32Settings(PrecisionSettings):
    kind: ClassVar[str] = "fp32"


@dataclass(frozen=True, kw_only=True)
class Bf16Settings(PrecisionSettings):
    """bf16 weights and activations; fp32 master weights, gradient accumulation and optimizer state."""

    kind: ClassVar[str] = "bf16"


@dataclass(frozen=True, kw_only=True)
class Fp16Settings(PrecisionSettings):
    """As bf16, with a loss scale that halves when a gradient overflows and doubles after a while without."""

    kind: ClassVar[str] = "fp16"
    initial_scale: float = 65536.0
    growth_interval_steps: int = quantity("count", default=1000)
    min_scale: float = 1.0

    def problems(self) -> Iterator[Problem]:
        least = self.min_scale
        yield from self.checked(
            self.above_0("min_scale", "Use 1.0."),
            (self.initial_scale < least, "initial_scale", f"is below min_scale={least}", "Use 65536."),
            self.at_least(1, "growth_interval_steps", "Use 1000."),
        )
