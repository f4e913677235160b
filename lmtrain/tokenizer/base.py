"""The tokenizer: text to ids and back, the special ids, and a fingerprint of everything that decides ids. Torch-free.

Called by preprocessing, evaluation and every module that needs the vocabulary. Wraps `tokenizers.Tokenizer`; on-disk
forms of a tokenizer are in vocabularies.py. Text is always plain text: `<|endoftext|>` or `[MASK]` written in a
document is split like any other characters, so that no document can forge a boundary.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from lmtrain.errors import DataError, LmtrainError, MissingInputError, shorten
from lmtrain.runtime.files.files import atomic_file, opened, read_range
from lmtrain.tokenizer import vocabularies

MAX_BYTES = 64 << 20  # because: the largest published vocabularies are half as large
_MAX_ENTRIES = 4_000_000  # entries between commas or on lines: pieces, merges, ...
_MAX_ID = 2**31 - 1  # because: the widest dtype of ids in datasets is int32
_MAX_GROWTH = 64  # maximal factor by which replacement rules may lengthen a text
_MAX_RULES = 256
_MAX_AFFIX = 100  # characters of a prefix or suffix of pieces
_MAX_WORD = 1000  # characters; because: WordPiece's time is quadratic in a word's length, and BERT's limit is 100
_BEGINS = ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]")
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
_LONG = 1 << 18  # characters; because: the library's result takes about fifty times the memory of the text


@contextmanager
def library_errors(name: str, doing: str, way_out: str) -> Iterator[None]:
    """Convert exceptions of the `tokenizers` library to DataError with `name`. A Rust panic is no Exception."""
    try:
        yield
    except BaseException as error:
        if is_ours(error):
            raise
        raise DataError(f"{name} {doing} ({shorten(error)}). {way_out}") from error


def is_ours(error: BaseException) -> bool:
    return isinstance(error, (LmtrainError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError))


def refuse_too_many(data: bytes, name: str) -> None:
    """Raise DataError if a file has too many entries to parse; each entry becomes objects of about 100 bytes."""
    count = data.count(b"\n") + data.count(b",")
    if count > _MAX_ENTRIES:
        raise DataError(
            f"{name} has {count} entries, and no tokenizer has more than {_MAX_ENTRIES}. Check the path."
        )


def judged(inner: tokenizers.Tokenizer, name: str) -> int:
    """Raise DataError if a tokenizer is damaged or would exhaust memory or time; return its highest id + 1."""
    vocab_size = _judge_ids(inner, name)
    _judge_model(inner.model, name)
    _judge_rules(inner, name)
    _judge_template(inner, name)
    return vocab_size


def _judge_ids(inner: tokenizers.Tokenizer, name: str) -> int:
    ids = inner.get_vocab(with_added_tokens=True).values()
    if not ids:
        raise DataError(f"{name} has no vocabulary. It is damaged or another kind of file.")
    # because: a model allocates an embedding row for every id up to the largest
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
    """Raise DataError if the rules of a part are too many or could lengthen a text too much."""
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        found = getattr(inner, part)
        rules = [] if found is None else list(_rules(json.loads(found.__getstate__())))
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
    """Raise DataError if the post-processor's template drops or repeats the text, which would change its ids.

    Special tokens that a template adds around the text are never used.
    """
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
    """Return the factor by which a rule can lengthen a text."""
    if rule["type"] == "Replace":
        pattern, content = rule["pattern"], len(rule["content"])
        return max(1.0, content / max(1, len(pattern["String"])) if "String" in pattern else content)
    if rule["type"] == "Precompiled":
        return _longest_replacement(base64.b64decode(rule["precompiled_charsmap"]))
    return 2.0 if rule["type"] == "ByteLevel" else 1.0


def _longest_replacement(charsmap: bytes) -> float:
    """Return the longest replacement text of SentencePiece's charsmap in bytes, or 1.0 if it is at most 64.

    The charsmap is the size of a trie, the trie, then zero-terminated replacement texts.
    """
    texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")
    # because: the longest expansion of a single character in Unicode (an Arabic greeting) takes 33 bytes
    return 1.0 if max(map(len, texts)) <= 64 else float(max(map(len, texts)))


class Tokenizer:
    """Wrapper of the `tokenizers` library's tokenizer, with special ids and fingerprint; encodes text only."""

    def __init__(self, inner: tokenizers.Tokenizer, name: str = "The tokenizer") -> None:
        """Wrap a tokenizer of the library. `name` is its file, for messages."""
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True  # because: the spelling of a special token inside a text is plain text
        if getattr(inner.model, "dropout", None):
            inner.model.dropout = None  # because: dropout would give the same text different ids
        self._inner, self.source = inner, name  # the source is the tokenizer's file

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """Load tokenizer.json, GPT-2's vocab.json with merges.txt, BERT's vocab.txt, or a folder that holds them.

        The last loaded tokenizer is cached: if its files have not changed, they are not read again.
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
    def known(
        cls, path: Path, *, sha256: str | None, fingerprint: str, vocab_size: int, eod_id: int | None
    ) -> Tokenizer:
        """Return a tokenizer with these known properties if the file has this hash; parse it when it is first used.

        A file with another hash is loaded. because: parsing 50,000 pieces takes a tenth of the start-up time
        """
        if sha256 is None or not path.is_file() or hashlib.sha256(data := _read(path)).hexdigest() != sha256:
            return cls.load(path)
        tokenizer = cls.__new__(cls)
        tokenizer.source, tokenizer._text = str(path), data.decode().removesuffix("\n")
        tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eod_id = fingerprint, vocab_size, eod_id
        return tokenizer

    @cached_property
    def _inner(self) -> tokenizers.Tokenizer:
        """The library's tokenizer, parsed at first use if `known` made this tokenizer."""
        return type(self)._made(lambda name: tokenizers.Tokenizer.from_str(self._text), self.source)._inner

    @classmethod
    def _load(cls, path: Path) -> Tokenizer:
        if path.name.endswith("vocab.json"):
            merges = _merges_beside(path)
            return cls._made(
                lambda name: vocabularies.read_gpt2(_read(path), _read(merges), name, str(merges)), str(path)
            )
        if path.suffix == ".model":
            raise _sentencepiece(path, path.parent)
        if path.suffix == ".txt":
            return cls._made(lambda name: vocabularies.read_wordpiece(_read(path), name), str(path))
        return cls._made(lambda name: tokenizers.Tokenizer.from_str(_read(path).decode()), str(path))

    @classmethod
    def from_bytes(cls, data: bytes) -> Tokenizer:
        refuse_too_many(data, "tokenizer.json")
        return cls._made(lambda name: tokenizers.Tokenizer.from_str(data.decode()), "tokenizer.json")

    @classmethod
    def _made(cls, make: Callable[[str], tokenizers.Tokenizer], name: str) -> Tokenizer:
        with library_errors(name, "cannot be read as a tokenizer.json", "It is damaged or another file."):
            inner = make(name)
            vocab_size = judged(inner, name)
            tokenizer = cls(inner, name)
            tokenizer.vocab_size = vocab_size  # because: the property would copy the vocabulary once more
            return tokenizer

    def to_bytes(self) -> bytes:
        return (self._text + "\n").encode()

    @cached_property
    def _text(self) -> str:
        """The content of tokenizer.json; cached, because a run reads it once and writes it with every checkpoint."""
        return str(self._inner.to_str())

    @cached_property
    def tree(self) -> dict[str, Any]:
        """The parsed tokenizer.json; read-only."""
        found: dict[str, Any] = json.loads(self._text)
        return found

    def save(self, path: Path) -> None:
        with atomic_file(path) as file:
            file.write(self.to_bytes())

    def cut(self, text: str) -> list[str]:
        """Split a long text into parts whose concatenated ids equal the text's ids; one part if that is not certain."""
        parts, start = [], 0
        while self._words_stand_alone and (found := _END_OF_WORD.search(text, start + _LONG)):
            parts.append(text[start : found.end() - 1])
            start = found.end() - 1
        return [*parts, text[start:]]

    def encode(self, text: str) -> list[int]:
        # because: a plain encode spends a quarter of its time on offsets, which encode_batch_fast leaves out;
        # a batch of one text uses one core, so that parallel workers do not compete
        ids: list[int] = self._encoded(self._inner.encode_batch_fast, text).ids
        return ids

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids, and the end of each token in the text, in characters."""
        found = self._encoded(self._inner.encode_batch, text)
        return found.ids, [end for _, end in found.offsets]

    def _encoded(self, encode: Callable[..., list[tokenizers.Encoding]], text: str) -> tokenizers.Encoding:
        try:
            return encode([text], add_special_tokens=False)[0]
        except TypeError as error:  # raised for a lone surrogate, which valid UTF-8 cannot hold
            raise DataError("The text holds a lone surrogate, which is no character. Repair the text.") from error
        except BaseException as error:
            if is_ours(error):
                raise
            raise DataError(
                f"{self.source} cannot cut {shorten(text, 40)!r}, as a tokenizer can any text ({shorten(error)}). "
                f"{_ANOTHER}"
            ) from error

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        with library_errors(self.source, f"cannot make a text of {len(ids)} ids", _ANOTHER):
            return self._inner.decode(list(ids), skip_special_tokens=False)

    def piece(self, token: int) -> str:
        """Return the vocabulary's spelling of an id, "" if it has none; byte-level pieces show a space as Ġ."""
        return self._inner.id_to_token(token) or ""

    @cached_property
    def kind(self) -> str:
        """The model's name in tokenizer.json: BPE, WordPiece, Unigram or WordLevel."""
        return str(type(self._inner.model).__name__)

    @cached_property
    def vocab_size(self) -> int:
        """The highest id + 1, so that every id indexes an embedding of this many rows."""
        return max(self._inner.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def special(self) -> dict[str, int]:
        """The vocabulary's special ids by role: eod, pad, unk, cls, sep, mask."""
        found: dict[str, int] = {}
        for role, names in _ROLES.items():
            known = [i for name in names if (i := self._inner.token_to_id(name)) is not None]
            if known:
                found[role] = known[0]
        return found

    @cached_property
    def eod_id(self) -> int | None:
        return self.special.get("eod")

    @property
    def bos_id(self) -> int | None:
        """The id of the token that begins a document, or None. Not in `special`, whose ids masking skips."""
        return next((found for name in _BEGINS if (found := self._inner.token_to_id(name)) is not None), None)

    @cached_property
    def _words_stand_alone(self) -> bool:
        """True if text before a space cannot change the ids of the text after it: GPT-2's pattern, BERT's words."""
        split, normalizer = self.tree["pre_tokenizer"] or {}, self.tree["normalizer"]
        plain = all(token["special"] for token in self.tree["added_tokens"])  # others may contain spaces
        byte_level = split.get("type") == "ByteLevel" and split["use_regex"] and not split["add_prefix_space"]
        bert = split.get("type") == "BertPreTokenizer"
        kinds = {None: byte_level or bert, "BertNormalizer": bert}
        return plain and kinds.get(normalizer and normalizer["type"], False)

    @cached_property
    def fingerprint(self) -> str:
        text = json.dumps(_what_decides_ids(self.tree), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


_last: tuple[object, Tokenizer] | None = None  # (identity of the files, tokenizer) of the last load


def _identity(path: Path) -> object:
    """Return a value that changes whenever a tokenizer's files change, or None if a file cannot be accessed."""
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
    if models := sorted(folder.glob("*.model")):
        raise _sentencepiece(models[0], folder)
    raise MissingInputError(
        f"{folder} holds no tokenizer. A tokenizer is tokenizer.json, vocab.json with merges.txt, or vocab.txt."
    )


def _sentencepiece(path: Path, folder: Path) -> LmtrainError:
    if not path.is_file():
        return MissingInputError(f"{path} does not exist. Give a tokenizer's file or folder.")
    code = f"from transformers import AutoTokenizer as A; A.from_pretrained('{folder}').save_pretrained('new')"
    return DataError(
        f"{path} is a model of SentencePiece, which cannot be read. Give the tokenizer.json that models are published "
        "with; where there is none, `pip install transformers sentencepiece protobuf` has what writes one: "
        f'`python -c "{code}"`, and then give new.'
    )


def _read(path: Path) -> bytes:
    try:
        with opened(path) as (fd, size):
            if size > MAX_BYTES:
                raise DataError(f"{path} is larger than {MAX_BYTES >> 20} MiB, which no tokenizer is. Check the path.")
            data = read_range(fd, 0, size)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingInputError(f"{path} does not exist. Give a tokenizer's file or folder.") from error
    except OSError as error:
        raise MissingInputError(f"{path} cannot be read ({error.strerror}). Give a tokenizer's file.") from error
    refuse_too_many(data, str(path))
    return data


def _what_decides_ids(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a tokenizer.json that decide ids, normalized so that all file forms give the same result."""
    model = {key: value for key, value in tree["model"].items() if value not in (None, "", False)}
    has_names = isinstance(model["vocab"], dict)  # a Unigram vocabulary is a list of (piece, score)
    byte_level = has_names and (tree["pre_tokenizer"] or {}).get("type") == "ByteLevel"
    if byte_level and model["vocab"].keys() >= vocabularies.ALPHABET:
        model.pop("unk_token", None)  # because: a vocabulary with every byte has no unknown text
    added = [
        # because: a special token never matches in a text, so only its name and id matter
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
    """Return the tree without a key that changes only the reported offsets of pieces."""
    if isinstance(node, dict):
        return {k: _without(v, key) for k, v in node.items() if k != key}
    return [_without(v, key) for v in node] if isinstance(node, list) else node
