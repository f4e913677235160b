"""The stages of a recorded run: for inspect, watch and report. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmtrain.config.settings_builder import build_settings
from lmtrain.errors import LmtrainError
from lmtrain.train.run_config import RunConfig
from lmtrain.units import format_count


def read_stages(settings: Mapping[str, Any]) -> tuple[RunConfig, ...]:
    """Return the settings of each stage of a run from its recorded `settings`; () if it has no stages, or if this
    version does not accept its settings.
    """
    if not settings.get("stages"):
        return ()
    try:
        return build_settings(RunConfig, dict(settings)).stage_configs
    except LmtrainError:
        return ()


def stage_facts(settings: Mapping[str, Any], step: int) -> dict[str, Any] | None:
    """Return the stage of the last of `step` steps as plain data: its name, number, first and last step, counted from
    1; None if the run has no stages, or none that can be read.
    """
    stages = read_stages(settings)
    if not stages:
        return None
    number = next((k for k, stage in enumerate(stages) if step <= stage.end_step), len(stages) - 1)
    stage = stages[number]
    return {
        "name": stage.stage_name, "number": number + 1, "stages": len(stages), "first_step": stage.first_step + 1,
        "last_step": stage.end_step,
    }  # fmt: skip


def describe_stage(facts: Mapping[str, Any]) -> str:
    """Return the facts of `stage_facts` in words, as in "decay, 2 of 3, steps 21 to 30"."""
    return (
        f"{facts['name']}, {facts['number']} of {facts['stages']}, steps {facts['first_step']:,} to "
        f"{facts['last_step']:,}"
    )


def stage_table(stages: Sequence[RunConfig]) -> list[dict[str, str]]:
    """Return a table of stages as rows of column -> text: steps, tokens, batch, length, learning rate, data."""
    rows = []
    for stage in stages:
        sizes = stage.batch_plan.sizes_between(stage.first_step, stage.end_step)
        batches = dict.fromkeys((sizes[0], sizes[-1]))
        rates = (stage.learning_rate(step) for step in (stage.first_step, stage.end_step - 1))
        rows.append({
            "<stage": stage.stage_name, "steps": f"{stage.first_step + 1:,} to {stage.end_step:,}",
            "tokens": format_count(stage.num_tokens), "batch": " to ".join(map(str, batches)),
            "sequence": f"{stage.seq_len:,}", "learning rate": " to ".join(f"{rate:.3g}" for rate in rates),
            "<data": _data_text(stage.data.to_dict()),
        })  # fmt: skip
    return rows


def _data_text(data: Mapping[str, Any]) -> str:
    """Return the datasets of a stage by their paths, with weights if it has several, the largest first."""
    if data.get("path"):
        return str(data["path"])
    parts = sorted(data.get("datasets") or (), key=lambda part: -(part.get("weight") or 0))
    shown = [f"{part['path']} {part['weight']:g}" if part.get("weight") else str(part["path"]) for part in parts[:8]]
    return ", ".join([*shown, *([f"{len(parts) - 8:,} more"] if len(parts) > 8 else [])])
