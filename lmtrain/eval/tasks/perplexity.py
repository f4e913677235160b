"""How well a model predicts any text or dataset, document by document, in strided windows.

Each document is scored on its own and its first token is conditioned on the end-of-document token. The end-of-document
token itself is never a target, so that a text and the dataset made from it give the same number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lmtrain.errors import DataError
from lmtrain.eval.datasets import DatasetSequences, dataset_prefix, open_dataset
from lmtrain.eval.task import Asked, Columns, Facts, Prepared, Sums, Task, bits_per_byte, eod_id, perplexity, ratio
from lmtrain.eval.texts import TextInput, oddities
from lmtrain.eval.windows import Tokens, WindowedRequests

MOST_GROUPS = 100  # because: a folder of small files is one text to whoever asks, not thousands


class Perplexity(Task):
    id = "perplexity"
    data = "whatever `lmtrain preprocess` reads (.txt, .jsonl, .parquet, compressed, a folder), or a .bin/.idx prefix"
    headline = "token_perplexity"
    compares = True
    recipe: ClassVar = {
        "text": "as it is, document by document",
        "windows": "seq_len tokens, moved by --stride (default: half of seq_len); each target once",
        "prefix": "the end-of-document token, which is never a target",
        "denominator": "tokens, words or bytes, as each measure's name says",
    }

    def prepare_texts(self, texts: TextInput, asked: Asked) -> Prepared:
        prefix, documents = eod_id(asked.tokenizer), texts.documents
        sequences = [np.array([prefix, *ids], np.int64) for ids in asked.tokenizer.encode_batch(documents)]
        words, num_bytes = [len(one.split()) for one in documents], [len(one.encode()) for one in documents]
        if any(num_bytes) and not any(words):
            raise DataError(f"{texts.name} holds no word, only {sum(num_bytes)} blank bytes. Give a file with text.")
        return _prepared(
            sequences,
            asked,
            known={"words": np.array(words, np.float64), "bytes": np.array(num_bytes, np.float64)},
            groups=_groups(texts.files),
            text_sha256=texts.sha256,
            notes={"text_sha256_of": texts.sha256_of, **oddities(*documents)},
            num_documents=len(documents),
            num_words=sum(words),
            words_rule="len(text.split())",
            num_bytes=sum(num_bytes),
            bytes_rule="UTF-8 bytes of the documents",
        )

    def prepare(self, source: Path, asked: Asked) -> Prepared:
        tokenizer = asked.tokenizer
        prefix = dataset_prefix(source) or source
        indexed = open_dataset(prefix, tokenizer)
        sequences = DatasetSequences(indexed, eod_id(tokenizer))
        decoded = np.array([len(tokenizer.decode(tokens[1:].tolist()).encode()) for tokens in sequences], np.float64)
        num_bytes, rule = int(decoded.sum()), "UTF-8 bytes of the decoded tokens"
        if indexed.info is not None:  # because: what a tokenizer drops of a text is not in its tokens
            num_bytes, rule = indexed.info.num_bytes, "UTF-8 bytes of the source text, as the dataset's sidecar says"
        with open(f"{prefix}.bin", "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return _prepared(
            sequences,
            asked,
            known={"bytes": decoded * ratio(num_bytes, decoded.sum())},
            text_sha256=sha256,
            num_documents=indexed.num_documents,
            num_words=None,
            words_rule="not counted in a dataset",
            num_bytes=num_bytes,
            bytes_rule=rule,
            notes={"text_sha256_of": "the .bin file"},
        )

    def measures(self, sums: Sums) -> dict[str, float]:
        found = {
            "token_perplexity": perplexity(sums["nll"], sums["targets"]),
            "nll_per_token_nats": ratio(sums["nll"], sums["targets"]),
            "token_accuracy": ratio(sums["greedy"], sums["targets"]),
            "bits_per_byte": bits_per_byte(sums["nll"], sums["bytes"]),
        }
        if sums.get("words"):
            found["word_perplexity"] = perplexity(sums["nll"], sums["words"])
        return found


def _groups(files: dict[str, int]) -> dict[str, NDArray[np.int64]]:
    """Documents by file, if there are several."""
    if not 1 < len(files) <= MOST_GROUPS:
        return {}
    stops = np.cumsum(list(files.values()))
    return {name: np.arange(stop - count, stop) for (name, count), stop in zip(files.items(), stops, strict=True)}


def _prepared(
    sequences: Iterable[Tokens], asked: Asked, known: Columns, groups: dict[str, NDArray[np.int64]] | None = None,
    **facts: Any,
) -> Prepared:  # fmt: skip
    stride = max(asked.seq_len // 2, 1) if asked.stride is None else asked.stride
    num_targets = sum(len(tokens) - 1 for tokens in sequences)
    return Prepared(
        requests=WindowedRequests(sequences, asked.seq_len, stride),
        num_targets=num_targets,
        documents=sequences,
        known=known,
        groups=groups or {},
        facts=Facts(
            protocol=asked.protocol(Perplexity.id),
            num_tokens=num_targets,
            prefix="end of document, before each document",
            stride=stride,
            denominator=f"tokens = {num_targets}",
            **facts,
        ),
    )


TASK = Perplexity()
