"""`lmtrain inspect PREFIX` and `lmtrain data inspect`: a dataset's facts, documents and samples, and their printing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmtrain.cli.screen.print_messages_and_json import echo, print_message
from lmtrain.errors import UsageError, way
from lmtrain.units import format_bytes, format_count, plural

if TYPE_CHECKING:
    from lmtrain.data.store.indexed_dataset import IndexedDataset
    from lmtrain.data.training_data_by_source import TrainingData
    from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer

Rows = list[dict[str, Any]]
_MAX_LENGTHS_READ = 1 << 24  # the lengths of so many sequences are read in a fraction of a second


def dataset_facts(path: Path, verify: bool = False) -> dict[str, Any]:
    """Return a dict of JSON values about a dataset: numbers of documents and tokens, dtype, bytes, shortest and longest
    sequence in tokens, and the contents of its sidecar (.json). With `verify`, first read and check the whole dataset;
    raise an error if it is damaged.
    """
    from lmtrain.data.store import merge_split_verify_datasets
    from lmtrain.data.store.indexed_dataset import dataset_file
    from lmtrain.data.store.joined_dataset import open_dataset

    dataset = open_dataset(path)
    if verify:
        merge_split_verify_datasets.verify(dataset)
    reads_lengths = verify or dataset.num_sequences <= _MAX_LENGTHS_READ
    lengths = dataset.lengths if reads_lengths and dataset.num_sequences else None
    return {
        "dataset": str(dataset.prefix),
        "verified": verify,
        "documents": dataset.num_documents,
        "sequences": dataset.num_sequences,
        "tokens": dataset.num_tokens,
        "dtype": dataset.dtype.name,
        "bytes": sum(
            dataset_file(shard.prefix, suffix).stat().st_size for shard in dataset.shards for suffix in (".bin", ".idx")
        ),
        "shortest_sequence": None if lengths is None else int(lengths.min()),
        "longest_sequence": None if lengths is None else int(lengths.max()),
        "sidecar": asdict(dataset.info) if dataset.info else None,
    }


def dataset_lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (label, text) lines that describe a dataset, for printing. `facts` is the dict of `dataset_facts`."""
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
        tokenizer = sidecar["vocab_size"], sidecar["eod_id"], sidecar["tokenizer_fingerprint"]
        yield "tokenizer", describe_tokenizer(*tokenizer)
        yield "content sha256", sidecar["content_sha256"]
        if sidecar["sidecar_sha256"] is None:
            yield "sidecar", "has no hash of itself, as an older lmtrain wrote it"
    unread = f"no; lmtrain inspect {facts['dataset']} --verify reads every byte"
    yield "verified", "every entry and every byte" if facts["verified"] else unread


def print_dataset(facts: dict[str, Any], show_all: bool) -> None:
    """Print a dataset's description on stdout. `facts` is the dict of `dataset_facts`; its whole sidecar is printed
    only with `show_all`.
    """
    from lmtrain.cli.screen.print_facts_and_tables import print_facts, print_tree

    print_facts(f"dataset {facts['dataset']}", dataset_lines(facts))
    if show_all and facts["sidecar"] is not None:
        print_tree("sidecar", facts["sidecar"])


def describe_tokenizer(vocab_size: int, eod_id: int | None, fingerprint: str) -> str:
    """Return a tokenizer's size, end token and the start of its fingerprint as text."""
    eod = "no end token" if eod_id is None else f"end token {eod_id}"
    return f"{vocab_size:,} pieces, {eod}, fingerprint {fingerprint[:12]}"


def document_rows(
    dataset: IndexedDataset, documents: Sequence[int], max_tokens: int | None, tokenizer: Tokenizer | None
) -> Iterator[dict[str, Any]]:
    """Yield a dict for each document number (from 0): its number, its whole token count, and its first `max_tokens`
    tokens (None: all) as text, or as ids if `tokenizer` is None. Raise UsageError if there is no such document.
    """
    dataset.check_index()
    for number in documents:
        if not 0 <= number < dataset.num_documents:
            raise UsageError(
                f"Document {number} is not in {dataset.prefix}. Give a number from 0 to {dataset.num_documents - 1}."
            )
        start, stop = dataset.document_range(number)
        ids = dataset.read(start, stop if max_tokens is None else min(start + max_tokens, stop)).tolist()
        content = {"ids": ids} if tokenizer is None else {"text": tokenizer.decode(ids)}
        yield {"document": number, "tokens": stop - start} | content


