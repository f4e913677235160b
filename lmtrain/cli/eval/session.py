"""The scoring of `lmtrain eval`: a model is loaded, its tasks run in turn, each result is shown at once.

That of two models, or of two results files with their samples, is compared item by item. Called by evaluate, once the
command line has been judged. An output beside which a journal lies is whole only when "complete" is true in it.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lmtrain import __version__
from lmtrain.checkpoint.store import list_checkpoints
from lmtrain.cli.eval.model_source import on_processes
from lmtrain.cli.screen.console import PlainConsole
from lmtrain.cli.screen.terminal import print_json, print_message
from lmtrain.errors import DataError, LmtrainError, MissingInputError, UsageError, join_few
from lmtrain.eval.report import encode_rows, read_columns, render, render_comparison, sample_rows
from lmtrain.eval.source import Source
from lmtrain.eval.statistics import Comparison, Side, add_baselines, compare
from lmtrain.eval.task import Result, Task, find_task
from lmtrain.eval.texts import TextInput
from lmtrain.observe.screen.row_text import sparkline
from lmtrain.observe.screen.verb_progress import Reporter, progress
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.runfolder.names import CHECKPOINTS, step_from_name
from lmtrain.runtime.files.files import atomic_file, read_json, write_json
from lmtrain.runtime.processes.faults import arm_from_env
from lmtrain.runtime.processes.process import ProcessEnv
from lmtrain.units import format_measure

if TYPE_CHECKING:
    from lmtrain.eval.journal import Journal
    from lmtrain.eval.load import LoadedModel
    from lmtrain.eval.runner import Outcome
    from lmtrain.eval.scoring import SharedAnswers

_CURVE = 40  # characters
Job = tuple[Task, Callable[[Reporter], Path | TextInput]]  # what reads the text, when its turn comes
Pair = tuple[Task, Side, Side]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Of the command line, what the scoring and the showing depend on."""

    baseline: Path | None
    batch_size: int
    stride: int | None
    seq_len: int | None
    limit: int | None
    device: str
    precision: str
    output: Path | None
    samples: Path | None
    as_json: bool
    full: bool


class Session:
    """All processes do the same and have all answers; the first one speaks for them."""

    def __init__(self, jobs: list[Job], options: Options, env: ProcessEnv, settled: Sequence[ParallelSettings]) -> None:
        """`settled`: the layout, for each of the models."""
        arm_from_env()
        self.options, self._env, self._settled, self.jobs = options, env, settled, jobs
        self.console = PlainConsole(stderr=True, quiet=env.rank > 0)
        self.screen = PlainConsole(highlight=False, quiet=env.rank > 0 or options.as_json)
        self._given: dict[int, Path | TextInput] = {}  # by job: texts are read once, however many models there are

    @contextmanager
    def processes(self) -> Iterator[Callable[[Source, int], LoadedModel]]:
        """Hold the processes together, and yield a function that loads a source by its number."""
        with on_processes(self._env, self._settled, self.options.device, self.options.precision) as load:

            def loaded(source: Source, number: int) -> LoadedModel:
                with progress(self.console, f"loading {source.path.name}"):
                    return load(source, self._settled[number])

            yield loaded

    def journal(self) -> AbstractContextManager[Journal]:
        """Open the journal of all models and tasks of this call, once the processes are together."""
        from lmtrain.eval.journal import open_journal
        from lmtrain.runtime.processes.process_group import broadcast_from_rank0

        output = self.options.output if self._env.rank == 0 else None
        return open_journal(output, lambda said: print_message(self.console, said), broadcast_from_rank0)

    def write(self, document: dict[str, Any]) -> None:
        if self.options.output is not None and self._env.rank == 0:
            write_json(self.options.output, document)

    def write_samples(self, path: Path, lines: Sequence[bytes]) -> dict[str, str]:
        """Write items and return their path relative to the results' folder, and their hash."""
        if self._env.rank > 0:
            return {}
        with atomic_file(path) as file:
            file.writelines(lines)
        found = str(path) if self.options.output is None else os.path.relpath(path, self.options.output.parent)
        return {"file": found, "sha256": hashlib.sha256(b"".join(lines)).hexdigest()}

    def end(self, document: dict[str, Any]) -> None:
        """Also after a failure, of what was done before it."""
        if self.options.as_json and self._env.rank == 0:
            print_document(document)

    def outcomes(self, loaded: LoadedModel, journal: Journal) -> Iterator[Outcome]:
        """Yield the outcome of each task as it ends."""
        import torch

        from lmtrain.eval.journal import model_identity
        from lmtrain.eval.scoring import SharedAnswers

        subject, facts = loaded.subject, loaded.facts
        computed = (subject.dtype, subject.layout, facts["device"], torch.__version__, __version__)
        journal.set_identity(model_identity(Path(facts["checkpoint"]), *computed))
        passes = SharedAnswers() if len(self.jobs) > 1 else None
        for number, (task, _) in enumerate(self.jobs):
            yield self._outcome(task, self._text(number), loaded, journal, passes)

    def _text(self, number: int) -> Path | TextInput:
        if number not in self._given:
            task, read = self.jobs[number]
            with progress(self.console, f"{task.id}: read", "bytes", stopped="nothing is written.") as shown:
                self._given[number] = read(shown)
        return self._given[number]

    def _outcome(
        self, task: Task, given: Path | TextInput, loaded: LoadedModel, journal: Journal, passes: SharedAnswers | None
    ) -> Outcome:
        from data_tools.corpora.recipe import published_hashes
        from lmtrain.eval.runner import run

        options, kept = self.options, "the same command goes on from here."
        stopped = kept if options.output else "nothing is kept. With --output FILE the same command would go on."
        with progress(self.console, f"{task.id}: fed", "tokens", stopped=stopped) as shown:
            return run(
                task, loaded.subject, given, stride=options.stride, seq_len=options.seq_len, limit=options.limit,
                hashes=published_hashes() if task.published else None, batch_size=options.batch_size, known=journal,
                passes=passes, progress=shown,
            )  # fmt: skip

    def compared(self, outcome: Outcome, loaded: LoadedModel) -> Outcome:
        """Return an outcome with its baselines, if they were requested and can be counted."""
        if self.options.baseline is None or outcome.prepared.documents is None or self._env.rank > 0:
            return outcome
        with progress(self.console, "counting for the baselines"):
            result = add_baselines(
                outcome.result, outcome.prepared, self.options.baseline, loaded.subject.tokenizer
            )
        return replace(outcome, result=result)


