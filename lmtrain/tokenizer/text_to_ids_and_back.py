"""The tokenizer: text to ids and back, the special ids, and a fingerprint of everything that decides ids. Torch-free.

Called by preprocessing, evaluation and every module that needs the vocabulary. Wraps `tokenizers.Tokenizer`; file
formats, and the checks of loaded tokenizers, are in vocabulary_files.py. Text is always plain text: `<|endoftext|>` or
`[MASK]` written in a document is split like any other characters, so that no document can forge a boundary.
"""

from __future__ import annotations

import copy
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
from lmtrain.runtime.files.atomic_files import atomic_file, open_fd, read_range
from lmtrain.runtime.files.similar_path import missing_path
from lmtrain.tokenizer import vocabulary_files

MAX_BYTES = 64 << 20  # because: the largest published vocabularies are half as large
_BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]")
_SPECIAL_NAMES = {
    "eod": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"),
    "pad": ("[PAD]", "<pad>", "<|pad|>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]",),
    "sep": ("[SEP]",),
    "mask": ("[MASK]", "<mask>"),
}
_END_OF_WORD = re.compile(r"\S ")
_PART_CHARS = 1 << 18  # characters; because: the library's result takes about fifty times the memory of the text


def split_after_words(text: str) -> Iterator[str]:
    """Yield the parts of a text, about 256 Ki characters each, cut before single spaces."""
    start = 0
    while match := _END_OF_WORD.search(text, start + _PART_CHARS):
        yield text[start : match.end() - 1]
        start = match.end() - 1
    yield text[start:]


@contextmanager
def library_errors(action: str, way_out: str) -> Iterator[None]:
    """Convert exceptions that the `tokenizers` library raises in the `with` block to DataError. `action` and `way_out`
    are parts of the message, "The library tokenizers cannot {action} (...). {way_out}": a phrase such as "read a.json",
    and a sentence of advice.

    A Rust panic is no Exception, so BaseException is caught.
    """
    try:
        yield
    except BaseException as error:
        if passes_unchanged(error):
            raise
        raise DataError(f"The library tokenizers cannot {action} ({_cause(error)}). {way_out}") from error


def _cause(error: BaseException) -> str:
    """Return what the library says of an error, in plain words where Python's decoder says it."""
    text = shorten(error)
    return "it is not UTF-8 text" if "codec can't decode" in text else text


def passes_unchanged(error: BaseException) -> bool:
    """Return True for an exception that is not to be converted, since it does not come from the `tokenizers` library.
    """
    return isinstance(error, (LmtrainError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError))


