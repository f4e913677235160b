"""The model under evaluation: what computes scores, with its tokenizer and the facts that a result names.

Made by load_model, and passed to the runner of tasks. Imports no task, so that a model is loaded quickly.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmtrain.errors import DataError
from lmtrain.eval.scoring import Scorable
from lmtrain.layout import ONE_PROCESS
from lmtrain.tokenizer.base import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model under evaluation with its properties."""

    model: Scorable
    tokenizer: Tokenizer
    seq_len: int
    vocab_size: int
    dtype: str
    layout: str = ONE_PROCESS
    causal: bool = True  # False: predicts masked tokens from both sides
    pairs: bool = False  # can classify whether one segment follows another


def check_vocabulary(subject: Subject) -> None:
    """Raise DataError if the model's tokenizer has more tokens than the model's vocabulary."""
    if subject.tokenizer.vocab_size > subject.vocab_size:
        raise DataError(
            f"The tokenizer has {subject.tokenizer.vocab_size} tokens, but the model only {subject.vocab_size}. "
            "Evaluate a checkpoint with the tokenizer that it was trained with."
        )
