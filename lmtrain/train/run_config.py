"""The settings of a run, and all checks across settings. Torch-free, so that a wrong run is refused at once.

Called by the command line (compose -> RunConfig), by set-up, and by the generated reference. Each component has
checked itself by the time `RunConfig` exists; this module has the rules that involve two components.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.checkpoint_settings import CheckpointSettings
from lmtrain.config.settings_base import AdjustedDefault, Problem, Settings, kinds, problem_if
from lmtrain.config.settings_builder import build_settings
from lmtrain.data.batch_plan import BatchPlan
from lmtrain.data.data_settings import DataChoice, DataSettings
from lmtrain.errors import spelling_hint
from lmtrain.layout import Layout
from lmtrain.models.model_settings import ModelSettings
from lmtrain.observe.measure.measure_names import validation_measure_names
from lmtrain.optim.optim_settings import OptimSettings
from lmtrain.optim.schedule_settings import ScheduleSettings
from lmtrain.parallel.device_and_precision_settings import (
    ComputeSettings,
    NoRecomputeSettings,
    PrecisionSettings,
    RecomputeSettings,
)
from lmtrain.placement.parallel_settings import ParallelSettings, batch_problems, layout_problems, rampup_problems
from lmtrain.plan.price.hardware import Hardware
from lmtrain.runfolder.file_names import DATA, TEXT_PREFIX
from lmtrain.runfolder.folder_reader import read_settings, read_working_directory
from lmtrain.train.adjust_conflicting_defaults import adjust_defaults
from lmtrain.train.train_settings import EvalSettings, ObserveSettings, RunSettings, TrainSettings, count_steps

_BEST_BY = "checkpoint.best_by"
_PATH_KEYS = (
    r"data\.(?:(?:(?:valid_)?datasets\.)?path|valid_path|valid_paths\..+|tokenizer|index_dir|text|text_dir)|"
    r"eval\.tasks\.data|checkpoint\.(?:resume|init_from)"
)
# Limits on quantities that code enumerates before a run begins; no real run comes near them.
MAX_PARAMETERS = 10**15
MAX_INCREMENTS = 10_000


def best_by_problems(
    checkpoint: CheckpointSettings, data: DataChoice, train: TrainSettings, evaluation: EvalSettings, total_steps: int
) -> Iterator[Problem]:
    """Yield a problem if checkpoint.best_by names a measure that the run never takes, takes only at its end, or never
    takes at a step whose checkpoint is saved. `total_steps` is the number of steps of the run.
    """
    name, saves = checkpoint.best_by, checkpoint.interval_steps
    if checkpoint.keep_best == 0 or not saves:
        return
    if name.startswith("eval/"):
        interval, interval_key = evaluation.interval_steps, "eval.interval_steps"
        prefixes = [f"eval/{task.measure_name}/" for task in evaluation.tasks]
        is_known = any(name.startswith(prefix) for prefix in prefixes)
        names_to_use = " or ".join(f"{prefix}MEASURE" for prefix in prefixes)
        way_out = f"Use {names_to_use}." if prefixes else "Add its task to eval.tasks."
    else:
        interval, interval_key = train.valid_interval_steps, "train.valid_interval_steps"
        names = validation_measure_names(data.terms, data.valid_paths)
        is_known, way_out = name in names, spelling_hint(name, names)
    if not is_known:
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


@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings):
    model: ModelSettings
    data: DataChoice
    optim: OptimSettings
    schedule: ScheduleSettings
    precision: PrecisionSettings
    parallel: ParallelSettings
    recompute: RecomputeSettings = field(default_factory=NoRecomputeSettings)
    compute: ComputeSettings
    train: TrainSettings
    eval: EvalSettings = field(default_factory=EvalSettings)
    checkpoint: CheckpointSettings
    observe: ObserveSettings
    run: RunSettings
    hardware: Hardware | None = None  # the machine for the planner; null: the planner predicts memory alone

    def problems(self) -> Iterator[Problem]:
        yield from self.problems_across({f.name: getattr(self, f.name) for f in fields(self)})

    @classmethod
    def problems_across(cls, parts: Mapping[str, Any]) -> Iterator[Problem]:
        if "parallel" in parts and parts["parallel"].auto:
            yield from problem_if(
                parts.get("hardware") is None, "parallel.auto", True,
                "leaves the layout to the planner, which needs a machine, and hardware=null names none",
                "Add hardware=h100 or another machine; `lmtrain config list hardware` lists them.",
            )  # fmt: skip
            parts = {name: part for name, part in parts.items() if name != "parallel"}  # not chosen yet
        hardware = parts.get("hardware")
        if hardware is not None and "precision" in parts:
            kind = parts["precision"].kind
            yield from problem_if(
                hardware.peak(kind) == 0, "hardware.peak_tflops", hardware.peak_tflops,
                f"has no figure for precision={kind}",
                f"Add hardware.peak_tflops.{kind}=TFLOPS, or use another precision.",
            )  # fmt: skip
        if hardware is not None and "compute" in parts:
            device = parts["compute"].device
            yield from problem_if(
                device not in ("auto", hardware.device), "compute.device", device,
                f"is another kind of device than that of hardware={hardware.name}",
                f"Use compute.device=auto, or the matching hardware{' (hardware=cpu)' * (device == 'cpu')}.",
            )  # fmt: skip
        if {"model", "parallel", "compute"} <= parts.keys():
            model, compiles = parts["model"], parts["compute"].compile is True
            yield from layout_problems(
                model.shape, parts["parallel"], uses_dropout=model.uses_dropout, compiles=compiles
            )
        if {"precision", "compute"} <= parts.keys():
            kind = parts["precision"].kind
            yield from problem_if(
                parts["compute"].tf32 and kind != "fp32", "compute.tf32", True,
                f"only affects fp32 matrix products, and precision={kind} computes none",
                "Use compute.tf32=false, or precision=fp32.",
            )  # fmt: skip
        if "model" in parts:
            yield from problem_if(
                parts["model"].num_parameters > MAX_PARAMETERS, "model.width", parts["model"].shape.width,
                f"and the other sizes make {parts['model'].num_parameters:.1e} parameters; at most "
                f"{MAX_PARAMETERS:.0e} are allowed",
                "Use a smaller width, fewer layers, or a smaller seq_len or ffn_width.",
            )  # fmt: skip
            for problem in parts["model"].unused():
                yield replace(problem, key=f"model.{problem.key}")
        if {"model", "data"} <= parts.keys():
            yield from _label_problems(parts["model"], parts["data"])
        if {"data", "run"} <= parts.keys() and isinstance(parts["data"], DataSettings):
            yield from _text_problems(parts["data"], parts["run"])
        if {"model", "eval"} <= parts.keys():
            yield from problem_if(
                bool(parts["eval"].tasks) and not parts["model"].shape.causal, "eval.tasks",
                [task.measure_name for task in parts["eval"].tasks],
                f"score the continuation of a text, and model={parts['model'].kind} sees both sides of a word",
                "Leave eval.tasks out; validation measures how well masked words are predicted.",
            )  # fmt: skip
        if {"train", "data"} <= parts.keys() and parts["train"].valid_interval_steps == 0:
            yield from parts["data"].problems_without_validation()
        if {"recompute", "model"} <= parts.keys():
            for problem in parts["recompute"].problems_in_model(parts["model"].shape.num_layers):
                yield replace(problem, key=f"recompute.{problem.key}")
        if {"recompute", "parallel"} <= parts.keys():
            yield from parts["recompute"].problems_in_layout(parts["parallel"])
        if {"observe", "parallel"} <= parts.keys():
            ranks, world_size = parts["observe"].profile_ranks or (0,), parts["parallel"].layout.world_size
            yield from problem_if(
                max(ranks) >= world_size, "observe.profile_ranks", list(ranks),
                f"names a rank that does not exist: the ranks of this run are 0 to {world_size - 1}",
                "Use observe.profile_ranks=[0].",
            )  # fmt: skip
        if not {"train", "parallel"} <= parts.keys():
            return
        train: TrainSettings = parts["train"]
        layout = parts["parallel"].layout
        yield from batch_problems(layout, train.global_batch, train.micro_batch)
        rampup_faults = list(_rampup_problems(train, layout))
        yield from rampup_faults
        if rampup_faults or "model" not in parts:
            return
        steps = count_steps(train, parts["model"].shape.seq_len)
        if "schedule" in parts:
            for problem in parts["schedule"].problems_in_run(steps):
                yield replace(problem, key=f"schedule.{problem.key}")
        if "observe" in parts:
            yield from _observe_problems(parts["observe"], steps)
        if {"checkpoint", "data", "eval"} <= parts.keys():
            yield from best_by_problems(parts["checkpoint"], parts["data"], train, parts["eval"], steps)

    @classmethod
    def adjust_defaults(cls, tree: dict[str, Any], typed_values: Mapping[str, str]) -> list[AdjustedDefault]:
        adjusted = list(adjust_defaults(tree, typed_values))
        _set_path_of_text(tree, typed_values)
        return adjusted

    @property
    def seq_len(self) -> int:
        return self.model.shape.seq_len

    @property
    def batch_plan(self) -> BatchPlan:
        return BatchPlan(self.train.global_batch, self.train.rampup)

    @property
    def total_steps(self) -> int:
        return count_steps(self.train, self.seq_len)

    def flops_per_token(self, model: ModelSettings) -> float:
        """Return model FLOPs per token, as MFU counts them; `model` has the tokenizer's vocabulary."""
        return model.shape.flops_per_token(self.seq_len, scored_share=self.data.scored_share(self.seq_len))


