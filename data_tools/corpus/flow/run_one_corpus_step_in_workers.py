"""Runs one step of corpus building over JSON lines; output bytes do not depend on the number of workers or parts.

A step receives documents one by one and decides what to write for each; it never knows its worker or part. Called by
the verbs of `lmtrain corpus`. At most a few chunks are in memory, and output files appear only when complete.

Steps read whole documents with their positions, and treat bad lines like preprocessing does. A position is one integer
of the source's number and the offset of the line's first byte; it grows along the inputs, so that every task can
compute it without reading earlier documents.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any, ClassVar, Protocol

from data_tools.read.cut_files_into_chunks import (
    START,
    WHOLE_PART,
    MemoryBudget,
    Portion,
    SizeLimits,
    TaskPart,
    cut_portions,
)
from data_tools.read.find_input_files import STDIN, Inputs, Source, find_sources
from data_tools.read.parse_chunks_and_bad_lines import (
    WHOLE_FILE,
    BadLine,
    BadLines,
    ChunkBadLines,
    OnError,
    collect_bad_lines,
    read_content,
)
from data_tools.read.process_portions_in_workers import build_budget, process_portions
from lmtrain.errors import DataError, LmtrainError, MissingInputError, UsageError, leave_out
from lmtrain.runtime.files.atomic_files import atomic_file, read_errors, read_json, write_json
from lmtrain.runtime.files.existing_output import Found, Kind, begins_with, check_output, has_rows_with, made_from
from lmtrain.tokenizer.text_from_json_lines import Document, Reject

Documents = Iterator[tuple[int, Document]]  # (position, document) pairs
OFFSET_BITS = 44  # offset bits of a position: a million files of up to 16 TiB each
SPLITS = ("train", "valid", "test")
SPLIT_REPORT = "split.report.json"  # in the folder of the step `split`
_REPORT = Kind("the report of a corpus step", begins_with(b'{\n "step":'))
# parameters of a command on which its output does not depend
_WITHOUT_EFFECT = ("workers", "memory", "output", "overwrite")
ReportDocuments = Callable[[str, int], None]  # receives the step's name and the number of documents done


class Step(Protocol):
    """Interface of a step, which converts documents to bytes for each of its files. It is pickled for workers."""

    @property
    def name(self) -> str: ...

    @property
    def files(self) -> Sequence[str]: ...  # names of the outputs of `run`; the caller chooses their paths

    def run(self, documents: Documents, key: str, tally: Tally) -> dict[str, bytes]:
        """Return output name -> bytes for these documents, whose text is under `key`; count them in the tally."""


class SelectionStep(ABC):
    """Base of steps that write a subset of the documents, changed or not, to one file."""

    files: ClassVar[Sequence[str]] = ("documents",)

    def run(self, documents: Documents, key: str, tally: Tally) -> dict[str, bytes]:
        lines = []
        for document in self.select_documents(documents, key, tally):
            tally.keep(document[key])
            lines.append(to_line(document))
        return {"documents": b"".join(lines)}

    @abstractmethod
    def select_documents(self, documents: Documents, key: str, tally: Tally) -> Iterator[Document]:
        """Yield the documents to write, and count dropped documents in the tally."""


@dataclass(frozen=True)
class CollectStep(SelectionStep):
    """The step `collect`: writes all documents of several inputs, compressed or not, to one file."""

    name: ClassVar[str] = "collect"

    def select_documents(self, documents: Documents, key: str, tally: Tally) -> Iterator[Document]:
        return (document for _, document in documents)


@dataclass(frozen=True)
class ReadOptions:
    """Options for reading documents: the text's key, the action at a bad line, size limits, and the part to read."""

    key: str | None = "text"  # None: a line needs no text
    on_error: OnError = OnError.STOP
    limits: SizeLimits = field(default_factory=SizeLimits)
    part: TaskPart = WHOLE_PART

    def cut_portions(self, sources: Sequence[Source], budget: MemoryBudget) -> Iterator[Portion]:
        """Cut the sources into portions for the workers, and yield those that belong to the part to read."""
        return cut_portions(sources, START, self.limits, (self.key or "text",), budget, self.part)


