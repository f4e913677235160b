"""`lmtrain data`: inspect, verify, join, split and index .bin/.idx datasets, by the functions of lmtrain.data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lmtrain.cli.inspect.dataset_view import print_dataset, print_documents, print_samples
from lmtrain.cli.screen.print_facts_and_tables import print_facts, print_table
from lmtrain.cli.screen.print_messages_and_json import echo, print_json, progress
from lmtrain.cli.settings_keys.shell_completion import complete_override
from lmtrain.cli.shared_options import (
    ConfigDir,
    Json,
    Plugins,
    check_seed,
    parse_numbers,
    parse_output_prefix,
)
from lmtrain.config.settings_file import expand_settings_file
from lmtrain.errors import example
from lmtrain.runtime.files.similar_path import refuse_lists
from lmtrain.start.facts_of_outputs.facts_of_dataset import (
    check_sample_number,
    dataset_facts,
    document_rows,
    sample_row,
)
from lmtrain.units import format_count, plural

app = typer.Typer(no_args_is_help=True)
_UNWRITTEN = "no unfinished dataset is left. The same command begins anew."

Prefix = Annotated[Path, typer.Argument(metavar="PREFIX", help="A dataset: its .bin's path without the suffix.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing datasets.")]
TokenizerPath = Annotated[
    Path | None, typer.Option(help="Tokenizer of a dataset that was stored without one: a file or folder.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", autocompletion=complete_override, callback=expand_settings_file,
        help="The settings of the run, as `lmtrain pretrain` takes them."),
]


@app.command()
def inspect(
    prefix: Prefix,
    all_: Annotated[bool, typer.Option("--all", help="Also show the whole sidecar, PREFIX.json.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a dataset holds, from its header and sidecar; `lmtrain inspect PREFIX` shows the same."""
    facts = dataset_facts(prefix)
    return print_json(facts) if as_json else print_dataset(facts, all_)


@app.command()
def verify(
    prefixes: Annotated[list[Path], typer.Argument(metavar="PREFIX", help="Datasets to check.")],
    as_json: Json = False,
) -> None:
    """Read every byte of datasets and check their index, token ids and checksum; stop at the first damage."""
    from lmtrain.data.store import merge_split_verify_datasets
    from lmtrain.data.store.joined_dataset import dataset_exists, open_dataset

    facts = []
    refuse_lists(prefixes, dataset_exists)
    for prefix in prefixes:
        dataset = open_dataset(prefix)
        with progress(f"reading {dataset.prefix}"):
            facts.append({"dataset": str(dataset.prefix)} | merge_split_verify_datasets.verify(dataset))
        if not as_json:
            comparison = _describe_content_check(facts[-1])
            echo(f"{dataset.prefix} is whole: sha256 {facts[-1]['content_sha256']}, {comparison}")
    if as_json:
        print_json(facts)


