"""The history of a run's settings: which value held from which step, read from the run's start rows. Torch-free.

Used when a run resumes, and by the commands that show a run: inspect, report, `config explain KEY --run RUN`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lmtrain.runfolder.file_names import METRICS
from lmtrain.runfolder.folder_reader import read_settings
from lmtrain.runfolder.metrics_rows import read_metrics
from lmtrain.runfolder.settings_differences import flatten

History = list[tuple[int, Any]]  # per setting: (first step of a value, value), in order


def compare_settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the settings that were changed, as dotted key -> [value before, value after]. Both arguments map dotted
    keys to values.

    A key that `before` lacks and the keys of the group `run` are left out.
    """
    # because: a setting that the older version did not have yet has not been changed
    return {
        key: [before[key], value] for key, value in after.items()
        if key in before and before[key] != value and not key.startswith("run.")
    }  # fmt: skip


def settings_history(starts: Iterable[Mapping[str, Any]]) -> dict[str, History]:
    """Return the values of each setting over a run, each with the first step at which it held. `starts` are the run's
    start rows in the order of writing.
    """
    valid_starts: list[tuple[int, dict[str, Any]]] = []
    for row in starts:
        if isinstance(settings := row.get("settings"), dict):
            # because: a later start that resumes from an earlier step discards the steps beyond it, and their settings
            earlier = [start for start in valid_starts if start[0] < row["step"]]
            valid_starts = [*earlier, (row["step"], dict(flatten(settings)))]
    history: dict[str, History] = {}
    before: dict[str, Any] = {}
    for step, settings in valid_starts:
        for key in {**{key: 0 for key in settings if key not in history}, **compare_settings(before, settings)}:
            history.setdefault(key, []).append((step + 1, settings[key]))
        before = settings
    return history


def read_settings_history(run: Path) -> dict[str, History]:
    """Return the settings history of a run folder. If no start row holds settings, it has only the settings in
    config.json, from step 1 on.
    """
    rows = read_metrics(run / METRICS) if (run / METRICS).is_file() else []
    starts = [row for row in rows if row["event"] == "start"]
    return settings_history(starts) or settings_history([{"step": 0, "settings": read_settings(run)}])


def changed_histories(starts: Iterable[Mapping[str, Any]]) -> dict[str, History]:
    """Return the settings that had more than one value during a run, in the form of `settings_history`."""
    return {key: values for key, values in settings_history(starts).items() if len(values) > 1}
