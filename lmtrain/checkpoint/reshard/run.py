"""Writes a checkpoint's tensors into other files, cut in another way: without a device, without its size in memory.

Called by the command line with the files that are wanted; knows no layouts. An attempt works in a folder beside its
output and keeps a journal there: started again after a kill it goes on, and writes the same bytes. Torch-free.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock
from typing import Any

import numpy as np

from lmtrain.checkpoint.contents import Contents
from lmtrain.checkpoint.disk.boxes import Box, cut, ends, intersect, runs, whole
from lmtrain.checkpoint.disk.format import (
    BLOCK_BYTES,
    ITEM_BYTES,
    MANIFEST,
    FileEntry,
    Manifest,
    blocks_file,
    encode_manifest,
)
from lmtrain.checkpoint.disk.hashed import encode_blocks, write_hashed
from lmtrain.checkpoint.disk.tensor_file import PieceSpec, tensors_of
from lmtrain.checkpoint.reshard.targets import SLACK_BYTES, Limits, Report, Target, WorkFolder, place
from lmtrain.checkpoint.store import check_room
from lmtrain.errors import CheckpointError, DataError, LmtrainError, OutputError, UsageError
from lmtrain.runfolder.names import step_from_name
from lmtrain.runtime.files.files import (
    folder_lock,
    fsync_dir,
    open_regular,
    parse_json,
    read_errors,
    remove,
    storage_errors,
)
from lmtrain.runtime.processes.faults import fault_point

MAX_JOURNAL_BYTES = 1 << 30
_MAX_LINE_BYTES = 16 << 20
Done = dict[str, dict[int, bytes]]  # file -> block -> digest
SEGMENT_BYTES = 64 << 20  # of a tensor, between two lines of the journal
CopyJob = tuple[str, Box]  # of a named tensor
Files = Mapping[str, Sequence[PieceSpec]]  # by name, in the order in which each holds them


class Journal:
    def __init__(self, path: Path, key: str) -> None:
        """`key` names the work; the journal of other work is not read."""
        self.path, self._first = path, {"format": "lmtrain reshard journal", "version": 2, "key": key}

    def read(self, num_blocks: Mapping[str, int]) -> Done | None:
        """Return the blocks that were on disk; None if the journal is of other work or of files with other blocks."""
        done: Done = {}
        try:
            lines = self._lines()
            if next(lines, None) != self._first:
                return None
            for line in lines:
                for file, found in line["blocks"].items():
                    for index, digest in found.items():
                        if not (index.isdecimal() and int(index) < num_blocks[file] and len(digest) == 64):
                            return None
                        done.setdefault(file, {})[int(index)] = bytes.fromhex(digest)
        except (LmtrainError, KeyError, TypeError, ValueError, AttributeError):
            return None
        return done

    def _lines(self) -> Iterator[Any]:
        with read_errors(self.path):
            fd, size = open_regular(self.path, follow_links=False)
            with open(fd, "rb") as file:
                if size > MAX_JOURNAL_BYTES:
                    raise DataError(f"{self.path} is larger than any journal.")
                while (line := file.readline(_MAX_LINE_BYTES)).endswith(b"\n"):  # because: what ends in none is torn
                    yield parse_json(line, self.path)

    def begin(self) -> None:
        self._write(self._first, os.O_TRUNC)

    def trim(self) -> None:
        """Cut a torn line off, so that the next one begins at a line's beginning."""
        with open(self.path, "r+b") as file:
            file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))

    def add(self, digests: Mapping[str, Mapping[int, bytes]]) -> None:
        blocks = {file: {str(index): d.hex() for index, d in found.items()} for file, found in digests.items()}
        self._write({"blocks": blocks}, os.O_APPEND)

    def _write(self, value: dict[str, Any], mode: int) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | mode, 0o666)
        with open(fd, "wb") as file:
            file.write(json.dumps(value, separators=(",", ":")).encode() + b"\n")


@dataclass(frozen=True)
class Resharded:
    path: Path
    num_files: int
    num_bytes: int
    earlier_bytes: int
    was_there: bool = False  # an earlier attempt had finished


