"""The settings common to all optimizers. Torch-free.

Called by train. A kind named `adamw` has its settings in `adamw_settings.py`; `adamw.py` beside it has `build(settings,
groups, whole)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from lmtrain.config.settings_base import Choice, Problem, setting
from lmtrain.errors import own


@dataclass(frozen=True, kw_only=True)
class OptimSettings(Choice):
    package: ClassVar[str] = "lmtrain.optim"

    lr: float = setting(per_stage=True)  # the peak learning rate, which a schedule multiplies by a factor in [0, 1]
    weight_decay: float = setting(default=0.1, per_stage=True)
    clip_norm: float | None = setting(default=1.0, per_stage=True)

    def problems(self) -> Iterator[Problem]:
        clips = [f"{own('1.0')}", f"{own('null')} for none"]
        if self.clip_norm == 0:  # because: elsewhere 0 stands for no clipping
            clips.reverse()
        yield from self.checked(
            self.above_0("lr", f"Use {own('3e-4')}."),
            (not 0 <= self.weight_decay < inf, "weight_decay", "must be 0 or more",
             f"Use {own(0.1)}, or {own(0)} for none."),
            self.above_0("clip_norm", f"Use {', or '.join(clips)}."),
        )  # fmt: skip

    def num_slots(self, name: str, shape: tuple[int, ...]) -> int:
        """Return the number of state tensors for this parameter; by default 2, Adam's moments."""
        return 2
