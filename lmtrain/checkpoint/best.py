"""Which of a run's checkpoints is the best by a measure, as its own records tell. Torch-free.

Called by retention, and by whoever is given RUN@best. Nothing is noted beside the checkpoints: the measure of each step
stands in metrics.jsonl, its name in config.json, so that no crash can leave a mark on the wrong one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lmtrain.observe.measure.measures import worth_by_step
from lmtrain.observe.metrics import read_metrics
from lmtrain.runtime.files.files import read_json

BEST = "@best"  # behind a run's folder
DEFAULT = "loss/valid"


def best_first(checkpoints: Mapping[int, Path], worth: Mapping[int, float]) -> list[Path]:
    """Those that were measured; of equals the earliest first, so that a later one does not take its place."""
    return [checkpoints[step] for step in sorted(checkpoints.keys() & worth, key=lambda step: (-worth[step], step))]


def measure_of(run: Path) -> str:
    """The name of the measure by which this run's checkpoints are judged."""
    settings = read_json(run / "config.json").get("checkpoint", {})
    return str(settings.get("best_by", DEFAULT)) if isinstance(settings, dict) else DEFAULT


def worth_in(run: Path) -> dict[int, float]:
    """By step, as its rows say; more is better."""
    return worth_by_step(read_metrics(run / "metrics.jsonl"), measure_of(run))
