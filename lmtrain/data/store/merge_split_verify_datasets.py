"""Operations on whole datasets: merge, split, verify every byte, length statistics. Torch-free.

Called by `lmtrain data`. Documents are copied a few megabytes at a time, so that memory does not grow with the dataset.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.data.sample_dataset_interface import mix, permute
from lmtrain.data.store.dataset_writer import DatasetWriter, check_dataset
from lmtrain.data.store.document_boundaries import DocumentMap, split_documents, use_recorded_checksums
from lmtrain.data.store.indexed_dataset import DatasetInfo, IndexedDataset, dataset_file
from lmtrain.data.store.joined_dataset import UNKNOWN, open_dataset, require_compatible
from lmtrain.errors import DataError, UsageError, way
from lmtrain.runtime.files.atomic_files import read_bytes
from lmtrain.runtime.files.existing_output import Found, made_from

_COPIED_TOKENS = 1 << 22
_COPIED_DOCUMENTS = 1 << 16
_TOKENIZER_BYTES = 256 << 20


def verify(dataset: IndexedDataset) -> dict[str, Any]:
    """Read every byte of a dataset once and check index entries, ids and checksums. Return the report of `lmtrain data
    verify`: content_sha256, max_id and which recorded hashes there were to compare with. Raise DataError at the first
    damage.
    """
    if dataset.shards != (dataset,):
        for shard in dataset.shards:
            verify(shard)  # because: each is compared with its own sidecar
    DocumentMap.of(dataset)
    use_recorded_checksums(dataset)
    bin_path = dataset_file(dataset.prefix, ".bin")
    limit = dataset.info.vocab_size if dataset.info else None
    digest, highest, lowest = hashlib.sha256(), -1, 0
    for first in range(0, dataset.num_tokens, _COPIED_TOKENS):
        tokens = dataset.tokens[first : first + _COPIED_TOKENS]
        dataset.check(np.array([first]), np.array([len(tokens)]))
        digest.update(tokens.data.cast("B"))
        lowest, highest = min(lowest, int(tokens.min())), max(highest, int(tokens.max()))
        if lowest < 0 or (limit is not None and highest >= limit):
            at = int(np.argmax((tokens < 0) | (tokens > (highest if limit is None else limit - 1)))) + first
            raise DataError(
                f"{bin_path} holds the id {dataset.tokens[at]} at byte {at * dataset.dtype.itemsize}, outside the "
                "vocabulary. The file is damaged or was made with another tokenizer. Make the dataset again."
            )
    for data in dataset.index_bytes():
        digest.update(data)
    dataset.check_intact()
    if dataset.info and digest.hexdigest() != dataset.info.content_sha256:
        raise DataError(f"{bin_path} or its .idx does not have the checksum in its .json. Make the dataset again.")
    if dataset.info and dataset.info.max_id != highest:
        raise DataError(
            f"{dataset_file(dataset.prefix, '.json')} states max_id={dataset.info.max_id}, but the highest id in "
            f"{bin_path} is {highest}. The sidecar is damaged; restore it, or make the dataset again."
        )
    return {
        "content_sha256": digest.hexdigest(),
        "max_id": highest,
        "compared_with_sidecar": dataset.info is not None,
        "sidecar_has_hash": dataset.info is not None and dataset.info.sidecar_sha256 is not None,
        "compared_with_record": dataset.blocks is not None and dataset.blocks.record is not None,
    }


def merge(prefixes: Sequence[Path], output: Path, *, overwrite: bool = False) -> bool:
    """Write the documents of all datasets, in order, to a new dataset with the prefix `output`; if the first has a
    .json sidecar, so does the new one. Return False if an earlier call has made it of the same datasets. Raise
    DataError if dtypes or tokenizers differ.
    """
    if output.absolute() in (prefix.absolute() for prefix in prefixes):
        raise UsageError(f"--output {output} is one of the datasets to join. Give another name.")
    datasets = [open_dataset(prefix) for prefix in prefixes]
    first, made = datasets[0], made_from("merge", _files(datasets))
    if check_dataset(output, overwrite=overwrite, made_from=made) is Found.SAME:
        return False
    require_compatible(datasets)
    for dataset in datasets:
        _verify_source(dataset)
    with DatasetWriter(output, first.dtype, overwrite=overwrite, made_from=made) as writer:
        for dataset in datasets:
            _copy_documents(writer, dataset, DocumentMap.of(dataset), range(dataset.num_documents))
        if first.info is not None:
            byte_counts = [dataset.info.num_bytes for dataset in datasets if dataset.info]
            _describe_copy(writer, first, first.info, UNKNOWN if UNKNOWN in byte_counts else sum(byte_counts))
    return True


def _files(datasets: Sequence[IndexedDataset]) -> Iterator[Path]:
    """Yield the files of the datasets on which a copy of their documents depends: tokens, index and sidecar."""
    for dataset in datasets:
        for shard in dataset.shards:
            yield from (dataset_file(shard.prefix, suffix) for suffix in (".bin", ".idx", ".json"))


def split(
    prefix: Path, shares: Sequence[float], outputs: Sequence[Path], *, overwrite: bool = False, seed: int | None = None
) -> bool:
    """Divide the documents of a dataset among new datasets with the prefixes `outputs` (two or three), in proportion to
    `shares`: consecutive documents, or randomly chosen ones if a seed is given.

    Randomly chosen documents keep their order, so that a dataset larger than memory is read sequentially. Outputs that
    an earlier call has made of the same dataset stay; return False if these are all.
    """
    check_outputs(prefix, shares, outputs)
    dataset = open_dataset(prefix)
    parts = dict(zip(outputs, split_documents(dataset.num_documents, shares), strict=False))
    if empty := next((output for output, places in parts.items() if not places), None):
        raise UsageError(
            f"--output {empty} would get no document: {prefix} has only {dataset.num_documents}. Give other shares, "
            "or text that is cut into more documents."
        )
    made = {
        output: made_from(["split", places.start, places.stop, seed], _files([dataset]))
        for output, places in parts.items()
    }
    found = {output: check_dataset(output, overwrite=overwrite, made_from=made[output]) for output in parts}
    parts = {output: places for output, places in parts.items() if found[output] is not Found.SAME}
    if not parts:
        return False
    _verify_source(dataset)
    map_ = DocumentMap.of(dataset)
    for output, places in parts.items():
        with DatasetWriter(output, dataset.dtype, overwrite=overwrite, made_from=made[output]) as writer:
            for documents in [places] if seed is None else _shuffled_runs(dataset.num_documents, places, seed):
                _copy_documents(writer, dataset, map_, documents)
            if dataset.info is not None:
                _describe_copy(writer, dataset, dataset.info, UNKNOWN)
    return True


def check_outputs(prefix: Path, shares: Sequence[float], outputs: Sequence[Path]) -> None:
    """Raise UsageError unless there are two or three shares, each with an output of its own that is not the dataset
    `prefix` to split.
    """
    base = outputs[0] if len({*outputs}) == 1 else prefix
    words = [word for name in _names_of_parts(shares) for word in ("--output", f"{base}_{name}")]
    as_in = way(*words, instead_of="--output")
    if len(shares) != len(outputs) or not 2 <= len(shares) <= 3:
        raise UsageError(
            f"--shares has {len(shares)} entries, and --output was given {len(outputs)} times. Give two or three "
            f"shares, and --output once for each{f', as in {as_in}' if 2 <= len(shares) <= 3 else ''}."
        )
    if any(not 0 < share < float("inf") for share in shares):
        raise UsageError(f"The shares {list(shares)} of --shares are not all above 0. Give shares such as 98,2.")
    if len({output.absolute() for output in outputs}) < len(outputs):
        raise UsageError(
            f"Two values of --output are the same path. Give each share an output of its own, as in {as_in}."
        )
    if prefix.absolute() in (output.absolute() for output in outputs):
        raise UsageError(f"--output {prefix} is the dataset to split. Give other names, as in {as_in}.")


def _names_of_parts(shares: Sequence[float]) -> list[str]:
    """Return a name for each part with these shares, at most three: the largest is to train on."""
    others, largest = iter(("valid", "test")), max(shares, default=0.0)
    train = next((number for number, share in enumerate(shares[:3]) if share == largest), 0)
    return ["train" if number == train else next(others) for number in range(len(shares[:3]))]


def _verify_source(dataset: IndexedDataset) -> None:
    """Prepare a dataset to be copied: verify all of it now if it has a .json sidecar but no block checksums. If earlier
    runs recorded block checksums, make later reads of its tokens compare them.

    Otherwise damage would be copied and the copy would get valid checksums.
    """
    if dataset.info is not None and dataset.blocks is None:
        verify(dataset)
    use_recorded_checksums(dataset)


def _shuffled_runs(num_documents: int, positions: range, seed: int) -> Iterator[range]:
    """Yield the documents that a shuffle with this seed moves to one of `positions`, as ranges of consecutive document
    numbers.
    """
    for first in range(0, num_documents, _COPIED_DOCUMENTS):
        numbers = np.arange(first, min(first + _COPIED_DOCUMENTS, num_documents))
        shuffled = permute(numbers, num_documents, mix(seed))
        chosen = numbers[(shuffled >= positions.start) & (shuffled < positions.stop)]
        for run in np.split(chosen, np.flatnonzero(np.diff(chosen) > 1) + 1):
            if len(run):
                yield range(int(run[0]), int(run[-1]) + 1)


def _copy_documents(writer: DatasetWriter, dataset: IndexedDataset, map_: DocumentMap, documents: range) -> None:
    """Append these documents of a dataset to the dataset that `writer` writes; `map_` is the dataset's DocumentMap."""
    for first, last in _document_runs(map_, documents):
        bounds = dataset.document_index[first : last + 1].astype(np.int64)
        start, stop = map_.starts(np.array([first, last])).tolist()
        lengths = dataset.lengths[int(bounds[0]) : int(bounds[-1])]
        dataset.check(np.array([start]), np.array([stop - start]))
        writer.add_documents(dataset.tokens[start:stop], lengths, np.diff(bounds))


