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
    labels_BT: Any  # int64, the next token of each position, or IGNORED
    positions_BT: Any = None  # int64, only where positions restart within a row
    documents_BT: Any = None  # int32, only where attention must not cross documents: which document each token is of

    def map(self, change: Callable[[Any], Any]) -> Batch:
        """The same batch with every array that is present changed: numpy to torch, host to device."""
        present = {f.name: getattr(self, f.name) for f in fields(self)}
        return Batch(**{name: None if value is None else change(value) for name, value in present.items()})

    @property
    def num_samples(self) -> int:
        return int(self.tokens_BT.shape[0])
