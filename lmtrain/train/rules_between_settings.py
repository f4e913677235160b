"""Rules across the groups of a run's settings: devices, labels, lengths, ramp-up, the best checkpoint. Torch-free.

Called by run_config.py. Each function yields a problem for each rule that is broken, and nothing if all is well. RULES
lists those that need nothing but groups.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.checkpoint_settings import CheckpointSettings
from lmtrain.config.settings_base import Problem, kinds, problem_if, show
from lmtrain.data.data_settings import BlendSettings, DataChoice, DataSettings
from lmtrain.errors import leave_out, own, spelling_hint, way, within_group
from lmtrain.layout import Layout
from lmtrain.models.model_settings import ModelSettings
from lmtrain.parallel.device_and_precision_settings import ComputeSettings, PrecisionSettings, RecomputeSettings
from lmtrain.placement.batch_rampup_settings import MAX_INCREMENTS, way_to_reach
from lmtrain.placement.batch_rampup_settings import rampup_problems as layout_rampup_problems
from lmtrain.placement.parallel_settings import ParallelSettings, layout_problems
from lmtrain.plan.cost_model.hardware_figures import Hardware
from lmtrain.runfolder.file_names import DATA, TEXT_PREFIX
from lmtrain.runfolder.tensorboard_metric_names import AVERAGE_PREFIX, validation_measure_names
from lmtrain.train.train_settings import EvalSettings, ObserveSettings, RunSettings, TrainSettings

MAX_PARAMETERS = 10**15  # because: code enumerates weights before a run begins, and no real run comes near


def within(group: str, problems: Iterable[Problem]) -> Iterator[Problem]:
    """Return the problems of a group's settings under their keys in the run, such as optim.lr for lr."""
    for problem in problems:
        way_out = within_group(group, problem.way_out).removeprefix(f"{group}.")
        yield replace(problem, key=f"{group}.{problem.key}", way_out=way_out)


def peak_problems(hardware: Hardware, precision: PrecisionSettings) -> Iterator[Problem]:
    """Yield a problem if `hardware`, the planner's machine, gives no peak FLOP/s for the precision of the run."""
    known = " or ".join(way(f"precision={kind}") for kind in kinds(PrecisionSettings) if hardware.peak(kind) > 0)
    yield from problem_if(
        hardware.peak(precision.kind) == 0, "hardware.peak_tflops", hardware.peak_tflops,
        f"has no figure for precision={precision.kind}",
        f"{f'Use {known}, or give' if known else 'Give'} hardware.peak_tflops.{precision.kind}=TFLOPS.",
    )  # fmt: skip


def device_problems(hardware: Hardware, compute: ComputeSettings) -> Iterator[Problem]:
    """Yield a problem if compute.device is another kind of device than `hardware`, the planner's machine, has."""
    device = compute.device
    yield from problem_if(
        device not in ("auto", hardware.device), "compute.device", device,
        f"is another kind of device than that of hardware={hardware.name}",
        f"Use {own('auto')}, or {way('hardware=cpu') if device == 'cpu' else 'the matching hardware'}.",
    )  # fmt: skip


def model_layout_problems(
    model: ModelSettings, parallel: ParallelSettings, compute: ComputeSettings
) -> Iterator[Problem]:
    """Yield the problems of a model's shape and dropout in a layout."""
    compiles = compute.compile is True
    return layout_problems(model.shape, parallel, uses_dropout=model.uses_dropout, compiles=compiles)


def tf32_problems(precision: PrecisionSettings, compute: ComputeSettings) -> Iterator[Problem]:
    """Yield a problem if compute.tf32 is set for a precision that it does not affect."""
    yield from problem_if(
        compute.tf32 and precision.kind != "fp32", "compute.tf32", True,
        f"only affects fp32 matrix products, and precision={precision.kind} computes none",
        f"Use {way('precision=fp32')}, or {way('compute.tf32=false')}.",
    )  # fmt: skip


def model_problems(model: ModelSettings) -> Iterator[Problem]:
    """Yield a problem if a model has more than MAX_PARAMETERS parameters, and one for each of its settings that has no
    effect.
    """
    yield from problem_if(
        model.num_parameters > MAX_PARAMETERS, "model.width", model.shape.width,
        f"and the other sizes make {model.num_parameters:.1e} parameters; at most {MAX_PARAMETERS:.0e} are allowed",
        "Give a smaller width, fewer layers, or a smaller seq_len or ffn_width.",
    )  # fmt: skip
    yield from within("model", model.unused())


