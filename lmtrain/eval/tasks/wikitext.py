"""WikiText by three protocols: those of Hugging Face's documentation, lm-evaluation-harness and Megatron-LM.

Their figures are not comparable. Hugging Face's "Perplexity of fixed-length models" uses the raw text as one stream and
divides by tokens; the harness (task version 2.0) scores page by page and divides by original words, as Megatron-LM
does, which uses the word-level file as one stream.

All three use lm-evaluation-harness's rule for headings of the first level. Two lines of formulas that begin and end in
an equals sign count as headings too, so the 60 articles of the test sets become 62.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lmtrain.errors import DataError, UsageError, way
from lmtrain.eval.read_texts import count_odd_characters, jsonl_texts, read_text_file, suffix_of_text
from lmtrain.eval.task import (
    Answers,
    Columns,
    Facts,
    Prepared,
    Sums,
    Task,
    TaskOptions,
    bits_per_byte,
    eod_id,
    item_columns,
    perplexity,
    ratio,
    sum_by_item,
)
from lmtrain.eval.windows import StreamRequests, Window, WindowedRequests, check_stride, windows

PUBLISHED_SEQ_LEN = 1024
LOSS_CAP = 20.0  # because: Megatron-LM reports exp(min(20, loss))
Step = Callable[[str], str]
_NOT_BLANK = re.compile(r"\S")


def _read_text(source: Path) -> tuple[str, str]:
    """Return the text of the file `source` and its SHA-256. Raise DataError if the text has only blanks."""
    text, sha256 = read_text_file(source)
    if not text.strip():
        raise DataError(f"{source} holds no word, only {len(text)} blank characters. Give a file with text.")
    return text, sha256


class OneStream(Task):
    """A task on the file as one stream of tokens, in overlapping windows whose stride is part of the id."""

    family: ClassVar[str]  # the id without the stride

    def __init__(self, stride: int) -> None:
        self.id, self.stride = f"{self.family}{stride}", stride

    def prepare(self, source: Path, options: TaskOptions) -> Prepared:
        if options.stride not in (None, self.stride):
            raise UsageError(
                f"--stride={options.stride} does not apply to {self.id}, whose stride is {self.stride}. "
                f"Use {way(f'{self.family}{options.stride}', instead_of=self.id)}."
            )
        return self.prepare_stream(source, options)

    @abstractmethod
    def prepare_stream(self, source: Path, options: TaskOptions) -> Prepared:
        """Return the requests and facts of a file, at the stride that the id names."""


class HuggingFace(OneStream):
    """Hugging Face's protocol. Its windows hold seq_len tokens, one target less than elsewhere.

    The published script weighs each window by its number of labels minus one, although no label is lost where windows
    overlap. That weighting reproduces its figures; `token_perplexity_unweighted` is the measure without it.
    """

    family = "wikitext/hf-stride"
    data = "wiki.test.raw of wikitext-2-raw-v1"
    published = "wiki.test.raw"
    headline = "token_perplexity"
    recipe: ClassVar = {
        "text": "the file's lines, blank ones empty, joined by two newlines; not detokenized",
        "windows": "seq_len tokens (published: 1,024), moved by 512; each scores what the one before it did not hold",
        "prefix": "none: the first token of a window is context only",
        "denominator": "targets, each window's weighted by its labels less one",
        "also": "any stride and any window, as wikitext/hf-stride256 and wikitext/hf-stride512-s2048",
    }

    def prepare_stream(self, source: Path, options: TaskOptions) -> Prepared:
        text, sha256 = _read_text(source)
        joined = join_rows(text)
        parts = split_articles(joined)
        ids, ends = (np.array(values, np.int64) for values in options.tokenizer.encode_with_ends(joined))
        items = article_of_each_token(ends, parts, joined)
        labelled = list(labelled_windows(len(ids), options.seq_len, self.stride))
        all_windows = [window for window, _ in labelled]
        scored_by_window = [np.arange(window.first_scored, window.stop + 1) for window in all_windows]
        scored = np.concatenate(scored_by_window or [ids[:0]])
        weighted = sum(weight * _num_targets(window) for window, weight in labelled)
        num_bytes = sum_by_item(items[scored], _bytes_of_each_token(joined, ends)[scored], len(parts))
        return Prepared(
            requests=StreamRequests(ids, items, all_windows, [weight for _, weight in labelled]),
            num_targets=len(scored),
            text_columns={"bytes": num_bytes},
            facts=Facts(
                protocol=options.protocol_id(self.id, PUBLISHED_SEQ_LEN),
                text_sha256=sha256,
                num_documents=len(parts),
                num_words=None,
                words_rule="not counted: the protocol divides by tokens",
                num_bytes=int(num_bytes.sum()),
                bytes_rule="UTF-8 bytes of the scored tokens in the joined text",
                num_tokens=len(ids),
                prefix="none",
                stride=self.stride,
                denominator=f"weighted targets = {weighted:.0f}",
                notes=count_odd_characters(text),
            ),
        )

    def columns(self, prepared: Prepared, answers: Answers) -> Columns:
        weights = np.array([request.weight for request in prepared.requests])
        columns = item_columns(prepared.text_columns, answers)
        for name, values in (("nll", answers.nll), ("targets", answers.targets)):
            columns[f"{name}_weighted"] = sum_by_item(answers.item, values * weights, len(columns["nll"]))
        return columns

    def measures(self, sums: Sums) -> dict[str, float]:
        return {
            "token_perplexity": perplexity(sums["nll_weighted"], sums["targets_weighted"]),
            "token_perplexity_unweighted": perplexity(sums["nll"], sums["targets"]),
            "nll_per_token_nats": ratio(sums["nll"], sums["targets"]),
            "bits_per_byte": bits_per_byte(sums["nll"], sums["bytes"]),
        }


def join_rows(text: str) -> str:
    r"""Return the rows of the published dataset joined by "\n\n"; rows keep their newline unless they are blank."""
    lines = [line + "\n" for line in text.split("\n")]
    return "\n\n".join(line if line.strip() else "" for line in (lines[:-1] if text.endswith("\n") else lines))


def labelled_windows(num_tokens: int, seq_len: int, stride: int) -> Iterator[tuple[Window, float]]:
    """Yield (window, weight of each of its targets in the mean loss) over a sequence of `num_tokens` tokens. Windows of
    `seq_len` tokens start `stride` tokens apart, and each scores the tokens that are in no earlier window.

    The published loss is a mean over the targets, weighted by the number of labels minus one. If windows do not
    overlap, the first label has no token before it and is no target.
    """
    check_stride(seq_len, stride)
    labelled = 0
    for start in range(0, num_tokens, stride):
        stop = min(start + seq_len, num_tokens)
        window = Window(start, stop - 1, max(labelled, start + 1))
        if _num_targets(window):
            yield window, (stop - labelled - 1) / _num_targets(window)
        labelled = stop
        if stop == num_tokens:
            return


def _num_targets(window: Window) -> int:
    """Return the number of targets that a window scores."""
    return window.stop + 1 - window.first_scored


def _bytes_of_each_token(text: str, ends: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the number of UTF-8 bytes of each token of `text`; `ends` has the index in `text` (in characters) at which
    each token ends.
    """
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (points > 0x7F) + (points > 0x7FF) + (points > 0xFFFF)
    return np.diff(np.concatenate([[0], np.cumsum(widths)])[ends], prepend=0).astype(np.float64)


