"""WikiText-103 as Megatron-LM scores it: the whole file as one stream, overlapping windows, per original word.

The published figures divide by the words of the file as it lies there (pieces between single spaces, newlines among
them), whatever the tokenizer made of it, so that they compare across tokenizers.
"""

from __future__ import annotations

import math
import re
from itertools import accumulate
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lmtrain.errors import DataError, UsageError
from lmtrain.eval.recipes.articles import articles, articles_of_tokens, detokenize
from lmtrain.eval.task import Asked, Facts, Prepared, Sums, Task, bits_per_byte, ratio
from lmtrain.eval.text.texts import oddities, read_text_file, refuse_blank
from lmtrain.eval.text.windows import StreamRequests, windows

PUBLISHED_STRIDE, PUBLISHED_SEQ_LEN = 32, 1024
LOSS_CAP = 20.0  # because: the protocol reports exp(min(20, loss))


class MegatronWikiText(Task):
    data = "wiki.test.tokens of wikitext-103-v1 (word level, with <unk>)"
    headline = "word_perplexity_adjusted"
    compares = False
    recipe: ClassVar = {
        "text": "the whole file as one string, through the 24-step detokenizer",
        "windows": "seq_len tokens (published: 1,024), moved by 32; the first scores all, the others their last 32",
        "prefix": "none: the first token is context only",
        "denominator": "original words less one, counted before detokenizing",
        "also": "any stride and any window, as wikitext103/megatron-o64 and wikitext103/megatron-o32-s2048",
    }

    def __init__(self, stride: int) -> None:
        self.id, self.stride = f"wikitext103/megatron-o{stride}", stride

    def prepare(self, source: Path, asked: Asked) -> Prepared:
        if asked.stride not in (None, self.stride):
            other = f"wikitext103/megatron-o{asked.stride}"
            raise UsageError(
                f"--stride={asked.stride} is not {self.id}, whose stride is {self.stride}. Use --task {other}."
            )
        text, sha256 = read_text_file(source)
        refuse_blank(text, source)
        parts, whole = articles(text), detokenize(text)
        ids, ends = asked.tokenizer.encode_with_ends(whole)
        words = words_between(text, parts)
        num_words, num_bytes = count_words(text), len(text.encode())
        if num_words == 1:
            raise DataError(f"{source} is one word, and {self.id} divides by words less one. Give the whole file.")
        return Prepared(
            requests=StreamRequests(
                np.array(ids, np.int64),
                articles_of_tokens(np.array(ends, np.int64), [detokenize(part) for part in parts], whole),
                list(windows(len(ids), asked.seq_len, self.stride)),
            ),
            num_targets=max(len(ids) - 1, 0),
            known={"words": words, "bytes": np.array([len(part.encode()) for part in parts], np.float64)},
            facts=Facts(
                protocol=asked.protocol(self.id, PUBLISHED_SEQ_LEN),
                text_sha256=sha256,
                num_documents=len(parts),
                num_words=num_words,
                words_rule='len(text.strip().split(" ")) of the original text',
                num_bytes=num_bytes,
                bytes_rule="UTF-8 bytes of the original text",
                num_tokens=len(ids),
                prefix="none",
                stride=self.stride,
                denominator=f"words - 1 = {num_words - 1}",
                notes={"loss_cap_nats": str(LOSS_CAP), **oddities(text)},
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


def count_words(text: str) -> int:
    return len(text.strip().split(" "))


def words_between(text: str, parts: list[str]) -> NDArray[np.float64]:
    """Of each article its single spaces, which in all are the words less one."""
    first, stop = len(text) - len(text.lstrip()), len(text.rstrip())
    begins = accumulate(map(len, parts), initial=0)
    inside = [(max(begin, first), min(begin + len(part), stop)) for begin, part in zip(begins, parts, strict=False)]
    return np.array([text.count(" ", begin, end) for begin, end in inside], np.float64)


def named(name: str) -> Task | None:
    found = re.fullmatch(r"wikitext103/megatron-o([1-9]\d{0,8})", name)
    return MegatronWikiText(int(found[1])) if found else None


TASK = MegatronWikiText(PUBLISHED_STRIDE)
