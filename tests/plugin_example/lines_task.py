"""An evaluation task: every line of a text by itself, however little a model can know of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import ClassVar

import numpy as np

from lmtrain.eval.task import Facts, Prepared, Task, Totals, bits_per_byte
from lmtrain.eval.texts import read_text_file
from lmtrain.eval.windows import WindowedRequests
from lmtrain.tokenizer.base import Tokenizer


class Lines(Task):
    id = "lines"
    data = "any text"
    headline = "nll_per_line_nats"
    compares = False
    recipe: ClassVar = {"text": "line by line", "prefix": "none: a line's first token is context only"}

    def prepare(self, source: Path, tokenizer: Tokenizer, seq_len: int, stride: int | None) -> Prepared:
        text, sha256 = read_text_file(source)
        lines = [line for line in text.splitlines() if line.strip()]
        sequences = [np.array(ids, np.int64) for ids in tokenizer.encode_batch(lines)]
        num_targets = sum(len(tokens) - 1 for tokens in sequences)
        facts = Facts(
            text_sha256=sha256, num_documents=len(lines), num_words=None, words_rule="not counted",
            num_bytes=sum(len(line.encode()) for line in lines), bytes_rule="UTF-8 bytes of the lines",
            num_tokens=num_targets, prefix="none", stride=seq_len, denominator=f"lines = {len(lines)}",
        )  # fmt: skip
        return Prepared(requests=WindowedRequests(sequences, seq_len, seq_len), num_targets=num_targets, facts=facts)

    def measures(self, facts: Facts, totals: Totals) -> dict[str, float]:
        per_line = totals.nll_sum_nats / facts.num_documents if facts.num_documents else math.nan
        return {"nll_per_line_nats": per_line, "bits_per_byte": bits_per_byte(totals.nll_sum_nats, facts.num_bytes)}


TASK = Lines()
