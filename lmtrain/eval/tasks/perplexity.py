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

from lmtrain.eval.read_texts import TextInput
from lmtrain.eval.task import (
    Columns,
    Facts,
    Prepared,
    Sums,
    Task,
    TaskOptions,
    bits_per_byte,
    eod_id,
    perplexity,
    ratio,
)
from lmtrain.eval.task_recipes.hash_and_count_texts import (
    DatasetSequences,
    dataset_prefix,
    describe_dataset,
    describe_texts,
    group_by_file,
    open_dataset,
)
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

    def prepare_texts(self, texts: TextInput, options: TaskOptions) -> Prepared:
        prefix = eod_id(options.tokenizer)
        sequences = [np.array([prefix, *ids], np.int64) for ids in options.tokenizer.encode_batch(texts.documents)]
        text_columns, facts = describe_texts(texts)
        return _prepared(sequences, options, text_columns, group_by_file(texts.files), **facts)

    def prepare(self, source: Path, options: TaskOptions) -> Prepared:
        prefix = dataset_prefix(source) or source
        indexed = open_dataset(prefix, options.tokenizer)
        sequences = DatasetSequences(indexed, eod_id(options.tokenizer))
        text_columns, facts = describe_dataset(indexed, (tokens[1:] for tokens in sequences), options.tokenizer)
        return _prepared(sequences, options, text_columns, {}, **facts)

    def measures(self, sums: Sums) -> dict[str, float]:
        measures = {
            "token_perplexity": perplexity(sums["nll"], sums["targets"]),
            "nll_per_token_nats": ratio(sums["nll"], sums["targets"]),
            "token_accuracy": ratio(sums["greedy"], sums["targets"]),
            "bits_per_byte": bits_per_byte(sums["nll"], sums["bytes"]),
        }
        if sums.get("words"):
            measures["word_perplexity"] = perplexity(sums["nll"], sums["words"])
        return measures


def _prepared(
    sequences: Iterable[Tokens], options: TaskOptions, text_columns: Columns, groups: dict[str, NDArray[np.int64]],
    **facts: Any,
) -> Prepared:  # fmt: skip
    stride = max(options.seq_len // 2, 1) if options.stride is None else options.stride
    num_targets = sum(len(tokens) - 1 for tokens in sequences)
    return Prepared(
        requests=WindowedRequests(sequences, options.seq_len, stride),
        num_targets=num_targets,
        documents=sequences,
        text_columns=text_columns,
        groups=groups,
        facts=Facts(
            protocol=options.protocol_id(Perplexity.id),
            num_tokens=num_targets,
            prefix="end of document, before each document",
            stride=stride,
            denominator=f"tokens = {num_targets}",
            **facts,
        ),
    )


TASK = Perplexity()
