"""What a run will be, in numbers, before it starts: for --dry-run. Torch-free: closed forms over the model's shape."""

from __future__ import annotations

from typing import Any

from lmtrain.models.model_settings import ModelSettings
from lmtrain.parallel.stages import stages_of_rank
from lmtrain.schedules.choose import build
from lmtrain.schedules.simulate import activations_held, simulate
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
        **pipeline_facts(config, inputs.model),
        "run_folder": config.run.dir,
    }


def pipeline_facts(config: RunConfig, model: ModelSettings) -> dict[str, Any]:
    """The schedule's bubble, and what a process has at once: nothing for a model that is not cut."""
    parallel = config.parallel
    if parallel.pp == 1:
        return {}
    count = config.train.global_batch // (config.train.micro_batch * parallel.layout.dp)
    table = build(parallel.schedule, parallel.pp, parallel.vp, count)
    layers = {s.number: len(s.layers) for rank in range(parallel.pp) for s in stages_of_rank(model, parallel, rank)}
    return {
        "pipeline": f"{parallel.schedule}, {len(layers)} stages",
        "layers_per_stage": ", ".join(str(layers[stage]) for stage in sorted(layers)),
        "bubble": f"{simulate(table).bubble:.1%} of the work, if F, I and W take equally long",
        "activations_held": ", ".join(map(str, activations_held(table))) + " stage-microbatches, by pp rank",
    }
