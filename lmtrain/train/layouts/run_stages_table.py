"""The table of a run's stages that --dry-run shows: what each trains on, how, for how long, and whether it fits.

Torch-free. A row is plain data, for JSON; `stage_lines` writes the rows for people, in 80 columns or more.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.read_verified_contents import Contents
from lmtrain.data.data_settings import BlendSettings, DataSettings, source_names
from lmtrain.data.resume_position_by_source import KEY_DIGITS
from lmtrain.errors import join_few
from lmtrain.models.model_settings import ModelSettings
from lmtrain.plan.run_estimates.rank_memory_by_purpose import count_rank_bytes, fullest_rank
from lmtrain.runfolder.run_facts import stages_of
from lmtrain.train.layouts.dry_run_speed_and_memory import (
    dry_run_facts,
    measurement_facts,
    planned_run,
    predict_step,
    with_this_machine,
)
from lmtrain.train.layouts.ranks_and_memory_table import short_bytes
from lmtrain.train.run_config import RunConfig, StageConfig
from lmtrain.train.run_stage_settings import LENGTHS
from lmtrain.train.startup_checks.preflight import Inputs
from lmtrain.units import format_bytes, format_count, format_seconds, plural

MIN_WIDTH, MAX_WIDTH = 80, 120  # columns of the table's text lines
_SHOWN_SOURCES = 8  # sources with the largest shares; the others are added up
_OPTIONAL_COLUMNS = ("micro", "time", "memory")  # left out in this order if the table is too wide
_INDENT = "    "
_SECONDS = ("seconds", "seconds_low", "seconds_high")  # keys of a stage's predicted duration: likely, and its range


def dry_run_facts_of_stages(config: RunConfig, inputs: Inputs, *, runs_here: bool = False) -> dict[str, Any]:
    """Return everything that a dry run shows of a run with training stages, as key -> value: the same as
    `dry_run_facts`, with layout and memory of the stage that needs most memory, and under "stages" the rows of
    `stage_rows`. `runs_here` is True if all processes of the layout would run on this machine.
    """
    step = 0 if inputs.resume_from is None else Contents(inputs.resume_from).manifest.step
    rows = stage_rows(config, inputs, step=step, runs_here=runs_here)
    vocab_size, stages = inputs.model.shape.vocab_size, config.stage_configs
    fullest = stages[max(range(len(rows)), key=lambda number: rows[number]["memory_bytes"])]
    model = fullest.model.with_vocab(vocab_size)
    facts = dry_run_facts(fullest, replace(inputs, model=model), runs_here=runs_here)
    flops = sum(
        stage.flops_per_token(stage.model.with_vocab(vocab_size)) * row["tokens"]
        for stage, row in zip(stages, rows, strict=True)
    )
    facts |= {"tokens": sum(row["tokens"] for row in rows), "model_flops": flops}
    facts["memory"] = f"in the stage {fullest.stage_name}, {facts['memory']}"
    facts |= _training_time(rows)
    for key in ("training_samples", "epochs", "steps_per_epoch", "energy", "validation", "evaluation"):
        facts.pop(key, None)  # because: they differ by stage, and the table has epochs by source
    if len({(stage.train.global_batch, stage.train.micro_batch, stage.seq_len) for stage in stages}) > 1:
        del facts["tokens_per_step"], facts["microbatches_per_step"]
    measured = [(stage.stage_name, measurement_facts(stage, left)) for stage, left in inputs.stages(config)]
    for key in ("validation", "evaluation"):
        facts |= _by_stage(key, [(name, stage_facts.get(key)) for name, stage_facts in measured])
    return facts | {"stages": rows}


def _training_time(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return {"step_time": text} with the predicted duration of the steps of all stages together; {} if `rows`, those
    of `stage_rows`, have no prediction.
    """
    if "seconds" not in rows[0]:
        return {}
    likely, low, high = (format_seconds(sum(row[key] for row in rows)) for key in _SECONDS)
    return {"step_time": f"{likely} ({low} to {high}) for the steps of all stages, predicted"}


def _by_stage(key: str, values: Sequence[tuple[str, str | None]]) -> dict[str, str]:
    """Return {key: text} that joins the texts of all stages: the text itself if only one occurs, else each text after
    the names of the stages that have it; {} if no stage has one. `values` has (stage name, text or None) of each stage.
    """
    texts = list(dict.fromkeys(text for _, text in values if text))
    if len(texts) <= 1:
        return {key: texts[0]} if texts else {}
    names = {text: join_few([name for name, other in values if other == text]) for text in texts}
    return {key: "; ".join(f"{names[text]}: {text}" for text in texts)}