def _document_runs(map_: DocumentMap, documents: range) -> Iterator[tuple[int, int]]:
    """Cut a range of documents into runs of bounded size; yield (first document, one past the last) of each run. A
    document larger than the bound is a run of its own.
    """
    first = documents.start
    while first < documents.stop:
        starts = map_.starts(np.arange(first, min(first + _COPIED_DOCUMENTS, documents.stop) + 1))
        within = int(np.searchsorted(starts, starts[0] + _COPIED_TOKENS, side="right")) - 1
        last = first + max(within, 1)
        yield first, last
        first = last


def _describe_copy(writer: DatasetWriter, dataset: IndexedDataset, info: DatasetInfo, num_bytes: int) -> None:
    """Set what the .json sidecar of the new dataset takes from that of the source dataset, `info`: tokenizer,
    vocabulary size and eod_id. `num_bytes` is the number of bytes of text, or UNKNOWN.
    """
    writer.describe(
        tokenizer=read_bytes(dataset.tokenizer_path, _TOKENIZER_BYTES),
        fingerprint=info.tokenizer_fingerprint, vocab_size=info.vocab_size, eod_id=info.eod_id, num_bytes=num_bytes,
    )  # fmt: skip


def length_histogram(dataset: IndexedDataset) -> tuple[NDArray[np.int64], dict[str, Any]]:
    """Return (counts, summary) of the document lengths in tokens: the number of documents with 0, 1, 2-3, 4-7, ...
    tokens, and a dict with the total, longest and mean length and the number of empty documents.

    Takes one pass and bounded memory.
    """
    map_ = DocumentMap.of(dataset)
    counts, longest, powers = np.zeros(65, np.int64), 0, np.array([2**i for i in range(63)], np.int64)
    for first in range(0, dataset.num_documents, _COPIED_DOCUMENTS):
        lengths = map_.lengths(first, min(first + _COPIED_DOCUMENTS, dataset.num_documents))
        counts += np.bincount(np.searchsorted(powers, lengths, side="right"), minlength=65)
        longest = max(longest, int(lengths.max()))
    num = dataset.num_documents
    return counts[: int(longest).bit_length() + 1], {
        "documents": num, "tokens": dataset.num_tokens, "empty_documents": int(counts[0]),
        "longest_document": longest, "mean_length": dataset.num_tokens / num if num else 0.0,
    }  # fmt: skip
