"""Perplexity of any text or dataset, document by document, in strided windows.

Each document is scored on its own, and its first token is conditioned on the end-of-document token. That token is never
a target, so that a text and the dataset made from it give the same number.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lmtrain.eval.recipes.documents import (
    DatasetSequences,
    dataset_prefix,
    groups_of,
    open_dataset,
    said_of_dataset,
    said_of_texts,
)
from lmtrain.eval.task import Asked, Columns, Facts, Prepared, Sums, Task, bits_per_byte, eod_id, perplexity, ratio
from lmtrain.eval.texts import TextInput
from lmtrain.eval.windows import Tokens, WindowedRequests


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
        prefix = eod_id(asked.tokenizer)
        sequences = [np.array([prefix, *ids], np.int64) for ids in asked.tokenizer.encode_batch(texts.documents)]
        known, facts = said_of_texts(texts)
        return _prepared(sequences, asked, known, groups_of(texts.files), **facts)

    def prepare(self, source: Path, asked: Asked) -> Prepared:
        prefix = dataset_prefix(source) or source
        indexed = open_dataset(prefix, asked.tokenizer)
        sequences = DatasetSequences(indexed, eod_id(asked.tokenizer))
        known, facts = said_of_dataset(prefix, indexed, (tokens[1:] for tokens in sequences), asked.tokenizer)
        return _prepared(sequences, asked, known, {}, **facts)

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


def _prepared(
    sequences: Iterable[Tokens], asked: Asked, known: Columns, groups: dict[str, NDArray[np.int64]],
    **facts: Any,
) -> Prepared:  # fmt: skip
    stride = max(asked.seq_len // 2, 1) if asked.stride is None else asked.stride
    num_targets = sum(len(tokens) - 1 for tokens in sequences)
    return Prepared(
        requests=WindowedRequests(sequences, asked.seq_len, stride),
        num_targets=num_targets,
        documents=sequences,
        known=known,
        groups=groups,
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