@app.command()
def merge(
    prefixes: Annotated[list[Path], typer.Argument(metavar="PREFIX", help="Datasets to join, in this order.")],
    output: Annotated[Path, typer.Option(metavar="PREFIX", parser=parse_output_prefix, help="The dataset to make.")],
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Join datasets that have the same dtype and tokenizer into one; the counts in their sidecars are added up."""
    from lmtrain.data.store import merge_split_verify_datasets
    from lmtrain.data.store.joined_dataset import dataset_exists

    refuse_lists(prefixes, dataset_exists)
    with progress(f"writing {output}", interrupted=_UNWRITTEN):
        is_new = merge_split_verify_datasets.merge(prefixes, output, overwrite=overwrite)
    _print_written([output], as_json, is_new=is_new)


@app.command()
def split(
    prefix: Prefix,
    shares: Annotated[str, typer.Option(help="Two or three shares of the documents, as in 98,2.")],
    output: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PREFIX", parser=parse_output_prefix, help="A dataset to write; give one for each share."
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            callback=check_seed, help="Draw the documents at random by this seed. [default: consecutive documents]"
        ),
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Split a dataset at document borders into two or three datasets, each with its documents in the original order."""
    from lmtrain.data.store import merge_split_verify_datasets

    wanted = parse_numbers("--shares", shares, f"Give shares, such as {example('98,2')}.")
    with progress(f"dividing {prefix}", interrupted=_UNWRITTEN):
        is_new = merge_split_verify_datasets.split(prefix, wanted, output or [], overwrite=overwrite, seed=seed)
    _print_written(output or [], as_json, is_new=is_new)


@app.command()
def show(
    prefix: Annotated[
        str | None, typer.Argument(metavar="[PREFIX]", help="A dataset; not with --run, which names its own.")
    ] = None,
    overrides: Overrides = None,
    sample: Annotated[
        list[str] | None,
        typer.Option(
            "--sample", metavar="NUMBER", help="A training sample of a run, from 0, or several, as in 0-3. Repeatable."
        ),
    ] = None,
    document: Annotated[
        list[str] | None,
        typer.Option("--document", metavar="NUMBER", help="A document, from 0, or several, as in 0-19. Repeatable."),
    ] = None,
    random: Annotated[int | None, typer.Option(min=1, help="Draw this many documents at random. [default: 3]")] = None,
    seed: Annotated[int | None, typer.Option(callback=check_seed, help="With --random: seed of the draw.")] = None,
    run: Annotated[
        Path | None, typer.Option(metavar="RUN", help="With --sample: a run's folder, for its data and settings.")
    ] = None,
    stage: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --sample: the stage, if the run has several.")
    ] = None,
    most: Annotated[int | None, typer.Option(min=1, help="Show at most N tokens of each. [default: all]")] = None,
    ids: Annotated[bool, typer.Option("--ids", help="Show token ids and not the text.")] = False,
    tokenizer: TokenizerPath = None,
    config_dir: ConfigDir = None,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Show documents of a dataset, or training samples as the model reads them, as text or token ids.

    A sample depends on how a run cuts them: give its folder, or the settings that it was started with.
    """
    from lmtrain.start.facts_of_outputs.choose_documents_and_samples import (
        check_shown,
        open_samples,
        parse_number_range,
    )

    given, settings = check_shown(
        prefix=prefix, overrides=overrides, sample=sample, document=document, random=random, seed=seed, run=run,
        config_dir=config_dir, stage=stage,
    )  # fmt: skip
    if sample:
        settings += [] if tokenizer is None else [f"data.tokenizer={tokenizer}"]
        ranges = [parse_number_range("--sample", text) for text in sample]
        data, tokenizer_of_run = open_samples(given, settings, run, config_dir, stage)
        for numbers in ranges:
            check_sample_number(data, numbers[-1])
        rows = [sample_row(data, number, most, tokenizer_of_run) for numbers in ranges for number in numbers]
        return print_json(rows, ensure_ascii=False) if as_json else print_samples(rows, ids)
    chosen_documents = None if document is None else [parse_number_range("--document", text) for text in document]
    return _show_documents(Path(given[0]), chosen_documents, random or 3, seed or 0, most, ids, tokenizer, as_json)


@app.command(hidden=True)
def sample(
    prefix: Prefix,
    number: Annotated[int, typer.Option("-n", "--number", min=1, help="How many documents.")] = 3,
    seed: Annotated[int, typer.Option(callback=check_seed, help="Another seed, other documents.")] = 0,
    most: Annotated[int, typer.Option(min=1, help="Show so many tokens of a document.")] = 200,
    ids: Annotated[bool, typer.Option("--ids", help="Show token ids and not the text.")] = False,
    tokenizer: TokenizerPath = None,
    as_json: Json = False,
) -> None:
    """Show random documents: the older spelling of `lmtrain data show PREFIX --random N`."""
    _show_documents(prefix, None, number, seed, most, ids, tokenizer, as_json)


@app.command(hidden=True)
def decode(
    prefix: Prefix,
    documents: Annotated[list[int], typer.Argument(metavar="DOCUMENT", help="Numbers of documents, from 0.")],
    most: Annotated[int | None, typer.Option(min=1, help="Show so many tokens of a document. [default: all]")] = None,
    ids: Annotated[bool, typer.Option("--ids", help="Show token ids and not the text.")] = False,
    tokenizer: TokenizerPath = None,
    as_json: Json = False,
) -> None:
    """Show documents: the older spelling of `lmtrain data show PREFIX --document N`."""
    _show_documents(prefix, [range(number, number + 1) for number in documents], 0, 0, most, ids, tokenizer, as_json)


@app.command()
def stats(prefix: Prefix, as_json: Json = False) -> None:
    """Show how many documents a dataset has by length, as a histogram."""
    from lmtrain.data.store import merge_split_verify_datasets
    from lmtrain.data.store.joined_dataset import open_dataset

    dataset = open_dataset(prefix)
    counts, facts = merge_split_verify_datasets.length_histogram(dataset)
    bars = [{"from": 1 << i >> 1, "to": (1 << i) - 1, "documents": int(n)} for i, n in enumerate(counts)]
    if as_json:
        return print_json(facts | {"lengths": bars})
    lines = [(name.replace("_", " "), f"{value:,}" if isinstance(value, int) else f"{value:,.1f}")
             for name, value in facts.items()]  # fmt: skip
    print_facts(f"dataset {dataset.prefix}", lines)
    echo("\ntokens in a document")
    highest = max((bar["documents"] for bar in bars), default=0) or 1
    for bar in bars:
        label = f"{bar['from']}-{bar['to']}" if bar["to"] > bar["from"] else str(bar["from"])
        echo(f"{label:>19} {format_count(bar['documents']):>6} {_bar(bar['documents'] / highest)}".rstrip())
    return None


@app.command()
def index(overrides: Overrides = None, config_dir: ConfigDir = None, as_json: Json = False) -> None:
    """Build the index files that a run with these settings needs, so that the run does not have to build them at its
    start.
    """
    from lmtrain.start.facts_of_outputs.indexes_and_shares_of_datasets import build_indexes
    from lmtrain.start.init_from_settings_and_import import compose_settings

    facts = build_indexes(compose_settings(overrides or [], config_dir=config_dir))
    lines = ((name, f"{value:,}") for name, value in facts.items())
    return print_json(facts) if as_json else print_facts("indexes are built", lines)


@app.command()
def blend(overrides: Overrides = None, config_dir: ConfigDir = None, as_json: Json = False) -> None:
    """Show how many samples and tokens each dataset contributes to a run with these settings, or to each of its stages.
    """
    from lmtrain.start.facts_of_outputs.indexes_and_shares_of_datasets import shares_of_datasets
    from lmtrain.start.init_from_settings_and_import import compose_settings

    rows, total = shares_of_datasets(compose_settings(overrides or [], config_dir=config_dir))
    if as_json:
        return print_json(rows)
    counts = ("documents", "samples", "run_samples", "run_tokens")
    return print_table([
        ({"<stage": row["stage"]} if "stage" in row else {})
        | {"<dataset": row["dataset"], "share": f"{row['share']:.4%}"}
        | {name.replace("_", " "): format_count(row[name]) for name in counts}
        | {"epochs": f"{row['epochs']:.3g}"}
        for row in [*rows, *([total] if total else [])]
    ])  # fmt: skip


def _show_documents(
    prefix: Path, documents: list[range] | None, num_random: int, seed: int, max_tokens: int | None, ids: bool,
    tokenizer_path: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Print the documents of a dataset whose numbers are in the ranges `documents`, or `num_random` random ones if it
    is None, each cut to `max_tokens` tokens (None: whole). They are printed as text, or with `ids` as token ids.
    """
    from lmtrain.start.facts_of_outputs.choose_documents_and_samples import choose_documents

    dataset, numbers, tokenizer = choose_documents(
        prefix, documents, num_random, seed, reads_text=not ids, tokenizer_path=tokenizer_path
    )
    rows = [*document_rows(dataset, numbers, max_tokens, tokenizer)]
    return print_json(rows, ensure_ascii=False) if as_json else print_documents(rows, max_tokens)


def _print_written(prefixes: Sequence[Path], as_json: bool, *, is_new: bool) -> None:
    from lmtrain.data.store.indexed_dataset import IndexedDataset

    facts: list[dict[str, Any]] = [
        {"dataset": str(made.prefix), "documents": made.num_documents, "tokens": made.num_tokens}
        for made in map(IndexedDataset.open, prefixes)
    ]
    if as_json:
        print_json(facts)
    else:
        for row in facts:
            documents, tokens = row["documents"], row["tokens"]
            echo(
                f"{row['dataset']}: {plural(documents, 'document', f'{documents:,}')}, "
                f"{plural(tokens, 'token', f'{tokens:,}')}{'' if is_new else '; is already there'}"
            )


def _describe_content_check(facts: dict[str, Any]) -> str:
    """Return the clause that ends the message "PREFIX is whole: ..." after a check of a dataset: whether its content
    was compared with its sidecar file, with the record that an earlier run left, or with nothing. `facts` is the result
    of `merge_split_verify_datasets.verify`.
    """
    if not facts["compared_with_sidecar"]:
        seen = ", and all that a run has read of it is as it was then" if facts["compared_with_record"] else ""
        return f"and no sidecar to compare with{seen}"
    unsigned = "; the sidecar was written by an older lmtrain and has no hash of itself"
    return f"as its sidecar says{'' if facts['sidecar_has_hash'] else unsigned}"


def _bar(share: float) -> str:
    """Draw a bar in eighths of a character; a share of 1 is 50 characters wide."""
    whole, eighths = divmod(round(share * 50 * 8), 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[eighths]
