"""Runs all steps of a corpus from one YAML file: clean, dedupe, decontaminate, shuffle, split.

Called by `lmtrain corpus build`. A step that the file does not name is skipped. Each step's output stays in
OUTPUT/work; a second run repeats only steps that changed or did not finish.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from data_tools.corpus.clean import build_clean
from data_tools.corpus.copies.decontaminate import DecontaminateStep, read_passages
from data_tools.corpus.copies.dedupe import (
    EXACT_FILE,
    INPUTS_FILE,
    NEAR_FILE,
    DropStep,
    MinHash,
    SignStep,
    check_inputs,
    find_pairs,
    has_inputs,
    mark_exact,
    mark_near,
    record_inputs,
)
from data_tools.corpus.flow.run_one_corpus_step_in_workers import (
    SPLIT_REPORT,
    CollectStep,
    ReadOptions,
    Report,
    ReportDocuments,
    StepOptions,
    check_outputs,
    find_step_sources,
    read_report,
    report_path,
    run_step,
    write_documents,
)
from data_tools.corpus.split_sample_shuffle import SplitStep, shuffle, split_outputs
from data_tools.read.find_input_files import Inputs
from data_tools.read.parse_chunks_and_bad_lines import OnError
from lmtrain import __version__
from lmtrain.config.build_typed_settings import build_settings
from lmtrain.config.name_suggestions import SettingNames
from lmtrain.config.settings_base import Problem, Settings
from lmtrain.config.strict_yaml import read_yaml
from lmtrain.errors import UsageError, example
from lmtrain.runtime.files.atomic_files import read_json, storage_errors, write_json
from lmtrain.runtime.files.existing_output import Found, Kind, begins_with, check_output, file_identities, made_from

DOCUMENTS, REPORTS = "documents.jsonl", "report.json"
# because: a kill while the folder is removed may leave any of its files
_WORK_FILE = re.compile(rf"\..*|{re.escape(INPUTS_FILE)}|sign(\.part-.*)?\.report\.json|.*\.(u64|u16|i64)")
_WORK = Kind(
    "the work folder of `lmtrain corpus dedupe` or `sign`",
    lambda path: all(map(_WORK_FILE.fullmatch, os.listdir(path))),
    is_folder=True,
)
_REPORTS = Kind("the report of `lmtrain corpus build`", begins_with(b'[\n {\n  "step"'))


@dataclass(frozen=True, kw_only=True)
class CleanSettings(Settings):
    """Settings of the step `clean`."""

    rules: tuple[str, ...] = ("gopher", "lines_ending_in_punctuation")  # groups, rules, limits (min_words=20)
    scripts: tuple[str, ...] = ()  # allowed scripts, such as latin; empty: all
    min_script_share: float = 0.5  # share of letters in the allowed scripts, 0 to 1

    def problems(self) -> Iterator[Problem]:
        yield from self.problem_if(
            not 0 <= self.min_script_share <= 1, "min_script_share", "must be from 0 to 1",
            f"Give a share, such as {example(0.5)}.",
        )


@dataclass(frozen=True, kw_only=True)
class DedupeSettings(Settings):
    """Settings of the step `dedupe`."""

    near: bool = True  # drop near copies too, not only exact copies
    threshold: float = 0.8  # minimal Jaccard similarity of five-word runs at which two texts are copies
    keep: Literal["first", "longest"] = "first"

    def problems(self) -> Iterator[Problem]:
        yield from self.problem_if(
            not 0 < self.threshold <= 1, "threshold", "must be above 0 and at most 1",
            f"Give a similarity, such as {example(0.8)}.",
        )


@dataclass(frozen=True, kw_only=True)
class DecontaminateSettings(Settings):
    """Settings of the step `decontaminate`."""

    against: tuple[str, ...]  # paths of files with evaluation texts
    action: Literal["cut", "drop"] = "cut"

    def problems(self) -> Iterator[Problem]:
        yield from self.problem_if(not self.against, "against", "names no file", "Give the evaluation texts.")


@dataclass(frozen=True, kw_only=True)
class SplitSettings(Settings):
    """Settings of the step `split`."""

    ratios: tuple[float, ...] = (0.98, 0.01, 0.01)  # shares of train, valid, test; their sum is 1
    by: Literal["id", "text"] = "text"

    def problems(self) -> Iterator[Problem]:
        wrong = len(self.ratios) != 3 or min(self.ratios, default=-1) < 0 or abs(sum(self.ratios) - 1) > 1e-9
        way_out = f"Give shares such as {example('[0.98,0.01,0.01]')}."
        yield from self.problem_if(wrong, "ratios", "are not three shares that add up to 1", way_out)


@dataclass(frozen=True, kw_only=True)
class BuildSettings(Settings):
    """Settings of `lmtrain corpus build`, the content of its YAML file; a step that is None is skipped."""

    inputs: tuple[str, ...]  # paths of files or folders, or globs
    output: str  # path of a folder
    key: str = "text"
    on_error: Literal["stop", "skip"] = "stop"  # action at a bad line
    seed: int = 0  # seed of the order and the split
    clean: CleanSettings | None = None
    dedupe: DedupeSettings | None = None
    decontaminate: DecontaminateSettings | None = None
    shuffle: bool = True
    split: SplitSettings | None = None

    def problems(self) -> Iterator[Problem]:
        yield from self.problem_if(not self.inputs, "inputs", "names no file", "Give files of text.")


def read_recipe(path: Path) -> BuildSettings:
    """Read the settings from a YAML file. The file is data only: no interpolation is resolved and nothing is called."""
    return build_settings(BuildSettings, read_yaml(path).data, names=SettingNames(BuildSettings))


@dataclass(frozen=True)
class _BuildStep:
    """A step of the build, with the settings that decide whether its earlier output can be reused."""

    name: str
    settings: dict[str, Any]
    run: Callable[[Inputs, Path], Report]  # inputs, output


def build_corpus(
    recipe: BuildSettings, workers: int = 1, report: ReportDocuments | None = None, *, overwrite: bool = False
) -> list[Report]:
    """Run the steps that a recipe names and return the report of each; none if an earlier call has done it all. Steps
    that an earlier call completed with the same settings and inputs are skipped. Raise OutputError if other files are
    in the place of the output, unless `overwrite` is given. `report` is called with a step's name and the documents
    done so far.

    The folder recipe.output receives documents.jsonl, or train, valid and test files if the recipe has a split.
    """
    options = StepOptions(workers, ReadOptions(recipe.key, OnError(recipe.on_error)), report)
    folder = Path(recipe.output) / "work"
    made, begun = _made_from(recipe), folder / "begun.json"
    if not (begun.exists() and read_json(begun) == made) and not _check_places(recipe, made, overwrite):
        return []
    write_json(begun, made)
    inputs: Inputs = recipe.inputs
    reports: list[Report] = []
    for number, step in enumerate(_build_steps(recipe, options), 1):
        output = folder / f"{number}-{step.name}.jsonl"
        key = _step_key(step, inputs, recipe)
        done = output.with_suffix(".done.json")
        if not (done.exists() and read_json(done) == {"key": key} and output.exists()):
            check_outputs([output], report_path(output), None, None, overwrite=True)
            done.unlink(missing_ok=True)
            step.run(inputs, output)
            write_json(done, {"key": key})
        reports.append(read_report(report_path(output)))
        inputs = [output]
    reports.append(_write_output(recipe, inputs, replace(options, made_from=made)))
    write_json(Path(recipe.output) / REPORTS, [report.to_dict() for report in reports])
    begun.unlink()
    return reports


def _made_from(recipe: BuildSettings) -> str:
    """Return the text about a recipe and its files that the output's report records."""
    others = [] if recipe.decontaminate is None else map(Path, recipe.decontaminate.against)
    facts = {key: value for key, value in recipe.to_dict().items() if key != "output"}
    return made_from(facts, [*(source.path for source in find_step_sources(recipe.inputs)), *others])


