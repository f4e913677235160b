"""Rules across the groups of a run's settings: labels, lengths, ramp-up, the best checkpoint, data.text. Torch-free.

Called by run_config.py. Each function yields a problem for each rule that is broken, and nothing if all is well.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.checkpoint_settings import CheckpointSettings
from lmtrain.config.settings_base import Problem, problem_if
from lmtrain.data.data_settings import DataChoice, DataSettings
from lmtrain.errors import spelling_hint
from lmtrain.layout import Layout
from lmtrain.models.model_settings import ModelSettings
from lmtrain.observe.measure.tensorboard_measures import AVERAGE_PREFIX, validation_measure_names
from lmtrain.placement.parallel_settings import rampup_problems as layout_rampup_problems
from lmtrain.runfolder.file_names import DATA, TEXT_PREFIX
from lmtrain.train.train_settings import EvalSettings, ObserveSettings, RunSettings, TrainSettings

_BEST_BY = "checkpoint.best_by"
MAX_INCREMENTS = 10_000  # because: code lists them all before a run begins, and no real run comes near


def label_problems(model: ModelSettings, data: DataChoice) -> Iterator[Problem]:
    """Yield a problem if the model and the data disagree on the loss terms: next-token or masked-token prediction, and
    the sentence-pair label.
    """
    model_terms, data_terms = model.terms, data.terms
    yield from problem_if(
        model_terms[0] != data_terms[0], "data.kind", data.kind,
        f"makes samples that a {model.kind} model cannot learn from",
        "Use data=masked, or a causal model." if model_terms[0] == "mlm"
        else "Use data=dataset or data=blend, or model=bert_base.",
    )  # fmt: skip
    yield from problem_if(
        model_terms[0] == data_terms[0] and model_terms != data_terms, "model.pair_head", "pair" in model_terms,
        "needs sentence pairs, and data.pairs=none makes none" if "pair" in model_terms
        else "does not use the sentence pairs that data.pairs makes",
        f"Use model.pair_head={'false' if 'pair' in model_terms else 'true'}, or another data.pairs.",
    )  # fmt: skip


def rampup_problems(train: TrainSettings, layout: Layout) -> Iterator[Problem]:
    """Yield a problem if the batch-size ramp-up starts above train.global_batch, does not reach it in whole increments,
    takes more than MAX_INCREMENTS, or does not fit the layout. Yield nothing without a ramp-up.
    """
    rampup, global_batch = train.rampup, train.global_batch
    if rampup is None:
        return
    yield from layout_rampup_problems(layout, rampup, train.micro_batch)
    num_increments, rest = divmod(global_batch - rampup.start, rampup.increment)
    yield from problem_if(
        num_increments > MAX_INCREMENTS, "train.rampup.increment", rampup.increment,
        f"takes {num_increments} increments to reach train.global_batch={global_batch}; "
        f"at most {MAX_INCREMENTS} are allowed",
        "Use a larger increment.",
    )  # fmt: skip
    yield from problem_if(
        rampup.start > global_batch or rest != 0, "train.rampup.start", rampup.start,
        f"does not reach train.global_batch={global_batch} in increments of {rampup.increment}",
        "Use a start that is not larger, and an increment that divides the difference.",
    )  # fmt: skip


def length_problems(parts: Mapping[str, Any], steps: int) -> Iterator[Problem]:
    """Yield the problems of measurements and records that do not fit a run of `steps` steps. `parts` has the groups of
    settings that are valid.
    """
    if "observe" in parts:
        yield from observe_problems(parts["observe"], steps)
    if "checkpoint" in parts:
        for problem in parts["checkpoint"].ema.problems_in_run(steps):
            yield replace(problem, key=f"checkpoint.ema.{problem.key}")
    if {"checkpoint", "data", "eval", "train"} <= parts.keys():
        yield from best_by_problems(parts["checkpoint"], parts["data"], parts["train"], parts["eval"], steps)


def observe_problems(observe: ObserveSettings, steps: int) -> Iterator[Problem]:
    """Yield a problem if observe.profile_steps ends after the run's last step, `steps`, or if
    observe.histograms_every_steps is greater than it.
    """
    window, interval = observe.profile_steps, observe.histograms_every_steps
    yield from problem_if(
        window is not None and window[-1] > steps, "observe.profile_steps", window and list(window),
        f"ends after the last step, which is {steps}", f"Use observe.profile_steps=[1,{steps}], or earlier ones.",
    )  # fmt: skip
    yield from problem_if(
        interval is not None and interval > steps, "observe.histograms_every_steps", interval,
        f"is more than the {steps} steps of the run", f"Use {steps} or less.",
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
    if is_of_average and not checkpoint.ema.is_on:
        yield Problem(
            _BEST_BY, name, "measures an average of the weights, and with checkpoint.ema.decay=null none is kept",
            "Add checkpoint.ema.decay=0.999, or name a measure of the weights.",
        )  # fmt: skip
        return
    if name.startswith("eval/"):
        interval, interval_key = evaluation.interval_steps, "eval.interval_steps"
        prefixes = task_prefixes
        is_known = any(name.startswith(prefix) for prefix in prefixes)
        names_to_use = " or ".join(f"{prefix}MEASURE" for prefix in prefixes)
        way_out = f"Use {names_to_use}." if prefixes else "Add its task to eval.tasks."
    else:
        interval, interval_key = train.valid_interval_steps, "train.valid_interval_steps"
        names = validation_measure_names(data.terms, data.valid_paths) + average_names * checkpoint.ema.is_on
        is_known, way_out = name in names, spelling_hint(name, names)
    blend_names = validation_measure_names(data.terms, data.valid_sources)
    blend_names += validation_measure_names(data.terms, data.valid_sources, of_average=True)
    if name in blend_names and not is_known:
        rule = "is a measure of a dataset of the blend, of which a validation may read no sample"
        yield Problem(_BEST_BY, name, rule, "Give that dataset in data.valid_paths, as in {wiki: PREFIX}.")
    elif not is_known:
        yield Problem(_BEST_BY, name, "is not a measure of this run", way_out)
    elif interval == 0:
        way_out = f"Add {interval_key}={saves}, or leave checkpoint.keep_best out."
        yield Problem(_BEST_BY, name, f"is never measured before the end of the run with {interval_key}=0", way_out)
    elif math.lcm(saves, interval) >= total_steps:
        yield Problem(
            _BEST_BY, name,
            f"is measured every {interval} steps, and checkpoint.interval_steps={saves} saves none of these steps "
            f"before the last, {total_steps}",
            f"Use {interval_key}={saves}, or smaller values for both in so short a run.",
        )  # fmt: skip
    elif is_of_average and checkpoint.ema.first_measured_step(math.lcm(saves, interval)) >= total_steps:
        yield Problem(
            _BEST_BY, name,
            f"is measured every {interval} steps from step {checkpoint.ema.from_step} on, and "
            f"checkpoint.interval_steps={saves} saves none of these steps before the last, {total_steps}",
            "Use a smaller checkpoint.ema.from_step.",
        )  # fmt: skip


def text_dataset_prefix(run_dir: str, text_dir: str | None) -> str:
    """Return the prefix of the dataset that a run makes of data.text: in `text_dir`, or by default in the run's own
    folder `run_dir`.
    """
    return str((Path(text_dir) if text_dir else Path(run_dir) / DATA) / TEXT_PREFIX)


def text_problems(data: DataSettings, run: RunSettings) -> Iterator[Problem]:
    """Yield a problem if data.text and data.path both name the training data."""
    if data.text is None:
        return
    path = text_dataset_prefix(run.dir, data.text_dir)
    yield from problem_if(
        os.path.realpath(data.path) != os.path.realpath(path), "data.path", data.path,
        f"and data.text={data.text} both name the data to train on",
        f"Leave data.path out to train on a dataset made of the text, {path}, or leave data.text out.",
    )  # fmt: skip
