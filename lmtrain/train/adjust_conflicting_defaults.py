"""Adjustment of defaults that conflict with settings typed on the command line. Torch-free.

Called through RunConfig by code that composes the settings of a run, before they are checked. A default suits most
runs; a user who types `train.steps=20` has not asked for a hundred steps of warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from lmtrain.config.build_typed_settings import build_settings
from lmtrain.config.settings_base import AdjustedDefault
from lmtrain.errors import LmtrainError
from lmtrain.layout import divisors
from lmtrain.models.model_settings import ModelSettings
from lmtrain.optim.schedule_settings import ScheduleSettings
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.train.rules_between_settings import rampup_problems
from lmtrain.train.train_settings import TrainSettings, count_steps


def adjust_defaults(tree: dict[str, Any], typed_values: Mapping[str, str]) -> Iterator[AdjustedDefault]:
    """Change, in place, the defaults in `tree` that conflict with settings typed on the command line, and yield an
    AdjustedDefault for each change. `tree` holds all settings as nested dicts; `typed_values` maps each dotted key that
    was typed to the text of its value. Other wrong settings are left as they are, for later checks.
    """
    train = tree.get("train")
    if not isinstance(train, dict):
        return
    for key, rival in (("steps", "tokens"), ("tokens", "steps")):
        is_chosen = f"train.{key}" in typed_values and f"train.{rival}" not in typed_values
        if is_chosen and train.get(key) is not None:
            yield from _adjust(train, f"train.{rival}", None, f"train.{key}={typed_values[f'train.{key}']}")
    yield from _adjust_samples(tree, typed_values)
    yield from _adjust_micro_batch(tree, train, typed_values)
    if not tree.get("stages"):
        yield from _adjust_warm_up(tree, typed_values)


def _adjust_samples(tree: dict[str, Any], typed_values: Mapping[str, str]) -> Iterator[AdjustedDefault]:
    """Set `data.kind=masked` in `tree` for a BERT model, which can only learn from masked samples, and yield the
    change. Do nothing if the user typed `data` or `data.kind`; `typed_values` maps each key typed on the command line
    to its text.
    """
    data, model = tree.get("data"), tree.get("model")
    if not isinstance(data, dict) or not isinstance(model, dict) or {"data", "data.kind"} & typed_values.keys():
        return
    if (model.get("kind"), data.get("kind")) == ("bert", "dataset"):
        tree["data"] = {"kind": "masked"} | {key: value for key, value in data.items() if f"data.{key}" in typed_values}
        yield AdjustedDefault("data", "masked", "dataset", f"model={typed_values.get('model', 'bert')}")


def _adjust_micro_batch(
    tree: dict[str, Any], train: dict[str, Any], typed_values: Mapping[str, str]
) -> Iterator[AdjustedDefault]:
    """Lower the default `train.micro_batch` so that it divides the number of samples of a step per data-parallel
    replica. `train` is the `train` group of `tree`; `typed_values` maps each key typed on the command line to its text.
    """
    settings: TrainSettings | None = _build_section(TrainSettings, tree, "train")
    parallel: ParallelSettings | None = _build_section(ParallelSettings, tree, "parallel")
    if settings is None or parallel is None or "train.micro_batch" in typed_values:
        return
    rampup, replicas = settings.rampup, parallel.layout.dp
    batches = {f"train.global_batch={settings.global_batch}": (
        settings.global_batch, *((rampup.start, rampup.increment) if rampup else ())
    )}  # fmt: skip
    batches |= {f"stages.{name}.train.global_batch={size}": (size,) for name, size in _stage_batches(tree)}
    for key, sizes in batches.items():
        share, rest = divmod(math.gcd(*sizes), replicas)
        if rest == 0 and share % train["micro_batch"]:
            cause = key + f" on {replicas} copies of the model" * (replicas > 1)
            yield from _adjust(train, "train.micro_batch", divisors(share, train["micro_batch"])[-1], cause)


def _stage_batches(tree: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield (name, global batch in samples) of each training stage in `tree` whose own settings give a global batch and
    no micro-batch.
    """
    stages = tree.get("stages")
    for name, stage in stages.items() if isinstance(stages, dict) else ():
        train = stage.get("train") if isinstance(stage, dict) else None
        if isinstance(train, dict) and "micro_batch" not in train and type(train.get("global_batch")) is int:
            yield str(name), max(train["global_batch"], 1)


def _adjust_warm_up(tree: dict[str, Any], typed_values: Mapping[str, str]) -> Iterator[AdjustedDefault]:
    """Shorten the default `schedule.warmup_steps` in `tree` to a tenth of the run's steps, and yield the change, if the
    schedule's check finds the run too short for the default. Do nothing if the user typed the key (`typed_values` has
    it), or if the number of steps cannot be told yet.
    """
    settings: TrainSettings | None = _build_section(TrainSettings, tree, "train")
    model: ModelSettings | None = _build_section(ModelSettings, tree, "model")
    if settings is None or model is None:
        return
    if settings.rampup is not None and settings.steps is None:
        # because: a wrong ramp-up, which is reported later, may never reach the full batch
        parallel: ParallelSettings | None = _build_section(ParallelSettings, tree, "parallel")
        if parallel is None or any(rampup_problems(settings, parallel.layout)):
            return
    steps = count_steps(settings, model.shape.seq_len)
    cause = f"train.steps={steps}" if settings.steps else f"train.tokens={settings.tokens}, {steps} steps"
    yield from shorten_warm_up(tree, typed_values, steps, cause)


def shorten_warm_up(
    tree: dict[str, Any], typed_values: Mapping[str, str], steps: int, cause: str
) -> Iterator[AdjustedDefault]:
    """Set `schedule.warmup_steps` in `tree` to `steps // 10`, and yield the change, if the schedule's check refuses the
    default for a schedule of `steps` steps. Do nothing if the user typed the key (`typed_values` has it). `cause` says
    in words why there are so few steps.
    """
    schedule: ScheduleSettings | None = _build_section(ScheduleSettings, tree, "schedule")
    if schedule is None or "schedule.warmup_steps" in typed_values:
        return
    if any(problem.key == "warmup_steps" for problem in schedule.problems_in_run(steps)):
        yield from _adjust(tree["schedule"], "schedule.warmup_steps", steps // 10, cause)


def _adjust(section: dict[str, Any], key: str, value: Any, cause: str) -> Iterator[AdjustedDefault]:
    """Set `key`, a dotted key such as `train.steps`, to `value` in `section`, the dict of the key's group (here
    `train`), and yield an AdjustedDefault if the old value was different. `cause` names the typed settings, as
    `key=value`, that made the change necessary.
    """
    name = key.rpartition(".")[2]
    previous, section[name] = section.get(name), value
    if previous != value:
        yield AdjustedDefault(key, value, previous, cause)


def _build_section(cls: Any, tree: dict[str, Any], name: str) -> Any:
    """Build the settings class `cls` from the group `name` of `tree`; return None if the group is missing or has a
    wrong value.
    """
    try:
        return build_settings(cls, tree.get(name), name)
    except LmtrainError:
        return None
