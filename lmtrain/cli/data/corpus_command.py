"""`lmtrain corpus`: raw text to a clean, deduplicated, split corpus of JSON lines. The steps are in data_tools.

Every step streams, writes the same bytes with any number of workers, and runs as one task of many with `--part`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lmtrain.cli.screen.print_messages_and_json import echo, progress, say_already_there
from lmtrain.cli.shared_options import (
    InputFormat,
    RereadInputs,
    Suffixes,
    TextInputs,
    check_seed,
    parse_numbers,
    parse_output_file,
    parse_size,
    refuse_unused_options,
    resolve_text_inputs,
)
from lmtrain.errors import example
from lmtrain.runtime.processes.process_environment import num_usable_cpus
from lmtrain.units import format_bytes, plural

if TYPE_CHECKING:
    from data_tools.corpus.clean import CleanStep
    from data_tools.corpus.flow.run_one_corpus_step_in_workers import Report, Step, StepOptions
    from data_tools.corpus.split_sample_shuffle import SplitStep
    from data_tools.read.find_input_files import Inputs

app = typer.Typer(no_args_is_help=True)

Output = Annotated[
    Path,
    typer.Option(
        metavar="FILE", parser=parse_output_file, help="The .jsonl to write; FILE.report.json goes beside it."
    ),
]
Workers = Annotated[int | None, typer.Option(help="Number of processes. [default: one per core]")]
PartText = Annotated[str, typer.Option("--part", metavar="I/N", help="Process only part I (from 0) of N.")]
Key = Annotated[str, typer.Option(help="Key of the text in JSON lines, or its column.")]
OnError = Annotated[Literal["stop", "skip"], typer.Option(help="At a bad line: stop, or skip and count it.")]
Seed = Annotated[int, typer.Option(callback=check_seed, help="Seed of the random choice.")]
Keep = Annotated[
    Literal["first", "longest"], typer.Option(help="Which document of a group of near copies to keep.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace documents that are already there.")]
WorkFolder = Annotated[Path, typer.Option("--work", metavar="DIR", help="Folder that all tasks and steps share.")]


@app.command("list")
def list_recipes() -> None:
    """List the corpora and evaluation texts that `lmtrain corpus get` can fetch or build."""
    from data_tools.corpora.corpus_definition import PublishedTexts, recipes

    for recipe in recipes().values():
        echo(f"{recipe.name}: {recipe.about}")
        if isinstance(recipe, PublishedTexts):
            echo(f"  brings {' and '.join(file.name for file in recipe.files)} for `lmtrain eval`, as published")
            continue
        size = sum(file.num_bytes for file in recipe.files)
        echo(f"  {f'fetches {format_bytes(size)}; ' if size else ''}reads {recipe.takes}")


@app.command()
def get(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A corpus of `lmtrain corpus list`.")],
    output: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Folder for train.jsonl, valid.jsonl, test.jsonl, or the evaluation texts."),
    ],
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Files that you have; for evaluation texts also folders and archives. [default: download]"),
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Download nothing.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Write a known corpus as JSON lines, or published evaluation texts unchanged; files are downloaded unless given.
    """
    from data_tools.corpora.corpus_definition import PublishedTexts, find_recipe, get_corpus, get_texts

    recipe = find_recipe(name)
    if isinstance(recipe, PublishedTexts):
        refuse_unused_options(context, {"overwrite"}, f"{name}, texts of which there is one version only")
        with _show_bytes_fetched() as report:
            placed = get_texts(recipe, files or [], output, offline=offline, report=report)
        for path, origin in placed.items():
            echo(f"{path}: {origin or 'not among what was given'}")
        return
    with _show_bytes_fetched() as report:
        result = get_corpus(recipe, files or [], output, offline=offline, report=report, overwrite=overwrite)
    say_already_there(output) if result is None else _print(result)


@app.command()
def fetch(
    url: Annotated[str, typer.Argument(help="An https address.")],
    sha256: Annotated[str, typer.Option(help="The file's SHA-256.")],
    output: Annotated[Path, typer.Option(metavar="FILE", parser=parse_output_file, help="The file to write.")],
) -> None:
    """Download a file and check its SHA-256; an interrupted download is continued."""
    from data_tools.corpora import download as fetching

    with _show_bytes_fetched() as report:
        fresh = fetching.fetch([url], output, sha256=sha256, report=report)
    echo(f"{output}: {'fetched' if fresh else 'is already there'}, SHA-256 as promised")


