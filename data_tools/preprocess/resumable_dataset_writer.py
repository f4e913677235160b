"""The output datasets of a preprocessing run: one per key, optionally in shards. Called by preprocess_pipeline.py.

All files grow in a folder beside the output, locked by one process, together with a journal. A killed run resumes after
the last portion on which the journal and the files agree; at the end all files are renamed to their final names, each
.idx last.

The journal has one JSON object per line. The first line has the run's inputs and settings: a different run is refused,
unless --overwrite was given. Each further line is written after a portion's output was flushed to the operating system,
and records where reading continues and the size of every file. Every line ends with a hash of itself and of the
previous line. A kill can damage the last line only; other damage is detected by the hashes, and everything from there
on is redone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from data_tools.preprocess.encode_documents import SequenceBatch
from data_tools.preprocess.identify_run import describe_other_run, identity_hash
from data_tools.read.cut_files_into_chunks import START, ReadPosition
from lmtrain.data.store.dataset_writer import (
    DatasetSpool,
    SpoolState,
    check_dataset,
    check_finished_files,
    open_without_links,
    publish,
)
from lmtrain.data.store.indexed_dataset import SUFFIXES, DatasetInfo, dataset_file, working_folder
from lmtrain.errors import DataError, LmtrainError, OutputError, StorageError
from lmtrain.runtime.files import atomic_files
from lmtrain.runtime.files.crc32c import crc32c
from lmtrain.runtime.files.existing_output import Found, Kind, check_output, has_rows_with
from lmtrain.runtime.processes.fault_injection import fault_point
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.units import format_bytes

_HEAD = {"format": "lmtrain preprocess journal", "version": 3}
_HASH_KEY = "sha256"
_MAX_BYTES = 16 << 30  # a line takes a few hundred bytes per 4 MiB of source
REJECTS = ".rejects.jsonl"
_REJECTS = Kind("a list of bad lines", has_rows_with("file", "cause"))
_READ_BYTES = 4 << 20
_NUM_BINS = 40  # bins of the histogram: 0, 1, 2-3, 4-7, ... tokens


class Journal:
    """Append-only log of a run's progress, from which a killed run resumes. An entry is a JSON object in a line of its
    own; each line has a hash of itself and of the previous line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._last_hash = ""  # hash of the last line
        self.damaged = False  # True if `read` found a damaged line
        self.other: dict[str, Any] | None = None  # identity of another run, of which `read` found work

    def read(self, identity: dict[str, Any] | None) -> list[dict[str, Any]] | None:
        """Return the entries of the journal, without its first line, up to the first damaged one. Return None if there
        is no journal, if `identity`, the inputs and settings of the run, is None, or if the first line has others.
        """
        try:
            lines = atomic_files.read_bytes(self._path, _MAX_BYTES, follow_links=False).split(b"\n")[:-1]
        except (OSError, LmtrainError):
            return None
        trees, expected = [], ""
        for line in lines:
            try:
                tree = atomic_files.parse_json(line, self._path)
                expected, stored = _chained_hash(tree, expected), tree.pop(_HASH_KEY)
            except (LmtrainError, AttributeError, KeyError, TypeError):
                stored = None
            if stored != expected:
                self.damaged = True
                break
            trees.append(tree)
        if len(trees) > 1 and trees[0].get("identity") not in (None, identity):
            known = trees[0]["identity"]
            self.other = known if isinstance(known, dict) else {}  # because: version 2 had a hash
        if not trees or identity is None or trees[0] != _HEAD | {"identity": identity}:
            return None
        return trees[1:]

    def start(self, identity: dict[str, Any] | None, lines: list[dict[str, Any]]) -> None:
        """Write a new journal in place of the old one and open it for appending. Its first line has `identity`, the
        inputs and settings of the run; then come `lines`, the entries of the old journal that the output files still
        match.
        """
        with atomic_files.storage_errors(self._path, "Writing"):
            temporary = self._path.with_suffix(".new")
            self._last_hash = ""
            with open_without_links(temporary, "wb") as file:
                file.writelines(map(self._line, (_HEAD | {"identity": identity}, *lines)))
            temporary.replace(self._path)
            self._file = open_without_links(self._path, "ab")

    def append(self, entry: dict[str, Any]) -> None:
        """Append an entry, a JSON object with the state of the run's output files, and flush it to the operating
        system.
        """
        assert self._file is not None, "start comes first"
        with atomic_files.storage_errors(self._path, "Writing"):
            fault_point("data.journal")
            self._file.write(self._line(entry))
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _line(self, entry: dict[str, Any]) -> bytes:
        """Return a line with its hash, which follows that of the line before it."""
        self._last_hash = _chained_hash(entry, self._last_hash)
        return json.dumps(entry | {_HASH_KEY: self._last_hash}, separators=(",", ":")).encode() + b"\n"


