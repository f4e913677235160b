"""What a run will be, in numbers, before it starts: for --dry-run. Torch-free: closed forms over the model's shape."""

from __future__ import annotations

from typing import Any

from lmtrain.train.config import RunConfig
from lmtrain.train.layout_table import layout_words
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
        "processes": config.parallel.layout.world_size,
        "layout": layout_words(config.parallel),
        "run_folder": config.run.dir,
    }
