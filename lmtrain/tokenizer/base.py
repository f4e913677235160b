"""A tokenizer: text to ids and back, the special ids, and a fingerprint of all that decides ids. Torch-free.

Called by preprocessing, evaluation and whoever must know the vocabulary. Wraps `tokenizers.Tokenizer`; knows the
shapes a tokenizer takes on disk only through bpe.py and wordpiece.py. Text is always text: `<|endoftext|>` or
`[MASK]` written in a document is split like any other characters, so that no document can forge a boundary.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from lmtrain.errors import DataError, MissingInputError, brief
from lmtrain.runtime.files.files import atomic_file, open_regular, read_range
from lmtrain.tokenizer import bpe, wordpiece
from lmtrain.tokenizer.judge import MAX_BYTES, is_ours, judged, library_errors, refuse_too_many

_ROLES = {
    "eod": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"),
    "pad": ("[PAD]", "<pad>", "<|pad|>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]",),
    "sep": ("[SEP]",),
    "mask": ("[MASK]", "<mask>"),
}
_END_OF_WORD = re.compile(r"\S ")
_ANOTHER = "Get the file again, or give another tokenizer."
_LONG = 1 << 18  # characters; because: the library's answer takes some fifty times the memory of its text


class Tokenizer:
    def __init__(self, inner: tokenizers.Tokenizer, name: str = "The tokenizer") -> None:
        """`name` is the file that it came from, for messages."""
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True  # a special token's spelling inside a text is plain text
        if getattr(inner.model, "dropout", None):
            inner.model.dropout = None  # because: the same text must always give the same ids
        self._inner, self._name = inner, name

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """Read tokenizer.json, GPT-2's vocab.json with merges.txt, BERT's vocab.txt, or a folder that holds them.

        The tokenizer that was read last is kept: a file that has not changed since is not read again.
        """
        global _last
        path = Path(path)
        if path.is_dir():
            path = _choose(path)
        identity = _identity(path)
        if identity is None or _last is None or _last[0] != identity:
            _last = (identity, cls._load(path))
        return _last[1]

    @classmethod
    def _load(cls, path: Path) -> Tokenizer:
        if path.name.endswith("vocab.json"):
            merges = _merges_beside(path)
            return cls._made(lambda name: bpe.read_gpt2(_read(path), _read(merges), name, str(merges)), str(path))
        if path.suffix == ".txt":
            return cls._made(lambda name: wordpiece.read_vocab(_read(path), name), str(path))
        data = _read(path)
        return cls._made(lambda name: tokenizers.Tokenizer.from_str(data.decode()), str(path))

    @property
    def source(self) -> str:
        """The file that it came from."""
        return self._name

    @classmethod
    def from_bytes(cls, data: bytes) -> Tokenizer:
        refuse_too_many(data, "tokenizer.json")
        return cls._made(lambda name: tokenizers.Tokenizer.from_str(data.decode()), "tokenizer.json")

    @classmethod
    def _made(cls, make: Callable[[str], tokenizers.Tokenizer], name: str) -> Tokenizer:
        with library_errors(name, f"is no valid {Path(name).name}", "It is damaged or another file."):
            inner = make(name)
            vocab_size = judged(inner, name)
            tokenizer = cls(inner, name)
            tokenizer.vocab_size = vocab_size  # because: the library would copy its vocabulary once more
            return tokenizer

    def to_bytes(self) -> bytes:
        return (self._text + "\n").encode()

    @cached_property
    def _text(self) -> str:
        """tokenizer.json; kept, since a run reads it once and writes it with every checkpoint."""
        return str(self._inner.to_str())

    @cached_property
    def tree(self) -> dict[str, Any]:
        """What tokenizer.json says; to be looked at only."""
        found: dict[str, Any] = json.loads(self._text)
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
        # because: a batch call does not track where tokens lie, which a plain one spends a quarter of its time on;
        # a batch of one keeps to one core, so that as many run at once as there are workers
        ids: list[int] = self._encoded(self._inner.encode_batch_fast, text).ids
        return ids

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """The ids, and of each the place in the text where it ends, in characters."""
        found = self._encoded(self._inner.encode_batch, text)
        return found.ids, [end for _, end in found.offsets]

    def _encoded(self, encode: Callable[..., list[tokenizers.Encoding]], text: str) -> tokenizers.Encoding:
        try:
            return encode([text], add_special_tokens=False)[0]
        except TypeError as error:  # half of a surrogate pair, which no UTF-8 text holds
            raise DataError("The text holds a lone surrogate, which is no character. Repair the text.") from error
        except BaseException as error:
            if is_ours(error):
                raise
            said = f"{self._name} cannot cut {brief(text, 40)!r}, as a tokenizer can any text ({brief(error)})"
            raise DataError(f"{said}. {_ANOTHER}") from error

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        with library_errors(self._name, f"cannot make a text of {len(ids)} ids", _ANOTHER):
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


_last: tuple[object, Tokenizer] | None = None  # the identity of the files that were read last, and what they hold


def _identity(path: Path) -> object:
    """Return what changes whenever a tokenizer's files do, or None where they cannot be looked at."""
    files = [path, _merges_beside(path)] if path.name.endswith("vocab.json") else [path]
    try:
        found = [(str(file.absolute()), os.stat(file)) for file in files]
    except OSError:
        return None
    return [(name, of.st_dev, of.st_ino, of.st_size, of.st_mtime_ns, of.st_ctime_ns) for name, of in found]


def _merges_beside(vocab: Path) -> Path:
    return vocab.with_name(vocab.name.removesuffix("vocab.json") + "merges.txt")


def _choose(folder: Path) -> Path:
    for name in ("tokenizer.json", "vocab.json", "vocab.txt"):
        if (folder / name).is_file():
            return folder / name
    raise MissingInputError(
        f"{folder} holds no tokenizer. A tokenizer is tokenizer.json, vocab.json with merges.txt, or vocab.txt."
    )


def _read(path: Path) -> bytes:
    try:
        fd, size = open_regular(path, follow_links=True)
        try:
            if size > MAX_BYTES:
                raise DataError(f"{path} is larger than {MAX_BYTES >> 20} MiB, which no tokenizer is. Check the path.")
            data = read_range(fd, 0, size)
        finally:
            os.close(fd)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingInputError(f"{path} does not exist. Give a tokenizer's file or folder.") from error
    except OSError as error:
        raise MissingInputError(f"{path} cannot be read ({error.strerror}). Give a tokenizer's file.") from error
    refuse_too_many(data, str(path))
    return data


def _what_decides_ids(tree: dict[str, Any]) -> dict[str, Any]:
    """The parts of a tokenizer.json that decide ids, spelled one way whichever file form they came from."""
    model = {key: value for key, value in tree["model"].items() if value not in (None, "", False)}
    has_names = isinstance(model["vocab"], dict)  # Unigram's are pairs of a piece and its score
    byte_level = has_names and (tree["pre_tokenizer"] or {}).get("type") == "ByteLevel"
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