@dataclass(frozen=True)
class StepOptions:
    """Options for running a step: workers, what to read, progress. They do not change the output's bytes."""

    workers: int = 1
    reading: ReadOptions = field(default_factory=ReadOptions)
    report: ReportDocuments | None = None
    made_from: str | None = None  # what the report records of inputs and options; see existing_output.py

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"--workers={self.workers} must be at least 1. {leave_out()} to use every core.")


def run_step(
    step: Step, inputs: Inputs, outputs: dict[str, Path], options: StepOptions, report_file: Path
) -> Report:
    """Run a corpus step on all input documents in worker processes. Write its output files (name -> path in `outputs`),
    then the report: if the report exists, the step is complete.
    """
    part = options.reading.part
    sources = find_step_sources(inputs, read_once=part.is_whole)
    refuse_overwriting(sources, outputs.values())
    tally, bad_lines = Tally(), BadLines(options.reading.on_error)
    budget = build_budget(options.workers, options.reading.limits)
    portions, build = options.reading.cut_portions(sources, budget), partial(StepWorker, step, options.reading)
    with ExitStack() as stack:
        targets = {name: stack.enter_context(atomic_file(part.output_path(outputs[name]))) for name in step.files}
        results = process_portions(portions, build, options.workers, budget, use_processes=options.workers > 1)
        for portion, result in stack.enter_context(results):
            count_bad_lines(portion, result.bad, bad_lines)
            for name, data in result.files.items():
                targets[name].write(data)
            tally.add(result.tally)
            if options.report is not None:
                options.report(step.name, tally.num_in)
        if part.is_whole:
            require_documents(step.name, tally)
        part.output_path(report_file).unlink(missing_ok=True)  # because: it must not describe another output
    return Report(step.name, tally, options.made_from).write(part.output_path(report_file))


def write_documents(step: Step, inputs: Inputs, output: Path, options: StepOptions) -> Report:
    """Run a corpus step that writes one file, `output`, with its report beside it."""
    return run_step(step, inputs, {"documents": output}, options, report_path(output))


def require_documents(step: str, tally: Tally) -> None:
    """Raise DataError if a step read no document or wrote none. `step` is its name, `tally` its counts.

    Called for whole inputs only: a part may be empty.
    """
    if not tally.num_in:
        raise DataError(f"{step}: the input holds no document. Check the files and their --format.")
    if not tally.num_out and tally.dropped.total() >= tally.num_in:
        causes = ", ".join(f"{number} {cause}" for cause, number in tally.dropped.most_common(5))
        raise DataError(f"{step} leaves none of {tally.num_in} documents: {causes}. Check the input and the settings.")


def refuse_overwriting(sources: Iterable[Source], outputs: Iterable[Path]) -> None:
    """Raise UsageError if one of the output paths is also an input file."""
    inputs = {os.path.realpath(source.path) for source in sources}
    for path in outputs:
        if os.path.realpath(path) in inputs:
            raise UsageError(f"--output={path} is also an input. Choose another output.")


# ---- one portion in a worker


@dataclass
class StepResult:
    """A worker's result for a portion."""

    files: dict[str, bytes]
    tally: Tally
    bad: list[ChunkBadLines]  # bad lines of each chunk, in order


class StepWorker:
    """Worker that runs a step on the documents of a portion."""

    def __init__(self, step: Step, reading: ReadOptions) -> None:
        self._step, self._reading = step, reading
        # because: memory is reserved for one longest document at a time, whatever the number of workers
        self._long_document_lock = RLock()

    def run(self, portion: Portion) -> StepResult:
        """Run the step on the documents of a portion, which is a part of the input files. Return the bytes for each
        output file, the counts and the bad lines.
        """
        tally, key = Tally(), self._reading.key
        assert key is not None, "a step needs the key of the text"
        reader = PortionReader(portion, self._reading, self._long_document_lock)

        def count_documents() -> Documents:
            for position, document in reader:
                tally.num_in += 1
                tally.bytes_in += len(document[key].encode())
                yield position, document

        files = self._step.run(count_documents(), key, tally)
        for chunk in portion.chunks:
            chunk.content = None  # because: the portion is kept until its output is written; its content is not needed
        for bad_lines, _ in reader.bad:
            tally.num_in += len(bad_lines)
            tally.drop_bad(bad_lines)
        return StepResult(files, tally, reader.bad)


