"""What of a block is computed again in backward instead of being kept. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from lmtrain.config.base import Choice, Problem


@dataclass(frozen=True, kw_only=True)
class RecomputeSettings(Choice):
    room: ClassVar[str] = "lmtrain.parallel"


@dataclass(frozen=True, kw_only=True)
class NoRecomputeSettings(RecomputeSettings):
    """Everything that backward needs is kept."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True, kw_only=True)
class SomeRecomputeSettings(RecomputeSettings):
    blocks: int | None = None  # how many blocks of the model, from its first; null for all

    def problems(self) -> Iterator[Problem]:
        yield from self.at_least(1, "blocks", "Use null for all blocks, or recompute=none for none.")

    def is_for(self, block: int) -> bool:
        """Whether the block of this number in the whole model is computed twice."""
        return self.blocks is None or block < self.blocks

    def problems_in_model(self, num_layers: int) -> Iterator[Problem]:
        """What is wrong with these settings for a model of this depth; train/config asks."""
        wrong = self.blocks is not None and self.blocks > num_layers
        rule = f"is more than model.num_layers={num_layers}"
        yield from self.problem_if(wrong, "blocks", rule, "Use null for all blocks.")


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
