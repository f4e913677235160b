"""`lmtrain eval`: a checkpoint, a task and its file in; a number with its recipe out, as a table or as JSON."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmtrain import __version__
from lmtrain.cli.completion import complete_task
from lmtrain.cli.launching import NumProcesses, run_processes, this_process, without_nproc
from lmtrain.cli.options import Device, InputFormat, Plugins, Precision, text_inputs
from lmtrain.cli.terminal import echo
from lmtrain.errors import MissingInputError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from data_tools.read.sources import Source
    from lmtrain.eval.load import Loaded
    from lmtrain.eval.result import Result
    from lmtrain.eval.runner import Outcome
    from lmtrain.eval.task import Task
    from lmtrain.eval.texts import TextInput

SUBJECT = typer.Argument(
    metavar="CHECKPOINT", help="A checkpoint, a run's folder for its latest one, or a folder of Hugging Face's."
)
Layout = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="parallel.KEY=VALUE",
        help="With several processes: how they share the model, as in parallel.tp=2 parallel.pp=2; what these leave "
        "are copies of it, each with batches of its own.",
    ),
]


def evaluate(
    context: typer.Context,
    checkpoint: Annotated[Path | None, SUBJECT] = None,
    layout: Layout = None,
    task: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="What to measure; several need a --data each.", autocompletion=complete_task),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="The task's file, a .bin/.idx prefix, or any input of `lmtrain preprocess`."),
    ] = None,
    key: Annotated[str, typer.Option(help="The key or column of the text, where the task leaves it open.")] = "text",
    format_: InputFormat = None,
    baseline: Annotated[
        Path | None, typer.Option(metavar="PREFIX", help="A training .bin/.idx prefix: also score by its counts.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows scored together.")] = 8,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens between windows, where the task leaves it open.")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a window; all that the model sees unless given.")
    ] = None,
    device: Device = "auto",
    precision: Precision = "fp32",
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write JSON to this file.")] = None,
    plugin: Plugins = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    list_tasks: Annotated[bool, typer.Option("--list", help="List the tasks with their recipes and stop.")] = False,
    nproc: NumProcesses = None,
) -> None:
    """Measure a checkpoint on a published protocol or on any text.

    Every result comes with what it was divided by, how its text was cut, and the sum from which it follows.
    """
    if list_tasks:
        return _list(as_json)
    jobs = _jobs(task, data, baseline, format_)
    if checkpoint is None:
        raise UsageError("CHECKPOINT is missing. Give a checkpoint or a run's folder, as in `lmtrain eval runs/a ...`.")
    env = this_process(nproc)

    from lmtrain.cli.screen import Screen
    from lmtrain.cli.subject import check_device, find_subject, on_processes, settle_layout
    from lmtrain.eval.source import check_kind

    subject = find_subject(checkpoint)  # before torch is imported, so that what is wrong is told at once
    parallel = settle_layout(layout or [], subject.settings, env)
    check_device(device, env)
    for one, _ in jobs:
        check_kind(one, causal=subject.settings.shape.causal, pairs="pair" in subject.settings.terms)
    if env.world_size > 1 and "-" in (data or []):
        raise UsageError(
            f"--data=- is standard input, which one process alone can read, and here are {env.world_size}. "
            "Write the text to a file."
        )
    if nproc is not None and nproc > 1:
        return run_processes(without_nproc(context.obj), nproc)

    from lmtrain.eval.report import render
    from lmtrain.observe.progress import progress
    from lmtrain.runtime.files import write_json

    console = Screen(stderr=True, quiet=env.rank > 0)
    with contextlib.ExitStack() as stack:
        with progress(console, "loading the model"):
            loaded = stack.enter_context(on_processes(subject, env, parallel, device, precision))
        outcomes = [_measure(one, source, loaded, batch_size, stride, seq_len, key, console) for one, source in jobs]
    if env.rank > 0:
        return None  # because: all have all answers, and rank 0 speaks for them
    results = [_compared(outcome, loaded, baseline, console) for outcome in outcomes]
    document = {
        "format": "lmtrain evaluation",
        "lmtrain": __version__,
        "model": loaded.facts,
        "results": [result.to_dict() for result in results],
    }
    if output is not None:
        write_json(output, document)
    if as_json:
        echo(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False))
        return None
    for result in results:
        Screen(highlight=False).print(render(result, loaded.facts))
    return None


def _jobs(
    names: list[str] | None, sources: list[str] | None, baseline: Path | None, format_: str | None
) -> list[tuple[Task, Path | list[Source]]]:
    """Each task with its files, refused before a model is loaded."""
    from data_tools.read.sources import find_sources
    from lmtrain.eval.datasets import dataset_prefix
    from lmtrain.eval.task import TextTask, all_tasks, find_task

    names, sources = names or [], sources or []
    if not names or len(names) != len(sources):
        raise UsageError(
            f"{len(names)} --task and {len(sources)} --data were given. Give one --data for each --task; "
            "`lmtrain eval --list` shows the tasks."
        )
    tasks = [find_task(name) for name in names]
    if baseline is not None and not any(task.compares for task in tasks):
        known = ", ".join(name for name, task in all_tasks().items() if task.compares)
        raise UsageError(f"--baseline={baseline} works where whole documents are scored. Leave it out or use {known}.")
    jobs: list[tuple[Task, Path | list[Source]]] = []
    for task, source in zip(tasks, sources, strict=True):
        prefix = dataset_prefix(Path(source))
        if prefix is not None or not isinstance(task, TextTask):
            if prefix is None and not Path(source).exists():
                raise MissingInputError(f"--data={source} does not exist. Give a file or a .bin/.idx prefix.")
            jobs.append((task, Path(source)))
        elif source != "-" and not Path(source).exists() and not any(mark in source for mark in "*?["):
            raise MissingInputError(f"--data={source} does not exist. Give a file, a folder or a .bin/.idx prefix.")
        else:
            jobs.append((task, find_sources(text_inputs([source], format_))))
    if format_ is not None and all(isinstance(source, Path) for _, source in jobs):
        raise UsageError(f"--format={format_} is for texts, and no task here reads any. Leave it out.")
    return jobs


def _measure(
    task: Task, source: Path | list[Source], loaded: Loaded, batch_size: int, stride: int | None, seq_len: int | None,
    key: str, console: Console,
) -> Outcome:  # fmt: skip
    from lmtrain.eval.runner import run
    from lmtrain.observe.progress import progress

    with progress(console, f"{task.id}: read", "bytes", stopped="nothing is written.") as shown:
        given = source if isinstance(source, Path) else read_texts(source, key, shown)
    with progress(console, f"{task.id}: scored", "tokens", stopped="nothing is written.") as shown:
        return run(
            task, loaded.subject, given, stride=stride, seq_len=seq_len, batch_size=batch_size, progress=shown
        )


def _compared(outcome: Outcome, loaded: Loaded, baseline: Path | None, console: Console) -> Result:
    from lmtrain.eval.compare import with_baselines
    from lmtrain.observe.progress import progress

    if baseline is None or outcome.prepared.documents is None:
        return outcome.result
    with progress(console, "counting for the baselines"):
        return with_baselines(outcome.result, outcome.prepared, baseline, loaded.subject.tokenizer)


def read_texts(sources: list[Source], key: str, report: Callable[[int], None]) -> TextInput:
    """All documents, and a hash to know them by: the file's, where there is one."""
    import hashlib
    from collections import Counter

    from data_tools.preprocess.texts import ALL, Texts
    from lmtrain.eval.texts import TextInput

    found = list(Texts(sources, key, report=lambda done: None if done == ALL else report(done)).with_paths())
    documents = [text for _, text in found]
    files = {str(path): count for path, count in Counter(path for path, _ in found).items()}
    if len(sources) == 1 and sources[0].num_bytes:
        with open(sources[0].path, "rb") as file:
            return TextInput(
                str(sources[0].path), documents, hashlib.file_digest(file, "sha256").hexdigest(), "the file", files
            )
    digest = hashlib.sha256()
    for document in documents:
        digest.update(document.encode() + b"\0")
    name = str(sources[0].path) if len(sources) == 1 else f"{len(sources)} files, the first {sources[0].path}"
    return TextInput(name, documents, digest.hexdigest(), "the documents, each with a zero byte behind it", files)


def _list(as_json: bool) -> None:
    from lmtrain.cli.screen import Screen
    from lmtrain.eval.task import all_tasks

    tasks = all_tasks()
    if as_json:
        plain: list[dict[str, Any]] = [
            {"id": name, "data": task.data, "headline": task.headline, "recipe": task.recipe}
            for name, task in tasks.items()
        ]
        return echo(json.dumps(plain, indent=1))
    from lmtrain.eval.report import render_tasks

    return Screen(highlight=False).print(render_tasks(tasks))
