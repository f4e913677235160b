"""Every byte of a checkpoint against its hash, every tensor against its model. Torch-free.

Called by `lmtrain verify` and `lmtrain inspect --verify`, which say the same and end with the same exit code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.contents import Contents
from lmtrain.checkpoint.fit import check_fit
from lmtrain.checkpoint.store import CHECKPOINTS, list_broken, list_checkpoints, resolve
from lmtrain.errors import CheckpointError


def verify_checkpoints(path: Path) -> Iterator[dict[str, Any]]:
    """What each checkpoint holds, and its problems. `path` is a checkpoint, or a run's folder for all of them."""
    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    for checkpoint in [*list_checkpoints(folder), *list_broken(folder)] or [resolve(path)]:
        facts: dict[str, Any] = {"checkpoint": str(checkpoint), "problems": []}
        try:
            contents = Contents(checkpoint)
            manifest = contents.manifest
            facts |= {"step": manifest.step, "tensors": len(manifest.tensors), "files": len(manifest.files)}
            facts["bytes"] = sum(entry.size for entry in manifest.files.values())
            facts["problems"] = contents.damages()
            if not facts["problems"]:
                check_fit(contents)
        except CheckpointError as error:
            facts["problems"] = [str(error)]
        yield facts


def refuse_problems(found: Iterable[dict[str, Any]]) -> None:
    problems = [problem for facts in found for problem in facts["problems"]]
    if problems:
        raise CheckpointError("\n".join(problems))
