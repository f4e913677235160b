"""Makes a tokenizer and a dataset of text files and folders, once, in a folder of its own: for `data.text` of a run.

Called by `lmtrain pretrain`. The steps are those of `lmtrain tokenizer train` and `lmtrain preprocess`. A record beside
the dataset holds the size and hash of every input file. It is written before the first step and completed after the
last, so that a start after a kill goes on with the finished steps, and a later start refuses a changed text.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from glob import has_magic, iglob
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from data_tools.preprocess.preprocess_pipeline import Options, preprocess
from data_tools.preprocess.tokenizer_of_text_files import train_tokenizer
from data_tools.read.compressed_and_parquet_readers import DamagedArchiveError, open_source, read_rows, read_stream
from data_tools.read.find_input_files import (
    Source,
    TextSplit,
    TextSuffixes,
    find_sources,
    is_glob,
    known_suffix,
    resolve_input,
)
from data_tools.read.parse_chunks_and_bad_lines import (
    ALL_READ,
    COMMAND_LINE,
    OptionNames,
    SourceTexts,
)
from lmtrain.data.store.indexed_dataset import SUFFIXES, IndexedDataset, dataset_file, hash_without, working_folder
from lmtrain.errors import (
    DataError,
    LmtrainError,
    MissingInputError,
    SettingsError,
    UsageError,
    is_refusal,
    join_few,
    way,
)
from lmtrain.runtime.files.atomic_files import (
    folder_lock,
    read_errors,
    read_json,
    remove,
    remove_empty_folders,
    write_json,
)
from lmtrain.runtime.files.similar_path import missing_path, paths_within
from lmtrain.runtime.files.unreadable_files import explain_unreadable
from lmtrain.runtime.processes.fault_injection import fault_point
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.tokenizer.train import check_vocab_size

SMALLEST_VOCAB, LARGEST_VOCAB = 512, 32_768
_SAMPLED_BYTES = 4 << 20  # bytes of a compressed file that are decompressed to estimate its size
_FORMAT = {"format": "lmtrain dataset of a text", "version": 1}
_HASH_KEY = "sha256"  # key of the record's hash over all its other keys


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """A request for a dataset: the texts to make it of, and the options."""

    texts: tuple[str, ...]  # files, folders and globs
    suffixes: TextSuffixes = field(default_factory=TextSuffixes)  # of further files that are plain text
    key: str = "text"  # of .jsonl lines, or the column of .parquet files
    split: TextSplit = "file"
    cuts_sentences: bool = False  # for BERT: WordPiece pieces, and a sequence for each sentence
    tokenizer: Path | None = None  # the tokenizer to use; None: train one
    max_vocab: int | None = None  # the most pieces of a tokenizer that is trained
    exact_vocab: int | None = None  # its number of pieces, independent of the text's length
    workers: int = 1
    names: OptionNames = COMMAND_LINE

    @property
    def has_unknown_file(self) -> bool:
        """True if a text is a file whose suffix does not tell its kind; it is read as plain text."""
        return any(map(self._is_unknown_file, self.texts))

    def _is_unknown_file(self, text: str) -> bool:
        return Path(text).is_file() and not known_suffix(Path(text)) and not text.endswith(self.suffixes.suffixes)

    def find_sources(self) -> list[Source]:
        """Return the Source of each file of the texts, in the order in which they are read. Raise MissingInputError if
        there is no file, UsageError if `max_vocab` is too small for a tokenizer.
        """
        for text in self.texts:
            if parts := paths_within(text):
                new = way(f"data.text=[{','.join(parts)}]", instead_of="data.text")
                raise SettingsError([f"data.text={text} is several paths in one word. Write {new}."])
            if not os.path.exists(text) and os.path.exists(f"{text}.idx"):
                raise SettingsError([
                    f"data.text={text} is a dataset, which holds tokens. Use "
                    f"{way(f'data.path={text}', instead_of='data.text')}."
                ])
            if not os.path.exists(text) and not is_glob(text):
                raise MissingInputError(missing_path(text, "Give the path of a text, or of a folder of texts."))
            if self._is_unknown_file(text) and (is_not_read := explain_unreadable(Path(text))):
                raise UsageError(is_not_read)
        if self.tokenizer is None and self.max_vocab is not None:
            check_vocab_size(self.max_vocab, "wordpiece" if self.cuts_sentences else "bpe", self.names.vocab_size)
        inputs = [
            resolve_input(text, "txt") if self._is_unknown_file(text) else text
            for text in self.texts
        ]
        return find_sources(self.suffixes.resolve(inputs), self.split, self.names.split)

    @cached_property
    def estimated_bytes(self) -> int:
        """About how many bytes of text the files hold, as `estimate_text_bytes` says; they are looked at once."""
        return estimate_text_bytes(self.find_sources(), self.key, self.names.key)

    def vocab_size(self, num_bytes: int) -> int:
        """Return the number of pieces of a tokenizer that is trained on `num_bytes` of text: the largest power of two
        up to the square root of the bytes, but at least 512 and at most 32,768 and `max_vocab`.

        The number of different words in a text grows about as the square root of its length. `exact_vocab` goes first.
        """
        if self.exact_vocab is not None:
            return self.exact_vocab
        by_text = 1 << (max(int(num_bytes**0.5), 1).bit_length() - 1)
        wanted = min(max(by_text, SMALLEST_VOCAB), LARGEST_VOCAB)
        return wanted if self.max_vocab is None else min(wanted, self.max_vocab)

    def identity(self, sources: Sequence[Source]) -> dict[str, Any]:
        """Return a dict, to write as JSON, of what decides the dataset's content besides the tokenizer: the options,
        and the path, size in bytes and SHA-256 of every file.
        """
        root = os.path.commonpath([os.path.abspath(_root_of(text)) for text in self.texts])
        paths = {source: Path(os.path.abspath(source.path)).relative_to(root) for source in sources}
        # because: the files of one text are in order of path, and the records of earlier versions have no other order
        order = {} if list(paths.values()) == sorted(paths.values()) else {"order": list(map(str, paths.values()))}
        return {
            "text_key": self.key, "text_split": self.split, "cuts_sentences": self.cuts_sentences,
            "files": {str(path): [source.num_bytes, _sha256(source.path)] for source, path in paths.items()}, **order,
        }  # fmt: skip


def _root_of(text: str) -> Path:
    """Return the folder to which the names of a text's files are relative: the text itself if it is a folder, else that
    of the file, or the last folder that a glob names without a wildcard.
    """
    path = Path(text)
    if path.is_dir():
        return path
    return Path(*takewhile(lambda part: not has_magic(part), path.parts)) if is_glob(text) else path.parent


@dataclass(frozen=True)
class TextDataset:
    """The result: facts about a dataset made of a text, and how its tokenizer came about."""

    num_files: int
    num_bytes: int  # of the texts, in UTF-8
    num_documents: int
    num_tokens: int
    vocab_size: int
    tokenizer_kind: str
    tokenizer_source: str | None  # path of the tokenizer that was given; None: trained on this text
    tokenizer_seconds: float | None  # time to train it; None if an earlier, killed call has trained it
    seconds: float


class TextChangedError(Exception):
    """Raised if a dataset was made of another text or with other options; the message is a clause that says what
    differs.
    """


Report = Callable[[str, int, int], None]  # receives the step's name, the bytes of the input files done, and the total


def estimate_text_bytes(sources: Sequence[Source], key: str, key_option: str = "--key") -> int:
    """Return about how many bytes the files hold when they are decompressed, from their sizes and, for compressed files
    and tables, from the first 4 MiB of their content. Raise DataError if a table has no column `key`; `key_option` is
    what a user types to name another.
    """
    return sum(_estimate_file(source, key, key_option) for source in sources)


def _estimate_file(source: Source, key: str, key_option: str) -> int:
    """Return the approximate number of bytes of text in a file: the file's size if it is not compressed, else
    extrapolated from the beginning of its decompressed data or, for a .parquet file, of its column `key`.
    """
    if source.kind == "parquet":
        rows = next(read_rows(source.path, (key,), 0, _SAMPLED_BYTES, key_option), None)
        return int(rows[2] / rows[3]) if rows is not None and rows[3] else 0
    if not source.codec:
        return source.num_bytes
    num_bytes = 0
    try:
        with open_source(source) as file:
            for data in read_stream(file, source.codec):
                num_bytes += len(data)
                if num_bytes >= _SAMPLED_BYTES and file.tell() < source.num_bytes:
                    return num_bytes * source.num_bytes // file.tell()
    except DamagedArchiveError:
        pass  # because: reading the text reports the damage, with its place
    return num_bytes


@dataclass(frozen=True)
class TextFolder:
    """The folder in which a tokenizer and a dataset are made of a text: the dataset's prefix, and the file that records
    the text and how far the work is.
    """

    prefix: Path
    record: Path

    @property
    def tokenizer(self) -> Path:
        """The file of a tokenizer that is trained on the text."""
        return self.prefix.with_name("tokenizer.json")

    @property
    def is_complete(self) -> bool:
        """True if an earlier call has completed a dataset, of whatever text."""
        return self._read_record()[1] is not None

    def find(self, request: TextRequest) -> TextDataset | None:
        """Return facts about the dataset that an earlier call of `make` completed, None if there is none. Raise
        TextChangedError if the text or the options have changed since then; a text that no longer exists is no error.
        """
        identity, made = self._read_record()
        present = tuple(text for text in request.texts if os.path.exists(text) or any(iglob(text, recursive=True)))
        if made is None or not present:  # because: a complete dataset does without its text
            return made
        if change := _first_change(identity, request.identity(replace(request, texts=present).find_sources())):
            raise TextChangedError(change)
        return made

    @contextmanager
    def make(
        self, request: TextRequest, report: Report, notify: Callable[[str], None], *, replaces: bool = False
    ) -> Iterator[TextDataset]:
        """Context manager: train a tokenizer on the text, unless the request names one, write the tokenized dataset,
        and yield facts about it. Steps that an earlier, killed call finished for the same text and options are not
        repeated. Wait while another process makes the same dataset. If the text, or the body, is refused, remove what
        was made; until the body ends, other processes wait.

        `report` receives the progress, `notify` notices for the user. With `replaces`, a dataset of another text is
        replaced, else TextChangedError is raised.
        """
        sources = request.find_sources()
        identity, folder = request.identity(sources), self.prefix.parent

        def notify_wait(holder: str) -> None:
            notify(f"waiting for {holder}, which makes the dataset in {folder}")

        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        with folder_lock(folder, on_wait=notify_wait):
            try:
                made = self.find(request)
            except TextChangedError:
                if not replaces:
                    raise
                made = None
            if made is None:
                try:
                    yield self._make_steps(request, sources, identity, report, notify)
                except Exception as error:
                    if is_refusal(error):  # because: after another error the same command goes on
                        self._clear()
                        remove_empty_folders(missing)
                    raise
                return
        yield made

    def _make_steps(
        self, request: TextRequest, sources: Sequence[Source], identity: dict[str, Any], report: Report,
        notify: Callable[[str], None],
    ) -> TextDataset:  # fmt: skip
        """Do the steps of `make` that no earlier call has finished, and return facts about the dataset. The caller must
        hold the lock on the folder. If `identity`, that of the text, differs from the recorded one, all steps are done
        again.
        """
        began = time.perf_counter()
        if self._read_record()[0] != identity:
            self._clear()
            self._write_record(identity, None)
        fault_point("text.tokenizer")
        was_trained = self.tokenizer.is_file()
        tokenizer = self._provide_tokenizer(request, sources, report)
        tokenizer_seconds = None if was_trained else time.perf_counter() - began
        fault_point("text.dataset")
        if not self._has_dataset(tokenizer):
            options = Options(
                workers=request.workers, keys=(request.key,), split_sentences=request.cuts_sentences, overwrite=True,
                text_split=request.split, names=request.names,
            )  # fmt: skip
            preprocess(
                sources, tokenizer, self.prefix, options, notify=notify,
                report=lambda at: report("tokenized", at.done_bytes, at.total_bytes),
            )  # fmt: skip
        if request.find_sources() != sources:
            raise DataError(
                f"{join_few(request.texts)} has changed while it was read. Run the same command again."
            )
        fault_point("text.record")
        info = IndexedDataset.open(self.prefix).info
        assert info is not None, "preprocess writes a sidecar"
        made = TextDataset(
            num_files=len(sources), num_bytes=info.num_bytes, num_documents=info.num_documents,
            num_tokens=info.num_tokens, vocab_size=tokenizer.vocab_size, tokenizer_kind=tokenizer.kind,
            tokenizer_source=None if request.tokenizer is None else str(request.tokenizer),
            tokenizer_seconds=tokenizer_seconds, seconds=time.perf_counter() - began,
        )  # fmt: skip
        self._write_record(identity, made)
        return made

    def _provide_tokenizer(self, request: TextRequest, sources: Sequence[Source], report: Report) -> Tokenizer:
        """Return the tokenizer that the request names, if any. Otherwise return the one that an earlier call saved in
        the folder or, if there is none or it has more than `max_vocab` pieces, train one on the sources and save it
        there.
        """
        if request.tokenizer is not None:
            return Tokenizer.load(request.tokenizer)
        if self.tokenizer.is_file():
            earlier = Tokenizer.load(self.tokenizer)
            if earlier.vocab_size <= (request.max_vocab or earlier.vocab_size):
                return earlier
        size = request.vocab_size(request.estimated_bytes)
        total = sum(source.num_bytes for source in sources)

        def show(done: int) -> None:
            report(f"learning {size:,} pieces" if done == ALL_READ else "read", max(done, 0), total)

        kind: Literal["bpe", "wordpiece"] = "wordpiece" if request.cuts_sentences else "bpe"
        tokenizer = train_tokenizer(sources, request.key, kind, size, None, False, show, request.names)
        tokenizer.save(self.tokenizer)
        return tokenizer

    def _has_dataset(self, tokenizer: Tokenizer) -> bool:
        """Return True if there is a complete dataset at the prefix and it was made with this tokenizer."""
        try:
            info = IndexedDataset.open(self.prefix).info
        except (LmtrainError, OSError):
            return False
        return info is not None and info.tokenizer_fingerprint == tokenizer.fingerprint

    def _read_record(self) -> tuple[dict[str, Any], TextDataset | None]:
        """Return (identity of the text, facts about the dataset) from the record file of earlier calls; the facts are
        None if the dataset is not complete. Return ({}, None) if the record is missing or damaged.
        """
        try:
            tree = read_json(self.record)
            is_intact = tree[_HASH_KEY] == hash_without(tree, _HASH_KEY) and tree.items() >= _FORMAT.items()
            identity: dict[str, Any] = tree["identity"] if is_intact else {}
            made = TextDataset(**tree["dataset"]) if is_intact and tree["dataset"] else None
        except (LmtrainError, OSError, AttributeError, LookupError, TypeError):
            return {}, None
        return identity, made if dataset_file(self.prefix, ".idx").is_file() else None

    def _write_record(self, identity: dict[str, Any], made: TextDataset | None) -> None:
        """Write the record of the text and, once it is complete, of the dataset."""
        tree = _FORMAT | {"identity": identity, "dataset": None if made is None else asdict(made)}
        write_json(self.record, tree | {_HASH_KEY: hash_without(tree, _HASH_KEY)})

    def _clear(self) -> None:
        """Delete the record, tokenizer and dataset of earlier calls. The record and the .idx, which mark the dataset as
        complete, are deleted first.
        """
        for path in (self.record, dataset_file(self.prefix, ".idx"), self.tokenizer):
            remove(path)
        for suffix in SUFFIXES:
            remove(dataset_file(self.prefix, suffix))
        shutil.rmtree(working_folder(self.prefix), ignore_errors=True)


def write_sample(request: TextRequest, folder: Path, num_bytes: int) -> TextRequest:
    """Write the beginning of the text, `num_bytes` characters long, to the file sample.jsonl in `folder`. Return a copy
    of the request for this file, with the vocabulary size that a tokenizer trained on the whole text would have.
    """
    sources, left, path = request.find_sources(), num_bytes, folder / "sample.jsonl"
    size = request.vocab_size(request.estimated_bytes)
    with open(path, "w", encoding="utf-8") as file:
        for text in SourceTexts(sources, request.key, names=request.names):
            file.write(json.dumps({"text": text[:left]}) + "\n")
            left -= len(text)
            if left <= 0:
                break
    return replace(
        request, texts=(str(path),), suffixes=TextSuffixes(), key="text", split="file", exact_vocab=size
    )


def _first_change(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    """Return a clause that says what first differs between two results of `TextRequest.identity`: an option, or a file
    that is new, missing or changed. Return None if they are equal.
    """
    for name, value in new.items():
        if name not in ("files", "order") and value != old.get(name):
            return f"{name} was {old.get(name)} then and is {value} now"
    was, now = old.get("files", {}), new["files"]
    for name in sorted({*was, *now}):
        if name not in now:
            return f"{name} is no longer there"
        if name not in was:
            return f"{name} was not there then"
        if was[name] != now[name]:
            sizes = f", from {was[name][0]:,} to {now[name][0]:,} bytes" if was[name][0] != now[name][0] else ""
            return f"{name} has changed since{sizes}"
    return None if old.get("order") == new.get("order") else "its files were in another order then"


def _sha256(path: Path) -> str:
    with read_errors(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