@app.command()
def clean(
    context: typer.Context,
    inputs: TextInputs,
    output: Output,
    rule: Annotated[
        list[str] | None,
        typer.Option(help="A group (gopher, c4, fineweb), a rule, a rule=limit, c4_lines, or none. [default: gopher, "
                          "lines_ending_in_punctuation]"),
    ] = None,
    script: Annotated[list[str] | None, typer.Option(help="Allowed script (latin, han, ...). [default: all]")] = None,
    min_script_share: Annotated[float, typer.Option(help="The least share of letters in allowed scripts.")] = 0.5,
    workers: Workers = None, part: PartText = "0/1", key: Key = "text", on_error: OnError = "stop",
    format_: InputFormat = None, suffix: Suffixes = None, overwrite: Overwrite = False,
) -> None:  # fmt: skip
    """Repair damaged text, and drop documents that break a quality rule or are not in an allowed script."""
    _run_step(context, build_clean_step(context, rule, script, min_script_share))


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
    context: typer.Context,
    inputs: RereadInputs,
    output: Output,
    exact_only: Annotated[bool, typer.Option("--exact-only", help="Drop only exact copies.")] = False,
    threshold: Annotated[float, typer.Option(help="Jaccard similarity that makes two texts copies.")] = 0.8,
    keep: Keep = "first",
    workers: Workers = None, key: Key = "text", on_error: OnError = "stop",
    format_: InputFormat = None, suffix: Suffixes = None, overwrite: Overwrite = False,
) -> None:  # fmt: skip
    """Drop exact and near copies of documents: the steps `sign`, `match`, `join` and `drop` in one command."""
    from data_tools.corpus.build_from_yaml import DedupeSettings, dedupe_documents
    from lmtrain.config.build_typed_settings import build_settings

    if exact_only:
        refuse_unused_options(context, {"threshold", "keep"}, "--exact-only")
    settings = build_settings(DedupeSettings, {"near": not exact_only, "threshold": threshold, "keep": keep}, "dedupe")
    _run(context, lambda sources, work: dedupe_documents(sources, output, settings, work))


@app.command()
def sign(
    inputs: RereadInputs,
    work: WorkFolder,
    exact_only: Annotated[bool, typer.Option("--exact-only", help="Write no signatures for near copies.")] = False,
    workers: Workers = None, part: PartText = "0/1", key: Key = "text", on_error: OnError = "stop",
    format_: InputFormat = None, suffix: Suffixes = None, overwrite: Overwrite = False,
) -> None:  # fmt: skip
    """Write a hash and a MinHash signature of each document: the first step of deduplication in several tasks."""
    from data_tools.corpus import build_from_yaml
    from data_tools.corpus.copies.dedupe import MinHash

    with _options_with_progress(workers, part, key, on_error) as working:
        minhash = None if exact_only else MinHash()
        found = resolve_text_inputs(inputs, format_, suffix)
        _print(build_from_yaml.sign_documents(found, work, minhash, working, overwrite=overwrite))


@app.command()
def match(
    context: typer.Context,
    work: WorkFolder,
    threshold: Annotated[float, typer.Option(help="Jaccard similarity that makes two texts copies.")] = 0.8,
    exact: Annotated[bool, typer.Option("--exact", help="Mark exact copies; run this once, before the parts.")] = False,
    part: PartText = "0/1",
) -> None:
    """Find near copies by their signatures, or with `--exact` mark exact copies: the second step of deduplication."""
    from data_tools.corpus.copies.dedupe import find_pairs, mark_exact
    from data_tools.read.cut_files_into_chunks import TaskPart

    if exact:
        refuse_unused_options(context, {"threshold", "part"}, "--exact")
    with _show_documents_done("matching"):
        found = mark_exact(work) if exact else find_pairs(work, threshold, TaskPart.parse(part))
    echo(f"{found} exact copies" if exact else f"{found} pairs of near copies")


@app.command()
def join(
    work: WorkFolder,
    parts: Annotated[int, typer.Option(help="The N of the --part I/N with which `match` ran.")] = 1,
    keep: Keep = "first",
) -> None:
    """Join the pairs of near copies to groups and mark all documents but one of each as copies: the third step."""
    from data_tools.corpus.copies.dedupe import mark_near

    with _show_documents_done("joining"):
        found = mark_near(work, keep, parts)
    echo(f"{found} near copies")


@app.command()
def drop(
    context: typer.Context, inputs: RereadInputs, work: WorkFolder, output: Output,
    workers: Workers = None, part: PartText = "0/1", key: Key = "text", on_error: OnError = "stop",
    format_: InputFormat = None, suffix: Suffixes = None, overwrite: Overwrite = False,
) -> None:  # fmt: skip
    """Write the documents that are not marked as copies: the last step of deduplication in several tasks."""
    from data_tools.corpus.build_from_yaml import drop_copies, marks_of_copies

    _run(context, lambda sources, options: drop_copies(sources, work, output, options), marks_of_copies(work))


