"""Facts for `lmtrain config explain` about settings of stages: keys such as stages.decay.optim.lr. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmtrain.cli.keys.settings_reference import Key
from lmtrain.cli.settings.explain_setting import ComposedSettings, key_facts
from lmtrain.config.compose import STAGE_CHOICES
from lmtrain.config.settings_base import show
from lmtrain.errors import LmtrainError, UsageError, join_few
from lmtrain.runfolder.settings_differences import flatten
from lmtrain.train.run_config import RunConfig, read_run_config
from lmtrain.train.stage_settings import GROUPS, stage_may_set


def split_stage_key(key: str) -> tuple[str, str] | None:
    """Return (name of the stage, key within the stage) of a key such as stages.decay.optim.lr; None for others."""
    field, _, rest = key.partition(".")
    name, _, inner = rest.partition(".")
    return (name, inner) if field == "stages" and inner else None


def stage_key_facts(
    key: str, keys: dict[str, list[Key]], run: ComposedSettings, without_overrides: ComposedSettings,
    config_dir: Path | None,
) -> dict[str, Any]:  # fmt: skip
    """Return facts about a key of a stage as plain data, those of `key_facts` and where the stage sets it. Raise
    UsageError if a stage has no such key. `keys` are the entries of all settings by name.
    """
    stage = split_stage_key(key)
    assert stage is not None
    name, inner = stage
    own = keys.get(f"stages.NAME.{inner}")
    if own is None and inner not in keys and inner not in STAGE_CHOICES:
        known = [word for word in keys if stage_may_set(word) and word.endswith(f".{inner.rpartition('.')[2]}")]
        hint = f"Did you mean {join_few([f'stages.{name}.{word}' for word in known])}?" if known else (
            "`lmtrain config explain stages` lists those of a run."
        )  # fmt: skip
        raise UsageError(f"{key} is not a setting. {hint}")
    if own is None and not stage_may_set(inner):
        raise UsageError(
            f"{key} is not a setting of a stage: {inner} cannot differ between the stages of a run. "
            f"`lmtrain config explain {inner}` explains it."
        )
    entries = own or keys[inner]
    facts = key_facts(entries, run, without_overrides, config_dir) | {"key": key}
    origin = run.origin(f"stages.{name}.{inner}")
    value = run.lookup(["stages", name, *inner.split(".")])
    if own is not None:
        facts.pop("run", None)  # because: it is the value of a key that only stages have
    else:
        facts["in_stage"] = f"the key {inner}, while the stage {name} lasts, in place of the run's"
    facts["stage"] = (
        {"value": value, "from": origin} if value is not None
        else {"value": None, "from": None, "why": f"not set in the stage {name}" + "; the run's holds" * (own is None)}
    )  # fmt: skip
    return facts


def held_by_stage(key: str, run: Path) -> list[dict[str, Any]]:
    """Return a row for each stage of a run: the value of the run's `key`, or of each key of that section, that holds in
    it. [] if the run has no stages, if all have the run's value, or if its settings cannot be read.
    """
    try:
        config = read_run_config(run)
        stages = config.stage_configs if config.stages else ()
    except LmtrainError:
        return []
    values = [(stage, dict(_values_of(stage))) for stage in stages]
    names = dict.fromkeys(
        name for _, stage_values in values for name in stage_values
        if key in (name, "all") or name.startswith((f"{key}.", f"{key}["))
    )  # fmt: skip
    differing = [name for name in names if len({show(stage_values.get(name)) for _, stage_values in values}) > 1]
    return [
        {"key": name, "value": stage_values[name], "step": stage.first_step + 1, "stage": stage.stage_name,
         "from": f"in the stage {stage.stage_name}, from step {stage.first_step + 1:,}"}
        for name in differing for stage, stage_values in values if name in stage_values
    ]  # fmt: skip


def _values_of(stage: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for each setting of a stage that another stage may have another value of."""
    yield from flatten({group: getattr(stage, group).to_dict() for group in GROUPS})