def task_problems(model: ModelSettings, evaluation: EvalSettings) -> Iterator[Problem]:
    """Yield a problem if eval.tasks is set for a model that is not causal, because tasks score continuations of a text.
    """
    without = leave_out("eval.tasks", "eval.interval_steps", "eval.batch_size", shown="Leave eval.tasks out")
    yield from problem_if(
        bool(evaluation.tasks) and not model.shape.causal, "eval.tasks",
        [task.measure_name for task in evaluation.tasks],
        f"score the continuation of a text, and model={model.kind} sees both sides of a word",
        f"{without}; validation measures how well masked words are predicted.",
    )  # fmt: skip


def validation_problems(train: TrainSettings, data: DataChoice) -> Iterator[Problem]:
    """Yield a problem for each setting of validation data in a run that does not validate."""
    return iter(()) if train.valid_interval_steps else data.problems_without_validation()


def recompute_problems(recompute: RecomputeSettings, model: ModelSettings) -> Iterator[Problem]:
    """Yield a problem if more blocks are to be recomputed than the model has."""
    return within("recompute", recompute.problems_in_model(model.shape.num_layers))


def recompute_layout_problems(recompute: RecomputeSettings, parallel: ParallelSettings) -> Iterator[Problem]:
    """Yield a problem if the pipeline schedule does not allow recompute."""
    return recompute.problems_in_layout(parallel)


def profile_problems(observe: ObserveSettings, parallel: ParallelSettings) -> Iterator[Problem]:
    """Yield a problem if observe.profile_ranks names a rank that this layout does not have."""
    ranks, world_size = observe.profile_ranks or (0,), parallel.layout.world_size
    yield from problem_if(
        max(ranks) >= world_size, "observe.profile_ranks", list(ranks),
        f"names a rank that does not exist: the ranks of this run are 0 to {world_size - 1}",
        f"Use {own(show([rank for rank in ranks if rank < world_size] or [0]))}.",
    )  # fmt: skip


def restart_problems(data: DataChoice) -> Iterator[Problem]:
    """Yield a problem if `data`, with which a run begins, sets `restart`: nothing was read before, so it has no effect.
    """
    restarts = {"data.restart": getattr(data, "restart", False)}
    if isinstance(data, BlendSettings):
        restarts = {f"data.datasets[{index}].restart": part.restart for index, part in enumerate(data.datasets)}
    for key, restart in restarts.items():
        without = f"Use {own('false')}" if "[" in key else leave_out()  # because: an entry of a list is not left out
        yield from problem_if(
            restart is True, key, True,
            "has no effect where a run begins, as nothing was read before",
            f"{without}, or give it in a later stage.",
        )  # fmt: skip


def label_problems(model: ModelSettings, data: DataChoice) -> Iterator[Problem]:
    """Yield a problem if the model and the data disagree on the loss terms: next-token or masked-token prediction, and
    the sentence-pair label.
    """
    model_terms, data_terms = model.terms, data.terms
    other_kind = {"dataset": "masked", "masked": "dataset"}.get(data.kind)  # that of the same keys
    ways = ["a causal model" if model_terms[0] == "mlm" else way("model=bert_base")]
    if other_kind:
        ways.insert(other_kind == "dataset", way(f"data={other_kind}", instead_of="data.kind"))
    yield from problem_if(
        model_terms[0] != data_terms[0], "data.kind", data.kind,
        f"makes samples that a {model.kind} model cannot learn from",
        f"{'Use' if other_kind or model_terms[0] != 'mlm' else 'Choose'} {', or '.join(ways)}.",
    )  # fmt: skip
    yield from problem_if(
        model_terms[0] == data_terms[0] and model_terms != data_terms, "model.pair_head", "pair" in model_terms,
        "needs sentence pairs, and data.pairs=none makes none" if "pair" in model_terms
        else "does not use the sentence pairs that data.pairs makes",
        f"Use {own('false' if 'pair' in model_terms else 'true')}, or another data.pairs.",
    )  # fmt: skip


