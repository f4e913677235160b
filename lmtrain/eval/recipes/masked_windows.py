"""A text cut and masked for models that see both sides. Pure numpy. Called by the masked tasks.

`SampledMasks` masks as training does, with the data room's own sampler: masks follow from the seed and a window's
number, whatever the batch size and the layout. `OneByOne` masks each token in turn. `Pairs` asks of two segments
whether the second follows the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmtrain.batch import IGNORED
from lmtrain.data.masked_settings import MaskedSettings
from lmtrain.data.samples.masked import MaskedDataset, MaskVocabulary, Sentences, build_sampler
from lmtrain.eval.text.windows import MaskedRequest, Tokens

SEED = 1
MARKS = 2  # [CLS] and [SEP] around each window
_AT_ONCE = 256  # windows that are masked together


@dataclass(frozen=True)
class Documents:
    """Documents that lie behind one another in `tokens`."""

    tokens: Tokens
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, documents: Sequence[Sequence[int]]) -> Documents:
        lengths = np.array([len(ids) for ids in documents], np.int64)
        tokens = np.concatenate([np.array(ids, np.int32) for ids in documents] or [np.zeros(0, np.int32)])
        return cls(tokens, np.cumsum(lengths) - lengths, lengths)

    def __iter__(self) -> Iterator[Tokens]:
        return (self.tokens[start : start + size] for start, size in zip(self.starts, self.lengths, strict=True))


class Cut(NamedTuple):
    """tokens[start:stop] of a document are fed; those before `first_asked` were asked in an earlier window."""

    start: int
    stop: int
    first_asked: int


def cuts(num_tokens: int, room: int, stride: int) -> Iterator[Cut]:
    """Windows of `room` tokens moved by `stride`; the last is as long as the others where the text is."""
    start, asked = 0, 0
    while asked < num_tokens:
        stop = min(start + room, num_tokens)
        yield Cut(max(stop - room, 0), stop, asked)
        start, asked = start + stride, stop


@dataclass(frozen=True)
class SampledMasks:
    documents: Documents
    vocabulary: MaskVocabulary
    seq_len: int
    settings: MaskedSettings

    @property
    def num_targets(self) -> int:
        if not len(self._items):
            return 0
        sizes, _ = self._sampler.counts(np.arange(len(self._items)))
        return int(sizes[:, 0].sum())

    def __iter__(self) -> Iterator[MaskedRequest]:
        for first in range(0, len(self._items), _AT_ONCE):
            items = self._items[first : first + _AT_ONCE]
            tokens_BT, labels_BT, _, real_BT, *_ = self._sampler.batch(np.arange(first, first + len(items)))
            for row, item in enumerate(items.tolist()):
                places = np.flatnonzero(labels_BT[row] != IGNORED)
                if len(places):
                    asked = np.concatenate([tokens_BT[row, real_BT[row]], labels_BT[row, places]])
                    yield MaskedRequest(asked, len(places), item, places=places)

    @cached_property
    def _items(self) -> NDArray[np.int64]:
        """Of each window its document."""
        return np.repeat(np.arange(len(self.documents.lengths)), -(-self.documents.lengths // self._room))

    @property
    def _room(self) -> int:
        return self.seq_len - MARKS

    @cached_property
    def _sampler(self) -> Any:
        """A window is to the sampler what a sentence is: a sample of its own."""
        items, count = self._items, len(self._items)
        number = np.arange(count) - np.searchsorted(items, items)
        starts = self.documents.starts[items] + number * self._room
        lengths = np.minimum(self.documents.lengths[items] - number * self._room, self._room)
        windows = Sentences(
            tokens=self.documents.tokens,
            lengths=lengths.astype(np.int32),
            pointers=(starts * self.documents.tokens.itemsize).astype(np.int64),
            bounds=np.array([0, count], np.int64),
            rows=np.stack([np.arange(count), np.arange(count) + 1, np.full(count, self._room)], 1).astype(np.int64),
        )
        return build_sampler(windows, self.vocabulary, self.settings, self.seq_len, SEED)


@dataclass(frozen=True)
class OneByOne:
    documents: Documents
    vocabulary: MaskVocabulary
    seq_len: int
    stride: int

    @property
    def num_targets(self) -> int:
        return int(self.documents.lengths.sum())

    def __iter__(self) -> Iterator[MaskedRequest]:
        special = self.vocabulary.special
        for item, tokens in enumerate(self.documents):
            for cut in cuts(len(tokens), self.seq_len - MARKS, self.stride):
                fed = np.array([special["cls"], *tokens[cut.start : cut.stop], special["sep"]], np.int64)
                for place in range(cut.first_asked - cut.start + 1, len(fed) - 1):
                    asked = np.append(fed, fed[place])
                    asked[place] = special["mask"]
                    yield MaskedRequest(asked, 1, item, places=np.array([place]))


@dataclass(frozen=True)
class Pairs:
    dataset: MaskedDataset

    @property
    def num_targets(self) -> int:
        return self.dataset.num_samples

    def __iter__(self) -> Iterator[MaskedRequest]:
        for first in range(0, self.num_targets, _AT_ONCE):
            batch = self.dataset.batch(np.arange(first, min(first + _AT_ONCE, self.num_targets)))
            for row, real_T in enumerate(batch.real_BT):
                asked = np.append(batch.tokens_BT[row, real_T], batch.pair_labels_B[row])
                yield MaskedRequest(asked, 1, first + row, segments=batch.segments_BT[row, real_T])
