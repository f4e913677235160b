"""Nested settings, or other plain data, flattened to dotted keys, and the keys whose values differ. Torch-free.

Used to compare runs, checkpoints or the ranks of a run, and to show settings in a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def flat(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for each leaf: optim.lr, data.datasets[0].path. An empty dict or list is a leaf,
    too.
    """
    if isinstance(tree, Mapping) and (tree or not key):
        for name, value in tree.items():
            yield from flat(value, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, list) and any(isinstance(one, Mapping) for one in tree):
        for number, value in enumerate(tree):
            yield from flat(value, f"{key}[{number}]")
    else:
        yield key, tree


def differences(trees: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the keys whose values differ between trees, as key -> value per tree; None where a tree lacks the key."""
    each = [dict(flat(tree)) for tree in trees]
    found = {key: [one.get(key) for one in each] for key in dict.fromkeys(key for one in each for key in one)}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}