# ---- documents of the sources


def find_step_sources(inputs: Inputs, *, read_once: bool = False) -> list[Source]:
    """Return a Source for each input file of a step. Raise UsageError if standard input is among them, unless
    `read_once` states that the step reads its input only once.
    """
    sources = find_sources(inputs)
    if not read_once and STDIN in {source.path for source in sources}:
        raise UsageError("Standard input can be read only once, but this step reads its input twice. Give files.")
    return sources


class PortionReader:
    """Iterable over a portion's documents; afterwards `bad` holds the bad lines of each chunk."""

    def __init__(self, portion: Portion, reading: ReadOptions, long_document_lock: RLock) -> None:
        self._portion, self._reading, self._long_document_lock = portion, reading, long_document_lock
        self.bad: list[ChunkBadLines] = []  # bad lines of each chunk, in order

    def __iter__(self) -> Documents:
        for chunk in self._portion.chunks:
            with ExitStack() as locks:
                lock_long_documents = partial(locks.enter_context, self._long_document_lock)
                content, bad = read_content(chunk, self._reading.limits, lock_long_documents)
                rejects: list[Reject] = []
                for item, document in content.documents(self._reading.key):
                    if isinstance(document, Reject):
                        rejects.append(document)
                    else:
                        yield chunk.source << OFFSET_BITS | content.position(item), document
                self.bad.append(collect_bad_lines(chunk, content, bad + content.locate_rejects(rejects)))


def read_documents(
    sources: Sequence[Source], reading: ReadOptions, drop_bad: Callable[[Sequence[BadLine]], object]
) -> Documents:
    """Yield (position, document) for all documents of the sources, in order, without worker processes. `drop_bad` is
    called with the bad lines that are skipped, to count them.
    """
    bad_lines = BadLines(reading.on_error)
    for portion in reading.cut_portions(sources, MemoryBudget(2**62)):
        reader = PortionReader(portion, reading, RLock())
        yield from reader
        count_bad_lines(portion, reader.bad, bad_lines)
        for bad, _ in reader.bad:
            drop_bad(bad)


def count_bad_lines(portion: Portion, bad_by_chunk: Sequence[ChunkBadLines], bad_lines: BadLines) -> None:
    """Count the bad lines of a portion, given for each of its chunks. Raise DataError at the first bad line if the run
    is to stop there.
    """
    for chunk, (bad, num_lines) in zip(portion.chunks, bad_by_chunk, strict=True):
        bad_lines.add(chunk, bad, num_lines)


def to_line(document: Document) -> bytes:
    """Return a document as a line of JSON with its newline, in UTF-8."""
    try:
        return json.dumps(document, ensure_ascii=False, separators=(", ", ": ")).encode() + b"\n"
    except UnicodeEncodeError:  # another field has a lone surrogate, which only an escape can hold
        return json.dumps(document, separators=(", ", ": ")).encode() + b"\n"


# ---- counts and reports


