"""`lmtrain verify PATH`: check every byte of a checkpoint against its hash, and every tensor against the model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmtrain.cli.screen.print_messages_and_json import print_json, print_message
from lmtrain.cli.shared_options import Json, Plugins
from lmtrain.units import format_bytes, plural


def verify(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A checkpoint, or a run's folder for all of its checkpoints.")
    ],
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Check a checkpoint: file hashes, tensor shapes, that the saved pieces cover every tensor, and tied weights.

    Every problem is printed, and the exit code is then 65.
    """
    from lmtrain.checkpoint.compare_or_verify_checkpoints import raise_problems, verify_checkpoints
    from lmtrain.cli.screen.print_facts_and_tables import PlainConsole

    results = []
    for facts in verify_checkpoints(path):
        results.append(facts)
        if not as_json and not facts["problems"]:
            tensors, files = plural(facts["tensors"], "tensor"), plural(facts["files"], "file")
            print_message(
                PlainConsole(),
                f"{facts['checkpoint']}: all is well: step {facts['step']}, {tensors}, {files}, "
                f"{format_bytes(facts['bytes'])}",
            )
    if as_json:
        print_json(results)
    raise_problems(results)
