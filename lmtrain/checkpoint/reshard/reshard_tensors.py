"""Write a checkpoint's tensors into other files, split differently, in bounded memory and without a device. Torch-free.

Called by the command line with the list of files to write, and by the merge of several checkpoints; independent of
layouts. An attempt works in a folder beside its output and keeps a journal there: restarted after a kill it continues,
and writes the same bytes.
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
from typing import Any, Protocol

import numpy as np

from lmtrain.checkpoint.disk.block_hashed_file import encode_blocks, write_hashed
from lmtrain.checkpoint.disk.checkpoint_format import (
    BLOCK_BYTES,
    ITEM_BYTES,
    MANIFEST,
    FileEntry,
    Manifest,
    TensorEntry,
    blocks_file,
    encode_manifest,
)
from lmtrain.checkpoint.disk.safetensors_file import Array, PieceSpec, merge_pieces
from lmtrain.checkpoint.disk.tensor_slice_geometry import (
    Box,
    contiguous_runs,
    first_and_last_offset,
    full_box,
    intersect,
    split_box,
)
from lmtrain.checkpoint.find_and_prune import check_free_space
from lmtrain.checkpoint.read_verified_contents import Contents
from lmtrain.checkpoint.reshard.journal import DoneBlocks, Journal
from lmtrain.checkpoint.reshard.write_target_files import (
    SLACK_BYTES,
    Limits,
    Report,
    TargetFile,
    WorkFolder,
    place_pieces,
)
from lmtrain.errors import CheckpointError, LmtrainError, OutputError, UsageError, way
from lmtrain.runfolder.file_names import step_from_name
from lmtrain.runtime.files.atomic_files import folder_lock, fsync_dir, remove, storage_errors
from lmtrain.runtime.processes.fault_injection import fault_point

SEGMENT_BYTES = 64 << 20  # bytes of tensors that are copied between two lines of the journal
CopyJob = tuple[str, Box]  # a tensor's name and the part of it to copy
FileSpecs = Mapping[str, Sequence[PieceSpec]]  # file name -> its pieces in order


class Source(Protocol):
    """The tensors and extra files from which a checkpoint is written: those of another checkpoint (`Contents`), or the
    mean of several.
    """

    @property
    def manifest(self) -> Manifest: ...

    @property
    def identity(self) -> str:
        """A digest that is another one if any number of the tensors or any extra file is another."""
        ...

    @property
    def folders(self) -> Sequence[Path]:
        """The checkpoints that are read, which the output must not touch."""
        ...

    @property
    def extra_names(self) -> list[str]: ...

    def tensor(self, name: str) -> TensorEntry: ...

    def read_bits(self, name: str, box: Box | None = None) -> Array:
        """Return the elements of a part of a tensor as integers that hold their bits."""
        ...

    def read_file(self, name: str) -> bytes: ...


@dataclass(frozen=True)
class Purpose:
    """The command that writes a checkpoint, as its work folder, its messages and the new checkpoint's state name it."""

    record: str  # key of the entry in the new checkpoint's state
    suffix: str  # of the work folder's name
    action: str  # the beginning of a message about a failed write; the output follows


RESHARD = Purpose("resharded", "resharding", "Resharding to")
MERGE = Purpose("merged", "merging", "Merging into")


@dataclass(frozen=True)
class WrittenCheckpoint:
    """The checkpoint that `reshard` or `write_checkpoint` has written."""

    path: Path
    num_files: int  # tensor files
    num_bytes: int
    earlier_bytes: int  # copied by an earlier attempt and kept
    was_finished: bool = False  # whether an earlier attempt had finished all


