"""A tokenizer: text to ids and back, the special ids, and a fingerprint of all that decides ids. Torch-free.

Called by preprocessing, evaluation and whoever must know the vocabulary. Wraps `tokenizers.Tokenizer`; knows the
shapes a tokenizer takes on disk only through bpe.py and wordpiece.py. Text is always text: `<|endoftext|>` or
`[MASK]` written in a document is split like any other characters, so that no document can forge a boundary.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from lmtrain.errors import DataError, MissingInputError
from lmtrain.runtime.files import atomic_file
from lmtrain.tokenizer import bpe, wordpiece

_ROLES = {
    "eod": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"),
    "pad": ("[PAD]", "<pad>", "<|pad|>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]",),
    "sep": ("[SEP]",),
    "mask": ("[MASK]", "<mask>"),
}
_END_OF_WORD = re.compile(r"\S ")
_LONG = 1 << 18  # characters; because: the library's answer takes some fifty times the memory of its text
_MAX_BYTES = 256 << 20
_MAX_ID = 2**31 - 1  # because: datasets hold ids as int32 at the widest


class Tokenizer:
    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True  # a special token's spelling inside a text is plain text
        if getattr(inner.model, "dropout", None):
            inner.model.dropout = None  # because: the same text must always give the same ids
        self._inner = inner

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """From tokenizer.json, GPT-2's vocab.json with merges.txt, BERT's vocab.txt, or a folder that holds them."""
        path = Path(path)
        if path.is_dir():
            path = _choose(path)
        if path.name.endswith("vocab.json"):
            merges = path.with_name(path.name.removesuffix("vocab.json") + "merges.txt")
            return cls(_judged(bpe.read_gpt2(_read(path), _read(merges), str(path), str(merges)), str(path)))
        if path.suffix == ".txt":
            return cls(_judged(wordpiece.read_vocab(_read(path), str(path)), str(path)))
        return cls(_parse(_read(path), str(path)))

    @classmethod
    def from_bytes(cls, data: bytes) -> Tokenizer:
        return cls(_parse(data, "tokenizer.json"))

    def to_bytes(self) -> bytes:
        return (self._inner.to_str() + "\n").encode()

    @cached_property
    def tree(self) -> dict[str, Any]:
        """What tokenizer.json says; to be looked at only."""
        found: dict[str, Any] = json.loads(self._inner.to_str())
        return found

    def save(self, path: Path) -> None:
        with atomic_file(path) as file:
            file.write(self.to_bytes())

    def cut(self, text: str) -> list[str]:
        """A long text in parts whose ids, end to end, are the text's ids; one part where that cannot be promised."""
        parts, start = [], 0
        while self._words_stand_alone and (found := _END_OF_WORD.search(text, start + _LONG)):
            parts.append(text[start : found.end() - 1])
            start = found.end() - 1
        return [*parts, text[start:]]

    def encode(self, text: str) -> list[int]:
        try:
            # because: a batch call does not track where tokens lie, which a plain one spends a quarter of its time on;
            # a batch of one keeps to one core, so that as many run at once as there are workers
            return self._inner.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError as error:  # half of a surrogate pair, which no UTF-8 text holds
            raise DataError("The text holds a lone surrogate, which is no character. Repair the text.") from error

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode(list(ids), skip_special_tokens=False)

    def piece(self, token: int) -> str:
        """How the vocabulary spells an id; byte-level pieces show a space as Ġ."""
        return self._inner.id_to_token(token) or ""

    @cached_property
    def kind(self) -> str:
        """The model's name in tokenizer.json: BPE, WordPiece, Unigram, WordLevel."""
        return str(type(self._inner.model).__name__)

    @cached_property
    def vocab_size(self) -> int:
        """The highest id + 1, so that every id indexes an embedding of this many rows."""
        return max(self._inner.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def special(self) -> dict[str, int]:
        """The special ids this vocabulary has, by their role."""
        found: dict[str, int] = {}
        for role, names in _ROLES.items():
            known = [i for name in names if (i := self._inner.token_to_id(name)) is not None]
            if known:
                found[role] = known[0]
        return found

    @property
    def eod_id(self) -> int | None:
        return self.special.get("eod")

    @cached_property
    def _words_stand_alone(self) -> bool:
        """Whether nothing before a space changes the ids of what follows: GPT-2's pattern and BERT's words."""
        split, normalizer = self.tree["pre_tokenizer"] or {}, self.tree["normalizer"]
        plain = all(token["special"] for token in self.tree["added_tokens"])  # others may hold spaces
        byte_level = split.get("type") == "ByteLevel" and split["use_regex"] and not split["add_prefix_space"]
        bert = split.get("type") == "BertPreTokenizer"
        kinds = {None: byte_level or bert, "BertNormalizer": bert}
        return plain and kinds.get(normalizer and normalizer["type"], False)

    @cached_property
    def fingerprint(self) -> str:
        text = json.dumps(_what_decides_ids(self.tree), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _choose(folder: Path) -> Path:
    for name in ("tokenizer.json", "vocab.json", "vocab.txt"):
        if (folder / name).is_file():
            return folder / name
    raise MissingInputError(
        f"{folder} holds no tokenizer. A tokenizer is tokenizer.json, vocab.json with merges.txt, or vocab.txt."
    )


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DataError(f"{path} is larger than {_MAX_BYTES >> 20} MiB, which no tokenizer is. Check the path.")
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingInputError(f"{path} does not exist. Give a tokenizer's file or folder.") from error
    except OSError as error:
        raise MissingInputError(f"{path} cannot be read ({error.strerror}). Give a tokenizer's file.") from error


def _parse(data: bytes, name: str) -> tokenizers.Tokenizer:
    try:
        return _judged(tokenizers.Tokenizer.from_str(data.decode()), name)
    except DataError:
        raise
    except BaseException as error:  # because: a panic of the Rust core is a BaseException, and no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise DataError(f"{name} is no valid tokenizer.json ({error}). It is damaged or another file.") from error


def _judged(inner: tokenizers.Tokenizer, name: str) -> tokenizers.Tokenizer:
    ids = inner.get_vocab(with_added_tokens=True).values()
    if not ids:
        raise DataError(f"{name} has no vocabulary. It is damaged or another kind of file.")
    if max(ids) > _MAX_ID:
        raise DataError(f"{name} has the id {max(ids)}; the largest allowed is {_MAX_ID}. It is damaged.")
    if len(set(ids)) < len(ids):
        raise DataError(f"{name} gives one id to two tokens. It is damaged.")
    return inner


def _what_decides_ids(tree: dict[str, Any]) -> dict[str, Any]:
    """The parts of a tokenizer.json that decide ids, spelled one way whichever file form they came from."""
    model = {key: value for key, value in tree["model"].items() if value not in (None, "", False)}
    byte_level = (tree["pre_tokenizer"] or {}).get("type") == "ByteLevel"
    if byte_level and model["vocab"].keys() >= bpe.ALPHABET:
        model.pop("unk_token", None)  # because: with every byte in the vocabulary nothing is unknown
    added = [
        # A special token is never found in text, so that only its name and id matter.
        {"content": token["content"], "id": token["id"]} if token["special"] else token
        for token in tree["added_tokens"]
    ]
    model["vocab"] = dict(model["vocab"]) | {t["content"]: t["id"] for t in added} if byte_level else model["vocab"]
    return {
        "model": model,
        "normalizer": tree["normalizer"],
        "pre_tokenizer": _without(tree["pre_tokenizer"], "trim_offsets"),
        "added_tokens": sorted(added, key=lambda token: int(token["id"])),
    }


def _without(node: Any, key: str) -> Any:
    """The same tree without a key that changes only where pieces are said to lie."""
    if isinstance(node, dict):
        return {k: _without(v, key) for k, v in node.items() if k != key}
    return [_without(v, key) for v in node] if isinstance(node, list) else node
