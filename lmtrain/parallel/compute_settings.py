"""On what and how a run computes. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lmtrain.config.base import Problem, Settings, problem_if


@dataclass(frozen=True, kw_only=True)
class ComputeSettings(Settings):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: bool = False
    deterministic: bool = False
    threads: int | None = None

    def problems(self) -> Iterator[Problem]:
        wrong = self.threads is not None and self.threads < 1
        yield from problem_if(wrong, "threads", self.threads, "must be at least 1", "Use null for torch's own choice.")