class Attempt:
    """One try at a piece of work, in a folder of its own that nobody else is in."""

    def __init__(
        self, contents: Contents, work: WorkFolder, targets: Mapping[str, Target], key: str, limits: Limits,
        report: Report,
    ) -> None:  # fmt: skip
        self.contents, self.work, self.targets, self.limits = contents, work, targets, limits
        self.places = place(targets)
        self.journal = Journal(work.journal, key)
        self._total = sum(math.prod(t.shape) * ITEM_BYTES[t.dtype] for t in contents.manifest.tensors.values())
        self._done = self._earlier = 0
        self._report, self._lock, self._stop = report, Lock(), Event()

    def run(self, state: Mapping[str, Any], overwrite: bool) -> Resharded:
        self._take_up()
        left = [parts for segment in segments(self.contents.manifest) if (parts := [*self._left(segment)])]
        todo = sum(box.volume * self._item(name) for parts in left for name, box in parts)
        self._done = self._earlier = self._total - todo
        self._advance(0)
        self._copy(left)
        assert all(target.is_whole for target in self.targets.values())
        num_bytes = self._finish(state)
        self.work.publish(overwrite)
        return Resharded(self.work.output, len(self.targets), num_bytes, self._earlier)

    def _take_up(self) -> None:
        """Keep the blocks that an earlier attempt has left and that still are what it wrote; else an empty folder."""
        folder = self.work.files
        done = self.journal.read({name: target.num_blocks for name, target in self.targets.items()})
        is_begun = not folder.is_symlink() and folder.is_dir() and all(t.is_begun for t in self.targets.values())
        if done is None or not is_begun:
            done = {}
            remove(self.journal.path)  # because: it must not outlive the files it tells of
            remove(folder)
            check_room(self.work.output.parent, num_bytes_of(self.targets) + SLACK_BYTES)
            folder.mkdir()
        else:
            self.journal.trim()
            self._keep(done)
        for target in self.targets.values():
            target.begin()
        if not done:  # because: a journal tells that all files have been begun
            self.journal.begin()

    def _keep(self, done: Done) -> None:
        blocks = [(self.targets[file], *block) for file, found in done.items() for block in found.items()]
        with ThreadPoolExecutor(self.limits.workers, "reshard") as pool:
            held = pool.map(lambda block: block[0].holds(block[1], block[2]), blocks)
            for (target, index, digest), is_held in zip(blocks, held, strict=True):
                if is_held:
                    target.keep(index, digest)

    def _left(self, segment: Sequence[CopyJob]) -> Iterator[CopyJob]:
        """Yield what is to be copied of a segment, in parts that fit into memory: all that touches a block not kept.

        Another part's share of such a block lies where an earlier attempt put it, and who knows what it is now.
        """
        for name, box in segment:
            item = self._item(name)
            for part in cut(box, self.limits.part_bytes // item):
                if not all(
                    target.keeps(start + first * item, (last + 1 - first) * item)
                    for target, held, start in self.places[name]
                    if (common := intersect(held, part)) is not None
                    for first, last in [ends(common.relative_to(held.offset), held.shape)]
                ):
                    yield name, part

    def _copy(self, left: Sequence[Sequence[CopyJob]]) -> None:
        """Workers copy segments; this thread brings to disk what they have written, and says so in the journal."""
        finished: SimpleQueue[Future[Done]] = SimpleQueue()
        with ThreadPoolExecutor(self.limits.workers, "reshard") as pool:
            try:
                for parts in left:
                    pool.submit(self._copy_parts, parts).add_done_callback(finished.put)
                num_left = len(left)
                while num_left:
                    batch = [finished.get().result()]
                    while not finished.empty():  # because: nobody else takes any
                        batch.append(finished.get().result())
                    for file in sorted({file for digests in batch for file in digests}):
                        self.targets[file].sync()
                    for digests in batch:
                        self.journal.add(digests)
                        fault_point("reshard.journal")
                    num_left -= len(batch)
            except BaseException:
                self._stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _copy_parts(self, parts: Sequence[CopyJob]) -> Done:
        """Copy parts; return the files that were written to, each with the hash blocks that became whole."""
        found: Done = {}
        for name, box in parts:
            if self._stop.is_set():
                break
            self._copy_box(name, box, found)
            self._advance(box.volume * self._item(name))
        fault_point("reshard.segment")
        return found

    def _copy_box(self, name: str, box: Box, found: Done) -> None:
        bits = self.contents.read_bits(name, box)
        for target, held, start in self.places[name]:
            if (common := intersect(held, box)) is not None:
                mine, digests = common.relative_to(held.offset), found.setdefault(target.path.name, {})
                values = bits[common.relative_to(box.offset).slices()]
                for first, run in runs(mine, held.shape):
                    flat = np.ascontiguousarray(values[run.relative_to(mine.offset).slices()]).reshape(-1)
                    digests |= target.write(start + first * bits.itemsize, flat.view(np.uint8).data)
                with self._lock:
                    target.digests |= digests

    def _finish(self, state: Mapping[str, Any]) -> int:
        """Write everything but the tensors, the manifest last; returns the size of all files."""
        folder, manifest = self.work.files, self.contents.manifest
        for name in os.listdir(folder):
            if name not in self.targets:  # because: an earlier attempt may have come this far
                remove(folder / name)
        entries: dict[str, FileEntry] = {}
        for name, target in self.targets.items():
            entries[name], digests = target.entry()
            listing = blocks_file(name)
            entries[listing], _ = write_hashed(folder / listing, [encode_blocks(entries[name], digests)])
            target.sync()
        for name in manifest.files:
            if not name.startswith("rank_"):  # all but tensor files and their lists of blocks
                entries[name], _ = write_hashed(folder / name, [self.contents.read_file(name)])
        fault_point("reshard.finish")
        tensors = tensors_of([target.pieces for target in self.targets.values()])
        text = encode_manifest(Manifest(manifest.step, entries, tensors, dict(state)))
        write_hashed(folder / MANIFEST, [text])
        fsync_dir(folder)
        return len(text) + sum(entry.size for entry in entries.values())

    def _item(self, name: str) -> int:
        """Return the bytes of one element of a tensor."""
        return ITEM_BYTES[self.contents.tensor(name).dtype]

    def _advance(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            self._report(self._done, self._total, self._earlier)


def key_of(manifest: Manifest, files: Files) -> str:
    """Names this work: which tensors, cut how, in which steps."""
    wanted = {
        name: [[s.name, s.dtype, s.global_shape, s.box.offset, s.box.shape] for s in specs]
        for name, specs in files.items()
    }
    return hashlib.sha256(json.dumps([manifest.digest, SEGMENT_BYTES, BLOCK_BYTES, wanted]).encode()).hexdigest()


def num_bytes_of(targets: Mapping[str, Target]) -> int:
    return sum(target.size for target in targets.values())


def segments(manifest: Manifest) -> Iterator[list[CopyJob]]:
    """Yield all tensors in the order in which they are stored, as lists of copy jobs of similar size."""
    current: list[CopyJob] = []
    size = 0
    for name, tensor in manifest.tensors.items():
        item = ITEM_BYTES[tensor.dtype]
        for box in cut(whole(tensor.shape), SEGMENT_BYTES // item):
            if current and size + box.volume * item > SEGMENT_BYTES:
                yield current
                current, size = [], 0
            current.append((name, box))
            size += box.volume * item
    if current:
        yield current


def reshard(
    contents: Contents,
    output: Path,
    files: Files,
    state: Mapping[str, Any],
    limits: Limits | None = None,
    *,
    overwrite: bool = False,
    report: Report = lambda done, total, earlier: None,
) -> Resharded:
    """Write a checkpoint as these files, into the folder `output`."""
    limits, manifest = limits or Limits(), contents.manifest
    check_output(contents.path, output, manifest.step)
    key, work = key_of(manifest, files), WorkFolder(output)
    state = {**state, "resharded": {"from": manifest.digest, "key": key}}
    targets = {name: Target(work.files / name, specs) for name, specs in files.items()}
    # because: a gap, or a manifest that is too long, is better found before hours of work
    tensors = tensors_of([target.pieces for target in targets.values()])
    entries = {name: FileEntry(target.size, "0" * 64) for name, target in targets.items()}
    entries |= {blocks_file(name): entry for name, entry in entries.items()}
    encode_manifest(Manifest(manifest.step, entries, tensors, state))
    if not _is_ours(output, key):
        work.check_free(overwrite)
    with storage_errors(output, "Resharding to", num_bytes_of(targets)), folder_lock(work.path):
        work.bring_back()
        try:
            if _is_ours(output, key):
                damages = Contents(output).damages()
                if not damages:
                    work.clean_up()
                    return Resharded(output, len(targets), num_bytes_of(targets), 0, was_there=True)
                if not overwrite:
                    raise OutputError(f"{output} is what this command has made, and damaged since: {damages[0]} "
                                      "Make it again with --overwrite.")  # fmt: skip
            work.check_free(overwrite)
            return Attempt(contents, work, targets, key, limits, report).run(state, overwrite)
        except BaseException as error:
            # because: what came from a damaged source is of no use, and neither is a beginning of nothing
            if isinstance(error, CheckpointError) or not work.journal.exists():
                work.clean_up()
            raise


def check_output(source: Path, output: Path, step: int) -> None:
    ours, theirs = output.resolve(), source.resolve()
    if ours == theirs or theirs in ours.parents or ours in theirs.parents:
        raise UsageError(
            f"--output {output} is, holds or lies in {source}, which stays as it is. Choose another folder."
        )
    if step_from_name(output.name) not in (None, step):
        raise UsageError(f"--output {output} is the name of another step than {step}. Choose another name.")


def _is_ours(output: Path, key: str) -> bool:
    """Return whether an earlier attempt had finished the output and only its cleaning up was left."""
    if not (output / MANIFEST).is_file():
        return False
    try:
        contents = Contents(output)
        found = contents.manifest.state.get("resharded")
        sizes = {name: os.lstat(output / name).st_size for name in contents.manifest.files}
    except (LmtrainError, OSError):
        return False
    said = {name: entry.size for name, entry in contents.manifest.files.items()}
    return isinstance(found, dict) and found.get("key") == key and sizes == said
