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

from lmtrain.errors import DataError
from lmtrain.eval.datasets import DatasetSequences, dataset_prefix, open_dataset
from lmtrain.eval.task import Facts, Prepared, Task, Totals, bits_per_byte, perplexity
from lmtrain.eval.texts import TextInput
from lmtrain.eval.windows import Tokens, WindowedRequests
from lmtrain.tokenizer.base import Tokenizer


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

    def prepare_texts(self, texts: TextInput, tokenizer: Tokenizer, seq_len: int, stride: int | None) -> Prepared:
        eod_id, documents = _eod_id(tokenizer), texts.documents
        sequences = [np.array([eod_id, *ids], np.int64) for ids in tokenizer.encode_batch(documents)]
        return _prepared(
            sequences,
            (seq_len, _stride(stride, seq_len)),
            text_sha256=texts.sha256,
            notes={"text_sha256_of": texts.sha256_of},
            num_documents=len(documents),
            num_words=sum(len(document.split()) for document in documents),
            words_rule="len(text.split())",
            num_bytes=sum(len(document.encode()) for document in documents),
            bytes_rule="UTF-8 bytes of the documents",
        )

    def prepare(self, source: Path, tokenizer: Tokenizer, seq_len: int, stride: int | None) -> Prepared:
        prefix = dataset_prefix(source) or source
        indexed = open_dataset(prefix, tokenizer)
        sequences = DatasetSequences(indexed, _eod_id(tokenizer))
        if indexed.info is not None:
            num_bytes, rule = indexed.info.num_bytes, "UTF-8 bytes of the source text, as the dataset's sidecar says"
        else:
            num_bytes = sum(len(tokenizer.decode(tokens[1:].tolist()).encode()) for tokens in sequences)
            rule = "UTF-8 bytes of the decoded tokens"
        with open(f"{prefix}.bin", "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return _prepared(
            sequences,
            (seq_len, _stride(stride, seq_len)),
            text_sha256=sha256,
            num_documents=indexed.num_documents,
            num_words=None,
            words_rule="not counted in a dataset",
            num_bytes=num_bytes,
            bytes_rule=rule,
            notes={"text_sha256_of": "the .bin file"},
        )

    def measures(self, facts: Facts, totals: Totals) -> dict[str, float]:
        found = {
            "token_perplexity": perplexity(totals.nll_sum_nats, totals.num_targets),
            "nll_per_token_nats": totals.nll_sum_nats / max(totals.num_targets, 1),
            "token_accuracy": totals.num_greedy / max(totals.num_targets, 1),
            "bits_per_byte": bits_per_byte(totals.nll_sum_nats, facts.num_bytes),
        }
        if facts.num_words is not None:
            found["word_perplexity"] = perplexity(totals.nll_sum_nats, facts.num_words)
        return found


def _eod_id(tokenizer: Tokenizer) -> int:
    if tokenizer.eod_id is None:
        raise DataError("The tokenizer has no end-of-document token to put before a first token. Add one to it.")
    return tokenizer.eod_id


def _stride(stride: int | None, seq_len: int) -> int:
    return max(seq_len // 2, 1) if stride is None else stride


def _prepared(sequences: Iterable[Tokens], shape: tuple[int, int], **facts: Any) -> Prepared:
    seq_len, stride = shape
    num_targets = sum(len(tokens) - 1 for tokens in sequences)
    return Prepared(
        requests=WindowedRequests(sequences, seq_len, stride),
        num_targets=num_targets,
        documents=sequences,
        facts=Facts(
            num_tokens=num_targets,
            prefix="end of document, before each document",
            stride=stride,
            denominator=f"tokens = {num_targets}",
            **facts,
        ),
    )


TASK = Perplexity()
