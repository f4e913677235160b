"""Cases that several tests price."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lmtrain.plan.cost_model.training_workload import Case
from tests.unit.plan.machines import hardware_named

CONF = Path(__file__).parents[3] / "conf" / "hardware"


def gpt3(**changes: Any) -> Case:
    """GPT-3 175B on 1,024 A100 as Megatron-LM 2021 has it, and what a test changes."""
    values: dict[str, Any] = {
        "hardware": hardware_named("a100_80gb", CONF), "num_layers": 96, "width": 12288, "num_heads": 96,
        "num_kv_heads": 96, "head_width": 128, "ffn_width": 49152, "gated": False, "vocab": 51200, "seq_len": 2048,
        "pp": 16, "dp": 8, "tp": 8, "zero": 1, "shard": 8, "microbatch": 1, "num_microbatches": 192,
        "precision": "fp16",
    }  # fmt: skip
    return Case(**(values | changes))