def seed_problems(train: TrainSettings, data: DataChoice) -> Iterator[Problem]:
    """Yield a problem if data.order=megatron, and train.seed is none of the seeds that Megatron-LM's generator has."""
    yield from problem_if(
        data.order == "megatron" and train.seed >= 2**32, "train.seed", train.seed,
        f"must be at most {2**32 - 1} with data.order=megatron",
        f"Use {own(train.seed % 2**32)}, or {way('data.order=own', instead_of='data.megatron_samples')}.",
    )  # fmt: skip


def rampup_problems(train: TrainSettings, layout: Layout) -> Iterator[Problem]:
    """Yield a problem if the batch-size ramp-up starts above train.global_batch, does not reach it in whole increments,
    takes more than MAX_INCREMENTS, or does not fit the layout. Yield nothing without a ramp-up.
    """
    rampup, global_batch = train.rampup, train.global_batch
    if rampup is None:
        return
    yield from layout_rampup_problems(layout, rampup, train.micro_batch, global_batch)
    way_out = way_to_reach(global_batch, rampup, train.micro_batch * layout.dp)
    num_increments, rest = divmod(global_batch - rampup.start, rampup.increment)
    yield from problem_if(
        num_increments > MAX_INCREMENTS, "train.rampup.increment", rampup.increment,
        f"takes {num_increments} increments to reach train.global_batch={global_batch}; "
        f"at most {MAX_INCREMENTS} are allowed", way_out,
    )  # fmt: skip
    yield from problem_if(
        rampup.start > global_batch or rest != 0, "train.rampup.start", rampup.start,
        f"does not reach train.global_batch={global_batch} in increments of {rampup.increment}",
        way_out,
    )  # fmt: skip


def length_problems(parts: Mapping[str, Any], steps: int) -> Iterator[Problem]:
    """Yield a problem for each setting that does not fit a run of `steps` steps, in observe, checkpoint.ema and
    checkpoint.best_by. `parts` maps the name of a settings group to its settings; groups that are missing, because they
    are not valid, are not checked.
    """
    if "observe" in parts:
        yield from observe_problems(parts["observe"], steps)
    if "checkpoint" in parts:
        yield from within("checkpoint.ema", parts["checkpoint"].ema.problems_in_run(steps))
    if {"checkpoint", "data", "eval", "train"} <= parts.keys():
        yield from best_by_problems(parts["checkpoint"], parts["data"], parts["train"], parts["eval"], steps)


def observe_problems(observe: ObserveSettings, steps: int) -> Iterator[Problem]:
    """Yield a problem if observe.profile_steps ends after the run's last step, `steps`, or if
    observe.histograms_every_steps is greater than it.
    """
    window, interval = observe.profile_steps, observe.histograms_every_steps
    latest = [max(steps - (window[-1] - window[0]), 1), steps] if window else []
    yield from problem_if(
        window is not None and window[-1] > steps, "observe.profile_steps", window and list(window),
        f"ends after the last step, which is {steps}", f"Use {own(show(latest))}, or earlier ones.",
    )  # fmt: skip
    yield from problem_if(
        interval is not None and interval > steps, "observe.histograms_every_steps", interval,
        f"is more than the {steps} steps of the run", f"Use {own(steps)} or less.",
    )  # fmt: skip


