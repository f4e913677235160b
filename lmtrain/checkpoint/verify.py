"""Every byte of a checkpoint against its hash, every tensor against its model. Torch-free.

Called by `lmtrain verify` and `lmtrain inspect --verify`, which say the same and end with the same exit code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.contents import Contents
from lmtrain.checkpoint.described import checked_model
from lmtrain.checkpoint.store import CHECKPOINTS, list_broken, list_checkpoints, resolve
from lmtrain.errors import CheckpointError


def verify_checkpoints(path: Path) -> Iterator[dict[str, Any]]:
    """Verify a checkpoint, or all checkpoints of a run's folder."""
    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    return map(verify_checkpoint, [*list_checkpoints(folder), *list_broken(folder)] or [resolve(path)])


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, and its problems."""
    facts: dict[str, Any] = {"checkpoint": str(path), "problems": []}
    try:
        contents = Contents(path)
        manifest = contents.manifest
        facts |= {"step": manifest.step, "tensors": len(manifest.tensors), "files": len(manifest.files)}
        facts["bytes"] = sum(entry.size for entry in manifest.files.values())
        facts["problems"] = contents.damages()
        if not facts["problems"] and "model" in manifest.state:
            checked_model(contents)
    except CheckpointError as error:
        facts["problems"] = [str(error)]
    return facts


def refuse_problems(found: Iterable[dict[str, Any]]) -> None:
    problems = [problem for facts in found for problem in facts["problems"]]
    if problems:
        raise CheckpointError("\n".join(problems))
