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
from lmtrain.eval.task import Asked, Columns, Facts, Prepared, Sums, Task, bits_per_byte, perplexity, ratio
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

    def prepare_texts(self, texts: TextInput, asked: Asked) -> Prepared:
        eod_id, documents = _eod_id(asked.tokenizer), texts.documents
        sequences = [np.array([eod_id, *ids], np.int64) for ids in asked.tokenizer.encode_batch(documents)]
        words, num_bytes = [len(one.split()) for one in documents], [len(one.encode()) for one in documents]
        return _prepared(
            sequences,
            asked,
            known={"words": np.array(words, np.float64), "bytes": np.array(num_bytes, np.float64)},
            text_sha256=texts.sha256,
            notes={"text_sha256_of": texts.sha256_of},
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
        sequences = DatasetSequences(indexed, _eod_id(tokenizer))
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
        if "words" in sums:
            found["word_perplexity"] = perplexity(sums["nll"], sums["words"])
        return found


def _eod_id(tokenizer: Tokenizer) -> int:
    if tokenizer.eod_id is None:
        raise DataError("The tokenizer has no end-of-document token to put before a first token. Add one to it.")
    return tokenizer.eod_id


def _prepared(sequences: Iterable[Tokens], asked: Asked, known: Columns, **facts: Any) -> Prepared:
    stride = max(asked.seq_len // 2, 1) if asked.stride is None else asked.stride
    num_targets = sum(len(tokens) - 1 for tokens in sequences)
    return Prepared(
        requests=WindowedRequests(sequences, asked.seq_len, stride),
        num_targets=num_targets,
        documents=sequences,
        known=known,
        facts=Facts(
            protocol=Perplexity.id,
            num_tokens=num_targets,
            prefix="end of document, before each document",
            stride=stride,
            denominator=f"tokens = {num_targets}",
            **facts,
        ),
    )


TASK = Perplexity()
