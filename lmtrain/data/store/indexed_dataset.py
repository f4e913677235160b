"""Megatron's .bin/.idx token files, byte-compatible, and the sidecar that records their origin: format and reader.

Called by samples and by `lmtrain inspect` (IndexedDataset); dataset_writer.py writes datasets. Torch-free. A dataset is
a prefix P:

    P.bin             token ids, little endian, nothing between them
    P.idx             34 bytes of header, then lengths (int32), pointers (int64 bytes), document index (int64)
    P.json            the sidecar: counts, checksum, fingerprint of the tokenizer; absent from foreign datasets
    P.blocks          checksums of the blocks of P.bin, compared as they are first read; only with a sidecar
    P.tokenizer.json  the tokenizer itself

P.idx is renamed into place last, so a dataset without P.idx is unfinished. Opening takes the same time for any size;
`check_index` checks every entry of the index, `merge_split_verify_datasets.verify` every byte.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.data.store.block_checksums import ChecksumRecord, MappedFile, MappedFiles, TokenBlocks, read_block_file
from lmtrain.errors import DataError, MissingInputError, join_few, way
from lmtrain.runtime.files import atomic_files
from lmtrain.runtime.files.crc32c import crc32c
from lmtrain.runtime.files.similar_path import similar_path
from lmtrain.runtime.files.unreadable_files import explain_unreadable

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, number of sequences, length of the document index
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}  # 6 and 7 are float dtypes
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
SUFFIXES = (".bin", ".idx", ".json", ".tokenizer.json", ".blocks")
CHUNK = 1 << 20  # entries checked or written at once
_HASH_KEY = "sidecar_sha256"
_NUM_PAGES, _PAGE_BYTES = 64, 4096  # pages of a .bin without a sidecar that its digest covers

Ints = NDArray[Any]


def dataset_file(prefix: Path, suffix: str) -> Path:
    """Return the dataset's file with this suffix; the prefix itself may contain dots."""
    return prefix.parent / (prefix.name + suffix)  # because: `with_name` raises ValueError if the prefix is "." or "/"


