"""The figures of a report: which numbers of a run's record stand in which, and what happened on their axis.

Called by report_page. Long records become few points that keep every extreme; numbers are the record's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lmtrain.observe.history.record import Numbers, Record, extreme_indices, part_means
from lmtrain.observe.measure.named_measures import row_measures
from lmtrain.page.chart import Charts, Curve, Figure, Form, Mark, Points
from lmtrain.units import format_bytes, format_measure, format_seconds

_POINTS = 3000  # of the loss, over all runs; the other figures have fewer
_FEWER = 1200
_LEAST = 200
_MOST_MARKS = 300  # of each kind
MOST_EVALS = 12  # figures


# each of one key of step rows, and of what _BESIDE adds
_PLAIN = (
    Figure("lr", "Learning rate", "number", smooth=False),
    Figure("grad_norm", "Gradient norm before clipping", "number", log=True),
    Figure("tokens_per_s", "Tokens a second", "count", zero=True),
    Figure("mfu", "MFU", "percent", note="Model FLOPs without recompute, as a share of the devices' peak.", zero=True),
    Figure("memory_bytes", "Memory", "bytes", zero=True),
    Figure("data_wait_s", "Wait for data in a step", "seconds", zero=True),
    Figure("straggler_slowest_by", "The slowest rank's own work beside its peers'", "percent", smooth=False),
    Figure("straggler_bubble", "Share of a step spent waiting", "percent"),
    Figure("skipped", "Steps skipped so far (fp16 overflow)", "count", smooth=False),
    Figure("loss_scale", "Loss scale (fp16)", "count", log=True, smooth=False),
)
_BESIDE = {"straggler_bubble": ("straggler_exposed",)}
_NAMES = {
    "memory_bytes": "of rank 0", "lr": "learning rate", "grad_norm": "norm", "tokens_per_s": "tokens/s",
    "straggler_bubble": "bubble", "straggler_exposed": "exposed communication", "straggler_slowest_by": "more by",
    "data_wait_s": "wait", "mfu": "MFU", "loss_scale": "scale",
}  # fmt: skip
_RECIPE = {
    "protocol": "protocol", "protocol_version": "version", "data": "data", "text_sha256": "sha256 of the text",
    "num_targets": "targets", "seq_len": "sequence", "dtype": "numbers",
}  # fmt: skip
_NO_FAULT = (0, 75, 79)  # exit codes of a run that came to its end, or was asked to stop
Happened = tuple[str, int, str]  # kind, step, words


def charts(names: Sequence[str], records: Sequence[Record], stops: Sequence[dict[str, Any] | None]) -> Charts:
    return Charts(
        list(names), [figure for figure in _figures(records) if figure.curves],
        [mark for run, record in enumerate(records) for mark in _marks(run, record, stops[run])],
    )  # fmt: skip


def _figures(records: Sequence[Record]) -> Iterator[Figure]:
    losses = [
        *_curves(records, "loss", "training", max(_POINTS // max(len(records), 1), _LEAST)),
        *_dots(records, "valid", "validation", "loss/valid"),
    ]
    yield Figure("loss", "Loss", "number", losses, "Mean over the labels of a step, in nats.", wide=True)
    terms = dict.fromkeys(key for record in records for key in record.columns if key.startswith("loss/"))
    yield Figure("terms", "Terms of the loss", "number", [c for key in terms for c in _curves(records, key, key[5:])])
    yield from _measured(records)
    for plain in _PLAIN:
        name = _NAMES.get(plain.key, plain.key)
        if plain.key == "memory_bytes" and any("memory_rank" in record.columns for record in records):
            name = "of the fullest rank"  # because: rows of older versions know rank 0 alone
        found = [*_curves(records, plain.key, name)]
        for key in _BESIDE.get(plain.key, ()):
            found += _curves(records, key, _NAMES[key])
        # because: that no step was skipped needs no figure
        if plain.key != "skipped" or any(max(curve.points.value) > 0 for curve in found):
            yield replace(plain, curves=found)


def _measured(records: Sequence[Record]) -> Iterator[Figure]:
    """Yield figures of validation's measures and domains, and of each evaluation's headline measure."""
    rows = [row for record in records for row in record.rows.get("valid", [])]
    domains = [
        curve
        for name in dict.fromkeys(name for row in rows for name in row_measures(row) if name.startswith("loss/valid/"))
        for curve in _dots(records, "valid", name.removeprefix("loss/valid/"), name)
    ]
    yield Figure("domains", "Validation loss by domain", "number", domains)
    for name, title in [*headlines(records).items()][:MOST_EVALS]:
        form: Form = "percent" if name.endswith("accuracy") else "number"
        yield Figure(name, title.replace("_", " "), form, [*_dots(records, "eval", "measured", name)], smooth=False)


def headlines(records: Sequence[Record]) -> dict[str, str]:
    """Return the headline measures of evaluations, with their titles."""
    return {
        f"eval/{row.get('name')}/{row.get('headline')}": f"{row.get('name')}: {row.get('headline')}"
        for record in records
        for row in record.rows.get("eval", [])
    }


def _curves(records: Sequence[Record], key: str, name: str, most: int = 0) -> Iterator[Curve]:
    most = most or max(_FEWER // max(len(records), 1), _LEAST)
    for run, record in enumerate(records):
        steps, values = record.column(key)
        kept, mean = extreme_indices(values, most), None
        if len(values) > most:
            ends, averages = part_means(values, most // 2)
            mean = _points(record, steps[ends], averages)
        if steps.size:
            yield Curve(run, name, _points(record, steps[kept], values[kept]), mean)


def _dots(records: Sequence[Record], event: str, name: str, measure: str) -> Iterator[Curve]:
    for run, record in enumerate(records):
        rows = record.rows.get(event, [])
        taken = {row["step"]: value for row in rows if _finite(value := row_measures(row).get(measure))}
        steps = np.array(sorted(taken), np.float64)
        values = np.array([taken[int(step)] for step in steps])
        kept = extreme_indices(values, _FEWER)
        if taken:
            yield Curve(run, name, _points(record, steps[kept], values[kept]), dots=True)


def _finite(value: Any) -> bool:
    return _number(value) and math.isfinite(value)


def _points(record: Record, steps: Numbers, values: Numbers) -> Points:
    tokens, seconds = (record.interpolate(key, steps) for key in ("tokens", "seconds"))
    return Points(
        steps.tolist(), tokens.tolist() if np.isfinite(tokens).all() else [],
        seconds.tolist() if np.isfinite(seconds).all() else [], values.tolist(),
    )  # fmt: skip


def _marks(run: int, record: Record, stop: dict[str, Any] | None) -> Iterator[Mark]:
    found = [*_saves(record), *_starts(record), *_slow(record), *_broken(record), *_ends(record, stop)]
    found.sort(key=lambda one: (one[1], one[0] != "stop"))  # a stop comes before the start that went on from there
    steps = np.array([step for _, step, _ in found], np.float64)
    tokens, seconds = (np.nan_to_num(record.interpolate(key, steps)).tolist() for key in ("tokens", "seconds"))
    for (kind, step, said), token, second in zip(found, tokens, seconds, strict=True):
        yield Mark(run, kind, step, token, second, said)


def _saves(record: Record) -> Iterator[Happened]:
    for row in _few(record.rows.get("save", [])):
        step, size, took = (row.get(key) for key in ("saved_step", "bytes", "write_s"))
        if type(step) is int:
            how = f": {format_bytes(size)} in {format_seconds(took)}" if _finite(size) and _finite(took) else ""
            yield "save", step, f"saved step {step:,}{how}"


def _starts(record: Record) -> Iterator[Happened]:
    lost = dict(sorted(record.rewinds))  # of a step that was lost several times, the furthest that was reached
    for row in _few(record.rows.get("start", [])[1:]):
        step = row["step"]
        again = f", steps up to {lost[step]:,} done again" if step in lost else ""
        yield "restart", step, f"start {row.get('attempt', '?')} went on from step {step:,}{again}"
        yield from _survived(row)


def _survived(row: dict[str, Any]) -> Iterator[Happened]:
    """Yield what ended the start before, unless it was asked to stop; rows of older versions do not say."""
    before = row.get("before")
    if isinstance(before, dict) and before.get("exit_code") not in _NO_FAULT:
        failed = f"failed with exit code {before.get('exit_code')}: {before.get('cause')}"
        how = failed if before else "was killed or crashed: it left no stop.json"
        yield "fault", row["step"], f"the start before {how}"[:300]


def _slow(record: Record) -> Iterator[Happened]:
    """Yield the steps at which a rank is first named as slow, or another rank than before."""
    ranks = record.columns.get("straggler_rank", np.empty(0))
    for at in _few(np.flatnonzero(np.isfinite(ranks) & (ranks != np.append(np.nan, ranks[:-1]))).tolist()):
        yield "slow", int(record.steps[at]), f"rank {int(ranks[at])} is slow from step {int(record.steps[at]):,} on"


def _broken(record: Record) -> Iterator[Happened]:
    # because: the loss scale tries how far it can go; steps that overflow are skipped, and counted as such
    overflows = ("grad_norm",) if "loss_scale" in record.columns else ()
    for step, key, value in _few([one for one in record.non_finite if one[1] not in overflows]):
        yield "fault", step, f"{key} was {value} at step {step:,}"


def _ends(record: Record, stop: dict[str, Any] | None) -> Iterator[Happened]:
    for row in _few(record.rows.get("stop", [])):
        if row.get("stopped_by"):
            yield "stop", row["step"], f"stopped by {row['stopped_by']} at step {row['step']:,}"
    if stop is not None and stop.get("exit_code") not in (None, *_NO_FAULT):
        last = int(record.steps[-1]) if record.steps.size else 0
        yield "fault", last, f"failed with exit code {stop.get('exit_code')}: {stop.get('cause')}"[:300]


def _few(rows: Sequence[Any]) -> Iterable[Any]:
    """Return at most _MOST_MARKS rows, spread evenly, with the last."""
    every = math.ceil(len(rows) / _MOST_MARKS) or 1
    return [row for at, row in enumerate(reversed(rows)) if at % every == 0][::-1]


def eval_rows(records: Sequence[Record], names: Sequence[str]) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the recipes of all evaluations, and their numbers by step."""
    recipes: dict[tuple[str, ...], dict[str, str]] = {}
    numbers = []
    for name, record in zip(names, records, strict=True):
        for row in record.rows.get("eval", []):
            who = ({"<run": name} if len(names) > 1 else {}) | {"<name": str(row.get("name"))}
            measures = row.get("measures")
            recipe = who | {f"<{word}": _said(row.get(key)) for key, word in _RECIPE.items()}
            recipes.setdefault(tuple(recipe.values()), recipe)
            if isinstance(measures, dict):
                told = {key.replace("_", " "): format_measure(key, v) for key, v in measures.items() if _number(v)}
                sums = {"nll sum (nats)": f"{row['nll_sum_nats']:.6g}"} if _number(row.get("nll_sum_nats")) else {}
                took = {"seconds": f"{row['seconds']:.1f}"} if _number(row.get("seconds")) else {}
                numbers.append(who | {"step": f"{row['step']:,}"} | told | sums | took)
    return list(recipes.values()), numbers


def _said(value: Any) -> str:
    text = "-" if value is None else f"{value:,}" if type(value) is int and value >= 10_000 else str(value)
    return f"{text[:12]}..." if len(text) == 64 else text


def _number(value: Any) -> bool:
    return type(value) in (int, float)
