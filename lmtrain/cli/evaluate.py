"""`lmtrain eval`: a checkpoint, a task and its file in; a number with its recipe out, as a table or as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmtrain import __version__
from lmtrain.cli.completion import complete_task
from lmtrain.cli.options import CHECKPOINT, Device, Plugins, Precision
from lmtrain.errors import MissingInputError, UsageError

if TYPE_CHECKING:
    from lmtrain.eval.load import Loaded
    from lmtrain.eval.result import Result
    from lmtrain.eval.task import Task


def evaluate(
    checkpoint: Annotated[Path | None, CHECKPOINT] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="What to measure; several need a --data each.", autocompletion=complete_task),
    ] = None,
    data: Annotated[
        list[Path] | None, typer.Option(metavar="PATH", help="The task's file, or a .bin/.idx prefix.")
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(metavar="PREFIX", help="A training .bin/.idx prefix: also score by its counts.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows scored together.")] = 8,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens between windows, where the task leaves it open.")
    ] = None,
    device: Device = "auto",
    precision: Precision = "fp32",
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write JSON to this file.")] = None,
    plugin: Plugins = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    list_tasks: Annotated[bool, typer.Option("--list", help="List the tasks with their recipes and stop.")] = False,
) -> None:
    """Measure a checkpoint on a published protocol or on any text.

    Every result comes with what it was divided by, how its text was cut, and the sum from which it follows.
    """
    if list_tasks:
        return _list(as_json)
    jobs = _jobs(task, data, baseline)
    if checkpoint is None:
        raise UsageError("CHECKPOINT is missing. Give a checkpoint or a run's folder, as in `lmtrain eval runs/a ...`.")

    from lmtrain.checkpoint.store import resolve
    from lmtrain.runtime.process import share_cores

    checkpoint = resolve(checkpoint)  # before torch is imported, so that a wrong path is told at once
    share_cores()

    from rich.console import Console

    from lmtrain.eval.load import load_for_eval
    from lmtrain.eval.report import render
    from lmtrain.runtime.device import pick_device
    from lmtrain.runtime.files import write_json

    loaded = load_for_eval(checkpoint, pick_device(device), precision)
    results = [_measure(one, source, loaded, batch_size, stride, baseline) for one, source in jobs]
    document = {
        "format": "lmtrain evaluation",
        "lmtrain": __version__,
        "model": loaded.facts,
        "results": [result.to_dict() for result in results],
    }
    if output is not None:
        write_json(output, document)
    if as_json:
        typer.echo(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False))
        return None
    for result in results:
        Console(highlight=False).print(render(result, loaded.facts))
    return None


def _jobs(names: list[str] | None, sources: list[Path] | None, baseline: Path | None) -> list[tuple[Task, Path]]:
    """Each task with its file, refused before a model is loaded."""
    from lmtrain.eval.task import find_task

    names, sources = names or [], sources or []
    if not names or len(names) != len(sources):
        raise UsageError(
            f"{len(names)} --task and {len(sources)} --data were given. Give one --data for each --task; "
            "`lmtrain eval --list` shows the tasks."
        )
    tasks = [find_task(name) for name in names]
    if baseline is not None and not any(task.compares for task in tasks):
        raise UsageError(f"--baseline={baseline} works with --task perplexity only. Leave it out or use that task.")
    for source in sources:
        if not source.exists() and not Path(f"{source}.idx").exists():
            raise MissingInputError(f"--data={source} does not exist. Give a file or a .bin/.idx prefix.")
    return list(zip(tasks, sources, strict=True))


def _measure(
    task: Task, source: Path, loaded: Loaded, batch_size: int, stride: int | None, baseline: Path | None
) -> Result:
    from rich.console import Console
    from rich.progress import Progress

    from lmtrain.eval.compare import with_baselines
    from lmtrain.eval.runner import run

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(task.id, total=None)
        result, prepared = run(
            task,
            loaded.subject,
            source,
            stride=stride,
            batch_size=batch_size,
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    if baseline is None or not task.compares:
        return result
    return with_baselines(result, prepared, baseline, loaded.subject.tokenizer)


def _list(as_json: bool) -> None:
    from rich.console import Console

    from lmtrain.eval.task import all_tasks

    tasks = all_tasks()
    if as_json:
        plain: list[dict[str, Any]] = [
            {"id": name, "data": task.data, "headline": task.headline, "recipe": task.recipe}
            for name, task in tasks.items()
        ]
        return typer.echo(json.dumps(plain, indent=1))
    from lmtrain.eval.report import render_tasks

    return Console(highlight=False).print(render_tasks(tasks))