def evaluate_one(source: Source, session: Session) -> None:
    """Evaluate one model; write and print each result as it comes, so that it stays if a later one fails."""
    options, lines = session.options, list[bytes]()
    document = new_document("lmtrain evaluation", model={}, results=[])

    def add(outcome: Outcome, loaded: LoadedModel) -> None:
        outcome = session.compared(outcome, loaded)
        if options.samples is not None:
            prepared, tokenizer = outcome.prepared, loaded.subject.tokenizer
            lines.append(encode_rows(sample_rows(len(lines), outcome.result, prepared, outcome.columns, tokenizer)))
            document["samples"] = session.write_samples(options.samples, lines)
        document["results"].append(outcome.result.to_dict())
        session.write(document)
        session.screen.print(render(outcome.result, loaded.facts, full=options.full))

    with ExitStack() as kept:
        try:
            later: list[Outcome] = []
            with session.processes() as load:
                loaded = load(source, 0)
                document["model"] = loaded.facts
                journal = kept.enter_context(session.journal())
                for outcome in session.outcomes(loaded, journal):
                    if options.baseline is None:
                        add(outcome, loaded)
                    else:  # because: the first process counts alone, which may take longer than others would wait
                        later.append(outcome)
            for outcome in later:
                add(outcome, loaded)
            document["complete"] = True
            session.write(document)
        finally:
            if document["results"]:
                session.end(document)


def new_document(format_: str, **rest: Any) -> dict[str, Any]:
    return {"format": format_, "lmtrain": __version__, "complete": False, **rest}


def print_document(document: dict[str, Any]) -> None:
    print_json(document, ensure_ascii=False, allow_nan=False)


def find_steps(run: Path, asked: str) -> list[Path]:
    """Return a run's checkpoints of the given steps, oldest first."""
    found = {step_from_name(path.name): path for path in list_checkpoints(run / CHECKPOINTS) or list_checkpoints(run)}
    if not found:
        raise MissingInputError(f"{run} holds no checkpoints, which --steps goes through. Give a run's folder.")
    if asked == "all":
        return list(found.values())
    words = [word.strip() for word in asked.split(",")]
    if not all(word.isdecimal() and len(word) < 19 for word in words):
        raise UsageError(f"--steps={asked} is neither all nor steps. Give all, or steps as in --steps 100,200.")
    steps = sorted({int(word) for word in words})
    if missing := [f"{step}" for step in steps if step not in found]:
        raise MissingInputError(
            f"{run} has no checkpoint of step {join_few(missing)}. It has "
            f"{join_few(map(str, found), max_shown=12)}; --steps all is all."
        )
    return [found[step] for step in steps]


def evaluate_steps(sources: Sequence[Source], session: Session) -> None:
    """Evaluate a run's checkpoints; print a line for each, then the recipe of the last one, and the curve."""
    document = new_document("lmtrain evaluation over steps", run=str(sources[0].path.parent), steps=[])
    found: list[tuple[int, list[Result]]] = []
    with ExitStack() as kept:
        try:
            with session.processes() as load:
                journal = None
                for number, source in enumerate(sources):
                    loaded = load(source, number)
                    journal = journal or kept.enter_context(session.journal())
                    found.append((loaded.facts["step"], []))
                    for outcome in session.outcomes(loaded, journal):
                        found[-1][1].append(outcome.result)
                        _print_row(session.screen, loaded.facts["step"], outcome.result)
                    results = [result.to_dict() for result in found[-1][1]]
                    document["steps"].append({"model": loaded.facts, "results": results})
                    session.write(document)
            document["complete"] = True
            session.write(document)
        finally:
            if document["steps"]:
                session.end(document)
    for row in zip(*(results for _, results in found), strict=True):
        session.screen.print()
        session.screen.print(render(row[-1], loaded.facts, full=session.options.full))
        _print_curve(session.screen, [step for step, _ in found], row)