@app.command()
def decontaminate(
    context: typer.Context,
    inputs: TextInputs,
    output: Output,
    against: Annotated[list[Path], typer.Option(help="A file of evaluation texts. Repeatable.")],
    action: Annotated[Literal["cut", "drop"], typer.Option(help="Cut passages out, or drop the document.")] = "cut",
    workers: Workers = None, part: PartText = "0/1", key: Key = "text", on_error: OnError = "stop",
    format_: InputFormat = None, suffix: Suffixes = None, overwrite: Overwrite = False,
) -> None:  # fmt: skip
    """Remove passages that share 13 consecutive words with an evaluation text."""
    from data_tools.corpus.copies.decontaminate import DecontaminateStep, read_passages

    _run_step(context, DecontaminateStep(read_passages(against), action), against)


@app.command()
def split(
    context: typer.Context,
    inputs: TextInputs,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Folder for train.jsonl, valid.jsonl and test.jsonl.")],
    ratios: Annotated[str, typer.Option(help="Shares of train, valid and test.")] = "0.98,0.01,0.01",
    by: Annotated[Literal["text", "id"], typer.Option(help="Keep documents of equal text or id together.")] = "text",
    seed: Seed = 0, workers: Workers = None, part: PartText = "0/1", key: Key = "text", on_error: OnError = "stop",
    format_: InputFormat = None, suffix: Suffixes = None, overwrite: Overwrite = False,
) -> None:  # fmt: skip
    """Split documents into train, valid and test by a hash of each document's text or id."""
    from data_tools.corpus.flow.run_one_corpus_step_in_workers import SPLIT_REPORT, run_step
    from data_tools.corpus.split_sample_shuffle import split_outputs

    step = build_split(ratios, seed, by)
    outputs, report = split_outputs(output), output / SPLIT_REPORT
    _run(context, lambda sources, work: run_step(step, sources, outputs, work, report), (), [*outputs.values()], report)


@app.command()
def shuffle(
    context: typer.Context, inputs: TextInputs, output: Output,
    seed: Seed = 0, memory: Annotated[str, typer.Option(help="Memory to use.")] = "256MiB",
    part: PartText = "0/1", key: Key = "text", on_error: OnError = "stop",
    format_: InputFormat = None, suffix: Suffixes = None, overwrite: Overwrite = False,
) -> None:  # fmt: skip
    """Put all documents in a random order, in two passes over the disk."""
    from data_tools.corpus import split_sample_shuffle
    from data_tools.corpus.flow.run_one_corpus_step_in_workers import report_path

    num_bytes, report = max(parse_size("--memory", memory), 1 << 20), report_path(output)
    _run(
        context,
        lambda sources, work: split_sample_shuffle.shuffle(sources, output, work, report, seed, num_bytes),
    )


@app.command()
def sample(
    context: typer.Context, inputs: TextInputs, output: Output,
    fraction: Annotated[float | None, typer.Option(help="Share of the documents to draw, approximately.")] = None,
    count: Annotated[
        int | None, typer.Option(help="Exact number of documents to draw; not from standard input.")
    ] = None,
    seed: Seed = 0, workers: Workers = None, part: PartText = "0/1", key: Key = "text", on_error: OnError = "stop",
    format_: InputFormat = None, suffix: Suffixes = None, overwrite: Overwrite = False,
) -> None:  # fmt: skip
    """Draw a random sample of the documents, which keep their order."""
    from data_tools.corpus.split_sample_shuffle import check_sample_size, sample_documents

    check_sample_size(fraction, count)
    _run(context, lambda sources, work: sample_documents(sources, output, work, fraction, count, seed))


@app.command()
def merge(
    output: Annotated[Path, typer.Argument(help="The --output of the tasks: a file, or split's folder.")],
    overwrite: Overwrite = False,
) -> None:
    """Join the part files that tasks with --part wrote into the file that a single task would have written."""
    from data_tools.corpus.flow.run_one_corpus_step_in_workers import merge_outputs

    for path, count in merge_outputs(output, overwrite=overwrite):
        echo(f"{path}: joined {count} parts")


@app.command()
def build(
    recipe: Annotated[Path, typer.Argument(help="A YAML file: inputs, output, and the steps to run.")],
    workers: Workers = None,
    overwrite: Overwrite = False,
) -> None:
    """Run all corpus steps that a YAML file names; if stopped, a second run continues after the last whole step."""
    from data_tools.corpus.build_from_yaml import build_corpus, read_recipe

    settings = read_recipe(recipe)
    with _show_documents_done() as report:
        num_workers = num_usable_cpus() if workers is None else workers
        reports = build_corpus(settings, num_workers, report, overwrite=overwrite)
    if not reports:
        return say_already_there(Path(settings.output))
    for result in reports:
        _print(result)
    return echo(f"{settings.output}/report.json has all of this")


