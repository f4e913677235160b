"""Draws settings of runs, and changes of them that a later start may or may not make."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from tests.stages.page import Average, Data, Misfit, Part, RampUp, Schedule, Settings, Source, Stage, plan

NAMES = ("a", "b", "c", "d")
COPY_OF = {"a": "a2", "b": "b2", "a2": "a", "b2": "b"}
Sources = dict[str, Source]
T = TypeVar("T", Settings, Stage)


def draw_settings(rng: random.Random, sources: Sources) -> Settings:
    """Draw settings that a run can have, of 10 to 30 steps."""
    while True:
        stages = tuple(draw_stage(rng, f"s{number}", number) for number in range(rng.choice([0, 1, 2, 2, 3, 3, 4])))
        settings = Settings(
            data=draw_data(rng), schedule=draw_schedule(rng), stages=stages, steps=0 if stages else rng.randint(8, 20),
            seed=rng.randint(1, 9), seq_len=rng.choice([4, 6]), batch=rng.choice([2, 4]), rampup=draw_rampup(rng),
            lr=rng.choice([0.01, 0.003]), average=draw_average(rng),
        )  # fmt: skip
        if is_run(settings, sources) and 6 <= plan(settings, sources)[-1].end <= 30:
            return settings


def is_run(settings: Settings, sources: Sources) -> bool:
    try:
        return bool(plan(settings, sources))
    except Misfit:
        return False


def draw_stage(rng: random.Random, name: str, number: int) -> Stage:
    unit = rng.choice(["steps", "samples", "tokens"])
    length = {"steps": rng.randint(1, 9), "samples": rng.randint(1, 36), "tokens": rng.randint(1, 150)}[unit]
    return Stage(
        name, unit, length, **maybe(rng, 0.5, data=lambda: draw_data(rng, number)),
        **maybe(rng, 0.25, seq_len=lambda: rng.choice([4, 6, 8])),
        **maybe(rng, 0.3, batch=lambda: rng.choice([2, 4, 6])),
        **maybe(rng, 0.2, rampup=lambda: draw_rampup(rng), sets_rampup=lambda: True),
        **maybe(rng, 0.3, lr=lambda: rng.choice([0.02, 0.005])), **maybe(rng, 0.2, weight_decay=lambda: 0.3),
        **maybe(rng, 0.2, clip=lambda: 0.05), **maybe(rng, 0.35, schedule=lambda: draw_schedule(rng)),
        **maybe(rng, 0.1, stop_after=lambda: True),
    )  # fmt: skip


def maybe(rng: random.Random, chance: float, **values: Callable[[], Any]) -> dict[str, Any]:
    return {key: value() for key, value in values.items()} if rng.random() < chance else {}


def draw_rampup(rng: random.Random) -> RampUp | None:
    return rng.choice([None, None, (1, 1, rng.randint(1, 12)), (2, 2, rng.randint(1, 16))])


def draw_average(rng: random.Random) -> Average | None:
    return rng.choice([None, None, Average(rng.choice([0.5, 0.9]), rng.choice([1, 2, 3]), rng.choice([0, 0, 5]))])


def draw_schedule(rng: random.Random) -> Schedule:
    kind, warmup = rng.choice(["constant", "linear", "cosine", "inverse_sqrt", "wsd"]), rng.choice([0, 0, 1, 3])
    floor = 0.0 if kind == "constant" else rng.choice([0.0, 0.1])
    if kind != "wsd":
        return Schedule(kind, warmup, floor)
    return Schedule(kind, warmup, floor, rng.choice([0.2, 0.5]), rng.choice(["linear", "sqrt", "cosine"]))


def draw_data(rng: random.Random, number: int = 0) -> Data:
    names = rng.sample(NAMES, rng.choice([1, 2, 2, 3]))
    is_blend = len(names) > 1 or rng.random() < 0.5
    unit = rng.choice(["weight", "weight", "tokens", "epochs"]) if is_blend else "weight"
    parts = tuple(
        Part(
            rng.choice([name, COPY_OF.get(name, name)]), unit,
            rng.randint(100, 300) if unit == "tokens" else rng.randint(1, 3),
            restart=number > 0 and rng.random() < 0.15,
        )
        for name in names
    )  # fmt: skip
    if not is_blend:
        parts = tuple(replace(part, unit="weight", amount=1) for part in parts)
    return Data(
        parts, is_blend, rng.choice([0.0, 0.0, 0.25, 0.5]), rng.choice(["concatenate", "concatenate", "document"]),
        train_on_held_out=number > 0 and rng.random() < 0.2,
    )  # fmt: skip


def change(rng: random.Random, settings: Settings, sources: Sources) -> Settings:
    """Return settings of a run that differ in one thing, or a few."""
    for _ in range(50):
        changed = settings
        for _ in range(rng.choice([1, 1, 1, 2])):
            changed = rng.choice(CHANGES)(rng, changed)
        if changed != settings and is_run(changed, sources) and plan(changed, sources)[-1].end <= 40:
            return changed
    return settings


def _of_run(rng: random.Random, settings: Settings) -> Settings:
    values: dict[str, Any] = {
        "lr": 0.007, "schedule": draw_schedule(rng), "average": draw_average(rng), "weight_decay": 0.2, "clip": 0.1,
        "batch": rng.choice([2, 4, 6]), "rampup": draw_rampup(rng), "seq_len": rng.choice([4, 6, 8]), "seed": 77,
    }  # fmt: skip
    changed: Settings = _with_one(rng, settings, values)
    return changed


def _with_one(rng: random.Random, settings: Any, values: dict[str, Any]) -> Any:
    key = rng.choice([*values])
    return replace(settings, **{key: values[key]})


def _data_of_run(rng: random.Random, settings: Settings) -> Settings:
    return replace(settings, data=change_data(rng, settings.data))


def change_data(rng: random.Random, data: Data) -> Data:
    kind, parts = rng.choice(["copy", "other", "swap", "amount", "held_out", "packing", "restart"]), [*data.parts]
    at = rng.randrange(len(parts))
    match kind:
        case "copy":
            parts[at] = replace(parts[at], path=COPY_OF.get(parts[at].path, parts[at].path))
        case "other":
            taken = {part.path[0] for part in parts}
            others = [name for name in NAMES if name not in taken] or [parts[at].path]
            parts[at] = replace(parts[at], path=rng.choice(others))
        case "swap" if len(parts) > 1:
            other = (at + 1) % len(parts)
            one, two = parts[at].path, parts[other].path
            parts[at], parts[other] = replace(parts[at], path=two), replace(parts[other], path=one)
        case "amount" if len(parts) > 1:
            # because: other amounts in the same proportions are other values and the same mixture
            parts[at] = replace(parts[at], amount=parts[at].amount * 7 + 1)
        case "held_out":
            return replace(data, held_out=0.25 if data.held_out != 0.25 else 0.0)
        case "packing":
            return replace(data, packing="document" if data.packing == "concatenate" else "concatenate")
        case "restart":
            parts[at] = replace(parts[at], restart=not parts[at].restart)
    return replace(data, parts=tuple(parts))


def _of_stage(rng: random.Random, settings: Settings) -> Settings:
    if not settings.stages:
        return replace(settings, steps=max(1, settings.steps + rng.randint(-4, 6)))
    at = rng.randrange(len(settings.stages))
    stage = settings.stages[at]
    values: dict[str, Any] = {
        "length": max(1, stage.length + rng.randint(-3, 6)), "lr": rng.choice([None, 0.004]),
        "data": change_data(rng, stage.data) if stage.data else draw_data(rng, at),
        "weight_decay": 0.05, "clip": 0.2, "schedule": rng.choice([None, draw_schedule(rng)]),
        "batch": rng.choice([None, 2, 4, 6]), "seq_len": rng.choice([None, 4, 6, 8]), "rampup": draw_rampup(rng),
    }  # fmt: skip
    if rng.random() < 0.4:
        values = {key: values[key] for key in ("length", "data")}
    changed = _with_one(rng, stage, values)
    if changed.rampup != stage.rampup:
        changed = replace(changed, sets_rampup=True)
    return replace(settings, stages=(*settings.stages[:at], changed, *settings.stages[at + 1 :]))


def change_rates(rng: random.Random, settings: T) -> T:
    """Return the settings of a run or of a stage with another rate, schedule, weight decay or clipping."""
    schedule = draw_schedule(rng)
    values: dict[str, Any] = {"lr": 0.006, "weight_decay": 0.15, "clip": 0.3}
    if rng.random() < 0.5:
        return replace(settings, schedule=schedule)
    changed: T = _with_one(rng, settings, values)
    return changed


def _stages(rng: random.Random, settings: Settings) -> Settings:
    stages, at = [*settings.stages], rng.randrange(len(settings.stages) + 1)
    kind = rng.choice(["add", "add", "insert", "remove", "swap", "swap"])
    name = f"n{rng.randrange(10**6)}"
    if kind == "add" and stages:
        stages.append(draw_stage(rng, name, 1))
    elif kind == "add":
        stages = [Stage("trunk", "steps", settings.steps), draw_stage(rng, name, 1)]
    elif kind == "insert" and stages:
        stages.insert(at, draw_stage(rng, name, at))
    elif kind == "remove" and len(stages) > 1:
        stages.pop(at % len(stages))
    elif kind == "swap" and len(stages) > 1:
        one, other = at % len(stages), (at + 1) % len(stages)
        data = [stage.data or settings.data for stage in stages]
        stages[one] = replace(stages[one], data=data[other])
        stages[other] = replace(stages[other], data=data[one])
    return replace(settings, stages=tuple(stages))


CHANGES = (_of_run, _of_run, _data_of_run, _of_stage, _of_stage, _of_stage, _stages, _stages)


def shown(value: Any) -> str:
    """Return settings as text, without those that are as usual."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(shown, value))}]"
    if not is_dataclass(value):
        return str(value)
    pairs = ((entry, getattr(value, entry.name)) for entry in fields(value))
    return f"({', '.join(f'{entry.name}={shown(each)}' for entry, each in pairs if each != entry.default)})"


def difference(before: Settings, after: Settings) -> str:
    """Return which settings differ, as text."""
    pairs = ((key, value, getattr(after, key)) for key, value in vars(before).items())
    texts = []
    for key, one, other in pairs:
        if key == "stages":
            old = {stage.name: stage for stage in one}
            changed = [stage for stage in other if stage != old.get(stage.name)]
            texts += [f"{stage.name}: {shown(old.get(stage.name))} -> {shown(stage)}" for stage in changed]
            texts += [f"{[stage.name for stage in one]} -> {[stage.name for stage in other]}"]
        elif one != other:
            texts.append(f"{key}: {shown(one)} -> {shown(other)}")
    return "; ".join(texts)