def _print_row(screen: Console, step: int, result: Result) -> None:
    name = result.headline
    low_high = [format_measure(name, edge) for edge in result.intervals.get(name, ())]
    within = f"  ({' to '.join(low_high)})" if low_high else ""
    value = format_measure(name, result.measures[name])
    screen.print(f"step {step:>9,}  {result.protocol}  {name} {value:>12}{within}", soft_wrap=True)


def _print_curve(screen: Console, steps: Sequence[int], results: Sequence[Result]) -> None:
    name = results[0].headline
    values = [result.measures[name] for result in results]
    if screen.encoding.startswith("utf"):
        screen.print(f"curve  {sparkline(values, _CURVE)}  of {name} over {len(steps)} checkpoints")
    finite: list[tuple[float, int]] = [(v, s) for v, s in zip(values, steps, strict=True) if math.isfinite(v)]
    if finite:
        best, step = max(finite) if name.endswith("accuracy") else min(finite)
        screen.print(f"best   {format_measure(name, best)} at step {step:,}")


def compare_files(a: Path, b: Path, options: Options) -> None:
    pairs, alone = _pairs(_sides(a), _sides(b))
    if not pairs:
        raise DataError(f"{a} and {b} share no task: {'; '.join(alone)}. Evaluate both on the same one.")
    document = new_document("lmtrain comparison", a={"file": str(a)}, b={"file": str(b)}, left_out=alone)
    found = _comparisons(pairs, document)
    if options.output is not None:
        write_json(options.output, document)
    if options.as_json:
        print_document(document)
    else:
        _print_comparison(PlainConsole(highlight=False), pairs, found, alone, options.full)


def compare_models(sources: Sequence[Source], session: Session) -> None:
    sides: list[list[Side]] = []
    models: list[dict[str, Any]] = []
    with ExitStack() as kept:
        with session.processes() as load:
            journal = None
            for number, source in enumerate(sources):
                loaded = load(source, number)
                journal = journal or kept.enter_context(session.journal())
                name = str(loaded.facts["checkpoint"])
                sides.append([Side(name, one.result, one.columns) for one in session.outcomes(loaded, journal)])
                models.append(loaded.facts | {"results": [side.result.to_dict() for side in sides[-1]]})
                del loaded  # because: two models need not fit in memory
        pairs = [*zip((task for task, _ in session.jobs), sides[0], sides[1], strict=True)]
        document = new_document("lmtrain comparison", a=models[0], b=models[1], left_out=[])
        found = _comparisons(pairs, document)
        session.write(document)
        session.end(document)
    _print_comparison(session.screen, pairs, found, [], session.options.full)


def _comparisons(pairs: list[Pair], document: dict[str, Any]) -> list[Comparison]:
    found = [compare(task, a, b) for task, a, b in pairs]
    document |= {"complete": True, "comparisons": [one.to_dict() for one in found]}
    return found


def _print_comparison(
    screen: Console, pairs: list[Pair], found: list[Comparison], alone: list[str], full: bool
) -> None:
    for name, side in zip("AB", pairs[0][1:], strict=True):
        screen.print(f"{name}  {side.name}", soft_wrap=True)
    for one in found:
        screen.print(render_comparison(one, full=full))
    for said in alone:
        screen.print(f"left out: {said}")


def _pairs(a: list[Side], b: list[Side]) -> tuple[list[Pair], list[str]]:
    """Pair results by task, and by text if a task has several; return the pairs, and what only one side has."""
    found, rest, alone = [], list(b), []
    for one in a:
        same = [other for other in rest if other.result.task == one.result.task]
        other = next((o for o in same if o.result.text_sha256 == one.result.text_sha256), next(iter(same), None))
        if other is None:
            alone.append(f"{one.result.protocol} only in {one.name}")
            continue
        rest.remove(other)
        found.append((find_task(one.result.task), one, other))
    return found, alone + [f"{other.result.protocol} only in {other.name}" for other in rest]


def _sides(path: Path) -> list[Side]:
    """Return the results of a file, each with its items' columns."""
    document = read_json(path)
    if not isinstance(document, dict) or document.get("format") != "lmtrain evaluation":
        raise DataError(f"{path} holds no results of `lmtrain eval --output`. Give such a file, or a checkpoint.")
    if "samples" not in document:
        raise UsageError(
            f"{path} was written without --samples, so that its items are not known. Evaluate with --samples FILE, or "
            "give the checkpoints themselves."
        )
    try:
        samples = document["samples"]
        columns = read_columns(path.parent / samples["file"], samples["sha256"])
        results = [Result.from_dict(one) for one in document["results"]]
        sides = [Side(str(path), result, columns[number]) for number, result in enumerate(results)]
        if any(len(values) != side.result.num_items for side in sides for values in side.columns.values()):
            raise ValueError("another number of items")
    except LmtrainError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} or its samples are not as this version writes them ({type(error).__name__}: {error}). "
            "Evaluate once more."
        ) from error
    return sides
