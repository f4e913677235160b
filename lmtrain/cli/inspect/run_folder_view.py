"""The most important facts about a run and its stages as text. Torch-free.

For `lmtrain inspect RUN`; watch, runs and report use parts of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.describe_merge import describe_origin
from lmtrain.config.settings_base import show
from lmtrain.errors import join_few, shorten
from lmtrain.observe.screen.metrics_row_text import (
    eval_figures,
    format_domains,
    format_percent,
    format_sources,
    format_terms,
    sparkline,
    speed_figures,
)
from lmtrain.runfolder.file_names import ENVIRONMENT
from lmtrain.runfolder.lineage import MERGED
from lmtrain.runfolder.run_facts import RunFacts, data_text
from lmtrain.runfolder.tensorboard_metric_names import AVERAGE_KEY
from lmtrain.start.facts_of_outputs.facts_of_run_folder import layout_text
from lmtrain.units import format_bytes, format_count, format_measure, format_seconds, plural

_CURVE_WIDTH = 40  # characters
_MAX_CHANGES = 6  # settings that differ from those of a run's parent
_MAX_VALUE = 60  # characters of a setting's value beside them


def run_lines(facts: dict[str, Any], show_curve: bool) -> Iterator[tuple[str, str]]:
    """Yield (label, text) lines that describe a run, for printing. `facts` is the dict of `run_facts`; with
    `show_curve`, one line is a small chart of the loss in block characters.
    """
    row, losses, now = facts["last_step"] or {}, facts["losses"], facts["facts"]
    share = f" of {now.steps:,} ({now.step / now.steps:.0%})" if now.steps else ""
    yield "state", describe_state(facts)
    yield "step", f"{now.step:,}{share}" + (f", {plural(now.starts, 'start')}" if now.starts > 1 else "")
    if now.stage_name:
        yield "stage", now.stage.text if now.stage else now.stage_name
    if losses:
        smooth = "" if facts["smoothed_loss"] is None else f", smoothed {facts['smoothed_loss']:.4f}"
        yield "loss", f"{losses[-1]:.4f}{smooth}, at first {losses[0]:.4f}"
        if show_curve:
            yield "curve", sparkline(losses, _CURVE_WIDTH)
    best, last = facts["best_validation"], facts["last_validation"]
    if best is not None:
        yield "best validation", _describe_validation(best)
    if last is not None and last is not best:
        yield "last validation", _describe_validation(last)
    for name, row_ in facts["last_evaluations"].items():
        yield "evaluation", f"{name}: {_describe_evaluation(row_, facts['best_evaluations'].get(name))}"
    if best_checkpoint := facts["best_checkpoint"]:
        value = format_measure(best_checkpoint["by"], best_checkpoint["value"])
        name, by = best_checkpoint["name"], best_checkpoint["by"]
        yield "best checkpoint", f"{name}, by {by} {value}; {facts['run']}@best names it"
    yield from _progress_lines(facts, row)
    yield "saved", _describe_saves(facts)
    if facts["damaged"]:
        yield "damaged", ", ".join(facts["damaged"])
    yield from lineage_lines(facts["lineage"])
    for label, text in ingredient_lines(now, facts["settings"]):
        yield label, f"{text}{now.embeddings_text}" if label == "model" else text
    yield "environment", _describe_environment(facts)
    for key, values in facts["changed"].items():
        held = (f"{show(value)} from step {step:,}" for step, value in values)
        yield "changed", f"{key}: {', '.join(held)}"
    yield "settings", f"digest {facts['settings_digest']}; --all lists them"


def _describe_validation(row: dict[str, Any]) -> str:
    """Return text about a validation: its loss and step and, if recorded, perplexity, accuracy and the loss of the
    averaged weights. `row` is its row in the metrics.
    """
    loss = "-" if row.get("loss") is None else f"{row['loss']:.4f}"
    quality = f", perplexity {row['ppl']:.2f} a token" if "ppl" in row else ""
    quality += f", accuracy {format_percent(row['accuracy'])}" if "accuracy" in row else ""
    average = row.get(AVERAGE_KEY)
    quality += f"; average of the weights {average['loss']:.4f}" if average else ""
    return f"{loss}{format_terms(row)}{format_sources(row)}{format_domains(row)} at step {row['step']:,}{quality}"


def _describe_evaluation(row: dict[str, Any], best: dict[str, Any] | None) -> str:
    """Return one evaluation's metrics row as text: its measures and its step. Add those of the row `best` if it has
    other values; `best` is None if no best row is known.
    """
    figures, best_figures = eval_figures(row)[0], eval_figures(best or row)[0]
    average = row.get(AVERAGE_KEY)
    of_average = f", of the average {eval_figures({**row, 'measures': average})[0]}" if average else ""
    text = f"{figures}{of_average} at step {row['step']:,}"
    if best is None or best_figures == figures:
        return text
    return f"{text}; the best {best_figures} at step {best['step']:,}"


def describe_state(facts: dict[str, Any]) -> str:
    """Return a run's state as text: running, finished, stopped, failed or killed, the time since its last metrics row,
    and whether the same command would resume it or begin anew. `facts` is the dict of `run_facts`.
    """
    stop, last_row_time = facts["stopped"], facts["last_row_time"]
    since = f" {ago(last_row_time)}" if last_row_time else ""
    last = f", last row{since}" if since else ""
    saved = facts.get("checkpoints", True)
    restart = "the same command goes on" if saved else "nothing is saved, and the same command begins anew"
    match facts["state"]:
        case "finished":
            return f"finished{since}"
        case "running":
            return f"running: {facts['process']}{last}"
        case "out of sight":
            return f"running or killed: {facts['process']} cannot be seen from here{last}"
        case "killed":
            return f"killed{since} (it left no stop.json); {restart}"
        case "stopped":
            return f"stopped by {stop['cause']}{since}; {restart}"
    return f"failed with exit code {stop.get('exit_code')}{since}: {stop.get('cause')}"


def age_s(time: str) -> float:
    """Return the seconds since an ISO time, at least 0; this machine's clock may be behind the writer's."""
    return max((datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds(), 0.0)


def ago(time: str) -> str:
    """Format the time since an ISO time, such as "5m03s ago"."""
    return f"{format_seconds(age_s(time))} ago"


def _progress_lines(facts: dict[str, Any], row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) lines for printing about a run's speed, optimizer, tokens and elapsed time. `facts` is the
    dict of `run_facts`, `row` the newest step row of its metrics, or {}.
    """
    figures, now = dict(speed_figures(row)), facts["facts"]
    if row:
        yield "speed", f"{now.speed_text or '-'}, {figures['compute']}, memory {figures['memory']}"
        skipped = f", skipped {row['skipped']}" if row.get("skipped") else ""
        yield "optimizer", f"learning rate {row['lr']:.2e}, gradient norm {row['grad_norm']:.3f}{skipped}"
    if now.tokens and row.get("samples") is not None:
        yield "tokens", f"{format_count(now.tokens)} in {format_count(row['samples'])} samples"
    time_left = f", {format_seconds(row['eta_s'])} left" if facts["state"] == "running" and row.get("eta_s") else ""
    yield "time trained", format_seconds(facts["elapsed_s"]) + time_left


