"""An evaluation task: every line of a text by itself, however little a model can know of it."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np

from lmtrain.eval.read_texts import read_text_file
from lmtrain.eval.task import Facts, Prepared, Sums, Task, TaskOptions, bits_per_byte, ratio
from lmtrain.eval.windows import WindowedRequests


class Lines(Task):
    id = "lines"
    data = "any text"
    headline = "nll_per_line_nats"
    compares = False
    recipe: ClassVar = {"text": "line by line", "prefix": "none: a line's first token is context only"}

    def prepare(self, source: Path, options: TaskOptions) -> Prepared:
        text, sha256 = read_text_file(source)
        lines = [line for line in text.splitlines() if line.strip()]
        sequences = [np.array(ids, np.int64) for ids in options.tokenizer.encode_batch(lines)]
        num_targets = sum(len(tokens) - 1 for tokens in sequences)
        num_bytes = np.array([len(line.encode()) for line in lines], np.float64)
        facts = Facts(
            protocol=self.id, text_sha256=sha256, num_documents=len(lines), num_words=None, words_rule="not counted",
            num_bytes=int(num_bytes.sum()), bytes_rule="UTF-8 bytes of the lines",
            num_tokens=num_targets, prefix="none", stride=options.seq_len, denominator=f"lines = {len(lines)}",
        )  # fmt: skip
        requests = WindowedRequests(sequences, options.seq_len, options.seq_len)
        return Prepared(requests=requests, num_targets=num_targets, text_columns={"bytes": num_bytes}, facts=facts)

    def measures(self, sums: Sums) -> dict[str, float]:
        per_line = ratio(sums["nll"], sums["items"])
        return {"nll_per_line_nats": per_line, "bits_per_byte": bits_per_byte(sums["nll"], sums["bytes"])}


TASK = Lines()
