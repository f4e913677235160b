"""Nested settings, or other plain data, as keys with values; and the keys by which several differ. Torch-free.

Called by whoever compares two runs, two checkpoints or the ranks of a run, and by what shows settings in a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def flat(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield optim.lr, data.datasets[0].path and the like, each with its value. What is empty is a value, too."""
    if isinstance(tree, Mapping) and (tree or not key):
        for name, value in tree.items():
            yield from flat(value, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, list) and any(isinstance(one, Mapping) for one in tree):
        for number, value in enumerate(tree):
            yield from flat(value, f"{key}[{number}]")
    else:
        yield key, tree


def differences(trees: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the keys whose values are not the same in all, with the value in each; None where one lacks the key."""
    each = [dict(flat(tree)) for tree in trees]
    found = {key: [one.get(key) for one in each] for key in dict.fromkeys(key for one in each for key in one)}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}
