"""`lmtrain preprocess`: text files to a dataset. Draws progress; the work is data_tools.pipeline's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from data_tools.pipeline import Summary


def preprocess(
    inputs: Annotated[
        list[str], typer.Argument(metavar="INPUT...", help=".txt and .jsonl files, folders of them, or globs.")
    ],
    tokenizer: Annotated[
        Path, typer.Option(help="tokenizer.json, GPT-2's vocab.json, BERT's vocab.txt, or a folder that holds one.")
    ],
    output: Annotated[Path, typer.Option(metavar="PREFIX", help="Makes PREFIX.bin, .idx, .json, .tokenizer.json.")],
    workers: Annotated[int | None, typer.Option(help="Processes that tokenize. [default: every core]")] = None,
    key: Annotated[str, typer.Option(help="The key of the text in .jsonl files.")] = "text",
    append_eod: Annotated[
        bool | None,
        typer.Option("--append-eod/--no-append-eod", help="End each document with the end token, if there is one."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing dataset.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Tokenize text into a dataset for training."""
    import os

    from rich.console import Console

    from data_tools import pipeline
    from lmtrain.tokenizer.base import Tokenizer

    cores = len(os.sched_getaffinity(0))
    with _progress(Console(stderr=True)) as progress:
        summary = pipeline.preprocess(
            inputs, Tokenizer.load(tokenizer), output, workers=cores if workers is None else workers, key=key,
            append_eod=append_eod, overwrite=overwrite, progress=progress,
        )  # fmt: skip
    _print(summary, as_json)


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    if not (console.is_terminal and console.is_interactive):
        yield _plain_progress(console)
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns: list[Any] = [
        "tokenizing", BarColumn(), DownloadColumn(), TransferSpeedColumn(), "left", TimeRemainingColumn()
    ]  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("tokenizing", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _plain_progress(console: Console) -> Callable[[int, int], None]:
    """A line every tenth of the way."""
    from time import perf_counter

    from lmtrain.units import format_seconds

    began, tenths = perf_counter(), 0

    def show(done: int, total: int) -> None:
        nonlocal tenths
        if total and done * 10 // total > tenths:
            tenths = done * 10 // total
            seconds = perf_counter() - began
            left = format_seconds(seconds * (total - done) / done)
            line = f"tokenized {done / 1e6:.1f} of {total / 1e6:.1f} MB, {done / 1e6 / seconds:.1f} MB/s, {left} left"
            console.print(line, highlight=False)

    return show


def _print(summary: Summary, as_json: bool) -> None:
    import dataclasses
    import json

    from lmtrain.units import format_bytes, format_count, format_seconds

    if as_json:
        facts = dataclasses.asdict(summary) | {"bytes_per_token": summary.bytes_per_token}
        typer.echo(json.dumps(facts, indent=1))
        return
    typer.echo(
        f"{format_count(summary.num_documents)} documents, {format_bytes(summary.num_bytes)} of text -> "
        f"{format_count(summary.num_tokens)} tokens ({summary.bytes_per_token:.2f} bytes a token) "
        f"in {format_seconds(summary.seconds)}"
    )
    for name in summary.files:
        typer.echo(f"  {name}")
