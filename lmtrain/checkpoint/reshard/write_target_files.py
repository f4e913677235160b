"""The tensor files of a new checkpoint, written in any order by several threads, and the work folder. Torch-free.

Called by reshard, merge and their attempt. A hash block is hashed by the thread that writes its last bytes, while they
are still in memory. The files lie in a folder beside the output, such as OUTPUT.resharding, until it takes the output's
name: a kill at any time leaves the old checkpoint, nothing or the new one as the output.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any

from lmtrain.checkpoint.disk.block_hashed_file import root_hash
from lmtrain.checkpoint.disk.checkpoint_format import (
    BLOCK_BYTES,
    ITEM_BYTES,
    MANIFEST,
    FileEntry,
    Manifest,
    PieceEntry,
    TensorEntry,
    rank_file,
)
from lmtrain.checkpoint.disk.safetensors_file import PieceSpec, encode_header, piece_entries
from lmtrain.checkpoint.disk.tensor_slice_geometry import Box, full_box
from lmtrain.checkpoint.read_verified_contents import layout_of
from lmtrain.errors import OutputError, UsageError, leave_out, way
from lmtrain.models.model_settings import ModelSettings
from lmtrain.placement.layers_and_shards_of_ranks import placements_of_rank
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.runtime.files.atomic_files import fsync_dir, put_in_place, read_range, swap
from lmtrain.runtime.files.existing_output import Kind, check_output
from lmtrain.runtime.processes.fault_injection import fault_point
from lmtrain.units import format_bytes

PART_BYTES = 32 << 20  # of a tensor, in memory at once
MIN_PART_BYTES = 1 << 20
BASE_BYTES = 128 << 20  # because: Python with numpy takes about 60 MiB, and a manifest some tens
DEFAULT_MEMORY_BYTES = 2 << 30
Report = Callable[[int, int, int], None]  # bytes done, bytes in all, and those done by an earlier attempt
Digests = dict[int, bytes]  # by the hash block's index
Ranks = tuple[int, ...]
SLACK_BYTES = 16 << 20  # manifest, lists of blocks, and the file system's own records


@dataclass(frozen=True)
class Limits:
    """The memory that the whole process may use, and how the block cache and the workers share it."""

    memory_bytes: int = DEFAULT_MEMORY_BYTES
    workers: int = 1
    copies: int = 2  # of a part of a tensor that a worker holds at once: as read, and in the order of a file

    def __post_init__(self) -> None:
        least = BASE_BYTES + self.workers * self._worker_bytes(MIN_PART_BYTES) + 4 * BLOCK_BYTES
        if self.workers < 1:
            raise UsageError(f"--workers {self.workers} must be at least 1. "
                             f"{leave_out('--workers')} to use the default.")  # fmt: skip
        if self.memory_bytes < least:
            enough = way("--max-memory", f"{-(-least >> 20)}MiB")
            raise UsageError(
                f"--max-memory {format_bytes(self.memory_bytes)} is too little for {self.workers} workers. "
                f"Use {enough} or more, or fewer workers."
            )

    @property
    def num_cached_blocks(self) -> int:
        rest = self.memory_bytes - BASE_BYTES
        return min(rest // 4, rest - self.workers * self._worker_bytes(MIN_PART_BYTES)) // BLOCK_BYTES

    @property
    def part_bytes(self) -> int:
        rest = (self.memory_bytes - BASE_BYTES - self.num_cached_blocks * BLOCK_BYTES) // self.workers
        return max(MIN_PART_BYTES, min(PART_BYTES, (rest - self._worker_bytes(0)) // self.copies))

    def _worker_bytes(self, part_bytes: int) -> int:
        """Return a worker's memory in bytes: the copies of a part, a hash block that is read and one written."""
        return self.copies * part_bytes + 2 * BLOCK_BYTES


