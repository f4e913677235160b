"""What `lmtrain inspect PREFIX` and `lmtrain data inspect` say of a dataset: facts as plain data, and in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmtrain.cli.screen.terminal import echo, print_message
from lmtrain.errors import UsageError
from lmtrain.units import format_bytes, format_count, plural

if TYPE_CHECKING:
    from lmtrain.data.store.indexed import IndexedDataset
    from lmtrain.data.training_data import TrainingData
    from lmtrain.tokenizer.base import Tokenizer

Rows = list[dict[str, Any]]
_LENGTHS_READ = 1 << 24  # sequences whose lengths are looked at in less than a blink


def dataset_facts(path: Path, verify: bool = False) -> dict[str, Any]:
    """Return a dataset's facts from its header and sidecar; read every byte only to verify it."""
    from lmtrain.data.store import dataset_operations
    from lmtrain.data.store.indexed import IndexedDataset, dataset_file

    dataset = IndexedDataset.open(path)
    if verify:
        dataset_operations.verify(dataset)
    quick = verify or dataset.num_sequences <= _LENGTHS_READ
    lengths = dataset.lengths if quick and dataset.num_sequences else None
    return {
        "dataset": str(dataset.prefix),
        "verified": verify,
        "documents": dataset.num_documents,
        "sequences": dataset.num_sequences,
        "tokens": dataset.num_tokens,
        "dtype": dataset.dtype.name,
        "bytes": sum(dataset_file(dataset.prefix, suffix).stat().st_size for suffix in (".bin", ".idx")),
        "shortest_sequence": None if lengths is None else int(lengths.min()),
        "longest_sequence": None if lengths is None else int(lengths.max()),
        "sidecar": asdict(dataset.info) if dataset.info else None,
    }


def dataset_lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    documents, sequences, tokens = facts["documents"], facts["sequences"], facts["tokens"]
    per_document = f", {tokens / documents:,.0f} a document" if documents else ""
    yield "documents", f"{documents:,}" + (f" ({sequences:,} sequences)" if sequences != documents else "")
    yield "tokens", f"{tokens:,} ({format_count(tokens)}){per_document}"
    if facts["longest_sequence"] is not None:
        what = "a document" if sequences == documents else "a sequence"
        yield what, f"{facts['shortest_sequence']:,} to {facts['longest_sequence']:,} tokens"
    yield "on disk", f"{format_bytes(facts['bytes'])}, ids as {facts['dtype']}"
    sidecar = facts["sidecar"]
    if sidecar is None:
        yield "sidecar", "none: a dataset of another tool, which carries no tokenizer"
    else:
        text = sidecar["num_bytes"]
        if text > 0:
            yield "made of", f"{format_bytes(text)} of text, {text / tokens:.2f} bytes a token"
        yield "tokenizer", tokenizer_words(sidecar["vocab_size"], sidecar["eod_id"], sidecar["tokenizer_fingerprint"])
        yield "content sha256", sidecar["content_sha256"]
        if sidecar["sidecar_sha256"] is None:
            yield "sidecar", "has no hash of itself, being of an older lmtrain"
    unread = f"no; lmtrain inspect {facts['dataset']} --verify reads every byte"
    yield "verified", "every entry and every byte" if facts["verified"] else unread


def print_dataset(facts: dict[str, Any], all_: bool) -> None:
    from lmtrain.cli.screen.console import print_facts, print_tree

    print_facts(f"dataset {facts['dataset']}", dataset_lines(facts))
    if all_ and facts["sidecar"] is not None:
        print_tree("sidecar", facts["sidecar"])


def tokenizer_words(vocab_size: int, eod_id: int | None, fingerprint: str) -> str:
    eod = "no end token" if eod_id is None else f"end token {eod_id}"
    return f"{vocab_size:,} pieces, {eod}, fingerprint {fingerprint[:12]}"


