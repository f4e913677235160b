"""LAMBADA as Megatron-LM scores it with --strict-lambada: is the whole last word the argmax, token by token?

The last word is tokenized apart from its context, and its true tokens are fed (teacher forcing). The looser rule,
the last token only, gives far higher figures; the two must never be compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np

from lmtrain.errors import DataError, UsageError
from lmtrain.eval.task import Asked, Facts, Prepared, Sums, Task, bits_per_byte, perplexity, ratio
from lmtrain.eval.texts import jsonl_texts, read_text_file
from lmtrain.eval.windows import Request
from lmtrain.tokenizer.base import Tokenizer


class LambadaStrict(Task):
    id = "lambada/megatron-strict"
    data = 'lambada_test.jsonl, one {"text": ...} a line (OpenAI\'s detokenized variant, 5153 lines)'
    headline = "whole_word_accuracy"
    compares = False
    recipe: ClassVar = {
        "context": "tokens of the text before its last word, stripped",
        "target": "tokens of a space and the last word, tokenized apart",
        "right": "every target token is the argmax given the true tokens before it",
        "prefix": "none; an empty context is the end-of-document token",
        "long lines": "cut on the left to seq_len + 1 tokens",
    }

    def prepare(self, source: Path, asked: Asked) -> Prepared:
        tokenizer, seq_len = asked.tokenizer, asked.seq_len
        if asked.stride is not None:
            raise UsageError(f"--stride={asked.stride} means nothing to {self.id}, which has no windows. Leave it out.")
        text, sha256 = read_text_file(source)
        samples = [split_last_word(line) for line in jsonl_texts(text, source)]
        words = [word for _, word in samples]
        contexts = tokenizer.encode_batch([context for context, _ in samples])
        targets = tokenizer.encode_batch([" " + word for word in words])
        prefix = _prefix(tokenizer, contexts)
        rows = [(context or prefix) + target for context, target in zip(contexts, targets, strict=True)]
        _check_targets(targets, seq_len, source)
        requests = [
            Request(np.array(row[-(seq_len + 1) :], np.int64), len(target), item)
            for item, (row, target) in enumerate(zip(rows, targets, strict=True))
        ]
        num_bytes = np.array([len((" " + word).encode()) for word in words], np.float64)
        return Prepared(
            requests=requests,
            num_targets=sum(map(len, targets)),
            known={"words": np.ones(len(words)), "bytes": num_bytes},
            facts=Facts(
                protocol=self.id,
                text_sha256=sha256,
                num_documents=len(samples),
                num_words=len(words),
                words_rule="one a line: text.split()[-1]",
                num_bytes=int(num_bytes.sum()),
                bytes_rule="UTF-8 bytes of the scored words, each with its leading space",
                num_tokens=sum(map(len, contexts)) + sum(map(len, targets)),
                prefix="none (an empty context: end of document)",
                stride=None,
                denominator=f"lines = {len(samples)}",
                notes={
                    "lines_cut_on_the_left": sum(len(row) > seq_len + 1 for row in rows),
                    "lines_with_empty_context": sum(not context for context in contexts),
                },
            ),
        )

    def measures(self, sums: Sums) -> dict[str, float]:
        return {
            "whole_word_accuracy": ratio(sums["items_greedy"], sums["items"]),
            "last_word_perplexity": perplexity(sums["nll"], sums["items"]),
            "target_token_perplexity": perplexity(sums["nll"], sums["targets"]),
            "target_token_accuracy": ratio(sums["greedy"], sums["targets"]),
            "bits_per_byte": bits_per_byte(sums["nll"], sums["bytes"]),
        }


def split_last_word(text: str) -> tuple[str, str]:
    """The context, stripped, and the last word; punctuation that touches the word belongs to it."""
    words = text.split()
    if not words:
        raise DataError("A line's text has no word to guess. Give lines that end in a word.")
    last = words[-1]
    return text[: text.rfind(last)].strip(), last


def _prefix(tokenizer: Tokenizer, contexts: list[list[int]]) -> list[int]:
    if tokenizer.eod_id is not None:
        return [tokenizer.eod_id]
    if all(contexts):
        return []
    raise DataError("A line has no context and the tokenizer no end-of-document token instead. Remove one-word lines.")


def _check_targets(targets: list[list[int]], seq_len: int, source: Path) -> None:
    for number, target in enumerate(targets, 1):
        if not 1 <= len(target) <= seq_len:
            raise DataError(
                f"{source}: the last word of text {number} is {len(target)} tokens and the model sees {seq_len}. "
                "Use a tokenizer that knows the text or a longer seq_len."
            )


TASK = LambadaStrict()
