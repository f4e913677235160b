"""Which settings of a run held from which step, by what its starts have written. Torch-free.

Called when a run goes on, and by what shows a run: inspect, report, `config explain KEY --run RUN`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lmtrain.runfolder.differences import flat
from lmtrain.runfolder.folder import read_settings
from lmtrain.runfolder.names import METRICS
from lmtrain.runfolder.rows import read_metrics

Held = list[tuple[int, Any]]  # the first step of each value, and the value


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return each setting that is another, with the value then and now; both by dotted key."""
    # because: what an older version had no setting for is no change
    return {
        key: [before[key], value] for key, value in now.items()
        if key in before and before[key] != value and not key.startswith("run.")
    }  # fmt: skip


def held(starts: Iterable[Mapping[str, Any]]) -> dict[str, Held]:
    """Return what each setting was and from which step, by the rows of starts in the order of writing."""
    told: list[tuple[int, dict[str, Any]]] = []
    for row in starts:
        if isinstance(settings := row.get("settings"), dict):
            # because: what a start trained beyond the step where a later one began again is gone
            told = [*(one for one in told if one[0] < row["step"]), (row["step"], dict(flat(settings)))]
    found: dict[str, Held] = {}
    before: dict[str, Any] = {}
    for step, settings in told:
        for key in {**{key: 0 for key in settings if key not in found}, **changed(before, settings)}:
            found.setdefault(key, []).append((step + 1, settings[key]))
        before = settings
    return found


def held_in(run: Path) -> dict[str, Held]:
    """Return `held` for the folder of a run; where its starts wrote no settings, what config.json says."""
    rows = read_metrics(run / METRICS) if (run / METRICS).is_file() else []
    return held(row for row in rows if row["event"] == "start") or held([{"step": 0, "settings": read_settings(run)}])


def changes(starts: Iterable[Mapping[str, Any]]) -> dict[str, Held]:
    """Return the settings that had several values."""
    return {key: values for key, values in held(starts).items() if len(values) > 1}
