"""What every model's settings offer, whatever its kind. Torch-free.

Called by train/config (checks across settings), parallel (which module builds this kind?) and the planner. A kind
named `gpt` stands in `gpt_settings.py`, and `gpt.py` beside it has `build(settings)`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

from lmtrain.config.base import Choice
from lmtrain.spec import ModelShape


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Choice):
    room: ClassVar[str] = "lmtrain.models"

    @property
    @abstractmethod
    def shape(self) -> ModelShape:
        """The integers behind sizes and FLOPs; its vocabulary is 0 as long as the tokenizer has not been asked."""

    @property
    @abstractmethod
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and columns of the logits, rounded up so that they can be cut evenly."""

    @property
    @abstractmethod
    def uses_dropout(self) -> bool:
        """Whether a training step draws random numbers."""

    @abstractmethod
    def with_vocab(self, vocab_size: int) -> Self:
        """The same settings for a tokenizer of this many tokens; refuses a vocabulary that is set too small for it."""

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Numbers in the whole model without padding, each tied weight once. A closed form: plans need no torch."""
