"""A small run, ranked once for the tests of search results."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from lmtrain.config.compose_run_settings import conf_dir
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.optim.adamw_settings import AdamWSettings
from lmtrain.parallel.device_and_precision_settings import Bf16Settings, ComputeSettings
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.plan.cost_model.hardware_figures import Hardware
from lmtrain.plan.run_estimates.workload_from_settings import PlannedRun
from lmtrain.plan.search.order_layouts_by_speed import CostModel, LayoutLimits, RankedLayouts
from lmtrain.plan.search.predict_layout_cost import ScalingInputs
from tests.unit.plan.machines import hardware_named

LARGE = GPTSettings(num_layers=8, width=6144, num_heads=48, vocab_size=32000, seq_len=2048)


def run_of(model: GPTSettings, global_batch: int, *, compiles: bool = False) -> PlannedRun:
    return PlannedRun(
        model=model, parallel=ParallelSettings(), precision=Bf16Settings(), compute=ComputeSettings(compile=compiles),
        optim=AdamWSettings(lr=1e-3), micro_batch=1, global_batch=global_batch,
    )  # fmt: skip


@cache
def h100() -> Hardware:
    return hardware_named("h100", conf_dir() / "hardware")


@cache
def study(margin: float = 0.08, switch: int = 0, memory_GiB: float = 79.1) -> ScalingInputs:
    return ScalingInputs(
        run=run_of(LARGE, 64), hardware=replace(h100(), memory_GiB=memory_GiB),
        cost_model=CostModel(), fixed_settings={},
        limits=LayoutLimits(margin=margin, switch=switch),
    )  # fmt: skip


@cache
def ranked(margin: float = 0.08, switch: int = 0, memory_GiB: float = 79.1) -> RankedLayouts:
    return study(margin, switch, memory_GiB).rank_layouts(16)
