"""Bulk encoding: JSON lines or documents to arrays of ids. Called by data_tools' workers.

`build_encoder` returns the compiled encoder (csrc/encoder.cpp) for the tokenizers that it supports: GPT-2's and
LLaMA-3's byte-level BPE and BERT's WordPiece. For other tokenizers, or if nothing was compiled, it returns the twin,
which calls the `tokenizers` library. Both give equal results. Several threads may use an encoder at once; the compiled
encoder releases the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lmtrain.runtime import compiled_helpers
from lmtrain.tokenizer import vocabulary_files
from lmtrain.tokenizer.text_from_json_lines import (
    BadTextError,
    Reject,
    Text,
    build_reject,
    build_rejects,
    extract_text,
    split_lines,
)
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer

_MAX_IDS = 1 << 21  # Bpe::kMostIds in csrc/bpe.h
_MAX_LETTERS = 8 << 20  # letters of all pieces; because: the trie of the pieces takes about forty bytes per letter
_MAX_MERGES = (1 << 22) - 1


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype for ids below vocab_size: uint16 or int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)  # because: Megatron uses the same threshold


def build_compiled_encoder(tokenizer: Tokenizer, dtype: np.dtype[Any]) -> Any | None:
    """Return an encoder of the compiled extension (csrc/encoder.cpp) that gives the same ids as the tokenizer, as
    `dtype`. Return None if the extension is missing or does not support this tokenizer.
    """
    if compiled_helpers.lib is None or tokenizer.vocab_size > np.iinfo(dtype).max + 1:
        return None
    encoder_class = compiled_helpers.lib.Encoder16 if dtype == np.uint16 else compiled_helpers.lib.Encoder32
    tokenizer_json = tokenizer.tree
    if not all(token["special"] for token in tokenizer_json["added_tokens"]):  # others are matched in the text
        return None
    if (pattern := _bpe_pattern(tokenizer_json)) is not None and _is_plain_bpe(tokenizer_json["model"]):
        return _build_bpe(encoder_class, pattern, tokenizer_json["model"])
    if _is_bert(tokenizer_json):
        return _build_wordpiece(encoder_class, tokenizer_json["normalizer"], tokenizer_json["model"])
    return None


def _bpe_pattern(tokenizer_json: dict[str, Any]) -> str | None:
    """Return the name of the pattern of a byte-level BPE if the compiled encoder has it and no normalizer changes the
    text before; None otherwise.
    """
    pattern = vocabulary_files.bpe_pattern(tokenizer_json["pre_tokenizer"])
    return pattern if tokenizer_json["normalizer"] is None and pattern in ("gpt2", "cl100k") else None


def _is_plain_bpe(model: dict[str, Any]) -> bool:
    """Return True if the `model` entry of a tokenizer.json is a BPE that the compiled encoder supports: without
    dropout, prefixes, suffixes and byte fallback, with all 256 bytes, and not too large.
    """
    return (
        model["type"] == "BPE"
        and not any(
            model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
        )
        and model["vocab"].keys() >= vocabulary_files.ALPHABET
        and max(model["vocab"].values()) < _MAX_IDS
        and len(model["merges"]) <= _MAX_MERGES
    )


def _build_bpe(encoder_class: Any, pattern: str, model: dict[str, Any]) -> Any:
    """Build the compiled encoder for a byte-level BPE. `encoder_class` is Encoder16 or Encoder32 of the compiled
    extension, `pattern` is "gpt2" or "cl100k", `model` is the entry of tokenizer.json.
    """
    vocab, pairs = model["vocab"], [m.split(" ", 1) if isinstance(m, str) else m for m in model["merges"]]
    merges = np.array([(vocab[a], vocab[b], vocab[a + b]) for a, b in pairs], np.int64).reshape(-1, 3)
    byte_ids = np.array([vocab[letter] for letter in vocabulary_files.LETTERS], np.int64)
    spellable = (piece for piece in vocab if model.get("ignore_merges") and set(piece) <= vocabulary_files.ALPHABET)
    whole_pieces = {piece.translate(_TO_BYTES).encode("latin-1"): vocab[piece] for piece in spellable}
    return encoder_class.bpe(pattern, byte_ids, merges, whole_pieces)


_TO_BYTES = {ord(letter): byte for byte, letter in enumerate(vocabulary_files.LETTERS)}


def _is_bert(tokenizer_json: dict[str, Any]) -> bool:
    """Return True if a parsed tokenizer.json is BERT's WordPiece, with its normalizer and word splitting, and the
    vocabulary is not too large for the compiled encoder.
    """
    model, normalizer = tokenizer_json["model"], tokenizer_json["normalizer"] or {}
    return (
        model["type"] == "WordPiece"
        and model["unk_token"] in model["vocab"]
        and sum(map(len, model["vocab"])) < _MAX_LETTERS
        and normalizer.get("type") == "BertNormalizer"
        and (tokenizer_json["pre_tokenizer"] or {}).get("type") == "BertPreTokenizer"
    )


def _build_wordpiece(encoder_class: Any, normalizer: dict[str, Any], model: dict[str, Any]) -> Any:
    """Build the compiled encoder for BERT's WordPiece. `encoder_class` is Encoder16 or Encoder32 of the compiled
    extension, `normalizer` and `model` are entries of tokenizer.json.
    """
    strip = normalizer["strip_accents"]
    return encoder_class.wordpiece(
        vocab={piece.encode(): i for piece, i in model["vocab"].items()},
        unknown=model["unk_token"].encode(),
        prefix=model["continuing_subword_prefix"].encode(),
        most_characters=model["max_input_chars_per_word"],
        clean=normalizer["clean_text"],
        cjk=normalizer["handle_chinese_chars"],
        strip=normalizer["lowercase"] if strip is None else strip,
        lower=normalizer["lowercase"],
    )


@dataclass(frozen=True)
class EncodedDocuments:
    """The valid documents in order: concatenated ids, and the number of ids per document (0 for an empty text)."""

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]
    num_text_bytes: int  # UTF-8 bytes of the valid documents
    rejects: list[Reject]  # in document order


class Encoder(Protocol):
    """Interface of both encoders. `append_eod` ends every document that has ids with the end-of-document token."""

    def encode_documents(self, documents: Sequence[Text], *, append_eod: bool = False) -> EncodedDocuments:
        """Encode texts given as str or as UTF-8 bytes. A reject's `item` is the document's number."""

    def encode_jsonl(self, data: bytes, key: str, *, append_eod: bool = False) -> EncodedDocuments:
        """Encode the text under `key` of each JSON line (the last line may lack its newline).

        `data` may be any object with a buffer. The caller must remove a byte order mark at the start of a file. A
        reject's `item` is the offset of the line's first byte.
        """


def build_encoder(tokenizer: Tokenizer, dtype: Any = None) -> Encoder:
    """Build the fastest encoder for a tokenizer: compiled if possible, otherwise one that calls the `tokenizers`
    library. Ids have `dtype`, np.uint16 or np.int32; by default the dtype in which datasets store them.
    """
    dtype = dtype_for(tokenizer.vocab_size) if dtype is None else np.dtype(dtype)
    encoder = build_compiled_encoder(tokenizer, dtype)
    return TwinEncoder(tokenizer, dtype) if encoder is None else CompiledEncoder(tokenizer, encoder)


class CompiledEncoder:
    """The encoder of csrc/encoder.cpp. The cause of a rejected line or document is found by the Python code."""

    def __init__(self, tokenizer: Tokenizer, encoder: Any) -> None:
        self._eod, self._encoder = tokenizer.eod_id, encoder

    def encode_documents(self, documents: Sequence[Text], *, append_eod: bool = False) -> EncodedDocuments:
        tokens, lengths, num_text_bytes, bad = self._encoder.encode_documents(documents, self._eod_argument(append_eod))
        rejects = [build_reject(number, 0, documents[number], None) for number in bad[::2].tolist()]
        return EncodedDocuments(tokens, lengths, num_text_bytes, rejects)

    def encode_jsonl(self, data: bytes, key: str, *, append_eod: bool = False) -> EncodedDocuments:
        tokens, lengths, num_text_bytes, bad = self._encoder.encode_jsonl(
            data, key.encode("utf-8", "surrogatepass"), self._eod_argument(append_eod)
        )
        return EncodedDocuments(tokens, lengths, num_text_bytes, build_rejects(data, key, bad))

    def _eod_argument(self, append_eod: bool) -> int:
        """Return the argument by which the compiled encoder appends the end-of-document token: its id, or -1 to append
        none.
        """
        if not append_eod:
            return -1
        assert self._eod is not None, "append_eod needs an end-of-document token, which the tokenizer lacks"
        return self._eod


class TwinEncoder:
    """Encoder that calls the `tokenizers` library; supports every tokenizer."""

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype[Any]) -> None:
        self._tokenizer, self._dtype = tokenizer, dtype

    def encode_documents(self, documents: Sequence[Text], *, append_eod: bool = False) -> EncodedDocuments:
        return self._encode(((number, 0, document) for number, document in enumerate(documents)), None, append_eod)

    def encode_jsonl(self, data: bytes, key: str, *, append_eod: bool = False) -> EncodedDocuments:
        return self._encode(((start, start, line) for start, line in split_lines(bytes(data))), key, append_eod)

    def _encode(self, items: Iterable[tuple[int, int, Text]], key: str | None, append_eod: bool) -> EncodedDocuments:
        arrays: list[NDArray[Any]] = [np.empty(0, self._dtype)]
        lengths: list[int] = []
        rejects: list[Reject] = []
        num_text_bytes = 0
        for item, start, source in items:
            try:
                text = extract_text(source, key)
            except BadTextError as error:
                rejects.append(Reject(item, start + error.offset, error.cause))
                continue
            ids = self._encode_text(text, append_eod)
            arrays.append(ids)
            lengths.append(len(ids))
            num_text_bytes += len(text.encode())
        return EncodedDocuments(np.concatenate(arrays), np.array(lengths, np.int64), num_text_bytes, rejects)

    def _encode_text(self, text: str, append_eod: bool) -> NDArray[Any]:
        """Return the ids of a text as an array, followed by the end-of-document id if `append_eod`. A text without ids
        stays empty.
        """
        parts = map(self._tokenizer.encode, self._tokenizer.split_long_text(text))
        ids = np.concatenate([np.array(part, self._dtype) for part in parts])
        # because: the format stores an empty document as empty, without an end-of-document token
        return np.append(ids, ids.dtype.type(self._tokenizer.eod_id)) if append_eod and len(ids) else ids
