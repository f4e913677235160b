"""WikiText's published detokenizer: 24 replacements, in this order. Called by the WikiText tasks; knows only strings.

Two steps look wrong and stay: step 2 replaces a text that hardly occurs by its own pattern, and quotes are paired
greedily from the left. Every published number went through them, so a better detokenizer would be another protocol.
"""

from __future__ import annotations

import re
from collections.abc import Callable

Step = Callable[[str], str]


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