def document_rows(
    dataset: IndexedDataset, documents: Sequence[int], most: int | None, tokenizer: Tokenizer | None
) -> Iterator[dict[str, Any]]:
    """Text, or without a tokenizer the ids."""
    dataset.check_index()
    for number in documents:
        if not 0 <= number < dataset.num_documents:
            raise UsageError(
                f"Document {number} is not in {dataset.prefix}. Use a number from 0 to {dataset.num_documents - 1}."
            )
        start, stop = dataset.document_range(number)
        ids = dataset.read(start, stop if most is None else min(start + most, stop)).tolist()
        shown = {"ids": ids} if tokenizer is None else {"text": tokenizer.decode(ids)}
        yield {"document": number, "tokens": stop - start} | shown


def print_documents(rows: Rows, most: int | None) -> None:
    for row in rows:
        cut = f", the first {most}" if most is not None and row["tokens"] > most else ""
        count = f"{row['tokens']:,}"
        echo(f"document {row['document']}: {plural(row['tokens'], 'token', count)}{cut}", bold=True)
        echo(row.get("text", " ".join(map(str, row.get("ids", [])))))


def sample_row(data: TrainingData, number: int, most: int | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a sample as it becomes a row of a batch, cut to its first `most` tokens."""
    import numpy as np

    from lmtrain.data.samples.causal import CausalDataset
    from lmtrain.data.samples.masked import MaskedDataset

    num, part = data.train.num_samples, 0
    masked = isinstance(data.train, MaskedDataset)  # its numbers go on through the epochs
    if not 0 <= number < num and not (masked and number >= 0):
        raise UsageError(f"--sample={number} is not one of the {num} training samples. Use 0 to {num - 1}.")
    batch, inside = data.train.batch(np.array([number])), number
    while part < len(data.parts) - 1 and inside >= data.parts[part].dataset.num_samples:
        inside, part = inside - data.parts[part].dataset.num_samples, part + 1
    dataset = data.parts[part].dataset
    row: dict[str, Any] = {
        "sample": number, "dataset": str(data.parts[part].indexed.prefix), "tokens": len(batch.tokens_BT[0]),
        "num_labels": int((batch.labels_BT >= 0).sum()),
    }  # fmt: skip
    ids, labels = batch.tokens_BT[0][:most].tolist(), batch.labels_BT[0][:most].tolist()
    if isinstance(dataset, CausalDataset):
        row["documents"] = [
            {"document": document, "from": first, "to": last}
            for document, first, last in dataset.index.document_spans(inside)
        ]
    # an ignored label is below 0
    row |= {"text": tokenizer.decode(ids), "ids": ids, "labels": [one if one >= 0 else None for one in labels]}
    if masked:
        row["predicted"] = {str(i): tokenizer.piece(label) for i, label in enumerate(labels) if label >= 0}
    if batch.pair_labels_B is not None:
        row["pair_label"] = int(batch.pair_labels_B[0])
    return row


def print_samples(rows: Rows, ids_only: bool) -> None:
    from lmtrain.cli.screen.console import PlainConsole

    for row in rows:
        tokens = plural(row["tokens"], "token")
        echo(f"sample {row['sample']} of {row['dataset']}: {tokens}, {row['num_labels']} with a label", bold=True)
        for line in _notes(row):
            echo(line, dim=True)
        if not ids_only:
            echo(row["text"])
        print_message(PlainConsole(), " ".join(map(str, row["ids"])))


def _notes(row: dict[str, Any]) -> Iterator[str]:
    if spans := row.get("documents", []):
        words = [f"{one['document']} (tokens {one['from']} to {one['to'] - 1})" for one in spans]
        more = [f"and {len(words) - 6} more"] if len(words) > 6 else []
        # because: the last token of a sample is only ever a label
        yield f"documents {', '.join(words[:6] + more)}; the last token is a label alone"
    if "pair_label" in row:
        yield "its second segment does not follow the first" if row["pair_label"] else "its segments follow each other"
    if "predicted" in row:
        yield "to predict: " + ", ".join(f"{place} {piece}" for place, piece in row["predicted"].items())
