"""Adjustment of defaults that conflict with settings typed on the command line. Torch-free.

Called through RunConfig by code that composes the settings of a run, before they are checked. A default suits most
runs; a user who types `train.steps=20` has not asked for a hundred steps of warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from lmtrain.config.base import AdjustedDefault, show
from lmtrain.config.build import build_settings
from lmtrain.errors import LmtrainError
from lmtrain.layout import divisors
from lmtrain.models.model_settings import ModelSettings
from lmtrain.optim.schedule_settings import ScheduleSettings
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.train.train_settings import TrainSettings, count_steps


def adjust_defaults(tree: dict[str, Any], typed: Mapping[str, str]) -> Iterator[AdjustedDefault]:
    """Change conflicting defaults in `tree` in place and yield each change; problems of other kinds remain."""
    train = tree.get("train")
    if not isinstance(train, dict):
        return
    for key, rival in (("steps", "tokens"), ("tokens", "steps")):
        if _is_typed(f"train.{key}", typed) and not _is_typed(f"train.{rival}", typed) and train.get(key) is not None:
            value = typed.get(f"train.{key}", show(train[key]))
            yield from _adjust(train, f"train.{rival}", None, f"train.{key}={value}")
    yield from _adjust_samples(tree, typed)
    yield from _adjust_micro_batch(tree, train, typed)
    yield from _adjust_warm_up(tree, typed)


def _adjust_samples(tree: dict[str, Any], typed: Mapping[str, str]) -> Iterator[AdjustedDefault]:
    """Choose masked samples for a BERT model, which learns from no other samples, unless the kind of data is typed."""
    data, model = tree.get("data"), tree.get("model")
    if not isinstance(data, dict) or not isinstance(model, dict) or "data" in typed or "data.kind" in typed:
        return
    if (model.get("kind"), data.get("kind")) == ("bert", "dataset"):
        tree["data"] = {"kind": "masked"} | {key: value for key, value in data.items() if f"data.{key}" in typed}
        yield AdjustedDefault("data", "masked", "dataset", f"model={typed.get('model', 'bert')}")


def _adjust_micro_batch(
    tree: dict[str, Any], train: dict[str, Any], typed: Mapping[str, str]
) -> Iterator[AdjustedDefault]:
    """Shrink the micro-batch to a divisor of each replica's share of the batch."""
    settings: TrainSettings | None = _build_section(TrainSettings, tree, "train")
    parallel: ParallelSettings | None = _build_section(ParallelSettings, tree, "parallel")
    if settings is None or parallel is None or _is_typed("train.micro_batch", typed):
        return
    rampup, replicas = settings.rampup, parallel.layout.dp
    share, rest = divmod(
        math.gcd(settings.global_batch, *((rampup.start, rampup.increment) if rampup else ())), replicas
    )
    if rest == 0 and share % settings.micro_batch:
        cause = f"train.global_batch={settings.global_batch}" + f" on {replicas} copies of the model" * (replicas > 1)
        largest = divisors(share, settings.micro_batch)[-1]
        yield from _adjust(train, "train.micro_batch", largest, cause)


def _adjust_warm_up(tree: dict[str, Any], typed: Mapping[str, str]) -> Iterator[AdjustedDefault]:
    """Shorten the warm-up if it does not fit into the run."""
    schedule: ScheduleSettings | None = _build_section(ScheduleSettings, tree, "schedule")
    settings: TrainSettings | None = _build_section(TrainSettings, tree, "train")
    model: ModelSettings | None = _build_section(ModelSettings, tree, "model")
    if schedule is None or settings is None or model is None or _is_typed("schedule.warmup_steps", typed):
        return
    if settings.rampup is not None and settings.steps is None:
        return  # because: the ramp-up is not checked yet and may never reach the full batch
    steps = count_steps(settings, model.shape.seq_len)
    cause = f"train.steps={steps}" if settings.steps else f"train.tokens={settings.tokens}, {steps} steps"
    if any(problem.key == "warmup_steps" for problem in schedule.problems_in_run(steps)):
        yield from _adjust(tree["schedule"], "schedule.warmup_steps", steps // 10, cause)


def _adjust(section: dict[str, Any], key: str, value: Any, cause: str) -> Iterator[AdjustedDefault]:
    """Set a key of a section of the tree, and yield the change if the value differs."""
    name = key.rpartition(".")[2]
    previous, section[name] = section.get(name), value
    if previous != value:
        yield AdjustedDefault(key, value, previous, cause)


def _build_section(cls: Any, tree: dict[str, Any], name: str) -> Any:
    """Return the settings of a section, or None if the section is wrong."""
    try:
        return build_settings(cls, tree.get(name), name)
    except LmtrainError:
        return None


def _is_typed(key: str, typed: Mapping[str, str]) -> bool:
    """Return whether a key is typed, by itself or within its group as in `train={steps: 20}`."""
    group, _, name = key.partition(".")
    return key in typed or f"{name}:" in typed.get(group, "")