def text_dataset_prefix(run_dir: str, text_dir: str | None) -> str:
    """Return the prefix of the dataset that a run makes of data.text: in `text_dir`, or by default in the run's own
    folder `run_dir`.
    """
    return str((Path(text_dir) if text_dir else Path(run_dir) / DATA) / TEXT_PREFIX)


def _set_path_of_text(tree: dict[str, Any], typed_values: Mapping[str, str]) -> None:
    """Set data.path in `tree`, the settings as nested dicts, to the dataset that will be made of data.text. A typed
    data.path stays, and is refused later.
    """
    data, run = tree.get("data"), tree.get("run")
    if not isinstance(data, dict) or not isinstance(run, dict) or not isinstance(data.get("text"), str):
        return
    if not issubclass(kinds(DataChoice).get(str(data.get("kind")), DataChoice), DataSettings):
        return  # because: a blend has neither of the keys
    text_dir, is_typed = data.get("text_dir"), "data.text" in typed_values and "data.path" not in typed_values
    if (is_typed or data.get("path") is None) and isinstance(text_dir, str | None):
        data["path"] = text_dataset_prefix(str(run.get("dir")), text_dir)


def _text_problems(data: DataSettings, run: RunSettings) -> Iterator[Problem]:
    """Yield a problem if data.text and data.path both name the training data."""
    if data.text is None:
        return
    path = text_dataset_prefix(run.dir, data.text_dir)
    yield from problem_if(
        os.path.realpath(data.path) != os.path.realpath(path), "data.path", data.path,
        f"and data.text={data.text} both name the data to train on",
        f"Leave data.path out to train on a dataset made of the text, {path}, or leave data.text out.",
    )  # fmt: skip


