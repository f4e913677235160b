"""Recognize the files that a checkpoint was imported from, so that a change of them is noticed. Torch-free.

An import records the identity in the checkpoint's manifest. A run that is started again compares it with the folder
that checkpoint.init_from names, if that is still there.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lmtrain.errors import OutputError, way
from lmtrain.runtime.files.atomic_files import open_fd, read_range

_WHOLE_BYTES = 8 << 20  # of a file that is read as a whole
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 64 << 10  # of a larger one
_MAX_FILES = 10_000
# Files that decide what an import makes of a folder; a README, for example, does not.
_DECISIVE = re.compile(
    r".*\.safetensors(?:\.index\.json)?|config\.json|tokenizer.*|vocab\..*|merges\.txt|special_tokens_map\.json|"
    r"latest_checkpointed_iteration\.txt|.*\.pt|.*\.distcp|\.metadata"
)

Identity = dict[str, list[Any]]  # path within the folder -> [bytes, digest]


def source_identity(folder: Path) -> Identity:
    """Return size and digest of each file of a model folder that decides what is imported. Large files are digested by
    samples, so that the cost does not grow with the model: training changes all weights.
    """
    return {str(path.relative_to(folder)): _digest(path) for path in _decisive_files(folder)}


def check_unchanged(source: Path, imported: Mapping[str, Any], checkpoint: Path) -> None:
    """Raise OutputError if the files of the model folder `source` are no longer those that `checkpoint` was imported
    from. `imported` is the entry "imported" of the checkpoint's state, which holds size and digest of each file. Do
    nothing if `source` is no folder any more, or if no digests were recorded.
    """
    before, now = imported.get("files"), source_identity(source) if source.is_dir() else None
    if not isinstance(before, dict) or now is None or now == before:
        return
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    raise OutputError(
        f"{source} is not what {checkpoint} was imported from: {changed[0]} differs"
        f"{f', and {len(changed) - 1} more files' * (len(changed) > 1)}. To begin with the model as it is now, choose "
        f"another run.dir; to go on with what was imported, use {way(f'checkpoint.init_from={checkpoint}')}."
    )


def _decisive_files(folder: Path) -> Iterator[Path]:
    """Yield the paths of the files in `folder` and below that decide what an import makes of it: weights, config.json,
    tokenizer files and the like. They come sorted within each folder, and are at most 10,000; hidden folders are
    skipped.
    """
    count = 0
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(filter(_DECISIVE.fullmatch, names)):
            if count < _MAX_FILES and (path := Path(parent, name)).is_file():
                count += 1
                yield path


def _digest(path: Path) -> list[Any]:
    """Return [size in bytes, digest] of a file. The digest is the first 32 hex digits of a SHA-256: of the whole
    content up to 8 MiB, of evenly spaced samples of 64 KiB in a larger file.
    """
    with open_fd(path) as (fd, size):
        digest, step, sample = hashlib.sha256(), _WHOLE_BYTES, _WHOLE_BYTES
        if size > _WHOLE_BYTES:
            step, sample = (size - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1), _SAMPLE_BYTES
        for start in range(0, max(size, 1), step):
            digest.update(read_range(fd, start, min(sample, size - start)))
        return [size, digest.hexdigest()[:32]]
