"""What a tokenizer's file may ask for: ids without wide gaps, and texts that stay about as long as they are.

Called by base.py once for each tokenizer that is opened. The `tokenizers` library takes what it is given: forty rules
that each double a letter make a terabyte of one word, and an id of two billion an embedding of as many rows.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tokenizers

from lmtrain.errors import DataError, LmtrainError, brief

MAX_BYTES = 64 << 20  # because: the largest vocabularies there are take half of it
_MAX_ENTRIES = 4_000_000  # pieces, merges and whatever else stands between commas or on lines
_MAX_ID = 2**31 - 1  # because: datasets hold ids as int32 at the widest
_MAX_GROWTH = 64  # of a text by rules that replace its parts
_MAX_RULES = 256
_MAX_AFFIX = 100  # characters
_MAX_WORD = 1000  # characters; because: WordPiece looks at all the parts of a word, and BERT's has 100


@contextmanager
def library_errors(name: str, doing: str, way_out: str) -> Iterator[None]:
    """What the library raises, as an error that names the file. A panic of its Rust core is no Exception."""
    try:
        yield
    except BaseException as error:
        if is_ours(error):
            raise
        raise DataError(f"{name} {doing} ({brief(error)}). {way_out}") from error


def is_ours(error: BaseException) -> bool:
    return isinstance(error, (LmtrainError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError))


def refuse_too_many(data: bytes, name: str) -> None:
    """Before the file is parsed: each entry becomes objects of some hundred bytes."""
    count = data.count(b"\n") + data.count(b",")
    if count > _MAX_ENTRIES:
        raise DataError(
            f"{name} has {count} entries, and no tokenizer has more than {_MAX_ENTRIES}. Check the path."
        )


def judged(inner: tokenizers.Tokenizer, name: str) -> int:
    """Raise on a tokenizer that asks for too much; return its highest id + 1."""
    vocab_size = _judge_ids(inner, name)
    _judge_model(inner.model, name)
    _judge_rules(inner, name)
    _judge_template(inner, name)
    return vocab_size


def _judge_ids(inner: tokenizers.Tokenizer, name: str) -> int:
    ids = inner.get_vocab(with_added_tokens=True).values()
    if not ids:
        raise DataError(f"{name} has no vocabulary. It is damaged or another kind of file.")
    # because: a model has a row for every id up to the largest
    most = min(_MAX_ID, 8 * len(ids) + (1 << 18))
    if max(ids) > most:
        raise DataError(f"{name} has the id {max(ids)}; with {len(ids)} tokens the largest is {most}. It is damaged.")
    if len(set(ids)) < len(ids):
        raise DataError(f"{name} gives one id to two tokens. It is damaged.")
    return int(max(ids)) + 1


def _judge_model(model: Any, name: str) -> None:
    longest = getattr(model, "max_input_chars_per_word", 0)
    if longest > _MAX_WORD:
        raise DataError(
            f"{name} cuts words of up to {longest} characters; {_MAX_WORD} are the most. Lower its "
            "max_input_chars_per_word: BERT's is 100."
        )
    for kind in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(getattr(model, kind, None) or "") > _MAX_AFFIX:
            raise DataError(f"{name} has a {kind} of more than {_MAX_AFFIX} characters. It is damaged.")


def _judge_rules(inner: tokenizers.Tokenizer, name: str) -> None:
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        found = getattr(inner, part)
        tree = None if found is None else json.loads(found.__getstate__())
        rules = [] if tree is None else list(_rules(tree))
        growth = 1.0
        for rule in rules:
            growth = min(growth * _growth(rule), 1e9)
        if growth > _MAX_GROWTH:
            raise DataError(
                f"{name} has a {part} that makes a text {growth:.0f} times as long; {_MAX_GROWTH} times is the most. "
                "It is damaged, or made to fill the memory."
            )
        if len(rules) > _MAX_RULES:
            raise DataError(f"{name} has a {part} of {len(rules)} rules; {_MAX_RULES} are the most. It is damaged.")


def _judge_template(inner: tokenizers.Tokenizer, name: str) -> None:
    """What stands around a text is never asked for here; one that loses the text, or doubles it, changes its ids."""
    if inner.post_processor is None:
        return
    for rule in _rules(json.loads(inner.post_processor.__getstate__())):
        texts = [part["Sequence"]["id"] for part in rule.get("single") or () if "Sequence" in part]
        if rule["type"] == "TemplateProcessing" and texts != ["A"]:
            raise DataError(
                f"{name} has a post_processor whose template for one text has {len(texts)} texts in it; it must have "
                "the one, A. It is damaged, or give it a template that keeps the text."
            )


def _rules(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict) and "type" in tree:
        yield tree
        for inside in ("normalizers", "pretokenizers", "decoders", "processors"):
            for rule in tree.get(inside) or ():
                yield from _rules(rule)


def _growth(rule: dict[str, Any]) -> float:
    """How many times as long a text may be after it."""
    if rule["type"] == "Replace":
        pattern, content = rule["pattern"], len(rule["content"])
        return max(1.0, content / max(1, len(pattern["String"])) if "String" in pattern else content)
    if rule["type"] == "Precompiled":
        return _longest_replacement(base64.b64decode(rule["precompiled_charsmap"]))
    return 2.0 if rule["type"] == "ByteLevel" else 1.0


def _longest_replacement(charsmap: bytes) -> float:
    """SentencePiece's table: the size of its tree, the tree, and what characters become, each up to a zero."""
    texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")
    # because: the longest of Unicode's own is a greeting that is one character, in 33 bytes
    return 1.0 if max(map(len, texts)) <= 64 else float(max(map(len, texts)))
