"""A run of this program that several tests plan."""

from __future__ import annotations

from typing import Any

from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.optim.adamw_settings import AdamWSettings
from lmtrain.parallel.device_and_precision_settings import Bf16Settings, ComputeSettings, FullRecomputeSettings
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.plan.run_estimates.workload_from_settings import PlannedRun

GPT3 = GPTSettings(num_layers=96, width=12288, num_heads=96, vocab_size=50257, vocab_multiple=128, seq_len=2048)


def planned(model: Any = GPT3, **changes: Any) -> PlannedRun:
    """GPT-3 175B on 1,024 devices, and what a test changes: settings of the layout go into it."""
    layout: dict[str, Any] = {"pp": 16, "tp": 8, "dp_shard": 8}
    layout |= {key: changes.pop(key) for key in list(changes) if key in ParallelSettings.__dataclass_fields__}
    values: dict[str, Any] = {
        "model": model, "parallel": ParallelSettings(**layout), "precision": Bf16Settings(),
        "compute": ComputeSettings(), "optim": AdamWSettings(lr=1e-4), "recompute": FullRecomputeSettings(),
        "micro_batch": 1, "global_batch": 1536,
    }  # fmt: skip
    return PlannedRun(**(values | changes))


def planned_on_cpu(**changes: Any) -> PlannedRun:
    """The same where its kernels can be looked at."""
    return planned(compute=ComputeSettings(device="cpu"), **changes)
