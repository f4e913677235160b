"""Runs one step of corpus building over JSON lines: any number of workers, any part of the work, the same bytes.

A step sees documents one by one and says what becomes of each; it never knows which worker or part it runs in.
Called by the verbs of `lmtrain corpus`. At most a few blocks are in memory, and files appear only when whole.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, ClassVar, Protocol

from data_tools.read.records import (
    BLOCK_BYTES,
    WHOLE,
    Block,
    Document,
    Part,
    Reading,
    cut,
    find_files,
    read_block,
    to_line,
)
from lmtrain.errors import DataError, MissingInputError, OutOfMemoryError, UsageError
from lmtrain.runtime.files import atomic_file, read_errors, read_json, write_json

Documents = Iterator[tuple[int, Document]]  # positions and documents
Progress = Callable[[str, int], None]  # the step, and documents done


@dataclass
class Tally:
    """What became of the documents, by cause."""

    num_in: int = 0
    num_out: int = 0
    bytes_in: int = 0  # of text, as UTF-8
    bytes_out: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # documents that are gone, by cause
    changed: Counter[str] = field(default_factory=Counter)  # what was mended or marked in those that stayed

    def keep(self, text: str) -> None:
        self.num_out += 1
        self.bytes_out += len(text.encode())

    def drop(self, cause: str) -> None:
        self.dropped[cause] += 1

    def add(self, other: Tally) -> None:
        self.num_in += other.num_in
        self.num_out += other.num_out
        self.bytes_in += other.bytes_in
        self.bytes_out += other.bytes_out
        self.dropped += other.dropped
        self.changed += other.changed


@dataclass(frozen=True)
class Report:
    """A step's tally, as it is written beside its output."""

    step: str
    tally: Tally

    def to_dict(self) -> dict[str, Any]:
        facts = vars(self.tally)
        return {"step": self.step} | {
            name: dict(sorted(value.items())) if isinstance(value, Counter) else value for name, value in facts.items()
        }

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> Report:
        values = {name: facts[name] for name in ("num_in", "num_out", "bytes_in", "bytes_out")}
        return cls(facts["step"], Tally(**values, dropped=Counter(facts["dropped"]), changed=Counter(facts["changed"])))


class Step(Protocol):
    """Documents to bytes for each of the step's files. Sent to the workers, so it holds plain data."""

    @property
    def name(self) -> str: ...

    @property
    def files(self) -> Sequence[str]: ...  # what `run` gives bytes for; the caller says where they go

    def run(self, documents: Documents, key: str, tally: Tally) -> dict[str, bytes]: ...


@dataclass(frozen=True)
class Collect:
    """The step that changes nothing: several inputs, compressed or not, become one file."""

    name: ClassVar[str] = "collect"
    files: ClassVar[Sequence[str]] = ("documents",)

    def run(self, documents: Documents, key: str, tally: Tally) -> dict[str, bytes]:
        lines = []
        for _, document in documents:
            tally.keep(document[key])
            lines.append(to_line(document))
        return {"documents": b"".join(lines)}


@dataclass(frozen=True)
class Work:
    """How a step is run; nothing here changes what it writes, except that a part writes its part."""

    workers: int = 1
    part: Part = WHOLE
    reading: Reading = field(default_factory=Reading)
    block_bytes: int = BLOCK_BYTES
    progress: Progress | None = None


def run_step(step: Step, inputs: Sequence[str | Path], outputs: dict[str, Path], work: Work, report: Path) -> Report:
    """Write each of the step's files, and the report last: where it stands, all is done."""
    if work.workers < 1:
        raise UsageError(f"--workers={work.workers} must be at least 1. Leave it out to use every core.")
    files = find_files(inputs)
    refuse_overwriting(files, outputs.values())
    tally = Tally()
    with ExitStack() as stack:
        targets = {name: stack.enter_context(atomic_file(work.part.name(outputs[name]))) for name in step.files}
        blocks = cut(files, work.part, work.reading, work.block_bytes)
        for chunks, found in _results(step, blocks, work):
            for name, data in chunks.items():
                targets[name].write(data)
            tally.add(found)
            if work.progress is not None:
                work.progress(step.name, tally.num_in)
    result = Report(step.name, tally)
    write_json(work.part.name(report), result.to_dict())
    return result


def refuse_overwriting(files: Iterable[Path], outputs: Iterable[Path]) -> None:
    inputs = {path.resolve() for path in files}
    for path in outputs:
        if path.resolve() in inputs:
            raise UsageError(f"--output={path} is also an input. Choose another output.")


def report_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.report.json")


