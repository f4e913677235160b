"""`lmtrain corpus`: raw text to a clean, deduplicated, split corpus of JSON lines. The work is data_tools'.

Every step streams, writes the same bytes with any number of workers, and runs as one task of many with `--part`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmtrain.cli.options import InputFormat, TextInputs, parse_output_file, parse_size, resolve_text_inputs
from lmtrain.cli.screen.terminal import echo, progress
from lmtrain.errors import UsageError
from lmtrain.runtime.processes.process import num_usable_cpus
from lmtrain.units import format_bytes, plural

if TYPE_CHECKING:
    from data_tools.corpus.flow.steps import Report, StepOptions
    from data_tools.read.sources import Inputs

app = typer.Typer(no_args_is_help=True)

Output = Annotated[
    Path,
    typer.Option(
        metavar="FILE", parser=parse_output_file, help="The .jsonl to write; FILE.report.json goes beside it."
    ),
]
Workers = Annotated[int | None, typer.Option(help="Processes that work. [default: every core]")]
PartText = Annotated[str, typer.Option("--part", metavar="I/N", help="Do task I (from 0) of N, and write its part.")]
Key = Annotated[str, typer.Option(help="The key of the text.")]
OnError = Annotated[str, typer.Option(metavar="{stop,skip}", help="What a bad line does; skipped ones are counted.")]
Seed = Annotated[int, typer.Option(help="Another seed is another choice.")]
Keep = Annotated[str, typer.Option(metavar="{first,longest}", help="Which of a group of near copies stays.")]
WorkFolder = Annotated[Path, typer.Option("--work", metavar="DIR", help="The folder that the tasks share.")]


@app.command("list")
def list_recipes() -> None:
    """Say which corpora and evaluation texts `lmtrain corpus get` knows."""
    from data_tools.corpora.recipe import PublishedTexts, recipes

    for recipe in recipes().values():
        echo(f"{recipe.name}: {recipe.about}")
        if isinstance(recipe, PublishedTexts):
            echo(f"  brings {' and '.join(file.name for file in recipe.files)} for `lmtrain eval`, as published")
            continue
        size = sum(file.num_bytes for file in recipe.files)
        echo(f"  {f'fetches {format_bytes(size)}; ' if size else ''}reads {recipe.takes}")


@app.command()
def get(
    name: Annotated[str, typer.Argument(help="A corpus of `lmtrain corpus list`.")],
    output: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Gets train.jsonl, valid.jsonl, test.jsonl, or the evaluation texts."),
    ],
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Files you have; for evaluation texts also folders and archives. [default: fetched]"),
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Never open a connection.")] = False,
) -> None:
    """Make JSON lines of a known corpus, or bring evaluation texts, from published files or from yours."""
    from data_tools.corpora.recipe import PublishedTexts, find_recipe, get_corpus, get_texts

    recipe = find_recipe(name)
    if isinstance(recipe, PublishedTexts):
        with _bytes_shown() as report:
            placed = get_texts(recipe, files or [], output, offline=offline, report=report)
        for path, origin in placed.items():
            echo(f"{path}: {origin or 'not among what was given'}")
        return
    with _bytes_shown() as report:
        result = get_corpus(recipe, files or [], output, offline=offline, report=report)
    _print(result)


@app.command()
def fetch(
    url: Annotated[str, typer.Argument(help="An https address.")],
    sha256: Annotated[str, typer.Option(help="What the file must hash to.")],
    output: Annotated[Path, typer.Option(metavar="FILE", parser=parse_output_file, help="Where it goes.")],
) -> None:
    """Fetch one file whose SHA-256 you know; a broken transfer is continued."""
    from data_tools.corpora import fetch as fetching

    with _bytes_shown() as report:
        fresh = fetching.fetch([url], output, sha256=sha256, report=report)
    echo(f"{output}: {'fetched' if fresh else 'was there already'}, SHA-256 as promised")


@app.command()
def clean(
    inputs: TextInputs,
    output: Output,
    rule: Annotated[
        list[str] | None,
        typer.Option(help="A group (gopher, c4, fineweb), a rule, a rule=limit, c4_lines, or none. [default: gopher, "
                          "lines_ending_in_punctuation]"),
    ] = None,
    script: Annotated[list[str] | None, typer.Option(help="A welcome script (latin, han, ...). [default: all]")] = None,
    min_script_share: Annotated[float, typer.Option(help="The least share of letters in welcome scripts.")] = 0.5,
    workers: Workers = None, part: PartText = "0/1", key: Key = "text", on_error: OnError = "stop",
    format_: InputFormat = None,
) -> None:  # fmt: skip
    """Mend damaged text, and leave out boilerplate, repetition and unwelcome scripts."""
    from data_tools.corpus.clean import DEFAULT_RULES, build_clean

    step = build_clean(DEFAULT_RULES if rule is None else rule, script or (), min_script_share)
    _run(step, resolve_text_inputs(inputs, format_), output, workers, part, key, on_error)


@app.command()
def rules() -> None:
    """List the rules of `lmtrain corpus clean` and their limits."""
    from data_tools.corpus.clean import GROUPS, LINE_RULES, RULES

    for rule in RULES.values():
        groups = ", ".join(name for name, members in GROUPS.items() if rule.name in members)
        echo(f"{rule.name}={rule.limit:g}  {'at least' if rule.at_least else 'at most'}  ({groups})")
    echo(f"c4_lines: {', '.join(LINE_RULES)}")


@app.command()
def dedupe(
    inputs: TextInputs,
    output: Output,
    exact_only: Annotated[bool, typer.Option("--exact-only", help="Leave near copies in.")] = False,
    threshold: Annotated[float, typer.Option(help="Jaccard similarity that makes two texts copies.")] = 0.8,
    keep: Keep = "first",
    workers: Workers = None, key: Key = "text", on_error: OnError = "stop",
    format_: InputFormat = None,
) -> None:  # fmt: skip
    """Leave out exact and near copies: `sign`, `match`, `join` and `drop` in a row."""
    from data_tools.corpus.build import DedupeSettings, dedupe_documents
    from lmtrain.config.build import build_settings

    settings = build_settings(DedupeSettings, {"near": not exact_only, "threshold": threshold, "keep": keep}, "dedupe")
    with _working(workers, "0/1", key, on_error) as work:
        _print(dedupe_documents(resolve_text_inputs(inputs, format_), output, settings, work))


@app.command()
def sign(
    inputs: TextInputs,
    work: WorkFolder,
    exact_only: Annotated[bool, typer.Option("--exact-only", help="No signatures for near copies.")] = False,
    workers: Workers = None, part: PartText = "0/1", key: Key = "text", on_error: OnError = "stop",
    format_: InputFormat = None,
) -> None:  # fmt: skip
    """First step of deduplication in tasks: hash and sign every document."""
    from data_tools.corpus import build
    from data_tools.corpus.copies.dedupe import MinHash

    with _working(workers, part, key, on_error) as working:
        minhash = None if exact_only else MinHash()
        _print(build.sign_documents(resolve_text_inputs(inputs, format_), work, minhash, working))


@app.command()
def match(
    work: WorkFolder,
    threshold: Annotated[float, typer.Option(help="Jaccard similarity that makes two texts copies.")] = 0.8,
    exact: Annotated[bool, typer.Option("--exact", help="Mark exact copies; comes first, and once.")] = False,
    part: PartText = "0/1",
) -> None:
    """Second step: mark exact copies with `--exact`, then find near ones, the bands in parts."""
    from data_tools.corpus.copies.dedupe import find_pairs, mark_exact
    from data_tools.read.chunks import TaskPart

    with _documents_shown("matching"):
        found = mark_exact(work) if exact else find_pairs(work, threshold, TaskPart.parse(part))
    echo(f"{found} exact copies" if exact else f"{found} pairs of near copies")


@app.command()
def join(
    work: WorkFolder,
    parts: Annotated[int, typer.Option(help="In how many parts `match` ran.")] = 1,
    keep: Keep = "first",
) -> None:
    """Third step: join the pairs of all parts into groups and mark all but one of each."""
    from data_tools.corpus.copies.dedupe import mark_near

    with _documents_shown("joining"):
        found = mark_near(work, keep, parts)
    echo(f"{found} near copies")


@app.command()
def drop(
    inputs: TextInputs, work: WorkFolder, output: Output,
    workers: Workers = None, part: PartText = "0/1", key: Key = "text", on_error: OnError = "stop",
    format_: InputFormat = None,
) -> None:  # fmt: skip
    """Last step: write the documents that are not copies."""
    from data_tools.corpus import build

    with _working(workers, part, key, on_error) as working:
        _print(build.drop_copies(resolve_text_inputs(inputs, format_), work, output, working))


@app.command()
def decontaminate(
    inputs: TextInputs,
    output: Output,
    against: Annotated[list[Path], typer.Option(help="A file of evaluation texts; may be given again.")],
    action: Annotated[str, typer.Option(metavar="{cut,drop}", help="Cut passages out, or drop the document.")] = "cut",
    workers: Workers = None, part: PartText = "0/1", key: Key = "text", on_error: OnError = "stop",
    format_: InputFormat = None,
) -> None:  # fmt: skip
    """Take passages of evaluation texts out, found by runs of 13 words."""
    from data_tools.corpus.copies.decontaminate import DecontaminateStep, read_passages

    step = DecontaminateStep(read_passages(against), action)
    _run(step, resolve_text_inputs(inputs, format_), output, workers, part, key, on_error)


@app.command()
def split(
    inputs: TextInputs,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Gets train.jsonl, valid.jsonl and test.jsonl.")],
    ratios: Annotated[str, typer.Option(help="Shares of train, valid and test.")] = "0.98,0.01,0.01",
    by: Annotated[str, typer.Option(metavar="{text,id}", help="What decides; equal ones stay together.")] = "text",
    seed: Seed = 0, workers: Workers = None, part: PartText = "0/1", key: Key = "text", on_error: OnError = "stop",
    format_: InputFormat = None,
) -> None:  # fmt: skip
    """Split into train, valid and test by a hash of each document."""
    from data_tools.corpus.flow.steps import run_step
    from data_tools.corpus.random_steps import SplitStep, split_outputs

    step = SplitStep(_shares(ratios), seed, by)
    with _working(workers, part, key, on_error) as work:
        sources = resolve_text_inputs(inputs, format_)
        _print(run_step(step, sources, split_outputs(output), work, output / "split.report.json"))


@app.command()
def shuffle(
    inputs: TextInputs, output: Output,
    seed: Seed = 0, memory: Annotated[str, typer.Option(help="How much to hold at once.")] = "256MiB",
    part: PartText = "0/1", key: Key = "text", on_error: OnError = "stop",
    format_: InputFormat = None,
) -> None:  # fmt: skip
    """Put all documents in a random order, in two passes over disk."""
    from data_tools.corpus import random_steps
    from data_tools.corpus.flow.steps import report_path

    memory_bytes = max(parse_size("--memory", memory), 1 << 20)
    found = resolve_text_inputs(inputs, format_)
    with _working(1, part, key, on_error) as work:
        _print(random_steps.shuffle(found, output, work, report_path(output), seed, memory_bytes))


@app.command()
def sample(
    inputs: TextInputs, output: Output,
    fraction: Annotated[float | None, typer.Option(help="This share of the documents, nearly.")] = None,
    count: Annotated[int | None, typer.Option(help="Exactly so many documents.")] = None,
    seed: Seed = 0, workers: Workers = None, part: PartText = "0/1", key: Key = "text", on_error: OnError = "stop",
    format_: InputFormat = None,
) -> None:  # fmt: skip
    """Draw documents at random; they keep their order."""
    from data_tools.corpus.random_steps import SampleStep, sample_limit

    work = _work(workers, part, key, on_error, None)
    found = resolve_text_inputs(inputs, format_)
    limit = sample_limit(found, work, output.parent, fraction=fraction, count=count, seed=seed)
    _run(SampleStep(limit, seed), found, output, workers, part, key, on_error)


@app.command()
def merge(
    output: Annotated[Path, typer.Argument(help="The --output of all the parts: a file, or split's folder.")],
) -> None:
    """Join the parts that tasks wrote into the file that one task would have written."""
    from data_tools.corpus.flow.steps import merge_outputs

    for path, count in merge_outputs(output):
        echo(f"{path}: joined {count} parts")


@app.command()
def build(
    recipe: Annotated[Path, typer.Argument(help="A YAML file: inputs, output, and the steps to run.")],
    workers: Workers = None,
) -> None:
    """Run all steps that a YAML file names; a second run continues where the first stopped."""
    from data_tools.corpus.build import build_corpus, read_recipe

    settings = read_recipe(recipe)
    with _documents_shown() as report:
        reports = build_corpus(settings, num_usable_cpus() if workers is None else workers, report)
    for result in reports:
        _print(result)
    echo(f"{settings.output}/report.json has all of this")


# ---- shared by the verbs ---------------------------------------------------------------------------------------------


def _run(step: Any, inputs: Inputs, output: Path, workers: int | None, part: str, key: str, on_error: str) -> None:
    from data_tools.corpus.flow.steps import report_path, run_step

    with _working(workers, part, key, on_error) as work:
        _print(run_step(step, inputs, {"documents": output}, work, report_path(output)))


def _work(
    workers: int | None, part: str, key: str, on_error: str, report: Callable[[str, int], None] | None
) -> StepOptions:
    from data_tools.corpus.flow.steps import ReadOptions, StepOptions
    from data_tools.read.chunks import TaskPart
    from data_tools.read.content import OnError

    if on_error not in ("stop", "skip"):
        raise UsageError(f"--on-error={on_error} is not a choice. Use stop or skip.")
    cores = num_usable_cpus() if workers is None else workers
    return StepOptions(cores, ReadOptions(key, OnError(on_error), part=TaskPart.parse(part)), report)


@contextmanager
def _working(workers: int | None, part: str, key: str, on_error: str) -> Iterator[StepOptions]:
    """Yield how a step is to work, and show meanwhile how many documents are done."""
    with _documents_shown() as report:
        yield _work(workers, part, key, on_error, report)


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(share) for share in text.split(","))
    except ValueError as error:
        raise UsageError(f"--ratios={text} are not numbers. Write them as 0.98,0.01,0.01.") from error


def _print(result: Report) -> None:
    tally = result.tally
    echo(
        f"{result.step}: {plural(tally.num_in, 'document')} ({format_bytes(tally.bytes_in)}) -> "
        f"{tally.num_out} ({format_bytes(tally.bytes_out)})"
    )
    for sign_, counts in (("-", tally.dropped), ("*", tally.changed)):
        for cause, number in counts.most_common():
            echo(f"  {sign_} {number} {cause}")


@contextmanager
def _documents_shown(doing: str = "starting") -> Iterator[Callable[[str, int], None]]:
    """Show how many documents are done: on a terminal at once, else every few seconds."""
    stopped = "nothing has the output's name. The same command begins anew; `build` goes on after its last whole step."
    with progress(doing, "documents", interrupted=stopped) as shown:

        def report(step: str, done: int) -> None:
            shown.set_activity(step)
            shown(done)

        yield report


@contextmanager
def _bytes_shown() -> Iterator[Callable[[int, int | None], None]]:
    with progress("fetched", "bytes", interrupted="the same command goes on where this one was.") as shown:
        before: int | None = None  # bytes that an earlier transfer brought

        def report(done: int, total: int | None) -> None:
            nonlocal before
            before = done if before is None or done < before else before
            shown(done, total or 0, before)

        yield report
