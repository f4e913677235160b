"""WikiText-103 as Megatron-LM scores it: the whole file as one stream, overlapping windows, per original word.

The published figures divide by the words of the file as it lies there (pieces between single spaces, newlines among
them), whatever the tokenizer made of it, so that they compare across tokenizers.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import ClassVar

import numpy as np

from lmtrain.errors import UsageError
from lmtrain.eval.detokenize import detokenize
from lmtrain.eval.task import Asked, Facts, Prepared, Sums, Task, bits_per_byte, ratio
from lmtrain.eval.texts import read_text_file
from lmtrain.eval.windows import WindowedRequests

STRIDE = 32
LOSS_CAP = 20.0  # because: the protocol reports exp(min(20, loss))


class WikiText103(Task):
    id = "wikitext103/megatron-o32"
    data = "wiki.test.tokens of wikitext-103-v1 (word level, with <unk>)"
    headline = "word_perplexity_adjusted"
    compares = False
    recipe: ClassVar = {
        "text": "the whole file as one string, through the 24-step detokenizer",
        "windows": "seq_len tokens, moved by 32; the first scores all targets, the others their last 32",
        "prefix": "none: the first token is context only",
        "denominator": "original words less one, counted before detokenizing",
    }

    def prepare(self, source: Path, asked: Asked) -> Prepared:
        if asked.stride not in (None, STRIDE):
            raise UsageError(f"--stride={asked.stride} is not {self.id}, whose stride is {STRIDE}. Leave --stride out.")
        text, sha256 = read_text_file(source)
        tokens = np.array(asked.tokenizer.encode(detokenize(text)), np.int64)
        num_words, num_bytes = len(text.strip().split(" ")), len(text.encode())
        return Prepared(
            requests=WindowedRequests([tokens], asked.seq_len, STRIDE),
            num_targets=max(len(tokens) - 1, 0),
            known={"words": np.array([num_words - 1.0]), "bytes": np.array([float(num_bytes)])},
            facts=Facts(
                protocol=self.id,
                text_sha256=sha256,
                num_documents=1,
                num_words=num_words,
                words_rule='len(text.strip().split(" ")) of the original text',
                num_bytes=num_bytes,
                bytes_rule="UTF-8 bytes of the original text",
                num_tokens=len(tokens),
                prefix="none",
                stride=STRIDE,
                denominator=f"words - 1 = {num_words - 1}",
                notes={"loss_cap_nats": str(LOSS_CAP)},
            ),
        )

    def measures(self, sums: Sums) -> dict[str, float]:
        per_token, per_word = ratio(sums["nll"], sums["targets"]), ratio(sums["nll"], sums["words"])
        return {
            "word_perplexity_adjusted": math.exp(min(per_word, LOSS_CAP)),
            "token_perplexity": math.exp(min(per_token, LOSS_CAP)),
            "nll_per_word_adjusted_nats": per_word,
            "nll_per_token_nats": per_token,
            "bits_per_byte": bits_per_byte(sums["nll"], sums["bytes"]),
        }


TASK = WikiText103()
