"""Decide whether a name is another one misspelled: an edit or two away, or with the same words in another order."""

from __future__ import annotations

from collections.abc import Iterable


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """Return the one of `names`, which may be dotted, that `name` probably is, misspelled; None if none is near."""
    near = [(_distance(name, known), known) for known in sorted(set(names)) if is_near(name, known)]
    return min(near)[1] if near else None


def is_near(name: str, known: str) -> bool:
    """Return whether `name` has the words of `known` in another order, or is one edit away from it, or two if both are
    long: a letter more, less or changed, or two letters swapped. Another first letter makes another word.
    """
    if sorted(_words(name)) == sorted(_words(known)):
        return True
    shortest = min(len(name), len(known))
    allowed = 0 if shortest < 2 else 1 if shortest < 9 else 2
    if abs(len(name) - len(known)) > allowed or {name[0], *name[:2]}.isdisjoint(known[:1]):
        return False
    return _distance(name, known) <= allowed


def is_shortened(name: str, known: str) -> bool:
    """Return whether `known` begins with the whole words of `name`, as warmup_steps does with warmup, or is `name`
    without some of its words.
    """
    short, long = sorted((_words(name), _words(known)), key=len)
    return long[: len(short)] == short or long[-len(short) :] == short


def _words(name: str) -> list[str]:
    return [word.removesuffix("s") for word in name.replace(".", "_").split("_")]


def _distance(first: str, second: str) -> int:
    """Return how many letters must be added, removed, changed or swapped with the next to make one text of another."""
    rows = [list(range(len(second) + 1))]
    for i, letter in enumerate(first, 1):
        row, above = [i], rows[-1]
        for j, other in enumerate(second, 1):
            row.append(min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (letter != other)))
            if i > 1 and j > 1 and (letter, first[i - 2]) == (second[j - 2], other):
                row[j] = min(row[j], rows[-2][j - 2] + 1)
        rows.append(row)
    return rows[-1][-1]
