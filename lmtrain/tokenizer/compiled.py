"""Which tokenizers csrc/encoder.cpp knows, and how it is told of them. Called by fast.py.

The compiled encoder must give exactly the ids of the `tokenizers` library; so a tokenizer that differs in anything from
the forms described here, or that has parts unknown to this file, is left to the library.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lmtrain import native
from lmtrain.tokenizer import bpe
from lmtrain.tokenizer.base import Tokenizer

_MOST_IDS = 1 << 21  # Bpe::kMostIds in csrc/bpe.h
_MOST_LETTERS = 8 << 20  # of all pieces; because: the tree of them takes some forty bytes for each
_MOST_MERGES = (1 << 22) - 1


def build(tokenizer: Tokenizer, dtype: np.dtype[Any]) -> Any | None:
    """The compiled encoder of a tokenizer; None where it has none."""
    if native.lib is None or tokenizer.vocab_size > np.iinfo(dtype).max + 1:
        return None
    kind = native.lib.Encoder16 if dtype == np.uint16 else native.lib.Encoder32
    tree = tokenizer.tree
    if not all(token["special"] for token in tree["added_tokens"]):  # others are looked for in the text
        return None
    if (pattern := _pattern(tree)) is not None and _is_plain_bpe(tree["model"]):
        return _build_bpe(kind, pattern, tree["model"])
    if _is_bert(tree):
        return _build_wordpiece(kind, tree["normalizer"], tree["model"])
    return None


def _pattern(tree: dict[str, Any]) -> str | None:
    """How a byte-level BPE cuts its text, if it is one of the two ways that are known."""
    split = tree["pre_tokenizer"] or {}
    parts = split["pretokenizers"] if split.get("type") == "Sequence" else [split]
    *before, bytes_ = parts or [{}]
    if tree["normalizer"] is not None or bytes_.get("type") != "ByteLevel" or bytes_["add_prefix_space"]:
        return None
    if not before and bytes_["use_regex"]:
        return "gpt2"
    whole = {"type": "Split", "pattern": {"Regex": bpe.CL100K}, "behavior": "Isolated", "invert": False}
    return "cl100k" if before == [whole] and not bytes_["use_regex"] else None


def _is_plain_bpe(model: dict[str, Any]) -> bool:
    return (
        model["type"] == "BPE"
        and not any(
            model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
        )
        and model["vocab"].keys() >= bpe.ALPHABET
        and max(model["vocab"].values()) < _MOST_IDS
        and len(model["merges"]) <= _MOST_MERGES
    )


def _build_bpe(kind: Any, pattern: str, model: dict[str, Any]) -> Any:
    vocab, pairs = model["vocab"], [m.split(" ", 1) if isinstance(m, str) else m for m in model["merges"]]
    merges = np.array([(vocab[a], vocab[b], vocab[a + b]) for a, b in pairs], np.int64).reshape(-1, 3)
    byte_ids = np.array([vocab[letter] for letter in bpe.LETTERS], np.int64)
    whole = {}
    if model.get("ignore_merges"):
        whole = {
            piece.translate(_TO_BYTES).encode("latin-1"): i for piece, i in vocab.items() if set(piece) <= bpe.ALPHABET
        }
    return kind.bpe(pattern, byte_ids, merges, whole)


_TO_BYTES = {ord(letter): byte for byte, letter in enumerate(bpe.LETTERS)}


def _is_bert(tree: dict[str, Any]) -> bool:
    model, normalizer = tree["model"], tree["normalizer"] or {}
    return (
        model["type"] == "WordPiece"
        and model["unk_token"] in model["vocab"]
        and sum(map(len, model["vocab"])) < _MOST_LETTERS
        and normalizer.get("type") == "BertNormalizer"
        and (tree["pre_tokenizer"] or {}).get("type") == "BertPreTokenizer"
    )


def _build_wordpiece(kind: Any, normalizer: dict[str, Any], model: dict[str, Any]) -> Any:
    strip = normalizer["strip_accents"]
    return kind.wordpiece(
        vocab={piece.encode(): i for piece, i in model["vocab"].items()},
        unknown=model["unk_token"].encode(),
        prefix=model["continuing_subword_prefix"].encode(),
        most_characters=model["max_input_chars_per_word"],
        clean=normalizer["clean_text"],
        cjk=normalizer["handle_chinese_chars"],
        strip=normalizer["lowercase"] if strip is None else strip,
        lower=normalizer["lowercase"],
    )
