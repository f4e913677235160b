"""The figures of a report: curves from the rows of runs, and marks for saves, restarts, stops and faults.

Called by report. A long record is thinned out to few points, among them every extreme value; values are not changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lmtrain.cli.page.svg_line_charts import Charts, Curve, Figure, Form, Mark, Points
from lmtrain.observe.history.read_metrics_columns import Numbers, Record, extreme_indices, part_means
from lmtrain.runfolder.tensorboard_metric_names import row_measures
from lmtrain.units import format_bytes, format_count, format_measure, format_seconds

_MAX_LOSS_POINTS = 3000  # points of the loss, over all runs; the other figures have fewer
_MAX_POINTS = 1200
_MIN_POINTS = 200
_MAX_MARKS = 300  # marks of each kind
MAX_EVAL_FIGURES = 12


# a figure for each of these keys of step rows, with a second curve for the keys in _EXTRA_KEYS
_STEP_FIGURES = (
    Figure("z_loss", "Z-loss, minimised beside the loss", "number", log=True),
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
_EXTRA_KEYS = {"straggler_bubble": ("straggler_exposed",)}
_CURVE_NAMES = {
    "z_loss": "z-loss", "memory_bytes": "of rank 0", "lr": "learning rate", "grad_norm": "norm",
    "tokens_per_s": "tokens/s",
    "straggler_bubble": "bubble", "straggler_exposed": "exposed communication", "straggler_slowest_by": "more by",
    "data_wait_s": "wait", "mfu": "MFU", "loss_scale": "scale",
}  # fmt: skip
_RECIPE_COLUMNS = {
    "protocol": "protocol", "protocol_version": "version", "data": "data", "text_sha256": "sha256 of the text",
    "num_targets": "targets", "seq_len": "sequence", "dtype": "numbers",
}  # fmt: skip
_SOURCE_LOSS = "loss/train/"  # before a source's name
_NORMAL_EXIT_CODES = (0, 75, 79)  # exit codes of a run that finished, or stopped on request
Event = tuple[str, int, str]  # kind of mark, step, text


def build_charts(names: Sequence[str], records: Sequence[Record], stops: Sequence[dict[str, Any] | None]) -> Charts:
    return Charts(
        list(names), [figure for figure in _figures(records) if figure.curves],
        [mark for run, record in enumerate(records) for mark in _event_marks(run, record, stops[run])],
    )  # fmt: skip


def _figures(records: Sequence[Record]) -> Iterator[Figure]:
    losses = [
        *_step_curves(records, "loss", "training", max(_MAX_LOSS_POINTS // max(len(records), 1), _MIN_POINTS)),
        *_measurement_curves(records, "valid", "validation", "loss/valid"),
        *_measurement_curves(records, "valid", "validation of the average", "loss/ema"),
    ]
    yield Figure("loss", "Loss", "number", losses, "Mean over the labels of a step, in nats.", wide=True)
    keys = dict.fromkeys(key for record in records for key in record.columns if key.startswith("loss/"))
    source_keys = [key for key in keys if key.startswith(_SOURCE_LOSS)]
    term_curves = [curve for key in keys if key not in source_keys for curve in _step_curves(records, key, key[5:])]
    yield Figure("terms", "Terms of the loss", "number", term_curves)
    sources = [curve for key in source_keys for curve in _step_curves(records, key, key.removeprefix(_SOURCE_LOSS))]
    yield Figure(
        "sources", "Training loss by source", "number", sources,
        "Mean over the labels of each dataset of the blend since the row before.",
    )  # fmt: skip
    yield from _measure_figures(records)
    for figure in _STEP_FIGURES:
        name = _CURVE_NAMES.get(figure.key, figure.key)
        if figure.key == "memory_bytes" and any("memory_rank" in record.columns for record in records):
            name = "of the fullest rank"  # because: rows of older versions know rank 0 alone
        curves = [*_step_curves(records, figure.key, name)]
        for key in _EXTRA_KEYS.get(figure.key, ()):
            curves += _step_curves(records, key, _CURVE_NAMES[key])
        # because: a figure of skipped steps is of no use if no step was skipped
        if figure.key != "skipped" or any(max(curve.points.value) > 0 for curve in curves):
            yield replace(figure, curves=curves)


def _measure_figures(records: Sequence[Record]) -> Iterator[Figure]:
    """Yield the figures of the validation and evaluation rows of the runs: one of the validation loss by domain, and
    one for each evaluation with its headline measure, up to a limit.
    """
    rows = [row for record in records for row in record.rows.get("valid", [])]
    domains = [
        curve
        for name in dict.fromkeys(name for row in rows for name in row_measures(row) if name.startswith("loss/valid/"))
        for curve in (
            *_measurement_curves(records, "valid", name.removeprefix("loss/valid/"), name),
            *_measurement_curves(
                records, "valid", f"{name.removeprefix('loss/valid/')}, average", name.replace("valid", "ema", 1)
            ),
        )
    ]
    yield Figure("domains", "Validation loss by domain", "number", domains)
    for name, title in [*headline_titles(records).items()][:MAX_EVAL_FIGURES]:
        form: Form = "percent" if name.endswith("accuracy") else "number"
        curves = [
            *_measurement_curves(records, "eval", "measured", name),
            *_measurement_curves(records, "eval", "measured of the average", "/ema/".join(name.rsplit("/", 1))),
        ]
        yield Figure(name, title.replace("_", " "), form, curves, smooth=False)


def headline_titles(records: Sequence[Record]) -> dict[str, str]:
    """Return a title for the headline measure (main score) of each evaluation in the records, as "eval/NAME/MEASURE" ->
    "NAME: MEASURE".
    """
    return {
        f"eval/{row.get('name')}/{row.get('headline')}": f"{row.get('name')}: {row.get('headline')}"
        for record in records
        for row in record.rows.get("eval", [])
    }


def _step_curves(records: Sequence[Record], key: str, name: str, max_points: int = 0) -> Iterator[Curve]:
    max_points = max_points or max(_MAX_POINTS // max(len(records), 1), _MIN_POINTS)
    for run, record in enumerate(records):
        steps, values = record.column(key)
        kept, mean = extreme_indices(values, max_points), None
        if len(values) > max_points:
            part_ends, averages = part_means(values, max_points // 2)
            mean = _to_points(record, steps[part_ends], averages)
        if steps.size:
            yield Curve(run, name, _to_points(record, steps[kept], values[kept]), mean)


def _measurement_curves(records: Sequence[Record], event: str, name: str, measure: str) -> Iterator[Curve]:
    for run, record in enumerate(records):
        rows = record.rows.get(event, [])
        values_by_step = {row["step"]: value for row in rows if _is_finite(value := row_measures(row).get(measure))}
        steps = np.array(sorted(values_by_step), np.float64)
        values = np.array([values_by_step[int(step)] for step in steps])
        kept = extreme_indices(values, _MAX_POINTS)
        if values_by_step:
            yield Curve(run, name, _to_points(record, steps[kept], values[kept]), dots=True)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)


def _to_points(record: Record, steps: Numbers, values: Numbers) -> Points:
    tokens, seconds = (record.interpolate(key, steps) for key in ("tokens", "seconds"))
    return Points(
        steps.tolist(), tokens.tolist() if np.isfinite(tokens).all() else [],
        seconds.tolist() if np.isfinite(seconds).all() else [], values.tolist(),
    )  # fmt: skip


def _event_marks(run: int, record: Record, stop: dict[str, Any] | None) -> Iterator[Mark]:
    events = [
        *_save_events(record), *_start_events(record), *_stage_events(record), *_slow_rank_events(record),
        *_non_finite_events(record), *_end_events(record, stop),
    ]  # fmt: skip
    # because: the stop comes before the start that went on from its step
    events.sort(key=lambda event: (event[1], event[0] != "stop"))
    steps = np.array([step for _, step, _ in events], np.float64)
    tokens, seconds = (np.nan_to_num(record.interpolate(key, steps)).tolist() for key in ("tokens", "seconds"))
    for (kind, step, text), token, second in zip(events, tokens, seconds, strict=True):
        yield Mark(run, kind, step, token, second, text)


def _save_events(record: Record) -> Iterator[Event]:
    for row in _thin_out(record.rows.get("save", [])):
        step, size, seconds = (row.get(key) for key in ("saved_step", "bytes", "write_s"))
        if type(step) is int:
            is_known = _is_finite(size) and _is_finite(seconds)
            details = f": {format_bytes(size)} in {format_seconds(seconds)}" if is_known else ""
            yield "save", step, f"saved step {step:,}{details}"


def _start_events(record: Record) -> Iterator[Event]:
    last_steps = dict(sorted(record.rewinds))  # step resumed at -> the last step that an earlier start had reached
    rows = record.rows.get("start", [])
    if rows and rows[0]["step"] and isinstance(rows[0].get("resumed_from"), str):
        yield "branch", rows[0]["step"], f"began at step {rows[0]['step']:,} of {rows[0]['resumed_from']}"
    for row in _thin_out(rows[1:]):
        step = row["step"]
        repeated = f", steps up to {last_steps[step]:,} done again" if step in last_steps else ""
        yield "restart", step, f"start {row.get('attempt', '?')} went on from step {step:,}{repeated}"
        yield from _previous_failure(row)


def _stage_events(record: Record) -> Iterator[Event]:
    """Yield an event ("stage", step, text) for each training stage after the first, at the step after which it began.
    """
    rows, before = [row for key in ("start", "stage") for row in record.rows.get(key, [])], None
    for row in sorted(rows, key=lambda row: row["step"]):
        if row["step"] and row.get("stage") not in (None, before):
            yield "stage", row["step"], f"the stage {row['stage']} began after step {row['step']:,}"
        before = row.get("stage")


def _previous_failure(row: dict[str, Any]) -> Iterator[Event]:
    """Yield one event ("fault", step, text) if the start of the run before the start row `row` failed or was killed,
    else nothing. The text is the reason.
    """
    previous = row.get("before")
    if isinstance(previous, dict) and previous.get("exit_code") not in _NORMAL_EXIT_CODES:
        failed = f"failed with exit code {previous.get('exit_code')}: {previous.get('cause')}"
        end = failed if previous else "was killed or crashed: it left no stop.json"
        yield "fault", row["step"], f"the start before {end}"[:300]


def _slow_rank_events(record: Record) -> Iterator[Event]:
    """Yield an event ("slow", step, text) for each step from which another rank than before is recorded as the
    straggler.
    """
    ranks = record.columns.get("straggler_rank", np.empty(0))
    for index in _thin_out(np.flatnonzero(np.isfinite(ranks) & (ranks != np.append(np.nan, ranks[:-1]))).tolist()):
        step = int(record.steps[index])
        yield "slow", step, f"rank {int(ranks[index])} is slow from step {step:,} on"


def _non_finite_events(record: Record) -> Iterator[Event]:
    # because: the loss scale tries how far it can go; steps that overflow are skipped, and counted as such
    overflows = ("grad_norm",) if "loss_scale" in record.columns else ()
    for step, key, value in _thin_out([event for event in record.non_finite if event[1] not in overflows]):
        yield "fault", step, f"{key} was {value} at step {step:,}"


def _end_events(record: Record, stop: dict[str, Any] | None) -> Iterator[Event]:
    for row in _thin_out(record.rows.get("stop", [])):
        if row.get("stopped_by"):
            yield "stop", row["step"], f"stopped by {row['stopped_by']} at step {row['step']:,}"
    if stop is not None and stop.get("exit_code") not in (None, *_NORMAL_EXIT_CODES):
        last = int(record.steps[-1]) if record.steps.size else 0
        yield "fault", last, f"failed with exit code {stop.get('exit_code')}: {stop.get('cause')}"[:300]


def _thin_out(rows: Sequence[Any]) -> Iterable[Any]:
    """Return at most _MAX_MARKS rows, evenly spaced; the last row is always one of them."""
    stride = math.ceil(len(rows) / _MAX_MARKS) or 1
    return [row for index, row in enumerate(reversed(rows)) if index % stride == 0][::-1]


def source_table(records: Sequence[Record], names: Sequence[str]) -> list[dict[str, str]]:
    """Return table rows (column title -> text) about the data sources of the runs that train on a blend: a row for each
    source with its newest training and validation loss, tokens and epochs. `names` are the runs' names; other runs have
    no rows.
    """
    table = []
    for name, record in zip(names, records, strict=True):
        measures: dict[str, float] = {}
        for row in record.rows.get("valid", []):
            measures |= row_measures(row)
        for source in (key.removeprefix("tokens/") for key in record.columns if key.startswith("tokens/")):
            newest = {key: record.column(f"{key}/{source}")[1][-1:] for key in ("loss/train", "tokens", "epochs")}
            cells = {"training loss": [f"{value:.4f}" for value in newest["loss/train"]]}
            valid = measures.get(f"loss/valid/{source}")
            cells["validation loss"] = [f"{valid:.4f}"] if valid is not None else []
            cells["tokens"] = [format_count(value) for value in newest["tokens"]]
            cells["epochs"] = [f"{value:.3g}" for value in newest["epochs"]]
            labels = ({"<run": name} if len(names) > 1 else {}) | {"<source": source}
            table.append(labels | {title: "".join(texts) or "-" for title, texts in cells.items()})
    return table


def evaluation_tables(
    records: Sequence[Record], names: Sequence[str]
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the rows (column title -> text) of two tables about the evaluations during the runs: one of their recipes,
    without repetitions, and one of the measures of each evaluation at each step. `names` are the runs' names.
    """
    recipes: dict[tuple[str, ...], dict[str, str]] = {}
    numbers = []
    for name, record in zip(names, records, strict=True):
        for row in record.rows.get("eval", []):
            labels = ({"<run": name} if len(names) > 1 else {}) | {"<name": str(row.get("name"))}
            measures = row.get("measures")
            recipe = labels | {f"<{title}": _cell_text(row.get(key)) for key, title in _RECIPE_COLUMNS.items()}
            recipes.setdefault(tuple(recipe.values()), recipe)
            if isinstance(measures, dict):
                cells = {
                    key.replace("_", " "): format_measure(key, value)
                    for key, value in measures.items() if _is_number(value)
                }  # fmt: skip
                nll, seconds = row.get("nll_sum_nats"), row.get("seconds")
                headline = str(row.get("headline"))
                if (value := row_measures(row).get(f"eval/{row.get('name')}/ema/{headline}")) is not None:
                    cells[f"{headline.replace('_', ' ')} of the average"] = format_measure(headline, value)
                cells |= {"nll sum (nats)": f"{nll:.6g}"} if _is_number(nll) else {}
                cells |= {"seconds": f"{seconds:.1f}"} if _is_number(seconds) else {}
                numbers.append(labels | {"step": f"{row['step']:,}"} | cells)
    return list(recipes.values()), numbers


def _cell_text(value: Any) -> str:
    text = "-" if value is None else f"{value:,}" if type(value) is int and value >= 10_000 else str(value)
    return f"{text[:12]}..." if len(text) == 64 else text


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
