"""The same targets scored by counting: what a trained model must beat, beside its own numbers. Torch-free.

Called by `lmtrain eval --baseline`. Counting itself is in baselines.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from lmtrain.errors import DataError
from lmtrain.eval.recipes.documents import open_dataset
from lmtrain.eval.result import BaselineResult, Result
from lmtrain.eval.statistics.baselines import Unigram, WittenBellBigram
from lmtrain.eval.task import Prepared, bits_per_byte, perplexity
from lmtrain.tokenizer.base import Tokenizer


def with_baselines(result: Result, prepared: Prepared, train: Path, tokenizer: Tokenizer) -> Result:
    """Counts the training dataset's tokens and adds a unigram's and a bigram's numbers to the result."""
    if tokenizer.eod_id is None or prepared.documents is None:
        raise DataError(f"{result.protocol} has no baselines, which need whole documents. Leave --baseline out.")
    indexed = open_dataset(train, tokenizer)
    bigram = WittenBellBigram(indexed.tokens, tokenizer.vocab_size, tokenizer.eod_id)
    rows = tuple(
        _row(name, result, prepared, baseline)
        for name, baseline in (("unigram", bigram.unigram), ("bigram (Witten-Bell)", bigram))
    )
    counted: dict[str, str | int] = {"baselines_counted_on": str(train), "baselines_train_tokens": indexed.num_tokens}
    return dataclasses.replace(result, baselines=rows, notes=result.notes | counted)


def _row(name: str, result: Result, prepared: Prepared, baseline: Unigram | WittenBellBigram) -> BaselineResult:
    assert prepared.documents is not None
    nll = sum(baseline.nll(tokens[1:]) for tokens in prepared.documents)  # the first token is the prefix
    bits = bits_per_byte(nll, float(prepared.known["bytes"].sum()))
    per_token = perplexity(nll, prepared.num_targets)
    return BaselineResult(
        name=name,
        nll_sum_nats=nll,
        bits_per_byte=bits,
        token_perplexity=per_token,
        model_bits_ratio=result.measures["bits_per_byte"] / bits,
        model_token_perplexity_ratio=result.measures["token_perplexity"] / per_token,
    )
