"""The named arrays that pass from the data loader to the loss: numpy arrays or torch tensors; neither is imported.

B is the number of samples of a micro-batch, T the length of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

IGNORED = -100  # the label of a position that is excluded from the loss


@dataclass(frozen=True)
class Batch:
    """The arrays of a micro-batch; an array that its model or data does not need is None."""

    tokens_BT: Any  # int64 token ids
    labels_BT: Any  # int64, the target of each position (the next token, or the masked token itself), or IGNORED
    positions_BT: Any = None  # int64, only if positions restart within a row
    documents_BT: Any = None  # int32, each token's document number; only if attention must not cross documents
    segments_BT: Any = None  # int64, only if samples are pairs: 0 for the first segment, 1 for the second
    not_padding_BT: Any = None  # bool, only if rows of one text each are padded: True at tokens, False at padding
    is_query_BT: Any = None  # bool, only in evaluation: True where a hidden state is read; others may be 0
    pair_labels_B: Any = None  # int64, only if samples are pairs: 1 if the second segment does not follow the first
    scored_positions_K: Any = None  # int64, only if few positions have labels: their flat indices on this rank
    scored_labels_K: Any = None  # int64, labels of the scored positions; those of all ranks if ranks shard the sequence

    def map(self, change: Callable[[Any], Any]) -> Batch:
        """Return a batch with `change` applied to each present array, such as numpy to torch or host to device."""
        return Batch(**{name: None if value is None else change(value) for name, value in vars(self).items()})

    def without_labels(self) -> Batch:
        """Return the same samples with every label set to IGNORED."""
        labels = {name: getattr(self, name) for name in ("labels_BT", "pair_labels_B")}
        return replace(self, **{name: each * 0 + IGNORED for name, each in labels.items() if each is not None})

    @property
    def num_samples(self) -> int:
        return int(self.tokens_BT.shape[0])


@dataclass(frozen=True)
class SourceCounts:
    """The part of one dataset of a blend in the global batch of a step: the rows of its samples, and totals."""

    number: int  # of the dataset, in the order of the settings
    rows_S: Any  # int64, the indices of its samples in `StepBatches.sample_ids`
    labels: int
    tokens: int  # without padding


@dataclass(frozen=True)
class StepBatches:
    """The micro-batches that a rank reads for a step, and totals over the step's global batch."""

    step: int
    microbatches: list[Batch]  # this rank's share of the global batch, as torch tensors
    num_samples: int  # samples of the global batch
    counts: tuple[int, ...]  # labels in the global batch per loss term: equal on every rank
    sample_ids: Any  # int64, sample ids of the global batch, in order
    num_tokens: int  # tokens of the global batch, without padding
    by_source: tuple[SourceCounts, ...] = ()  # of a blend: each dataset with samples in this step; else empty
