"""The tokenizer of the Python interface: text to ids and back. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmtrain.api.check_arguments import check_token_ids
from lmtrain.errors import UsageError
from lmtrain.tokenizer import text_to_ids_and_back


class Tokenizer:
    """The tokenizer of a model or a dataset."""

    def __init__(self, inner: text_to_ids_and_back.Tokenizer) -> None:
        """Wrap a loaded tokenizer; `lmtrain.load` and `Dataset.tokenizer` call this."""
        self._inner = inner

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens: a special token's name in the text is split like any text.
        """
        if not isinstance(text, str):
            raise UsageError(f"encode() takes a text, and was given a {type(text).__name__}. Give a str.")
        return self._inner.encode(text)

    def decode(self, ids: Any) -> str:
        """Return the text of `ids`: integers in a list, an array or a tensor. Special tokens are spelled out. Raise
        UsageError if an id is not in the vocabulary.
        """
        return self._inner.decode(check_token_ids(ids, self.vocab_size, num_axes=(1,)).tolist())

    @property
    def vocab_size(self) -> int:
        """The highest id + 1."""
        return self._inner.vocab_size

    @property
    def special(self) -> Mapping[str, int]:
        """The ids of special tokens by role, as far as the tokenizer has them: eod (end of document), pad, unk, cls,
        sep, mask.
        """
        return dict(self._inner.special)

    def __len__(self) -> int:
        return self.vocab_size

    def __repr__(self) -> str:
        return f"<lmtrain.Tokenizer {self._inner.kind} with {self.vocab_size:,} tokens>"
