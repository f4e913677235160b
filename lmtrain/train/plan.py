"""What a run will be, in numbers, before it starts: for --dry-run. Torch-free: closed forms over the model's shape."""

from __future__ import annotations

import socket
from typing import Any

from lmtrain.train.config import RunConfig
from lmtrain.train.preflight import Inputs


def plan_facts(config: RunConfig, inputs: Inputs) -> dict[str, Any]:
    shape, steps = inputs.model.shape, config.total_steps
    first, last = config.batch_plan.range_of(steps - 1)
    tokens = (first + last) * config.seq_len
    return {
        "model": inputs.model.kind,
        "parameters": inputs.model.num_parameters,
        "vocabulary": shape.vocab_size,
        "steps": steps,
        "tokens": tokens,
        "tokens_per_step": config.train.global_batch * config.seq_len,
        "microbatches_per_step": config.train.global_batch // (config.train.micro_batch * config.parallel.layout.dp),
        "training_samples": inputs.train.num_samples,
        "epochs": inputs.epochs(config),
        "model_flops": shape.flops_per_token(config.seq_len) * tokens,
        "resume_from": str(inputs.resume_from) if inputs.resume_from else "nothing: a new run",
        "run_folder": config.run.dir,
    }


def rank_rows(config: RunConfig, inputs: Inputs) -> list[dict[str, Any]]:
    """One row a process: where it sits and what it holds, by kind."""
    layout, number = config.parallel.layout, inputs.model.num_parameters
    work = 4 if config.precision.kind == "fp32" else 2
    rows = []
    for rank in range(layout.world_size):
        at = layout.coordinate(rank)
        rows.append({
            "rank": rank, "host": socket.gethostname(), "pp": at.pp, "dp": layout.dp_index(rank), "tp": at.tp,
            "layers": f"0-{inputs.model.shape.num_layers - 1}", "parameters": number, "weights_bytes": number * work,
            "masters_bytes": 0 if work == 4 else number * 4, "gradients_bytes": number * 4,
            "optimizer_bytes": number * 8,
        })
    return rows
