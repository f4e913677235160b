"""The output datasets of a preprocessing run: one per key, optionally in shards. Called by pipeline.py.

All files grow in a folder beside the output, locked by one process, together with a journal. A killed run resumes after
the last portion on which the journal and the files agree; at the end all files are renamed to their final names, each
.idx last.

The journal has one JSON object per line. The first line identifies the run by a hash of inputs and settings: a
different run starts over. Each further line is written after a portion's output was flushed to the operating system,
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

from data_tools.preprocess.sequences import Batch
from data_tools.read.chunks import START, Place
from lmtrain.data.store.indexed import SUFFIXES, dataset_file
from lmtrain.data.store.writer import (
    DatasetSpool,
    SpoolState,
    check_finished,
    open_without_links,
    publish,
    refuse_existing,
    working_folder,
)
from lmtrain.errors import DataError, LmtrainError, OutputError, StorageError
from lmtrain.runtime.files import files
from lmtrain.runtime.files.checksum import crc32c
from lmtrain.runtime.processes.faults import fault_point
from lmtrain.tokenizer.base import Tokenizer
from lmtrain.units import format_bytes

_HEAD = {"format": "lmtrain preprocess journal", "version": 2}
_SEAL = "sha256"
_MOST_BYTES = 16 << 30  # a line takes a few hundred bytes per 4 MiB of source
REJECTS = ".rejects.jsonl"
_READ_BYTES = 4 << 20
_NUM_BINS = 40  # bins of the histogram: 0, 1, 2-3, 4-7, ... tokens


class Journal:
    """Append-only log of a run's progress, from which a killed run resumes; lines are chained by hashes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._seal = ""  # hash of the last line
        self.damaged = False  # True if `read` found a damaged line

    def read(self, identity: str | None) -> list[dict[str, Any]] | None:
        """Return this run's lines up to a damaged line; None if there is no journal or it is of another run."""
        try:
            lines = files.read_bytes(self._path, _MOST_BYTES, follow_links=False).split(b"\n")[:-1]
        except (OSError, LmtrainError):
            return None
        trees, seal = [], ""
        for line in lines:
            try:
                tree = files.parse_json(line, self._path)
                seal, found = _sealed(tree, seal), tree.pop(_SEAL)
            except (LmtrainError, AttributeError, KeyError, TypeError):
                found = None
            if found != seal:
                self.damaged = True
                break
            trees.append(tree)
        if not trees or identity is None or trees[0] != _HEAD | {"identity": identity}:
            return None
        return trees[1:]

    def start(self, identity: str | None, lines: list[dict[str, Any]]) -> None:
        """Rewrite the journal with the lines that are still valid, and open it for appending."""
        with files.storage_errors(self._path, "Writing"):
            temporary = self._path.with_suffix(".new")
            self._seal = ""
            with open_without_links(temporary, "wb") as file:
                file.writelines(map(self._line, (_HEAD | {"identity": identity}, *lines)))
            temporary.replace(self._path)
            self._file = open_without_links(self._path, "ab")

    def append(self, tree: dict[str, Any]) -> None:
        assert self._file is not None, "start comes first"
        with files.storage_errors(self._path, "Writing"):
            fault_point("data.journal")
            self._file.write(self._line(tree))
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _line(self, tree: dict[str, Any]) -> bytes:
        self._seal = _sealed(tree, self._seal)
        return json.dumps(tree | {_SEAL: self._seal}, separators=(",", ":")).encode() + b"\n"


def _sealed(tree: dict[str, Any], before: str) -> str:
    rest = {key: value for key, value in tree.items() if key != _SEAL}
    return hashlib.sha256((before + json.dumps(rest, sort_keys=True, separators=(",", ":"))).encode()).hexdigest()