def print_documents(rows: Rows, max_tokens: int | None) -> None:
    """Print documents on stdout, each below a heading with its number and token count. `rows` are dicts of
    `document_rows`, whose texts were cut to `max_tokens` tokens already (None: not cut).
    """
    for row in rows:
        cut_note = f", the first {max_tokens}" if max_tokens is not None and row["tokens"] > max_tokens else ""
        count = f"{row['tokens']:,}"
        echo(f"document {row['document']}: {plural(row['tokens'], 'token', count)}{cut_note}", bold=True)
        echo(row.get("text", " ".join(map(str, row.get("ids", [])))))


def check_sample_number(data: TrainingData, number: int) -> None:
    """Raise UsageError if there is no training sample `number`, from 0."""
    from lmtrain.data.samples.masked_language_samples import MaskedDataset

    num_samples = data.train.num_samples
    if number >= num_samples and not isinstance(data.train, MaskedDataset):  # its numbers continue through the epochs
        last = way(str(num_samples - 1), instead_of=str(number))  # because: the option's other values stay
        raise UsageError(f"--sample={number} is not one of the {num_samples} training samples. Use {last} or less.")


def sample_row(data: TrainingData, number: int, max_tokens: int | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a dict that shows training sample `number` (from 0) as the model reads it: its text, token ids and labels,
    cut to the first `max_tokens` tokens (None: all), and the documents that it comes from.
    """
    import numpy as np

    from lmtrain.data.samples.causal_language_samples import CausalDataset
    from lmtrain.data.samples.masked_language_samples import MaskedDataset

    part = 0
    batch, index_in_part = data.train.batch(np.array([number])), number
    while part < len(data.parts) - 1 and index_in_part >= data.parts[part].dataset.num_samples:
        index_in_part, part = index_in_part - data.parts[part].dataset.num_samples, part + 1
    dataset = data.parts[part].dataset
    row: dict[str, Any] = {
        "sample": number, "dataset": str(data.parts[part].indexed.prefix), "tokens": len(batch.tokens_BT[0]),
        "num_labels": int((batch.labels_BT >= 0).sum()),
    }  # fmt: skip
    ids, labels = batch.tokens_BT[0][:max_tokens].tolist(), batch.labels_BT[0][:max_tokens].tolist()
    if isinstance(dataset, CausalDataset):
        row["documents"] = [
            {"document": document, "from": first, "to": last}
            for document, first, last in dataset.index.document_spans(index_in_part)
        ]
    # an ignored label is below 0
    row |= {"text": tokenizer.decode(ids), "ids": ids, "labels": [label if label >= 0 else None for label in labels]}
    if isinstance(data.train, MaskedDataset):
        row["predicted"] = {str(i): tokenizer.piece(label) for i, label in enumerate(labels) if label >= 0}
    if batch.pair_labels_B is not None:
        row["pair_label"] = int(batch.pair_labels_B[0])
    return row


def print_samples(rows: Rows, ids_only: bool) -> None:
    """Print training samples on stdout: for each a heading, notes, the text (not with `ids_only`) and the token ids.
    `rows` are dicts of `sample_row`.
    """
    from lmtrain.cli.screen.print_facts_and_tables import PlainConsole

    for row in rows:
        tokens = plural(row["tokens"], "token")
        echo(f"sample {row['sample']} of {row['dataset']}: {tokens}, {row['num_labels']} with a label", bold=True)
        for line in _sample_notes(row):
            echo(line, dim=True)
        if not ids_only:
            echo(row["text"])
        print_message(PlainConsole(), " ".join(map(str, row["ids"])))


def _sample_notes(row: dict[str, Any]) -> Iterator[str]:
    """Yield lines to print below a sample's heading, from a dict of `sample_row`: its documents, the masked tokens to
    predict, and whether its second segment follows the first. Facts that the dict lacks give no line.
    """
    if spans := row.get("documents", []):
        words = [f"{span['document']} (tokens {span['from']} to {span['to'] - 1})" for span in spans]
        more = [f"and {len(words) - 6} more"] if len(words) > 6 else []
        # because: the last token of a sample is only ever a label
        yield f"documents {', '.join(words[:6] + more)}; the last token is only a label"
    if "pair_label" in row:
        yield "its second segment does not follow the first" if row["pair_label"] else "its segments follow each other"
    if "predicted" in row:
        yield "to predict: " + ", ".join(f"{place} {piece}" for place, piece in row["predicted"].items())
