"""`parallel=auto`: the planner's best layout for the processes there are, once for a run. Torch-free.

Called by the command line on every process, which all choose the same, before anything depends on the layout. What is
legal is what the settings accept: no rule stands here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lmtrain.checkpoint.store import CHECKPOINTS, latest
from lmtrain.config.base import show
from lmtrain.config.build import build_settings
from lmtrain.errors import LayoutError, LmtrainError
from lmtrain.layout import divisors, words
from lmtrain.models.model_settings import ModelSettings
from lmtrain.plan.calibrate import prices_of
from lmtrain.plan.price.hardware import Hardware
from lmtrain.plan.run_model.replay import price_runs
from lmtrain.plan.run_model.run import Planned
from lmtrain.plan.search.rank import FAMILY, Limits, Ranked, rank
from lmtrain.plan.search.search import legal
from lmtrain.runtime.files.files import read_json
from lmtrain.train.config import RunConfig
from lmtrain.train.layouts.dry_run import StepForecast, planned_of
from lmtrain.train.layouts.layout_table import layout_words
from lmtrain.units import format_bytes

_TIE = 0.0005
_NUM_NAMED = 6  # numbers of processes, in a message
_NOT_CHOSEN = ("auto", "timeout_s")  # of `parallel`
_PARTS = {
    "compute": "more work for the busiest rank", "bubble": "a larger bubble", "sharded": "gathering sharded weights",
    "reduce": "summing gradients", "update": "the optimizer", "stragglers": "waiting for the slowest",
}  # fmt: skip


def conditions(config: RunConfig, given: Sequence[str]) -> dict[str, Any]:
    """What the command line says of the layout: it is kept, and the rest is chosen around it."""
    keys = [word.lstrip("+").partition("=")[0] for word in given]
    named = {key.removeprefix("parallel.") for key in keys if key.startswith("parallel.")}
    found = {key: getattr(config.parallel, key) for key in sorted(named) if key not in _NOT_CHOSEN}
    found |= {"micro_batch": config.train.micro_batch} if "train.micro_batch" in keys else {}
    return found | ({"recompute": config.recompute} if any(k.partition(".")[0] == "recompute" for k in keys) else {})


def chosen_before(config: RunConfig, fixed: Mapping[str, Any]) -> RunConfig | None:
    """With the layout that this run has had since it began; None where it is yet to begin, or has other conditions."""
    folder = Path(config.run.dir)
    if latest(folder / CHECKPOINTS) is None:
        return None
    try:
        then = build_settings(RunConfig, read_json(folder / "config.json"))
        run = planned_of(then, then.model)
        return _with(config, run) if all(_value(run, key) == value for key, value in fixed.items()) else None
    except LmtrainError:
        return None  # because: it is another model's folder, and who opens its checkpoint says so


def choose(
    config: RunConfig, model: ModelSettings, num_processes: int, fixed: Mapping[str, Any]
) -> tuple[RunConfig, list[str]]:
    """The settings with the fastest layout that fits, and why it is that one, in a few lines."""
    assert config.hardware is not None  # because: RunConfig asks for it
    run, hardware = planned_of(config, model), config.hardware
    found = rank(legal(run, num_processes, hardware, fixed), hardware, Limits(), prices_of(hardware))
    if not len(found.rows):
        raise LayoutError(_nothing_is_legal(run, num_processes, hardware, fixed))
    if found.best is None:
        raise LayoutError(_nothing_fits(found, num_processes))
    return _with(config, found.planned(found.best)), list(_reasons(found, found.best, num_processes))


def _reasons(found: Ranked, place: int, num_processes: int) -> Iterator[str]:
    expected = StepForecast(float(found.seconds[place]), found.prices.interval)
    held = f"{format_bytes(found.counted(place))} of {format_bytes(found.room)}"
    yield (
        f"parallel=auto: {_words(found.planned(place))}, for {num_processes} of {found.hardware.name}: a step of "
        f"{expected.words()}, and {held} on the fullest rank"
    )
    others = (one for one in found.fitting(found.fastest, FAMILY) if _family(found, one) != _family(found, place))
    if (other := next(others, None)) is not None:
        more = float(found.seconds[other] / found.seconds[place] - 1)
        slower = f"{more:.1%} slower, for {_grown(found, place, other)}" if more > _TIE else "as fast"
        yield f"next best: {_words(found.planned(other))}, {slower}"
    if large := len(found.rows) - found.num_fitting:
        yield f"{large:,} of {len(found.rows):,} layouts do not fit with {found.limits.margin:.0%} to spare"


def _family(found: Ranked, place: int) -> tuple[float, ...]:
    return tuple(float(found.space.column(name, found.rows[[place]])[0]) for name in FAMILY)


def _grown(found: Ranked, place: int, other: int) -> str:
    """What takes the other layout longer than this one."""
    time, _ = price_runs([found.planned(place), found.planned(other)], found.hardware, found.prices.time)
    return _PARTS[max(_PARTS, key=lambda name: float(np.diff(getattr(time, name))[0]))]


def _nothing_is_legal(run: Planned, num_processes: int, hardware: Hardware, fixed: Mapping[str, Any]) -> str:
    near = sorted(divisors(run.global_batch, run.global_batch), key=lambda count: abs(count - num_processes))
    counts = sorted(count for count in near[:_NUM_NAMED] if len(legal(run, count, hardware, fixed)))
    named = {"micro_batch": "train.micro_batch"}
    given = [f"{named.get(key, f'parallel.{key}')}={show(one)}" for key, one in fixed.items() if key != "recompute"]
    return (
        f"parallel.auto=true finds no layout of {num_processes} processes{' with ' * bool(given)}{' and '.join(given)} "
        f"that takes train.global_batch={run.global_batch}, model.num_layers={run.shape.num_layers} and "
        f"model.num_heads={run.shape.num_heads}. "
        + (f"Start {words(counts)} of them." if counts else f"Leave out {' and '.join(given)}.")
    )


def _nothing_fits(found: Ranked, num_processes: int) -> str:
    smallest = int(np.argmin(found.held))
    return (
        f"parallel.auto=true finds no layout of {num_processes} processes that fits in {format_bytes(found.room)} of "
        f"hardware={found.hardware.name} with {found.limits.margin:.0%} to spare: the smallest, "
        f"{_words(found.planned(smallest))}, needs {format_bytes(found.counted(smallest))}. Start more processes, or "
        "use a smaller model.seq_len or model."
    )


def _words(run: Planned) -> str:
    said = [layout_words(run.parallel)]
    said += [run.parallel.schedule] if run.parallel.pp > 1 else []
    return ", ".join([*said, f"train.micro_batch={run.micro_batch}", *run.recompute.settings])


def _value(run: Planned, key: str) -> Any:
    return getattr(run, key) if key in ("micro_batch", "recompute") else getattr(run.parallel, key)


def _with(config: RunConfig, run: Planned) -> RunConfig:
    """The settings with this layout in them, which is then no longer to be chosen."""
    parallel = replace(run.parallel, auto=False, timeout_s=config.parallel.timeout_s)
    train = replace(config.train, micro_batch=run.micro_batch)
    return replace(config, parallel=parallel, train=train, recompute=run.recompute)