def _describe_saves(facts: dict[str, Any]) -> str:
    """Return text about a run's checkpoints, from the dict of `run_facts`: the newest one's name, the number of older
    ones, and the newest one's size and writing time if recorded. Return "no checkpoint" if there is none.
    """
    names, save = facts["checkpoints"], facts["last_save"]
    if not names:
        return "no checkpoint"
    newest = names[-1] if len(names) == 1 else f"{names[-1]} and {len(names) - 1} older"
    if save is None or f"{save['saved_step']:08d}" not in names[-1]:
        return newest
    when = f", {ago(save['time'])}" if "time" in save else ""
    return f"{newest}: {format_bytes(save['bytes'])} in {format_seconds(save['write_s'])}{when}"


def lineage_lines(lineage: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield ("descends from", text) for each ancestor checkpoint in `lineage` (dicts, oldest first), beginning with the
    newest. The text names its run and step and the settings that differ.
    """
    for number in range(len(lineage), 0, -1):
        parent = lineage[number - 1]
        changes = [
            f"{key}={shorten(show(here), _MAX_VALUE)}"
            + (f" ({shorten(show(there), _MAX_VALUE)} there)" if there is not None else "")
            for key, (there, here) in parent["differences"].items()
        ]
        none_differs = "" if parent["kind"] == MERGED else ": no setting differs"
        differing = f": {join_few(changes, max_shown=_MAX_CHANGES)}" if changes else none_differs
        gone = "" if Path(parent["checkpoint"]).exists() else ", which is gone"
        yield "descends from", f"{describe_origin(lineage[:number])}{gone}{differing}"


def ingredient_lines(now: RunFacts, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (label, text) lines for printing about what a run is at a step: model, batch, data and parallel layout."""
    model, data, precision = (settings.get(key, {}) for key in ("model", "data", "precision"))
    yield "model", describe_model(model, now.parameters_text)
    train, is_staged = settings.get("train", {}), bool(settings.get("stages"))
    # because: settings of another version cannot be read, but without stages one batch holds for the whole run
    recorded = f"{show(train['global_batch'])} samples" if "global_batch" in train and not is_staged else ""
    if batch := now.batch_text or recorded:
        yield "batch", batch
    origin = f", made of {show(data['text'])}" if data.get("text") else ""
    yield "data", f"{data.get('kind', '-')}: {now.data or data_text(data)}{origin}"
    yield "layout", f"{layout_text(settings) or 'not known'}; {precision.get('kind', '-')}"


def _describe_environment(facts: dict[str, Any]) -> str:
    """Return text about a run's newest start: when, on which machine, with which versions, and which file has more."""
    environment = facts["environment"]
    packages = environment.get("packages")
    torch = packages.get("torch") if isinstance(packages, dict) else None
    parts = {"torch": torch, "on": environment.get("host"), "at": str(environment["started"] or "")[:16]}
    known = [f"{name} {shorten(str(value), _MAX_VALUE)}" for name, value in parts.items() if value]
    return f"{' '.join(known) or 'not recorded'}; {ENVIRONMENT}"


def describe_model(model: Mapping[str, Any], parameters: str = "") -> str:
    """Return a model's kind, size, layers and width as text. `model` is its settings as recorded; keys that are
    missing, as in settings of another version, are left out. `parameters` is the number of its parameters in words.
    """
    shape = [plural(model["num_layers"], "layer")] if "num_layers" in model else []
    shape += [f"{model['width']} wide"] if "width" in model else []
    return ", ".join([str(model.get("kind", "-")), *[parameters] * bool(parameters), *shape])


def format_loss(value: float | str | None) -> str:
    """Format a loss with four decimals; None becomes an empty text, and a text such as "nan" stays."""
    return "" if value is None else value if isinstance(value, str) else f"{value:.4f}"
