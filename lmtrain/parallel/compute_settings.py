"""On what and how a run computes. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lmtrain.config.base import Problem, Settings, show
from lmtrain.placement.parallel_settings import ParallelSettings, why_not_compiled


@dataclass(frozen=True, kw_only=True)
class ComputeSettings(Settings):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: Literal["auto"] | bool = "auto"
    tf32: bool = False
    deterministic: bool = False
    threads: int | None = None

    def problems(self) -> Iterator[Problem]:
        on_cpu = self.tf32 and self.device == "cpu"
        yield from self.checked(
            self.at_least(1, "threads", "Use null for torch's own choice."),
            self.at_most(1024, "threads", "Use null for torch's own choice."),
            (on_cpu, "tf32", "is of GPUs, and device=cpu is none", "Use tf32=false or device=cuda."),
        )

    def compiles(self, parallel: ParallelSettings, *, uses_dropout: bool, on_gpu: bool) -> bool:
        """What `auto` comes to: true on a GPU, where the layout allows it."""
        if self.compile != "auto":
            return self.compile
        return on_gpu and why_not_compiled(parallel, uses_dropout=uses_dropout) is None

    def compile_words(self, parallel: ParallelSettings, *, uses_dropout: bool, on_gpu: bool) -> str:
        """For the dry run: what is compiled, and if nothing is, why. What a run refuses never comes here."""
        if self.compiles(parallel, uses_dropout=uses_dropout, on_gpu=on_gpu):
            return "each block, and the loss"
        if self.compile is False:
            return "nothing"
        if not on_gpu:
            return "nothing, since no GPU, or no Triton with a C compiler, is here"
        why = why_not_compiled(parallel, uses_dropout=uses_dropout)
        assert why is not None
        return f"nothing: {why.key}={show(why.value)} {why.rule}"
