"""`lmtrain inspect PATH`: look at a dataset, a run folder or a checkpoint without starting anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmtrain.cli.options import Json, Plugins
from lmtrain.cli.screen.terminal import echo
from lmtrain.errors import MissingInputError
from lmtrain.runfolder.names import CONFIG

if TYPE_CHECKING:
    from rich.console import Console


def inspect(
    path: Annotated[Path, typer.Argument(help="A run folder, a checkpoint folder, or the prefix of a dataset.")],
    all_: Annotated[bool, typer.Option("--all", help="Also every setting, checkpoint, file and tensor.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Also check every hash or index entry.")] = False,
    diff: Annotated[
        Path | None, typer.Option(metavar="OTHER", help="Say what differs from this other checkpoint, and by how much.")
    ] = None,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Show what is in a dataset, a run or a checkpoint; or what differs between two checkpoints."""
    from lmtrain.checkpoint.store import is_best, resolve
    from lmtrain.cli.inspect import checkpoint_view as view
    from lmtrain.cli.inspect.dataset_view import dataset_facts
    from lmtrain.cli.inspect.run_view import run_facts
    from lmtrain.runfolder.folder import as_written
    from lmtrain.runfolder.rows import writable

    if is_best(path):
        path = resolve(path)
    if diff is not None:
        facts = view.difference_facts(path, diff)
    elif (path / "manifest.json").is_file():
        facts = view.checkpoint_facts(path, verify)
    elif (path / CONFIG).is_file():
        with as_written(path):
            facts = run_facts(path, verify)
    elif path.with_name(path.name + ".idx").is_file() or path.suffix in (".idx", ".bin"):
        facts = dataset_facts(path, verify)
    else:
        raise MissingInputError(
            f"{path} is not a run folder (config.json), a checkpoint (manifest.json) or a dataset ({path}.idx). "
            "Check the path."
        )
    if as_json:
        shown = {key: value for key, value in facts.items() if key != "losses"}
        echo(json.dumps(writable(shown), indent=1, allow_nan=False))
        return
    from lmtrain.cli.screen.console import Screen

    if diff is not None:
        view.print_difference(Screen(), facts)
    elif "run" in facts:
        _print_run(Screen(), facts, all_)
    elif "checkpoint" in facts:
        view.print_checkpoint(Screen(), facts, all_)
    else:
        print_dataset(Screen(), facts, all_)


def print_dataset(console: Console, facts: dict[str, Any], all_: bool = False) -> None:
    """Also what `lmtrain data inspect` prints."""
    from lmtrain.cli.inspect.dataset_view import dataset_lines
    from lmtrain.cli.screen.fact_list import print_facts, print_tree

    print_facts(console, f"dataset {facts['dataset']}", [*dataset_lines(facts)])
    if all_ and facts["sidecar"] is not None:
        print_tree(console, "sidecar", facts["sidecar"])


def _print_run(console: Console, facts: dict[str, Any], all_: bool) -> None:
    from lmtrain.cli.inspect.run_view import run_lines
    from lmtrain.cli.screen.fact_list import print_facts, print_tree
    from lmtrain.runfolder.folder import as_written

    with as_written(Path(facts["run"])):
        lines = [*run_lines(facts, console.encoding.startswith("utf"))]
    print_facts(console, f"run {facts['run']}", lines)
    if all_:
        print_facts(console, "checkpoints", [("", name) for name in facts["checkpoints"]] or [("", "none")])
        print_tree(console, "settings", facts["settings"])