@dataclass
class Totals:
    """Counts of the run so far; all are recorded in the journal."""

    place: Place = START
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
    def from_dict(cls, tree: dict[str, Any]) -> Totals:
        tree = dict(tree)
        return cls(
            place=Place(*tree.pop("place")),
            bad=Counter(tree.pop("bad")),
            filtered=Counter(tree.pop("filtered")),
            **tree,
        )

    def count(self, batches: list[Batch]) -> None:
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
class Names:
    """Names of the outputs, and the size at which a shard ends."""

    prefix: Path
    keys: tuple[str, ...]
    dtype: Any
    shard_tokens: int | None = None
    overwrite: bool = False

    def name(self, key: int, shard: int) -> Path:
        """Return the prefix: PREFIX, PREFIX_KEY with several keys, followed by -00000 with shards."""
        name = self.prefix.name + (f"_{self.keys[key]}" if len(self.keys) > 1 else "")
        return self.prefix.with_name(name if self.shard_tokens is None else f"{name}-{shard:05d}")

    def existing(self) -> Iterator[Path]:
        """Yield the prefixes that exist and would be replaced by this output."""
        for key in range(len(self.keys)):
            if self.shard_tokens is None:
                yield self.name(key, 0)
                continue
            stem = self.name(key, 0).name.removesuffix("00000")
            if self.prefix.parent.is_dir():
                found = {entry.name[: len(stem) + 5] for entry in os.scandir(self.prefix.parent)}
                numbered = sorted(name for name in found if name.startswith(stem) and name[len(stem) :].isdecimal())
                yield from (self.prefix.with_name(name) for name in numbered if len(name) == len(stem) + 5)


