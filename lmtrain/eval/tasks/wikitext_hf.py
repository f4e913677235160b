"""WikiText as the page "Perplexity of fixed-length models" of Hugging Face's documentation scores it: per token.

The raw text is not detokenized; a stream of windows that each hold seq_len tokens, one target less than elsewhere.
The page weighs each window by its labels less one although, where windows overlap, none of them is lost: with that
weighting its figures are met, and `token_perplexity_unweighted` says what comes without.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lmtrain.errors import UsageError
from lmtrain.eval.recipes.articles import articles, articles_of_tokens
from lmtrain.eval.task import (
    Answers,
    Asked,
    Columns,
    Facts,
    Prepared,
    Sums,
    Task,
    bits_per_byte,
    item_columns,
    perplexity,
    ratio,
    sum_by_item,
)
from lmtrain.eval.text.texts import oddities, read_text_file, refuse_blank
from lmtrain.eval.text.windows import StreamRequests, Window, refuse_stride

PUBLISHED_STRIDE, PUBLISHED_SEQ_LEN = 512, 1024


class StridedWikiText(Task):
    data = "wiki.test.raw of wikitext-2-raw-v1"
    headline = "token_perplexity"
    compares = False
    recipe: ClassVar = {
        "text": "the file's lines, blank ones empty, joined by two newlines; not detokenized",
        "windows": "seq_len tokens (published: 1,024), moved by 512; each scores what the one before it did not hold",
        "prefix": "none: the first token of a window is context only",
        "denominator": "targets, each window's weighted by its labels less one",
        "also": "any stride and any window, as wikitext/hf-stride256 and wikitext/hf-stride512-s2048",
    }

    def __init__(self, stride: int) -> None:
        self.id, self.stride = f"wikitext/hf-stride{stride}", stride

    def prepare(self, source: Path, asked: Asked) -> Prepared:
        if asked.stride not in (None, self.stride):
            raise UsageError(
                f"--stride={asked.stride} is not {self.id}, whose stride is {self.stride}. "
                f"Use --task wikitext/hf-stride{asked.stride}."
            )
        original, sha256 = read_text_file(source)
        refuse_blank(original, source)
        text = joined(original)
        parts = articles(text)
        ids, ends = (np.array(found, np.int64) for found in asked.tokenizer.encode_with_ends(text))
        items = articles_of_tokens(ends, parts, text)
        labelled = list(labelled_windows(len(ids), asked.seq_len, self.stride))
        cut = [window for window, _ in labelled]
        scored = np.concatenate([np.arange(window.first_scored, window.stop + 1) for window in cut] or [ids[:0]])
        num_bytes = sum_by_item(items[scored], _bytes_of_tokens(text, ends)[scored], len(parts))
        return Prepared(
            requests=StreamRequests(ids, items, cut, [weight for _, weight in labelled]),
            num_targets=len(scored),
            known={"bytes": num_bytes},
            facts=Facts(
                protocol=asked.protocol(self.id, PUBLISHED_SEQ_LEN),
                text_sha256=sha256,
                num_documents=len(parts),
                num_words=None,
                words_rule="not counted: the protocol divides by tokens",
                num_bytes=int(num_bytes.sum()),
                bytes_rule="UTF-8 bytes of the scored tokens in the joined text",
                num_tokens=len(ids),
                prefix="none",
                stride=self.stride,
                denominator=f"weighted targets = {sum(weight * _count(window) for window, weight in labelled):.0f}",
                notes=oddities(original),
            ),
        )

    def columns(self, prepared: Prepared, answers: Answers) -> Columns:
        weights = np.array([request.weight for request in prepared.requests])
        found = item_columns(prepared.known, answers)
        for name, values in (("nll", answers.nll), ("targets", answers.targets)):
            found[f"{name}_weighted"] = sum_by_item(answers.item, values * weights, len(found["nll"]))
        return found

    def measures(self, sums: Sums) -> dict[str, float]:
        return {
            "token_perplexity": perplexity(sums["nll_weighted"], sums["targets_weighted"]),
            "token_perplexity_unweighted": perplexity(sums["nll"], sums["targets"]),
            "nll_per_token_nats": ratio(sums["nll"], sums["targets"]),
            "bits_per_byte": bits_per_byte(sums["nll"], sums["bytes"]),
        }


def joined(text: str) -> str:
    r"""The rows of the published dataset, which keep their newline unless they are blank, with "\n\n" between them."""
    lines = [line + "\n" for line in text.split("\n")]
    return "\n\n".join(line if line.strip() else "" for line in (lines[:-1] if text.endswith("\n") else lines))


def labelled_windows(num_tokens: int, seq_len: int, stride: int) -> Iterator[tuple[Window, float]]:
    """Each window with the weight of its targets. It labels what the one before did not hold, in all seq_len tokens.

    The loss is a mean over the targets, and counts as often as there are labels less one. Where windows do not
    overlap the first label has nothing before it and is no target.
    """
    refuse_stride(seq_len, stride)
    labelled = 0
    for start in range(0, num_tokens, stride):
        stop = min(start + seq_len, num_tokens)
        window = Window(start, stop - 1, max(labelled, start + 1))
        if _count(window):
            yield window, (stop - labelled - 1) / _count(window)
        labelled = stop
        if stop == num_tokens:
            return


def _count(window: Window) -> int:
    return window.stop + 1 - window.first_scored


def _bytes_of_tokens(text: str, ends: NDArray[np.int64]) -> NDArray[np.float64]:
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (points > 0x7F) + (points > 0x7FF) + (points > 0xFFFF)
    return np.diff(np.concatenate([[0], np.cumsum(widths)])[ends], prepend=0).astype(np.float64)


def named(name: str) -> Task | None:
    found = re.fullmatch(r"wikitext/hf-stride([1-9]\d{0,8})", name)
    return StridedWikiText(int(found[1])) if found else None


TASK = StridedWikiText(PUBLISHED_STRIDE)