def _chained_hash(entry: dict[str, Any], previous_hash: str) -> str:
    """Return the SHA-256 of a journal entry, without its own hash, and of the previous line's hash."""
    rest = {key: value for key, value in entry.items() if key != _HASH_KEY}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256((previous_hash + text).encode()).hexdigest()


@dataclass
class Totals:
    """Counts of the run so far; all fields are recorded in the journal."""

    place: ReadPosition = START
    line: int = 0  # lines read of the source at `place`
    num_disk_bytes: int = 0
    num_documents: int = 0
    num_tokens: int = 0  # tokens of all keys
    num_text_bytes: int = 0
    shard_text_bytes: list[int] = field(default_factory=list)  # text bytes of the current shard, per key
    bad: Counter[str] = field(default_factory=Counter)
    filtered: Counter[str] = field(default_factory=Counter)
    lengths: list[int] = field(default_factory=lambda: [0] * _NUM_BINS)  # histogram of the first key's document lengths

    @classmethod
    def from_dict(cls, totals: dict[str, Any]) -> Totals:
        """Build the totals of a run from the JSON object that a journal entry has for them."""
        totals = dict(totals)
        return cls(
            place=ReadPosition(*totals.pop("place")),
            bad=Counter(totals.pop("bad")),
            filtered=Counter(totals.pop("filtered")),
            **totals,
        )

    def count(self, batches: list[SequenceBatch]) -> None:
        """Add the documents, tokens and bytes of text of one portion of the input. `batches` has its tokenized
        documents, one batch per key.
        """
        lengths = batches[0].document_lengths()
        bins = np.frexp(lengths)[1]  # number of binary digits
        for number, count in enumerate(np.bincount(bins, minlength=_NUM_BINS).tolist()):
            self.lengths[number] += count
        self.num_documents += len(lengths)
        self.num_tokens += sum(len(batch.tokens) for batch in batches)
        self.num_text_bytes += sum(batch.num_text_bytes for batch in batches)
        for number, batch in enumerate(batches):
            self.shard_text_bytes[number] += batch.num_text_bytes


@dataclass(frozen=True)
class OutputNames:
    """Prefixes of the output datasets, and the size at which a shard ends."""

    prefix: Path
    keys: tuple[str, ...]
    dtype: Any
    shard_tokens: int | None = None
    overwrite: bool = False

    def prefix_of(self, key: int, shard: int) -> Path:
        """Return the prefix of a dataset: PREFIX, or PREFIX_KEY with several keys, followed by -00000 with shards."""
        name = self.prefix.name + (f"_{self.keys[key]}" if len(self.keys) > 1 else "")
        return self.prefix.with_name(name if self.shard_tokens is None else f"{name}-{shard:05d}")

    def existing_prefixes(self) -> Iterator[Path]:
        """Yield the prefixes of datasets that this output would replace. Without shards, this is the prefix for each
        key, whether its files exist or not; with shards, every existing prefix with the name of a shard.
        """
        for key in range(len(self.keys)):
            if self.shard_tokens is None:
                yield self.prefix_of(key, 0)
                continue
            stem = self.prefix_of(key, 0).name.removesuffix("00000")
            if self.prefix.parent.is_dir():
                names = {entry.name[: len(stem) + 5] for entry in os.scandir(self.prefix.parent)}
                numbered = sorted(name for name in names if name.startswith(stem) and name[len(stem) :].isdecimal())
                yield from (self.prefix.with_name(name) for name in numbered if len(name) == len(stem) + 5)