def stage_rows(config: RunConfig, inputs: Inputs, *, step: int = 0, runs_here: bool = False) -> list[dict[str, Any]]:
    """Return a table row per training stage, in order, as key -> value: steps, samples, tokens, learning rates, batch
    sizes, sources, predicted memory and more; [] if the run has no stages. `step` is the step that the run has reached,
    and `inputs` are those of the stages that are left to train. `runs_here` is True if all processes of the layout
    would run on this machine.
    """
    inputs_of = {stage.stage_name: stage_inputs for stage, stage_inputs in inputs.stages(config)}
    tokens: dict[str, int] = {}  # content of a source -> its tokens that the run has read
    rows = []
    for stage, planned in zip(config.stage_configs, stages_of(config), strict=True):
        if not isinstance(stage, StageConfig):
            return []
        given = config.stages[stage.stage_name]
        status = "done" if stage.end_step <= step else "current" if stage.first_step < step else "ahead"
        samples = stage.batch_plan.range_of(stage.end_step)[0] - stage.batch_plan.range_of(stage.first_step)[0]
        length, amount = next((key, value) for key in LENGTHS if (value := getattr(given, key)) is not None)
        totals = {"steps": planned.num_steps, "samples": samples, "tokens": planned.tokens}
        rows.append({
            "stage": stage.stage_name, "status": status, "first_step": stage.first_step, "end_step": stage.end_step,
            **totals, "given": {length: amount}, "is_rounded": totals[length] != amount,
            "lr_first": planned.lr_first, "lr_last": planned.lr_last, "batch_sizes": [*planned.batch_sizes],
            "micro_batch": stage.train.micro_batch, "seq_len": planned.seq_len,
            "sources": _source_rows(stage, inputs_of.get(stage.stage_name), tokens),
            **({"reached_step": step} if status == "current" else {}),
            **_forecast(stage, inputs.model, runs_here=runs_here),
        })  # fmt: skip
    return rows


def _source_rows(stage: StageConfig, inputs: Inputs | None, tokens: dict[str, int]) -> list[dict[str, Any]]:
    """Return a row, key -> value, per dataset that a stage trains on: name, path, share, the samples and tokens that
    the stage reads, and the epochs read in the stage and up to its end. `tokens` maps a dataset's content key to the
    tokens that the run has read of it, and is updated in place. Without `inputs`, for a stage that has ended, there are
    only name, path and share.
    """
    if inputs is None:
        return [*_configured_sources(stage)]
    data, rows = inputs.data, []
    states = data.history.states_at(data.first_position) if data.history.origin <= data.first_position else {}
    for part, facts in zip(data.parts, data.contributions(stage.seq_len), strict=True):
        if part.key not in tokens:  # because: what stages before the first one in `inputs` have read is in the history
            read = [(key.split(), state.samples) for key, state in states.items()]
            tokens[part.key] = sum(n * int(key[1]) for key, n in read if key[0] == part.key[:KEY_DIGITS])
        tokens[part.key] += facts["run_tokens"]
        rows.append({
            "name": part.name, "dataset": facts["dataset"], "share": facts["share"], "samples": facts["run_samples"],
            "tokens": facts["run_tokens"], "epochs_in_stage": facts["run_tokens"] / max(part.num_tokens, 1),
            "epochs": tokens[part.key] / max(part.num_tokens, 1),
        })  # fmt: skip
    return rows


def _configured_sources(stage: StageConfig) -> Iterator[dict[str, Any]]:
    """Yield {"name": ..., "dataset": path, "share": ...} for each dataset in the data settings of a stage. The share is
    a fraction of 1, or None if the settings of a blend do not give all weights.
    """
    data = stage.data
    if isinstance(data, BlendSettings):
        weights = [part.weight for part in data.datasets]
        total = sum(weight or 0 for weight in weights)
        for name, part in zip(source_names(data.datasets), data.datasets, strict=True):
            share = None if None in weights or not total else (part.weight or 0) / total
            yield {"name": name, "dataset": part.path, "share": share}
    elif isinstance(data, DataSettings):
        yield {"name": Path(data.path).name, "dataset": data.path, "share": 1.0}


def _forecast(stage: StageConfig, model: ModelSettings, *, runs_here: bool) -> dict[str, Any]:
    """Return key -> value: the predicted bytes on the rank that needs most memory and, if config.hardware names a
    machine, whether they fit, the bytes of a device, and the seconds that the stage will take. Only the vocabulary size
    of `model` is used. `runs_here` is True if all processes of the layout would run on this machine.
    """
    run = planned_run(with_this_machine(stage, runs_here), stage.model.with_vocab(model.shape.vocab_size))
    memory_bytes, hardware = sum(count_rank_bytes(run, fullest_rank(run)).values()), stage.hardware
    if hardware is None:
        return {"memory_bytes": memory_bytes}
    step = predict_step(run, hardware, stage.batch_plan.count_steps(stage.first_step, stage.end_step))
    seconds = [round(each * stage.num_steps, 3) for each in (step.likely_s, step.low_s, step.high_s)]
    return {
        "memory_bytes": memory_bytes, "fits": memory_bytes <= hardware.memory_bytes,
        "device_bytes": round(hardware.memory_bytes),
        **dict(zip(_SECONDS, seconds, strict=True)),
    }  # fmt: skip