class Outputs:
    """Context manager that locks the output's working folder, which is kept afterwards only if resuming is useful."""

    def __init__(self, names: Names, identity: str | None, tokenizer: Tokenizer) -> None:
        self.names, self.totals = names, Totals(shard_text_bytes=[0] * len(names.keys))
        self.finished = False  # an earlier run did everything but the renaming
        self.resumed, self.dropped = False, False  # work of this run was found; work of another run was dropped
        self.redone = False  # found work was partly damaged
        self.sync_seconds = 0.0
        self._identity, self._tokenizer = identity, tokenizer
        self._folder = working_folder(names.prefix)
        self._journal = Journal(self._folder / "journal.jsonl")
        self._shard = 0
        self._spools: list[DatasetSpool] = []
        self._finished: list[list[str | None]] = []  # sidecar hashes of each finished shard
        self._rejects: IO[bytes] = io.BytesIO()  # replaced once the folder is locked
        self._rejects_mark = [0, 0]  # size and CRC-32C of the rejects
        self._held = ExitStack()

    @property
    def num_shards(self) -> int:
        return self._shard + 1

    def __enter__(self) -> Outputs:
        with ExitStack() as held:
            held.enter_context(files.folder_lock(self._folder))
            lines = self._journal.read(self._identity)
            self.dropped = lines is None and any(path.name != ".lock" for path in self._folder.iterdir())
            self.redone = self._journal.damaged and lines is not None
            held.callback(self._close)
            if lines and "publish" in lines[-1] and not self._is_publishable(lines[-1]):
                del lines[-1]
                self.redone = True
            if not (lines and "publish" in lines[-1]):
                self._refuse_taken(held)
            with files.storage_errors(self._folder, "Making"):
                self._open(lines or [])
            self._held = held.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # because: closing a file writes what its buffer still holds, and a full disk refuses that once more
        is_full = isinstance(error, StorageError)
        with suppress(OSError) if is_full else files.storage_errors(self._folder, "Writing"), self._held:
            # After an error in the input or the settings the next run differs; a full disk or Ctrl-C can be resumed.
            if isinstance(error, LmtrainError) and not is_full:
                shutil.rmtree(self._folder, ignore_errors=True)
        if is_full:
            kept = sum(path.stat().st_size for path in self._folder.iterdir())
            raise StorageError(
                f"{error} {self._folder} has what is done so far, {format_bytes(kept)}: the same command goes on from "
                "there, and removing it frees that room."
            ) from error

    def add(self, batches: list[Batch], rejects: bytes) -> None:
        """Write a portion's output and record it in the journal. `totals` must already count all but the batches."""
        if self.names.shard_tokens is not None and self._spools[0].num_tokens >= self.names.shard_tokens:
            self._next_shard()
        fault_point("data.slice")
        for spool, batch in zip(self._spools, batches, strict=True):
            spool.add_documents(batch.tokens, batch.lengths, batch.num_sequences)
        with files.storage_errors(self._folder, "Writing"):
            self._rejects.write(rejects)
            self._rejects.flush()
        self._rejects_mark = [self._rejects_mark[0] + len(rejects), crc32c(rejects, self._rejects_mark[1])]
        self.totals.count(batches)
        marks = [dataclasses.asdict(spool.record_state()) for spool in self._spools]
        self._journal.append({
            "shard": self._shard, "marks": marks, "rejects": self._rejects_mark, "finished": self._finished[-1:],
            "totals": vars(self.totals),
        })  # fmt: skip

    def finish(self) -> list[Path]:
        """Complete all files, sync them to disk and rename them; return the final paths."""
        if not self.finished:
            fault_point("data.finish")
            self._finished.append(self._finish_shard())
            self._journal.append({
                "shard": self._shard, "rejects": self._rejects_mark, "totals": vars(self.totals),
                "publish": self._finished,
            })  # fmt: skip
        for prefix in set(self.names.existing()) - {self.names.name(k, s) for k, s in self._all()}:
            for suffix in reversed(SUFFIXES):
                dataset_file(prefix, suffix).unlink(missing_ok=True)
        made = self._folder / "rejects"
        with files.storage_errors(self._rejects_path, "Writing"):
            if made.exists() and made.stat().st_size:
                os.replace(made, self._rejects_path)
            elif made.exists():  # no rejects: an existing file belongs to a replaced dataset
                self._rejects_path.unlink(missing_ok=True)
        for key, shard in self._all():
            publish(self._folder, _spool_name(key, shard), self.names.name(key, shard))
        shutil.rmtree(self._folder, ignore_errors=True)
        named = [dataset_file(self.names.name(key, shard), suffix) for key, shard in self._all() for suffix in SUFFIXES]
        return [*named, *([self._rejects_path] if self._rejects_path.exists() else [])]

    @property
    def _rejects_path(self) -> Path:
        return dataset_file(self.names.prefix, REJECTS)

    def _all(self) -> list[tuple[int, int]]:
        return [(key, shard) for shard in range(self._shard + 1) for key in range(len(self.names.keys))]

    def _refuse_taken(self, held: ExitStack) -> None:
        if self.names.overwrite:
            return
        try:
            for prefix in self.names.existing():
                refuse_existing(prefix)
        except OutputError:
            if not self.dropped:  # the folder may be new from this call
                held.callback(self._remove_if_empty)
            raise

    def _remove_if_empty(self) -> None:
        if {path.name for path in self._folder.iterdir()} == {".lock"}:
            shutil.rmtree(self._folder, ignore_errors=True)

    # ---- where the work stands

    def _open(self, lines: list[dict[str, Any]]) -> None:
        """Resume from the journal's lines, or start over in an emptied folder."""
        if lines and "publish" in lines[-1]:
            self.finished = self.resumed = True
            self._shard, self.totals = lines[-1]["shard"], Totals.from_dict(lines[-1]["totals"])
            return
        kept = self._resume(lines)
        self.redone |= len(kept) < len(lines)
        if not kept:
            for path in self._folder.iterdir():
                if path.name != ".lock":
                    path.unlink()
            self._shard = 0  # because: the search for valid lines changed it
            self._spools = self._new_spools()
        self._journal.start(self._identity, kept)
        self._rejects = open_without_links(self._folder / "rejects", "r+b" if kept else "w+b")
        self._rejects_mark = kept[-1]["rejects"] if kept else [0, 0]
        self._rejects.truncate(self._rejects_mark[0])
        self._rejects.seek(self._rejects_mark[0])

    def _resume(self, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the leading lines that match the files on disk, and open the spools at the last of these lines."""
        try:
            seals = {line["shard"] - 1: line["finished"][0] for line in lines if line["finished"]}
            for shard in range(lines[-1]["shard"] if lines else 0):
                if not self._is_whole(shard, seals[shard]):
                    lines = [line for line in lines if line["shard"] <= shard]
                    break
            kept = self._verified(lines)
        except (StorageError, KeyError, TypeError, ValueError):  # a malformed journal, or missing files
            return []
        if kept:
            self.resumed = True
            self._shard, self.totals = kept[-1]["shard"], Totals.from_dict(kept[-1]["totals"])
            self._finished = [seals[shard] for shard in range(self._shard)]
        return kept

    def _is_whole(self, shard: int, seals: list[str]) -> bool:
        """Return True if the files of a finished shard, renamed or not, are complete and undamaged."""
        try:
            for key, seal in enumerate(seals):
                name, final = _spool_name(key, shard), self.names.name(key, shard)

                def path_of(suffix: str, name: str = name, final: Path = final) -> Path:
                    made = self._folder / f"{name}{suffix}"
                    if made.is_symlink():
                        raise DataError(f"{made} is a link, and nothing here was written as one. Remove it.")
                    return made if os.path.lexists(made) else dataset_file(final, suffix)

                check_finished(path_of, seal, self._tokenizer.to_bytes())
        except (LmtrainError, OSError):
            return False
        return len(seals) == len(self.names.keys)

    def _is_publishable(self, line: dict[str, Any]) -> bool:
        """Return True if everything that an earlier run had only to rename is undamaged.

        Raise DataError if there is damage and some files are renamed already.
        """
        made = self._folder / "rejects"
        whole = all(self._is_whole(shard, seals) for shard, seals in enumerate(line["publish"]))
        if line["rejects"][0] or made.exists():
            path = made if made.exists() else self._rejects_path
            whole = whole and _ends(path, [line["rejects"]]) == 1 and path.stat().st_size == line["rejects"][0]
        self._shard = line["shard"]
        if whole or all((self._folder / f"{_spool_name(key, shard)}.idx").exists() for key, shard in self._all()):
            return whole
        raise DataError(
            f"What was left to rename to {self.names.prefix} was damaged after it was written, and some of it has its "
            f"name already. Remove {self._folder} and what there is of {self.names.prefix}, and run the command again."
        )

    def _verified(self, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the journal lines, oldest first, that the files match, and leave the last line's shard open."""
        for shard in sorted({line["shard"] for line in lines}, reverse=True):
            before = [line for line in lines if line["shard"] < shard]
            current = [line for line in lines if line["shard"] == shard]
            self._shard = shard
            self._spools = self._new_spools(empty=False)
            marks = [[SpoolState.from_dict(line["marks"][k]) for line in current] for k in range(len(self.names.keys))]
            held = [spool.rewind(of_key) for spool, of_key in zip(self._spools, marks, strict=True)]
            current = current[: min(held)]
            current = current[: _ends(self._folder / "rejects", [line["rejects"] for line in current])]
            if current:
                for spool, of_key, count in zip(self._spools, marks, held, strict=True):
                    if count > len(current):  # another key's files, or the rejects, are valid for fewer lines
                        spool.rewind(of_key[: len(current)])
                return before + current
            for spool in self._spools:
                spool.close()
        return []

    def _new_spools(self, empty: bool = True) -> list[DatasetSpool]:
        names, shard = self.names, self._shard
        return [
            DatasetSpool(self._folder, _spool_name(k, shard), names.name(k, shard), names.dtype, empty=empty)
            for k in range(len(names.keys))
        ]

    def _close(self) -> None:
        for spool in self._spools:
            spool.close()
        self._journal.close()
        self._rejects.close()

    # ---- shards

    def _next_shard(self) -> None:
        self._finished.append(self._finish_shard())
        self._shard += 1
        self._spools = self._new_spools()
        self.totals.shard_text_bytes = [0] * len(self.names.keys)

    def _finish_shard(self) -> list[str | None]:
        """Complete the files of all keys and sync them to disk; return their sidecars' hashes."""
        about = {
            "tokenizer_fingerprint": self._tokenizer.fingerprint,
            "vocab_size": self._tokenizer.vocab_size,
            "eod_id": self._tokenizer.eod_id,
        }
        for spool, num_bytes in zip(self._spools, self.totals.shard_text_bytes, strict=True):
            spool.finish(about | {"num_bytes": num_bytes}, self._tokenizer.to_bytes())
        began = time.perf_counter()
        for spool in self._spools:
            spool.sync()
        self.sync_seconds += time.perf_counter() - began
        return [spool.sidecar_sha256 for spool in self._spools]


def _ends(path: Path, marks: list[list[int]]) -> int:
    """Return how many of these marks (size, CRC-32C), oldest first, match the file."""
    at = crc = 0
    try:
        with open_without_links(path, "rb") as file:
            for number, (size, wanted) in enumerate(marks):
                while at < size and (data := file.read(min(_READ_BYTES, size - at))):
                    at, crc = at + len(data), crc32c(data, crc)
                if at != size or crc != wanted:
                    return number
    except OSError:
        return 0
    return len(marks)


def _spool_name(key: int, shard: int) -> str:
    return f"{key}-{shard:05d}"
