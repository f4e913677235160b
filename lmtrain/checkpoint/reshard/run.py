"""Writes a checkpoint's tensors into other files, cut in another way: without a device, without its size in memory.

Called by the command line with the files that are wanted; knows no layouts. An attempt works in a folder beside its
output and keeps a journal there: started again after a kill it goes on, and writes the same bytes. Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.contents import Contents
from lmtrain.checkpoint.disk.format import MANIFEST, FileEntry, Manifest, blocks_file, encode_manifest
from lmtrain.checkpoint.disk.tensor_file import tensors_of
from lmtrain.checkpoint.reshard.attempt import Attempt, Files, Resharded, key_of, num_bytes_of
from lmtrain.checkpoint.reshard.limits import Limits, Report
from lmtrain.checkpoint.reshard.targets import Target
from lmtrain.checkpoint.reshard.work_folder import WorkFolder
from lmtrain.checkpoint.store import step_of
from lmtrain.errors import CheckpointError, LmtrainError, OutputError, UsageError
from lmtrain.runtime.files.files import folder_lock, storage_errors


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
    if step_of(output.name) not in (None, step):
        raise UsageError(f"--output {output} is the name of another step than {step}. Choose another name.")


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
