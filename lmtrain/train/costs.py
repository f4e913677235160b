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

from lmtrain.runfolder.names import METRICS
from lmtrain.runfolder.rows import read_last_rows

if TYPE_CHECKING:
    from lmtrain.train.pace import Pace

VALIDATION, EVALUATION = "validation", "evaluation"
_STEP, _SAVE, _STALL = "step", "save", "stall"
_KEPT = 16  # newest durations of each kind; because: recent durations predict better than those of an hour ago
_SAVED_BYTES = 12  # per parameter: its fp32 value and the two moments of an optimizer such as AdamW
_SLOW_DISK = 100e6  # bytes per second, assumed before the first save


@dataclass
class Measured:
    counts: bool = True


class Costs:
    """The longest of the newest few durations of each kind, because a caller must not be late."""

    def __init__(self, num_parameters: int = 0, clock: Callable[[], float] = monotonic) -> None:
        """Start with no durations. `num_parameters` counts the parameters of this process."""
        self._clock, self._unsaved_s = clock, num_parameters * _SAVED_BYTES / _SLOW_DISK
        self._seen: dict[str, deque[float]] = {}
        self._before: dict[str, float] = {}
        self._since_s = clock()
        self._first_s: float | None = None
        self.num_steps = 0
        self.pace: Pace | None = None  # compares this process with the others; None in a run of one process
        self.left_s: Callable[[], float | None] = lambda: None  # seconds until a time limit ends the run; on rank 0

    def saw(self, what: str, seconds: float) -> None:
        self._seen.setdefault(what, deque(maxlen=_KEPT)).append(seconds)

    def begin_step(self) -> None:
        self._since_s = self._clock()
        if self.pace is not None:
            self.pace.work.begin_step()

    def end_step(self, waited_s: float) -> None:
        """Record the end of a step, which waited `waited_s` for its data before it began."""
        if self.pace is not None:
            self.pace.work.end_step(waited_s)
        seconds = self._clock() - self._since_s + waited_s
        self.num_steps += 1
        if self._first_s is None:
            self._first_s = seconds  # because: the first step of a process compiles, fills caches and allocates memory
        else:
            self.saw(_STEP, seconds)

    @contextmanager
    def measuring(self, what: str) -> Iterator[Measured]:
        """Time the block; the duration counts only if the block ends without an exception and leaves `counts` True."""
        began, measured = self._clock(), Measured()
        yield measured
        if measured.counts:
            self.saw(what, self._clock() - began)

    def know(self, earlier: Iterable[dict[str, Any]]) -> None:
        """Take durations from the rows of earlier attempts, as a fallback for kinds without a duration yet."""
        self._before = {what: max(found[-_KEPT:]) for what, found in _durations(earlier).items() if found}

    @property
    def step_s(self) -> float:
        return self.longest(_STEP) or self._first_s or 0.0

    def newest_steps_s(self) -> list[float]:
        return list(self._seen.get(_STEP, ()))

    @property
    def save_s(self) -> float:
        return self.longest(_SAVE) or self._unsaved_s

    @property
    def stall_s(self) -> float | None:
        """Seconds for which a save blocks training; None before the first save."""
        return self.longest(_STALL) or None

    def saved(self, write_s: float, stall_s: float) -> None:
        self.saw(_SAVE, write_s + stall_s)
        self.saw(_STALL, stall_s)

    def longest(self, what: str) -> float:
        return max(self._seen.get(what, ()), default=self._before.get(what, 0.0))


def measured_before(folder: Path, costs: Costs) -> None:
    """Read the durations of earlier attempts from the run's folder; a folder without rows changes nothing."""
    costs.know(read_last_rows(folder / METRICS))


def _durations(rows: Iterable[dict[str, Any]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {_STEP: [], _SAVE: [], _STALL: [], VALIDATION: [], EVALUATION: []}
    last: tuple[Any, Any, Any] = (None, 0, 0.0)  # attempt, step and elapsed_s of the previous step row
    evaluated: dict[Any, float] = {}  # step -> seconds of all tasks
    for row in rows:
        if row.get("event") == _STEP and _are_numbers(row, "step", "elapsed_s"):
            attempt, step, elapsed = row.get("attempt"), row["step"], row["elapsed_s"]
            if attempt == last[0] and step > last[1]:
                found[_STEP].append((elapsed - last[2]) / (step - last[1]))
            last = attempt, step, elapsed
        elif row.get("event") == _SAVE and _are_numbers(row, "write_s", "stall_s"):
            found[_SAVE].append(row["write_s"] + row["stall_s"])
            found[_STALL].append(row["stall_s"])
        elif row.get("event") == "valid" and _are_numbers(row, "seconds"):
            found[VALIDATION].append(row["seconds"])
        elif row.get("event") == "eval" and _are_numbers(row, "step", "seconds"):
            evaluated[row["step"]] = evaluated.get(row["step"], 0.0) + row["seconds"]
    found[EVALUATION] = list(evaluated.values())
    return found


def _are_numbers(row: dict[str, Any], *keys: str) -> bool:
    values = [row.get(key) for key in keys]
    return all(isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) for v in values)


def young_daly_s(save_s: float, between_failures_s: float) -> float:
    """Return the interval between saves that loses the least time to saves and failures together."""
    return math.sqrt(2 * save_s * between_failures_s)
