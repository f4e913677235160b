"""The settings of device, compilation, precision and activation recompute. Torch-free.

The optimizer's weights are always fp32. Activations that are recomputed in backward are not kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from lmtrain.config.build_typed_settings import quantity
from lmtrain.config.settings_base import Choice, Facts, Problem, Settings, problem_if, show
from lmtrain.errors import own, way
from lmtrain.placement.parallel_settings import ParallelSettings, whole_backward_schedule, why_not_compiled


@dataclass(frozen=True, kw_only=True)
class ComputeSettings(Settings):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: Literal["auto"] | bool = "auto"
    tf32: bool = False
    deterministic: bool = False
    threads: int | None = None

    def problems(self) -> Iterator[Problem]:
        yield from self.checked(
            self.at_least(1, "threads", f"Use {own('null')} for torch's own choice."),
            self.at_most(1024, "threads"),
            (self.tf32 and self.device == "cpu", "tf32",
             "works only on a GPU, not with device=cpu", f"Use {own('false')}, or {way('.device=cuda')}."),
        )

    def compiles(self, parallel: ParallelSettings, *, uses_dropout: bool, on_gpu: bool) -> bool:
        """Return True if blocks are compiled with torch.compile. `compile=auto` means yes on a GPU with a kernel
        compiler (`on_gpu`), unless this layout or dropout prevents it.
        """
        if self.compile != "auto":
            return self.compile
        return on_gpu and why_not_compiled(parallel, uses_dropout=uses_dropout) is None

    def describe_compile(self, parallel: ParallelSettings, *, uses_dropout: bool, on_gpu: bool) -> str:
        """Return a dry run's text about torch.compile: what is compiled, or why nothing is, such as a missing GPU or a
        setting of `parallel` that prevents it.
        """
        if self.compiles(parallel, uses_dropout=uses_dropout, on_gpu=on_gpu):
            return "each block, and the loss"
        if self.compile is False:
            return "nothing"
        if not on_gpu:
            return "nothing, since no GPU, or no Triton with a C compiler, is here"
        why = why_not_compiled(parallel, uses_dropout=uses_dropout)
        assert why is not None
        return f"nothing: {why.key}={show(why.value)} {why.rule}"


@dataclass(frozen=True, kw_only=True)
class PrecisionSettings(Choice):
    package: ClassVar[str] = "lmtrain.parallel"


@dataclass(frozen=True, kw_only=True)
class Fp32Settings(PrecisionSettings):
    kind: ClassVar[str] = "fp32"


@dataclass(frozen=True, kw_only=True)
class Bf16Settings(PrecisionSettings):
    """bf16 weights and activations; fp32 master weights, gradient accumulation and optimizer state."""

    kind: ClassVar[str] = "bf16"


@dataclass(frozen=True, kw_only=True)
class Fp16Settings(PrecisionSettings):
    """fp16, otherwise like bf16, and a loss scale that halves on overflow and doubles after a time without overflow."""

    kind: ClassVar[str] = "fp16"
    initial_scale: float = 65536.0
    growth_interval_steps: int = quantity("count", default=1000)
    min_scale: float = 1.0

    def problems(self) -> Iterator[Problem]:
        least = self.min_scale
        yield from self.checked(
            self.above_0("min_scale", f"Use {own('1.0')}."),
            (self.initial_scale < least, "initial_scale", f"is below min_scale={least}",
             f"Use {own(f'{max(65536.0, least):g}')}."),
            self.at_least(1, "growth_interval_steps", f"Use {own(1000)}."),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RecomputeSettings(Choice):
    package: ClassVar[str] = "lmtrain.parallel"
    field_facts: ClassVar[Facts] = Facts(per_stage=True, chosen_at_start=True)

    @property
    def words(self) -> str:
        """The recompute kind as a table shows it: `full`, or `full 24` if limited to 24 blocks."""
        return self.kind

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings as command-line overrides."""
        return (f"recompute={self.kind}",)

    def problems_in_model(self, num_layers: int) -> Iterator[Problem]:
        """Yield the problems with a model of this depth; called by train and the planner."""
        return iter(())

    def problems_in_layout(self, parallel: ParallelSettings) -> Iterator[Problem]:
        """Yield the problems with this layout."""
        return iter(())


@dataclass(frozen=True, kw_only=True)
class NoRecomputeSettings(RecomputeSettings):
    """No recompute: all activations that backward needs are kept."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True, kw_only=True)
class SomeRecomputeSettings(RecomputeSettings):
    """The base of recompute kinds, which may be limited to the first blocks."""

    blocks: int | None = None  # number of blocks from the model's first; null for all

    @property
    def words(self) -> str:
        return self.kind if self.blocks is None else f"{self.kind} {self.blocks}"

    @property
    def settings(self) -> tuple[str, ...]:
        return (*super().settings, *[f"recompute.blocks={self.blocks}"] * (self.blocks is not None))

    def problems(self) -> Iterator[Problem]:
        yield from self.checked(self.at_least(1, "blocks", f"Use {own(1)} or more, or null for all blocks."))

    def is_for(self, block: int) -> bool:
        """Return True if the block with this number in the whole model is recomputed."""
        return self.blocks is None or block < self.blocks

    def problems_in_model(self, num_layers: int) -> Iterator[Problem]:
        yield from self.problem_if(
            self.blocks is not None and self.blocks > num_layers, "blocks",
            f"is more than model.num_layers={num_layers}",
            f"Use {own(num_layers)} or less, or null for all blocks.",
        )  # fmt: skip

    def problems_in_layout(self, parallel: ParallelSettings) -> Iterator[Problem]:
        yield from problem_if(
            parallel.splits_backward, "parallel.schedule", parallel.schedule,
            "runs backward in two halves, and recomputed activations would be needed by both",
            f"Use {own(whole_backward_schedule(parallel))}, or no recomputation.",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AttentionRecomputeSettings(SomeRecomputeSettings):
    """Recompute of the attention core alone, whose scores are a block's largest tensors and cheap to recompute."""

    kind: ClassVar[str] = "attention"


@dataclass(frozen=True, kw_only=True)
class OperatorsRecomputeSettings(SomeRecomputeSettings):
    """Recompute of all but the results of matrix products and attention, which are kept."""

    kind: ClassVar[str] = "operators"


@dataclass(frozen=True, kw_only=True)
class FullRecomputeSettings(SomeRecomputeSettings):
    """Recompute of whole blocks: only a block's input is kept. The least memory, for a third more compute."""

    kind: ClassVar[str] = "full"