def _check_places(recipe: BuildSettings, made: str, overwrite: bool) -> bool:
    """Return whether to write the output: False if it was made from the same. Raise OutputError if it must stay."""
    outputs, report = _outputs(recipe)
    is_new = check_outputs([*outputs.values()], report, recipe.key, made, overwrite=overwrite)
    check_output(Path(recipe.output) / REPORTS, _REPORTS, overwrite=overwrite, is_default=True)
    return is_new


def _outputs(recipe: BuildSettings) -> tuple[dict[str, Path], Path]:
    """Return the files of the output, by name, and the report beside them."""
    output = Path(recipe.output)
    if recipe.split is not None:
        return split_outputs(output), output / SPLIT_REPORT
    return {"documents": output / DOCUMENTS}, report_path(output / DOCUMENTS)


def _build_steps(recipe: BuildSettings, options: StepOptions) -> list[_BuildStep]:
    """Return the steps clean, dedupe, decontaminate and shuffle, in this order, without those that the recipe leaves
    out.
    """
    steps: list[_BuildStep] = []
    if (clean := recipe.clean) is not None:
        cleaning = build_clean(clean.rules, clean.scripts, clean.min_script_share)
        steps.append(_BuildStep("clean", clean.to_dict(), lambda i, o: write_documents(cleaning, i, o, options)))
    if (dedupe := recipe.dedupe) is not None:
        steps.append(_BuildStep("dedupe", dedupe.to_dict(), lambda i, o: dedupe_documents(i, o, dedupe, options)))
    if (decontaminate := recipe.decontaminate) is not None:
        files = [Path(name) for name in decontaminate.against]
        facts = decontaminate.to_dict() | {"files": file_identities(files)}
        cutting = DecontaminateStep(read_passages(files), decontaminate.action)
        steps.append(_BuildStep("decontaminate", facts, lambda i, o: write_documents(cutting, i, o, options)))
    if recipe.shuffle:
        steps.append(_BuildStep("shuffle", {}, lambda i, o: shuffle(i, o, options, report_path(o), recipe.seed)))
    return steps