@dataclass
class Tally:
    """Counts of documents and bytes, and of drops and changes by cause."""

    num_in: int = 0
    num_out: int = 0
    bytes_in: int = 0  # UTF-8 bytes of text
    bytes_out: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # dropped documents by cause
    changed: Counter[str] = field(default_factory=Counter)  # repairs and marks in kept documents

    def keep(self, text: str) -> None:
        """Count a document that is written."""
        self.num_out += 1
        self.bytes_out += len(text.encode())

    def drop(self, cause: str) -> None:
        """Count a dropped document under its cause."""
        self.dropped[cause] += 1

    def drop_bad(self, bad_lines: Sequence[BadLine]) -> None:
        """Count bad lines as dropped documents."""
        self.dropped.update(
            line.counted_as if line.counted_as.startswith(WHOLE_FILE) else f"bad line: {line.kind}"
            for line in bad_lines
        )

    def add(self, other: Tally) -> None:
        """Add the counts of another tally."""
        for name, number in vars(other).items():
            setattr(self, name, getattr(self, name) + number)


@dataclass(frozen=True)
class Report:
    """A step's tally, as written beside its output."""

    step: str
    tally: Tally
    made_from: str | None = field(default=None, compare=False)  # text of `existing_output.made_from`; None: unknown

    def to_dict(self) -> dict[str, Any]:
        counts = {
            name: dict(sorted(value.items())) if isinstance(value, Counter) else value
            for name, value in vars(self.tally).items()
        }
        return {"step": self.step} | counts | ({} if self.made_from is None else {"made_from": self.made_from})

    def write(self, path: Path) -> Report:
        """Write the report as JSON, and return it."""
        write_json(path, self.to_dict())
        return self


def report_path(output: Path) -> Path:
    """Return the path of the report beside a step's output."""
    return output.with_name(f"{output.name}.report.json")


def check_outputs(
    outputs: Sequence[Path], report_file: Path, key: str | None, made_from: str | None, *, overwrite: bool
) -> bool:
    """Return whether a step has to write its output files, of documents with their text under `key` if it is given, and
    its report: False if the report records that they were made of the same inputs and options, `made_from`. Raise
    OutputError if one of them must not be replaced.
    """
    with_text = "" if key is None else f' with a text under "{key}"'
    kind = Kind(f"a file of JSON lines{with_text}", has_rows_with(*([] if key is None else [key])))
    is_same = made_from is not None and all(map(Path.is_file, outputs)) and _recorded(report_file) == made_from
    found = [check_output(path, kind, overwrite=overwrite, is_same=is_same) for path in outputs]
    check_output(report_file, _REPORT, overwrite=overwrite, is_default=True, is_same=is_same)
    return Found.SAME not in found


def check_outputs_of_command(
    name: str, params: Mapping[str, Any], inputs: Inputs, outputs: Sequence[Path], report: Path,
    more_inputs: Sequence[Path],
) -> tuple[bool, str | None]:  # fmt: skip
    """Return whether a command of `lmtrain corpus` with these parameters has to write its outputs and its report, as
    `check_outputs` does, and what the report is to record of inputs and options, None if standard input is read.
    `more_inputs` are other files on which the result depends.
    """
    sources, part = find_sources(inputs), TaskPart.parse(params.get("part", "0/1"))
    refuse_overwriting(sources, outputs)
    options = {option: value for option, value in params.items() if option not in _WITHOUT_EFFECT}
    files = [source.path for source in sources]
    made = None if STDIN in files else made_from([name, options], [*files, *more_inputs])
    paths = [part.output_path(path) for path in outputs]
    return check_outputs(paths, part.output_path(report), params["key"], made, overwrite=params["overwrite"]), made


def _recorded(report_file: Path) -> str | None:
    """Return what the report at a path records of inputs and options; None if it is no report or records nothing."""
    try:
        facts = read_json(report_file) if report_file.is_file() else {}
    except LmtrainError:
        return None
    return facts.get("made_from") if isinstance(facts, dict) else None


def read_report(path: Path) -> Report:
    """Read a step's report from its JSON file. Raise DataError if the file is not a report."""
    try:
        facts = read_json(path)
        values = {name: facts[name] for name in ("num_in", "num_out", "bytes_in", "bytes_out")}
        tally = Tally(**values, dropped=Counter(facts["dropped"]), changed=Counter(facts["changed"]))
        return Report(facts["step"], tally)
    except (KeyError, TypeError) as error:
        raise DataError(f"{path} is not the report of a step ({error}). Remove it and run the step again.") from error