def _observe_problems(observe: ObserveSettings, steps: int) -> Iterator[Problem]:
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


def _label_problems(model: ModelSettings, data: DataChoice) -> Iterator[Problem]:
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


def _rampup_problems(train: TrainSettings, layout: Layout) -> Iterator[Problem]:
    """Yield a problem if the batch-size ramp-up starts above train.global_batch, does not reach it in whole increments,
    takes more than MAX_INCREMENTS, or does not fit the layout. Yield nothing without a ramp-up.
    """
    rampup, global_batch = train.rampup, train.global_batch
    if rampup is None:
        return
    yield from rampup_problems(layout, rampup, train.micro_batch)
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


def read_run_config(run_folder: Path) -> RunConfig:
    """Read the settings recorded in `run_folder` at the run's last start. Raise SettingsError if this version of
    lmtrain does not accept them.
    """
    return build_settings(RunConfig, read_settings(run_folder))


def with_resolved_paths(settings: dict[str, Any], run_folder: Path) -> dict[str, Any]:
    """Return a copy of a run's recorded settings in which relative paths (of data, tokenizer, checkpoints) start with
    the directory in which the run was launched, so that they can be opened from another directory.

    Paths stay as they are if the run began in the current folder. The folder is derived from the run's present place by
    removing the run.dir it was given, so that a moved tree still works. If run.dir cannot show this (an absolute path,
    for example), the run's own record of the folder is used.
    """
    place, run_settings = run_folder.resolve(), settings.get("run")
    run_dir = Path(str(run_settings.get("dir", "")) if isinstance(run_settings, dict) else "")
    num_parts = len(run_dir.parts)
    start = Path(*place.parts[:-num_parts]) if num_parts else None
    if run_dir.is_absolute() or ".." in run_dir.parts or place.parts[-num_parts:] != run_dir.parts:
        start = read_working_directory(run_folder)
    if start is None or start == Path.cwd():
        return settings
    return {key: _prefix_paths(start, key, value) for key, value in settings.items()}


def _prefix_paths(folder: Path, key: str, setting: Any) -> Any:
    """Return `setting` with `folder` put before each relative path in it, if the dotted `key` is that of a path; groups
    and lists are searched recursively.
    """
    if isinstance(setting, dict):
        return {name: _prefix_paths(folder, f"{key}.{name}", item) for name, item in setting.items()}
    if isinstance(setting, list):
        return [_prefix_paths(folder, key, item) for item in setting]
    is_path = isinstance(setting, str) and re.fullmatch(_PATH_KEYS, key)
    if not is_path or (key == "checkpoint.resume" and setting in ("auto", "none")):
        return setting
    return str(folder / setting)
