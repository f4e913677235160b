"""Count the documents, characters, bytes and tokens of texts, to judge how well a tokenizer fits them.

Called by `lmtrain tokenizer show`. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lmtrain.tokenizer.bulk_encoding import build_encoder
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer


@dataclass(frozen=True)
class TextCounts:
    """The counts of some texts. `num_bytes` are those of the texts in UTF-8."""

    num_documents: int = 0
    num_characters: int = 0
    num_bytes: int = 0
    num_tokens: int = 0

    def __add__(self, other: TextCounts) -> TextCounts:
        return TextCounts(
            self.num_documents + other.num_documents, self.num_characters + other.num_characters,
            self.num_bytes + other.num_bytes, self.num_tokens + other.num_tokens,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return the counts and the mean bytes per token, which are None without tokens, as JSON values."""
        return {
            "documents": self.num_documents, "characters": self.num_characters, "bytes": self.num_bytes,
            "tokens": self.num_tokens, "bytes_per_token": self.num_bytes / self.num_tokens if self.num_tokens else None,
        }  # fmt: skip


def describe_text(tokenizer: Tokenizer, text: str) -> dict[str, Any]:
    """Return the ids and pieces of a text with its bytes per token as JSON values."""
    ids, num_bytes = tokenizer.encode(text), len(text.encode(errors="replace"))
    pieces = [tokenizer.piece(number) for number in ids]
    return {"tokens": len(ids), "bytes_per_token": num_bytes / max(len(ids), 1), "ids": ids, "pieces": pieces}


def count_tokens(tokenizer: Tokenizer, named_texts: Iterable[tuple[str, str]]) -> dict[str, TextCounts]:
    """Return the counts of the documents of each name in `named_texts`, pairs (name, text of a document). The tokens
    are those that `lmtrain preprocess` writes, without end-of-document tokens.
    """
    encoder, counts = build_encoder(tokenizer), dict[str, TextCounts]()
    for name, text in named_texts:
        encoded = encoder.encode_documents([text])
        document = TextCounts(1, len(text), encoded.num_text_bytes, len(encoded.tokens))
        counts[name] = counts.get(name, TextCounts()) + document
    return counts
