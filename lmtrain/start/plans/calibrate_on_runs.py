"""The figures of a machine, fitted to runs that were measured on it (`lmtrain plan --calibrate`). Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import yaml

from lmtrain.errors import DataError, MissingInputError, UsageError, leave_out, way
from lmtrain.plan.calibrate_to_measured_steps import (
    DATA_SHEET_FIGURES,
    MACHINE_FACTORS,
    Calibration,
    MeasuredRun,
    calibrate,
    machine_cost_model,
)
from lmtrain.plan.cost_model.hardware_figures import Hardware
from lmtrain.runfolder.file_names import CONFIG, METRICS
from lmtrain.runfolder.folder_reader import not_a_run
from lmtrain.runfolder.metrics_rows import read_metrics
from lmtrain.runtime.files.atomic_files import atomic_file
from lmtrain.runtime.files.existing_output import Kind, check_output, holds
from lmtrain.start.plans.plan_question_and_search import load_hardware
from lmtrain.train.layouts.dry_run_speed_and_memory import planned_run
from lmtrain.train.run_config import RunConfig, read_run_config

_WARMUP_STEPS = 5  # left out, as they allocate memory and fill caches
_MIN_TIMES = 3
_GROUP = "hardware"
_MADE_BY = "`lmtrain plan --calibrate` wrote this"
_HARDWARE_FILE = Kind("a config that `lmtrain plan --calibrate` wrote", holds(_MADE_BY))


def check_hardware_file(out: Path, *, overwrite: bool) -> None:
    """Raise an LmtrainError if the fitted machine cannot be written to the file `out`: hardware=NAME could not choose
    it there, or another file is in its place that may not be replaced.
    """
    if out.parent.name != _GROUP or out.suffix != ".yaml":
        raise UsageError(
            f"--output={out} must be a file NAME.yaml in a folder called hardware, so that hardware=NAME can choose "
            f"it. Use {way(f'--output={out.parent / _GROUP / out.stem}.yaml')}."
        )
    check_output(out, _HARDWARE_FILE, overwrite=overwrite)


def calibrate_runs(arguments: Sequence[str], config_dir: Path | None, out: Path | None) -> dict[str, Any]:
    """Fit the efficiency factors of a machine's hardware config to the measured step times of two or more runs on it.
    Return the result as JSON-ready data, and write the fitted config to the file `out` if given.

    `arguments` are folders of runs, and hardware=NAME if the runs' settings do not name the machine.
    """
    folders = [Path(word) for word in arguments if "=" not in word]
    if len(folders) < 2:
        raise UsageError(
            f"--calibrate needs two or more runs, because it predicts each run from a fit to the others, and "
            f"{len(folders)} were given. Give folders of runs with different widths, lengths or layouts."
        )
    resolved = [folder.resolve() for folder in folders]
    if repeated := next((folders[n] for n, path in enumerate(resolved) if path in resolved[:n]), None):
        raise UsageError(
            f"--calibrate was given the run {repeated} twice, but it predicts each run from a fit to other runs. "
            "Give every run once."
        )
    if no_run := next((folder for folder in folders if not (folder / CONFIG).is_file()), None):
        raise MissingInputError(not_a_run(no_run, f"it has no {CONFIG}"))
    configs = [read_run_config(folder) for folder in folders]
    hardware = _find_hardware([word for word in arguments if "=" in word], configs, config_dir)
    runs = [
        _measure_run(folder, replace(config, hardware=hardware))
        for folder, config in zip(folders, configs, strict=True)
    ]
    calibration = calibrate(hardware, runs)
    if out is not None:
        _write_hardware(out, replace(calibration.hardware, name=out.stem), hardware.name, len(runs))
    return _calibration_facts(hardware, runs, calibration) | {"file": out and str(out)}


def _measure_run(folder: Path, config: RunConfig) -> MeasuredRun:
    """Return the run in `folder` as the planner sees it, with the median of its measured step times in seconds and
    their relative spread. If the run has stages, the stage with the most measured steps is taken. Raise a DataError if
    there are fewer than three step times.
    """
    path = folder / METRICS
    try:
        rows = read_metrics(path)
        times_of_stages = [(stage, [*_step_times(stage, rows)]) for stage in config.stage_configs]
        config, times = max(times_of_stages, key=lambda measured: len(measured[1]))
        are_times = all(0 < seconds < math.inf for seconds in times)
    except (KeyError, TypeError):  # because: valid rows have these fields with numbers in them
        are_times = False
    if not are_times:
        raise DataError(
            f"{path} is damaged or was not written by lmtrain: the time of a row is missing, or not later than that of "
            "the row before. Leave this run out."
        )
    if len(times) < _MIN_TIMES:
        raise DataError(
            f"The run {folder} has recorded {len(times)} step times with the full batch after its first "
            f"{_WARMUP_STEPS} steps, and --calibrate needs at least {_MIN_TIMES}. Give a longer run, or one with a "
            "smaller observe.log_interval_steps."
        )
    low, middle, high = quantiles(times, n=4)
    return MeasuredRun(str(folder), planned_run(config, config.model), middle, (high - low) / 2 / middle)


def _step_times(config: RunConfig, rows: Sequence[dict[str, Any]]) -> Iterator[float]:
    """Yield the mean seconds per step between each two successive step rows of metrics.jsonl (`rows`) in the stage of
    `config`. Left out are pairs with a restart of the run between them, the first steps after each start, and steps
    with a batch below its full size.
    """
    first_steps: dict[Any, int] = {}  # attempt -> its first step
    for row, next_row in pairwise(rows):
        if {row.get("stage", ""), next_row.get("stage", "")} != {config.stage_name}:
            continue
        first_steps.setdefault(row["attempt"], row["step"])
        steps = next_row["step"] - row["step"]
        are_adjacent = row["event"] == next_row["event"] == "step" and row["attempt"] == next_row["attempt"]
        if are_adjacent and steps > 0 and row["step"] - first_steps[row["attempt"]] >= _WARMUP_STEPS:
            sizes = {config.batch_plan.range_of(step)[1] for step in (row["step"], next_row["step"] - 1)}
            if sizes == {config.train.global_batch}:
                yield (next_row["elapsed_s"] - row["elapsed_s"]) / steps


def _find_hardware(arguments: Sequence[str], configs: Sequence[RunConfig], config_dir: Path | None) -> Hardware:
    """Return the machine to fit: the one that the arguments hardware=NAME and hardware.KEY=VALUE describe, or without
    such arguments the one that the settings of the runs name. Raise a UsageError if they name none or several, or on
    any other argument.
    """
    hardware_overrides = [word for word in arguments if word.startswith(f"{_GROUP}.")]
    names = [word for word in arguments if word.startswith(f"{_GROUP}=")]
    unknown = [word for word in arguments if word not in (*hardware_overrides, *names)]
    if wrong := unknown or names[1:]:
        raise UsageError(
            f"{wrong[0]} cannot be given to --calibrate, which takes folders of runs and at most one "
            f"hardware=NAME. {leave_out(*wrong)}."
        )
    if arguments:
        return load_hardware(names[0].partition("=")[2] if names else None, hardware_overrides, config_dir)
    machines = {config.hardware.name: config.hardware for config in configs if config.hardware is not None}
    if len(machines) != 1:
        raise UsageError(
            "--calibrate fits one machine, but the machines in the settings of the runs are: "
            f"{' and '.join(sorted(machines)) or 'none'}. Give hardware=NAME, the config to start from."
        )
    return next(iter(machines.values()))


def _calibration_facts(hardware: Hardware, runs: Sequence[MeasuredRun], calibration: Calibration) -> dict[str, Any]:
    """Return the calibration as JSON-ready data: for each run the relative error of its predicted step time before and
    after the fit, and for each figure of the machine, such as its bandwidth, (old, new).
    """
    old_factors, new_factors = machine_cost_model(hardware).time, machine_cost_model(calibration.hardware).time
    return {
        "hardware": hardware.name,
        "runs": [
            {"run": run.name, "measured_step_s": run.step_s, "before": before, "after": after}
            for run, before, after in zip(runs, calibration.before, calibration.after, strict=True)
        ],
        "median_before": median(map(abs, calibration.before)),
        "median_after": median(map(abs, calibration.after)),
        "interval": calibration.hardware.interval,
        "figures": {
            name: (_first_number(hardware, name), _first_number(calibration.hardware, name))
            for name in DATA_SHEET_FIGURES
        }
        | {name: (old_factors[name], new_factors[name]) for name in MACHINE_FACTORS},
    }


def _first_number(hardware: Hardware, name: str) -> float:
    """Return a machine's figure as a number. If it has one value per precision, return the first, as they are scaled
    together.
    """
    value = getattr(hardware, name)
    return float(next(iter(value.values())) if isinstance(value, dict) else value)


def _write_hardware(path: Path, hardware: Hardware, base_name: str, num_runs: int) -> None:
    """Write the machine as a YAML hardware config to `path`. A comment in its first line names `base_name`, the config
    from which the fit started, and the number of runs.
    """
    comment = f"# {base_name}, as {num_runs} runs on it have shown; {_MADE_BY}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write((comment + yaml.safe_dump(hardware.to_dict(), sort_keys=False)).encode())