def working_folder(prefix: Path) -> Path:
    """Return the folder where a dataset grows: beside its prefix, so that a rename moves the files."""
    return prefix.with_name(f".{prefix.name}.tmp")


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """Content of the sidecar. `content_sha256` covers the bytes of P.bin followed by those of P.idx."""

    tokenizer_fingerprint: str
    vocab_size: int
    eod_id: int | None
    max_id: int
    num_documents: int
    num_tokens: int
    num_bytes: int  # UTF-8 bytes of the source texts
    dtype: str
    content_sha256: str
    blocks_sha256: str | None = None  # hash of P.blocks; None in older sidecars
    tokenizer_sha256: str | None = None  # hash of P.tokenizer.json; None in older sidecars
    made_from: str | None = None  # text of existing_output.made_from; None if it is not known
    sidecar_sha256: str | None = None  # hash of all other keys; None in older sidecars
    format: str = "lmtrain dataset"
    version: int = 1

    def with_hash(self) -> DatasetInfo:
        """Return a copy with `sidecar_sha256`, the hash of all other fields."""
        return replace(self, sidecar_sha256=hash_without(asdict(self)))

    def to_bytes(self) -> bytes:
        """Return the content of P.json."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    @classmethod
    def read(cls, path: Path) -> DatasetInfo:
        """Read the .json sidecar of a dataset, which describes it. Raise DataError if it is damaged or of an unknown
        version.
        """
        tree = atomic_files.read_json(path)
        if not isinstance(tree, dict) or tree.get("format") != cls.format:
            raise DataError(f"{path} does not describe a dataset of lmtrain. Move it away if another tool wrote it.")
        if tree.get("version") != cls.version:
            raise DataError(f"{path} has version={tree.get('version')!r}; this lmtrain reads only 1. Upgrade lmtrain.")
        for field in fields(cls):
            kinds: tuple[type, ...] = (int,) if str(field.type).startswith("int") else (str,)
            value = tree.get(field.name)
            nullable = str(field.type).endswith("None") and value is None
            if not nullable and (type(value) not in kinds or (isinstance(value, int) and not -1 <= value < 2**63)):
                type_text = "a whole number" if kinds == (int,) else "a text"
                raise DataError(f"{path}: {field.name}={value!r} is not {type_text}. Restore the damaged file.")
        _check_hash(path, tree)
        values: dict[str, Any] = {field.name: tree.get(field.name) for field in fields(cls)}
        info = cls(**values)
        for name, value in (("max_id", info.max_id), ("eod_id", info.eod_id)):
            if value is not None and value >= info.vocab_size:
                raise DataError(
                    f"{path} is damaged: {name}={value} is outside vocab_size={info.vocab_size}. Restore it, or make "
                    "the dataset again."
                )
        return info


def content_digest_of_pages(index_crc: int, num_bytes: int, read: Callable[[int, int], bytes]) -> str:
    """Return a digest of the whole .idx, by its CRC-32C, and of pages sampled from a .bin of `num_bytes` bytes.
    `read(start, count)` returns bytes of the .bin.
    """
    digest = hashlib.sha256(f"{index_crc} {num_bytes}".encode())
    for i in range(_NUM_PAGES + 1):
        digest.update(read(max(num_bytes - _PAGE_BYTES, 0) * i // _NUM_PAGES, _PAGE_BYTES))
    return digest.hexdigest()


def hash_without(tree: dict[str, Any], hash_key: str = _HASH_KEY) -> str:
    """Return the SHA-256 of all keys except `hash_key`: of their JSON with sorted keys and without spaces."""
    rest = {key: value for key, value in tree.items() if key != hash_key}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _check_hash(path: Path, tree: dict[str, Any]) -> None:
    """Raise DataError if the .json sidecar of a dataset does not have the hash that its key `sidecar_sha256` states.
    `tree` is its JSON object and `path` its file, for the message.

    A sidecar without a hash is accepted only if it is an old one: all old keys and no newer ones.
    """
    # because: a sidecar must not pass as an old one when a letter in the name of its hash key is damaged
    new_keys = {"blocks_sha256", "tokenizer_sha256", "made_from", _HASH_KEY}
    old_keys = {field.name for field in fields(DatasetInfo)} - new_keys
    stored, newer_keys = tree.get(_HASH_KEY), sorted(set(tree) - old_keys)
    if stored is None and not newer_keys:
        if missing := sorted(old_keys - set(tree)):
            raise DataError(
                f"{path} is damaged: it has no key {missing[0]}. Restore it, or make the dataset again."
            )
    elif stored != hash_without(tree):
        cause = "it has no hash of itself" if stored is None else "it does not match its own hash"
        raise DataError(f"{path} is damaged: {cause}. Restore it, or make the dataset again.")


class IndexedDataset:
    """A dataset opened for reading: memory maps of its .bin and .idx, checked to agree with each other.

    Callers that read `tokens` or the index arrays must call `check` before they use the values.
    """

    def __init__(
        self, prefix: Path, index: MappedFile, tokens: MappedFile, dtype: np.dtype[Any], num_sequences: int,
        num_bounds: int,
    ) -> None:  # fmt: skip
        """Set up the views of the mapped files. `num_bounds`: length of the document index. Callers use `open`."""
        self.prefix, self.dtype, self.num_sequences = prefix, dtype, num_sequences
        self.tokens: Ints = tokens.bytes.view(dtype)
        self.token_bytes, self._index, self._files = tokens, index, MappedFiles((tokens, index))
        start = HEADER.size
        # because: the format does not align its arrays, which np.frombuffer accepts
        self.lengths: Ints = np.frombuffer(index.bytes, "<i4", num_sequences, start)
        self.pointers: Ints = np.frombuffer(index.bytes, "<i8", num_sequences, start + 4 * num_sequences)
        self.document_index: Ints = np.frombuffer(index.bytes, "<i8", num_bounds, start + 12 * num_sequences)
        self.info: DatasetInfo | None = None

    @classmethod
    def open(cls, prefix: Path | str) -> IndexedDataset:
        """Open the dataset whose files are PREFIX.bin, PREFIX.idx and, optionally, PREFIX.json; `prefix` may end in
        .bin or .idx. Raise MissingInputError if the .bin or .idx is missing, DataError if the files disagree or are
        damaged.
        """
        prefix = Path(prefix)
        if prefix.suffix in (".bin", ".idx"):
            prefix = prefix.with_suffix("")
        idx_path, bin_path = dataset_file(prefix, ".idx"), dataset_file(prefix, ".bin")
        num_idx_bytes, num_bin_bytes = _file_size(idx_path, bin_path), _file_size(bin_path, idx_path)
        dtype, num, num_bounds = _read_header(idx_path, num_idx_bytes)
        index = MappedFile(idx_path, num_idx_bytes)
        if num_bin_bytes % dtype.itemsize:
            raise DataError(
                f"{bin_path} has {num_bin_bytes} bytes, no whole number of {dtype} ids. It was truncated: restore it."
            )
        dataset = cls(prefix, index, MappedFile(bin_path, num_bin_bytes), dtype, num, num_bounds)
        dataset._check_ends(idx_path, bin_path, num_bin_bytes)
        if dataset_file(prefix, ".json").exists():
            dataset.info = dataset._read_info(dataset_file(prefix, ".json"))
        return dataset

    @property
    def shards(self) -> tuple[IndexedDataset, ...]:
        """The datasets whose files are read: this one, or those that are read as one."""
        return (self,)

    @property
    def num_documents(self) -> int:
        return len(self.document_index) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @cached_property
    def index_crc(self) -> int:
        """CRC-32C of the whole .idx."""
        crc = crc32c(self._index.bytes)
        self._index.check_intact()
        return crc

    @cached_property
    def content_digest(self) -> str:
        """A hex digest of the content: the SHA-256 in the sidecar or, without a sidecar, a digest of the whole .idx and
        of pages sampled from the .bin.
        """
        if self.info is not None:
            return self.info.content_sha256
        path = dataset_file(self.prefix, ".bin")
        with atomic_files.read_errors(path), open(path, "rb") as file:
            fd = file.fileno()
            return content_digest_of_pages(
                self.index_crc, os.fstat(fd).st_size, lambda start, count: os.pread(fd, count, start)
            )

    @property
    def tokenizer_path(self) -> Path:
        """The path of the dataset's own tokenizer; the file may not exist."""
        return dataset_file(self.shards[0].prefix, ".tokenizer.json")

    @property
    def idx_mtime_ns(self) -> int:
        """The modification time of the .idx in nanoseconds."""
        return os.stat(dataset_file(self.prefix, ".idx")).st_mtime_ns

    def index_bytes(self) -> Iterator[memoryview]:
        """Yield the content of the .idx."""
        yield self._index.bytes.data
        self._index.check_intact()

    def gather(self, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> tuple[Ints, NDArray[np.int64]]:
        """Return (an array of token ids, where the given ranges begin in it). Range i is sizes[i] tokens from token
        starts[i] on; if `sizes` has one entry, all ranges have that size. The array is all tokens, or a copy of those
        of the ranges alone. Callers must `check` the ranges.
        """
        return self.tokens, starts

    @cached_property
    def blocks(self) -> TokenBlocks | None:
        """Block checksums that tokens are compared with when they are read: from the dataset's .blocks file, or set by
        `set_verification`. None if tokens are not compared.
        """
        if self.info is None or self.info.blocks_sha256 is None:
            return None
        sums, index_crc = read_block_file(
            dataset_file(self.prefix, ".blocks"), self.info.blocks_sha256, self.token_bytes.num_bytes
        )
        if index_crc != self.index_crc:
            raise DataError(
                f"{dataset_file(self.prefix, '.idx')} is not the file that was written (CRC-32C {self.index_crc:08x} "
                f"instead of {index_crc:08x}). Restore the file or make the dataset again."
            )
        return TokenBlocks.from_sums(self.token_bytes, self.dtype.itemsize, sums)

    def set_verification(self, verify: str, record: Path, notify: Callable[[str], None]) -> None:
        """Choose whether tokens are compared with block checksums when they are read: yes if `verify` is "read" or
        "full", no if it is "none". For a dataset without a .blocks file, the checksum of a block is computed at its
        first read and stored in the file `record`, for later reads and runs.

        `notify` receives warnings about damage of that file. Raise DataError if the .idx differs from the one that was
        recorded.
        """
        if verify == "none":
            self.blocks = None
        elif self.blocks is None:
            checksums = ChecksumRecord(record, notify)
            self.blocks = TokenBlocks.from_record(self.token_bytes, self.dtype.itemsize, checksums)
            if not checksums.matches_index(len(self.blocks.sums), self.index_crc):
                raise DataError(
                    f"{dataset_file(self.prefix, '.idx')} has changed since it was first read. Restore the file, "
                    f"or remove {record} if you replaced it yourself."
                )

    def check(
        self, starts: NDArray[np.int64], sizes: NDArray[np.int64], stride: int = 1, first: int = 0
    ) -> None:
        """Raise DataError if any of these token ranges fails its block checksums, or if a file of the dataset was
        truncated. Range i is sizes[i] tokens from token first + starts[i] * stride on.
        """
        if self.blocks is not None:
            self.blocks.check(starts, sizes, stride, first)  # also checks that the files were not truncated
        else:
            self._files.check_intact()

    def check_intact(self) -> None:
        """Raise DataError if the .bin or the .idx was truncated or became unreadable."""
        self._files.check_intact()

    def check_all(self, part: int = 0, num_parts: int = 1) -> None:
        """Check the whole .idx and all token blocks; with `num_parts`, only the blocks of part number `part` (from 0)
        of that many equal parts. Raise DataError at damage.
        """
        if self.blocks is not None:
            self.blocks.check_all(part, num_parts)
        self.check_index()
        self.check_intact()

    def read(self, start: int, stop: int) -> Ints:
        """Return a copy of the tokens start to stop - 1. Raise DataError if they do not match their checksums."""
        tokens = self.tokens[start:stop].copy()
        self.check(np.array([start]), np.array([len(tokens)]))
        return tokens

    def document(self, d: int) -> Ints:
        """Return a checked copy of the tokens of document d."""
        return self.read(*self.document_range(d))

    def count_tokens(self, sequences: range) -> int:
        """Return the number of tokens in a range of sequences."""
        bounds = np.array([sequences.start, sequences.stop])
        first, last = sequence_starts(self.pointers, self.dtype.itemsize, self.num_tokens, bounds).tolist()
        return int(last - first)

    def document_range(self, d: int) -> tuple[int, int]:
        """Return (first token, one past the last token) of document d; (0, 0) if it has no sequence."""
        first, last = int(self.document_index[d]), int(self.document_index[d + 1])
        if first == last:
            return 0, 0
        start = int(self.pointers[first]) // self.dtype.itemsize
        return start, start + int(self.lengths[first:last].sum())

    def check_index(self) -> None:
        """Raise DataError unless the lengths, pointers and document index of the .idx agree with each other in every
        entry.
        """
        path, base, expected = dataset_file(self.prefix, ".idx"), HEADER.size, 0
        at_pointers, at_documents = base + 4 * self.num_sequences, base + 12 * self.num_sequences
        for first in range(0, self.num_sequences, CHUNK):
            lengths = self.lengths[first : first + CHUNK].astype(np.int64)
            _raise_at_first(lengths < 0, path, base + 4 * first, 4, "a negative length")
            ends = expected + np.cumsum(lengths) * self.dtype.itemsize
            wrong = self.pointers[first : first + CHUNK] != np.append(np.int64(expected), ends[:-1])
            _raise_at_first(wrong, path, at_pointers + 8 * first, 8, "a pointer that disagrees with the lengths")
            expected = int(ends[-1])
        for first in range(0, self.num_documents, CHUNK):
            step = np.diff(self.document_index[first : first + CHUNK + 1])
            _raise_at_first(step < 0, path, at_documents + 8 * (first + 1), 8, "a document that ends before it starts")

    def _check_ends(self, idx_path: Path, bin_path: Path, num_bin_bytes: int) -> None:
        """Raise DataError if the first and last entries of the .idx's arrays do not agree with each other and with the
        size of the .bin. The entries between them are not read.
        """
        num = self.num_sequences
        at_documents = HEADER.size + 12 * num
        if self.document_index[0] != 0 or self.document_index[-1] != num:
            ends = f"{self.document_index[0]} to {self.document_index[-1]}"
            raise _damage_error(idx_path, at_documents, f"the document index goes from {ends}, not from 0 to {num}")
        if num and self.pointers[0] != 0:
            raise _damage_error(idx_path, HEADER.size + 4 * num, f"the first sequence is at {self.pointers[0]}, not 0")
        num_described = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if num else 0
        if num_described != num_bin_bytes:
            raise DataError(
                f"{bin_path} has {num_bin_bytes} bytes; it should have {num_described} according to {idx_path} (offset "
                f"{at_documents - 8}). One of them is truncated or belongs to another dataset."
            )

    def _read_info(self, path: Path) -> DatasetInfo:
        """Read the dataset's .json sidecar at `path`. Raise DataError if its counts or dtype are not those of the .idx.
        """
        info = DatasetInfo.read(path)
        for name, stated, actual in (
            ("num_documents", info.num_documents, self.num_documents),
            ("num_tokens", info.num_tokens, self.num_tokens),
            ("dtype", info.dtype, self.dtype.name),
        ):
            if stated != actual:
                raise DataError(
                    f"{path} states {name}={stated}, but the .idx has {actual}. One of the two is of another dataset."
                )
        return info


def sequence_starts(
    pointers: NDArray[Any], itemsize: int, num_tokens: int, sequences: NDArray[Any]
) -> NDArray[np.int64]:
    """Return, for each of these sequence numbers, the position of its first token in the dataset. `pointers` are those
    of the .idx, in bytes; for numbers beyond the last sequence the result is `num_tokens`.
    """
    starts = np.full(len(sequences), num_tokens)
    inside = np.flatnonzero(sequences < len(pointers))
    starts[inside] = pointers[sequences[inside]] // itemsize
    return starts


def _file_size(path: Path, companion: Path) -> int:
    """Return the size in bytes of a dataset's .bin or .idx. Raise MissingInputError if the file is missing; `companion`
    is the other of the two files, for the message.
    """
    try:
        return path.stat().st_size
    except OSError as error:
        if companion.exists():
            prefix = companion.with_suffix("")
            others = (working_folder(prefix), *(dataset_file(prefix, suffix) for suffix in SUFFIXES[2:]))
            is_bare = companion.suffix == ".bin" and not any(map(os.path.lexists, others))
            bare = explain_unreadable(companion) if is_bare else ""
            raise MissingInputError(bare or f"{path} is missing beside {companion}. Make the dataset again.") from error
        raise MissingInputError(f"{path} does not exist. {_suggest_dataset(path.with_name(path.stem))}") from error


def _suggest_dataset(prefix: Path) -> str:
    """Return a hint for a prefix that names no dataset: the command that preprocesses it if it is a file, else a
    dataset in its folder with a similar name, else what a prefix is.
    """
    if prefix.is_file():
        if is_not_read := explain_unreadable(prefix):
            return is_not_read
        output = prefix.with_name(prefix.name.partition(".")[0] or "NAME")
        return (
            "To make a dataset of this file, type "
            f"`lmtrain preprocess {prefix} --tokenizer TOKENIZER --output {output}`; then give {output}. "
            "A BERT model needs --split-sentences as well."
        )
    folder = prefix if prefix.is_dir() else prefix.parent
    similar = similar_path(prefix, lambda path: dataset_file(path, ".idx").exists())
    named = [str(similar)] if similar is not None else []
    if folder == prefix:
        named = named or sorted(str(path.with_name(path.stem)) for path in folder.glob("*.idx"))
    if named:
        return f"Did you mean {join_few(way(name, instead_of=str(prefix)) for name in named)}?"
    return "Give a dataset's path without .bin or .idx."


def _read_header(path: Path, num_bytes: int) -> tuple[np.dtype[Any], int, int]:
    """Return (dtype, number of sequences, length of the document index) from the header of an .idx of num_bytes bytes.
    Raise DataError if it is damaged.
    """
    with atomic_files.read_errors(path), atomic_files.open_fd(path) as (fd, _):
        header = atomic_files.read_range(fd, 0, HEADER.size)
    if len(header) < HEADER.size:
        raise DataError(
            f"{path} has {num_bytes} bytes, fewer than the {HEADER.size} of its header. It was truncated: restore it."
        )
    magic, version, code, num_sequences, num_bounds = HEADER.unpack(header)
    if magic != MAGIC:
        raise _damage_error(path, 0, "the file does not begin with MMIDIDX")
    if version != 1:
        raise _damage_error(path, 9, f"the file has version {version}; lmtrain reads only version 1")
    if code not in DTYPES:
        raise _damage_error(path, 17, f"the dtype code {code} stands for no type of whole numbers")
    num_expected = HEADER.size + 12 * num_sequences + 8 * num_bounds
    if num_bounds < 1 or num_bytes != num_expected:
        hint = " (a multimodal dataset?)" if num_bytes == num_expected + num_sequences > num_expected else ""
        contents = f"{num_sequences} sequences and {num_bounds} document bounds"
        raise _damage_error(path, 18, f"{contents} need {num_expected} bytes, but the file has {num_bytes}{hint}")
    return np.dtype(DTYPES[code]), num_sequences, num_bounds


def _raise_at_first(bad: NDArray[np.bool_], path: Path, base: int, width: int, problem: str) -> None:
    """Raise DataError with the file offset of the first bad entry, if any; entry i is at base + i * width."""
    if bad.any():
        raise _damage_error(path, base + width * int(np.argmax(bad)), problem)


def _damage_error(path: Path, offset: int, problem: str) -> DataError:
    return DataError(f"{path}, offset {offset}: {problem}. The file is damaged or is not a .idx of Megatron-LM.")
