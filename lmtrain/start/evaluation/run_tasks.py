"""The scoring of an evaluation: choose a layout, load a model in it, run its tasks in turn, show each result at once.

Called by evaluate once its options have been checked; torch is imported only when a model is loaded. Prints nothing:
the caller's functions show what is done. If a journal lies beside an output file, the output is complete only if its
"complete" is true.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmtrain import __version__
from lmtrain.checkpoint.disk.checkpoint_format import MANIFEST
from lmtrain.checkpoint.find_and_prune import list_checkpoints
from lmtrain.checkpoint.unopened_model_on_disk import ModelSource
from lmtrain.config.build_typed_settings import build_settings
from lmtrain.config.parse_and_apply_overrides import apply_override, override_key, parse_overrides, sweep_refusal
from lmtrain.errors import (
    LayoutError,
    MissingInputError,
    SettingsError,
    UsageError,
    Way,
    example,
    join_few,
    leave_out,
    settings_error,
    spelling_hint,
    way,
    with_other_ways,
)
from lmtrain.eval.print_evaluation_results import encode_rows, sample_rows
from lmtrain.eval.read_texts import TextInput
from lmtrain.eval.statistics import add_baselines
from lmtrain.eval.task import Result, Task
from lmtrain.models.model_settings import ModelSettings
from lmtrain.observe.screen.command_progress import ProgressReporter, ShowProgress
from lmtrain.placement.parallel_settings import ParallelSettings, check_layout
from lmtrain.runfolder.file_names import CHECKPOINTS, step_from_name
from lmtrain.runtime.files.atomic_files import atomic_file, write_json
from lmtrain.runtime.machine.visible_gpus_without_torch import Gpus, device_problem
from lmtrain.runtime.processes.fault_injection import arm_from_env
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.start.evaluation.existing_results import ResultsOrigin
from lmtrain.train.ranks.facts_equal_on_all_ranks import Fact, checkpoint_fact, program_facts
from lmtrain.train.startup_checks.check_machine_and_processes import process_problems

if TYPE_CHECKING:
    from lmtrain.eval.load_model import LoadedModel
    from lmtrain.eval.resume_journal import Journal
    from lmtrain.eval.run_task import Outcome
    from lmtrain.eval.score_targets import SharedAnswers

_KEYS = ("tp", "pp", "dp_shard", "dp_replicate", "sequence_parallel", "balance", "timeout_s")
_LAYOUT_KEYS, _TRAINING_KEYS = ([f"parallel.{key}" for key in keys] for keys in (_KEYS, ("vp", "zero", "schedule")))
# the function reads the task's data when the task starts
Job = tuple[Task, Callable[[ProgressReporter], Path | TextInput]]
ShowResult = Callable[[Result, dict[str, Any]], None]  # called with a result and the facts of its model


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options on which scoring and its files depend."""

    baseline: Path | None
    batch_size: int
    stride: int | None
    seq_len: int | None
    limit: int | None
    device: str
    precision: str
    output: Path | None
    samples: Path | None
    origin: ResultsOrigin = field(default_factory=ResultsOrigin)
    replaces: bool = False  # whether another output is at the place of this one