class Attempt:
    """An attempt to write a checkpoint, in a locked work folder; continues an earlier attempt if its journal is there.
    """

    def __init__(
        self, source: Source, work: WorkFolder, targets: Mapping[str, TargetFile], key: str, limits: Limits,
        report: Report,
    ) -> None:  # fmt: skip
        self.source, self.work, self.targets, self.limits = source, work, targets, limits
        self.places = place_pieces(targets)
        self.journal = Journal(work.journal, key)
        self._total_bytes = sum(math.prod(t.shape) * ITEM_BYTES[t.dtype] for t in source.manifest.tensors.values())
        self._done_bytes = self._earlier_bytes = 0
        self._report, self._lock, self._stop = report, Lock(), Event()

    def run(self, state: Mapping[str, Any], overwrite: bool) -> WrittenCheckpoint:
        """Copy all parts of tensors that are not copied yet, finish the checkpoint and rename it to the output. `state`
        is the new checkpoint's state; `overwrite` replaces a checkpoint that is the output already.
        """
        self._resume_or_start()
        segments = map(self._remaining_parts, list_segments(self.source.manifest))
        remaining = [parts for segment in segments if (parts := [*segment])]
        todo_bytes = sum(box.volume * self._item_bytes(name) for parts in remaining for name, box in parts)
        self._done_bytes = self._earlier_bytes = self._total_bytes - todo_bytes
        self._report_progress(0)
        self._copy(remaining)
        assert all(target.is_complete for target in self.targets.values())
        num_bytes = self._finish(state)
        self.work.publish(overwrite)
        return WrittenCheckpoint(self.work.output, len(self.targets), num_bytes, self._earlier_bytes)

    def _resume_or_start(self) -> None:
        """Keep the intact hash blocks (4 MiB each) that an interrupted earlier job has written, or start with an empty
        folder if there is none to continue. Then create all tensor files.
        """
        folder = self.work.files
        done = self.journal.read({name: target.num_blocks for name, target in self.targets.items()})
        has_files = not folder.is_symlink() and folder.is_dir() and all(t.has_file for t in self.targets.values())
        if done is None or not has_files:
            done = {}
            remove(self.journal.path)  # because: it must not outlive the files that it lists
            remove(folder)
            check_free_space(self.work.output.parent, total_bytes(self.targets) + SLACK_BYTES)
            folder.mkdir()
        else:
            self.journal.trim()
            self._keep_intact_blocks(done)
        for target in self.targets.values():
            target.create()
        if not done:  # because: a journal implies that all files exist
            self.journal.begin()

    def _keep_intact_blocks(self, done: DoneBlocks) -> None:
        """Keep the hash blocks in `done`, those that the journal lists, if their bytes on disk still have the digests
        listed there. The others are copied again.
        """
        blocks = [(self.targets[file], *block) for file, by_index in done.items() for block in by_index.items()]
        with ThreadPoolExecutor(self.limits.workers, "reshard") as pool:
            results = pool.map(lambda block: block[0].matches_disk(block[1], block[2]), blocks)
            for (target, index, digest), is_intact in zip(blocks, results, strict=True):
                if is_intact:
                    target.keep_block(index, digest)

    def _remaining_parts(self, segment: Sequence[CopyJob]) -> Iterator[CopyJob]:
        """Yield the copy jobs (tensor name, box) that are left of a segment, because the new files do not have their
        data yet. Boxes are split so that each fits into the memory limit.

        Every part that touches a hash block which is not kept is copied, since all bytes of such a block may be wrong.
        """
        for name, box in segment:
            item_bytes = self._item_bytes(name)
            for part in split_box(box, self.limits.part_bytes // item_bytes):
                if not all(
                    target.is_kept(start + first * item_bytes, (last + 1 - first) * item_bytes)
                    for target, piece_box, start in self.places[name]
                    if (overlap := intersect(piece_box, part)) is not None
                    for first, last in [first_and_last_offset(overlap.relative_to(piece_box.offset), piece_box.shape)]
                ):
                    yield name, part

    def _copy(self, remaining: Sequence[Sequence[CopyJob]]) -> None:
        """Copy the remaining segments, which are lists of copy jobs (tensor name, box), in worker threads. Meanwhile
        the calling thread syncs the files, and then records the completed hash blocks in the journal.
        """
        finished: SimpleQueue[Future[DoneBlocks]] = SimpleQueue()
        with ThreadPoolExecutor(self.limits.workers, "reshard") as pool:
            try:
                for parts in remaining:
                    pool.submit(self._copy_parts, parts).add_done_callback(finished.put)
                num_remaining = len(remaining)
                while num_remaining:
                    batch = [finished.get().result()]
                    while not finished.empty():  # because: no other thread takes results
                        batch.append(finished.get().result())
                    for file in sorted({file for digests in batch for file in digests}):
                        self.targets[file].sync()
                    for digests in batch:
                        self.journal.add(digests)
                        fault_point("reshard.journal")
                    num_remaining -= len(batch)
            except BaseException:
                self._stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _copy_parts(self, parts: Sequence[CopyJob]) -> DoneBlocks:
        """Do the copy jobs `parts`, each (tensor name, box). Return the digests of the hash blocks (4 MiB of a new
        file) that this has completed, by file and block index.
        """
        completed: DoneBlocks = {}
        for name, box in parts:
            if self._stop.is_set():
                break
            self._copy_box(name, box, completed)
            self._report_progress(box.volume * self._item_bytes(name))
        fault_point("reshard.segment")
        return completed

    def _copy_box(self, name: str, box: Box, completed: DoneBlocks) -> None:
        """Copy the part `box` of the tensor `name` into all new files that hold some of it. Add the digests of the hash
        blocks that this completes to `completed`, by file and block index.
        """
        bits = self.source.read_bits(name, box)
        for target, piece_box, start in self.places[name]:
            if (overlap := intersect(piece_box, box)) is not None:
                local, digests = overlap.relative_to(piece_box.offset), completed.setdefault(target.path.name, {})
                values = bits[overlap.relative_to(box.offset).slices()]
                for first, run in contiguous_runs(local, piece_box.shape):
                    flat = np.ascontiguousarray(values[run.relative_to(local.offset).slices()]).reshape(-1)
                    digests |= target.write(start + first * bits.itemsize, flat.view(np.uint8).data)
                with self._lock:
                    target.digests |= digests

    def _finish(self, state: Mapping[str, Any]) -> int:
        """Write the lists of block hashes, the extra files and, last, the manifest with `state`. Return the size of all
        files in bytes.
        """
        folder, manifest = self.work.files, self.source.manifest
        for name in os.listdir(folder):
            if name not in self.targets:  # because: an earlier attempt may have written it
                remove(folder / name)
        entries: dict[str, FileEntry] = {}
        for name, target in self.targets.items():
            entries[name], digests = target.entry()
            listing = blocks_file(name)
            entries[listing], _ = write_hashed(folder / listing, [encode_blocks(entries[name], digests)])
            target.sync()
        for name in self.source.extra_names:
            entries[name], _ = write_hashed(folder / name, [self.source.read_file(name)])
        fault_point("reshard.finish")
        tensors = merge_pieces([target.pieces for target in self.targets.values()])
        text = encode_manifest(Manifest(manifest.step, entries, tensors, dict(state)))
        write_hashed(folder / MANIFEST, [text])
        fsync_dir(folder)
        return len(text) + sum(entry.size for entry in entries.values())

    def _item_bytes(self, name: str) -> int:
        """Return the bytes of one element of a tensor."""
        return ITEM_BYTES[self.source.tensor(name).dtype]

    def _report_progress(self, num_bytes: int) -> None:
        with self._lock:
            self._done_bytes += num_bytes
            self._report(self._done_bytes, self._total_bytes, self._earlier_bytes)


def work_key(identity: str, files: FileSpecs) -> str:
    """Return a digest that identifies a job of copying tensors into new files, so that a killed job is continued only
    by the same one. It depends on the `identity` of the source, the pieces of each new file, and the segment and block
    size.
    """
    layout = {
        name: [[s.name, s.dtype, s.global_shape, s.box.offset, s.box.shape] for s in specs]
        for name, specs in files.items()
    }
    return hashlib.sha256(json.dumps([identity, SEGMENT_BYTES, BLOCK_BYTES, layout]).encode()).hexdigest()


def total_bytes(targets: Mapping[str, TargetFile]) -> int:
    return sum(target.size for target in targets.values())


def list_segments(manifest: Manifest) -> Iterator[list[CopyJob]]:
    """Yield all tensors of a checkpoint as segments of about 64 MiB, in the order of its manifest. A segment is a list
    of copy jobs (tensor name, box).
    """
    current: list[CopyJob] = []
    size = 0
    for name, tensor in manifest.tensors.items():
        item_bytes = ITEM_BYTES[tensor.dtype]
        for box in split_box(full_box(tensor.shape), SEGMENT_BYTES // item_bytes):
            if current and size + box.volume * item_bytes > SEGMENT_BYTES:
                yield current
                current, size = [], 0
            current.append((name, box))
            size += box.volume * item_bytes
    if current:
        yield current


def reshard(
    contents: Contents,
    output: Path,
    files: FileSpecs,
    state: Mapping[str, Any],
    limits: Limits | None = None,
    *,
    overwrite: bool = False,
    report: Report = lambda done, total, earlier: None,
) -> WrittenCheckpoint:
    """Write the tensors of a checkpoint into new files that split them differently, as the checkpoint folder `output`.
    `files` lists the pieces of each new file, `state` is the new checkpoint's state, and `limits`, `overwrite` and
    `report` are as in `write_checkpoint`.
    """
    state = {**state, RESHARD.record: {"from": contents.manifest.digest}}
    return write_checkpoint(
        contents, output, files, state, RESHARD, limits or Limits(), overwrite=overwrite, report=report
    )


def write_checkpoint(
    source: Source,
    output: Path,
    files: FileSpecs,
    state: Mapping[str, Any],
    purpose: Purpose,
    limits: Limits,
    *,
    overwrite: bool,
    report: Report,
) -> WrittenCheckpoint:
    """Write the tensors of `source` as the checkpoint folder `output`; an earlier call that was killed is continued.
    `files` lists the pieces of each new file. `state` is the new checkpoint's state; its entry `purpose.record` also
    gets the key that identifies this job. `limits` bound memory and threads. `overwrite` replaces an existing
    checkpoint. `report` is called with (bytes done, bytes in all, bytes done by the earlier call).
    """
    step = source.manifest.step
    for folder in source.folders:
        refuse_source_as_output(folder, output, step)
    key, work = work_key(source.identity, files), WorkFolder(output, purpose.suffix)
    state = {**state, purpose.record: {**state[purpose.record], "key": key}}
    targets = {name: TargetFile(work.files / name, specs) for name, specs in files.items()}
    # because: a gap, or a manifest that is too large, must be found before hours of work
    tensors = merge_pieces([target.pieces for target in targets.values()])
    entries = {name: FileEntry(target.size, "0" * 64) for name, target in targets.items()}
    entries |= {blocks_file(name): entry for name, entry in entries.items()}
    encode_manifest(Manifest(step, entries, tensors, state))
    if not _is_finished_output(output, purpose, state):
        work.check_places(overwrite)
    with storage_errors(output, purpose.action, total_bytes(targets)), folder_lock(work.path):
        work.restore_replaced()
        try:
            if _is_finished_output(output, purpose, state):
                damages = Contents(output).find_damage()
                if not damages:
                    work.clean_up()
                    return WrittenCheckpoint(output, len(targets), total_bytes(targets), 0, was_finished=True)
                if not overwrite:
                    raise OutputError(f"{output}, made by this command earlier, is damaged: {damages[0]} "
                                      f"Add {way('--overwrite')} to make it again.")  # fmt: skip
            work.check_places(overwrite)
            return Attempt(source, work, targets, key, limits, report).run(state, overwrite)
        except BaseException as error:
            # because: parts of a damaged source are of no use, and without a journal there is nothing to continue
            if isinstance(error, CheckpointError) or not work.journal.exists():
                work.clean_up()
            raise


def refuse_source_as_output(source: Path, output: Path, step: int) -> None:
    """Raise UsageError if `output` is, holds or lies in the checkpoint `source`, or if its name is that of a checkpoint
    of another step than `step`.
    """
    output_path, source_path = output.resolve(), source.resolve()
    if output_path == source_path or source_path in output_path.parents or output_path in source_path.parents:
        raise UsageError(
            f"--output {output} is the folder {source}, is inside it or contains it, but {source} must not change. "
            "Choose another folder."
        )
    if step_from_name(output.name) not in (None, step):
        raise UsageError(
            f"--output {output} is the name of another step; the checkpoint is of step {step}. Choose another name."
        )


def _is_finished_output(output: Path, purpose: Purpose, wanted: Mapping[str, Any]) -> bool:
    """Return whether `output` is already the complete checkpoint that this job is to write, with the state `wanted`: it
    records the same key (see `work_key`) and settings, and all its files have the right size.
    """
    if not (output / MANIFEST).is_file():
        return False
    try:
        contents = Contents(output)
        state = contents.manifest.state
        sizes = {name: os.lstat(output / name).st_size for name in contents.manifest.files}
    except (LmtrainError, OSError):
        return False
    record, listed_sizes = state.get(purpose.record), {n: entry.size for n, entry in contents.manifest.files.items()}
    # because: the merged checkpoint may have been resharded since, and keeps the record of its merge
    is_as_written = purpose == RESHARD or RESHARD.record not in state
    is_same_job = isinstance(record, dict) and record.get("key") == wanted[purpose.record]["key"]
    has_same_settings = state.get("settings") == wanted.get("settings")  # because: layouts may differ only in these
    return is_same_job and has_same_settings and is_as_written and sizes == listed_sizes
