"""Adjustment of defaults that conflict with settings typed on the command line. Torch-free.

Called through RunConfig by code that composes the settings of a run, before they are checked. A default suits most
runs; a user who types `train.steps=20` has not asked for a hundred steps of warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from lmtrain.config.base import GaveWay, show
from lmtrain.config.build import build_settings
from lmtrain.errors import LmtrainError
from lmtrain.layout import divisors
from lmtrain.models.model_settings import ModelSettings
from lmtrain.optim.schedule_settings import ScheduleSettings
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.train.train_settings import TrainSettings, count_steps


def give_way(tree: dict[str, Any], typed: Mapping[str, str]) -> Iterator[GaveWay]:
    """Change conflicting defaults in `tree` in place and yield each change; problems of other kinds remain."""
    train = tree.get("train")
    if not isinstance(train, dict):
        return
    for key, other in (("steps", "tokens"), ("tokens", "steps")):
        if _is_typed(f"train.{key}", typed) and not _is_typed(f"train.{other}", typed) and train.get(key) is not None:
            value = typed.get(f"train.{key}", show(train[key]))
            yield from _changed(train, f"train.{other}", None, f"train.{key}={value}")
    yield from _samples(tree, typed)
    yield from _micro_batch(tree, train, typed)
    yield from _warm_up(tree, typed)


def _samples(tree: dict[str, Any], typed: Mapping[str, str]) -> Iterator[GaveWay]:
    """Choose masked samples for a BERT model, which learns from no other samples, unless the kind of data is typed."""
    data, model = tree.get("data"), tree.get("model")
    if not isinstance(data, dict) or not isinstance(model, dict) or "data" in typed or "data.kind" in typed:
        return
    if (model.get("kind"), data.get("kind")) == ("bert", "dataset"):
        tree["data"] = {"kind": "masked"} | {key: value for key, value in data.items() if f"data.{key}" in typed}
        yield GaveWay("data", "masked", "dataset", f"model={typed.get('model', 'bert')}")


def _micro_batch(tree: dict[str, Any], train: dict[str, Any], typed: Mapping[str, str]) -> Iterator[GaveWay]:
    settings: TrainSettings | None = _part(TrainSettings, tree, "train")
    parallel: ParallelSettings | None = _part(ParallelSettings, tree, "parallel")
    if settings is None or parallel is None or _is_typed("train.micro_batch", typed):
        return
    rampup, copies = settings.rampup, parallel.layout.dp
    share, rest = divmod(
        math.gcd(settings.global_batch, *((rampup.start, rampup.increment) if rampup else ())), copies
    )
    if rest == 0 and share % settings.micro_batch:
        cause = f"train.global_batch={settings.global_batch}" + f" on {copies} copies of the model" * (copies > 1)
        largest = divisors(share, settings.micro_batch)[-1]
        yield from _changed(train, "train.micro_batch", largest, cause)


def _warm_up(tree: dict[str, Any], typed: Mapping[str, str]) -> Iterator[GaveWay]:
    schedule: ScheduleSettings | None = _part(ScheduleSettings, tree, "schedule")
    settings: TrainSettings | None = _part(TrainSettings, tree, "train")
    model: ModelSettings | None = _part(ModelSettings, tree, "model")
    if schedule is None or settings is None or model is None or _is_typed("schedule.warmup_steps", typed):
        return
    if settings.rampup is not None and settings.steps is None:
        return  # because: the ramp-up is not checked yet and may never reach the full batch
    steps = count_steps(settings, model.shape.seq_len)
    said = f"train.steps={steps}" if settings.steps else f"train.tokens={settings.tokens}, {steps} steps"
    if any(problem.key == "warmup_steps" for problem in schedule.problems_in_run(steps)):
        yield from _changed(tree["schedule"], "schedule.warmup_steps", steps // 10, said)


def _changed(section: dict[str, Any], key: str, value: Any, cause: str) -> Iterator[GaveWay]:
    name = key.rpartition(".")[2]
    before, section[name] = section.get(name), value
    if before != value:
        yield GaveWay(key, value, before, cause)


def _part(cls: Any, tree: dict[str, Any], name: str) -> Any:
    """Return the settings of a section, or None if the section is wrong."""
    try:
        return build_settings(cls, tree.get(name), name)
    except LmtrainError:
        return None


def _is_typed(key: str, typed: Mapping[str, str]) -> bool:
    """Return whether a key is typed, by itself or within its group as in `train={steps: 20}`."""
    group, _, name = key.partition(".")
    return key in typed or f"{name}:" in typed.get(group, "")
