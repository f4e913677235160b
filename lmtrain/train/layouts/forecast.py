"""What the planner expects of a run: how long a step takes, and what the fullest rank holds. Torch-free.

Called by the dry run, by a run that compares itself with it after some steps, and where a layout is chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lmtrain.models.model_settings import ModelSettings
from lmtrain.observe.screen.row_text import milliseconds
from lmtrain.plan.calibrate import prices_of
from lmtrain.plan.price.hardware import Hardware
from lmtrain.plan.price.power import watts
from lmtrain.plan.run_model.memory import GIB
from lmtrain.plan.run_model.ranks import fullest_rank, rank_bytes_of
from lmtrain.plan.run_model.replay import price_runs
from lmtrain.plan.run_model.run import Planned
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
    compute, dropout = config.compute, model.uses_dropout
    if config.hardware is not None and config.hardware.device == "cpu":
        compute = replace(compute, device="cpu", tf32=False)
    if not compute.compiles(config.parallel, uses_dropout=dropout, on_gpu=compute.device != "cpu"):
        compute = replace(compute, compile=False)
    return Planned(
        model=model, parallel=config.parallel, precision=config.precision, compute=compute, optim=config.optim,
        recompute=config.recompute, micro_batch=config.train.micro_batch, global_batch=config.train.global_batch,
        document_mask=getattr(config.data, "document_mask", False),
        scored_share=config.data.scored_share(config.seq_len), rampup=config.train.rampup,
        saves=config.checkpoint.interval_steps is not None,
    )  # fmt: skip


def expected_step(run: Planned, hardware: Hardware, batches: Sequence[int] = ()) -> StepForecast:
    """On average of steps with these numbers of samples, since a run may begin with smaller batches."""
    counts = Counter(batches or (run.global_batch,))
    prices = prices_of(hardware)
    time, _ = price_runs([replace(run, global_batch=size) for size in counts], hardware, prices.time)
    likely = sum(time.total * list(counts.values())) / counts.total()
    return StepForecast(float(likely), prices.interval)


def _energy(run: Planned, hardware: Hardware) -> dict[str, str]:
    time, _ = price_runs([run], hardware, prices_of(hardware).time)
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
    talk = _communicators(run, held["communicators"])
    if hardware is None:
        return {
            "memory": f"{format_bytes(whole)} on rank {rank}, the fullest, predicted: {parts}",
            **talk,
            "step_time": "not predicted: hardware=NAME says on which machine, as in hardware=h100",
        }
    room = hardware.memory_GiB * GIB
    return {
        "hardware": f"{hardware.name}{', which no measured run has confirmed' * hardware.unchecked}",
        "memory": f"{format_bytes(whole)} of {format_bytes(room)} on rank {rank}, the fullest, predicted"
        f"{'' if whole <= room else ', which does not fit'}: {parts}",
        **talk,
        "step_time": f"{expected_step(run, hardware).words()}, predicted",
        **_energy(run, hardware),
    }


def _communicators(run: Planned, held_bytes: int) -> dict[str, str]:
    """What NCCL and CUDA itself take of a rank's memory, and for whose talk."""
    layout = run.parallel.layout
    sizes = {"tp": layout.tp, "dp_shard": layout.dp_shard, "dp_replicate": layout.dp_replicate, "pp": layout.pp}
    groups = [f"{name} of {size}" for name, size in sizes.items() if size > 1]
    if not groups or not held_bytes:
        return {}
    lanes = ["lanes between stages"] if layout.pp > 1 else []
    of = ", ".join([*groups, *lanes, f"the world of {layout.world_size:,}"])
    return {"communicators": f"{format_bytes(held_bytes)} of that, with CUDA itself, as in published runs: {of}"}