def best_by_problems(
    checkpoint: CheckpointSettings, data: DataChoice, train: TrainSettings, evaluation: EvalSettings, total_steps: int
) -> Iterator[Problem]:
    """Yield a problem if checkpoint.best_by names a measure that the run never takes, takes only at its end, or never
    takes at a step whose checkpoint is saved. `total_steps` is the number of steps of the run.
    """
    name, saves = checkpoint.best_by, checkpoint.interval_steps
    if checkpoint.keep_best == 0 or not saves:
        return
    average_names = validation_measure_names(data.terms, data.valid_paths, of_average=True)
    task_prefixes = [f"eval/{task.measure_name}/" for task in evaluation.tasks]
    is_of_average = name in average_names or any(name.startswith(prefix + AVERAGE_PREFIX) for prefix in task_prefixes)
    if name.startswith("eval/"):
        interval, interval_key = evaluation.interval_steps, "eval.interval_steps"
        is_known = any(name.startswith(prefix) for prefix in task_prefixes)
        names_to_use = " or ".join(f"{prefix}MEASURE" for prefix in task_prefixes)
        way_out = f"Give {names_to_use}." if task_prefixes else "Give its task in eval.tasks."
    else:
        interval, interval_key = train.valid_interval_steps, "train.valid_interval_steps"
        names = validation_measure_names(data.terms, data.valid_paths) + average_names * checkpoint.ema.is_on
        is_known, way_out = name in names, spelling_hint(name, names, own)
    blend_names = validation_measure_names(data.terms, data.valid_sources)
    blend_names += validation_measure_names(data.terms, data.valid_sources, of_average=True)
    often = saves if saves < total_steps else max(total_steps // 2, 1)
    words = [f"{interval_key}={often}", *[f"checkpoint.interval_steps={often}"] * (often != saves)]
    measure_and_save = f"Use {way(*words)}" if often < total_steps else "Give a longer run"
    both = math.lcm(saves, interval)  # a checkpoint has the measure at the multiples of this number of steps
    checks = (
        (is_of_average and not checkpoint.ema.is_on,
         "measures an average of the weights, and with checkpoint.ema.decay=null none is kept",
         f"Add {way('checkpoint.ema.decay=0.999')}, or name a measure of the weights."),
        (name in blend_names and not is_known,
         "is a measure of a dataset of the blend, of which a validation may read no sample",
         "Give that dataset in data.valid_paths, as in {wiki: PREFIX}."),
        (not is_known, "is not a measure of this run", way_out),
        (interval == 0, f"is never measured before the end of the run with {interval_key}=0",
         f"{measure_and_save}, or {leave_out('checkpoint.keep_best', shown='leave checkpoint.keep_best out')}."),
        (both >= total_steps,
         f"is measured every {interval} steps, and checkpoint.interval_steps={saves} saves none of these steps before "
         f"the last, {total_steps}",
         f"{measure_and_save}."),
        (both > 0 and is_of_average and checkpoint.ema.first_measured_step(both) >= total_steps,
         f"is measured every {interval} steps from step {checkpoint.ema.from_step} on, and "
         f"checkpoint.interval_steps={saves} saves none of these steps before the last, {total_steps}",
         "Give a smaller checkpoint.ema.from_step."),
    )  # fmt: skip
    problems = (Problem("checkpoint.best_by", name, rule, way_out) for is_wrong, rule, way_out in checks if is_wrong)
    yield from islice(problems, 1)  # because: the later rules say nothing about a name that breaks an earlier one


def text_dataset_prefix(run_dir: str, text_dir: str | None) -> str:
    """Return the prefix of the dataset that a run makes of data.text: in `text_dir`, or by default in the run's own
    folder `run_dir`.
    """
    return str((Path(text_dir) if text_dir else Path(run_dir) / DATA) / TEXT_PREFIX)


def text_problems(data: DataChoice, run: RunSettings) -> Iterator[Problem]:
    """Yield a problem if data.text and data.path both name the training data."""
    if not isinstance(data, DataSettings) or data.text is None:
        return
    path = text_dataset_prefix(run.dir, data.text_dir)
    yield from problem_if(
        os.path.realpath(data.path) != os.path.realpath(path), "data.path", data.path,
        f"and data.text={show(data.text)} both name the data to train on",
        f"{leave_out('data.path', shown='Leave data.path out')} to train on a dataset made of the text, {path}, or "
        f"{leave_out('data.text', shown='leave data.text out')}.",
    )  # fmt: skip


# the groups that a rule compares, and the rule: a function of their settings, in this order
RULES: tuple[tuple[tuple[str, ...], Callable[..., Iterator[Problem]]], ...] = (
    (("hardware", "precision"), peak_problems),
    (("hardware", "compute"), device_problems),
    (("model", "parallel", "compute"), model_layout_problems),
    (("precision", "compute"), tf32_problems),
    (("model",), model_problems),
    (("model", "data"), label_problems),
    (("data", "run"), text_problems),
    (("model", "eval"), task_problems),
    (("train", "data"), validation_problems),
    (("train", "data"), seed_problems),
    (("recompute", "model"), recompute_problems),
    (("recompute", "parallel"), recompute_layout_problems),
    (("observe", "parallel"), profile_problems),
)
