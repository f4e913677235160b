"""Commit a checkpoint: all or nothing, whichever process is killed or fails at any time. Torch-free.

Called by the writer's thread, on every rank at once. Files are written to a temporary folder that all ranks share and
synced one by one, the manifest last; then one rename makes the checkpoint. `write_rank` writes one rank's files;
`commit_checkpoint` is called on rank 0 once all ranks have reported that their files are on disk. It gets their file
and piece lists from part manifests, which each rank writes.
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

from lmtrain.checkpoint.disk.block_hashed_file import encode_blocks, verify_file, write_hashed
from lmtrain.checkpoint.disk.checkpoint_format import (
    MANIFEST,
    MAX_FILE_BYTES,
    SLACK_BYTES,
    FileEntry,
    Manifest,
    PieceEntry,
    blocks_file,
    check_num_pieces,
    encode_manifest,
    overhead_bytes,
    rank_file,
)
from lmtrain.checkpoint.disk.safetensors_file import PieceSpec, RankData, encode_header, merge_pieces, piece_entries
from lmtrain.checkpoint.disk.tensor_slice_geometry import Box
from lmtrain.checkpoint.find_and_prune import (
    check_free_space,
    leftover_numbers,
    leftover_path,
    manifest_problem,
    new_leftover_path,
    rename_damaged,
)
from lmtrain.errors import CheckpointError, StorageError
from lmtrain.runfolder.file_names import step_folder_name
from lmtrain.runtime.files.atomic_files import (
    drop_from_page_cache,
    fsync_dir,
    is_safe_name,
    parse_json,
    put_in_place,
    read_bytes,
    remove,
    storage_errors,
)
from lmtrain.runtime.processes.fault_injection import fault_point
from lmtrain.runtime.processes.succeed_on_all_ranks_or_none import SINGLE_PROCESS, Peers, collective_phase
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
    """Save a checkpoint of the run at `step` into `folder`; return its path and its size in bytes. Collective: every
    rank passes its own tensors, `data`; `state` and `files` (extra files by name) are rank 0's. With `verify` every
    rank reads its file back from the disk before the commit.

    A failure on any rank is raised on all and leaves nothing behind.
    """
    action, is_first, attempt = "Saving a checkpoint in", peers.rank == 0, None
    with collective_phase(peers, 2) as sizes:
        check_extra_files(files)
        if peers.num_ranks == 1:
            # because: wrong pieces are refused before they are written
            merge_pieces([piece_entries(rank_file(0), data.specs)])
        num_key_chars = sum(len(s.key) for s in data.specs)
        num_bytes = data.num_bytes + overhead_bytes(len(data.specs), num_key_chars, data.num_bytes)
        num_bytes += is_first * (sum(map(len, files.values())) + len(json.dumps(state)) + SLACK_BYTES)
        sizes.own_numbers = num_bytes, len(data.specs)
    check_num_pieces(sum(num_specs for _, num_specs in sizes.all_numbers))
    need_bytes = sum(num_bytes for num_bytes, _ in sizes.all_numbers)
    writers = [rank for rank, (_, num_specs) in enumerate(sizes.all_numbers) if num_specs]
    try:
        with collective_phase(peers, 2) as opened, storage_errors(folder, action, need_bytes):
            fault_point("ckpt.begin")
            if is_first:
                folder.mkdir(parents=True, exist_ok=True)
                check_free_space(folder, need_bytes)
                attempt = new_leftover_path(folder, step)
                os.mkdir(attempt)
                opened.own_numbers = leftover_numbers(attempt)
        attempt = leftover_path(folder, step, opened.all_numbers[0])
        with collective_phase(peers), storage_errors(folder, action, need_bytes):
            record = write_rank(attempt, peers.rank, data)
            if verify:
                verify_on_disk(attempt, record)
            if not is_first and data.specs:
                write_hashed(attempt / part_manifest_name(peers.rank), [encode_part_manifest(record)])
        with collective_phase(peers, 1) as done, storage_errors(folder, action, need_bytes):
            if is_first:
                records = [record, *collect_part_manifests(attempt, [rank for rank in writers if rank])]
                done.own_numbers = (commit_checkpoint(attempt, step, records, state, files)[1],)
    except BaseException:
        if is_first and attempt is not None:
            shutil.rmtree(attempt, ignore_errors=True)
        raise
    return folder / step_folder_name(step), done.all_numbers[0][0]


def collect_part_manifests(attempt: Path, ranks: Sequence[int]) -> list[RankRecord]:
    """Read the part manifests, in which ranks list the files and pieces that they have written, from the temporary
    folder `attempt`. Remove these manifests and return their contents, in the order of `ranks`.
    """
    records = []
    for rank in ranks:
        records.append(read_part_manifest(attempt / part_manifest_name(rank)))
        os.unlink(attempt / part_manifest_name(rank))
    return records


def check_extra_files(files: Mapping[str, bytes]) -> None:
    """Raise CheckpointError if one of the extra files (name -> bytes) has a reserved or unsafe name or is too large."""
    for name, data in files.items():
        if not is_safe_name(name) or name == MANIFEST or name.startswith("rank_"):
            raise CheckpointError(f"{name!r} cannot be the name of a file in a checkpoint. Use a plain name.")
        if len(data) > MAX_FILE_BYTES:
            raise CheckpointError(
                f"The extra file {name} has {format_bytes(len(data))}; in a checkpoint it may have at most "
                f"{format_bytes(MAX_FILE_BYTES)}. Save it elsewhere."
            )


def write_rank(attempt: Path, rank: int, data: RankData) -> RankRecord:
    """Write a rank's tensor file and the file with its block hashes into the temporary folder `attempt`. Return the
    record of both files and of the pieces in them; a rank without tensors writes no file and returns an empty record.
    """
    if not data.specs:
        return RankRecord({}, [])
    name = rank_file(rank)
    header = encode_header(data.specs)
    entry, digests = write_hashed(attempt / name, chain((header,), data.parts), point="ckpt.mid_write")
    assert entry.size == len(header) + data.num_bytes, "the specs do not describe the parts"
    listing, _ = write_hashed(attempt / blocks_file(name), [encode_blocks(entry, digests)])
    return RankRecord({name: entry, blocks_file(name): listing}, piece_entries(name, data.specs))


def verify_on_disk(attempt: Path, record: RankRecord) -> None:
    """Read the files of `record` in the temporary folder `attempt` back from the disk. Raise StorageError if their
    hashes are not those that were computed while writing.
    """
    for name, entry in record.files.items():
        drop_from_page_cache(attempt / name)
        fault_point("ckpt.read_back")
        try:
            verify_file(attempt / name, entry)
        except CheckpointError as error:
            raise StorageError(f"A new file differs from what was written to it: {error} Check the disk.") from error


def commit_checkpoint(
    attempt: Path, step: int, records: Sequence[RankRecord], state: Mapping[str, Any], files: Mapping[str, bytes]
) -> tuple[Path, int]:
    """Write the extra files and the manifest with `state` into the temporary folder `attempt`, and rename the folder to
    the checkpoint's name. `records` say what each rank has written. Return the checkpoint's path and its size in bytes.
    """
    entries = {name: entry for record in records for name, entry in record.files.items()}
    for name, data in files.items():
        entries[name], _ = write_hashed(attempt / name, [data])
    manifest = encode_manifest(Manifest(step, entries, merge_pieces([r.pieces for r in records]), dict(state)))
    fault_point("ckpt.before_manifest")
    write_hashed(attempt / MANIFEST, [manifest])
    fsync_dir(attempt)
    fault_point("ckpt.before_rename")
    path = attempt.parent / step_folder_name(step)
    if os.path.lexists(path) and manifest_problem(path) is not None:
        rename_damaged(path)
    # because: a checkpoint that has the name already is moved to a name that `sweep` knows
    replaced = new_leftover_path(path.parent, step, "replaced")
    put_in_place(attempt, path, replaced, lambda: fault_point("ckpt.mid_replace"))
    remove(replaced)
    fault_point("ckpt.after_rename")
    return path, len(manifest) + sum(entry.size for entry in entries.values())


@dataclass(frozen=True)
class RankRecord:
    """The files and the pieces in them that one rank has written, with their entries for the manifest."""

    files: Mapping[str, FileEntry]
    pieces: Sequence[tuple[PieceSpec, PieceEntry]]


def part_manifest_name(rank: int) -> str:
    return f"rank_{rank:05d}.part.json"


def encode_part_manifest(record: RankRecord) -> bytes:
    files = {name: [entry.size, entry.root] for name, entry in record.files.items()}
    pieces = [[s.name, s.dtype, s.global_shape, p.file, p.key, p.box.offset, p.box.shape] for s, p in record.pieces]
    return json.dumps({"files": files, "pieces": pieces}).encode()


def read_part_manifest(path: Path) -> RankRecord:
    """Read a part manifest, in which a rank of this run lists the files and pieces that it has written. Raise
    CheckpointError if it is malformed.
    """
    value: Any = parse_json(read_bytes(path, MAX_FILE_BYTES, follow_links=False), path)
    try:
        files = {name: FileEntry(size, root) for name, (size, root) in value["files"].items()}
        pieces = []
        for name, dtype, shape, file, key, offset, extent in value["pieces"]:
            box = Box(tuple(offset), tuple(extent))
            pieces.append((PieceSpec(name, dtype, tuple(shape), box), PieceEntry(file, key, box)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a valid part manifest ({error}). Save again.") from error
    return RankRecord(files, pieces)