def choose_layout(overrides: Sequence[str], model: ModelSettings, env: ProcessEnv) -> ParallelSettings:
    """Return the parallel layout in which to evaluate `model`, from overrides such as `parallel.tp=2`. Unless
    dp_replicate is among them, it is set so that all processes in `env` are used.

    Each copy of the model (dp_replicate) scores batches of its own. Raise if the layout does not fit the model or the
    processes.
    """
    sizes = _parse_layout(overrides)
    with _ways_of_evaluation():
        requested = build_settings(ParallelSettings, sizes, "parallel")
    copy_size = requested.pp * requested.tp * requested.dp_shard
    parallel = replace(
        requested,
        dp_replicate=requested.dp_replicate if "dp_replicate" in sizes else max(env.world_size // copy_size, 1),
        zero=3 if requested.dp_shard > 1 else 1,  # because: only weights can be sharded
        sequence_parallel=sizes.get("sequence_parallel", model.shape.seq_len % requested.tp == 0),
    )
    with _ways_of_evaluation():
        check_layout(model, parallel)
    if problems := list(process_problems(parallel.layout, env)):
        raise LayoutError(*problems)
    return parallel


@contextmanager
def _ways_of_evaluation() -> Iterator[None]:
    """Context manager that raises errors about settings again without the ways out that an evaluation does not take."""

    def keep_own(way: Way) -> Way | None:
        return way if all(override_key(word) in _LAYOUT_KEYS for word in (*way.new, *way.old)) else None

    try:
        yield
    except (SettingsError, LayoutError) as error:
        problems = [type(problem)(with_other_ways(problem, keep_own)) for problem in error.marked_problems]
        raise settings_error(problems) from error


def _parse_layout(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the parallel settings that the overrides set, as key -> value (`parallel.tp=2` -> {"tp": 2}). Raise
    SettingsError on keys that an evaluation does not have.
    """
    tree: dict[str, Any] = {"parallel": {}}
    problems = []
    for override in parse_overrides(overrides, {}) if overrides else ():
        key = str(override.key_or_group)
        if override.is_sweep_override():
            problems.append(sweep_refusal(override))
        elif key in _TRAINING_KEYS:
            rule = "is about training, and an evaluation has no gradients"
            problems.append(f"{override.input_line} {rule}. {leave_out(key)}.")
        elif key not in _LAYOUT_KEYS:
            text = str(override.input_line)
            way_out = _similar_setting(key, text.partition("=")[2])
            problems.append(f"{text} is not a setting of an evaluation. {way_out}")
        elif problem := apply_override(tree, override):
            problems.append(problem)
    if problems:
        raise SettingsError(problems)
    return {key: value for key, value in tree["parallel"].items() if value is not None}


def _similar_setting(key: str, value: str) -> str:
    """Return a sentence that names the setting of an evaluation that was meant by the unknown `key`."""

    def mark(known: str) -> str:
        return way(f"{known}={value}", instead_of=key)

    meant = [known for known in _LAYOUT_KEYS if known.rpartition(".")[2] == key.rpartition(".")[2]]
    return f"Did you mean {mark(meant[0])}?" if meant else spelling_hint(key, _LAYOUT_KEYS, mark)


def check_device(name: str, env: ProcessEnv) -> None:
    """Raise unless each process on this node can have its own device."""
    if name != "cpu" and env.world_size > 1 and (problem := device_problem(name, Gpus.detect(), env)):
        raise problem


@dataclass(frozen=True)
class Views:
    """The functions with which a session shows what it does; they show nothing on ranks other than 0."""

    report: Callable[[str], None]  # a message
    show_progress: ShowProgress
    show_document: Callable[[dict[str, Any]], None]  # the results; after a failure too, with those before it


class Session:
    """The state of an evaluation: tasks, options and layouts. All processes hold all results."""

    def __init__(
        self, jobs: list[Job], options: Options, env: ProcessEnv, layouts: Sequence[ParallelSettings], views: Views
    ) -> None:
        """Create a session; `layouts` has one layout for each model."""
        arm_from_env()
        self.options, self._env, self._layouts, self.jobs, self._views = options, env, layouts, jobs, views
        self._inputs: dict[int, Path | TextInput] = {}  # by job number: data is read once for all models
        self._journal: Journal | None = None  # opened with the first model

    @contextmanager
    def open_loader(self) -> Iterator[Callable[[ModelSource, int], LoadedModel]]:
        """Context manager: open the process group and yield a function `load(source, number)`, which loads a model in
        the layout at index `number` of the session's layouts, on each rank its shard. All ranks must enter it and call
        `load` together.

        All processes leave the block together. The first layout defines the timeout and the device mesh, which models
        that are loaded in turn share.
        """
        from lmtrain.eval.load_model import load_source
        from lmtrain.parallel.mesh import build_mesh
        from lmtrain.runtime.machine.choose_device import memory_errors, pick_device
        from lmtrain.runtime.processes.process_group import open_process_group
        from lmtrain.train.ranks.compare_ranks_at_start import check_facts_agree

        env, first_layout = self._env, self._layouts[0]
        with memory_errors(self._way_to_less_memory()):
            device = pick_device(self.options.device, env)
            with open_process_group(env, device, first_layout.timeout_s) as peers:
                check_facts_agree(partial(_shared_facts, self._layouts, self.options, self.jobs), peers.hosts)
                mesh = build_mesh(first_layout.layout, device, first_layout.timeout_s)

                def load_model(source: ModelSource, number: int) -> LoadedModel:
                    parallel = self._layouts[number]
                    with self._views.show_progress(f"loading {source.path.name}", "", ""):
                        check_facts_agree(partial(_model_facts, source), peers.hosts)
                        loaded = load_source(source, device, self.options.precision, mesh, parallel)
                    if env.world_size == 1:
                        return loaded
                    layout = parallel.layout_text.partition(",")[0]
                    return replace(loaded, subject=replace(loaded.subject, layout=layout))

                yield load_model

    @contextmanager
    def open_document(self, format_: str, entries: str, **rest: Any) -> Iterator[tuple[dict[str, Any], ExitStack]]:
        """Context manager: yield a new results document of the type `format_`, with an empty list under the key
        `entries` to fill, and an ExitStack. At the end mark the document as complete, write it to --output, and close
        the stack. Show the document, also after an error if the list has entries.
        """
        document = new_document(format_, self.options.origin, **rest, **{entries: []})
        with ExitStack() as stack:
            try:
                yield document, stack
                document["complete"] = True
                self.write(document)
            finally:
                if document[entries]:
                    self._views.show_document(document)

    def _way_to_less_memory(self) -> str:
        size = self.options.batch_size
        smaller = way("--batch-size", str(size // 2)) if size > 1 else ""
        shorter = way("--precision", "bf16") if self.options.precision == "fp32" else ""
        options = [option for option in (smaller, shorter) if option]
        return f"Use {', '.join([*options, 'or more processes and parallel.tp or pp'])}." if options else (
            "Give more processes, and parallel.tp or pp."
        )  # fmt: skip

    def write(self, document: dict[str, Any]) -> None:
        """Write the results document to --output, on rank 0; in place of another one only if it is complete."""
        is_kept = self.options.replaces and not document["complete"]
        if self.options.output is not None and self._env.rank == 0 and not is_kept:
            write_json(self.options.output, document)

    def write_samples(self, path: Path, encoded_rows: Sequence[bytes], *, is_last: bool) -> dict[str, str]:
        """Write the rows of JSON, one for each item, to the file `path`, on rank 0; in place of another file only if
        they are complete: `is_last`. Return {"file": path relative to the --output file, "sha256": hash} for the
        results document; {} on other ranks.
        """
        if self._env.rank > 0:
            return {}
        if is_last or not self.options.replaces:
            with atomic_file(path) as file:
                file.writelines(encoded_rows)
        written_path = str(path) if self.options.output is None else os.path.relpath(path, self.options.output.parent)
        return {"file": written_path, "sha256": hashlib.sha256(b"".join(encoded_rows)).hexdigest()}

    def evaluate_tasks(self, loaded: LoadedModel, stack: ExitStack) -> Iterator[Outcome]:
        """Run all tasks of the session on a loaded model; yield each task's outcome when it ends. All ranks must call
        it, within `open_loader`. Scores are kept in a journal beside the --output file, so that a killed evaluation can
        continue; it stays open until `stack` is closed.
        """
        import torch

        from lmtrain.eval.resume_journal import model_identity, open_journal
        from lmtrain.eval.score_targets import SharedAnswers
        from lmtrain.runtime.processes.process_group import broadcast_from_rank0

        if self._journal is None:
            options = self.options
            output = options.output if self._env.rank == 0 else None
            self._journal = stack.enter_context(
                open_journal(
                    output, self._views.report, broadcast_from_rank0, options.origin.command
                )
            )  # fmt: skip
        subject, facts = loaded.subject, loaded.facts
        weights = facts.get("weights", "model")  # because: both sets of weights lie in one checkpoint
        computed = (weights, subject.dtype, subject.layout, facts["device"], torch.__version__, __version__)
        self._journal.set_identity(model_identity(Path(facts["checkpoint"]), *computed))
        shared_answers = SharedAnswers() if len(self.jobs) > 1 else None
        for number, (task, _) in enumerate(self.jobs):
            yield self._evaluate_task(task, self._read_input(number), loaded, shared_answers)

    def _read_input(self, number: int) -> Path | TextInput:
        """Return the data of the task at index `number`, a path or texts. They are read at the first call and then
        cached, as several models may be scored.
        """
        if number not in self._inputs:
            task, read = self.jobs[number]
            with self._views.show_progress(f"{task.id}: read", "bytes", "nothing is written.") as reporter:
                self._inputs[number] = read(reporter)
        return self._inputs[number]

    def _evaluate_task(
        self, task: Task, task_input: Path | TextInput, loaded: LoadedModel, shared_answers: SharedAnswers | None
    ) -> Outcome:
        """Run one task on a model and return its outcome. Scores in the journal, which a killed evaluation has left,
        and in `shared_answers`, to which earlier tasks added theirs, are not computed again.
        """
        from data_tools.corpora.corpus_definition import published_hashes
        from lmtrain.eval.run_task import run

        options, way_out = self.options, "the same command goes on from here."
        stopped = way_out if options.output else "nothing is kept. With --output FILE the same command would go on."
        with self._views.show_progress(f"{task.id}: fed", "tokens", stopped) as reporter:
            return run(
                task, loaded.subject, task_input, stride=options.stride, seq_len=options.seq_len, limit=options.limit,
                hashes=published_hashes() if task.published else None, batch_size=options.batch_size,
                cache=self._journal, shared_answers=shared_answers, progress=reporter,
            )  # fmt: skip

    def add_baselines(self, outcome: Outcome, loaded: LoadedModel) -> Outcome:
        """Return the outcome with the scores of unigram and bigram models added, counted on the dataset of --baseline.
        Return it unchanged without --baseline, for a task that does not score whole documents, and on ranks other than
        0.
        """
        if self.options.baseline is None or outcome.prepared.documents is None or self._env.rank > 0:
            return outcome
        tokenizer = loaded.subject.tokenizer
        with self._views.show_progress("counting for the baselines", "", ""):
            result = add_baselines(outcome.result, outcome.prepared, self.options.baseline, tokenizer)
        return replace(outcome, result=result)


def evaluate_one(source: ModelSource, session: Session, show_result: ShowResult) -> dict[str, Any]:
    """Run all tasks on one model and return the results document, the content of the --output file. Each result is
    shown and written to the files at once, so that it is kept if a later task fails; with --baseline, after the last
    task.
    """
    options, lines = session.options, list[bytes]()
    with session.open_document("lmtrain evaluation", "results", model={}) as (document, stack):

        def add(outcome: Outcome, loaded: LoadedModel) -> None:
            outcome = session.add_baselines(outcome, loaded)
            if options.samples is not None:
                prepared, tokenizer = outcome.prepared, loaded.subject.tokenizer
                lines.append(encode_rows(sample_rows(len(lines), outcome.result, prepared, outcome.columns, tokenizer)))
                is_last = len(document["results"]) + 1 == len(session.jobs)
                document["samples"] = session.write_samples(options.samples, lines, is_last=is_last)
            document["results"].append(outcome.result.to_dict())
            session.write(document)
            show_result(outcome.result, loaded.facts)

        pending: list[Outcome] = []
        with session.open_loader() as load:
            loaded = load(source, 0)
            document["model"] = loaded.facts
            for outcome in session.evaluate_tasks(loaded, stack):
                if options.baseline is None:
                    add(outcome, loaded)
                else:  # because: only rank 0 counts baselines, which may take longer than the peers' timeout
                    pending.append(outcome)
        for outcome in pending:
            add(outcome, loaded)
    return document


def _shared_facts(layouts: Sequence[ParallelSettings], options: Options, jobs: Sequence[Job]) -> dict[str, Fact]:
    """Return what must be the same on all ranks before scoring starts, as name -> Fact: the parallel settings, what
    decides how many batches there are and how they are computed, and the versions of the code. Texts are compared as
    they are scored.
    """
    values: dict[str, object] = {f"parallel.{key}": value for key, value in layouts[0].to_dict().items()}
    values |= {"--batch-size": options.batch_size, "--precision": options.precision, "--device": options.device}
    values |= {"the number of models": len(layouts), "the tasks": ", ".join(task.id for task, _ in jobs)}
    return {key: Fact(str(value), str(value)) for key, value in values.items()} | program_facts()


def _model_facts(source: ModelSource) -> dict[str, Fact]:
    """Return what identifies the files of a model, to check that all ranks see the same ones: the digest of a
    checkpoint and which of its weights are scored, or for another folder the names and sizes of its files.
    """
    if (source.path / MANIFEST).is_file():
        weights = str(source.facts.get("weights", "model"))
        return {"checkpoint": checkpoint_fact(source.path), "--weights": Fact(weights, weights)}
    files = [f"{file.name} of {file.stat().st_size} bytes" for file in sorted(source.path.iterdir())]
    return {"model": Fact(", ".join(files), f"{len(files)} files in {source.path}")}


def new_document(format_: str, origin: ResultsOrigin, **rest: Any) -> dict[str, Any]:
    """Return a results document of this version with `complete` False and further entries; with its origin, unless
    no command makes it.
    """
    recorded = {} if origin == ResultsOrigin() else vars(origin)
    return {"format": format_, "lmtrain": __version__, "complete": False, **recorded, **rest}


def find_step_checkpoints(run: Path, steps_option: str) -> list[Path]:
    """Return the paths of the run's checkpoints at the steps in `steps_option` ("all", or numbers such as "100,200"),
    in order of step. Raise UsageError if that is malformed, MissingInputError if a checkpoint does not exist.
    """
    by_step = {step_from_name(path.name): path for path in list_checkpoints(run / CHECKPOINTS) or list_checkpoints(run)}
    if not by_step:
        raise MissingInputError(
            f"--steps evaluates the checkpoints of a run, but {run} holds none. Give a run's folder."
        )
    if steps_option == "all":
        return list(by_step.values())
    numbers = [word.strip() for word in steps_option.split(",")]
    if not all(word.isdecimal() and len(word) < 19 for word in numbers):
        way_out = f"Give step numbers, such as {example('100,200')}, or {example('all')}."
        raise UsageError(f"--steps={steps_option} is not a list of steps. {way_out}")
    steps = sorted({int(word) for word in numbers})
    if missing := [f"{step}" for step in steps if step not in by_step]:
        raise MissingInputError(
            f"{run} has no checkpoint of step {join_few(missing)}. It has checkpoints of steps "
            f"{join_few(map(str, by_step), max_shown=12)}. Give some of these, or {way('--steps', 'all')}."
        )
    return [by_step[step] for step in steps]


def evaluate_steps(
    sources: Sequence[ModelSource], session: Session, show_result: ShowResult
) -> list[tuple[dict[str, Any], list[Result]]]:
    """Run all tasks on several checkpoints of a run (`sources`), one after another. Show each result as it comes;
    return the facts of each checkpoint with its result of each task.
    """
    found: list[tuple[dict[str, Any], list[Result]]] = []
    opened = session.open_document("lmtrain evaluation over steps", "steps", run=str(sources[0].path.parent))
    with opened as (document, stack), session.open_loader() as load:
        for number, source in enumerate(sources):
            loaded = load(source, number)
            results: list[Result] = []
            found.append((loaded.facts, results))
            for outcome in session.evaluate_tasks(loaded, stack):
                results.append(outcome.result)
                show_result(outcome.result, loaded.facts)
            document["steps"].append({"model": loaded.facts, "results": [result.to_dict() for result in results]})
            session.write(document)
    return found
