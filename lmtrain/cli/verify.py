"""`lmtrain verify PATH`: every byte of a checkpoint against its hash, every tensor against its model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lmtrain.cli.plugins import Plugins


def verify(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A checkpoint, or a run's folder for all of its checkpoints.")
    ],
    plugin: Plugins = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a checkpoint: hashes, shapes, that pieces fill their tensors, tied weights.

    All that is wrong is named, and the exit code is then 65.
    """
    from lmtrain.checkpoint.contents import Contents
    from lmtrain.checkpoint.fit import check_fit
    from lmtrain.checkpoint.store import CHECKPOINTS, list_broken, list_checkpoints, resolve
    from lmtrain.errors import CheckpointError
    from lmtrain.units import format_bytes

    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    found = [*list_checkpoints(folder), *list_broken(folder)] or [resolve(path)]
    rows: list[dict[str, Any]] = []
    for checkpoint in found:
        row: dict[str, Any] = {"checkpoint": str(checkpoint), "problems": []}
        try:
            contents = Contents(checkpoint)
            manifest = contents.manifest
            row |= {"step": manifest.step, "tensors": len(manifest.tensors), "files": len(manifest.files)}
            row["bytes"] = sum(entry.size for entry in manifest.files.values())
            row["problems"] = contents.damages()
            if not row["problems"]:
                check_fit(contents)
        except CheckpointError as error:
            row["problems"] = [str(error)]
        rows.append(row)
        if not as_json and not row["problems"]:
            counts = f"{row['tensors']} tensors, {row['files']} files, {format_bytes(row['bytes'])}"
            typer.echo(f"{checkpoint}: all is well: step {row['step']}, {counts}")
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    problems = [problem for row in rows for problem in row["problems"]]
    if problems:
        raise CheckpointError("\n".join(problems))