def build_split(ratios: str, seed: int, by: Literal["text", "id"]) -> SplitStep:
    """Build the step `split` from its options; raise UsageError if `ratios` are no three shares that add up to 1."""
    from data_tools.corpus.split_sample_shuffle import SplitStep

    way_out = f"Give the shares of train, valid and test, such as {example('0.98,0.01,0.01')}."
    return SplitStep(tuple(parse_numbers("--ratios", ratios, way_out)), seed, by)


def build_clean_step(
    context: typer.Context, rule: list[str] | None, script: list[str] | None, min_script_share: float
) -> CleanStep:
    """Build the step `clean` from its options; raise UsageError if a rule is unknown, or a share has no effect."""
    from data_tools.corpus.clean import DEFAULT_RULES, build_clean

    if not script:
        refuse_unused_options(context, {"min_script_share"}, "all scripts allowed; --script names those that are")
    return build_clean(DEFAULT_RULES if rule is None else rule, script or (), min_script_share)


# ---- shared by the verbs ---------------------------------------------------------------------------------------------


def _run_step(context: typer.Context, step: Step, more_inputs: Sequence[Path] = ()) -> None:
    """Run a corpus step that writes one file, as `_run` does."""
    from data_tools.corpus.flow.run_one_corpus_step_in_workers import write_documents

    _run(context, lambda inputs, work: write_documents(step, inputs, context.params["output"], work), more_inputs)


def _run(
    context: typer.Context, run: Callable[[Inputs, StepOptions], Report], more_inputs: Sequence[Path] = (),
    outputs: Sequence[Path] | None = None, report: Path | None = None,
) -> None:  # fmt: skip
    """Call `run` with the inputs and the options that were typed, and print its report. Exit if the outputs were made
    of the same already, and raise OutputError if they must not be replaced. `outputs` and `report` are the files that
    it writes, by default --output and the report beside it; `more_inputs` are other files on which the result depends.
    """
    from data_tools.corpus.flow.run_one_corpus_step_in_workers import check_outputs_of_command, report_path

    name, params = str(context.command.name), context.params
    inputs, output = resolve_text_inputs(params["inputs"], params["format_"], params["suffix"]), params["output"]
    places = outputs or [output], report or report_path(output)
    is_to_write, made = check_outputs_of_command(name, params, inputs, *places, more_inputs)
    if not is_to_write:
        say_already_there(output)
        raise typer.Exit
    workers, part = params.get("workers", 1), params.get("part", "0/1")
    with _options_with_progress(workers, part, params["key"], params["on_error"], made) as work:
        _print(run(inputs, work))


@contextmanager
def _options_with_progress(
    workers: int | None, part: str, key: str, on_error: str, made: str | None = None
) -> Iterator[StepOptions]:
    """Context manager: yield the options of a corpus step, and show the number of processed documents meanwhile. The
    arguments are the values of --workers, --part, --key and --on-error, and what the report is to record of inputs.
    """
    from data_tools.corpus.flow.run_one_corpus_step_in_workers import ReadOptions, StepOptions
    from data_tools.read.cut_files_into_chunks import TaskPart
    from data_tools.read.parse_chunks_and_bad_lines import OnError

    cores = num_usable_cpus() if workers is None else workers
    with _show_documents_done() as report:
        yield StepOptions(cores, ReadOptions(key, OnError(on_error), part=TaskPart.parse(part)), report, made)


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
def _show_documents_done(label: str = "starting") -> Iterator[Callable[[str, int], None]]:
    """Context manager that shows on stderr how many documents a corpus command has processed. It yields a function
    report(name of the step, number of documents done); until the first call, `label` stands for the step.
    """
    interrupted = "no output file was written. The same command begins anew; `build` goes on after its last whole step."
    with progress(label, "documents", interrupted=interrupted) as progress_line:

        def report(step: str, done: int) -> None:
            progress_line.set_activity(step)
            progress_line(done)

        yield report


@contextmanager
def _show_bytes_fetched() -> Iterator[Callable[[int, int | None], None]]:
    with progress("fetched", "bytes", interrupted="the same command goes on where this one was.") as progress_line:
        bytes_before: int | None = None  # bytes that an earlier transfer brought

        def report(done: int, total: int | None) -> None:
            nonlocal bytes_before
            bytes_before = done if bytes_before is None or done < bytes_before else bytes_before
            progress_line(done, total or 0, bytes_before)

        yield report
