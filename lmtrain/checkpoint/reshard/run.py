"""Writes a checkpoint's tensors into other files, cut in another way: without a device, without its size in memory.

Called by the command line with the files that are wanted; knows no layouts. Tensors go through memory in parts of some
MiB. Every byte read is verified and every byte written is hashed. An attempt works in a folder beside its output,
OUTPUT.resharding, and keeps a journal there: started again after a kill it goes on, and gives the same bytes.
Torch-free.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Lock
from typing import Any

import numpy as np

from lmtrain.checkpoint.contents import Contents
from lmtrain.checkpoint.disk.boxes import Box, intersect, whole
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
from lmtrain.checkpoint.disk.tensor_file import BlockSpec
from lmtrain.checkpoint.reshard.journal import Done, Journal
from lmtrain.checkpoint.reshard.targets import Target, place, runs
from lmtrain.checkpoint.save.commit import check_room, tensors_of
from lmtrain.checkpoint.store import step_of
from lmtrain.errors import CheckpointError, LmtrainError, OutputError, UsageError
from lmtrain.runtime.faults import fault_point
from lmtrain.runtime.files import folder_lock, fsync_dir, storage_errors
from lmtrain.units import format_bytes

SEGMENT_BYTES = 64 << 20  # of a tensor, between two lines of the journal
PART_BYTES = 32 << 20  # of a tensor, in memory at once
MIN_PART_BYTES = 1 << 20
SLACK_BYTES = 16 << 20  # manifest, lists of blocks, and the file system's own records
BASE_BYTES = 128 << 20  # because: Python with numpy takes about 60 MiB, and a manifest some tens
DEFAULT_MEMORY_BYTES = 2 << 30
Files = Mapping[str, Sequence[BlockSpec]]
Part = tuple[str, Box]  # of a named tensor


@dataclass(frozen=True)
class Limits:
    """How much memory the whole process may take, and how that is shared."""

    memory_bytes: int = DEFAULT_MEMORY_BYTES
    workers: int = 1

    def __post_init__(self) -> None:
        least = BASE_BYTES + self.workers * _worker_bytes(MIN_PART_BYTES) + 4 * BLOCK_BYTES
        if self.workers < 1:
            raise UsageError(f"--workers {self.workers} does no work. Use 1 or more.")
        if self.memory_bytes < least:
            raise UsageError(
                f"--max-memory {format_bytes(self.memory_bytes)} is too little for {self.workers} workers. "
                f"Use {format_bytes(least)} or more, or fewer workers."
            )

    @property
    def num_cached_blocks(self) -> int:
        return (self.memory_bytes - BASE_BYTES) // 4 // BLOCK_BYTES

    @property
    def part_bytes(self) -> int:
        rest = (self.memory_bytes - BASE_BYTES - self.num_cached_blocks * BLOCK_BYTES) // self.workers
        return max(MIN_PART_BYTES, min(PART_BYTES, (rest - _worker_bytes(0)) // 2))


def _worker_bytes(part_bytes: int) -> int:
    """A part, its copy cut for one file, a block read and a block written."""
    return 2 * part_bytes + 2 * BLOCK_BYTES


@dataclass(frozen=True)
class Progress:
    done_bytes: int
    total_bytes: int
    earlier_bytes: int  # of those, done by an attempt before this one


@dataclass(frozen=True)
class Resharded:
    path: Path
    num_files: int
    num_bytes: int
    earlier_bytes: int
    was_there: bool = False  # an earlier attempt had finished


def reshard(
    contents: Contents,
    output: Path,
    files: Files,
    state: Mapping[str, Any],
    limits: Limits | None = None,
    *,
    overwrite: bool = False,
    progress: Callable[[Progress], None] = lambda now: None,
) -> Resharded:
    """Write a checkpoint as these files, into the folder `output`."""
    limits, manifest = limits or Limits(), contents.manifest
    check_output(contents.path, output, manifest.step)
    key = _key(manifest, files)
    state = {**state, "resharded": {"from": manifest.digest, "key": key}}
    targets = {name: Target(_files(output) / name, specs) for name, specs in files.items()}
    tensors_of([target.pieces for target in targets.values()])  # because: a gap is better found before hours of work
    if not _is_ours(output, key):
        _check_free(output, overwrite)
    with storage_errors(output, "Resharding to", _num_bytes(targets)), folder_lock(_work(output)):
        _bring_back(output)
        if _is_ours(output, key):
            _clean_up(output)
            return Resharded(output, len(targets), _num_bytes(targets), 0, was_there=True)
        attempt = _Attempt(contents, output, targets, key, limits, progress)
        try:
            return attempt.run(state, overwrite)
        except BaseException as error:
            # because: what a damaged source gave is of no use, and neither is a beginning of nothing
            if isinstance(error, CheckpointError) or not attempt.journal.path.exists():
                _clean_up(output)
            raise


def check_output(source: Path, output: Path, step: int) -> None:
    ours, theirs = output.resolve(), source.resolve()
    if ours == theirs or theirs in ours.parents or ours in theirs.parents:
        raise UsageError(
            f"--output {output} is, holds or lies in {source}, which stays as it is. Choose another folder."
        )
    if step_of(output.name) not in (None, step):
        raise UsageError(f"--output {output} is the name of another step than {step}. Choose another name.")


def _work(output: Path) -> Path:
    return output.with_name(f"{output.name}.resharding")


def _aside(output: Path) -> Path:
    return _work(output) / "replaced"


def _files(output: Path) -> Path:
    return _work(output) / "files"


def _key(manifest: Manifest, files: Files) -> str:
    """Names this work: which tensors, cut how, in which steps."""
    plan = {name: [[s.name, s.dtype, s.global_shape, s.box.offset, s.box.shape] for s in files[name]] for name in files}
    return hashlib.sha256(json.dumps([manifest.digest, SEGMENT_BYTES, BLOCK_BYTES, plan]).encode()).hexdigest()


def _is_ours(output: Path, key: str) -> bool:
    """Whether an attempt had come to its end but for its cleaning up."""
    if not (output / MANIFEST).is_file():
        return False
    try:
        contents = Contents(output)
        found = contents.manifest.state.get("resharded")
        sizes = {name: os.lstat(output / name).st_size for name in contents.manifest.files}
    except (LmtrainError, OSError):
        return False
    is_same = isinstance(found, dict) and found.get("key") == key
    return is_same and sizes == {name: entry.size for name, entry in contents.manifest.files.items()}


def _check_free(output: Path, overwrite: bool) -> None:
    if not os.path.lexists(output):
        return
    if not overwrite:
        raise OutputError(f"{output} exists. Choose another output, or replace it with --overwrite.")
    is_checkpoint = (output / MANIFEST).is_file() and not output.is_symlink()
    if not is_checkpoint and not (output.is_dir() and not os.listdir(output)):
        raise OutputError(f"{output} is no checkpoint, so it is not replaced. Choose another output.")


def _bring_back(output: Path) -> None:
    """A checkpoint that was moved aside for one that never took its place."""
    if _aside(output).exists() and not os.path.lexists(output):
        os.rename(_aside(output), output)


def _clean_up(output: Path) -> None:
    shutil.rmtree(_work(output), ignore_errors=True)


class _Attempt:
    """One try at a piece of work, in a folder of its own that nobody else is in."""

    def __init__(
        self,
        contents: Contents,
        output: Path,
        targets: Mapping[str, Target],
        key: str,
        limits: Limits,
        progress: Callable[[Progress], None],
    ) -> None:
        self.contents, self.output, self.targets, self.limits = contents, output, targets, limits
        self.places = place(targets)
        self.segments = list(segments(contents.manifest))
        self.journal = Journal(_work(output) / "journal.jsonl", key)
        self._total, self._done, self._earlier = sum(map(self._num_bytes, self.segments)), 0, 0
        self._show, self._lock, self._stop = progress, Lock(), Event()

    def run(self, state: Mapping[str, Any], overwrite: bool) -> Resharded:
        done = self._take_up()
        self._progress(0)
        self._copy([number for number in range(len(self.segments)) if number not in done])
        assert all(target.is_whole for target in self.targets.values())
        num_bytes = self._finish(state)
        self._publish(overwrite)
        return Resharded(self.output, len(self.targets), num_bytes, self._earlier)

    def _take_up(self) -> Done:
        """The segments that an earlier attempt has left, all of its files being there; else an empty folder."""
        done, folder = self.journal.read(), _files(self.output)
        sizes = [target.path.stat().st_size if target.path.is_file() else -1 for target in self.targets.values()]
        if done is None or not self._fits(done) or sizes != [target.size for target in self.targets.values()]:
            done = {}
            self.journal.path.unlink(missing_ok=True)  # because: it must not outlive the files it tells of
            shutil.rmtree(folder, ignore_errors=True)
            check_room(self.output.parent, _num_bytes(self.targets) + SLACK_BYTES)
            folder.mkdir()
        else:
            self.journal.trim()
        for target in self.targets.values():
            target.begin()
        if not done:  # because: a journal tells that all files have been begun
            self.journal.begin()
        for number, digests in done.items():
            for name, box in self.segments[number]:
                self._pass(name, box)
            for file, found in digests.items():
                self.targets[file].digests |= found
        self._done = self._earlier = sum(self._num_bytes(self.segments[number]) for number in done)
        return done

    def _fits(self, done: Done) -> bool:
        numbers = range(len(self.segments))
        files = {file for digests in done.values() for file in digests}
        return all(number in numbers for number in done) and files <= self.targets.keys()

    def _pass(self, name: str, box: Box) -> None:
        item = ITEM_BYTES[self.contents.tensor(name).dtype]
        for target, held, start in self.places[name]:
            common = intersect(held, box)
            if common is not None:
                for first, run in runs(common.relative_to(held.offset), held.shape):
                    target.passed(start + first * item, run.volume * item)

    def _copy(self, numbers: Sequence[int]) -> None:
        """Workers copy segments; this thread brings to disk what they have written, and says so in the journal."""
        finished: SimpleQueue[Future[tuple[int, dict[str, dict[int, bytes]]]]] = SimpleQueue()
        with ThreadPoolExecutor(self.limits.workers, "reshard") as pool:
            try:
                for number in numbers:
                    pool.submit(self._copy_segment, number).add_done_callback(finished.put)
                left = len(numbers)
                while left:
                    batch = [finished.get().result()]
                    while True:
                        try:
                            batch.append(finished.get_nowait().result())
                        except Empty:
                            break
                    for file in sorted({file for _, digests in batch for file in digests}):
                        self.targets[file].sync()
                    for number, digests in batch:
                        self.journal.add(number, digests)
                        fault_point("reshard.journal")
                    left -= len(batch)
            except BaseException:
                self._stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _copy_segment(self, number: int) -> tuple[int, dict[str, dict[int, bytes]]]:
        """Gives the files that were written to, each with the blocks that became whole."""
        found: dict[str, dict[int, bytes]] = {}
        for name, box in self.segments[number]:
            item = ITEM_BYTES[self.contents.tensor(name).dtype]
            for part in cut(box, self.limits.part_bytes // item):
                if self._stop.is_set():
                    break
                self._copy_part(name, part, item, found)
                self._progress(part.volume * item)
        fault_point("reshard.segment")
        return number, found

    def _copy_part(self, name: str, part: Box, item: int, found: dict[str, dict[int, bytes]]) -> None:
        bits = self.contents.read_bits(name, part)
        for target, held, start in self.places[name]:
            common = intersect(held, part)
            if common is not None:
                mine, digests = common.relative_to(held.offset), found.setdefault(target.path.name, {})
                values = bits[common.relative_to(part.offset).slices()]
                for first, run in runs(mine, held.shape):
                    flat = np.ascontiguousarray(values[run.relative_to(mine.offset).slices()]).reshape(-1)
                    digests |= target.write(start + first * item, flat.view(np.uint8).data)
                with self._lock:
                    target.digests |= digests

    def _finish(self, state: Mapping[str, Any]) -> int:
        """Everything but the tensors, the manifest last; gives the size of all."""
        folder, manifest = _files(self.output), self.contents.manifest
        for name in os.listdir(folder):
            if name not in self.targets:  # because: an earlier attempt may have come this far
                os.unlink(folder / name)
        entries: dict[str, FileEntry] = {}
        for name, target in self.targets.items():
            entries[name], digests = target.entry()
            listing = blocks_file(name)
            entries[listing], _ = write_hashed(folder / listing, [encode_blocks(entries[name], digests)])
            target.sync()
        for name in extra_files(manifest):
            entries[name], _ = write_hashed(folder / name, [self.contents.read_file(name)])
        fault_point("reshard.finish")
        tensors = tensors_of([target.pieces for target in self.targets.values()])
        text = encode_manifest(Manifest(manifest.step, entries, tensors, dict(state)))
        write_hashed(folder / MANIFEST, [text])
        fsync_dir(folder)
        return len(text) + sum(entry.size for entry in entries.values())

    def _publish(self, overwrite: bool) -> None:
        fault_point("reshard.publish")
        if overwrite and os.path.lexists(self.output):
            os.rename(self.output, _aside(self.output))
        try:
            os.rename(_files(self.output), self.output)
        except BaseException:
            _bring_back(self.output)
            raise
        fsync_dir(self.output.parent)
        fault_point("reshard.cleanup")
        _clean_up(self.output)

    def _num_bytes(self, segment: Sequence[Part]) -> int:
        return sum(box.volume * ITEM_BYTES[self.contents.tensor(name).dtype] for name, box in segment)

    def _progress(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            self._show(Progress(self._done, self._total, self._earlier))


def _num_bytes(targets: Mapping[str, Target]) -> int:
    return sum(target.size for target in targets.values())


def extra_files(manifest: Manifest) -> list[str]:
    """All but tensor files and their lists of blocks."""
    return [name for name in manifest.files if not name.startswith("rank_")]


def segments(manifest: Manifest) -> Iterator[list[Part]]:
    """All tensors in the order in which they are stored, in parts of about the same size."""
    current: list[Part] = []
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


def cut(box: Box, most: int) -> Iterator[Box]:
    """Parts of at most so many elements: whole rows where they fit, so that parts are runs of the stored bytes."""
    if box.volume <= max(most, 1):
        if box.volume:
            yield box
        return
    axis = next(i for i, n in enumerate(box.shape) if n > 1)
    row = box.volume // box.shape[axis]
    step = max(1, most // row)
    for at in range(0, box.shape[axis], step):
        offset = (*box.offset[:axis], box.offset[axis] + at, *box.offset[axis + 1 :])
        shape = (*box.shape[:axis], min(step, box.shape[axis] - at), *box.shape[axis + 1 :])
        yield from cut(Box(offset, shape), most)
