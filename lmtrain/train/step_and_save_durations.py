"""Durations of steps, saves and measurements of this run, from this attempt or from earlier ones.

Called by the loop, which reports its measurements, and by the dry run. Times come from a monotonic clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from lmtrain.runfolder.file_names import METRICS
from lmtrain.runfolder.metrics_rows import read_last_rows

if TYPE_CHECKING:
    from lmtrain.train.straggler_watch import StragglerWatch

VALIDATION, EVALUATION = "validation", "evaluation"
_STEP, _SAVE, _STALL = "step", "save", "stall"
_NUM_KEPT = 16  # newest durations of each kind; because: recent durations predict better than those of an hour ago
_BYTES_PER_PARAMETER = 12  # per parameter: its fp32 value and the two moments of an optimizer such as AdamW
_AVERAGE_BYTES = 4  # per parameter: its average in fp32
_SLOW_DISK_BYTES_PER_S = 100e6  # bytes per second, assumed before the first save


@dataclass
class Measurement:
    """A measurement in progress; its duration is discarded if `counts` is False at the end."""

    counts: bool = True


class Durations:
    """The newest durations of steps, saves and measurements. Estimates are the longest of them, to be safe."""

    def __init__(
        self, num_parameters: int = 0, clock: Callable[[], float] = monotonic, *, keeps_average: bool = False
    ) -> None:
        """Start with no durations. `num_parameters` counts the parameters of this process, of which it also saves an
        average if `keeps_average` is True.
        """
        num_bytes = num_parameters * (_BYTES_PER_PARAMETER + _AVERAGE_BYTES * keeps_average)
        self._clock, self._assumed_save_s = clock, num_bytes / _SLOW_DISK_BYTES_PER_S
        self._newest: dict[str, deque[float]] = {}
        self._earlier: dict[str, float] = {}
        self._step_began_s = clock()
        self._first_s: float | None = None
        self.num_steps = 0
        self.stragglers: StragglerWatch | None = (
            None  # compares this process with the others; None in a run of one process
        )
        self.left_s: Callable[[], float | None] = lambda: None  # seconds until a time limit ends the run; on rank 0

    def add(self, kind: str, seconds: float) -> None:
        """Record a duration; `kind` is "step", "save", "stall", VALIDATION or EVALUATION."""
        self._newest.setdefault(kind, deque(maxlen=_NUM_KEPT)).append(seconds)

    def begin_step(self) -> None:
        """Store the time at which a training step begins, here and in the straggler watch."""
        self._step_began_s = self._clock()
        if self.stragglers is not None:
            self.stragglers.work.begin_step()

    def end_step(self, waited_s: float) -> None:
        """Record the duration of the step since `begin_step`, plus `waited_s`, the seconds of waiting for its data
        before that. The first step of a process is kept apart, since it compiles and allocates.
        """
        if self.stragglers is not None:
            self.stragglers.work.end_step(waited_s)
        seconds = self._clock() - self._step_began_s + waited_s
        self.num_steps += 1
        if self._first_s is None:
            self._first_s = seconds  # because: the first step of a process compiles, fills caches and allocates memory
        else:
            self.add(_STEP, seconds)

    @contextmanager
    def measuring(self, kind: str) -> Iterator[Measurement]:
        """Time the `with` block and record its duration under `kind`, VALIDATION or EVALUATION. Nothing is recorded if
        the block raises, or sets `counts` of the yielded Measurement to False because it was cut off.
        """
        began, measurement = self._clock(), Measurement()
        yield measurement
        if measurement.counts:
            self.add(kind, self._clock() - began)

    def load_earlier(self, folder: Path) -> None:
        """Keep the longest recent duration of each kind from what earlier attempts recorded in `folder`, the run's
        folder; nothing if it has no metrics yet. It is used until this attempt has a duration of that kind.
        """
        earlier = _durations_from_rows(read_last_rows(folder / METRICS))
        self._earlier = {kind: max(durations[-_NUM_KEPT:]) for kind, durations in earlier.items() if durations}

    @property
    def step_s(self) -> float:
        """Longest of the newest steps, in seconds; else of earlier attempts, else this attempt's first step, else 0."""
        return self.longest(_STEP) or self._first_s or 0.0

    def newest_steps_s(self) -> list[float]:
        """Return the newest durations of steps, oldest first."""
        return list(self._newest.get(_STEP, ()))

    @property
    def save_s(self) -> float:
        """Longest of the newest saves, in seconds; else of earlier attempts, else an estimate from the parameters."""
        return self.longest(_SAVE) or self._assumed_save_s

    @property
    def stall_s(self) -> float | None:
        """Longest time for which a save blocked training, in seconds; None if no save was measured."""
        return self.longest(_STALL) or None

    def add_save(self, write_s: float, stall_s: float) -> None:
        """Record a finished save: seconds of writing, and seconds in which training stood still."""
        self.add(_SAVE, write_s + stall_s)
        self.add(_STALL, stall_s)

    def longest(self, kind: str) -> float:
        """Return the longest of the newest durations of this kind, in seconds; else of earlier attempts, else 0."""
        return max(self._newest.get(kind, ()), default=self._earlier.get(kind, 0.0))


def _durations_from_rows(rows: Iterable[dict[str, Any]]) -> dict[str, list[float]]:
    """Return kind ("step", "save", "stall", "validation" or "evaluation") -> durations in seconds, oldest first,
    computed from the rows of metrics.jsonl. An evaluation's duration is the sum over its tasks.
    """
    durations: dict[str, list[float]] = {_STEP: [], _SAVE: [], _STALL: [], VALIDATION: [], EVALUATION: []}
    last: tuple[Any, Any, Any] = (None, 0, 0.0)  # attempt with its stage, step and elapsed_s of the previous step row
    task_s: dict[Any, dict[Any, float]] = {}  # step -> task -> seconds
    for row in rows:
        if row.get("event") == _STEP and _are_numbers(row, "step", "elapsed_s"):
            attempt, step, elapsed = (row.get("attempt"), row.get("stage")), row["step"], row["elapsed_s"]
            if attempt == last[0] and step > last[1]:
                durations[_STEP].append((elapsed - last[2]) / (step - last[1]))
            last = attempt, step, elapsed
        elif row.get("event") == _SAVE and _are_numbers(row, "write_s", "stall_s"):
            durations[_SAVE].append(row["write_s"] + row["stall_s"])
            durations[_STALL].append(row["stall_s"])
        elif row.get("event") == "valid" and _are_numbers(row, "seconds"):
            durations[VALIDATION].append(row["seconds"])
        elif row.get("event") == "eval" and _are_numbers(row, "step", "seconds"):
            # because: a start that goes back measures a step again
            task_s.setdefault(row["step"], {})[row.get("name")] = row["seconds"]
    durations[EVALUATION] = [sum(seconds.values()) for seconds in task_s.values()]
    return durations


def _are_numbers(row: dict[str, Any], *keys: str) -> bool:
    """Return whether all these values of the row are finite numbers."""
    values = [row.get(key) for key in keys]
    return all(isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) for v in values)


def young_daly_s(save_s: float, between_failures_s: float) -> float:
    """Return the interval between saves, in seconds, that loses the least time to saves and failures together (Young
    and Daly's formula). `save_s` is the time that a save costs.
    """
    return math.sqrt(2 * save_s * between_failures_s)