def stage_lines(rows: Sequence[Mapping[str, Any]], width: int = MIN_WIDTH) -> Iterator[str]:
    """Yield the lines of the table of training stages, at most `width` columns wide: column titles, a line per row with
    the stage's datasets below it, and then the sentences of `stage_notes`. `rows` are those of `stage_rows`.
    """
    width = min(max(width, MIN_WIDTH), MAX_WIDTH)
    cells = [_cells(row) for row in rows]
    columns = [column for column in cells[0] if any(row[column] for row in cells)]
    widths = {column: max(len(column), *(len(row[column]) for row in cells)) for column in columns}
    # because: a long name gets a line of its own, so that the numbers stay below each other
    while (room := width - sum(widths[column] + 1 for column in columns[1:])) < len("stage") and columns[-1] != "stage":
        columns.remove(next(column for column in (*_OPTIONAL_COLUMNS, columns[-1]) if column in columns))
    widths["stage"] = min(widths["stage"], max(room, len("stage")))
    for row, texts in zip([None, *rows], [dict.fromkeys(columns, ""), *cells], strict=True):
        texts = texts if row is not None else {column: column for column in columns}
        if len(texts["stage"]) > widths["stage"]:
            yield texts["stage"]
            texts = texts | {"stage": ""}
        numbers = " ".join(texts[column].rjust(widths[column]) for column in columns[1:])
        yield f"{texts['stage'].ljust(widths['stage'])} {numbers}".rstrip()
        if row is not None:
            yield from textwrap.wrap(
                _source_text(row["sources"]), width, initial_indent=_INDENT[2:], subsequent_indent=_INDENT,
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip
    for note in stage_notes(rows):
        yield from textwrap.wrap(note, width, subsequent_indent=_INDENT, break_on_hyphens=False)


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells of a stage's line in the table, as column title -> text, "" for an empty cell. `row` is one of
    `stage_rows`.
    """
    state = {"done": "done", "current": "now", "ahead": ""}[row["status"]]
    smallest, largest = row["batch_sizes"][0], row["batch_sizes"][-1]
    return {
        "stage": row["stage"], "state": state, "steps": _count(row["steps"]), "tokens": format_count(row["tokens"]),
        "batch": str(largest) if smallest == largest else f"{smallest}-{largest}",
        "micro": str(row["micro_batch"]), "seq": _count(row["seq_len"]), "lr": f"{row['lr_first']:.3g}",
        "to lr": f"{row['lr_last']:.3g}", "memory": short_bytes(row["memory_bytes"]),
        "time": format_seconds(row["seconds"]) if "seconds" in row else "",
    }  # fmt: skip


def _source_text(sources: Sequence[Mapping[str, Any]]) -> str:
    """Return a list of a stage's datasets as text, each with its share and the epochs read so far, largest share first.
    Of many datasets the smallest are counted as "N others".
    """
    ordered = sorted(sources, key=lambda source: -(source["share"] or 0.0))
    words = []
    for source in ordered[:_SHOWN_SOURCES]:
        share = "" if source["share"] is None or len(sources) == 1 else f" {source['share']:.1%}"
        epochs = "" if "epochs" not in source else f", {source['epochs']:.3g} epochs so far"
        words.append(f"{source['name']}{share}{epochs}")
    if rest := ordered[_SHOWN_SOURCES:]:
        total = sum(source["share"] or 0.0 for source in rest)
        most = max((source.get("epochs", 0.0) for source in rest), default=0.0)
        words.append(f"{len(rest):,} others {total:.1%}" + (f", at most {most:.3g} epochs" if most else ""))
    return "; ".join(words)


def stage_notes(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield sentences below the table of training stages: on the step that the run has reached, on each stage whose
    length was rounded up to whole steps, and on each that does not fit in memory. `rows` are those of `stage_rows`.
    """
    for row in rows:
        if "reached_step" in row:
            yield f"The run has reached step {row['reached_step']:,}, in the stage {row['stage']}."
    for row in (row for row in rows if row["is_rounded"]):
        (length, amount), = row["given"].items()
        steps = plural(row["steps"], "whole step", f"{row['steps']:,}")
        yield (
            f"stages.{row['stage']}.{length}={format_count(amount)} is rounded up to {steps}: "
            f"{row[length]:,} {length}."
        )
    for row in (row for row in rows if row.get("fits") is False):
        yield (
            f"The stage {row['stage']} does not fit: it needs {format_bytes(row['memory_bytes'])} of the "
            f"{format_bytes(row['device_bytes'])} of a device. Use a smaller stages.{row['stage']}.train.micro_batch, "
            f"or stages.{row['stage']}.recompute=full."
        )


def _count(number: int) -> str:
    """Return a count as it is below ten thousand, and with three significant digits above."""
    return str(number) if number < 10_000 else format_count(number)
