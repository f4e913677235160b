"""Numbers of a run before it starts. Torch-free: closed forms over the model's shape.

Called by --dry-run, and by set-up, which shows the stages of a pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.disk.checkpoint_format import MANIFEST
from lmtrain.checkpoint.read_verified_contents import Contents
from lmtrain.config.settings_base import show
from lmtrain.models.model_settings import ModelSettings
from lmtrain.observe.screen.metrics_row_text import format_milliseconds
from lmtrain.placement.attention_activation_bytes import FP32_BYTES
from lmtrain.plan.calibrate_to_measured_steps import machine_cost_model
from lmtrain.plan.cost_model.hardware_figures import Hardware
from lmtrain.plan.cost_model.step_time_and_energy import watts
from lmtrain.plan.run_estimates.rank_memory_by_purpose import count_rank_bytes, fullest_rank
from lmtrain.plan.run_estimates.simulate_pipeline import price_runs, summarize_schedule
from lmtrain.plan.run_estimates.workload_from_settings import PlannedRun
from lmtrain.runfolder.file_names import IMPORTED
from lmtrain.runfolder.run_facts import padded_parameters
from lmtrain.runtime.machine.visible_gpus_without_torch import Gpus, has_kernel_compiler
from lmtrain.train.layouts.ranks_and_memory_table import range_text
from lmtrain.train.run_config import RunConfig
from lmtrain.train.startup_checks.preflight import Inputs, changed_settings
from lmtrain.train.step_and_save_durations import Durations, young_daly_s
from lmtrain.units import format_bytes, format_seconds, plural

COMPARED_STEPS = 20  # because: the first steps of an attempt allocate memory and fill caches, so only its newest count


@dataclass(frozen=True)
class StepForecast:
    """Predicted seconds of a step; four of five runs lie between low and high."""

    likely_s: float
    interval: float

    @property
    def low_s(self) -> float:
        return self.likely_s / (1 + self.interval)

    @property
    def high_s(self) -> float:
        return self.likely_s * (1 + self.interval)

    def text(self) -> str:
        """Return the forecast in words."""
        likely, low, high = map(format_milliseconds, (self.likely_s, self.low_s, self.high_s))
        return f"{likely} ({low} to {high})"

    def facts(self) -> dict[str, float]:
        """Return the forecast as entries of a metrics row, in seconds."""
        return {"predicted_step_s": self.likely_s, "low_s": self.low_s, "high_s": self.high_s}

    def comparison_text(self, measured_s: float) -> str:
        """Return a sentence that compares `measured_s`, the measured seconds of a step, with the forecast and says
        whether it lies within the forecast's range.
        """
        deviation = measured_s / self.likely_s - 1
        return (
            f"a step takes {format_milliseconds(measured_s)}, {abs(deviation):.0%} "
            f"{'more' if deviation > 0 else 'less'} than the {format_milliseconds(self.likely_s)} predicted, "
            f"{'within' if self.low_s <= measured_s <= self.high_s else 'outside of'} its interval "
            f"({format_milliseconds(self.low_s)} to {format_milliseconds(self.high_s)})"
        )


def planned_run(config: RunConfig, model: ModelSettings) -> PlannedRun:
    """Convert the settings of a run to the planner's input. `model` has the vocabulary size that the tokenizer
    needs.
    """
    compute, dropout = config.compute, model.uses_dropout
    if config.hardware is not None and config.hardware.device == "cpu":
        compute = replace(compute, device="cpu", tf32=False)
    if not compute.compiles(config.parallel, uses_dropout=dropout, on_gpu=compute.device != "cpu"):
        compute = replace(compute, compile=False)
    return PlannedRun(
        model=model, parallel=config.parallel, precision=config.precision, compute=compute, optim=config.optim,
        recompute=config.recompute, micro_batch=config.train.micro_batch, global_batch=config.train.global_batch,
        document_mask=getattr(config.data, "document_mask", False),
        scored_share=config.data.scored_share(config.seq_len), rampup=config.train.rampup,
        saves=config.checkpoint.interval_steps is not None,
        average_every_steps=config.checkpoint.ema.every_steps if config.checkpoint.ema.is_on else 0,
    )  # fmt: skip


def predict_step(
    run: PlannedRun, hardware: Hardware, batch_sizes: Sequence[int] | Mapping[int, int] = ()
) -> StepForecast:
    """Predict the mean duration of a step of `run` on `hardware`. For a run that ramps its batch size up, `batch_sizes`
    has the samples of each of its steps, or maps a batch size to its number of steps; without it, every step has the
    full batch.
    """
    counts = Counter(batch_sizes or (run.global_batch,))
    prices = machine_cost_model(hardware)
    time, _ = price_runs([replace(run, global_batch=size) for size in counts], hardware, prices.time)
    return StepForecast(float(sum(time.total * list(counts.values())) / counts.total()), prices.interval)


def _energy_fact(run: PlannedRun, hardware: Hardware) -> dict[str, str]:
    """Return {"energy": text} with the predicted energy per step of all devices together; {} if the hardware settings
    do not give the power of a device.
    """
    time, _ = price_runs([run], hardware, machine_cost_model(hardware).time)
    joules = float((watts(time, hardware) * time.total)[0]) * run.parallel.layout.world_size
    energy = f"{joules / 1e6:.3g} MJ" if joules >= 1e6 else f"{joules:.0f} J"
    return {"energy": f"{energy} a step, devices alone, unverified"} if joules else {}


def forecast_facts(config: RunConfig, model: ModelSettings, *, runs_here: bool = False) -> dict[str, Any]:
    """Return the predictions that a dry run shows, as key -> text: the memory of the fullest rank, and, if
    config.hardware names a machine, the step time and the energy of a step. `runs_here` is True if all processes of the
    layout would run on this machine.
    """
    run, hardware = planned_run(with_this_machine(config, runs_here), model), config.hardware
    rank = fullest_rank(run)
    bytes_by_part = count_rank_bytes(run, rank)
    total, largest = sum(bytes_by_part.values()), sorted(bytes_by_part, key=lambda name: -bytes_by_part[name])[:3]
    parts = ", ".join(f"{format_bytes(bytes_by_part[name])} {name}" for name in largest)
    communicators = _communicator_fact(run, bytes_by_part["communicators"])
    if hardware is None:
        return {
            "memory": f"{format_bytes(total)} predicted on rank {rank}, which needs most"
            f"{', without Python and torch themselves' * run.on_cpu}; mainly {parts}",
            **communicators,
            "step_time": "not predicted: give hardware=NAME, as in hardware="
            + ("cpu, a guess about one CPU core; a run of a few steps here measures it" if run.on_cpu else "h100"),
        }
    return {
        "hardware": f"{hardware.name}{', which no measured run has confirmed' * hardware.unchecked}",
        "memory": f"{format_bytes(total)} of {format_bytes(hardware.memory_bytes)} predicted on rank {rank}, which "
        f"needs most{'' if total <= hardware.memory_bytes else ', and does not fit'}; mainly {parts}",
        **communicators,
        "step_time": f"{predict_step(run, hardware).text()}, predicted",
        **_energy_fact(run, hardware),
    }


def with_this_machine(config: RunConfig, runs_here: bool) -> RunConfig:
    """Return `config` with compute.device=cpu if neither config.hardware nor compute.device names a device, the run
    would be on this machine, and this machine has no GPU; otherwise return it unchanged. `runs_here` is True if all
    processes of the layout would run on this machine.

    If the processes of a larger layout do not run here (`runs_here`), they may find GPUs, so their config stays.
    """
    layout, compute = config.parallel.layout, config.compute
    elsewhere = layout.world_size > 1 and not runs_here
    if config.hardware is not None or compute.device != "auto" or elsewhere or Gpus.detect().count != 0:
        return config
    return replace(config, compute=replace(compute, device="cpu", tf32=False))


def _communicator_fact(run: PlannedRun, communicator_bytes: int) -> dict[str, str]:
    """Return {"communicators": text} with the memory that NCCL and CUDA take on a rank, `communicator_bytes`, and the
    sizes of the process groups; {} if no ranks communicate.
    """
    layout, axes = run.parallel.layout, ("tp", "dp_shard", "dp_replicate", "pp")
    groups = [f"{name} of {size}" for name in axes if (size := getattr(layout, name)) > 1]
    if not groups or not communicator_bytes:
        return {}
    words = ", ".join([*groups, *["lanes between stages"] * (layout.pp > 1), f"the world of {layout.world_size:,}"])
    return {
        "communicators": f"{format_bytes(communicator_bytes)} of that, with CUDA itself, as in published runs: {words}"
    }


def dry_run_facts(config: RunConfig, inputs: Inputs, *, runs_here: bool = False) -> dict[str, Any]:
    """Return everything that a dry run shows, as key -> value in the order of the screen: model, steps, tokens,
    evaluations, layout, memory, step time and more. `runs_here` is True if all processes of the layout would run on
    this machine.
    """
    shape, steps = inputs.model.shape, config.total_steps
    first, last = config.batch_plan.range_of(steps - 1)
    tokens = (first + last) * config.seq_len
    return {
        "model": inputs.model.kind,
        "parameters": inputs.model.num_parameters,
        "padded_parameters": padded_parameters(inputs.model),
        "vocabulary": shape.vocab_size,
        **({"of_which_used": pieces} if (pieces := inputs.tokenizer.vocab_size) < shape.vocab_size / 2 else {}),
        "steps": steps,
        "tokens": tokens,
        "tokens_per_step": config.train.global_batch * config.seq_len,
        **({"padding": "tokens and FLOPs here count it, metrics do not"} if inputs.data.pads else {}),
        "microbatches_per_step": config.train.global_batch // (config.train.micro_batch * config.parallel.layout.dp),
        "training_samples": inputs.data.train.num_samples,
        "epochs": inputs.epochs,
        "steps_per_epoch": inputs.steps_per_epoch(config.train.global_batch),
        **measurement_facts(config, inputs),
        "model_flops": config.flops_per_token(inputs.model) * tokens,
        **_start_facts(config, inputs),
        "processes": config.parallel.layout.world_size,
        "layout": config.parallel.layout_text,
        **pipeline_facts(config, inputs.model),
        **compile_facts(config, inputs.model),
        **forecast_facts(config, inputs.model, runs_here=runs_here),
        **_average_fact(config, inputs),
        **_save_interval_fact(config),
        "run_folder": config.run.dir,
        **({"warning": " ".join(inputs.warnings)} if inputs.warnings else {}),
    }


def measurement_facts(config: RunConfig, inputs: Inputs) -> dict[str, Any]:
    """Return {"validation": text, "evaluation": text}: which samples validation reads, and which tasks are evaluated
    how often. Leave out "evaluation" if there are no tasks, and "validation" if neither a held-out part of the training
    data nor data.valid_paths is to be described.
    """
    facts: dict[str, Any] = {}
    if inputs.data.validation_note:
        facts["validation"] = inputs.data.validation_note
    elif config.data.valid_paths:
        facts["validation"] = ", ".join(
            f"{min(config.train.valid_samples, entry.num_samples):,} samples of {name}"
            for name, entry in inputs.data.valid.items()
        )
    if inputs.evaluations:
        interval = config.eval.interval_steps
        end = "at the end of the stage" if config.stage_name else "at the end"
        when = f"every {interval:,} steps and {end}" if interval else end
        each = [f"{entry.name}, {entry.num_targets:,} targets of {entry.data}" for entry in inputs.evaluations]
        facts["evaluation"] = f"{when}: {'; '.join(each)}"
    return facts


def compile_facts(config: RunConfig, model: ModelSettings) -> dict[str, Any]:
    """Return {"compiled": text}, which says whether torch.compile will be used for the model and, if not, why. The
    device is that of config.hardware, or else this machine's.
    """
    compute, hardware = config.compute, config.hardware
    on_gpu = compute.device != "cpu" and (
        hardware.generation != "cpu" if hardware is not None else Gpus.detect().count != 0 and has_kernel_compiler()
    )
    return {"compiled": compute.describe_compile(config.parallel, uses_dropout=model.uses_dropout, on_gpu=on_gpu)}


def _average_fact(config: RunConfig, inputs: Inputs) -> dict[str, str]:
    """Return {"average_of_weights": text} with the decay, the update interval and the size of the average of the
    weights that checkpoint.ema asks for; {} if it asks for none.
    """
    settings = config.checkpoint.ema
    if not settings.is_on:
        return {}
    when = "every step" if settings.every_steps == 1 else f"every {settings.every_steps:,} steps"
    size = format_bytes(FP32_BYTES * inputs.model.num_parameters)
    return {
        "average_of_weights": f"decay {settings.decay:g}, updated after {when} from step {settings.from_step:,} on; "
        f"{size} in fp32, over all processes that share the weights, and in each checkpoint"
    }


def _save_interval_fact(config: RunConfig) -> dict[str, Any]:
    """Return {"save_every": text} with the recommended checkpoint.interval_s, computed from run.time_between_failures
    and the measured duration of the run's earlier saves, or with a note that it has not saved yet; {} if
    run.time_between_failures is not set.
    """
    between_failures = config.run.time_between_failures
    if between_failures is None:
        return {}
    durations = Durations()
    durations.load_earlier(Path(config.run.dir))
    if (save_s := durations.stall_s) is None:
        return {"save_every": f"not known: {config.run.dir} has not saved yet, and its saves are not measured"}
    # because: a save waits for the previous save
    interval_s = max(young_daly_s(save_s, between_failures), durations.save_s)
    reason = (
        f"a save holds training up for {format_milliseconds(save_s)}, "
        f"and {format_seconds(between_failures)} pass between failures"
    )
    return {"save_every": f"checkpoint.interval_s={interval_s:.3g}, by Young and Daly: {reason}"}


def _start_facts(config: RunConfig, inputs: Inputs) -> dict[str, Any]:
    """Return, as key -> text, the checkpoint that the run resumes from, the checkpoint whose weights it begins with,
    and the settings that changed since its previous start. Keys without anything to say are left out.
    """
    init_from = config.checkpoint.init_from
    changed = [f"{key}={show(now)}, was {show(was)}" for key, (was, now) in changed_settings(config, inputs).items()]
    facts = {"changed": "; ".join(changed)} if changed else {}
    facts["resume_from"] = "nothing: a new run" if inputs.resume_from is None else str(inputs.resume_from)
    if inputs.resume_from is not None:
        return facts | ({"weights_from": f"{init_from}, when the run began"} if init_from else {})
    if inputs.weights_from is None:
        return facts
    average = "the average in " * (config.checkpoint.init_weights == "ema")
    weights_are = _weights_origin(config, inputs.weights_from)
    return facts | {"weights_from": f"{average}{inputs.weights_from}", "weights_are": weights_are}


def _weights_origin(config: RunConfig, checkpoint: Path) -> str:
    """Return text on the origin of `checkpoint`, whose weights a new run begins with: the number of steps it was
    trained for, or the program it was imported from. If `checkpoint` is another program's folder, the text says where
    it will be imported to.
    """
    if not (checkpoint / MANIFEST).is_file():
        return f"another program's, and will be imported into {Path(config.run.dir) / IMPORTED}"
    manifest = Contents(checkpoint).manifest
    imported = manifest.state.get("imported")
    if isinstance(imported, dict):
        kind = f" {imported['model_type']}" if "model_type" in imported else ""
        return f"imported from {imported.get('format')}{kind}"
    return f"trained for {plural(manifest.step, 'step')}"


def pipeline_facts(config: RunConfig, model: ModelSettings) -> dict[str, Any]:
    """Return, as key -> text, the pipeline schedule, the layers per stage, the bubble's share of the work, and the
    micro-batches whose activations each pp rank holds; {} without pipeline parallelism.
    """
    parallel = config.parallel
    if parallel.pp == 1:
        return {}
    count = config.train.global_batch // (config.train.micro_batch * parallel.layout.dp)
    num_blocks, bubble, num_held = summarize_schedule(model, parallel, count)
    return {
        "pipeline": f"{parallel.schedule}, {len(num_blocks)} stages",
        "layers_per_stage": list_text(num_blocks),
        "bubble": f"{bubble:.1%} of the work, if F, I and W take equally long",
        "activations_held": f"{list_text(num_held)} (microbatches of a stage, by pp rank)",
    }


def pipeline_lines(config: RunConfig, model: ModelSettings) -> Iterator[str]:
    """Yield the facts of the pipeline as lines of text."""
    for key, value in pipeline_facts(config, model).items():
        yield f"{key.replace('_', ' '):<17} {value}"


def list_text(values: Sequence[int]) -> str:
    """Return whole numbers as text: [2, 2, 1] -> "2, 2, 1", and [3, 3] -> "3 each". More than 12 are shortened to text
    such as "2 (0-12), 1 (13-95)", with the indices in brackets, or "81 to 111".
    """
    runs = [[number for number, _ in group] for _, group in groupby(enumerate(values), lambda pair: pair[1])]
    if len(runs) == 1:
        return f"{values[0]} each"
    if len(values) <= 12:
        return ", ".join(map(str, values))
    if len(runs) <= 4:
        return ", ".join(f"{values[run[0]]} ({range_text(run)})" for run in runs)
    return f"{min(values)} to {max(values)}"
