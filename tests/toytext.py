"""Texts for tests: they look a little like prose, and are the same on every machine, whatever the project's code says.

A corpus made of the project's own files would change with every edit, and with it each loss that a test has seen.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

_PAGES = 120
_SYLLABLES = ["ba", "cor", "den", "el", "fi", "gra", "ho", "in", "ka", "lu", "men", "no", "per", "qui", "ro", "sta"]
_ODD = ["naïve", "Straße", "café", "3.14", "x_1", "1,024", "(see above)", "\u6570\u636e", "it's"]


def write_toy_texts(folder: Path) -> None:
    """Fill the folder with pages of one to eight kilobytes: page_000.txt, page_001.txt, and so on."""
    words = _words(Random("words"))
    for number in range(_PAGES):
        (folder / f"page_{number:03}.txt").write_text(_page(Random(f"page {number}"), words), encoding="utf-8")


def write_toy_last_words(file: Path, number: int) -> None:
    """Write so many sentences in the form of LAMBADA's, whose last word is asked for."""
    draw = Random("sentences")
    words = _words(Random("words"))
    file.write_text("".join(json.dumps({"text": _sentence(draw, words, 9)[:-1]}) + "\n" for _ in range(number)))


def _words(draw: Random) -> list[str]:
    return ["".join(_one(draw, _SYLLABLES) for _ in range(1 + int(draw.random() * 3))) for _ in range(600)]


def _page(draw: Random, words: list[str]) -> str:
    """Paragraphs, and lists whose lines are indented."""
    length = 10 + int(draw.random() * 70)
    lines: list[str] = []
    while len(lines) < length:
        if draw.random() < 0.2:
            lines += [f"    - {_sentence(draw, words, 3)}" for _ in range(2 + int(draw.random() * 4))]
        lines += [" ".join(_sentence(draw, words, 9) for _ in range(2)), ""]
    return "\n".join(lines)


def _sentence(draw: Random, words: list[str], least: int) -> str:
    """Some words are common and most are rare, as in any language."""
    chosen = [words[int(len(words) * draw.random() ** 4)] for _ in range(least + int(draw.random() * 6))]
    if draw.random() < 0.3:
        chosen[-1] = _one(draw, _ODD)
    return " ".join(chosen).capitalize() + "."


def _one(draw: Random, among: list[str]) -> str:
    """Only `Random.random` promises the same numbers in every version of Python."""
    return among[int(len(among) * draw.random())]
