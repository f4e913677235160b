"""Nested settings, or other plain data, flattened to dotted keys, and the keys whose values differ. Torch-free.

Used to compare runs, checkpoints or the ranks of a run, and to show settings in a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def flatten(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for each leaf of nested data, such as optim.lr or data.datasets[0].path. An empty dict
    or list is a leaf. `key` is the prefix of all keys.
    """
    if isinstance(tree, Mapping) and (tree or not key):
        for name, value in tree.items():
            yield from flatten(value, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, list) and any(isinstance(item, Mapping) for item in tree):
        for number, value in enumerate(tree):
            yield from flatten(value, f"{key}[{number}]")
    else:
        yield key, tree


def differences(trees: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values that differ between nested dicts, as dotted key -> a value for each tree; None if a tree lacks
    the key.
    """
    flat_trees = [dict(flatten(tree)) for tree in trees]
    keys = dict.fromkeys(key for leaves in flat_trees for key in leaves)
    values_by_key = {key: [leaves.get(key) for leaves in flat_trees] for key in keys}
    return {key: values for key, values in values_by_key.items() if any(value != values[0] for value in values)}