# ---- merging the parts of an array of tasks


def merge_parts(output: Path) -> int:
    """Join the files that the tasks of a job array wrote, such as a.part-00000-of-00016.jsonl, into the file `output`,
    in order. Remove these files and return their number.
    """
    parts = _find_parts(output)
    with atomic_file(output) as target:
        for path in parts:
            with read_errors(path), open(path, "rb") as source:
                shutil.copyfileobj(source, target, 1 << 20)
    for path in parts:
        path.unlink()
    return len(parts)


def _is_joined(output: Path) -> bool:
    """Return whether the file `output` has the content of its part files, one after the other."""
    with suppress(OSError), open(output, "rb") as joined:
        for path in _find_parts(output):
            with open(path, "rb") as part:
                while data := part.read(1 << 20):
                    if joined.read(len(data)) != data:
                        return False
        return not joined.read(1)
    return False


def _find_parts(output: Path) -> list[Path]:
    """Return the part files that the tasks of a job array wrote for the file `output`, in order. Raise
    MissingInputError if there are none or one is missing, DataError if they come from arrays of different sizes.
    """
    stem, dot, rest = output.name.partition(".")
    pattern = re.compile(rf"{re.escape(stem)}\.part-(\d{{5}})-of-(\d{{5}}){re.escape(dot + rest)}")
    folder = output.parent
    names = sorted(name for name in os.listdir(folder) if pattern.fullmatch(name)) if folder.is_dir() else []
    if not names:
        raise MissingInputError(f"{output} has no part files beside it. Give the --output of the runs with --part.")
    counts = {match[2] for name in names if (match := pattern.fullmatch(name))}
    if len(counts) > 1:
        raise DataError(
            f"{output} has files of runs with {' and '.join(sorted(counts))} parts. Keep the files of one run only."
        )
    parts = [TaskPart(i, int(next(iter(counts)))).output_path(output) for i in range(int(next(iter(counts))))]
    missing = [path.name for path in parts if not path.exists()]
    if missing:
        raise MissingInputError(f"{output} lacks {len(missing)} parts, such as {missing[0]}. Run those parts again.")
    return parts


def merge_outputs(output: Path, *, overwrite: bool = False) -> list[tuple[Path, int]]:
    """Join the part files that the tasks of a job array wrote for a corpus step, write the sum of their reports, and
    remove the parts. Return (joined file, number of parts) for each output file. `output` is the step's output file, or
    the output folder of the step `split`. Raise OutputError if another file is in the place of one, unless `overwrite`
    is given.
    """
    outputs = outputs_in_parts(output) if output.is_dir() else [output]
    report = output / SPLIT_REPORT if output.is_dir() else report_path(output)
    if not outputs:
        raise MissingInputError(f"{output} holds no part files. Give the --output of the runs with --part.")
    parts, tally = _find_parts(report), Tally()
    reports = [read_report(path) for path in parts]
    for report_of_part in reports:
        tally.add(report_of_part.tally)
    require_documents(reports[0].step, tally)
    # because: a merge that was killed before it removed the parts goes on
    others = [path for path in outputs if not _is_joined(path)]
    key = "text" if any(map(has_rows_with("text"), _find_parts(outputs[0]))) else None
    check_outputs(others, report, key, None, overwrite=overwrite)
    merged = [(path, merge_parts(path)) for path in outputs]
    Report(reports[0].step, tally).write(report)
    for path in parts:
        path.unlink()
    return merged


def outputs_in_parts(folder: Path) -> list[Path]:
    """Return the paths to which files like a.part-00000-of-00016.jsonl in this folder are to be joined (a.jsonl),
    sorted.
    """
    pattern = re.compile(r"(.+)\.part-\d{5}-of-\d{5}(\..+)?")
    matches = (pattern.fullmatch(name) for name in os.listdir(folder) if not name.endswith(".report.json"))
    return sorted({folder / f"{match[1]}{match[2] or ''}" for match in matches if match})
