"""What `lmtrain inspect PREFIX` and `lmtrain data inspect` say of a dataset: facts as plain data, and in words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmtrain.units import format_bytes, format_count

_LENGTHS_READ = 1 << 24  # sequences whose lengths are looked at in less than a blink


def dataset_facts(path: Path, verify: bool = False) -> dict[str, Any]:
    """From the header and the sidecar alone, unless every byte is to be verified."""
    import dataclasses

    from lmtrain.data.store import reshape
    from lmtrain.data.store.indexed import IndexedDataset, part

    dataset = IndexedDataset.open(path)
    if verify:
        reshape.verify(dataset)
    quick = verify or dataset.num_sequences <= _LENGTHS_READ
    lengths = dataset.lengths if quick and dataset.num_sequences else None
    return {
        "dataset": str(dataset.prefix),
        "verified": verify,
        "documents": dataset.num_documents,
        "sequences": dataset.num_sequences,
        "tokens": dataset.num_tokens,
        "dtype": dataset.dtype.name,
        "bytes": sum(part(dataset.prefix, suffix).stat().st_size for suffix in (".bin", ".idx")),
        "shortest_sequence": None if lengths is None else int(lengths.min()),
        "longest_sequence": None if lengths is None else int(lengths.max()),
        "sidecar": dataclasses.asdict(dataset.info) if dataset.info else None,
    }


def dataset_lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    documents, sequences, tokens = facts["documents"], facts["sequences"], facts["tokens"]
    per_document = f", {tokens / documents:,.0f} a document" if documents else ""
    yield "documents", f"{documents:,}" + (f" of {sequences:,} sequences" if sequences != documents else "")
    yield "tokens", f"{tokens:,} ({format_count(tokens)}){per_document}"
    if facts["longest_sequence"] is not None:
        yield "a sequence", f"{facts['shortest_sequence']:,} to {facts['longest_sequence']:,} tokens"
    yield "on disk", f"{format_bytes(facts['bytes'])}, ids as {facts['dtype']}"
    sidecar = facts["sidecar"]
    if sidecar is None:
        yield "sidecar", "none: a dataset of another tool, which carries no tokenizer"
    else:
        text = sidecar["num_bytes"]
        yield "made of", f"{format_bytes(text)} of text, {text / tokens:.2f} bytes a token" if text > 0 else "unknown"
        yield "tokenizer", tokenizer_words(sidecar["vocab_size"], sidecar["eod_id"], sidecar["tokenizer_fingerprint"])
        yield "content sha256", sidecar["content_sha256"]
        if sidecar["sidecar_sha256"] is None:
            yield "sidecar", "has no hash of itself, being of an older lmtrain"
    unread = f"no; lmtrain inspect {facts['dataset']} --verify reads every byte"
    yield "verified", "every entry and every byte" if facts["verified"] else unread


def tokenizer_words(vocab_size: int, eod_id: int | None, fingerprint: str) -> str:
    eod = "no end token" if eod_id is None else f"end token {eod_id}"
    return f"{vocab_size:,} pieces, {eod}, fingerprint {fingerprint[:12]}"