def existing_datasets(names: OutputNames, identity: dict[str, Any] | None) -> list[DatasetInfo] | None:
    """Return the sidecars of the output datasets if an earlier run made them of the same inputs with the same settings,
    `identity`, else None.
    """
    prefixes = list(names.existing_prefixes())
    if names.overwrite or identity is None or not prefixes or working_folder(names.prefix).exists():
        return None
    try:
        infos = [DatasetInfo.read(dataset_file(prefix, ".json")) for prefix in prefixes]
        is_whole = all(dataset_file(prefix, suffix).is_file() for prefix in prefixes for suffix in SUFFIXES)
    except LmtrainError:
        return None
    return infos if is_whole and {info.made_from for info in infos} == {identity_hash(identity)} else None


class Outputs:
    """Context manager for writing the outputs of a run. It locks their working folder and resumes a killed run.

    The folder is kept after an error only if the same command could resume from it.
    """

    def __init__(self, names: OutputNames, identity: dict[str, Any] | None, tokenizer: Tokenizer) -> None:
        self.names, self.totals = names, Totals(shard_text_bytes=[0] * len(names.keys))
        self.finished = False  # an earlier start of this run did everything but the renaming
        self.resumed = False  # work of an earlier, killed start of this run is used
        self.discarded = False  # work of another run was removed
        self.found_damage = False  # some of an earlier start's work was damaged and is done again
        self.sync_seconds = 0.0
        self._identity, self._tokenizer = identity, tokenizer
        self._folder = working_folder(names.prefix)
        self._journal = Journal(self._folder / "journal.jsonl")
        self._shard = 0
        self._spools: list[DatasetSpool] = []
        self._finished: list[list[str | None]] = []  # sidecar hashes of each finished shard
        self._rejects: IO[bytes] = io.BytesIO()  # replaced once the folder is locked
        self._rejects_state = [0, 0]  # size and CRC-32C of the rejects
        self._resources = ExitStack()

    @property
    def num_shards(self) -> int:
        return self._shard + 1

    def __enter__(self) -> Outputs:
        with ExitStack() as resources:
            resources.enter_context(atomic_files.folder_lock(self._folder))
            lines = self._journal.read(self._identity)
            self.discarded = lines is None and any(path.name != ".lock" for path in self._folder.iterdir())
            self.found_damage = self._journal.damaged and lines is not None
            resources.callback(self._close)
            if self._journal.other is not None and not self.names.overwrite:
                raise OutputError(describe_other_run(self._folder, self._journal.other, self._identity or {}))
            if lines and "publish" in lines[-1] and not self._is_publishable(lines[-1]):
                del lines[-1]
                self.found_damage = True
            if not (lines and "publish" in lines[-1]):
                self._refuse_existing_outputs(resources)
            with atomic_files.storage_errors(self._folder, "Making"):
                self._open(lines or [])
            self._resources = resources.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # because: closing a file writes what its buffer still holds, and a full disk refuses that once more
        is_full = isinstance(error, StorageError)
        with suppress(OSError) if is_full else atomic_files.storage_errors(self._folder, "Writing"), self._resources:
            # After an error in the input or the settings the next run differs; a full disk or Ctrl-C can be resumed.
            if isinstance(error, LmtrainError) and not is_full:
                shutil.rmtree(self._folder, ignore_errors=True)
        if is_full:
            num_bytes = sum(path.stat().st_size for path in self._folder.iterdir())
            raise StorageError(
                f"{error} {self._folder} holds the work done so far ({format_bytes(num_bytes)}). The same command "
                "resumes from there; removing the folder frees that space."
            ) from error

    def add(self, batches: list[SequenceBatch], rejects: bytes) -> None:
        """Write one tokenized portion of the input, and record the state of all files in the journal. `batches` has one
        batch per key; `rejects` are the portion's lines of the rejects file.

        `totals` must already count all of the portion except `batches`.
        """
        if self.names.shard_tokens is not None and self._spools[0].num_tokens >= self.names.shard_tokens:
            self._next_shard()
        fault_point("data.slice")
        for spool, batch in zip(self._spools, batches, strict=True):
            spool.add_documents(batch.tokens, batch.lengths, batch.num_sequences)
        with atomic_files.storage_errors(self._folder, "Writing"):
            self._rejects.write(rejects)
            self._rejects.flush()
        self._rejects_state = [self._rejects_state[0] + len(rejects), crc32c(rejects, self._rejects_state[1])]
        self.totals.count(batches)
        self._journal.append({
            "shard": self._shard, "marks": [dataclasses.asdict(spool.record_state()) for spool in self._spools],
            "rejects": self._rejects_state, "finished": self._finished[-1:], "totals": vars(self.totals),
        })  # fmt: skip

    def finish(self) -> list[Path]:
        """Complete all output files, sync them to disk and rename them to their final names. Return the final paths."""
        if not self.finished:
            fault_point("data.finish")
            self._finished.append(self._finish_shard())
            with atomic_files.storage_errors(self._folder, "Writing"):
                os.fsync(self._rejects.fileno())
            self._journal.append({
                "shard": self._shard, "rejects": self._rejects_state, "totals": vars(self.totals),
                "publish": self._finished,
            })  # fmt: skip
        prefixes = [self.names.prefix_of(key, shard) for key, shard in self._keys_and_shards()]
        for prefix in set(self.names.existing_prefixes()) - set(prefixes):
            for suffix in reversed(SUFFIXES):
                dataset_file(prefix, suffix).unlink(missing_ok=True)
        for key, shard in self._keys_and_shards():
            publish(self._folder, _spool_name(key, shard), self.names.prefix_of(key, shard))
        rejects = self._folder / "rejects"
        with atomic_files.storage_errors(self._rejects_path, "Writing"):
            if rejects.exists() and rejects.stat().st_size:
                os.replace(rejects, self._rejects_path)
                atomic_files.fsync_dir(self._rejects_path.parent)
            elif rejects.exists():  # no rejects: an existing file belongs to a replaced dataset
                self._rejects_path.unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)
        paths = [dataset_file(prefix, suffix) for prefix in prefixes for suffix in SUFFIXES]
        return [*paths, *([self._rejects_path] if self._rejects_path.exists() else [])]

    @property
    def _rejects_path(self) -> Path:
        return dataset_file(self.names.prefix, REJECTS)

    def _keys_and_shards(self) -> list[tuple[int, int]]:
        """Return (key number, shard number) of every output dataset."""
        return [(key, shard) for shard in range(self._shard + 1) for key in range(len(self.names.keys))]

    def _refuse_existing_outputs(self, resources: ExitStack) -> None:
        """Raise OutputError if an output dataset exists and must not be replaced. If it raises, the working folder
        will be removed when `resources` is closed, provided that it holds nothing but its lock.
        """
        try:
            found = [check_dataset(prefix, overwrite=self.names.overwrite) for prefix in self.names.existing_prefixes()]
            is_replaced = any(state is not Found.NOTHING for state in found)
            check_output(self._rejects_path, _REJECTS, overwrite=self.names.overwrite, is_default=is_replaced)
        except OutputError:
            if not self.discarded:  # the folder may be new from this call
                resources.callback(self._remove_if_empty)
            raise

    def _remove_if_empty(self) -> None:
        if {path.name for path in self._folder.iterdir()} == {".lock"}:
            shutil.rmtree(self._folder, ignore_errors=True)

    # ---- resuming

    def _open(self, lines: list[dict[str, Any]]) -> None:
        """Open the output files in the state that the journal entries `lines` record, to resume a killed run. If the
        files on disk match none of the entries, empty the working folder and start over.
        """
        if lines and "publish" in lines[-1]:
            self.finished = self.resumed = True
            self._shard, self.totals = lines[-1]["shard"], Totals.from_dict(lines[-1]["totals"])
            return
        valid = self._resume(lines)
        self.found_damage |= len(valid) < len(lines)
        if not valid:
            for path in self._folder.iterdir():
                if path.name != ".lock":
                    path.unlink()
            self._shard = 0  # because: the search for valid lines changed it
            self._spools = self._new_spools()
        self._journal.start(self._identity, valid)
        self._rejects = open_without_links(self._folder / "rejects", "r+b" if valid else "w+b")
        self._rejects_state = valid[-1]["rejects"] if valid else [0, 0]
        self._rejects.truncate(self._rejects_state[0])
        self._rejects.seek(self._rejects_state[0])

    def _resume(self, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the entries of `lines`, the journal, up to the last one that the files on disk still match, and open
        the files of the datasets under construction as they were at that entry. Return [] if none matches or the
        journal is malformed.
        """
        try:
            hashes = {line["shard"] - 1: line["finished"][0] for line in lines if line["finished"]}
            for shard in range(lines[-1]["shard"] if lines else 0):
                if not self._is_shard_intact(shard, hashes[shard]):
                    lines = [line for line in lines if line["shard"] <= shard]
                    break
            valid = self._matching_lines(lines)
        except (StorageError, KeyError, TypeError, ValueError):  # a malformed journal, or missing files
            return []
        if valid:
            self.resumed = True
            self._shard, self.totals = valid[-1]["shard"], Totals.from_dict(valid[-1]["totals"])
            self._finished = [hashes[shard] for shard in range(self._shard)]
        return valid

    def _is_shard_intact(self, shard: int, hashes: list[str]) -> bool:
        """Return True if all files of a finished shard are complete and undamaged, whether they have their final names
        already or not. `hashes` are the hashes in its .json sidecars, one per key.
        """
        try:
            for key, sidecar_hash in enumerate(hashes):
                name, final = _spool_name(key, shard), self.names.prefix_of(key, shard)

                def path_of(suffix: str, name: str = name, final: Path = final) -> Path:
                    path = self._folder / f"{name}{suffix}"
                    if path.is_symlink():
                        raise DataError(f"{path} is a symbolic link, which lmtrain did not write. Remove it.")
                    return path if os.path.lexists(path) else dataset_file(final, suffix)

                check_finished_files(path_of, sidecar_hash, self._tokenizer.to_bytes())
        except (LmtrainError, OSError):
            return False
        return len(hashes) == len(self.names.keys)

    def _is_publishable(self, line: dict[str, Any]) -> bool:
        """Return True if all files that an interrupted run finished are undamaged and only need to be renamed to their
        final names, False if they must be written again. Raise DataError if they are damaged and some have their final
        names already. `line` is the last entry of the journal, with the files' hashes.
        """
        rejects = self._folder / "rejects"
        is_intact = all(self._is_shard_intact(shard, hashes) for shard, hashes in enumerate(line["publish"]))
        if line["rejects"][0] or rejects.exists():
            path = rejects if rejects.exists() else self._rejects_path
            is_intact = is_intact and _count_matching_states(path, [line["rejects"]]) == 1
            is_intact = is_intact and path.stat().st_size == line["rejects"][0]
        self._shard = line["shard"]
        indexes = [self._folder / f"{_spool_name(key, shard)}.idx" for key, shard in self._keys_and_shards()]
        if is_intact or all(index.exists() for index in indexes):
            return is_intact
        raise DataError(
            f"Finished files in {self._folder} were damaged before all were renamed to {self.names.prefix}. "
            f"Remove {self._folder} and the files of {self.names.prefix}, and run the command again."
        )

    def _matching_lines(self, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the entries of `lines`, the journal, up to the last one that the files of its shard match; [] if there
        is none. Open this shard's files, truncated to their sizes at that entry. Files of earlier shards are not
        compared.
        """
        for shard in sorted({line["shard"] for line in lines}, reverse=True):
            before = [line for line in lines if line["shard"] < shard]
            current = [line for line in lines if line["shard"] == shard]
            self._shard = shard
            self._spools = self._new_spools(empty=False)
            states = [[SpoolState.from_dict(line["marks"][k]) for line in current] for k in range(len(self.names.keys))]
            num_matching = [spool.rewind(key_states) for spool, key_states in zip(self._spools, states, strict=True)]
            current = current[: min(num_matching)]
            current = current[: _count_matching_states(self._folder / "rejects", [line["rejects"] for line in current])]
            if current:
                for spool, key_states, count in zip(self._spools, states, num_matching, strict=True):
                    if count > len(current):  # another key's files, or the rejects, are valid for fewer lines
                        spool.rewind(key_states[: len(current)])
                return before + current
            for spool in self._spools:
                spool.close()
        return []

    def _new_spools(self, empty: bool = True) -> list[DatasetSpool]:
        """Return a DatasetSpool (a dataset under construction) of the current shard for each key. Existing files are
        emptied, or kept if `empty` is False.
        """
        names, shard = self.names, self._shard
        return [
            DatasetSpool(self._folder, _spool_name(k, shard), names.prefix_of(k, shard), names.dtype, empty=empty)
            for k in range(len(names.keys))
        ]

    def _close(self) -> None:
        for spool in self._spools:
            spool.close()
        self._journal.close()
        self._rejects.close()

    # ---- shards

    def _next_shard(self) -> None:
        """Finish the datasets of the current shard and start those of the next."""
        self._finished.append(self._finish_shard())
        self._shard += 1
        self._spools = self._new_spools()
        self.totals.shard_text_bytes = [0] * len(self.names.keys)

    def _finish_shard(self) -> list[str | None]:
        """Complete the files of the current shard and sync them to disk. Return the hashes of its .json sidecars, one
        per key.
        """
        facts = {
            "tokenizer_fingerprint": self._tokenizer.fingerprint,
            "vocab_size": self._tokenizer.vocab_size,
            "eod_id": self._tokenizer.eod_id,
            "made_from": identity_hash(self._identity),
        }
        for spool, num_bytes in zip(self._spools, self.totals.shard_text_bytes, strict=True):
            spool.finish(facts | {"num_bytes": num_bytes}, self._tokenizer.to_bytes())
        began = time.perf_counter()
        for spool in self._spools:
            spool.sync()
        self.sync_seconds += time.perf_counter() - began
        return [spool.sidecar_sha256 for spool in self._spools]


def _count_matching_states(path: Path, states: list[list[int]]) -> int:
    """Return how many of the recorded states a file matches, up to the first that it does not. A state is (number of
    bytes, CRC-32C of that many bytes from the start); states are in ascending order.
    """
    at = crc = 0
    try:
        with open_without_links(path, "rb") as file:
            for number, (size, expected_crc) in enumerate(states):
                while at < size and (data := file.read(min(_READ_BYTES, size - at))):
                    at, crc = at + len(data), crc32c(data, crc)
                if at != size or crc != expected_crc:
                    return number
    except OSError:
        return 0
    return len(states)


def _spool_name(key: int, shard: int) -> str:
    return f"{key}-{shard:05d}"
