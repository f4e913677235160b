"""The scoring of `lmtrain eval`: a model is loaded, its tasks run in turn, each result is shown at once.

Called by evaluate, eval_steps and eval_compare, once the command line has been judged. An output beside which a journal
lies is whole only when "complete" is true in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmtrain import __version__
from lmtrain.cli.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from lmtrain.eval.journal import Journal
    from lmtrain.eval.load import Loaded
    from lmtrain.eval.runner import Outcome
    from lmtrain.eval.task import Task
    from lmtrain.eval.texts import TextInput
    from lmtrain.observe.progress import Reporter

Job = tuple["Task", "Callable[[Reporter], Path | TextInput]"]  # what reads the text, when its turn comes


@dataclass(frozen=True, kw_only=True)
class Options:
    """Of the command line, what the scoring and the showing depend on."""

    baseline: Path | None
    batch_size: int
    stride: int | None
    limit: int | None
    device: str
    precision: str
    output: Path | None
    samples: Path | None
    as_json: bool
    full: bool


class Session:
    def __init__(self, jobs: list[Job], options: Options) -> None:
        from lmtrain.cli.screen import Screen
        from lmtrain.runtime.faults import arm_from_env
        from lmtrain.runtime.process import share_cores

        arm_from_env()
        share_cores()
        self.options, self.console = options, Screen(stderr=True)
        self._jobs = jobs
        self._given: dict[int, Path | TextInput] = {}  # by job: texts are read once, however many models there are

    def load(self, checkpoint: Path) -> Loaded:
        from lmtrain.eval.load import load_for_eval
        from lmtrain.observe.progress import progress
        from lmtrain.runtime.device import pick_device

        with progress(self.console, f"loading {checkpoint.name}"):
            return load_for_eval(checkpoint, pick_device(self.options.device), self.options.precision)

    def journal(self) -> AbstractContextManager[Journal]:
        """Of all models and tasks of this call; several processes have one in common."""
        from lmtrain.cli.say import say
        from lmtrain.eval.journal import journal_beside
        from lmtrain.runtime.process import ProcessEnv
        from lmtrain.runtime.process_group import from_first

        output = self.options.output if ProcessEnv.detect().rank == 0 else None
        return journal_beside(output, lambda said: say(self.console, said), from_first)

    def outcomes(self, loaded: Loaded, journal: Journal) -> Iterator[tuple[Task, Outcome]]:
        """A task at a time, as they end."""
        import torch

        from lmtrain.eval.journal import identity_of

        subject, facts = loaded.subject, loaded.facts
        computed = (subject.dtype, subject.layout, facts["device"], torch.__version__, __version__)
        journal.of(identity_of(Path(facts["checkpoint"]), *computed))
        for number, (task, _) in enumerate(self._jobs):
            yield task, self._outcome(task, self._text(number), loaded, journal)

    def _text(self, number: int) -> Path | TextInput:
        from lmtrain.observe.progress import progress

        if number not in self._given:
            task, read = self._jobs[number]
            with progress(self.console, f"{task.id}: read", "bytes", stopped="nothing is written.") as shown:
                self._given[number] = read(shown)
        return self._given[number]

    def _outcome(self, task: Task, given: Path | TextInput, loaded: Loaded, journal: Journal) -> Outcome:
        from dataclasses import replace

        from lmtrain.eval.compare import with_baselines
        from lmtrain.eval.runner import run
        from lmtrain.observe.progress import progress

        options, baseline = self.options, self.options.baseline
        stopped = "the same command goes on from here."
        if options.output is None:
            stopped = "nothing is kept. With --output FILE the same command would go on."
        with progress(self.console, f"{task.id}: fed", "tokens", stopped=stopped) as shown:
            outcome = run(
                task, loaded.subject, given, stride=options.stride, limit=options.limit, batch_size=options.batch_size,
                known=journal, progress=shown,
            )  # fmt: skip
        if baseline is None or not task.compares:
            return outcome
        with progress(self.console, "counting for the baselines"):
            counted = with_baselines(outcome.result, outcome.prepared, baseline, loaded.subject.tokenizer)
        return replace(outcome, result=counted)


def evaluate_one(checkpoint: Path, session: Session) -> None:
    """Every result is written and shown when it is there, and stays when a later one fails."""
    from lmtrain.cli.screen import Screen
    from lmtrain.eval.report import render

    options, loaded = session.options, session.load(checkpoint)
    document = new_document("lmtrain evaluation", model=loaded.facts, results=[])
    lines: list[bytes] = []
    with session.journal() as journal:
        try:
            for _, outcome in session.outcomes(loaded, journal):
                if options.samples is not None:
                    lines.append(_sample_lines(len(lines), outcome, loaded))
                    document["samples"] = write_samples(options.samples, lines, options.output)
                document["results"].append(outcome.result.to_dict())
                write_document(document, options)
                if not options.as_json:
                    Screen(highlight=False).print(render(outcome.result, loaded.facts, full=options.full))
            document["complete"] = True
            write_document(document, options)
        finally:
            if options.as_json and document["results"]:
                print_document(document)


def new_document(format_: str, **rest: Any) -> dict[str, Any]:
    return {"format": format_, "lmtrain": __version__, "complete": False, **rest}


def write_document(document: dict[str, Any], options: Options) -> None:
    from lmtrain.runtime.files import write_json

    if options.output is not None:
        write_json(options.output, document)


def print_document(document: dict[str, Any]) -> None:
    echo(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False))


def _sample_lines(number: int, outcome: Outcome, loaded: Loaded) -> bytes:
    from lmtrain.eval.samples import as_lines, sample_rows

    rows = sample_rows(number, outcome.result, outcome.prepared, outcome.columns, loaded.subject.tokenizer)
    return as_lines(rows)


def write_samples(path: Path, lines: Iterable[bytes], output: Path | None) -> dict[str, str]:
    """Where the results find them: by a path that begins at their own folder."""
    import hashlib
    import os

    from lmtrain.runtime.files import atomic_file

    digest = hashlib.sha256()
    with atomic_file(path) as file:
        for some in lines:
            file.write(some)
            digest.update(some)
    found = str(path) if output is None else os.path.relpath(path, output.parent)
    return {"file": found, "sha256": digest.hexdigest()}
