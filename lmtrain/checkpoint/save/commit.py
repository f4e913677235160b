"""How a checkpoint comes to be: all or nothing, whatever is killed or fails when. Torch-free.

Called by the writer's thread, on every process of a run at once. Files go to a temporary folder that all share and to
disk one by one, the manifest last; then one rename makes the checkpoint. `write_rank` is one process's part, `commit`
is the part that rank 0 does for all, once all have said that theirs is on disk: it reads the part manifests, in which
each has written what it has.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.disk.boxes import Box
from lmtrain.checkpoint.disk.format import (
    MANIFEST,
    MAX_FILE_BYTES,
    SLACK_BYTES,
    FileEntry,
    Manifest,
    PieceEntry,
    blocks_file,
    check_num_pieces,
    encode_manifest,
    rank_file,
    room_beside,
)
from lmtrain.checkpoint.disk.hashed import encode_blocks, verify_file, write_hashed
from lmtrain.checkpoint.disk.tensor_file import PieceSpec, RankData, encode_header, tensors_of
from lmtrain.checkpoint.store import check_room, leftover, leftover_numbers, manifest_problem, new_leftover, set_aside
from lmtrain.errors import CheckpointError, StorageError
from lmtrain.runfolder.names import step_folder_name
from lmtrain.runtime.files.files import (
    drop_from_page_cache,
    fsync_dir,
    is_safe_name,
    parse_json,
    put_in_place,
    read_bytes,
    remove,
    storage_errors,
)
from lmtrain.runtime.processes.agreement import SINGLE_PROCESS, Peers, collective_phase
from lmtrain.runtime.processes.faults import fault_point
from lmtrain.units import format_bytes


def save_checkpoint(
    folder: Path,
    step: int,
    data: RankData,
    state: Mapping[str, Any],
    files: Mapping[str, bytes],
    peers: Peers = SINGLE_PROCESS,
    *,
    verify: bool = False,
) -> tuple[Path, int]:
    """Commit the checkpoint of a run; returns its path and size. A failure on any process leaves nothing behind.

    Every process comes with its own tensors, and takes part in each agreement whatever has gone wrong with it. With
    `verify` each reads its file back from the disk before all commit.
    """
    doing, leads, attempt = "Saving a checkpoint in", peers.rank == 0, None
    with collective_phase(peers, 2) as sizes:
        check_files(files)
        if peers.num_ranks == 1:
            tensors_of([describe(0, data.specs)])  # because: wrong pieces are better refused before they are written
        num_bytes = data.num_bytes + room_beside(len(data.specs), sum(len(s.key) for s in data.specs), data.num_bytes)
        num_bytes += leads * (sum(map(len, files.values())) + len(json.dumps(state)) + SLACK_BYTES)
        sizes.own_numbers = num_bytes, len(data.specs)
    check_num_pieces(sum(num_specs for _, num_specs in sizes.all_numbers))
    need = sum(num_bytes for num_bytes, _ in sizes.all_numbers)
    writers = [rank for rank, (_, num_specs) in enumerate(sizes.all_numbers) if num_specs]
    try:
        with collective_phase(peers, 2) as opened, storage_errors(folder, doing, need):
            fault_point("ckpt.begin")
            if leads:
                folder.mkdir(parents=True, exist_ok=True)
                check_room(folder, need)
                attempt = new_leftover(folder, step)
                os.mkdir(attempt)
                opened.own_numbers = leftover_numbers(attempt)
        attempt = leftover(folder, step, opened.all_numbers[0])
        with collective_phase(peers), storage_errors(folder, doing, need):
            mine = write_rank(attempt, peers.rank, data)
            if verify:
                read_back(attempt, mine)
            if not leads and data.specs:
                write_hashed(attempt / part_file(peers.rank), [encode_part(mine)])
        with collective_phase(peers, 1) as done, storage_errors(folder, doing, need):
            if leads:
                records = [mine, *take_parts(attempt, [rank for rank in writers if rank])]
                done.own_numbers = (commit(attempt, step, records, state, files)[1],)
    except BaseException:
        if leads and attempt is not None:
            shutil.rmtree(attempt, ignore_errors=True)
        raise
    return folder / step_folder_name(step), done.all_numbers[0][0]


def take_parts(attempt: Path, ranks: Sequence[int]) -> list[RankRecord]:
    """Return what the other processes have written, and remove their part manifests."""
    records = []
    for rank in ranks:
        records.append(read_part(attempt / part_file(rank)))
        os.unlink(attempt / part_file(rank))
    return records


def check_files(files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        if not is_safe_name(name) or name == MANIFEST or name.startswith("rank_"):
            raise CheckpointError(f"{name!r} cannot be the name of a file in a checkpoint. Use a plain name.")
        if len(data) > MAX_FILE_BYTES:
            raise CheckpointError(
                f"{name} has {format_bytes(len(data))} and a checkpoint takes files of {format_bytes(MAX_FILE_BYTES)}. "
                "Save it elsewhere."
            )


def describe(rank: int, specs: Sequence[PieceSpec]) -> list[tuple[PieceSpec, PieceEntry]]:
    return [(spec, PieceEntry(rank_file(rank), spec.key, spec.box)) for spec in specs]


def write_rank(attempt: Path, rank: int, data: RankData) -> RankRecord:
    """Write one process's tensors and their list of blocks into the temporary folder; no files for no tensors."""
    if not data.specs:
        return RankRecord({}, [])
    name = rank_file(rank)
    header = encode_header(data.specs)
    entry, digests = write_hashed(attempt / name, chain((header,), data.parts), point="ckpt.mid_write")
    assert entry.size == len(header) + data.num_bytes, "the specs do not describe the parts"
    listing, _ = write_hashed(attempt / blocks_file(name), [encode_blocks(entry, digests)])
    return RankRecord({name: entry, blocks_file(name): listing}, describe(rank, data.specs))


