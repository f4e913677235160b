"""Where the articles of a WikiText file begin, and which of them each token belongs to. Called by the WikiText tasks.

One rule, lm-evaluation-harness's, says what a heading of the first level is. Two lines of formulas that begin and end
in an equals sign are headings too, which makes 62 of the 60 articles of the test sets.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

Step = Callable[[str], str]
_PRINTED = re.compile(r"\S")


def _swap(old: str, new: str) -> Step:
    return lambda text: text.replace(old, new)


def _regex(pattern: str, new: str) -> Step:
    compiled = re.compile(pattern)
    return lambda text: compiled.sub(new, text)


STEPS: tuple[Step, ...] = (
    _swap("s '", "s'"),
    _regex(r"/' [0-9]/", r"/'[0-9]/"),
    # number separators
    _swap(" @-@ ", "-"),
    _swap(" @,@ ", ","),
    _swap(" @.@ ", "."),
    # punctuation
    _swap(" : ", ": "),
    _swap(" ; ", "; "),
    _swap(" . ", ". "),
    _swap(" ! ", "! "),
    _swap(" ? ", "? "),
    _swap(" , ", ", "),
    # brackets and quotes lose the space on their inner side
    _regex(r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
    _regex(r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    _regex(r"{\s*([^}]*?)\s*}", r"{\1}"),
    _regex(r"\"\s*([^\"]*?)\s*\"", r'"\1"'),
    _regex(r"'\s*([^']*?)\s*'", r"'\1'"),
    # headings, degrees, lines, numbers and genitives
    _swap("= = = =", "===="),
    _swap("= = =", "==="),
    _swap("= =", "=="),
    _swap(" " + chr(176) + " ", chr(176)),
    _swap(" \n", "\n"),
    _swap("\n ", "\n"),
    _swap(" N ", " 1 "),
    _swap(" 's", "'s"),
)


def detokenize(text: str) -> str:
    for step in STEPS:
        text = step(text)
    return text


def articles(text: str) -> list[str]:
    """Put end to end they are the text; what is blank before the first heading belongs to the first."""
    return _pieces(text, [start for start in _headings(text) if text[:start].strip()])


def pages(text: str) -> list[str]:
    """The harness's documents: without the newline before the next heading, and without what is blank."""
    *before, last = _pieces(text, _headings(text))
    return [page[:-1] for page in before if page.strip()] + [last]


def articles_of_tokens(ends: NDArray[np.int64], parts: list[str], whole: str) -> NDArray[np.int64]:
    """The article that each token ends in; `ends` are places in the whole.

    The parts may be detokenized one by one: quotes and brackets are paired across articles, and then they are not
    the whole. But what is not blank is the same in both, and an article begins at the first such character of its own.
    """
    printed = accumulate(len(_PRINTED.findall(part)) for part in parts)
    places = [found.start() for found in _PRINTED.finditer(whole)] + [len(whole)]
    starts = [places[count] for count in printed][:-1]
    return np.searchsorted(np.array(starts, np.int64), np.maximum.accumulate(ends), side="left")


def _headings(text: str) -> list[int]:
    lines = text.split("\n")
    starts = accumulate((len(line) + 1 for line in lines), initial=0)
    return [start for line, start in zip(lines, starts, strict=False) if _is_heading(line)]


def _is_heading(line: str) -> bool:
    line = line.replace("= = =", "===").replace("= =", "==").strip()
    return line.startswith("= ") and line.endswith(" =")


def _pieces(text: str, starts: list[int]) -> list[str]:
    return [text[start:stop] for start, stop in pairwise([0, *starts, len(text)])]
