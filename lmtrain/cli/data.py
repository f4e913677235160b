"""`lmtrain data`: look at .bin/.idx datasets, check, join, divide and index them. The work is done by lmtrain.data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmtrain.cli.completion import complete_override
from lmtrain.cli.options import ConfigDir, Json

if TYPE_CHECKING:
    from lmtrain.data.store.indexed import IndexedDataset
    from lmtrain.tokenizer.base import Tokenizer
    from lmtrain.train.config import RunConfig

app = typer.Typer(no_args_is_help=True)

Prefix = Annotated[Path, typer.Argument(metavar="PREFIX", help="A dataset: its .bin's path without the suffix.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing datasets.")]
TokenizerPath = Annotated[
    Path | None, typer.Option(help="The tokenizer of a dataset that carries none: a file or folder.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", autocompletion=complete_override,
        help="The settings of the run, as `lmtrain pretrain` takes them."),
]


@app.command()
def inspect(prefix: Prefix, as_json: Json = False) -> None:
    """Say what a dataset holds, from its header and sidecar alone."""
    import dataclasses

    from lmtrain.data.store.indexed import IndexedDataset, part

    dataset = IndexedDataset.open(prefix)
    facts = {
        "dataset": str(dataset.prefix),
        "documents": dataset.num_documents,
        "sequences": dataset.num_sequences,
        "tokens": dataset.num_tokens,
        "dtype": dataset.dtype.name,
        "bytes": sum(part(dataset.prefix, suffix).stat().st_size for suffix in (".bin", ".idx")),
        "sidecar": dataclasses.asdict(dataset.info) if dataset.info else None,
    }
    _show(facts, as_json)


@app.command()
def verify(
    prefixes: Annotated[list[Path], typer.Argument(metavar="PREFIX", help="Datasets to check.")],
    as_json: Json = False,
) -> None:
    """Read every byte: index entries against each other, ids against the vocabulary, the checksum."""
    from lmtrain.data.store import reshape
    from lmtrain.data.store.indexed import IndexedDataset

    facts = []
    for prefix in prefixes:
        dataset = IndexedDataset.open(prefix)
        facts.append({"dataset": str(dataset.prefix)} | reshape.verify(dataset))
        if not as_json:
            against = "as its sidecar says" if facts[-1]["compared_with_sidecar"] else "and no sidecar to compare with"
            typer.echo(f"{dataset.prefix} is whole: sha256 {facts[-1]['content_sha256']}, {against}")
    if as_json:
        typer.echo(json.dumps(facts, indent=1))


@app.command()
def merge(
    prefixes: Annotated[list[Path], typer.Argument(metavar="PREFIX", help="Datasets to join, in this order.")],
    output: Annotated[Path, typer.Option(metavar="PREFIX", help="The dataset to make.")],
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Join datasets of one dtype and one tokenizer; their sidecars are added up."""
    from lmtrain.data.store import reshape

    reshape.merge(prefixes, output, overwrite=overwrite)
    _show_made([output], as_json)


