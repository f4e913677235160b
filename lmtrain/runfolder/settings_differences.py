"""Nested settings flattened to dotted keys, the keys whose values differ, and the values of a run's settings over its
steps. Torch-free.

Used to compare runs, checkpoints or the ranks of a run, when a run resumes, and by the commands that show a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmtrain.runfolder.file_names import METRICS
from lmtrain.runfolder.folder_reader import read_settings
from lmtrain.runfolder.metrics_rows import read_metrics

History = list[tuple[int, Any]]  # per setting: (first step of a value, value), in order


def flatten(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for each leaf of nested dicts and lists, such as "optim.lr" or "data.datasets[0].path".
    Empty dicts, and lists without dicts, are leaves as a whole. `key` is the dotted key of `tree` itself.
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
    """Return the values that differ between several nested dicts: dotted key -> list with the value of each dict, in
    their order. The value is None for a dict without the key.
    """
    flat_trees = [dict(flatten(tree)) for tree in trees]
    keys = dict.fromkeys(key for leaves in flat_trees for key in leaves)
    values_by_key = {key: [leaves.get(key) for leaves in flat_trees] for key in keys}
    return {key: values for key, values in values_by_key.items() if any(value != values[0] for value in values)}


def compare_settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the settings whose values differ, as dotted key -> [value before, value after]. Both arguments map dotted
    keys to values. Keys that `before` lacks, and keys that begin with "run.", are left out.
    """
    # because: a setting that the older version did not have yet has not been changed
    return {
        key: [before[key], value] for key, value in after.items()
        if key in before and before[key] != value and not key.startswith("run.")
    }  # fmt: skip


def settings_history(starts: Iterable[Mapping[str, Any]]) -> dict[str, History]:
    """Return the values that each setting had over the starts of a run: dotted key -> list of (first step with this
    value, value), steps counted from 1. `starts` are the rows of the event "start" in the metrics, in the order of
    writing.
    """
    history: dict[str, History] = {}
    before: dict[str, Any] = {}
    for step, tree in _valid_starts(starts):
        settings = dict(flatten(tree))
        for key in {**{key: 0 for key in settings if key not in history}, **compare_settings(before, settings)}:
            history.setdefault(key, []).append((step + 1, settings[key]))
        before = settings
    return history


def first_start(starts: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the settings, as nested dicts, of the start from which a run's first step is; None if none is recorded.
    `starts` are those of `settings_history`.
    """
    return next((settings for _, settings in _valid_starts(starts)), None)


def _valid_starts(starts: Iterable[Mapping[str, Any]]) -> list[tuple[int, Mapping[str, Any]]]:
    """Return (step, settings) of each start from which steps of the run are, in the order of their steps."""
    valid: list[tuple[int, Mapping[str, Any]]] = []
    for row in starts:
        if isinstance(settings := row.get("settings"), dict):
            # because: a later start that resumes from an earlier step discards the steps beyond it, and their settings
            valid = [*(start for start in valid if start[0] < row["step"]), (row["step"], settings)]
    return valid


def read_settings_history(run: Path) -> dict[str, History]:
    """Return the values that each setting of a run had, as `settings_history` does, from the start rows in its metrics.
    If no row records settings, return those in config.json, from step 1 on.
    """
    rows = read_metrics(run / METRICS) if (run / METRICS).is_file() else []
    starts = [row for row in rows if row["event"] == "start"]
    return settings_history(starts) or settings_history([{"step": 0, "settings": read_settings(run)}])


def changed_histories(starts: Iterable[Mapping[str, Any]]) -> dict[str, History]:
    """Return the settings that had more than one value during a run, in the form of `settings_history`."""
    return {key: values for key, values in settings_history(starts).items() if len(values) > 1}
