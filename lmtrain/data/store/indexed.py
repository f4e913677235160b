"""Reader of Megatron's .bin/.idx token files, byte-compatible, with a sidecar that records their origin. Torch-free.

Called by samples and by `lmtrain inspect` (IndexedDataset); writer.py writes datasets. A dataset is a prefix P:

    P.bin             token ids, little endian, nothing between them
    P.idx             34 bytes of header, then lengths (int32), pointers (int64 bytes), document index (int64)
    P.json            the sidecar: counts, checksum, fingerprint of the tokenizer; absent from foreign datasets
    P.blocks          checksums of the blocks of P.bin, compared as they are first read; only with a sidecar
    P.tokenizer.json  the tokenizer itself

P.idx is renamed into place last, so a dataset without P.idx is unfinished. Opening takes the same time for any size;
`check_index` checks every entry of the index, `dataset_operations.verify` every byte.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.data.store.blocks import Mapped, Record, TokenBlocks, Watch, read_block_file
from lmtrain.data.store.format import CHUNK, DTYPES, HEADER, MAGIC, SUFFIXES, DatasetInfo, Ints, dtype_for, part
from lmtrain.data.store.writer import DatasetWriter
from lmtrain.errors import DataError, MissingInputError, join_few
from lmtrain.runtime.files import files
from lmtrain.runtime.files.checksum import crc32c

# the names that readers and writers of a dataset import from here
__all__ = ["SUFFIXES", "DatasetInfo", "DatasetWriter", "IndexedDataset", "dtype_for", "part"]


class IndexedDataset:
    """A dataset opened for reading: memory maps of its .bin and .idx, checked to agree with each other.

    Callers that read `tokens` or the index arrays must call `check` before they use the values.
    """

    def __init__(
        self, prefix: Path, index: Mapped, tokens: Mapped, dtype: np.dtype[Any], num: int, bounds: int
    ) -> None:
        self.prefix, self.dtype, self.num_sequences = prefix, dtype, num
        self.tokens: Ints = tokens.bytes.view(dtype)
        self.token_bytes, self._index, self._watch = tokens, index, Watch((tokens, index))
        start = HEADER.size
        # because: the format does not align its arrays, which np.frombuffer accepts
        self.lengths: Ints = np.frombuffer(index.bytes, "<i4", num, start)
        self.pointers: Ints = np.frombuffer(index.bytes, "<i8", num, start + 4 * num)
        self.document_index: Ints = np.frombuffer(index.bytes, "<i8", bounds, start + 12 * num)
        self.info: DatasetInfo | None = None

    @classmethod
    def open(cls, prefix: Path | str) -> IndexedDataset:
        """Open a dataset by its prefix, with or without .bin or .idx. Raise if a file is missing or inconsistent."""
        prefix = Path(prefix)
        if prefix.suffix in (".bin", ".idx"):
            prefix = prefix.with_suffix("")
        idx_path, bin_path = part(prefix, ".idx"), part(prefix, ".bin")
        num_idx_bytes, num_bin_bytes = _size(idx_path, bin_path), _size(bin_path, idx_path)
        dtype, num, num_bounds = _read_header(idx_path, num_idx_bytes)
        index = Mapped(idx_path, num_idx_bytes)
        if num_bin_bytes % dtype.itemsize:
            raise DataError(f"{bin_path} has {num_bin_bytes} bytes, no whole number of {dtype} ids. It is cut short.")
        dataset = cls(prefix, index, Mapped(bin_path, num_bin_bytes), dtype, num, num_bounds)
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

    @cached_property
    def index_crc(self) -> int:
        """CRC-32C of the whole .idx."""
        crc = crc32c(self._index.bytes)
        self._index.refuse_lost()
        return crc

    @cached_property
    def blocks(self) -> TokenBlocks | None:
        """The checksums that tokens are compared with: of P.blocks, or set by `watch`; None: tokens are not checked."""
        if self.info is None or self.info.blocks_sha256 is None:
            return None
        sums, index_crc = read_block_file(
            part(self.prefix, ".blocks"), self.info.blocks_sha256, self.token_bytes.num_bytes
        )
        if index_crc != self.index_crc:
            raise DataError(
                f"{part(self.prefix, '.idx')} is not what was written there (CRC-32C {self.index_crc:08x} in place of "
                f"{index_crc:08x}). Restore the file or make the dataset again."
            )
        return TokenBlocks.known(self.token_bytes, self.dtype.itemsize, sums)

    def watch(self, verify: str, record: Path, say: Callable[[str], None]) -> None:
        """Choose how tokens are checked from now on.

        `verify` is read, full or none. Without P.blocks, the checksums of blocks at first read are kept in the file
        `record`. Raise DataError if the .idx differs from the one that was recorded.
        """
        if verify == "none":
            self.blocks = None
        elif self.blocks is None:
            kept = Record(record, say)
            self.blocks = TokenBlocks.recorded(self.token_bytes, self.dtype.itemsize, kept)
            if not kept.check_index(len(self.blocks.sums), self.index_crc):
                raise DataError(
                    f"{part(self.prefix, '.idx')} is not what it was when it was first read. Restore the file, or "
                    f"remove {record} if you replaced it yourself."
                )

    def check(
        self, starts: NDArray[np.int64], sizes: NDArray[np.int64], stride: int = 1, first: int = 0
    ) -> None:
        """Raise DataError if a range of sizes[i] tokens from starts[i] fails its checksums, or a file was truncated.

        Arguments are as in `TokenBlocks.check`.
        """
        if self.blocks is not None:
            self.blocks.check(starts, sizes, stride, first)  # also checks that the files were not truncated
        else:
            self._watch.refuse_lost()

    def refuse_lost(self) -> None:
        """Raise DataError if the .bin or the .idx was truncated or became unreadable."""
        self._watch.refuse_lost()

    def check_all(self, part: int = 0, parts: int = 1) -> None:
        """Check the whole index and all token blocks, or share `part` of `parts` equal shares of the blocks."""
        if self.blocks is not None:
            self.blocks.check_all(part, parts)
        self.check_index()
        self.refuse_lost()

    def read(self, start: int, stop: int) -> Ints:
        """Return a checked copy of the tokens [start, stop)."""
        tokens = self.tokens[start:stop].copy()
        self.check(np.array([start]), np.array([len(tokens)]))
        return tokens

    def sequence(self, i: int) -> Ints:
        start = int(self.pointers[i]) // self.dtype.itemsize
        return self.read(start, start + int(self.lengths[i]))

    def document(self, d: int) -> Ints:
        return self.read(*self.document_range(d))

    def document_range(self, d: int) -> tuple[int, int]:
        """Return (first token, one past the last token) of a document."""
        first, last = int(self.document_index[d]), int(self.document_index[d + 1])
        if first == last:
            return 0, 0
        start = int(self.pointers[first]) // self.dtype.itemsize
        return start, start + int(self.lengths[first:last].sum())

    def check_index(self) -> None:
        """Raise DataError unless lengths, pointers and document index agree with each other, entry by entry."""
        path, base, expected = part(self.prefix, ".idx"), HEADER.size, 0
        at_pointers, at_documents = base + 4 * self.num_sequences, base + 12 * self.num_sequences
        for first in range(0, self.num_sequences, CHUNK):
            lengths = self.lengths[first : first + CHUNK].astype(np.int64)
            _refuse_any(lengths < 0, path, base + 4 * first, 4, "a negative length")
            ends = expected + np.cumsum(lengths) * self.dtype.itemsize
            wrong = self.pointers[first : first + CHUNK] != np.append(np.int64(expected), ends[:-1])
            _refuse_any(wrong, path, at_pointers + 8 * first, 8, "a pointer that disagrees with the lengths")
            expected = int(ends[-1])
        for first in range(0, self.num_documents, CHUNK):
            step = np.diff(self.document_index[first : first + CHUNK + 1])
            _refuse_any(step < 0, path, at_documents + 8 * (first + 1), 8, "a document that ends before it starts")

    def _check_ends(self, idx_path: Path, bin_path: Path, num_bin_bytes: int) -> None:
        """Raise DataError if the arrays' first and last entries are inconsistent; the rest is not read."""
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


