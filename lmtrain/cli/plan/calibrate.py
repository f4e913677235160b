"""`lmtrain plan --calibrate RUN...`: what measured runs say of a machine, as a file to choose it by. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import yaml

from lmtrain.cli.plan.planning import hardware_of
from lmtrain.cli.screen.console import print_table
from lmtrain.cli.screen.terminal import echo, print_json
from lmtrain.errors import DataError, MissingInputError, UsageError
from lmtrain.observe.screen.row_text import milliseconds
from lmtrain.plan.calibrate import FIGURES, MACHINE_FACTORS, Calibration, MeasuredRun, calibrate, machine_prices
from lmtrain.plan.price.hardware import Hardware
from lmtrain.runfolder.names import CONFIG, METRICS
from lmtrain.runfolder.rows import read_metrics
from lmtrain.runtime.files.files import atomic_file
from lmtrain.train.config import RunConfig, read_run_config
from lmtrain.train.layouts.dry_run import planned_run

_FIRST_STEPS = 5  # which make memory and fill caches
_LEAST_TIMES = 3
_GROUP = "hardware"


def calibrate_runs(words: Sequence[str], config_dir: Path | None, out: Path | None, as_json: bool) -> None:
    """`words` are folders of runs, and hardware=NAME where the runs do not name the machine themselves."""
    if out is not None and (out.parent.name != _GROUP or out.suffix != ".yaml"):
        raise UsageError(
            f"--output={out} could not be chosen as {_GROUP}=NAME, which is a file NAME.yaml in a folder called "
            f"{_GROUP}. Write --output={out.parent / _GROUP / out.stem}.yaml."
        )
    folders = [Path(word) for word in words if "=" not in word]
    if len(folders) < 2:
        raise UsageError(
            f"--calibrate was given {len(folders)} runs, and each is judged by what the others say. "
            "Name two or more folders of runs, of different widths, lengths or layouts."
        )
    if twice := next((one for at, one in enumerate(folders) if one.resolve() in map(Path.resolve, folders[:at])), None):
        raise UsageError(
            f"--calibrate was given {twice} twice, and each run is judged by what the others say. Name it once."
        )
    if odd := next((folder for folder in folders if not (folder / CONFIG).is_file()), None):
        raise MissingInputError(f"{odd} is not a run: it holds no {CONFIG}. Give the folder that was its run.dir.")
    configs = [read_run_config(folder) for folder in folders]
    hardware = _hardware([word for word in words if "=" in word], configs, config_dir)
    pairs = zip(folders, configs, strict=True)
    measured = [_measured(folder, replace(config, hardware=hardware)) for folder, config in pairs]
    found = calibrate(hardware, measured)
    if out is not None:
        _write(out, replace(found.hardware, name=out.stem), hardware.name, len(measured))
    facts = _facts(hardware, measured, found)
    return print_json(facts | {"file": out and str(out)}) if as_json else _print(facts, out)


def _measured(folder: Path, config: RunConfig) -> MeasuredRun:
    """Return a run as the planner prices it, and how long its steps took."""
    path = folder / METRICS
    try:
        times = [*_step_times(config, read_metrics(path))]
        are_times = all(0 < seconds < math.inf for seconds in times)
    except (KeyError, TypeError):  # because: rows of ours have these fields, and numbers in them
        are_times = False
    if not are_times:
        raise DataError(
            f"{path} has rows that say no time, or one that is not after the row before. It is damaged or not one of "
            "our files. Leave this run out."
        )
    if len(times) < _LEAST_TIMES:
        raise DataError(
            f"{folder} tells of {len(times)} times between rows of metrics, after its first {_FIRST_STEPS} steps and "
            f"with the whole batch, and {_LEAST_TIMES} are the least. Give a longer run, or one with a smaller "
            "observe.log_interval_steps."
        )
    low, middle, high = quantiles(times, n=4)
    return MeasuredRun(str(folder), planned_run(config, config.model), middle, (high - low) / 2 / middle)


def _step_times(config: RunConfig, rows: Sequence[dict[str, Any]]) -> Iterator[float]:
    """Seconds of a step between one row and the next, where nothing else was done in between."""
    first: dict[Any, int] = {}  # by attempt: where it began
    for row, after in pairwise(rows):
        first.setdefault(row["attempt"], row["step"])
        steps = after["step"] - row["step"]
        plain = row["event"] == after["event"] == "step" and row["attempt"] == after["attempt"]
        if plain and steps > 0 and row["step"] - first[row["attempt"]] >= _FIRST_STEPS:
            sizes = {config.batch_plan.range_of(step)[1] for step in (row["step"], after["step"] - 1)}
            if sizes == {config.train.global_batch}:
                yield (after["elapsed_s"] - row["elapsed_s"]) / steps


def _hardware(words: Sequence[str], configs: Sequence[RunConfig], config_dir: Path | None) -> Hardware:
    changes = [word for word in words if word.startswith(f"{_GROUP}.")]
    names = [word for word in words if word.startswith(f"{_GROUP}=")]
    others = [word for word in words if word not in (*changes, *names)]
    if others or len(names) > 1:
        wrong = others[0] if others else names[1]
        raise UsageError(f"{wrong} is nothing that --calibrate takes. Give folders of runs, and {_GROUP}=NAME once.")
    if words:
        return hardware_of(names[0].partition("=")[2] if names else None, changes, config_dir)
    given = {config.hardware.name: config.hardware for config in configs if config.hardware is not None}
    if len(given) != 1:
        named = f"name {' and '.join(sorted(given))}" if given else "name none"
        raise UsageError(
            f"--calibrate fits the figures of one machine, and the runs {named}. Add {_GROUP}=NAME to begin with."
        )
    return next(iter(given.values()))


def _facts(hardware: Hardware, measured: Sequence[MeasuredRun], found: Calibration) -> dict[str, Any]:
    was, now = machine_prices(hardware).time, machine_prices(found.hardware).time
    return {
        "hardware": hardware.name,
        "runs": [
            {"run": one.name, "measured_step_s": one.step_s, "before": before, "after": after}
            for one, before, after in zip(measured, found.before, found.after, strict=True)
        ],
        "median_before": median(map(abs, found.before)),
        "median_after": median(map(abs, found.after)),
        "interval": found.hardware.interval,
        "figures": {name: (_number(hardware, name), _number(found.hardware, name)) for name in FIGURES}
        | {name: (was[name], now[name]) for name in MACHINE_FACTORS},
    }


def _number(hardware: Hardware, name: str) -> float:
    """Return a figure of a machine; of several precisions, which are scaled together, the first."""
    value = getattr(hardware, name)
    return float(next(iter(value.values())) if isinstance(value, dict) else value)


def _print(facts: dict[str, Any], out: Path | None) -> None:
    print_table([
        {"<run": row["run"], "step": milliseconds(row["measured_step_s"])}
        | {"off before": f"{row['before']:+.1%}", "off after": f"{row['after']:+.1%}"}
        for row in facts["runs"]
    ])  # fmt: skip
    echo(
        f"median {facts['median_before']:.1%} before, {facts['median_after']:.1%} after, where each run is judged by a "
        "fit to the others alone."
    )
    changes = [f"{name} {old:.3g} -> {new:.3g}" for name, (old, new) in facts["figures"].items()]
    echo(f"{facts['hardware']}: {', '.join(changes)}")
    if out is None:
        echo(f"Nothing is written: --output DIR/{_GROUP}/NAME.yaml keeps it.")
    else:
        echo(f"{out} is written. Choose it with --config-dir {out.parent.parent} {_GROUP}={out.stem}")


def _write(path: Path, hardware: Hardware, base: str, num_runs: int) -> None:
    said = f"# {base}, as {num_runs} runs on it have shown; `lmtrain plan --calibrate` wrote this\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write((said + yaml.safe_dump(hardware.to_dict(), sort_keys=False)).encode())
