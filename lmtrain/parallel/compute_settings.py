"""On what and how a run computes. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lmtrain.config.base import Problem, Settings


@dataclass(frozen=True, kw_only=True)
class ComputeSettings(Settings):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: bool = False
    deterministic: bool = False
    threads: int | None = None

    def problems(self) -> Iterator[Problem]:
        yield from self.at_least(1, "threads", "Use null for torch's own choice.")
        yield from self.at_most(1024, "threads", "Use null for torch's own choice.")