def _size(path: Path, other: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        if other.exists():
            raise MissingInputError(f"{path} is missing beside {other}. Make the dataset again.") from error
        raise MissingInputError(f"{path} does not exist. {_meant(path.with_name(path.stem))}") from error


def _meant(prefix: Path) -> str:
    """Return a hint if a prefix names no dataset: how to preprocess a file of that name, or a similar dataset."""
    if prefix.is_file():
        made = prefix.with_name(prefix.name.partition(".")[0] or "NAME")
        return (
            "A dataset is made of such a file: type "
            f"`lmtrain preprocess {prefix} --tokenizer TOKENIZER --output {made}`, and then give {made}. "
            "A BERT model needs --split-sentences as well."
        )
    beside = prefix if prefix.is_dir() else prefix.parent
    known = sorted(str(path.with_name(path.stem)) for path in beside.glob("*.idx"))
    # because: the shared folder name would make any two full paths similar, so only the last component is compared
    near = [one for one in known if difflib.get_close_matches(prefix.name, [Path(one).name], n=1, cutoff=0.6)]
    if near or (known and beside == prefix):
        return f"Did you mean {near[0] if near else join_few(known)}?"
    return "Give a dataset's path without .bin or .idx."


def _read_header(path: Path, num_bytes: int) -> tuple[np.dtype[Any], int, int]:
    with files.read_errors(path), files.opened(path) as (fd, _):
        header = files.read_range(fd, 0, HEADER.size)
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


def _refuse_any(bad: NDArray[np.bool_], path: Path, base: int, width: int, what: str) -> None:
    if bad.any():
        raise _damaged(path, base + width * int(np.argmax(bad)), what)


def _damaged(path: Path, offset: int, what: str) -> DataError:
    return DataError(f"{path}, offset {offset}: {what}. It is damaged or no file of this format.")