@app.command()
def split(
    prefix: Prefix,
    shares: Annotated[str, typer.Option(help="Two or three shares of the documents, as in 98,2.")],
    output: Annotated[list[Path], typer.Option(metavar="PREFIX", help="A dataset to make; once for each share.")],
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Divide a dataset into two or three, at document borders and in the order of the file."""
    from lmtrain.data.store import reshape
    from lmtrain.errors import UsageError

    try:
        wanted = [float(share) for share in shares.split(",")]
    except ValueError as error:
        raise UsageError(f"--shares={shares} is not a list of numbers. Use shares such as 98,2.") from error
    reshape.split(prefix, wanted, output, overwrite=overwrite)
    _show_made(output, as_json)


@app.command()
def sample(
    prefix: Prefix,
    number: Annotated[int, typer.Option("-n", "--number", min=1, help="How many documents.")] = 3,
    seed: Annotated[int, typer.Option(help="Another seed, other documents.")] = 0,
    most: Annotated[int, typer.Option(min=1, help="Show so many tokens of a document.")] = 200,
    tokenizer: TokenizerPath = None,
    as_json: Json = False,
) -> None:
    """Show some documents drawn at random."""
    import numpy as np

    from lmtrain.data.order import permute
    from lmtrain.data.store.indexed import IndexedDataset

    dataset = IndexedDataset.open(prefix)
    count = min(number, dataset.num_documents)
    drawn = permute(np.arange(count), dataset.num_documents, seed).tolist() if count else []
    _show_documents(dataset, drawn, most, _tokenizer_of(dataset, tokenizer), as_json)


@app.command()
def decode(
    prefix: Prefix,
    documents: Annotated[list[int], typer.Argument(metavar="DOCUMENT", help="Numbers of documents, from 0.")],
    most: Annotated[int | None, typer.Option(min=1, help="Show so many tokens of a document. [default: all]")] = None,
    ids: Annotated[bool, typer.Option("--ids", help="Show token ids and not the text.")] = False,
    tokenizer: TokenizerPath = None,
    as_json: Json = False,
) -> None:
    """Show documents as text again."""
    from lmtrain.data.store.indexed import IndexedDataset
    from lmtrain.errors import UsageError

    dataset = IndexedDataset.open(prefix)
    for number in documents:
        if not 0 <= number < dataset.num_documents:
            raise UsageError(
                f"Document {number} is not in {dataset.prefix}. Use a number from 0 to {dataset.num_documents - 1}."
            )
    _show_documents(dataset, documents, most, None if ids else _tokenizer_of(dataset, tokenizer), as_json)


@app.command()
def stats(prefix: Prefix, as_json: Json = False) -> None:
    """Count documents by length and draw a histogram."""
    from lmtrain.data.store import reshape
    from lmtrain.data.store.indexed import IndexedDataset
    from lmtrain.units import format_count

    dataset = IndexedDataset.open(prefix)
    counts, facts = reshape.length_counts(dataset)
    bars = [{"from": 1 << i >> 1, "to": (1 << i) - 1, "documents": int(n)} for i, n in enumerate(counts)]
    if as_json:
        typer.echo(json.dumps(facts | {"lengths": bars}, indent=1))
        return
    _show(facts | {"mean_length": f"{facts['mean_length']:.1f}"}, False)
    typer.echo("\ntokens in a document")
    highest = max((bar["documents"] for bar in bars), default=0) or 1
    for bar in bars:
        label = f"{bar['from']}-{bar['to']}" if bar["to"] > bar["from"] else str(bar["from"])
        typer.echo(f"{label:>19} {format_count(bar['documents']):>6} {_bar(bar['documents'] / highest, 50)}".rstrip())


@app.command()
def index(overrides: Overrides = None, config_dir: ConfigDir = None, as_json: Json = False) -> None:
    """Build ahead of time the indexes that a run with these settings would build at its start."""
    from lmtrain.train.preflight import load_data

    began = perf_counter()
    config = _compose(overrides, config_dir)
    made = load_data(config)[2]
    facts = {
        "datasets": len(made.parts), "samples": made.train.num_samples, "seconds": round(perf_counter() - began, 3),
    }  # fmt: skip
    _show(facts, as_json)


@app.command()
def blend(overrides: Overrides = None, config_dir: ConfigDir = None, as_json: Json = False) -> None:
    """Show what each dataset adds to a run with these settings."""
    from lmtrain.train.preflight import load_data

    config = _compose(overrides, config_dir)
    rows = load_data(config, validate=False)[2].contributions(config.seq_len)
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    from lmtrain.units import format_count

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in rows[0]:
        first = column == "dataset"
        table.add_column(
            column.replace("_", " "), justify="left" if first else "right", overflow="fold", no_wrap=not first
        )
    total: dict[str, Any] = {key: sum(row[key] for row in rows) for key in rows[0] if key != "dataset"}
    total |= {"dataset": f"{len(rows)} datasets", "epochs": total["run_samples"] / total["samples"]}
    for row in [*rows, total]:
        table.add_row(
            row["dataset"], f"{row['share']:.4%}",
            *(format_count(row[key]) for key in ("documents", "samples", "run_samples", "run_tokens")),
            f"{row['epochs']:.3g}",
        )  # fmt: skip
    Console().print(table)


def _compose(overrides: Sequence[str] | None, config_dir: Path | None) -> RunConfig:
    from lmtrain.config.compose import compose
    from lmtrain.train.config import RunConfig

    return compose(RunConfig, list(overrides or []), config_dir=config_dir)


def _tokenizer_of(dataset: IndexedDataset, given: Path | None) -> Tokenizer:
    from lmtrain.data.store.indexed import part
    from lmtrain.errors import UsageError
    from lmtrain.tokenizer.base import Tokenizer

    beside = part(dataset.prefix, ".tokenizer.json")
    if given is None and not beside.exists():
        raise UsageError(f"{dataset.prefix} carries no tokenizer. Add --tokenizer PATH, or look at its --ids.")
    return Tokenizer.load(given or beside)


def _show_documents(
    dataset: IndexedDataset, documents: Sequence[int], most: int | None, tokenizer: Tokenizer | None, as_json: bool
) -> None:
    dataset.check_index()
    rows: list[dict[str, Any]] = []
    for number in documents:
        tokens = dataset.document(number)
        ids = tokens[:most].tolist()
        shown = {"ids": ids} if tokenizer is None else {"text": tokenizer.decode(ids)}
        rows.append({"document": number, "tokens": len(tokens)} | shown)
    if as_json:
        typer.echo(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    for row in rows:
        cut = f", the first {most}" if most is not None and row["tokens"] > most else ""
        typer.echo(typer.style(f"document {row['document']}: {row['tokens']} tokens{cut}", bold=True))
        typer.echo(row.get("text", " ".join(map(str, row.get("ids", [])))))


def _show_made(prefixes: Sequence[Path], as_json: bool) -> None:
    from lmtrain.data.store.indexed import IndexedDataset

    made = [IndexedDataset.open(prefix) for prefix in prefixes]
    facts = [{"dataset": str(d.prefix), "documents": d.num_documents, "tokens": d.num_tokens} for d in made]
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
        return
    for row in facts:
        typer.echo(f"{row['dataset']}: {row['documents']} documents, {row['tokens']} tokens")


def _show(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
        return
    for key, value in facts.items():
        if isinstance(value, dict):
            typer.echo(key.replace("_", " "))
            for name, inner in value.items():
                typer.echo(f"  {name.replace('_', ' '):22} {inner}")
        else:
            typer.echo(f"{key.replace('_', ' '):24} {'none' if value is None else value}")


def _bar(share: float, width: int) -> str:
    """A bar in eighths of a character."""
    eighths = round(share * width * 8)
    return "█" * (eighths // 8) + (" ▏▎▍▌▋▊▉"[eighths % 8] if eighths % 8 else "")
