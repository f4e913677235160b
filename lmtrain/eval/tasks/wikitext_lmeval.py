"""WikiText as lm-evaluation-harness scores it (task version 2.0): page by page, per original word.

The harness takes WikiText-2's raw test set, which is the text of WikiText-103's to the letter, so that one protocol
has two names and a file of either kind gives the same number.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar

import numpy as np

from lmtrain.errors import UsageError
from lmtrain.eval.recipes.articles import detokenize, pages
from lmtrain.eval.task import Asked, Facts, Prepared, Sums, Task, bits_per_byte, eod_id, perplexity, ratio
from lmtrain.eval.text.texts import jsonl_texts, oddities, read_text_file, refuse_blank
from lmtrain.eval.text.windows import WindowedRequests


class LmEvalWikiText(Task):
    headline = "word_perplexity"
    compares = True
    version = "2.0"
    recipe: ClassVar = {
        "text": "each page by itself, through the 24-step detokenizer",
        "windows": "seq_len tokens, disjoint; the last one of a page is as long as the others and scores what is left",
        "prefix": "the end-of-document token, before each page",
        "denominator": 'original words, by re.split(r"\\s+"): blanks at either end of a page make a word each',
    }

    def __init__(self, corpus: str, folder: str) -> None:
        self.id = f"{corpus}/lmeval-{self.version}"
        self.data = f'wiki.test.raw of {folder}, or a .jsonl with one {{"page": ...}} a line'

    def prepare(self, source: Path, asked: Asked) -> Prepared:
        if asked.stride is not None:
            raise UsageError(f"--stride={asked.stride} is not {self.id}, whose windows are disjoint. Leave it out.")
        text, sha256 = read_text_file(source)
        refuse_blank(text, source)
        originals = jsonl_texts(text, source, "page") if source.suffix == ".jsonl" else pages(text)
        prefix = eod_id(asked.tokenizer)
        detokenized = [detokenize(page) for page in originals]
        documents = [np.array([prefix, *ids], np.int64) for ids in asked.tokenizer.encode_batch(detokenized)]
        num_targets = sum(len(tokens) - 1 for tokens in documents)
        words, num_bytes = [count_words(page) for page in originals], [len(page.encode()) for page in originals]
        return Prepared(
            requests=WindowedRequests(documents, asked.seq_len, asked.seq_len, last_looks_back=True),
            num_targets=num_targets,
            documents=documents,
            known={"words": np.array(words, np.float64), "bytes": np.array(num_bytes, np.float64)},
            facts=Facts(
                protocol=asked.protocol(self.id),
                text_sha256=sha256,
                num_documents=len(originals),
                num_words=sum(words),
                words_rule='len(re.split(r"\\s+", page)) of the original pages',
                num_bytes=sum(num_bytes),
                bytes_rule="UTF-8 bytes of the original pages",
                num_tokens=num_targets,
                prefix="end of document, before each page",
                stride=asked.seq_len,
                denominator=f"words = {sum(words)}",
                notes=oddities(*originals),
            ),
        )

    def measures(self, sums: Sums) -> dict[str, float]:
        return {
            "word_perplexity": perplexity(sums["nll"], sums["words"]),
            "byte_perplexity": perplexity(sums["nll"], sums["bytes"]),
            "bits_per_byte": bits_per_byte(sums["nll"], sums["bytes"]),
            "token_perplexity": perplexity(sums["nll"], sums["targets"]),
            "nll_per_token_nats": ratio(sums["nll"], sums["targets"]),
        }


def count_words(page: str) -> int:
    return len(re.split(r"\s+", page))


TASKS = (
    LmEvalWikiText("wikitext103", "wikitext-103-raw-v1"),
    LmEvalWikiText("wikitext2", "wikitext-2-raw-v1"),
)
