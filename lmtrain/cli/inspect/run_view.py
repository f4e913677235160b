"""What `lmtrain inspect RUN` says of a run: all facts as plain data, fifteen of them in words. Called by inspect."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.store import best_checkpoint, list_broken, list_checkpoints, list_damaged
from lmtrain.config.base import show
from lmtrain.errors import LmtrainError, MissingInputError
from lmtrain.observe.measure.named_measures import row_measures, score_by_step
from lmtrain.observe.screen.row_text import (
    compute,
    domains,
    eval_figures,
    percent,
    smoothed,
    sparkline,
    terms,
)
from lmtrain.runfolder.changes import History, changed_histories
from lmtrain.runfolder.folder import read_run_state, read_settings
from lmtrain.runfolder.names import CHECKPOINTS, METRICS, step_from_name
from lmtrain.runfolder.rows import last_write_time, read_metrics
from lmtrain.units import format_bytes, format_count, format_measure, format_seconds, plural

_CURVE = 40  # characters
Rows = Sequence[dict[str, Any]]


def run_facts(path: Path, verify: bool) -> dict[str, Any]:
    import numpy as np

    from lmtrain.checkpoint.diff import raise_problems, verify_checkpoints
    from lmtrain.observe.history.record import read_record

    if verify:
        raise_problems(verify_checkpoints(path))
    metrics = path / METRICS
    rows = read_metrics(metrics) if metrics.is_file() else []
    events = ("step", "valid", "eval", "save")
    steps, valid, evals, saves = ([row for row in rows if row["event"] == event] for event in events)
    losses = [row["loss"] for row in steps if row.get("loss") is not None]
    state, settings = read_run_state(path), read_settings(path)
    return {
        "run": str(path),
        "verified": verify,
        **state,
        "stopped": state["stopped"] or "still running, or killed",
        "attempts": max((row["attempt"] for row in rows), default=0),
        "last_step": steps[-1] if steps else None,
        "last_validation": valid[-1] if valid else None,
        "best_validation": min((row for row in valid if row.get("loss") is not None), key=_loss, default=None),
        "last_evaluations": {row["name"]: row for row in evals},
        "best_evaluations": _best_evaluations(evals),
        "best_checkpoint": _best_checkpoint(path, settings, rows),
        "last_save": saves[-1] if saves else None,
        "last_row_time": last_write_time(rows, metrics) if rows else None,
        "smoothed_loss": smoothed(losses),
        "losses": losses,
        "elapsed_s": float(np.nanmax(read_record(metrics).columns["seconds"], initial=0.0)),  # of all starts
        **planned(path, settings),
        "checkpoints": [one.name for one in list_checkpoints(path / CHECKPOINTS)],
        "damaged": [one.name for some in (list_broken, list_damaged) for one in some(path / CHECKPOINTS)],
        "settings_digest": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12],
        "settings": settings,
        "changed": changed_histories(row for row in rows if row["event"] == "start"),
    }


def _loss(row: dict[str, Any]) -> float:
    loss = float(row["loss"])
    return loss if loss == loss else float("inf")  # because: a NaN is below nothing, and would be the least


def _best_evaluations(rows: Rows) -> dict[str, dict[str, Any]]:
    """Return for each task the row that is best by its headline measure."""
    names = {row["name"]: f"eval/{row['name']}/{row['headline']}" for row in rows}
    worth = {name: score_by_step(rows, measure) for name, measure in names.items()}
    best = {name: max(found, key=lambda step: (found[step], -step)) for name, found in worth.items() if found}
    return {row["name"]: row for row in rows if best.get(row["name"]) == row["step"]}


def _best_checkpoint(path: Path, settings: dict[str, Any], rows: Rows) -> dict[str, Any] | None:
    """Return which checkpoint RUN@best names; None for a run that does not keep the best."""
    if not settings.get("checkpoint", {}).get("keep_best"):
        return None
    try:
        name = best_checkpoint(path).name
    except MissingInputError:
        return None
    by = settings["checkpoint"]["best_by"]
    step = step_from_name(name)
    value = next(found[by] for row in rows if row["step"] == step and by in (found := row_measures(row)))
    return {"name": name, "by": by, "value": value}


def planned(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what follows from a run's settings; Nones if this version does not know all of them."""
    from lmtrain.train.config import read_run_config
    from lmtrain.train.layouts.layout_table import layout_words

    try:
        config = read_run_config(path)
    except LmtrainError:
        return {"steps": settings.get("train", {}).get("steps"), "parameters": None, "layout": None}
    return {
        "steps": config.total_steps,
        "parameters": config.model.num_parameters,
        "layout": layout_words(config.parallel),
    }


