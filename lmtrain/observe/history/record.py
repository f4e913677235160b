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

from lmtrain.runfolder.rows import (
    NON_FINITE_TEXTS,
    ROW_BYTES,
    ROW_ERRORS,
    Row,
    from_json_data,
    parse_row,
    read_lines,
    row_step,
)

Places = NDArray[np.intp]
Numbers = NDArray[np.float64]
_TEXTS = ("samples_hash", "batch_digest")  # keys of step rows that identify the step's data
_MOST_BROKEN, _MOST_COLUMNS = 10_000, 512
_KEYS = ("samples", "tokens", "lr", "loss", "grad_norm", "skipped")
_AFTER = (0, 1, 10, 100, 1000, 10_000, 100_000, 1_000_000)  # number of rows after the first one that differs


def extremes(values: Numbers, most: int) -> Places:
    """Return the sorted indices of at most `most` values: both ends, and each equal part's minimum and maximum.

    All indices if there are no more values than `most`. The values must be finite.
    """
    if len(values) <= most:
        return np.arange(len(values))
    borders = parts(len(values), max(most // 2 - 1, 1))
    found: set[int] = {0, len(values) - 1}
    for begin, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        part = values[begin:end]
        found |= {begin + int(part.argmin()), begin + int(part.argmax())}
    return np.array(sorted(found), np.intp)


def means(values: Numbers, most: int) -> tuple[Places, Numbers]:
    """Return (index of the last value, mean) for each of at most `most` equally long parts."""
    borders = parts(len(values), min(len(values), most))
    if len(values) == 0:
        return np.empty(0, np.intp), np.empty(0)
    return borders[1:] - 1, np.add.reduceat(values, borders[:-1]) / np.diff(borders)


def parts(count: int, num_parts: int) -> NDArray[Any]:
    """Return the `num_parts` + 1 boundaries of equally long parts; no part is empty if count >= num_parts."""
    return (np.arange(num_parts + 1) * count // max(num_parts, 1)).astype(np.intp)


def smoothed(values: Numbers, fade: float) -> Numbers:
    """Return the exponentially weighted running mean, with bias correction for the first values."""
    result, mean, weight = np.empty(len(values)), 0.0, 0.0
    for at, value in enumerate(values.tolist()):
        mean, weight = fade * mean + value, fade * weight + 1
        result[at] = mean / weight
    return result


@dataclass(frozen=True)
class Record:
    """The valid rows of a run: steps of an earlier attempt beyond the point where a later one resumed are left out."""

    columns: dict[str, Numbers]  # step rows by key, in order of steps; NaN where a row lacks the key
    texts: dict[str, list[str]]  # likewise, for the keys of _TEXTS; "" where a row lacks the key
    rows: dict[str, list[Row]]  # rows of all other events, by event
    problems: list[str]  # one sentence each
    broken: list[tuple[int, str, float]]  # (step, key, value) for each number that was NaN or infinite
    lost: list[tuple[int, int]] = field(default_factory=list)  # (step resumed at, last step reached before) per restart

    @property
    def steps(self) -> Numbers:
        return self.columns["step"]

    def column(self, key: str) -> tuple[Numbers, Numbers]:
        """Return (steps, values) of the rows that have a finite value for the key."""
        values = self.columns.get(key)
        if values is None:
            return np.empty(0), np.empty(0)
        there = np.isfinite(values)
        return self.steps[there], values[there]

    def at(self, key: str, steps: Numbers) -> Numbers:
        """Interpolate a cumulative number (tokens, seconds) at the given steps; NaN if no row has the key."""
        known, values = self.column(key)
        if not known.size:
            return np.full(len(steps), np.nan)
        if known[0] > 0:  # because: before the first step no data had been read and no time had passed
            known, values = np.insert(known, 0, 0.0), np.insert(values, 0, 0.0)
        return np.interp(steps, known, values)


def read_record(path: Path) -> Record:
    """Read metrics.jsonl into a Record. The file may be growing, truncated, damaged or missing."""
    reader = _Reader()
    try:
        for line in read_lines(path):
            reader.take(line)
    except OSError as error:
        why = "is not there" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        reader.problems.append(f"{path.name} {why}: nothing is known of any step")
    return reader.record(path.name)


class _Reader:
    def __init__(self) -> None:
        self.problems: list[str] = []
        self._columns: dict[str, array[float]] = {}
        self._texts: dict[str, list[str]] = {key: [] for key in _TEXTS}
        self._count = self._line = 0
        self._bad: list[int] = []
        self._broken: list[tuple[int, int, str, float]] = []  # index of the row, its step, key and value
        self._torn = False
        self._begun: list[tuple[int, int]] = []  # per start row: number of step rows before it, its step
        self._others: list[tuple[int, Row]] = []  # (number of start rows before it, row)

    def take(self, line: bytes) -> None:
        self._line += 1
        try:
            row = parse_row(line)
            event, step = row["event"], row["step"]
            if not 0 <= step < 1 << 53 or len(line) > ROW_BYTES:
                raise ValueError
        except ROW_ERRORS:
            if line.endswith(b"\n"):
                self._bad.append(self._line)
            else:
                self._torn = True  # because: the writer was killed, or is writing this line now
            return
        if event == "step":
            self._step(row)
            return
        if event == "start":
            self._begun.append((self._count, step))
        # because: "nan" is still a string
        self._others.append((len(self._begun), {**from_json_data(row), "event": event}))

    def _step(self, row: Row) -> None:
        columns = self._columns
        for key, value in row.items():
            kind = type(value)
            if kind is str:
                if value not in NON_FINITE_TEXTS:
                    continue
                value = NON_FINITE_TEXTS[value]
                if len(self._broken) < _MOST_BROKEN:
                    self._broken.append((self._count, row["step"], key, value))
            elif kind is not float and (kind is not int or abs(value) >= 1 << 1000):
                continue
            column = columns.get(key)
            if column is None:
                if len(columns) >= _MOST_COLUMNS:
                    continue
                column = columns[key] = array("d")
            if len(column) < self._count:
                column.extend([math.nan] * (self._count - len(column)))
            column.append(value)
        for key, texts in self._texts.items():
            texts.append(str(row.get(key, "")))
        self._count += 1

    def record(self, name: str) -> Record:
        columns = {
            key: np.append(np.array(column, np.float64), np.full(self._count - len(column), np.nan))
            for key, column in self._columns.items()
        }
        steps = columns.setdefault("step", np.empty(0))
        columns["seconds"] = _seconds(columns, [before for before, _ in self._begun])
        kept, lost = np.ones(len(steps), bool), []
        for before, step in self._begun:
            gone = kept[:before] & (steps[:before] > step)
            if gone.any():
                lost.append((step, int(steps[:before][gone].max())))
            kept[:before] &= ~gone
        order = np.flatnonzero(kept)
        order = order[np.argsort(steps[order], kind="stable")]
        # keep only the last row of each step
        order = order[np.append(steps[order][1:] != steps[order][:-1], True)[: len(order)]]
        if self._bad:
            few = f"line {self._bad[0]:,}" + f", {len(self._bad) - 1:,} more" * (len(self._bad) > 1)
            self.problems.append(f"{name}: {few} of {self._line:,} are no rows and are left out")
        if self._torn:
            self.problems.append(f"{name}: its last line is cut off, as when its writer was killed or is writing")
        if not self._count and not self.problems:
            self.problems.append(f"{name} has no row of a step yet")
        return Record(
            {key: values[order] for key, values in columns.items()},
            {key: [texts[i] for i in order] for key, texts in self._texts.items()},
            self._events(), self.problems,
            [(step, key, value) for at, step, key, value in self._broken if kept[at]], lost,
        )  # fmt: skip

    def _events(self) -> dict[str, list[Row]]:
        begun = [step for _, step in self._begun]
        kept: dict[tuple[str, int, str], Row] = {}
        for before, row in self._others:
            again = min(begun[before:], default=row_step(row))
            if row["event"] in ("start", "stop") or row_step(row) <= again:
                stop = f" {before}" if row["event"] in ("start", "stop") else ""
                key = (row["event"] + stop, row_step(row), str(row.get("name")))
                kept.pop(key, None)
                kept[key] = row
        events = dict.fromkeys(row["event"] for row in kept.values())
        return {event: [row for row in kept.values() if row["event"] == event] for event in events}


def _seconds(columns: dict[str, Numbers], begun: list[int]) -> Numbers:
    """Return the training seconds up to each row, summed over all starts.

    `begun` is the number of step rows before each start.
    """
    elapsed, attempts = columns.get("elapsed_s"), columns.get("attempt")
    if elapsed is None or attempts is None or not len(elapsed):
        return np.full(len(columns["step"]), np.nan)
    # because: in runs of older versions two starts from the same checkpoint have the same attempt number
    begins = np.union1d([0, *(at for at in begun if at < len(elapsed))], np.flatnonzero(np.diff(attempts)) + 1)
    longest = [np.nanmax(part, initial=0.0) for part in np.split(elapsed, begins[1:])]
    before = np.concatenate([[0.0], np.cumsum(longest)[:-1]])
    seconds: Numbers = elapsed + np.repeat(before, np.diff(np.append(begins, len(elapsed))))
    return seconds


@dataclass(frozen=True)
class Parting:
    """The differences between two records, over the steps for which both have a row."""

    num_shared: int
    last_shared: int | None
    first: dict[str, int]  # by key: the first step at which the records differ
    equal_until: dict[str, int]  # by key: the last step before that, if there is one
    after: list[dict[str, Any]]  # differences of the loss, a growing number of rows after the first difference
    untold: list[str]  # one sentence per key that cannot be compared

    @property
    def step(self) -> int | None:
        return min(self.first.values(), default=None)


def parting(a: Record, b: Record, same_shares: bool = True) -> Parting:
    """Compare two records.

    `same_shares` states that rank 0 of both runs reads the same part of a batch, so that `batch_digest` can be
    compared.
    """
    shared, left, right = np.intersect1d(a.steps, b.steps, assume_unique=True, return_indices=True)
    first: dict[str, int] = {}
    until: dict[str, int] = {}
    untold = []
    for key in (*_TEXTS, *_KEYS):
        if key == "batch_digest" and not same_shares:
            untold.append("batch_digest: not at every start do the two cut a batch alike, or it is not known")
            continue
        differs = _differs(key, a, b, left, right)
        if differs is None:
            untold.append(f"{key}: not both runs have recorded it")
        elif differs.any():
            at = int(differs.argmax())
            first[key] = int(shared[at])
            if at:
                until[key] = int(shared[at - 1])
    return Parting(
        int(shared.size), int(shared[-1]) if shared.size else None, first, until,
        _after(a, b, shared, left, right, first), untold,
    )  # fmt: skip


def _differs(key: str, a: Record, b: Record, left: Any, right: Any) -> Any:
    if key in _TEXTS:
        ours, theirs = np.array(a.texts[key], object)[left], np.array(b.texts[key], object)[right]
        known = (ours != "") & (theirs != "")
        return (ours != theirs) & known if known.any() else None
    if key not in a.columns or key not in b.columns:
        return None
    ours, theirs = a.columns[key][left], b.columns[key][right]
    return (ours != theirs) & ~(np.isnan(ours) & np.isnan(theirs))


def _after(a: Record, b: Record, shared: Numbers, left: Any, right: Any, first: dict[str, int]) -> list[dict[str, Any]]:
    if "loss" not in first:
        return []
    begin = int(np.searchsorted(shared, first["loss"]))
    ours, theirs = a.columns["loss"][left], b.columns["loss"][right]
    last = len(shared) - 1
    return [
        {"step": int(shared[at]), "a": float(ours[at]), "b": float(theirs[at]), "apart": float(theirs[at] - ours[at])}
        for at in sorted({last, *(begin + rows for rows in _AFTER if begin + rows < last)})
    ]


def starts_that_count(record: Record) -> list[Row]:
    """Return the start rows with remaining steps, in order of steps; a start that a later one replaced is left out."""
    kept: list[Row] = []
    for row in record.rows.get("start", []):
        kept = [*(one for one in kept if one["step"] < row["step"]), row]
    return kept


def together(starts: Sequence[Sequence[Row]], end: int | None) -> Iterator[tuple[int, list[Row]]]:
    """Yield (step, both runs' start rows in force from there) for each start of either run before step `end`."""
    for step in sorted({row["step"] for rows in starts for row in rows}):
        pair = [row for rows in starts for row in [one for one in rows if one["step"] <= step][-1:]]
        if len(pair) == len(starts) and (end is None or step < end):
            yield step, pair
