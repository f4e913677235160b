"""The named arrays that walk from the loader to the loss. Holds numpy arrays or torch tensors; imports neither.

B is the number of samples of a microbatch, T the length of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

IGNORED = -100  # a label that takes no part in the loss


@dataclass(frozen=True)
class Batch:
    tokens_BT: Any  # int64 token ids
    labels_BT: Any  # int64, what each position is to predict (the next token, or its own where masked), or IGNORED
    positions_BT: Any = None  # int64, only where positions restart within a row
    documents_BT: Any = None  # int32, only where attention must not cross documents: which document each token is of
    segments_BT: Any = None  # int64, only where samples are pairs: 0 for the first segment, 1 for the second
    real_BT: Any = None  # bool, only where rows can be padded: True where a token stands
    asked_BT: Any = None  # bool, only in evaluation: True where hidden states are read; elsewhere they may be zeros
    pair_labels_B: Any = None  # int64, only where samples are pairs: 1 where the second does not follow the first
    scored_K: Any = None  # int64, only where few positions have labels: of this rank's, row by row, those to be scored
    scored_labels_K: Any = None  # int64, their labels; where ranks hold cuts of the sequence, those of all of them

    def map(self, change: Callable[[Any], Any]) -> Batch:
        """Return the batch with `change` applied to every array: numpy to torch, host to device."""
        return Batch(**{name: None if value is None else change(value) for name, value in vars(self).items()})

    def unlabelled(self) -> Batch:
        """Return the same samples with all labels IGNORED."""
        labels = {name: getattr(self, name) for name in ("labels_BT", "pair_labels_B")}
        return replace(self, **{name: each * 0 + IGNORED for name, each in labels.items() if each is not None})

    @property
    def num_samples(self) -> int:
        return int(self.tokens_BT.shape[0])


@dataclass(frozen=True)
class StepBatches:
    """What one rank reads for a step, and what is true of the whole step."""

    step: int
    microbatches: list[Batch]  # of torch tensors: this rank's share
    num_samples: int  # of the global batch
    counts: tuple[int, ...]  # labels of each term of the loss, of the global batch: the same on every rank
    sample_ids: Any  # int64, of the global batch, in order
    num_tokens: int  # of the global batch, padding left out