def _step_key(step: _BuildStep, inputs: Inputs, recipe: BuildSettings) -> str:
    """Return a hash of a step's name, its settings, the version of lmtrain, and the path, size and modification time of
    its input files. If the hash is the same as at an earlier run, the step's output is still valid.
    """
    files = file_identities([source.path for source in find_step_sources(inputs)])
    facts = [__version__, step.name, step.settings, recipe.key, recipe.on_error, recipe.seed, files]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def dedupe_documents(inputs: Inputs, output: Path, settings: DedupeSettings, options: StepOptions) -> Report:
    """Write the documents to `output` without exact copies and, if the settings say so, near copies. Temporary files
    are in a work folder beside `output`, which is removed at the end.
    """
    folder = output.with_name(f"{output.name}.work")
    check_output(folder, _WORK, overwrite=False, is_default=True)
    clear_folder(folder)
    try:
        sign_documents(inputs, folder, MinHash() if settings.near else None, options)
        mark_exact(folder)
        if settings.near:
            find_pairs(folder, settings.threshold)
            mark_near(folder, settings.keep)
        return drop_copies(inputs, folder, output, options)
    finally:
        clear_folder(folder)


def clear_folder(folder: Path) -> None:
    """Remove a folder of temporary files if it exists; it may come from an earlier run that was killed."""
    if folder.is_dir():
        with storage_errors(folder, "Removing"):
            shutil.rmtree(folder)


def sign_documents(
    inputs: Inputs, folder: Path, minhash: MinHash | None, options: StepOptions, *, overwrite: bool = False
) -> Report:
    """Write a hash of every document to files in `folder`, for finding exact copies. With `minhash`, also write MinHash
    signatures, for finding near copies. Raise OutputError if the folder is of other inputs, unless `overwrite` is
    given, or if it is another folder.
    """
    goes_on = has_inputs(folder, inputs, minhash)
    if check_output(folder, _WORK, overwrite=overwrite, is_unfinished=goes_on) is Found.OTHER:
        if not options.reading.part.is_whole:
            raise UsageError(f"--overwrite with --part removes what other tasks write. Remove {folder} first.")
        clear_folder(folder)
    record_inputs(folder, inputs, minhash)
    outputs = {"rows": folder / "rows.u64", "signatures": folder / "signatures.u16"}
    return run_step(SignStep(minhash), inputs, outputs, options, folder / "sign.report.json")


def drop_copies(inputs: Inputs, folder: Path, output: Path, options: StepOptions) -> Report:
    """Write to `output` the input documents that files in the work folder `folder` do not list as exact or near copies.
    Raise DataError if the folder was made for other inputs, MissingInputError if `sign_documents` has not written to
    it.
    """
    check_inputs(folder, inputs)
    marks = zip(("exact copy", "near copy"), marks_of_copies(folder), strict=True)
    step = DropStep(tuple(mark for mark in marks if mark[1].exists()))
    return write_documents(step, inputs, output, options)


def marks_of_copies(folder: Path) -> list[Path]:
    """Return the files of a work folder that list exact and near copies; they may not exist."""
    return [folder / EXACT_FILE, folder / NEAR_FILE]


def _write_output(recipe: BuildSettings, inputs: Inputs, options: StepOptions) -> Report:
    """Write the documents of the last step to the output folder: as documents.jsonl, or as train, valid and test files
    if the recipe has a split.
    """
    outputs, report = _outputs(recipe)
    split = recipe.split
    step = CollectStep() if split is None else SplitStep(split.ratios, recipe.seed, split.by)
    return run_step(step, inputs, outputs, options, report)