def read_report(path: Path) -> Report:
    try:
        return Report.from_dict(read_json(path))
    except (KeyError, TypeError) as error:
        raise DataError(f"{path} is not a step's report (no {error}). Remove it and run the step again.") from error


def merge_parts(output: Path) -> int:
    """Join the parts of a file in order and remove them; returns how many there were."""
    parts = _parts_of(output)
    with atomic_file(output) as target:
        for path in parts:
            with read_errors(path), open(path, "rb") as source:
                shutil.copyfileobj(source, target, 1 << 20)
    for path in parts:
        path.unlink()
    return len(parts)


def merge_reports(report: Path) -> None:
    """Add up the reports of a step's parts."""
    parts = _parts_of(report)
    found = [read_report(path) for path in parts]
    tally = Tally()
    for one in found:
        tally.add(one.tally)
    write_json(report, Report(found[0].step, tally).to_dict())
    for path in parts:
        path.unlink()


def _parts_of(output: Path) -> list[Path]:
    stem, dot, rest = output.name.partition(".")
    pattern = re.compile(rf"{re.escape(stem)}\.part-(\d{{5}})-of-(\d{{5}}){re.escape(dot + rest)}")
    folder = output.parent
    names = sorted(name for name in os.listdir(folder) if pattern.fullmatch(name)) if folder.is_dir() else []
    if not names:
        raise MissingInputError(f"{output} has no parts beside it. Give the --output that the parts were run with.")
    counts = {name[pattern.fullmatch(name).start(2) : pattern.fullmatch(name).end(2)] for name in names}  # type: ignore[union-attr]
    if len(counts) > 1:
        raise DataError(f"{output} has parts of {' and of '.join(sorted(counts))}. Remove those of the other run.")
    wanted = [Part(i, int(next(iter(counts)))).name(output) for i in range(int(next(iter(counts))))]
    missing = [path.name for path in wanted if not path.exists()]
    if missing:
        raise MissingInputError(f"{output} lacks {len(missing)} parts, {missing[0]} first. Run those parts again.")
    return wanted


def merge_outputs(output: Path) -> list[tuple[Path, int]]:
    """All that a step's parts wrote: (file, number of parts). `output` is a file, or the folder that split wrote to."""
    outputs = parts_stems(output) if output.is_dir() else [output]
    report = output / "split.report.json" if output.is_dir() else report_path(output)
    merged = [(path, merge_parts(path)) for path in outputs]
    if not merged:
        raise MissingInputError(f"{output} holds no parts. Give the --output that the parts were run with.")
    merge_reports(report)
    return merged


def parts_stems(folder: Path) -> list[Path]:
    """The files of a folder that exist in parts, by their whole names."""
    pattern = re.compile(r"(.+)\.part-\d{5}-of-\d{5}(\..+)?")
    found = (pattern.fullmatch(name) for name in os.listdir(folder) if not name.endswith(".report.json"))
    return sorted({folder / f"{match[1]}{match[2] or ''}" for match in found if match})


# ---- one block in a worker, and the pool -----------------------------------------------------------------------------


def run_block(step: Step, block: Block, reading: Reading) -> tuple[dict[str, bytes], Tally]:
    tally = Tally()

    def bad_line(cause: str) -> None:
        tally.num_in += 1
        tally.drop(cause)

    def counted() -> Documents:
        for position, document in read_block(block, reading, bad_line):
            tally.num_in += 1
            tally.bytes_in += len(document[reading.key].encode())
            yield position, document

    return step.run(counted(), reading.key, tally), tally


_job: tuple[Step, Reading] | None = None  # of this worker process


def _start_worker(step: Step, reading: Reading) -> None:
    global _job
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _job = (step, reading)


def _end_with_parent() -> None:
    # because: the workers of a killed pool hold both ends of its pipes and would wait for ever
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_in_worker(block: Block) -> tuple[dict[str, bytes], Tally]:
    assert _job is not None, "_start_worker runs first"
    return run_block(_job[0], block, _job[1])


def _results(step: Step, blocks: Iterable[Block], work: Work) -> Iterator[tuple[dict[str, bytes], Tally]]:
    if work.workers == 1:
        for block in blocks:
            yield run_block(step, block, work.reading)
        return
    pool = ProcessPoolExecutor(work.workers, get_context("spawn"), _start_worker, (step, work.reading))
    running: deque[Future[tuple[dict[str, bytes], Tally]]] = deque()
    try:
        for block in blocks:
            running.append(pool.submit(_run_in_worker, block))
            if len(running) >= 2 * work.workers:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    except BrokenProcessPool as error:
        raise OutOfMemoryError("A worker process was killed, most likely for memory. Use fewer --workers.") from error
    finally:
        pool.shutdown(cancel_futures=True)
