"""Detects the script (Latin, Han, ...) of each letter. Called by the filters of preprocessing and by the step `clean`.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lmtrain.errors import UsageError, spelling_hint, way

# Code point ranges of Unicode's blocks per script. because: the standard library has no data about scripts
SCRIPTS: dict[str, tuple[tuple[int, int], ...]] = {
    "latin": ((0x41, 0x24F), (0x1E00, 0x1EFF), (0x2C60, 0x2C7F), (0xA720, 0xA7FF), (0xAB30, 0xAB6F), (0xFF21, 0xFF5A)),
    "greek": ((0x370, 0x3FF), (0x1F00, 0x1FFF)),
    "cyrillic": ((0x400, 0x52F), (0x1C80, 0x1C8F), (0x2DE0, 0x2DFF), (0xA640, 0xA69F)),
    "armenian": ((0x530, 0x58F),),
    "hebrew": ((0x590, 0x5FF), (0xFB1D, 0xFB4F)),
    "arabic": ((0x600, 0x6FF), (0x750, 0x77F), (0x870, 0x8FF), (0xFB50, 0xFDFF), (0xFE70, 0xFEFF)),
    "devanagari": ((0x900, 0x97F), (0xA8E0, 0xA8FF)),
    "bengali": ((0x980, 0x9FF),),
    "gurmukhi": ((0xA00, 0xA7F),),
    "gujarati": ((0xA80, 0xAFF),),
    "tamil": ((0xB80, 0xBFF),),
    "telugu": ((0xC00, 0xC7F),),
    "kannada": ((0xC80, 0xCFF),),
    "malayalam": ((0xD00, 0xD7F),),
    "sinhala": ((0xD80, 0xDFF),),
    "thai": ((0xE00, 0xE7F),),
    "lao": ((0xE80, 0xEFF),),
    "tibetan": ((0xF00, 0xFFF),),
    "myanmar": ((0x1000, 0x109F), (0xA9E0, 0xA9FF), (0xAA60, 0xAA7F)),
    "georgian": ((0x10A0, 0x10FF), (0x1C90, 0x1CBF), (0x2D00, 0x2D2F)),
    "hangul": ((0x1100, 0x11FF), (0x3130, 0x318F), (0xA960, 0xA97F), (0xAC00, 0xD7FF), (0xFFA0, 0xFFDC)),
    "ethiopic": ((0x1200, 0x139F), (0x2D80, 0x2DDF), (0xAB00, 0xAB2F)),
    "khmer": ((0x1780, 0x17FF),),
    "kana": ((0x3040, 0x30FF), (0x31F0, 0x31FF), (0xFF66, 0xFF9F)),
    "han": ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x323AF)),
}


@lru_cache(1)
def _table() -> tuple[list[str], NDArray[np.uint16]]:
    """Return the script names, and per code point 0 if it is no letter, else 1 + the index of its script.

    A letter outside the blocks belongs to the script that its Unicode name begins with.
    """
    letters = np.fromiter((unicodedata.category(chr(c))[0] == "L" for c in range(0x110000)), bool, 0x110000)
    table = np.zeros(0x110000, np.uint16)
    for number, blocks in enumerate(SCRIPTS.values(), 1):
        for first, last in blocks:
            table[first : last + 1] = number
    table[~letters] = 0
    numbers = {name: number for number, name in enumerate(SCRIPTS, 1)}
    for code in np.flatnonzero(letters & (table == 0)).tolist():
        name = unicodedata.name(chr(code), "unnamed").split(" ", 1)[0].lower()
        table[code] = numbers.setdefault("han" if name == "cjk" else name, len(numbers) + 1)
    return list(numbers), table


def script_shares(text: str) -> dict[str, float]:
    """Return script -> share of the text's letters, the most frequent first; empty for a text without letters."""
    names, table = _table()
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    counts = np.bincount(table[codes], minlength=1)[1:]
    found = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)].tolist()
    return {names[number]: int(counts[number]) / int(counts.sum()) for number in found}


def check_script(name: str) -> None:
    known = _table()[0]
    if name.lower() not in known:
        hint = spelling_hint(name.lower(), known, lambda meant: way(meant, instead_of=name))
        raise UsageError(f"--script {name} does not name a known script. {hint}")
