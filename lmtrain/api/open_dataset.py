"""`lmtrain.open_dataset` and the dataset that it returns: the token ids and texts of documents. Torch-free."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, SupportsIndex, overload

from numpy.typing import NDArray

from lmtrain.api.check_arguments import checked
from lmtrain.api.encode_and_decode_text import Tokenizer
from lmtrain.data.store import joined_dataset
from lmtrain.data.store.document_boundaries import use_recorded_checksums
from lmtrain.data.store.indexed_dataset import IndexedDataset
from lmtrain.errors import DataError, MissingInputError
from lmtrain.tokenizer import text_to_ids_and_back
from lmtrain.units import format_count


@checked
def open_dataset(prefix: str | os.PathLike[str]) -> Dataset:
    """Open a dataset, which `lmtrain preprocess` or Megatron-LM has written, for reading. `prefix` is its path without
    .bin or .idx. Raise an LmtrainError if there is none, or if its files do not agree with each other.
    """
    dataset = joined_dataset.open_dataset(Path(prefix))
    use_recorded_checksums(dataset)
    return Dataset(dataset)


class Dataset:
    """The documents of a dataset, each an array of token ids. The files are mapped, not loaded: a document is read when
    it is asked for, and compared with its checksums.
    """

    def __init__(self, dataset: IndexedDataset) -> None:
        """Wrap an opened dataset; `lmtrain.open_dataset` calls this."""
        self._dataset = dataset

    def __len__(self) -> int:
        """Return the number of documents."""
        return self._dataset.num_documents

    @overload
    def __getitem__(self, index: SupportsIndex) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[NDArray[Any]]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> NDArray[Any] | list[NDArray[Any]]:
        """Return the token ids of a document, in the type that the dataset stores, or for a slice a list of documents.
        A negative index counts from the end; raise IndexError outside the dataset.

        The ids are a copy. They end with the end-of-document token if the dataset was written with one. A document that
        was split into sentences is joined.
        """
        if isinstance(index, slice):
            return [self._dataset.document(number) for number in range(*index.indices(len(self)))]
        return self._dataset.document(self._document_number(index))

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return map(self._dataset.document, range(len(self)))

    def decode(self, index: SupportsIndex) -> str:
        """Return the text of a document, by the dataset's own tokenizer. An end-of-document token at the end is left
        out.
        """
        ids = self._dataset.document(self._document_number(index))
        if len(ids) and ids[-1] == self.tokenizer.special.get("eod"):
            ids = ids[:-1]
        return self.tokenizer.decode(ids)

    def _document_number(self, index: SupportsIndex) -> int:
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"{self.prefix} has {len(self)} documents, and none has the number {number}.")
        return number % len(self)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the dataset's ids, read from the file beside the dataset. Raise MissingInputError if
        that file is missing, and DataError if it holds another tokenizer than the one that made the ids.
        """
        path, info = self._dataset.tokenizer_path, self._dataset.info
        if not path.exists():
            raise MissingInputError(
                f"{self.prefix} was stored without its tokenizer: {path} does not exist. Put the tokenizer there, or "
                "decode the ids with the tokenizer of a model that was trained on them."
            )
        tokenizer = text_to_ids_and_back.Tokenizer.load(path)
        if info is not None and info.tokenizer_fingerprint != tokenizer.fingerprint:
            raise DataError(
                f"{path} is not the tokenizer that {self.prefix} was written with: its fingerprint is "
                f"{tokenizer.fingerprint[:12]}, not {info.tokenizer_fingerprint[:12]}. Restore the file."
            )
        return Tokenizer(tokenizer)

    @property
    def prefix(self) -> Path:
        """The path of the dataset's files, without .bin or .idx."""
        return self._dataset.prefix

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all documents."""
        return self._dataset.num_tokens

    def __repr__(self) -> str:
        num_documents, num_tokens = format_count(len(self)), format_count(self.num_tokens)
        return f"<lmtrain.Dataset {self.prefix} of {num_documents} documents, {num_tokens} tokens>"