class WikitextLmEval(Task):
    """lm-evaluation-harness's protocol.

    The harness uses WikiText-2's raw test set, whose text is identical to WikiText-103's, so that one protocol has two
    names and either file gives the same number.
    """

    published = "wiki.test.raw"
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

    def prepare(self, source: Path, options: TaskOptions) -> Prepared:
        options.refuse_any_stride(self.id)
        text, sha256 = _read_text(source)
        originals = jsonl_texts(text, source, "page") if suffix_of_text(source) == ".jsonl" else split_pages(text)
        prefix = eod_id(options.tokenizer)
        detokenized = [detokenize(page) for page in originals]
        documents = [np.array([prefix, *ids], np.int64) for ids in options.tokenizer.encode_batch(detokenized)]
        num_targets = sum(len(tokens) - 1 for tokens in documents)
        words, num_bytes = [count_words(page) for page in originals], [len(page.encode()) for page in originals]
        return Prepared(
            requests=WindowedRequests(documents, options.seq_len, options.seq_len, last_looks_back=True),
            num_targets=num_targets,
            documents=documents,
            text_columns={"words": np.array(words, np.float64), "bytes": np.array(num_bytes, np.float64)},
            facts=Facts(
                protocol=options.protocol_id(self.id),
                text_sha256=sha256,
                num_documents=len(originals),
                num_words=sum(words),
                words_rule='len(re.split(r"\\s+", page)) of the original pages',
                num_bytes=sum(num_bytes),
                bytes_rule="UTF-8 bytes of the original pages",
                num_tokens=num_targets,
                prefix="end of document, before each page",
                stride=options.seq_len,
                denominator=f"words = {sum(words)}",
                notes=count_odd_characters(*originals),
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
    """Count words as the harness does: blanks at either end of the page add a word each."""
    return len(re.split(r"\s+", page))


class Megatron(OneStream):
    """Megatron-LM's protocol.

    The published figures divide by the words of the original file (pieces between single spaces, newlines included),
    whatever the tokenizer, so that figures are comparable across tokenizers.
    """

    family = "wikitext103/megatron-o"
    data = "wiki.test.tokens of wikitext-103-v1 (word level, with <unk>)"
    published = "wiki.test.tokens"
    headline = "word_perplexity_adjusted"
    recipe: ClassVar = {
        "text": "the whole file as one string, through the 24-step detokenizer",
        "windows": "seq_len tokens (published: 1,024), moved by 32; the first scores all, the others their last 32",
        "prefix": "none: the first token is context only",
        "denominator": "original words less one, counted before detokenizing",
        "also": "any stride and any window, as wikitext103/megatron-o64 and wikitext103/megatron-o32-s2048",
    }

    def prepare_stream(self, source: Path, options: TaskOptions) -> Prepared:
        text, sha256 = _read_text(source)
        parts, whole = split_articles(text), detokenize(text)
        ids, ends = options.tokenizer.encode_with_ends(whole)
        num_words = len(text.strip().split(" "))
        if num_words == 1:
            raise DataError(f"{source} has one word, but {self.id} divides by words minus one. Give the whole file.")
        return Prepared(
            requests=StreamRequests(
                np.array(ids, np.int64),
                article_of_each_token(np.array(ends, np.int64), [detokenize(part) for part in parts], whole),
                list(windows(len(ids), options.seq_len, self.stride)),
            ),
            num_targets=max(len(ids) - 1, 0),
            text_columns={
                "words": spaces_by_article(text, parts),
                "bytes": np.array([len(part.encode()) for part in parts], np.float64),
            },
            facts=Facts(
                protocol=options.protocol_id(self.id, PUBLISHED_SEQ_LEN),
                text_sha256=sha256,
                num_documents=len(parts),
                num_words=num_words,
                words_rule='len(text.strip().split(" ")) of the original text',
                num_bytes=len(text.encode()),
                bytes_rule="UTF-8 bytes of the original text",
                num_tokens=len(ids),
                prefix="none",
                stride=self.stride,
                denominator=f"words - 1 = {num_words - 1}",
                notes={"loss_cap_nats": str(LOSS_CAP), **count_odd_characters(text)},
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


def spaces_by_article(text: str, parts: list[str]) -> NDArray[np.float64]:
    """Return the number of spaces in each of `parts`, the articles that joined make `text`. Blanks at the beginning and
    the end of the whole text do not count. The sum is the number of words minus one, as Megatron counts words.
    """
    first, stop = len(text) - len(text.lstrip()), len(text.rstrip())
    edges = pairwise(accumulate(map(len, parts), initial=0))
    return np.array([text.count(" ", max(begin, first), min(end, stop)) for begin, end in edges], np.float64)


def named(name: str) -> Task | None:
    """Return the WikiText task whose id is `name`, a family and any stride, such as wikitext/hf-stride256. Return None
    if `name` is not of this form.
    """
    kinds = {kind.family: kind for kind in (HuggingFace, Megatron)}
    match = re.fullmatch(rf"({'|'.join(kinds)})([1-9]\d{{0,8}})", name)
    return kinds[match[1]](int(match[2])) if match else None


def _replace(old: str, new: str) -> Step:
    return lambda text: text.replace(old, new)


def _substitute(pattern: str, new: str) -> Step:
    compiled = re.compile(pattern)
    return lambda text: compiled.sub(new, text)


STEPS: tuple[Step, ...] = (
    _replace("s '", "s'"),
    _substitute(r"/' [0-9]/", r"/'[0-9]/"),
    # number separators
    _replace(" @-@ ", "-"),
    _replace(" @,@ ", ","),
    _replace(" @.@ ", "."),
    # punctuation
    _replace(" : ", ": "),
    _replace(" ; ", "; "),
    _replace(" . ", ". "),
    _replace(" ! ", "! "),
    _replace(" ? ", "? "),
    _replace(" , ", ", "),
    # brackets and quotes lose the space on their inner side
    _substitute(r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
    _substitute(r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    _substitute(r"{\s*([^}]*?)\s*}", r"{\1}"),
    _substitute(r"\"\s*([^\"]*?)\s*\"", r'"\1"'),
    _substitute(r"'\s*([^']*?)\s*'", r"'\1'"),
    # headings, degrees, lines, numbers and genitives
    _replace("= = = =", "===="),
    _replace("= = =", "==="),
    _replace("= =", "=="),
    _replace(" " + chr(176) + " ", chr(176)),
    _replace(" \n", "\n"),
    _replace("\n ", "\n"),
    _replace(" N ", " 1 "),
    _replace(" 's", "'s"),
)


def detokenize(text: str) -> str:
    """Undo WikiText's tokenization of a text, such as " , " for ", ", by all STEPS in order."""
    for step in STEPS:
        text = step(text)
    return text


def split_articles(text: str) -> list[str]:
    """Return the articles of a text; joined they are the text.

    Blank text before the first heading belongs to the first article.
    """
    return _pieces(text, [start for start in _headings(text) if text[:start].strip()])


def split_pages(text: str) -> list[str]:
    """Return the harness's documents: pages without the newline before the next heading, and without blank pages."""
    *before, last = _pieces(text, _headings(text))
    return [page[:-1] for page in before if page.strip()] + [last]


def article_of_each_token(ends: NDArray[np.int64], parts: list[str], whole: str) -> NDArray[np.int64]:
    """Return for each token the index of the article in which it ends. `ends` has the index of each token's end in the
    text `whole` (in characters), and `parts` are the articles of the text.

    The parts may be detokenized separately. Since the detokenizer pairs quotes and brackets across articles, their
    joined text can differ from `whole`. But the characters that are not blank are the same in both, and an article
    begins at the first of its own.
    """
    printed = accumulate(len(_NOT_BLANK.findall(part)) for part in parts)
    places = np.array([*(match.start() for match in _NOT_BLANK.finditer(whole)), len(whole)], np.int64)
    return np.searchsorted(places[list(printed)[:-1]], np.maximum.accumulate(ends), side="left")


def _headings(text: str) -> list[int]:
    lines = text.split("\n")
    starts = accumulate((len(line) + 1 for line in lines), initial=0)
    return [start for line, start in zip(lines, starts, strict=False) if _is_heading(line)]


def _is_heading(line: str) -> bool:
    line = line.replace("= = =", "===").replace("= =", "==").strip()
    return line.startswith("= ") and line.endswith(" =")


def _pieces(text: str, starts: list[int]) -> list[str]:
    return [text[start:stop] for start, stop in pairwise([0, *starts, len(text)])]


TASKS = (
    HuggingFace(512),
    WikitextLmEval("wikitext103", "wikitext-103-raw-v1"),
    WikitextLmEval("wikitext2", "wikitext-2-raw-v1"),
    Megatron(32),
)
