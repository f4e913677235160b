"""Megatron's .bin/.idx token files, byte for byte, with a sidecar that says where they come from. Torch-free.

Called by preprocessing (DatasetWriter), by samples and by `lmtrain inspect` (IndexedDataset). A dataset is a prefix P:

    P.bin             token ids, little endian, nothing between them
    P.idx             34 bytes of header, then lengths (int32), pointers (int64 bytes), document index (int64)
    P.json            the sidecar: counts, checksum, fingerprint of the tokenizer; absent from foreign datasets
    P.tokenizer.json  the tokenizer itself

P.idx is renamed into place last, so a dataset without it was never finished. Opening costs the same for any size;
`check_index` looks at every entry of the index and `verify` at every byte.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.errors import DataError, MissingInputError, OutputError
from lmtrain.runtime import files

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, number of sequences, length of the document index
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}  # 6 and 7 are floats: no tokens
_CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
SUFFIXES = (".bin", ".idx", ".json", ".tokenizer.json")
_CHUNK = 1 << 20  # entries looked at or written at once

Ints = NDArray[Any]


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)  # because: Megatron's own threshold


def part(prefix: Path, suffix: str) -> Path:
    """The file of a dataset with this suffix; a prefix may itself hold dots."""
    return prefix.with_name(prefix.name + suffix)


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """The sidecar. `content_sha256` covers the bytes of P.bin followed by those of P.idx."""

    tokenizer_fingerprint: str
    vocab_size: int
    eod_id: int | None
    max_id: int
    num_documents: int
    num_tokens: int
    num_bytes: int  # UTF-8 bytes of the source texts
    dtype: str
    content_sha256: str
    format: str = "lmtrain dataset"
    version: int = 1

    @classmethod
    def read(cls, path: Path) -> DatasetInfo:
        tree = files.read_json(path)
        if not isinstance(tree, dict) or tree.get("format") != cls.format:
            raise DataError(f"{path} is not a sidecar of a dataset. Move it away if P.bin and P.idx are not ours.")
        if tree.get("version") != cls.version:
            raise DataError(f"{path} has version={tree.get('version')!r}; this lmtrain reads 1. Upgrade lmtrain.")
        for field in dataclasses.fields(cls):
            kinds: tuple[type, ...] = (int,) if str(field.type).startswith("int") else (str,)
            value = tree.get(field.name)
            nullable = field.name == "eod_id" and value is None
            if not nullable and (type(value) not in kinds or (isinstance(value, int) and value < -1)):
                raise DataError(f"{path}: {field.name}={value!r} is not {kinds[0].__name__}. The sidecar is damaged.")
        return cls(**{field.name: tree[field.name] for field in dataclasses.fields(cls)})


class IndexedDataset:
    """A dataset opened for reading: memory maps of its two files, checked to agree with each other."""

    def __init__(self, prefix: Path, index: Ints, tokens: Ints, num: int, num_bounds: int) -> None:
        self.prefix, self.dtype, self.tokens, self.num_sequences = prefix, tokens.dtype, tokens, num
        self._index = index  # the bytes of P.idx; the views below are unaligned, as the format is
        start = HEADER.size
        self.lengths: Ints = np.frombuffer(index, "<i4", num, start)
        self.pointers: Ints = np.frombuffer(index, "<i8", num, start + 4 * num)
        self.document_index: Ints = np.frombuffer(index, "<i8", num_bounds, start + 12 * num)
        self.info: DatasetInfo | None = None

    @classmethod
    def open(cls, prefix: Path | str) -> IndexedDataset:
        prefix = Path(prefix)
        if prefix.suffix in (".bin", ".idx"):
            prefix = prefix.with_suffix("")
        idx_path, bin_path = part(prefix, ".idx"), part(prefix, ".bin")
        num_idx_bytes, num_bin_bytes = _size(idx_path, bin_path), _size(bin_path, idx_path)
        dtype, num, num_bounds = _read_header(idx_path, num_idx_bytes)
        index = _map(idx_path, np.dtype(np.uint8), num_idx_bytes)
        if num_bin_bytes % dtype.itemsize:
            raise DataError(f"{bin_path} has {num_bin_bytes} bytes, no whole number of {dtype} ids. It is cut short.")
        tokens = _map(bin_path, dtype, num_bin_bytes // dtype.itemsize)
        dataset = cls(prefix, index, tokens, num, num_bounds)
        dataset._check_ends(idx_path, bin_path, num_bin_bytes)
        if part(prefix, ".json").exists():
            dataset.info = dataset._checked_info(part(prefix, ".json"))
        return dataset

    @property
    def num_documents(self) -> int:
        return len(self.document_index) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def sequence(self, i: int) -> Ints:
        start = int(self.pointers[i]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[i])]

    def document(self, d: int) -> Ints:
        first, last = int(self.document_index[d]), int(self.document_index[d + 1])
        if first == last:
            return self.tokens[:0]
        return self.tokens[int(self.pointers[first]) // self.dtype.itemsize :][: int(self.lengths[first:last].sum())]

    def document_starts(self) -> NDArray[np.int64]:
        """Where each document begins in `tokens`, and where the last one ends; every index entry is checked first."""
        self.check_index()
        starts = np.append(self.pointers // self.dtype.itemsize, self.num_tokens)
        return starts[self.document_index].astype(np.int64, copy=False)

    def check_index(self) -> None:
        """Lengths, pointers and document index agree with each other, entry by entry."""
        path, base, expected = part(self.prefix, ".idx"), HEADER.size, 0
        at_pointers, at_documents = base + 4 * self.num_sequences, base + 12 * self.num_sequences
        for first in range(0, self.num_sequences, _CHUNK):
            lengths = self.lengths[first : first + _CHUNK].astype(np.int64)
            _refuse_any(lengths < 0, path, base + 4 * first, 4, "a negative length")
            ends = expected + np.cumsum(lengths) * self.dtype.itemsize
            starts = np.append(np.int64(expected), ends[:-1])
            wrong = self.pointers[first : first + _CHUNK] != starts
            _refuse_any(wrong, path, at_pointers + 8 * first, 8, "a pointer that disagrees with the lengths")
            expected = int(ends[-1])
        for first in range(0, self.num_documents, _CHUNK):
            step = np.diff(self.document_index[first : first + _CHUNK + 1])
            _refuse_any(step < 0, path, at_documents + 8 * (first + 1), 8, "a document that ends before it starts")

    def verify(self) -> None:
        """Every byte: the index, the ids against the vocabulary, the checksum. Reads the whole dataset."""
        self.check_index()
        bin_path = part(self.prefix, ".bin")
        limit = self.info.vocab_size if self.info else None
        digest = hashlib.sha256()
        for first in range(0, self.num_tokens, _CHUNK):
            tokens = self.tokens[first : first + _CHUNK]
            digest.update(tokens.data.cast("B"))
            bad = (tokens < 0) if limit is None else (tokens < 0) | (tokens >= limit)
            _refuse_any(bad, bin_path, first * self.dtype.itemsize, self.dtype.itemsize, "an id outside the vocabulary")
        digest.update(self._index.data)
        if self.info and digest.hexdigest() != self.info.content_sha256:
            raise DataError(f"{bin_path} or its .idx has not the checksum in its sidecar. Make the dataset again.")

    def _check_ends(self, idx_path: Path, bin_path: Path, num_bin_bytes: int) -> None:
        """What can be judged without reading the arrays: their first and last entries."""
        num = self.num_sequences
        at_documents = HEADER.size + 12 * num
        if self.document_index[0] != 0 or self.document_index[-1] != num:
            ends = f"{self.document_index[0]} to {self.document_index[-1]}"
            raise _damaged(idx_path, at_documents, f"the document index runs from {ends}, not from 0 to {num}")
        if num and self.pointers[0] != 0:
            raise _damaged(idx_path, HEADER.size + 4 * num, f"the first pointer is {self.pointers[0]}, not 0")
        needed = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if num else 0
        if needed != num_bin_bytes:
            raise DataError(
                f"{bin_path} has {num_bin_bytes} bytes and {idx_path} (offset {at_documents - 8}) speaks of {needed}. "
                "One of them is cut short or of another dataset."
            )

    def _checked_info(self, path: Path) -> DatasetInfo:
        info = DatasetInfo.read(path)
        for what, said, found in (
            ("num_documents", info.num_documents, self.num_documents),
            ("num_tokens", info.num_tokens, self.num_tokens),
            ("dtype", info.dtype, self.dtype.name),
        ):
            if said != found:
                raise DataError(f"{path}: {what}={said}, but the .idx has {found}. One of them is of another dataset.")
        return info


class DatasetWriter:
    """Writes a dataset under temporary names; it appears whole when the `with` block ends well, else not at all.

    The temporary files lie in a folder beside the prefix that only one process can hold. What grows with the number
    of documents goes to disk too, so memory does not.
    """

    def __init__(self, prefix: Path | str, dtype: Any, *, overwrite: bool = False) -> None:
        self.prefix, self.dtype = Path(prefix), np.dtype(dtype)
        if self.dtype not in _CODES:
            raise DataError(f"{self.dtype} is no dtype of a token file. Use {', '.join(d.name for d in _CODES)}.")
        self.num_documents = self.num_sequences = self.num_tokens = 0
        self.max_id = -1
        self._overwrite = overwrite
        self._held = ExitStack()
        self._digest = hashlib.sha256()
        self._about: dict[str, Any] | None = None
        self._tokenizer: bytes | None = None
        self._range = np.iinfo(self.dtype)

    def __enter__(self) -> DatasetWriter:
        taken = [path for path in (part(self.prefix, suffix) for suffix in SUFFIXES) if path.exists()]
        if taken and not self._overwrite:
            raise OutputError(f"{taken[0]} exists already. Choose another output, or add --overwrite to replace it.")
        self._folder = self.prefix.with_name(f".{self.prefix.name}.tmp")
        with ExitStack() as held:
            held.enter_context(files.folder_lock(self._folder))
            held.callback(shutil.rmtree, self._folder, ignore_errors=True)  # also what a killed writer left
            self._bin, self._lengths, self._counts = (
                held.enter_context(self._create(name)) for name in ("bin", "lengths", "counts")
            )
            self._held = held.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._held:
            if kind is None:
                with files.storage_errors(self.prefix, "Writing"):
                    self._finish()

    def add_document(self, sequences: Sequence[Ints]) -> None:
        """One document of some sequences (a text model's documents have one). An empty sequence is none."""
        kept = [sequence for sequence in sequences if len(sequence)]
        tokens = np.concatenate(kept) if kept else np.empty(0, self.dtype)
        self.add_documents(tokens, np.array([len(s) for s in kept], np.int64), np.array([len(kept)]))

    def add_documents(self, tokens: Ints, lengths: Ints, num_sequences: Ints) -> None:
        """Many documents at once: their tokens, the length of each sequence, how many sequences each document has."""
        if lengths.sum() != len(tokens) or num_sequences.sum() != len(lengths):
            raise ValueError("tokens, lengths and num_sequences do not belong together")
        if len(lengths) and lengths.max() > np.iinfo(np.int32).max:
            raise DataError(f"A sequence of {lengths.max()} tokens is longer than .idx can say. Split the document.")
        if len(tokens):
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high > self._range.max:
                wrong = low if low < 0 else high
                raise DataError(f"The id {wrong} does not fit {self.prefix}.bin, which holds {self.dtype}. Use int32.")
            self.max_id = max(self.max_id, high)
        with files.storage_errors(self.prefix, "Writing"):
            self._put(self._bin, tokens.astype(self.dtype, copy=False))
            self._lengths.write(lengths.astype("<i4").data)
            self._counts.write(num_sequences.astype("<i8").data)
        self.num_tokens += len(tokens)
        self.num_sequences += len(lengths)
        self.num_documents += len(num_sequences)

    def add_dataset(self, other: IndexedDataset) -> None:
        """Append all documents of another dataset."""
        counts, at = np.diff(other.document_index), 0
        starts = other.document_starts()
        for first in range(0, other.num_documents, _CHUNK >> 4):
            part_counts = counts[first : first + (_CHUNK >> 4)]
            last, end = first + len(part_counts), at + int(part_counts.sum())
            self.add_documents(other.tokens[starts[first] : starts[last]], other.lengths[at:end], part_counts)
            at = end

    def describe(
        self, *, tokenizer: bytes, fingerprint: str, vocab_size: int, eod_id: int | None, num_bytes: int
    ) -> None:
        """What the sidecar says beyond what the writer counts by itself; without this there is no sidecar."""
        self._tokenizer = tokenizer
        self._about = {"tokenizer_fingerprint": fingerprint, "vocab_size": vocab_size, "eod_id": eod_id}
        self._about["num_bytes"] = num_bytes

    def _create(self, name: str) -> IO[bytes]:
        with files.storage_errors(self._folder / name, "Making"):
            return open(self._folder / name, "w+b")

    def _put(self, file: IO[bytes], data: Ints | bytes) -> None:
        view = memoryview(data if isinstance(data, bytes) else data.tobytes())
        file.write(view)
        self._digest.update(view)

    def _finish(self) -> None:
        """Write the index, put all on disk, then rename: .idx goes away first and comes last."""
        with self._create("idx") as index:
            self._write_index(index)
            self._sync(index)
        self._sync(self._bin)
        final = {".bin": "bin"}
        if self._about is not None and self._tokenizer is not None:
            with self._create("tokenizer.json") as file:
                file.write(self._tokenizer)
                self._sync(file)
            files.write_json(self._folder / "json", dataclasses.asdict(self._info(self._about)))
            final |= {".tokenizer.json": "tokenizer.json", ".json": "json"}
        for suffix in (".idx", ".json", ".tokenizer.json"):
            part(self.prefix, suffix).unlink(missing_ok=True)
        for suffix, name in (final | {".idx": "idx"}).items():
            os.replace(self._folder / name, part(self.prefix, suffix))
        files.fsync_dir(self.prefix.parent)

    def _write_index(self, index: IO[bytes]) -> None:
        header = HEADER.pack(MAGIC, 1, _CODES[self.dtype], self.num_sequences, self.num_documents + 1)
        self._put(index, header)
        for lengths in self._spooled(self._lengths, "<i4"):
            self._put(index, lengths)
        at = 0
        for lengths in self._spooled(self._lengths, "<i4"):
            ends = at + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            self._put(index, np.append(np.int64(at), ends[:-1]))
            at = int(ends[-1])
        self._put(index, np.zeros(1, np.int64))
        at = 0
        for counts in self._spooled(self._counts, "<i8"):
            ends = at + np.cumsum(counts)
            self._put(index, ends)
            at = int(ends[-1])

    def _spooled(self, file: IO[bytes], dtype: str) -> Iterator[Ints]:
        file.flush()
        file.seek(0)
        while data := file.read(_CHUNK * 8):
            yield np.frombuffer(data, dtype)

    def _sync(self, file: IO[bytes]) -> None:
        file.flush()
        os.fsync(file.fileno())

    def _info(self, about: dict[str, Any]) -> DatasetInfo:
        return DatasetInfo(
            **about,
            max_id=self.max_id,
            num_documents=self.num_documents,
            num_tokens=self.num_tokens,
            dtype=self.dtype.name,
            content_sha256=self._digest.hexdigest(),
        )


def _size(path: Path, other: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        if other.exists():
            raise MissingInputError(f"{path} is missing beside {other}. Make the dataset again.") from error
        raise MissingInputError(f"{path} does not exist. Give a dataset's path without .bin or .idx.") from error


def _read_header(path: Path, num_bytes: int) -> tuple[np.dtype[Any], int, int]:
    with files.storage_errors(path, "Reading"), open(path, "rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        raise DataError(f"{path} has {num_bytes} bytes, fewer than the {HEADER.size} of its header. It is cut short.")
    magic, version, code, num, num_bounds = HEADER.unpack(header)
    if magic != MAGIC:
        raise _damaged(path, 0, "it does not begin with MMIDIDX")
    if version != 1:
        raise _damaged(path, 9, f"version {version}, and only 1 is known")
    if code not in DTYPES:
        raise _damaged(path, 17, f"dtype code {code} is no type of whole numbers")
    needed = HEADER.size + 12 * num + 8 * num_bounds
    if num_bounds < 1 or num_bytes != needed:
        hint = " (a multimodal dataset?)" if num_bytes == needed + num > needed else ""
        counts = f"{num} sequences and {num_bounds} document bounds"
        raise _damaged(path, 18, f"{counts} need {needed} bytes, the file has {num_bytes}{hint}")
    return np.dtype(DTYPES[code]), num, num_bounds


def _map(path: Path, dtype: np.dtype[Any], count: int) -> Ints:
    if count == 0:  # because: an empty file cannot be mapped
        return np.empty(0, dtype)
    with files.storage_errors(path, "Reading"):
        # A plain view, because slices of np.memmap itself are twice as slow.
        return np.memmap(path, dtype, "r", shape=(count,)).view(np.ndarray)


def _refuse_any(bad: NDArray[np.bool_], path: Path, base: int, width: int, what: str) -> None:
    if bad.any():
        raise _damaged(path, base + width * int(np.argmax(bad)), what)


def _damaged(path: Path, offset: int, what: str) -> DataError:
    return DataError(f"{path}, offset {offset}: {what}. It is damaged or no file of this format.")
