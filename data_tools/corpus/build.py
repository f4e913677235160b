"""All steps of a corpus in a row, from one YAML file: clean, dedupe, decontaminate, shuffle, split.

Called by `lmtrain corpus build`. Each step's output stays in OUTPUT/work; a second run does again only what changed
or had not finished.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_tools.corpus.build_settings import BuildSettings, DedupeSettings
from data_tools.corpus.copies.copies import EXACT, NEAR, find_pairs, mark_exact, mark_near
from data_tools.corpus.copies.decontaminate import Decontaminate, read_passages
from data_tools.corpus.copies.signatures import Drop, MinHash, Sign, check_inputs, remember_inputs
from data_tools.corpus.flow.reading import Reading, find_files
from data_tools.corpus.flow.steps import (
    Collect,
    Report,
    ReportDocuments,
    Step,
    Work,
    read_report,
    report_path,
    run_step,
)
from data_tools.corpus.shuffle import Split, shuffle, split_outputs
from data_tools.corpus.text.clean import build_clean
from data_tools.read.rejects import OnError
from data_tools.read.sources import Inputs
from lmtrain.config.build import build_settings
from lmtrain.config.names import Names
from lmtrain.config.yaml_file import read_yaml
from lmtrain.runtime.files.files import read_json, storage_errors, write_json

DOCUMENTS = "documents.jsonl"


def read_recipe(path: Path) -> BuildSettings:
    """The settings in a YAML file; it is data, and nothing in it is resolved or called."""
    return build_settings(BuildSettings, read_yaml(path).data, names=Names(BuildSettings))


@dataclass(frozen=True)
class _Stage:
    name: str
    settings: dict[str, Any]
    run: Callable[[Inputs, Path], Report]  # inputs, output


def build_corpus(recipe: BuildSettings, workers: int = 1, report: ReportDocuments | None = None) -> list[Report]:
    """Run the steps; says what each did. OUTPUT gets documents.jsonl, or train, valid and test where it is split."""
    work = Work(workers, Reading(recipe.key, OnError(recipe.on_error)), report)
    folder = Path(recipe.output) / "work"
    inputs: Inputs = recipe.inputs
    reports: list[Report] = []
    for number, stage in enumerate(_stages(recipe, work), 1):
        output = folder / f"{number}-{stage.name}.jsonl"
        key = _key(stage, inputs, recipe)
        done = output.with_suffix(".done.json")
        if not (done.exists() and read_json(done) == {"key": key} and output.exists()):
            done.unlink(missing_ok=True)
            stage.run(inputs, output)
            write_json(done, {"key": key})
        reports.append(read_report(report_path(output)))
        inputs = [output]
    reports.append(_publish(recipe, inputs, work))
    write_json(Path(recipe.output) / "report.json", [report.to_dict() for report in reports])
    return reports


def _stages(recipe: BuildSettings, work: Work) -> list[_Stage]:
    stages: list[_Stage] = []
    if (clean := recipe.clean) is not None:
        step = build_clean(clean.rules, clean.scripts, clean.min_script_share)
        stages.append(_Stage("clean", clean.to_dict(), _runner(step, work)))
    if (dedupe := recipe.dedupe) is not None:
        stages.append(_Stage("dedupe", dedupe.to_dict(), lambda i, o: dedupe_all(i, o, dedupe, work)))
    if (decontaminate := recipe.decontaminate) is not None:
        files = [Path(name) for name in decontaminate.against]
        facts = decontaminate.to_dict() | {"files": _identity(files)}
        run = _runner(Decontaminate(read_passages(files), decontaminate.action), work)
        stages.append(_Stage("decontaminate", facts, run))
    if recipe.shuffle:
        stages.append(_Stage("shuffle", {}, lambda i, o: shuffle(i, o, work, report_path(o), recipe.seed)))
    return stages


def _runner(step: Step, work: Work) -> Callable[[Inputs, Path], Report]:
    return lambda inputs, output: run_step(step, inputs, {"documents": output}, work, report_path(output))


def _key(stage: _Stage, inputs: Inputs, recipe: BuildSettings) -> str:
    """A name for exactly this step on exactly these files."""
    files = _identity([source.path for source in find_files(inputs)])
    facts = [stage.name, stage.settings, recipe.key, recipe.on_error, recipe.seed, files]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _identity(files: Sequence[Path]) -> list[list[Any]]:
    found = [(path, os.stat(path)) for path in files if path.exists()]
    return [[str(path.resolve()), stat.st_size, stat.st_mtime_ns] for path, stat in found]


def dedupe_all(inputs: Inputs, output: Path, settings: DedupeSettings, work: Work) -> Report:
    """Sign, match and drop in a row; the work folder lies beside the output."""
    folder = output.with_name(f"{output.name}.work")
    clear(folder)
    try:
        sign(inputs, folder, MinHash() if settings.near else None, work)
        mark_exact(folder)
        if settings.near:
            find_pairs(folder, settings.threshold)
            mark_near(folder, settings.keep)
        return drop(inputs, folder, output, work)
    finally:
        clear(folder)


def clear(folder: Path) -> None:
    """Remove a work folder, of this run or of one that was killed."""
    if folder.is_dir():
        with storage_errors(folder, "Removing"):
            shutil.rmtree(folder)


def sign(inputs: Inputs, folder: Path, minhash: MinHash | None, work: Work) -> Report:
    remember_inputs(folder, inputs, minhash)
    outputs = {"rows": folder / "rows.u64", "signatures": folder / "signatures.u16"}
    return run_step(Sign(minhash), inputs, outputs, work, folder / "sign.report.json")


def drop(inputs: Inputs, folder: Path, output: Path, work: Work) -> Report:
    check_inputs(folder, inputs)
    marks = (("exact copy", folder / EXACT), ("near copy", folder / NEAR))
    step = Drop(tuple(mark for mark in marks if mark[1].exists()))
    return run_step(step, inputs, {"documents": output}, work, report_path(output))


def _publish(recipe: BuildSettings, inputs: Inputs, work: Work) -> Report:
    output = Path(recipe.output)
    if recipe.split is not None:
        step = Split(recipe.split.ratios, recipe.seed, recipe.split.by)
        return run_step(step, inputs, split_outputs(output), work, output / "split.report.json")
    return run_step(Collect(), inputs, {"documents": output / DOCUMENTS}, work, report_path(output / DOCUMENTS))
