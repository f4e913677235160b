"""metrics.jsonl read into columns: every number of every valid step row, and a list of the damage.

Used by reports and comparisons. Unlike read_metrics this reader raises on nothing: unreadable parts are left out and
listed in `problems`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.runfolder.metrics_rows import (
    NON_FINITE_TEXTS,
    ROW_BYTES,
    ROW_ERRORS,
    Row,
    from_json_data,
    parse_row,
    read_lines,
    row_step,
)
from lmtrain.runfolder.tensorboard_metric_names import source_measures

Indices = NDArray[np.intp]
Numbers = NDArray[np.float64]
_TEXT_KEYS = ("samples_hash", "batch_digest")  # keys of step rows that identify the step's data
_MAX_NON_FINITE, _MAX_COLUMNS = 10_000, 512
_COMPARED_KEYS = ("samples", "tokens", "lr", "loss", "grad_norm", "skipped")
_ROWS_AFTER = (0, 1, 10, 100, 1000, 10_000, 100_000, 1_000_000)  # number of rows after the first one that differs


def extreme_indices(values: Numbers, max_count: int) -> Indices:
    """Return the sorted indices of at most `max_count` values that keep a curve's shape if only they are drawn: the
    first, the last, and the minimum and maximum of each of equally long stretches of `values`.

    All indices if there are no more values than `max_count`, which must be at least 4. The values must be finite.
    """
    if len(values) <= max_count:
        return np.arange(len(values))
    borders = part_boundaries(len(values), max(max_count // 2 - 1, 1))
    indices: set[int] = {0, len(values) - 1}
    for begin, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        part = values[begin:end]
        indices |= {begin + int(part.argmin()), begin + int(part.argmax())}
    return np.array(sorted(indices), np.intp)


def part_means(values: Numbers, max_parts: int) -> tuple[Indices, Numbers]:
    """Shorten a curve to at most `max_parts` points: cut `values` into parts of equal length, and return two arrays,
    the index of each part's last value and each part's mean.
    """
    borders = part_boundaries(len(values), min(len(values), max_parts))
    if len(values) == 0:
        return np.empty(0, np.intp), np.empty(0)
    return borders[1:] - 1, np.add.reduceat(values, borders[:-1]) / np.diff(borders)


def part_boundaries(count: int, num_parts: int) -> NDArray[Any]:
    """Return the `num_parts` + 1 boundaries of equally long parts of `count` values; no part is empty if count >=
    num_parts.
    """
    return (np.arange(num_parts + 1) * count // max(num_parts, 1)).astype(np.intp)


@dataclass(frozen=True)
class Record:
    """The valid rows of a run's metrics.jsonl. Steps of an earlier attempt are left out where a later attempt repeated
    them.
    """

    columns: dict[str, Numbers]  # step rows by key, in order of steps; NaN where a row lacks the key
    texts: dict[str, list[str]]  # likewise, for the keys of _TEXT_KEYS; "" where a row lacks the key
    rows: dict[str, list[Row]]  # rows of all other events, by event
    problems: list[str]  # one sentence each
    non_finite: list[tuple[int, str, float]]  # (step, key, value) for each number that was NaN or infinite
    rewinds: list[tuple[int, int]] = field(default_factory=list)  # per restart: (step resumed at, last step before)

    @property
    def steps(self) -> Numbers:
        return self.columns["step"]

    def column(self, key: str) -> tuple[Numbers, Numbers]:
        """Return two arrays, (steps, values), of the step rows that have a finite number for `key`."""
        values = self.columns.get(key)
        if values is None:
            return np.empty(0), np.empty(0)
        is_finite = np.isfinite(values)
        return self.steps[is_finite], values[is_finite]

    def interpolate(self, key: str, steps: Numbers) -> Numbers:
        """Return the value of `key` at each of `steps`, interpolated between the recorded steps, and beyond the last of
        them grown on as between the last two. `key` is a number that only grows, such as tokens or seconds: it is taken
        to be 0 at step 0, or, in a run that began from another run's checkpoint, what the run's first row states. NaN
        if no row has the key.
        """
        known_steps, values = self.column(key)
        if not known_steps.size:
            return np.full(len(steps), np.nan)
        first_step, first_value = self._start_of(key)
        if known_steps[0] > first_step:
            known_steps, values = np.insert(known_steps, 0, first_step), np.insert(values, 0, first_value)
        growth = (np.diff(values[-2:]) / np.diff(known_steps[-2:])).sum()  # in a step; 0 if only one step is known
        interpolated: Numbers = np.interp(steps, known_steps, values)
        interpolated += growth * np.maximum(steps - known_steps[-1], 0)
        return interpolated

    def _start_of(self, key: str) -> tuple[float, float]:
        """Return (step, value of `key`) from which the run counts, as its first `start` row states them; the value of
        "seconds" is 0. Return (0, 0) if the row does not state the key, as in a run that began from no other run's
        checkpoint.
        """
        # because: before the first step no data had been read and no time had passed
        first = next(iter(self.rows.get("start", ())), {})
        value = 0.0 if key == "seconds" else first.get(key)
        return (row_step(first), value) if first and isinstance(value, int | float) else (0.0, 0.0)


def read_record(path: Path) -> Record:
    """Read the rows of the metrics.jsonl file `path` into a Record, which has the numbers of all step rows as columns.
    A file that is missing, damaged, or still being written raises nothing; `problems` of the Record names what is
    missing.
    """
    reader = _Reader()
    try:
        for line in read_lines(path):
            reader.add_line(line)
    except OSError as error:
        why = "is not there" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        reader.problems.append(f"{path.name} {why}, so no step of the run is known")
    return reader.build_record(path.name)


class _Reader:
    def __init__(self) -> None:
        self.problems: list[str] = []
        self._columns: dict[str, array[float]] = {}
        self._texts: dict[str, list[str]] = {key: [] for key in _TEXT_KEYS}
        self._count = self._line = 0
        self._bad_lines: list[int] = []
        self._non_finite: list[tuple[int, int, str, float]] = []  # index of the row, its step, key and value
        self._torn = False
        self._starts: list[tuple[int, int]] = []  # per start row: number of step rows before it, its step
        self._other_rows: list[tuple[int, Row]] = []  # (number of start rows before it, row)

    def add_line(self, line: bytes) -> None:
        self._line += 1
        try:
            row = parse_row(line)
            event, step = row["event"], row["step"]
            if not 0 <= step < 1 << 53 or len(line) > ROW_BYTES:
                raise ValueError
        except ROW_ERRORS:
            if line.endswith(b"\n"):
                self._bad_lines.append(self._line)
            else:
                self._torn = True  # because: the writer was killed, or is writing this line now
            return
        if event == "step":
            self._add_step(row)
            return
        if event == "start":
            self._starts.append((self._count, step))
        # because: "nan" is still a string
        self._other_rows.append((len(self._starts), {**from_json_data(row), "event": event}))

    def _add_step(self, row: Row) -> None:
        columns = self._columns
        for key, value in [*row.items(), *source_measures(row).items()] if "sources" in row else row.items():
            kind = type(value)
            if kind is str:
                if value not in NON_FINITE_TEXTS:
                    continue
                value = NON_FINITE_TEXTS[value]
                if len(self._non_finite) < _MAX_NON_FINITE:
                    self._non_finite.append((self._count, row["step"], key, value))
            elif kind is not float and (kind is not int or abs(value) >= 1 << 1000):
                continue
            column = columns.get(key)
            if column is None:
                if len(columns) >= _MAX_COLUMNS:
                    continue
                column = columns[key] = array("d")
            if len(column) < self._count:
                column.extend([math.nan] * (self._count - len(column)))
            column.append(value)
        for key, texts in self._texts.items():
            texts.append(str(row.get(key, "")))
        self._count += 1

    def build_record(self, file_name: str) -> Record:
        columns = {
            key: np.append(np.array(column, np.float64), np.full(self._count - len(column), np.nan))
            for key, column in self._columns.items()
        }
        steps = columns.setdefault("step", np.empty(0))
        columns["seconds"] = _training_seconds(columns, [before for before, _ in self._starts])
        in_force, rewinds = np.ones(len(steps), bool), []
        for before, step in self._starts:
            undone = in_force[:before] & (steps[:before] > step)
            if undone.any():
                rewinds.append((step, int(steps[:before][undone].max())))
            in_force[:before] &= ~undone
        order = np.flatnonzero(in_force)
        order = order[np.argsort(steps[order], kind="stable")]
        # keep only the last row of each step
        order = order[np.append(steps[order][1:] != steps[order][:-1], True)[: len(order)]]
        if self._bad_lines:
            few = f"line {self._bad_lines[0]:,}" + f", {len(self._bad_lines) - 1:,} more" * (len(self._bad_lines) > 1)
            self.problems.append(f"{file_name}: {few} of {self._line:,} are no rows and are left out")
        if self._torn:
            self.problems.append(f"{file_name}: its last line is incomplete: the run was killed, or is writing it now")
        if not self._count and not self.problems:
            self.problems.append(f"{file_name} has no row of a step yet")
        return Record(
            {key: values[order] for key, values in columns.items()},
            {key: [texts[i] for i in order] for key, texts in self._texts.items()},
            self._events_in_force(), self.problems,
            [(step, key, value) for at, step, key, value in self._non_finite if in_force[at]], rewinds,
        )  # fmt: skip

    def _events_in_force(self) -> dict[str, list[Row]]:
        start_steps = [step for _, step in self._starts]
        kept: dict[tuple[str, int, str], Row] = {}
        for before, row in self._other_rows:
            resumed_step = min(start_steps[before:], default=row_step(row))
            if row["event"] in ("start", "stop") or row_step(row) <= resumed_step:
                stop = f" {before}" if row["event"] in ("start", "stop") else ""
                key = (row["event"] + stop, row_step(row), str(row.get("name")))
                kept.pop(key, None)
                kept[key] = row
        events = dict.fromkeys(row["event"] for row in kept.values())
        return {event: [row for row in kept.values() if row["event"] == event] for event in events}


def _training_seconds(columns: dict[str, Numbers], rows_before_starts: list[int]) -> Numbers:
    """Return for each step row the seconds of training since the run's first start, without the time between a stop and
    the next start. `columns` are the step rows' numbers by key, and `rows_before_starts` has the number of step rows
    before each start.

    NaN if the rows lack `elapsed_s` or `attempt`.
    """
    elapsed, attempts = columns.get("elapsed_s"), columns.get("attempt")
    if elapsed is None or attempts is None or not len(elapsed):
        return np.full(len(columns["step"]), np.nan)
    # because: in runs of older versions two starts from the same checkpoint have the same attempt number
    starts = [0, *(at for at in rows_before_starts if at < len(elapsed))]
    begins = np.union1d(starts, np.flatnonzero(np.diff(attempts)) + 1)
    longest = [np.nanmax(part, initial=0.0) for part in np.split(elapsed, begins[1:])]
    before = np.concatenate([[0.0], np.cumsum(longest)[:-1]])
    seconds: Numbers = elapsed + np.repeat(before, np.diff(np.append(begins, len(elapsed))))
    return seconds


@dataclass(frozen=True)
class RecordDifference:
    """The differences between two records, over the steps for which both have a row."""

    num_shared: int
    last_shared: int | None
    first_difference: dict[str, int]  # by key: the first step at which the records differ
    last_equal: dict[str, int]  # by key: the last step before that, if there is one
    loss_differences: list[dict[str, Any]]  # at growing numbers of rows after the first difference of the loss
    not_compared: list[str]  # one sentence per key that cannot be compared

    @property
    def step(self) -> int | None:
        return min(self.first_difference.values(), default=None)


def compare_records(a: Record, b: Record, same_shares: bool = True) -> RecordDifference:
    """Return at which steps two runs first differ in their data checksums, samples, tokens, learning rate, loss,
    gradient norm or skipped steps. Only steps that both runs have recorded are compared. `same_shares` says that rank 0
    of both runs reads the same part of each batch; only then is `batch_digest` compared.
    """
    shared, a_rows, b_rows = np.intersect1d(a.steps, b.steps, assume_unique=True, return_indices=True)
    first_difference: dict[str, int] = {}
    last_equal: dict[str, int] = {}
    not_compared = []
    for key in (*_TEXT_KEYS, *_COMPARED_KEYS):
        if key == "batch_digest" and not same_shares:
            not_compared.append("batch_digest: the runs divide a batch among ranks in different ways, or it is unknown")
            continue
        differs = _differing_rows(key, a, b, a_rows, b_rows)
        if differs is None:
            not_compared.append(f"{key}: at least one of the runs has not recorded it")
        elif differs.any():
            at = int(differs.argmax())
            first_difference[key] = int(shared[at])
            if at:
                last_equal[key] = int(shared[at - 1])
    return RecordDifference(
        int(shared.size), int(shared[-1]) if shared.size else None, first_difference, last_equal,
        _loss_differences(a, b, shared, a_rows, b_rows, first_difference), not_compared,
    )  # fmt: skip


def _differing_rows(key: str, a: Record, b: Record, a_rows: Any, b_rows: Any) -> Any:
    """Return a boolean mask over the steps that both records have: True where their values of `key` differ. `a_rows`
    and `b_rows` are the indices of those steps' rows in each record. Return None if a record has no values of `key`.
    """
    if key in _TEXT_KEYS:
        a_values, b_values = np.array(a.texts[key], object)[a_rows], np.array(b.texts[key], object)[b_rows]
        both_known = (a_values != "") & (b_values != "")
        return (a_values != b_values) & both_known if both_known.any() else None
    if key not in a.columns or key not in b.columns:
        return None
    a_values, b_values = a.columns[key][a_rows], b.columns[key][b_rows]
    return (a_values != b_values) & ~(np.isnan(a_values) & np.isnan(b_values))


def _loss_differences(
    a: Record, b: Record, shared: Numbers, a_rows: Any, b_rows: Any, first_difference: dict[str, int]
) -> list[dict[str, Any]]:
    """Return the losses of two records at the first shared step at which they differ, 1, 10, 100, ... rows later, and
    at the last shared step: dicts with `step`, `a`, `b` and `apart` (b - a). `shared` has the steps that both records
    have, `a_rows` and `b_rows` their row indices; `first_difference` is the first differing step by key.
    """
    if "loss" not in first_difference:
        return []
    begin = int(np.searchsorted(shared, first_difference["loss"]))
    a_losses, b_losses = a.columns["loss"][a_rows], b.columns["loss"][b_rows]
    last = len(shared) - 1
    return [
        {
            "step": int(shared[at]), "a": float(a_losses[at]), "b": float(b_losses[at]),
            "apart": float(b_losses[at] - a_losses[at]),
        }
        for at in sorted({last, *(begin + rows for rows in _ROWS_AFTER if begin + rows < last)})
    ]


def starts_in_force(record: Record) -> list[Row]:
    """Return the rows of a run's `start` events, one per start or resumption, in the order of their steps. If the run
    later resumed from the same or an earlier step, the row is left out, since the steps after it were then trained
    again.
    """
    in_force: list[Row] = []
    for row in record.rows.get("start", []):
        in_force = [*(earlier for earlier in in_force if earlier["step"] < row["step"]), row]
    return in_force


def pair_starts(starts_of_runs: Sequence[Sequence[Row]], end_step: int | None) -> Iterator[tuple[int, list[Row]]]:
    """Yield (step, rows) for each step before `end_step` at which one of the runs started or resumed. `rows` has for
    each run its newest start row at or before that step. `starts_of_runs` has the start rows of each run, in order of
    steps.

    Steps before the first start of a run are left out. Without `end_step` there is no upper limit.
    """
    for step in sorted({row["step"] for rows in starts_of_runs for row in rows}):
        pair = [row for rows in starts_of_runs for row in [start for start in rows if start["step"] <= step][-1:]]
        if len(pair) == len(starts_of_runs) and (end_step is None or step < end_step):
            yield step, pair
