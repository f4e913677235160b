"""What a run will be, in numbers, before it starts. Torch-free: closed forms over the model's shape.

Called by --dry-run, and by set-up, which tells what a pipeline's stages are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.contents import Contents
from lmtrain.models.model_settings import ModelSettings
from lmtrain.observe.screen.row_text import milliseconds
from lmtrain.placement.stages import stages_of_rank
from lmtrain.runtime.machine.gpus import Gpus, has_kernel_compiler
from lmtrain.schedules.simulate import activations_held, simulate
from lmtrain.train.before.preflight import Inputs
from lmtrain.train.config import RunConfig
from lmtrain.train.costs import Costs, measured_before, young_daly_s
from lmtrain.train.layouts.forecast import forecast_facts
from lmtrain.train.layouts.layout_table import layout_words, span
from lmtrain.units import format_seconds


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
        **({"padding": "tokens and FLOPs here count it, metrics do not"} if inputs.data.pads else {}),
        "microbatches_per_step": config.train.global_batch // (config.train.micro_batch * config.parallel.layout.dp),
        "training_samples": inputs.data.train.num_samples,
        "epochs": inputs.epochs(config),
        **_measurements(config, inputs),
        "model_flops": config.flops_per_token(inputs.model) * tokens,
        **_beginning(config, inputs),
        "processes": config.parallel.layout.world_size,
        "layout": layout_words(config.parallel),
        **pipeline_facts(config, inputs.model),
        **compile_facts(config, inputs.model),
        **forecast_facts(config, inputs.model),
        **_saving(config),
        "run_folder": config.run.dir,
        **({"warning": " ".join(inputs.warnings)} if inputs.warnings else {}),
    }


def _measurements(config: RunConfig, inputs: Inputs) -> dict[str, Any]:
    """What the run validates on, where that is not said by one name, and what else it measures when."""
    found: dict[str, Any] = {}
    if inputs.data.said:
        found["validation"] = inputs.data.said
    elif config.data.valid_paths:
        most = config.train.valid_samples
        each = [f"{min(most, one.num_samples):,} samples of {name}" for name, one in inputs.data.valid.items()]
        found["validation"] = ", ".join(each)
    if inputs.evaluations:
        interval = config.eval.interval_steps
        when = f"every {interval:,} steps and at the end" if interval else "at the end"
        each = [f"{one.name}, {one.num_targets:,} targets of {one.data}" for one in inputs.evaluations]
        found["evaluation"] = f"{when}: {'; '.join(each)}"
    return found


def compile_facts(config: RunConfig, model: ModelSettings) -> dict[str, Any]:
    """What is compiled on this machine, or on the one that is planned for."""
    compute, planned = config.compute, config.hardware
    if planned is not None:
        on_gpu = compute.device != "cpu" and planned.generation != "cpu"
    else:
        on_gpu = compute.device != "cpu" and Gpus.found().count != 0 and has_kernel_compiler()
    words = compute.compile_words(config.parallel, uses_dropout=model.uses_dropout, on_gpu=on_gpu)
    return {"compiled": words}


def _saving(config: RunConfig) -> dict[str, Any]:
    """How often to save: what a save has cost this run, against what a failure costs."""
    between = config.run.time_between_failures
    if between is None:
        return {}
    costs = Costs()
    measured_before(Path(config.run.dir), costs)
    if (save_s := costs.stall_s) is None:
        return {"save_every": f"not known: {config.run.dir} has not saved yet, and its saves are not measured"}
    every = max(young_daly_s(save_s, between), costs.save_s)  # because: a save waits for the one before it
    why = f"a save holds training up for {milliseconds(save_s)}, and {format_seconds(between)} pass between failures"
    return {"save_every": f"checkpoint.interval_s={every:.3g}, by Young and Daly: {why}"}


def _beginning(config: RunConfig, inputs: Inputs) -> dict[str, Any]:
    """What the run goes on from, or whose weights it begins with."""
    named = config.checkpoint.init_from
    if inputs.resume_from is not None:
        found = {"resume_from": str(inputs.resume_from)}
        return found | ({"weights_from": f"{named}, when the run began"} if named else {})
    found = {"resume_from": "nothing: a new run"}
    if inputs.weights_from is not None:
        found |= {"weights_from": str(inputs.weights_from), "weights_are": _origin(inputs.weights_from)}
    return found


def _origin(checkpoint: Path) -> str:
    """Where the weights of a checkpoint were made."""
    manifest = Contents(checkpoint).manifest
    imported = manifest.state.get("imported")
    if isinstance(imported, dict):
        kind = f" {imported['model_type']}" if "model_type" in imported else ""
        return f"imported from {imported.get('format')}{kind}"
    return f"those of step {manifest.step} of a run"


def pipeline_facts(config: RunConfig, model: ModelSettings) -> dict[str, Any]:
    """The schedule's bubble, and what a process has at once: nothing for a model that is not cut."""
    parallel = config.parallel
    if parallel.pp == 1:
        return {}
    count = config.train.global_batch // (config.train.micro_batch * parallel.layout.dp)
    table = parallel.pipeline.table(parallel.pp, parallel.vp, count)
    layers = {s.number: len(s.layers) for rank in range(parallel.pp) for s in stages_of_rank(model, parallel, rank)}
    return {
        "pipeline": f"{parallel.schedule}, {len(layers)} stages",
        "layers_per_stage": in_turn([layers[stage] for stage in sorted(layers)]),
        "bubble": f"{simulate(table).bubble:.1%} of the work, if F, I and W take equally long",
        "activations_held": f"{in_turn(activations_held(table))} (microbatches of a stage, by pp rank)",
    }


def pipeline_lines(config: RunConfig, model: ModelSettings) -> Iterator[str]:
    for key, value in pipeline_facts(config, model).items():
        yield f"{key.replace('_', ' '):<17} {value}"


def in_turn(values: Sequence[int]) -> str:
    """[2, 2, 1] -> "2, 2, 1"; many of them in few words: "3 each", "2 (0-12), 1 (13-95)", "81 to 111"."""
    runs = [[number for number, _ in group] for _, group in groupby(enumerate(values), lambda pair: pair[1])]
    if len(runs) == 1:
        return f"{values[0]} each"
    if len(values) <= 12:
        return ", ".join(map(str, values))
    if len(runs) <= 4:
        return ", ".join(f"{values[run[0]]} ({span(run)})" for run in runs)
    return f"{min(values)} to {max(values)}"
