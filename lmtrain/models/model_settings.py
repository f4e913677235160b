"""What every model's settings offer, whatever its kind. Torch-free.

Called by train/config (checks across settings), placement, parallel and the planner. A kind named `gpt` stands in
`gpt_settings.py`, and `gpt.py` beside it has `build(settings)`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

from lmtrain.config.base import Choice, Problem
from lmtrain.errors import SettingsError
from lmtrain.layout import words
from lmtrain.spec import Cuts, LanguageModel, ModelShape, Split, Tie

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Choice):
    room: ClassVar[str] = "lmtrain.models"

    @property
    @abstractmethod
    def terms(self) -> tuple[str, ...]:
        """What it learns, each a term of the loss: the first are tokens, and data must have labels for all."""

    @property
    @abstractmethod
    def shape(self) -> ModelShape:
        """The integers behind sizes and FLOPs; its vocabulary is 0 until the tokenizer has been asked."""

    @property
    @abstractmethod
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and columns of the logits, rounded up so that they can be cut evenly."""

    @property
    @abstractmethod
    def uses_dropout(self) -> bool:
        """Whether a training step draws random numbers."""

    def unused(self) -> Iterator[Problem]:
        """Settings that were given and change nothing in this model: a run refuses them, a checkpoint may have them."""
        return iter(())

    @abstractmethod
    def with_vocab(self, vocab_size: int) -> Self:
        """The same settings for a tokenizer of this many tokens; refuses a vocabulary that is set too small for it."""

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Numbers in the whole model without padding, each tied weight once. A closed form: plans need no torch."""

    @abstractmethod
    def weights(self) -> dict[str, Shape]:
        """Shape of every parameter by name, padding included, each tied weight under its first name."""

    @abstractmethod
    def cuts(self) -> Cuts:
        """How each of them may be cut. With `weights`, all that says where numbers lie, before torch is there."""

    @abstractmethod
    def ties(self) -> tuple[Tie, ...]:
        """Names that are one weight."""

    def layer_of(self, name: str) -> int:
        """The block that a weight belongs to; -1 where it stands before them all, num_layers where it follows them.

        Whatever a model calls its other parts, its blocks are `blocks.0`, `blocks.1` and so on.
        """
        part, _, rest = name.partition(".")
        if part == "blocks":
            return int(rest.partition(".")[0])
        return -1 if part == "embedding" else self.shape.num_layers

    def build(self) -> LanguageModel:
        """The whole model, with memory on torch's default device: `meta` has none."""
        model: LanguageModel = self.component().build(self)
        return model


def true_weights(settings: ModelSettings) -> dict[str, Shape]:
    """Every weight and its shape as checkpoints hold it: without the rows that pad the vocabulary."""
    cuts, rows = settings.cuts(), settings.shape.vocab_size
    return {
        name: (rows, *shape[1:]) if name in cuts and cuts[name].split is Split.VOCAB else shape
        for name, shape in settings.weights().items()
    }


def checked_vocab_size(given: int | None, found: int) -> int:
    """What the settings say, or the tokenizer's; refuses what is too small for it."""
    if given is not None and given < found:
        rule = f"is smaller than the tokenizer's {found} tokens"
        problem = Problem("vocab_size", given, rule, f"Use {found}, or null for the tokenizer's.")
        raise SettingsError([problem.text("model")])
    return found if given is None else given


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def some(values: list[int]) -> str:
    """At most a dozen legal values: a message is not a table."""
    return words(values if len(values) <= 12 else values[-12:])
