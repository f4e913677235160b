"""What the planner expects of a run: how long a step takes, and what the fullest rank holds. Torch-free.

Called by the dry run, by a run that compares itself with it after some steps, and where a layout is chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lmtrain.models.model_settings import ModelSettings
from lmtrain.observe.words import milliseconds
from lmtrain.plan.calibrate import prices_of
from lmtrain.plan.case import columns
from lmtrain.plan.hardware import Hardware
from lmtrain.plan.memory import GIB
from lmtrain.plan.ours import Planned, case_of
from lmtrain.plan.power import watts
from lmtrain.plan.ranks import fullest_rank, rank_bytes_of
from lmtrain.plan.step import price_step
from lmtrain.train.config import RunConfig
from lmtrain.units import format_bytes

COMPARED_STEPS = 20  # of this attempt; because: the first of them make memory and fill caches, and the newest count


@dataclass(frozen=True)
class StepForecast:
    """Seconds of a step; four of five runs come to lie between low and high."""

    likely_s: float
    interval: float

    @property
    def low_s(self) -> float:
        return self.likely_s / (1 + self.interval)

    @property
    def high_s(self) -> float:
        return self.likely_s * (1 + self.interval)

    def words(self) -> str:
        return f"{milliseconds(self.likely_s)} ({milliseconds(self.low_s)} to {milliseconds(self.high_s)})"

    def facts(self) -> dict[str, float]:
        return {"predicted_step_s": self.likely_s, "low_s": self.low_s, "high_s": self.high_s}

    def compared_with(self, measured_s: float) -> str:
        off = measured_s / self.likely_s - 1
        how = f"{abs(off):.0%} {'more' if off > 0 else 'less'} than the {milliseconds(self.likely_s)} predicted"
        within = "within" if self.low_s <= measured_s <= self.high_s else "outside of"
        between = f"{milliseconds(self.low_s)} to {milliseconds(self.high_s)}"
        return f"a step takes {milliseconds(measured_s)}, {how}, {within} its interval ({between})"


def planned_of(config: RunConfig, model: ModelSettings) -> Planned:
    """The run as the planner takes it; `model` is the config's with the tokenizer's vocabulary."""
    return Planned(
        model=model, parallel=config.parallel, precision=config.precision, compute=config.compute, optim=config.optim,
        recompute=config.recompute, micro_batch=config.train.micro_batch, global_batch=config.train.global_batch,
        document_mask=getattr(config.data, "document_mask", False),
    )  # fmt: skip


def expected_step(run: Planned, hardware: Hardware, batches: Sequence[int] = ()) -> StepForecast:
    """On average of steps with these numbers of samples, since a run may begin with smaller batches."""
    counts = Counter(batches or (run.global_batch,))
    cases = columns([case_of(replace(run, global_batch=size), hardware) for size in counts])
    prices = prices_of(hardware)
    likely = sum(price_step(cases, prices.time).total * list(counts.values())) / counts.total()
    return StepForecast(float(likely), prices.interval)


def _energy(run: Planned, hardware: Hardware) -> dict[str, str]:
    time = price_step(columns([case_of(run, hardware)]), prices_of(hardware).time)
    joules = float((watts(time, hardware) * time.total)[0]) * run.parallel.layout.world_size
    said = f"{joules / 1e6:.3g} MJ" if joules >= 1e6 else f"{joules:.0f} J"
    return {"energy": f"{said} a step, devices alone, unverified"} if joules else {}


def forecast_facts(config: RunConfig, model: ModelSettings) -> dict[str, Any]:
    """For the dry run. Memory needs no machine to be known; time does."""
    run, hardware = planned_of(config, model), config.hardware
    rank = fullest_rank(run)
    held = rank_bytes_of(run, rank)
    whole, largest = sum(held.values()), sorted(held, key=lambda name: -held[name])[:3]
    parts = ", ".join(f"{format_bytes(held[name])} {name}" for name in largest)
    if hardware is None:
        return {
            "memory": f"{format_bytes(whole)} on rank {rank}, the fullest, predicted: {parts}",
            "step_time": "not predicted: hardware=NAME says on which machine, as in hardware=h100",
        }
    room = hardware.memory_GiB * GIB
    return {
        "hardware": f"{hardware.name}{', which no measured run has confirmed' * hardware.unchecked}",
        "memory": f"{format_bytes(whole)} of {format_bytes(room)} on rank {rank}, the fullest, predicted"
        f"{'' if whole <= room else ', which does not fit'}: {parts}",
        "step_time": f"{expected_step(run, hardware).words()}, predicted",
        **_energy(run, hardware),
    }
