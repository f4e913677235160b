"""The named arrays that walk from the loader to the loss. Holds numpy arrays or torch tensors; imports neither.

B is the number of samples of a microbatch, T the length of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
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
    pair_labels_B: Any = None  # int64, only where samples are pairs: 1 where the second does not follow the first

    def map(self, change: Callable[[Any], Any]) -> Batch:
        """The same batch with every array that is present changed: numpy to torch, host to device."""
        present = {f.name: getattr(self, f.name) for f in fields(self)}
        return Batch(**{name: None if value is None else change(value) for name, value in present.items()})

    @property
    def num_samples(self) -> int:
        return int(self.tokens_BT.shape[0])