def run_lines(facts: dict[str, Any], curve: bool) -> Iterator[tuple[str, str]]:
    """Yield a run's facts as name and text; `curve` says whether the output can show block characters."""
    row, losses = facts["last_step"] or {}, facts["losses"]
    step, steps = int(row.get("step", 0)), facts["steps"]
    share = f" of {steps:,} ({step / steps:.0%})" if steps else ""
    yield "state", state_words(facts)
    yield "step", f"{step:,}{share}" + (f", attempt {facts['attempts']}" if facts["attempts"] > 1 else "")
    if losses:
        smooth = "" if facts["smoothed_loss"] is None else f", smoothed {facts['smoothed_loss']:.4f}"
        yield "loss", f"{losses[-1]:.4f}{smooth}, at first {losses[0]:.4f}"
        if curve:
            yield "curve", sparkline(losses, _CURVE)
    best, last = facts["best_validation"], facts["last_validation"]
    if best is not None:
        yield "best validation", _valid_words(best)
    if last is not None and last is not best:
        yield "last validation", _valid_words(last)
    for name, row_ in facts["last_evaluations"].items():
        yield "evaluation", f"{name}: {_eval_words(row_, facts['best_evaluations'].get(name))}"
    if found := facts["best_checkpoint"]:
        value = format_measure(found["by"], found["value"])
        yield "best checkpoint", f"{found['name']}, by {found['by']} {value}; {facts['run']}@best names it"
    yield from _pace(facts, row)
    yield "saved", _save_words(facts)
    if facts["damaged"]:
        yield "damaged", ", ".join(facts["damaged"])
    yield from made_of(facts)
    for key, values in facts["changed"].items():
        yield "changed", f"{key}: {held_words(values)}"
    yield "settings", f"digest {facts['settings_digest']}; --all lists them"


def _valid_words(row: dict[str, Any]) -> str:
    loss = "-" if row.get("loss") is None else f"{row['loss']:.4f}"
    quality = f", perplexity {row['ppl']:.2f} a token" if "ppl" in row else ""
    quality += f", accuracy {percent(row['accuracy'])}" if "accuracy" in row else ""
    return f"{loss}{terms(row)}{domains(row)} at step {row['step']:,}{quality}"


def _eval_words(row: dict[str, Any], best: dict[str, Any] | None) -> str:
    last, most = eval_figures(row)[0], eval_figures(best or row)[0]
    found = f"{last} at step {row['step']:,}"
    return found if best is None or most == last else f"{found}; the best {most} at step {best['step']:,}"


def state_words(facts: dict[str, Any]) -> str:
    stop, seen = facts["stopped"], facts["last_row_time"]
    since = f" {ago(seen)}" if seen else ""
    last = f", last row{since}" if since else ""
    saved = facts.get("checkpoints", True)
    again = "the same command goes on" if saved else "nothing is saved, and the same command begins anew"
    match facts["state"]:
        case "finished":
            return f"finished{since}"
        case "running":
            return f"running: {facts['process']}{last}"
        case "out of sight":
            return f"running or killed: {facts['process']} cannot be seen from here{last}"
        case "killed":
            return f"killed{since} (it left no stop.json); {again}"
        case "stopped":
            return f"stopped by {stop['cause']}{since}; {again}"
    return f"failed with exit code {stop.get('exit_code')}{since}: {stop.get('cause')}"


def age_s(time: str) -> float:
    """Return for how long it has been, by this machine's clock, which may be behind the other one's."""
    return max((datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds(), 0.0)


def ago(time: str) -> str:
    return f"{format_seconds(age_s(time))} ago"


def _pace(facts: dict[str, Any], row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    figures = dict(compute(row))
    if row:
        yield "speed", f"{figures['speed']}, {figures['compute']}, memory {figures['memory']}"
        skipped = f", skipped {row['skipped']}" if row.get("skipped") else ""
        yield "optimizer", f"learning rate {row['lr']:.2e}, gradient norm {row['grad_norm']:.3f}{skipped}"
    if row.get("tokens") is not None:
        yield "tokens", f"{format_count(row['tokens'])} in {format_count(row['samples'])} samples"
    left = f", {format_seconds(row['eta_s'])} left" if facts["state"] == "running" and row.get("eta_s") else ""
    yield "time", format_seconds(facts["elapsed_s"]) + left


def _save_words(facts: dict[str, Any]) -> str:
    names, save = facts["checkpoints"], facts["last_save"]
    if not names:
        return "no checkpoint"
    few = names[-1] if len(names) == 1 else f"{names[-1]} and {len(names) - 1} older"
    if save is None or f"{save['saved_step']:08d}" not in names[-1]:
        return few
    when = f", {ago(save['time'])}" if "time" in save else ""
    return f"{few}: {format_bytes(save['bytes'])} in {format_seconds(save['write_s'])}{when}"


def made_of(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a run's model, data and layout, in words."""
    model, data, precision = (facts["settings"].get(key, {}) for key in ("model", "data", "precision"))
    yield "model", model_words(model, facts["parameters"])
    paths = [data["path"]] if data.get("path") else [part["path"] for part in data.get("datasets", [])]
    yield "data", f"{data.get('kind', '-')}: {', '.join(paths[:2])}" + (" ..." if len(paths) > 2 else "")
    yield "layout", f"{facts['layout'] or 'not known'}; {precision.get('kind', '-')}"


def model_words(model: dict[str, Any], parameters: int | None = None) -> str:
    """Return a model in words, from settings that another version may have written."""
    size = "" if parameters is None else f", {format_count(parameters)} parameters"
    shape = [plural(model["num_layers"], "layer")] if "num_layers" in model else []
    shape += [f"{model['width']} wide"] if "width" in model else []
    length = [f"sequences of {model['seq_len']}"] if "seq_len" in model else []
    return ", ".join([f"{model.get('kind', '-')}{size}", *shape, *length])


def held_words(values: History) -> str:
    return ", ".join(f"{show(value)} from step {step:,}" for step, value in values)


def finite(value: Any) -> Any:
    """Return what JSON can hold of a number: neither NaN nor a text."""
    return value if type(value) in (int, float) and value - value == 0 else None


def four(value: float | str | None) -> str:
    """Return a loss as a table shows it; a text, such as "nan" from metrics.jsonl, stays as it is."""
    return "" if value is None else value if isinstance(value, str) else f"{value:.4f}"
