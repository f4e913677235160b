"""What `lmtrain inspect PREFIX` and `lmtrain data` print of a dataset: its facts, documents and samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lmtrain.cli.screen.print_messages_and_json import echo, print_message
from lmtrain.units import format_bytes, format_count, plural

if TYPE_CHECKING:
    pass

Rows = list[dict[str, Any]]


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


def print_documents(rows: Rows, max_tokens: int | None) -> None:
    """Print documents on stdout, each below a heading with its number and token count. `rows` are dicts of
    `document_rows`, whose texts were cut to `max_tokens` tokens already (None: not cut).
    """
    for row in rows:
        cut_note = f", the first {max_tokens}" if max_tokens is not None and row["tokens"] > max_tokens else ""
        count = f"{row['tokens']:,}"
        echo(f"document {row['document']}: {plural(row['tokens'], 'token', count)}{cut_note}", bold=True)
        echo(row.get("text", " ".join(map(str, row.get("ids", [])))))


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