class Tokenizer:
    """A tokenizer that encodes and decodes text, with its special ids and a fingerprint. Wraps `tokenizers.Tokenizer`.
    """

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
        """Load a tokenizer from a tokenizer.json, GPT-2's vocab.json (with merges.txt beside it), BERT's vocab.txt, or
        a folder with one of these files.

        The last loaded tokenizer is cached: if its files have not changed, they are not read again.
        """
        global _last_loaded
        path = Path(path)
        if path.is_dir():
            path = _find_in_folder(path)
        identity = _file_identity(path)
        if identity is None or _last_loaded is None or _last_loaded[0] != identity:
            _last_loaded = (identity, cls._load(path))
        return _last_loaded[1]

    @classmethod
    def load_lazily(
        cls, path: Path, *, sha256: str | None, fingerprint: str, vocab_size: int, eod_id: int | None
    ) -> Tokenizer:
        """Return the tokenizer at `path`, but parse its file only at first use. The properties (fingerprint, vocabulary
        size, end-of-document id) are those recorded in a dataset for a file with this `sha256`.

        A file with another hash is loaded by `load`. Parsing 50,000 pieces takes a tenth of the start-up time.
        """
        if sha256 is None or not path.is_file() or hashlib.sha256(data := _read(path)).hexdigest() != sha256:
            return cls.load(path)
        tokenizer = cls.__new__(cls)
        tokenizer.source, tokenizer._text = str(path), data.decode().removesuffix("\n")
        tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eod_id = fingerprint, vocab_size, eod_id
        return tokenizer

    @cached_property
    def _inner(self) -> tokenizers.Tokenizer:
        """The library's tokenizer, parsed at first use if `load_lazily` made this tokenizer."""
        return type(self)._build(lambda name: tokenizers.Tokenizer.from_str(self._text), self.source)._inner

    @classmethod
    def _load(cls, path: Path) -> Tokenizer:
        """Read and check a tokenizer's file. Its name decides the format: vocab.json, .txt or tokenizer.json. Raise
        DataError for a SentencePiece model.
        """
        if path.name.endswith("vocab.json"):
            merges = _merges_path(path)
            return cls._build(
                lambda name: vocabulary_files.read_gpt2(_read(path), _read(merges), name, str(merges)), str(path)
            )
        if path.suffix == ".model":
            raise _sentencepiece_error(path, path.parent)
        if path.suffix == ".txt":
            return cls._build(lambda name: vocabulary_files.read_wordpiece(_read(path), name), str(path))
        return cls._build(lambda name: tokenizers.Tokenizer.from_str(_read(path).decode()), str(path))

    @classmethod
    def from_bytes(cls, data: bytes) -> Tokenizer:
        """Build a tokenizer from the content of a tokenizer.json."""
        vocabulary_files.check_num_entries(data, "tokenizer.json")
        return cls._build(lambda name: tokenizers.Tokenizer.from_str(data.decode()), "tokenizer.json")

    @classmethod
    def _build(cls, load_library_tokenizer: Callable[[str], tokenizers.Tokenizer], file_name: str) -> Tokenizer:
        """Build a Tokenizer from the library's tokenizer that `load_library_tokenizer(file_name)` returns. Raise
        DataError if loading fails or the tokenizer is damaged.
        """
        with library_errors(f"read {file_name}", "It is damaged or another file."):
            inner = load_library_tokenizer(file_name)
            vocab_size = vocabulary_files.check_tokenizer(inner, file_name)
            tokenizer = cls(inner, file_name)
            tokenizer.vocab_size = vocab_size  # because: the property would copy the vocabulary once more
            return tokenizer

    def to_bytes(self) -> bytes:
        """Return the content of tokenizer.json."""
        return (self._text + "\n").encode()

    @cached_property
    def _text(self) -> str:
        """The content of tokenizer.json; cached, because a run reads it once and writes it with every checkpoint."""
        return str(self._inner.to_str())

    @cached_property
    def tree(self) -> dict[str, Any]:
        """The parsed tokenizer.json; read-only."""
        tree: dict[str, Any] = json.loads(self._text)
        return tree

    def save(self, path: Path) -> None:
        """Write tokenizer.json, atomically."""
        with atomic_file(path) as file:
            file.write(self.to_bytes())

    def split_long_text(self, text: str) -> list[str]:
        """Split a long text after words into parts of about 256 Ki characters. The ids of the parts, joined, equal the
        ids of the whole text; tokenizers for which this is not certain get the whole text as one part.
        """
        return [*split_after_words(text)] if self._splits_at_spaces else [text]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens."""
        # because: a plain encode spends a quarter of its time on offsets, which encode_batch_fast leaves out;
        # a batch of one text uses one core, so that parallel workers do not compete
        ids: list[int] = self._encode_one(self._inner.encode_batch_fast, text).ids
        return ids

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Return two lists: the ids of a text, and for each id the position in the text, in characters, where its token
        ends.
        """
        encoding = self._encode_one(self._inner.encode_batch, text)
        return encoding.ids, [end for _, end in encoding.offsets]

    def _encode_one(self, encode_method: Callable[..., list[tokenizers.Encoding]], text: str) -> tokenizers.Encoding:
        """Encode one text with `encode_method`, a method of the library's tokenizer that takes a list of texts. Raise
        DataError if the text holds a lone surrogate or the library fails.
        """
        try:
            return encode_method([text], add_special_tokens=False)[0]
        except TypeError as error:  # raised for a lone surrogate, which valid UTF-8 cannot hold
            raise DataError(
                "The text cannot be tokenized: it contains half of a character, a lone surrogate. Remove it."
            ) from error
        except BaseException as error:
            if passes_unchanged(error):
                raise
            raise DataError(
                f"{self.source} cannot tokenize {shorten(text, 40)!r} ({shorten(error)}). {vocabulary_files.GET_AGAIN}"
            ) from error

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the list of ids of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these ids, with special tokens as they are spelled."""
        with library_errors(f"decode {len(ids)} ids with {self.source}", vocabulary_files.GET_AGAIN):
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
        """The vocabulary's special ids by role: eod, pad, unk, cls, sep, mask. Roles that the vocabulary lacks are left
        out.
        """
        special: dict[str, int] = {}
        for role, names in _SPECIAL_NAMES.items():
            ids = [i for name in names if (i := self._inner.token_to_id(name)) is not None]
            if ids:
                special[role] = ids[0]
        return special

    @cached_property
    def eod_id(self) -> int | None:
        """The id of the end-of-document token, or None."""
        return self.special.get("eod")

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """The ids after which generation stops: that of the end-of-document token, unless the model has others."""
        return frozenset(() if self.eod_id is None else (self.eod_id,))

    def with_end_ids(self, ids: frozenset[int]) -> Tokenizer:
        """Return a copy of this tokenizer whose `end_ids`, the ids at which generation stops, are `ids`. Return the
        tokenizer itself if `ids` is empty.
        """
        if not ids:
            return self
        tokenizer = copy.copy(self)
        tokenizer.end_ids = ids
        return tokenizer

    @property
    def bos_id(self) -> int | None:
        """The id of the token that begins a document, or None. Not in `special`, whose ids masking skips."""
        return next((token_id for name in _BOS_NAMES if (token_id := self._inner.token_to_id(name)) is not None), None)

    @cached_property
    def _splits_at_spaces(self) -> bool:
        """True if a text can be cut before a space that follows another character without changing any ids. This holds
        for BERT's word splitting and for the patterns of GPT-2, LLaMA 3 and Qwen, also after a normalizer to NFC.
        """
        pre_tokenizer, normalizer = self.tree["pre_tokenizer"] or {}, self.tree["normalizer"] or {"type": None}
        # because: a token with white space, or one that takes that around it, might lie on both sides of a cut
        keeps_to_words = all(
            token["special"] or not (token["lstrip"] or token["rstrip"] or re.search(r"\s", token["content"]))
            for token in self.tree["added_tokens"]
        )
        if pre_tokenizer.get("type") == "BertPreTokenizer":
            return keeps_to_words and normalizer["type"] in (None, "BertNormalizer")
        has_known_pattern = vocabulary_files.bpe_pattern(pre_tokenizer) is not None
        return keeps_to_words and normalizer["type"] in (None, "NFC") and has_known_pattern

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything that decides ids; equal for all file forms of a tokenizer."""
        text = json.dumps(_parts_that_decide_ids(self.tree), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


_last_loaded: tuple[object, Tokenizer] | None = None  # (identity of the files, tokenizer) of the last load


def tokenizer_files(path: Path) -> list[Path]:
    """Return the files from which `Tokenizer.load` reads the tokenizer at `path`: one, or GPT-2's two. Raise
    MissingInputError if `path` is a folder without a tokenizer.
    """
    path = _find_in_folder(path) if path.is_dir() else path
    return [path, _merges_path(path)] if path.name.endswith("vocab.json") else [path]


def _file_identity(path: Path) -> object:
    """Return the path, size, time stamps and inode of a tokenizer's files, to compare with a later call: a different
    value means that a file changed. Return None if a file cannot be accessed.
    """
    try:
        states = [(str(file.absolute()), os.stat(file)) for file in tokenizer_files(path)]
    except OSError:
        return None
    return [
        (name, state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
        for name, state in states
    ]


def _merges_path(vocab: Path) -> Path:
    """Return the merges.txt beside a vocab.json."""
    return vocab.with_name(vocab.name.removesuffix("vocab.json") + "merges.txt")


def _find_in_folder(folder: Path) -> Path:
    """Return the path of the tokenizer's file in a folder: tokenizer.json, vocab.json or vocab.txt. Raise
    MissingInputError if there is none, DataError if there is only a SentencePiece model.
    """
    for name in ("tokenizer.json", "vocab.json", "vocab.txt"):
        if (folder / name).is_file():
            return folder / name
    if models := sorted(folder.glob("*.model")):
        raise _sentencepiece_error(path=models[0], folder=folder)
    raise MissingInputError(
        f"{folder} holds no tokenizer. Give a folder with tokenizer.json, vocab.json and merges.txt, or vocab.txt."
    )


_NO_NAMES = (
    "Give a tokenizer's file or folder: none is fetched by its name. `hf download NAME --local-dir DIR` fetches that "
    "of a model on Hugging Face's hub, and `lmtrain tokenizer train FILES --vocab-size N --output DIR` makes one."
)


def _sentencepiece_error(path: Path, folder: Path) -> LmtrainError:
    """Return the exception to raise for a SentencePiece model at `path`. Its message explains how to convert the
    tokenizer in `folder`.
    """
    if not path.is_file():
        return MissingInputError(missing_path(path, _NO_NAMES))
    code = f"from transformers import AutoTokenizer as A; A.from_pretrained('{folder}').save_pretrained('new')"
    return DataError(
        f"{path} is a SentencePiece model, which lmtrain cannot read. Give the tokenizer.json that models are "
        "published with. If there is none, `pip install transformers sentencepiece protobuf` and write it with "
        f'`python -c "{code}"`, and give the folder `new`.'
    )


def _read(path: Path) -> bytes:
    """Return the content of a tokenizer's file. Raise MissingInputError if it is missing or unreadable, DataError if it
    is larger than 64 MiB or has too many entries.
    """
    try:
        with open_fd(path) as (fd, size):
            if size > MAX_BYTES:
                raise DataError(f"{path} is larger than {MAX_BYTES >> 20} MiB, so it is no tokenizer. Check the path.")
            data = read_range(fd, 0, size)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingInputError(missing_path(path, _NO_NAMES)) from error
    except OSError as error:
        raise MissingInputError(f"{path} cannot be read ({error.strerror}). Give the file of a tokenizer.") from error
    vocabulary_files.check_num_entries(data, str(path))
    return data


def _parts_that_decide_ids(tokenizer_json: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a parsed tokenizer.json that decide which ids a text gets. Equal tokenizers give equal parts,
    whatever file format they were loaded from.
    """
    model = {key: value for key, value in tokenizer_json["model"].items() if value not in (None, "", False)}
    has_names = isinstance(model["vocab"], dict)  # a Unigram vocabulary is a list of (piece, score)
    byte_level = has_names and (tokenizer_json["pre_tokenizer"] or {}).get("type") == "ByteLevel"
    if byte_level and model["vocab"].keys() >= vocabulary_files.ALPHABET:
        model.pop("unk_token", None)  # because: a vocabulary with every byte has no unknown text
    added = [
        # because: a special token never matches in a text, so only its name and id matter
        {"content": token["content"], "id": token["id"]} if token["special"] else token
        for token in tokenizer_json["added_tokens"]
    ]
    model["vocab"] = dict(model["vocab"]) | {t["content"]: t["id"] for t in added} if byte_level else model["vocab"]
    return {
        "model": model,
        "normalizer": tokenizer_json["normalizer"],
        "pre_tokenizer": _remove_key(tokenizer_json["pre_tokenizer"], "trim_offsets"),
        "added_tokens": sorted(added, key=lambda token: int(token["id"])),
    }


def _remove_key(node: Any, key: str) -> Any:
    """Return a copy of a JSON value in which no object, at any depth, has the key `key`."""
    if isinstance(node, dict):
        return {k: _remove_key(v, key) for k, v in node.items() if k != key}
    return [_remove_key(v, key) for v in node] if isinstance(node, list) else node
