"""`lmtrain preprocess`: tokenize text files to a dataset, by data_tools.preprocess, and show the progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lmtrain.cli.screen.print_messages_and_json import echo, print_json, print_notice, progress
from lmtrain.cli.shared_options import (
    InputFormat,
    SplitText,
    Suffixes,
    TextInputs,
    parse_output_prefix,
    parse_size,
    refuse_unused_options,
)
from lmtrain.data.store.cut_one_text import finer_split
from lmtrain.errors import shell_quoted
from lmtrain.runtime.processes.fault_injection import arm_from_env
from lmtrain.runtime.processes.process_environment import num_usable_cpus
from lmtrain.units import format_bytes, format_count, format_seconds, parse_count, plural

if TYPE_CHECKING:
    from data_tools.preprocess.preprocess_pipeline import Progress, Summary

_filter = partial(typer.Option, rich_help_panel="What is left out")
_ends = partial(typer.Option, rich_help_panel="Where texts end")
_bad = partial(typer.Option, rich_help_panel="Bad lines")


def preprocess(
    context: typer.Context,
    inputs: TextInputs,
    tokenizer: Annotated[
        Path, typer.Option(help="tokenizer.json, GPT-2's vocab.json, BERT's vocab.txt, or a folder that holds one.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="PREFIX", parser=parse_output_prefix,
            help="Write PREFIX.bin, .idx, .json, .tokenizer.json, .blocks. [default: INPUT without its suffix]",
        ),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Number of encoding processes. [default: one per core]")] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(help="Key or column of the text; several make a dataset PREFIX_KEY each. [default: text]"),
    ] = None,
    format_: InputFormat = None,
    suffix: Suffixes = None,
    append_eod: Annotated[
        bool | None,
        _ends("--append-eod/--no-append-eod", help="End each document with the end token, if there is one."),
    ] = None,
    prepend_bos: Annotated[
        bool, _ends("--prepend-bos", help="Begin each document with the tokenizer's begin-of-text token.")
    ] = False,
    split: SplitText = "file",
    split_sentences: Annotated[
        bool, _ends("--split-sentences", help="Store each sentence as a sequence of its own, for BERT.")
    ] = False,
    lines_end_sentences: Annotated[
        bool, _ends("--lines-end-sentences", help="With --split-sentences: also end a sentence where a line ends.")
    ] = False,
    shard_tokens: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Start a new PREFIX-00000, -00001, ... after, say, 10B tokens.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing dataset.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    on_error: Annotated[
        Literal["stop", "skip", "quarantine"],
        _bad(help="At a bad line: stop, list it in PREFIX.rejects.jsonl, or keep its content there too."),
    ] = "stop",
    max_bad: Annotated[int | None, _bad(min=0, help="Stop if there are more bad lines than this.")] = None,
    max_doc_bytes: Annotated[str, _bad(metavar="SIZE", help="Treat longer lines, rows and files as bad.")] = "256MiB",
    min_chars: Annotated[int | None, _filter(min=0, help="Leave out documents with fewer characters.")] = None,
    max_chars: Annotated[int | None, _filter(min=0, help="Leave out documents with more characters.")] = None,
    min_tokens: Annotated[int | None, _filter(min=0, help="Leave out documents with fewer tokens.")] = None,
    max_tokens: Annotated[int | None, _filter(min=0, help="Leave out documents with more tokens.")] = None,
    max_documents: Annotated[
        int | None, _filter(metavar="N", help="Stop after N documents; those that are left out do not count.")
    ] = None,
    script: Annotated[
        list[str] | None,
        _filter(
            metavar="NAME[:SHARE]",
            help="Leave out documents with a smaller share of letters in this script, as in latin:0.9.",
        ),
    ] = None,
    filter_: Annotated[
        list[str] | None,
        _filter(
            "--filter", metavar="NAME",
            help="Leave out documents that this filter rejects, an entry point of the group lmtrain.filters.",
        ),
    ] = None,
) -> None:
    """Tokenize text into a dataset for training.

    Started again after a kill, the same command goes on where it was.
    """
    from data_tools.preprocess import preprocess_pipeline
    from data_tools.preprocess.length_and_script_filters import Filters, parse_script
    from data_tools.read.cut_files_into_chunks import SizeLimits
    from data_tools.read.find_input_files import find_texts
    from data_tools.read.parse_chunks_and_bad_lines import OnError
    from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer, tokenizer_files

    if not split_sentences:
        refuse_unused_options(context, {"lines_end_sentences"}, "whole documents; add --split-sentences")
    if on_error == "stop":
        refuse_unused_options(context, {"max_bad"}, "--on-error=stop")
    arm_from_env()
    options = preprocess_pipeline.Options(
        workers=num_usable_cpus() if workers is None else workers,
        keys=tuple(key or ("text",)),
        append_eod=append_eod,
        prepend_bos=prepend_bos,
        filters=Filters(
            min_chars, max_chars, min_tokens, max_tokens, tuple(map(parse_script, script or ())), tuple(filter_ or ())
        ),
        split_sentences=split_sentences,
        lines_end_sentences=lines_end_sentences,
        on_error=OnError(on_error),
        max_bad=max_bad,
        limits=SizeLimits(max_doc_bytes=parse_size("--max-doc-bytes", max_doc_bytes)),
        shard_tokens=None if shard_tokens is None else parse_size("--shard-tokens", shard_tokens, parse_count),
        max_documents=max_documents,
        overwrite=overwrite,
        text_split=split,
    )
    prefix, found = find_texts(inputs, output, format_, suffix, key, report=print_notice)
    with _show_progress(inputs) as report:
        summary = preprocess_pipeline.preprocess(
            found, Tokenizer.load(tokenizer), prefix, options, report=report, notify=print_notice
        )
    facts = asdict(summary) | {"bytes_per_token": summary.bytes_per_token}
    if as_json:
        return print_json(facts)
    _print(summary, inputs, split, max_documents, tokenizer_files(tokenizer))
    if key and len(key) > 1:
        made = " ".join(shell_quoted(f"{prefix}_{name}") for name in key)
        echo(
            f"{len(key)} datasets, one for each key: `lmtrain data merge {made} --output {shell_quoted(str(prefix))}` "
            "joins them, and data=blend of a run mixes them"
        )
    return None


@contextmanager
def _show_progress(inputs: list[str]) -> Iterator[Callable[[Progress], None]]:
    again = "what was read from the pipe is lost" if "-" in inputs else "the same command goes on where this one was"
    with progress("tokenized", "bytes", interrupted=f"no dataset is written yet; {again}.") as shown:
        first, began = None, 0.0  # what an earlier run did is not counted

        def show(now: Progress) -> None:
            nonlocal first, began
            if first is None:
                first, began = now, perf_counter()
            seconds = max(perf_counter() - began, 1e-9)
            text = format_bytes((now.num_text_bytes - first.num_text_bytes) / seconds)
            tokens = format_count((now.num_tokens - first.num_tokens) / seconds)
            speed = "" if now is first else f"{text}/s, {tokens} tokens/s"
            earlier = first.done_bytes if first.total_bytes else 0
            shown(now.done_bytes if now.total_bytes else now.num_text_bytes, now.total_bytes, earlier, speed)

        yield show


def _print(
    summary: Summary, inputs: Sequence[str], split: str, max_documents: int | None, tokenizer: Sequence[Path]
) -> None:
    echo(
        f"{plural(summary.num_documents, 'document', format_count(summary.num_documents))}, "
        f"{format_bytes(summary.num_bytes)} of text -> "
        f"{format_count(summary.num_tokens)} tokens ({summary.bytes_per_token:.2f} bytes a token) "
        f"{f'in {format_seconds(summary.seconds)}' if summary.is_new else 'are already there'}"
    )
    if summary.num_documents == max_documents:
        echo(f"ended with document {max_documents:,}, as --max-documents asks: any text after it was left out")
    _print_left_out(summary, split)
    if summary.num_documents == summary.num_text_files == 1 and (finer := finer_split(inputs, split)):
        echo(f"the text is one document; --split={finer[0]} makes a document of each of its {finer[1]}")
    if len(tokenizer) > 1:
        echo(f"the tokenizer is that of {' and '.join(map(str, tokenizer))}")
    if summary.lengths:
        _print_lengths(summary.lengths)
    for name in summary.files if summary.num_shards == 1 else (summary.files[0], f"... {summary.num_shards} shards"):
        echo(f"  {name}")


def _print_left_out(summary: Summary, split: str) -> None:
    """Print how many bad lines, text files that are bad as a whole, and filtered documents were left out, by cause."""
    from data_tools.read.parse_chunks_and_bad_lines import WHOLE_FILE

    rejects = summary.rejects.items()
    lines = {cause: count for cause, count in rejects if not cause.startswith(WHOLE_FILE)}
    files = {cause.removeprefix(WHOLE_FILE): count for cause, count in rejects if cause.startswith(WHOLE_FILE)}
    for counts, what, done in (
        (lines, "bad line", "left out"), (files, "text file", "left out as a whole"),
        (summary.filtered, "document", "filtered out"),
    ):  # fmt: skip
        if counts:
            parts = ", ".join(f"{count} {cause}" for cause, count in sorted(counts.items(), key=lambda c: -c[1]))
            echo(f"{plural(sum(counts.values()), what)} {done}: {parts}")
    if files and split == "file":
        echo("with --split=blank-line or --split=line only the paragraphs or lines at fault are left out")


def _print_lengths(lengths: dict[str, int]) -> None:
    """Print a histogram of document lengths. `lengths` maps a range of token counts, such as "64-127", to the number of
    documents in it; each range gets a bar.
    """
    largest = max(lengths.values())
    first = next(i for i, count in enumerate(lengths.values()) if count)
    echo("tokens a document:")
    for name, count in list(lengths.items())[first:]:
        echo(f"{name:>21} {format_count(count):>6} {'#' * -(-40 * count // largest)}".rstrip())
