"""`lmtrain inspect PATH`: show what a dataset, a run folder or a checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from lmtrain.cli.inspect.dataset_view import print_dataset
from lmtrain.cli.inspect.run_folder_view import run_lines
from lmtrain.cli.screen.print_messages_and_json import print_json
from lmtrain.cli.shared_options import Json, Plugins, Weights, refuse_unused_options
from lmtrain.errors import LmtrainError, MissingInputError, UsageError, leave_out, shell_quoted, shorten
from lmtrain.runfolder.file_names import CHECKPOINTS, CONFIG
from lmtrain.runfolder.folder_reader import is_run, record_errors
from lmtrain.runfolder.metrics_rows import to_json_data
from lmtrain.runtime.files.atomic_files import read_json
from lmtrain.runtime.files.similar_path import missing_path
from lmtrain.runtime.files.unreadable_files import explain_unreadable
from lmtrain.start.facts_of_outputs.facts_of_dataset import dataset_facts
from lmtrain.start.facts_of_outputs.facts_of_run_folder import run_facts
from lmtrain.units import format_bytes, plural


def inspect(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(help="A run folder, a checkpoint folder, or the prefix of a dataset.")],
    all_: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Also every setting and checkpoint of a run, file and tensor of a checkpoint, or difference.",
        ),
    ] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Also check every hash or index entry.")] = False,
    diff: Annotated[
        Path | None, typer.Option(metavar="OTHER", help="Show what differs from this other checkpoint, by how much.")
    ] = None,
    weights: Weights = "model",
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Show what is in a dataset, a run or a checkpoint; or what differs between two checkpoints."""
    from lmtrain.checkpoint.find_and_prune import checkpoints_beside, is_best, resolve_checkpoint
    from lmtrain.cli.inspect.checkpoint_view import print_checkpoint, print_difference
    from lmtrain.data.store.joined_dataset import dataset_exists
    from lmtrain.start.facts_of_outputs.facts_of_checkpoint import checkpoint_facts, difference_facts

    if is_best(path):
        path = resolve_checkpoint(path)
    print_facts: Callable[[dict[str, Any]], None]
    if diff is not None:
        refuse_unused_options(context, {"verify"}, "--diff, which checks the hashes of all that it compares")
        facts, print_facts = difference_facts(path, diff, weights), partial(print_difference, show_all=all_)
    elif (path / "manifest.json").is_file():
        facts, print_facts = checkpoint_facts(path, verify, weights), partial(print_checkpoint, show_all=all_)
    elif weights != "model":
        raise UsageError(
            f"--weights {weights} chooses among the weights of a checkpoint, and {path} is none. "
            f"{leave_out('--weights', shown='Leave --weights out')}, or give a "
            "checkpoint, such as RUN/checkpoints/step_00001000."
        )
    elif foreign := _describe_foreign_model(path):
        raise MissingInputError(foreign)
    elif (path / CONFIG).is_file() and is_run(path):
        with record_errors(path):
            facts, print_facts = run_facts(path, verify), partial(_print_run, show_all=all_)
            facts["checkpoint_bytes"] = {name: _size(path / CHECKPOINTS / name) for name in facts["checkpoints"]}
    elif path.suffix in (".idx", ".bin") or dataset_exists(path):
        facts, print_facts = dataset_facts(path, verify), partial(print_dataset, show_all=all_)
    elif not path.exists():
        raise MissingInputError(missing_path(path, checkpoints_beside(path) or "Check the path.", _is_inspected))
    else:
        if path.is_file() and (is_not_read := explain_unreadable(path)):
            raise MissingInputError(is_not_read)
        raise MissingInputError(
            f"{path} is neither a run folder (it has no metrics.jsonl), nor a checkpoint (it has no manifest.json), "
            f"nor a dataset (there is no {path}.idx). Check the path."
        )
    shown_facts = {key: value for key, value in facts.items() if key not in ("losses", "facts")}
    return print_json(to_json_data(shown_facts), allow_nan=False) if as_json else print_facts(facts)


def _describe_foreign_model(path: Path) -> str:
    """Return two sentences on the folder of a model of another program, or on a file of one: the program, the model's
    type, its size and number of tensors, and how to import it; "" for another path.
    """
    from lmtrain.exchange.detect_model_folder_format import identify_source
    from lmtrain.exchange.huggingface.config_json import tensor_names

    folder = path.parent if path.suffix == ".safetensors" else path
    if not folder.is_dir() or is_run(folder) or not (folder == path or path.is_file()):
        return ""
    try:
        source = identify_source(folder)
        names = tensor_names(folder) - {"__metadata__"} if source.program == "hf" else None
    except LmtrainError:
        return ""
    kind = read_json(folder / CONFIG).get("model_type") if names is not None else None
    tensors = "" if names is None else f"{plural(len(names), 'tensor')}, "
    model = f" with a model of the type {shorten(kind)}" if isinstance(kind, str) else ""
    return (
        f"{path} is {'a file of ' * (folder != path)}{source}{model} ({tensors}{format_bytes(_size(folder))}), which "
        f"lmtrain imports first. Type `lmtrain import {shell_quoted(str(folder))} --output DIR`; then `lmtrain inspect "
        "DIR --all` lists its tensors."
    )


def _is_inspected(path: Path) -> bool:
    """Return whether `lmtrain inspect` can describe what the path names."""
    from lmtrain.checkpoint.find_and_prune import is_run_or_checkpoint
    from lmtrain.data.store.joined_dataset import dataset_exists

    return is_run_or_checkpoint(path) or dataset_exists(path)


def _size(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _print_run(facts: dict[str, Any], show_all: bool) -> None:
    """Print a run's description on stdout. `facts` is the dict of `run_facts`; all of its checkpoints and settings are
    printed only with `show_all`.
    """
    from lmtrain.cli.screen.print_facts_and_tables import PlainConsole, print_facts, print_tree

    with record_errors(Path(facts["run"])):
        lines = [*run_lines(facts, PlainConsole().encoding.startswith("utf"))]
    print_facts(f"run {facts['run']}", lines)
    if show_all:
        sizes = [(name, format_bytes(size)) for name, size in facts["checkpoint_bytes"].items()]
        print_facts("checkpoints", sizes or [("", "none")])
        print_tree("settings", facts["settings"])
