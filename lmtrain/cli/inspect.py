"""`lmtrain inspect PATH`: look at a dataset, a run folder or a checkpoint without starting anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmtrain.cli.options import Json, Plugins
from lmtrain.errors import MissingInputError

if TYPE_CHECKING:
    from rich.console import Console


def inspect(
    path: Annotated[Path, typer.Argument(help="A run folder, a checkpoint folder, or the prefix of a dataset.")],
    verify: Annotated[bool, typer.Option("--verify", help="Also check every hash or index entry.")] = False,
    diff: Annotated[
        Path | None, typer.Option(metavar="OTHER", help="Say what differs from this other checkpoint, and by how much.")
    ] = None,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Show what is in a dataset, a run or a checkpoint; or what differs between two checkpoints."""
    from lmtrain.cli import checkpoint_view as view

    show = _print
    if diff is not None:
        facts, show = view.difference_facts(path, diff), view.print_difference
    elif (path / "manifest.json").is_file():
        facts, show = view.checkpoint_facts(path, verify), view.print_checkpoint
    elif (path / "config.json").is_file():
        facts = _run(path, verify)
    elif path.with_name(path.name + ".idx").is_file() or path.suffix in (".idx", ".bin"):
        facts = _dataset(path, verify)
    else:
        raise MissingInputError(
            f"{path} is not a run folder (config.json), a checkpoint (manifest.json) or a dataset ({path}.idx). "
            "Check the path."
        )
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
        return
    from rich.console import Console

    show(Console(), facts)


def _run(path: Path, verify: bool) -> dict[str, Any]:
    from lmtrain.checkpoint.store import CHECKPOINTS, list_checkpoints
    from lmtrain.checkpoint.verify import refuse_problems, verify_checkpoints
    from lmtrain.observe.metrics import read_metrics
    from lmtrain.runtime.files import read_json
    from lmtrain.train.stop_file import STOP

    checkpoints = list_checkpoints(path / CHECKPOINTS)
    if verify:
        refuse_problems(verify_checkpoints(path))
    rows = read_metrics(path / "metrics.jsonl") if (path / "metrics.jsonl").is_file() else []
    latest = {event: next((r for r in reversed(rows) if r["event"] == event), None) for event in ("step", "valid")}
    return {
        "run": str(path),
        "verified": verify,
        "stopped": read_json(path / STOP) if (path / STOP).is_file() else "still running, or killed",
        "attempts": max((row["attempt"] for row in rows), default=0),
        "last_step": latest["step"],
        "last_validation": latest["valid"],
        "checkpoints": [c.name for c in checkpoints],
        "settings": read_json(path / "config.json"),
    }


def _dataset(path: Path, verify: bool) -> dict[str, Any]:
    import dataclasses

    from lmtrain.data.store import reshape
    from lmtrain.data.store.indexed import IndexedDataset

    dataset = IndexedDataset.open(path)
    if verify:
        reshape.verify(dataset)
    lengths = dataset.lengths
    return {
        "dataset": str(dataset.prefix),
        "verified": verify,
        "documents": dataset.num_documents,
        "sequences": dataset.num_sequences,
        "tokens": dataset.num_tokens,
        "dtype": dataset.dtype.name,
        "shortest_sequence": int(lengths.min()) if len(lengths) else 0,
        "longest_sequence": int(lengths.max()) if len(lengths) else 0,
        "sidecar": dataclasses.asdict(dataset.info) if dataset.info else "none: a foreign dataset",
    }


def _print(console: Console, facts: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.tree import Tree

    from lmtrain.cli.checkpoint_view import grow

    for key, value in facts.items():
        name = key.replace("_", " ")
        if isinstance(value, dict) and key != "settings":
            table = Table(title=name, title_justify="left", show_header=False)
            for k, v in value.items():
                table.add_row(str(k), str(v))
            console.print(table)
        elif isinstance(value, dict):
            tree = Tree(name)
            grow(tree, value)
            console.print(tree)
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            console.print(f"{name:18} {text}", highlight=False)