def read_back(attempt: Path, record: RankRecord) -> None:
    """Check that the disk returns what was written; a device that does not is a failure of storage."""
    for name, entry in record.files.items():
        drop_from_page_cache(attempt / name)
        fault_point("ckpt.read_back")
        try:
            verify_file(attempt / name, entry)
        except CheckpointError as error:
            raise StorageError(f"What was just written does not read back: {error} Check the disk.") from error


def commit(
    attempt: Path, step: int, records: Sequence[RankRecord], state: Mapping[str, Any], files: Mapping[str, bytes]
) -> tuple[Path, int]:
    """Turn a temporary folder that holds every process's files into a checkpoint."""
    entries = {name: entry for record in records for name, entry in record.files.items()}
    for name, data in files.items():
        entries[name], _ = write_hashed(attempt / name, [data])
    manifest = encode_manifest(Manifest(step, entries, tensors_of([r.pieces for r in records]), dict(state)))
    fault_point("ckpt.before_manifest")
    write_hashed(attempt / MANIFEST, [manifest])
    fsync_dir(attempt)
    fault_point("ckpt.before_rename")
    path = attempt.parent / step_folder_name(step)
    if os.path.lexists(path) and manifest_problem(path) is not None:
        set_aside(path)
    # because: a checkpoint that has the name already is moved to a name that `sweep` knows
    aside = new_leftover(path.parent, step, "replaced")
    put_in_place(attempt, path, aside, lambda: fault_point("ckpt.mid_replace"))
    remove(aside)
    fault_point("ckpt.after_rename")
    return path, len(manifest) + sum(entry.size for entry in entries.values())


@dataclass(frozen=True)
class RankRecord:
    """What one process has written."""

    files: Mapping[str, FileEntry]
    pieces: Sequence[tuple[PieceSpec, PieceEntry]]


def part_file(rank: int) -> str:
    return f"rank_{rank:05d}.part.json"


def encode_part(record: RankRecord) -> bytes:
    files = {name: [entry.size, entry.root] for name, entry in record.files.items()}
    pieces = [[s.name, s.dtype, s.global_shape, p.file, p.key, p.box.offset, p.box.shape] for s, p in record.pieces]
    return json.dumps({"files": files, "pieces": pieces}).encode()


def read_part(path: Path) -> RankRecord:
    """Read a part manifest that another process of this run has just written."""
    value: Any = parse_json(read_bytes(path, MAX_FILE_BYTES, follow_links=False), path)
    try:
        files = {name: FileEntry(size, root) for name, (size, root) in value["files"].items()}
        pieces = []
        for name, dtype, shape, file, key, offset, extent in value["pieces"]:
            box = Box(tuple(offset), tuple(extent))
            pieces.append((PieceSpec(name, dtype, tuple(shape), box), PieceEntry(file, key, box)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is not what a process of this run writes ({error}). Save again.") from error
    return RankRecord(files, pieces)