class TargetFile:
    """A tensor file that is written in any order; counts the missing bytes of each hash block.

    Keeps no descriptor open: a layout may have thousands of files.
    """

    def __init__(self, path: Path, specs: Sequence[PieceSpec]) -> None:
        self.path, self.specs = path, specs
        self._header = encode_header(specs)
        self.starts = [*accumulate((spec.num_bytes for spec in specs), initial=len(self._header))]
        self.size = self.starts[-1]
        self.digests: Digests = {}
        self._missing = [min(BLOCK_BYTES, self.size - at) for at in range(0, self.size, BLOCK_BYTES)]
        self._has_kept_blocks = False  # whether blocks of an earlier attempt are kept
        self._lock = Lock()

    @property
    def pieces(self) -> list[tuple[PieceSpec, PieceEntry]]:
        return piece_entries(self.path.name, self.specs)

    @property
    def num_blocks(self) -> int:
        return len(self._missing)

    @property
    def has_file(self) -> bool:
        """True if the file exists with its full size, as an interrupted earlier job leaves it; it must be a plain file
        that has no other hard link.
        """
        try:
            status = os.lstat(self.path)
        except FileNotFoundError:
            return False
        return stat.S_ISREG(status.st_mode) and (status.st_nlink, status.st_size) == (1, self.size)

    def matches_disk(self, index: int, digest: bytes) -> bool:
        """Return whether the hash block with this index (4 MiB of the file) has the SHA-256 `digest` on disk."""
        at = index * BLOCK_BYTES
        with self._open(os.O_RDONLY) as fd:
            return hashlib.sha256(read_range(fd, at, min(BLOCK_BYTES, self.size - at))).digest() == digest

    def keep_block(self, index: int, digest: bytes) -> None:
        """Keep a block as an earlier attempt has written it: later writes leave it out."""
        self.digests[index], self._missing[index], self._has_kept_blocks = digest, 0, True

    def is_kept(self, position: int, size: int) -> bool:
        """Return whether all blocks that a range touches are kept."""
        return self._has_kept_blocks and all(not self._missing[index] for index, *_ in _touched_blocks(position, size))

    def create(self) -> None:
        """Create the file with its full size, or open it if an interrupted earlier job has left it, and write its
        safetensors header.
        """
        with self._open(os.O_WRONLY | os.O_CREAT) as fd:
            os.ftruncate(fd, self.size)
        self.digests |= self.write(0, memoryview(self._header))

    def write(self, position: int, data: memoryview) -> Digests:
        """Write `data` at byte `position` of the file, but leave out the hash blocks (4 MiB each) that are kept from an
        interrupted earlier job. Return index -> digest of the hash blocks that this completes.
        """
        digests: Digests = {}
        parts = [(position, position + len(data))]
        if self._has_kept_blocks:  # the range, without the blocks that are kept
            blocks = _touched_blocks(position, len(data))
            parts = [(start, stop) for index, start, stop in blocks if self._missing[index]]
        with self._open(os.O_RDWR) as fd:
            for start, stop in parts:
                part, num_written = data[start - position : stop - position], 0
                while num_written < len(part):
                    num_written += os.pwrite(fd, part[num_written:], start + num_written)
                digests |= self._completed_blocks(fd, start, part)
        return digests

    @contextmanager
    def _open(self, mode: int) -> Iterator[int]:
        fd = os.open(self.path, mode | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            yield fd
        finally:
            os.close(fd)

    def _completed_blocks(self, fd: int, position: int, data: memoryview) -> Iterator[tuple[int, bytes]]:
        """Count `data`, which was written at byte `position`, as present. Yield (index, SHA-256 digest) of each hash
        block, 4 MiB of the file, that this completes.
        """
        for index, start, stop in _touched_blocks(position, len(data)):
            with self._lock:
                self._missing[index] -= stop - start
                is_whole = self._missing[index] == 0
            if is_whole:
                at, size = index * BLOCK_BYTES, min(BLOCK_BYTES, self.size - index * BLOCK_BYTES)
                block = data[start - position : stop - position] if stop - start == size else read_range(fd, at, size)
                yield index, hashlib.sha256(block).digest()

    def sync(self) -> None:
        with self._open(os.O_RDONLY) as fd:
            os.fdatasync(fd)

    @property
    def is_complete(self) -> bool:
        return not any(self._missing) and len(self.digests) == len(self._missing)

    def entry(self) -> tuple[FileEntry, list[bytes]]:
        assert self.is_complete
        digests = [self.digests[index] for index in range(len(self._missing))]
        return FileEntry(self.size, root_hash(digests)), digests


def _touched_blocks(position: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Split the `size` bytes of a file from byte `position` on at the borders of hash blocks (4 MiB each). Yield (index
    of the hash block, first byte, end) of each part.
    """
    stop = position + size
    for index in range(position // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
        yield index, max(position, index * BLOCK_BYTES), min(stop, (index + 1) * BLOCK_BYTES)


def place_pieces(targets: Mapping[str, TargetFile]) -> dict[str, list[tuple[TargetFile, Box, int]]]:
    """Return tensor name -> its pieces in the new files, each as (file, the piece's box in the tensor, the piece's
    first byte in the file).
    """
    places: dict[str, list[tuple[TargetFile, Box, int]]] = {}
    for target in targets.values():
        for spec, start in zip(target.specs, target.starts, strict=False):
            places.setdefault(spec.name, []).append((target, spec.box, start))
    return places


def files_of_layout(manifest: Manifest, model: ModelSettings, parallel: ParallelSettings) -> dict[str, list[PieceSpec]]:
    """Return the tensor files of a checkpoint that is split for the new parallel settings `parallel`, as file name ->
    pieces. `manifest` and `model` are those of the existing checkpoint.

    A piece that several ranks hold goes to a shared file. Tensors that belong to no parameter are held by every rank.
    """
    holders, all_ranks = _ranks_of_boxes(model, parallel), tuple(range(parallel.layout.world_size))
    specs: dict[Ranks, list[PieceSpec]] = {}
    for name, tensor in manifest.tensors.items():
        for box, ranks in (_boxes_of_tensor(name, tensor, holders) or {full_box(tensor.shape): all_ranks}).items():
            specs.setdefault(ranks, []).append(PieceSpec(name, tensor.dtype, tensor.shape, box))
    names: dict[Ranks, str] = {}
    shared = dict.fromkeys(all_ranks, 0)
    for ranks in sorted(specs):
        if len(ranks) == 1:
            names[ranks] = rank_file(ranks[0])
        else:
            names[ranks] = f"rank_{ranks[0]:05d}.shared_{shared[ranks[0]]}.safetensors"
            shared[ranks[0]] += 1
    # because: wide types first, so that every tensor begins at a multiple of its item size
    return {name: sorted(specs[ranks], key=lambda s: -ITEM_BYTES[s.dtype]) for ranks, name in names.items()}


def state_at_layout(state: Mapping[str, Any], parallel: ParallelSettings) -> dict[str, Any]:
    """Return a copy of a checkpoint's state in which the parallel settings of its run are replaced by `parallel`; a
    state without such settings is copied unchanged.
    """
    if layout_of(state) is None:
        return dict(state)
    return {**state, "settings": {**state["settings"], "parallel": parallel.to_dict()}}


def _ranks_of_boxes(
    model: ModelSettings, parallel: ParallelSettings
) -> dict[str, tuple[tuple[int, ...], dict[Box, Ranks]]]:
    """Return parameter name -> (shape of the whole parameter, box -> ranks that hold this box of it), for a model that
    is split among ranks by the settings `parallel`. A box is a rectangular part of the parameter.
    """
    by_name: dict[str, tuple[tuple[int, ...], dict[Box, Ranks]]] = {}
    for rank in range(parallel.layout.world_size):
        for place in placements_of_rank(model, parallel, parallel.layout.coordinate(rank)).values():
            boxes = by_name.setdefault(place.name, (place.global_shape, {}))[1]
            for block in place.regions:
                box = Box(block.offset, block.shape)
                boxes[box] = (*boxes.get(box, ()), rank)
    return by_name


def _boxes_of_tensor(
    name: str, tensor: TensorEntry, holders: Mapping[str, tuple[tuple[int, ...], dict[Box, Ranks]]]
) -> dict[Box, Ranks] | None:
    """Return box -> ranks that hold it, for the tensor `name` of a checkpoint. A tensor such as adamw.m.head.weight is
    split like the parameter at the end of its name, `head.weight`. Return None if there is no such parameter, or if it
    has another shape. `holders` is what `_ranks_of_boxes` returns.

    So `optim.exp_avg.norm.weight` is split like `norm.weight`.
    """
    rest = name
    while rest and rest not in holders:
        rest = rest.partition(".")[2]
    shape, boxes = holders.get(rest, (None, {}))
    return boxes if shape == tensor.shape else None


_CHECKPOINT = Kind("a checkpoint", lambda path: (path / MANIFEST).is_file(), is_folder=True)


@dataclass(frozen=True)
class WorkFolder:
    """The folder OUTPUT.SUFFIX, such as OUTPUT.resharding, in which a command works until its result becomes OUTPUT."""

    output: Path
    suffix: str

    @property
    def path(self) -> Path:
        return self.output.with_name(f"{self.output.name}.{self.suffix}")

    @property
    def files(self) -> Path:
        """The folder that becomes the output."""
        return self.path / "files"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def _replaced(self) -> Path:
        return self.path / "files.aside"  # the name that `swap` gives

    def check_places(self, overwrite: bool) -> None:
        """Raise OutputError if what is at the output must stay, or if the work folder is a symbolic link."""
        if self.path.is_symlink():
            raise OutputError(f"The work folder {self.path} is a symbolic link. Remove it or choose another output.")
        check_output(self.output, _CHECKPOINT, overwrite=overwrite)

    def restore_replaced(self) -> None:
        """Give a checkpoint its name back that was moved aside for a replacement which never took its place."""
        if self._replaced.exists() and not os.path.lexists(self.output):
            os.rename(self._replaced, self.output)

    def publish(self, overwrite: bool) -> None:
        """Rename the folder of finished files to the output, and remove the work folder. With `overwrite`, whatever is
        at the output is replaced.
        """
        fault_point("reshard.publish")
        if not (overwrite and swap(self.files, self.output)):
            put_in_place(self.files, self.output)
        fsync_dir(self.output.parent)
        fault_point("reshard.cleanup")
        self.clean_up()

    def clean_up(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
