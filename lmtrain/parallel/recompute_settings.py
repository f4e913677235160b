"""What of a block is computed again in backward instead of being kept. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from lmtrain.config.base import Choice, Problem, problem_if
from lmtrain.placement.parallel_settings import ParallelSettings


@dataclass(frozen=True, kw_only=True)
class RecomputeSettings(Choice):
    room: ClassVar[str] = "lmtrain.parallel"

    @property
    def words(self) -> str:
        """For a table: `full`, or `full 24` where it is of so many blocks."""
        return self.kind

    @property
    def settings(self) -> tuple[str, ...]:
        """As one would type it."""
        return (f"recompute={self.kind}",)

    def problems_in_model(self, num_layers: int) -> Iterator[Problem]:
        """What is wrong with these settings for a model of this depth; train/config asks, and the planner."""
        return iter(())

    def problems_in_layout(self, parallel: ParallelSettings) -> Iterator[Problem]:
        """The same for a run that is shared out so."""
        return iter(())


@dataclass(frozen=True, kw_only=True)
class NoRecomputeSettings(RecomputeSettings):
    """Everything that backward needs is kept."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True, kw_only=True)
class SomeRecomputeSettings(RecomputeSettings):
    blocks: int | None = None  # how many blocks of the model, from its first; null for all

    @property
    def words(self) -> str:
        return self.kind if self.blocks is None else f"{self.kind} {self.blocks}"

    @property
    def settings(self) -> tuple[str, ...]:
        return (*super().settings, *[f"recompute.blocks={self.blocks}"] * (self.blocks is not None))

    def problems(self) -> Iterator[Problem]:
        yield from self.checked(self.at_least(1, "blocks", "Use null for all blocks, or recompute=none for none."))

    def is_for(self, block: int) -> bool:
        """Whether the block of this number in the whole model is computed twice."""
        return self.blocks is None or block < self.blocks

    def problems_in_model(self, num_layers: int) -> Iterator[Problem]:
        wrong = self.blocks is not None and self.blocks > num_layers
        rule = f"is more than model.num_layers={num_layers}"
        yield from self.problem_if(wrong, "blocks", rule, "Use null for all blocks.")

    def problems_in_layout(self, parallel: ParallelSettings) -> Iterator[Problem]:
        yield from problem_if(
            parallel.splits_backward, "parallel.schedule", parallel.schedule,
            "takes backward apart, and what is computed again belongs to the whole of it",
            "Use parallel.schedule=1f1b or recompute=none.",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AttentionRecomputeSettings(SomeRecomputeSettings):
    """The core of attention alone: its scores are the largest tensors of a block and cheap to make again."""

    kind: ClassVar[str] = "attention"


@dataclass(frozen=True, kw_only=True)
class OperatorsRecomputeSettings(SomeRecomputeSettings):
    """Results of matrix products and of attention are kept; what lies between them is computed again."""

    kind: ClassVar[str] = "operators"


@dataclass(frozen=True, kw_only=True)
class FullRecomputeSettings(SomeRecomputeSettings):
    """A block keeps its input alone and runs forward a second time: the least memory, a third more work."""

    kind: ClassVar[str] = "full"
