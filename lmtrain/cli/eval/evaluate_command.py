"""`lmtrain eval`: score a checkpoint on tasks; print results with their recipes as a table or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data_tools.read.find_input_files import find_sources
from lmtrain.cli.eval.existing_results import ResultsOrigin, check_results
from lmtrain.cli.ranks.process_options import (
    NumPerNode,
    NumProcesses,
    ProcessOptions,
    detect_process,
    launch_evaluation,
)
from lmtrain.cli.screen.print_messages_and_json import print_json, say_already_there
from lmtrain.cli.settings_keys.shell_completion import complete_task
from lmtrain.cli.shared_options import (
    Device,
    InputFormat,
    Overwrite,
    Plugins,
    Precision,
    Suffixes,
    Weights,
    refuse_unused_options,
    refuse_unused_overwrite,
    resolve_text_inputs,
)
from lmtrain.errors import MissingInputError, OutputError, UsageError, fill_in, leave_out, way
from lmtrain.runtime.files.atomic_files import check_output_folder, read_json, refuse_special_file
from lmtrain.runtime.files.existing_output import Found
from lmtrain.runtime.processes.stop_signals import unblock_stops
from lmtrain.similar_path import missing_path, paths_in_one_word

if TYPE_CHECKING:
    from lmtrain.checkpoint.unopened_model_on_disk import ModelSource
    from lmtrain.cli.eval.run_tasks import Job, Options

Layout = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="parallel.KEY=VALUE",
        help="With several processes: how they share a model, as in parallel.tp=2 parallel.pp=2. The other processes "
        "hold copies of the model, which score other batches.",
    ),
]
_OPTIONS_FOR_FILES = ("compare", "output", "overwrite", "as_json", "full", "plugin")  # with two results files


def evaluate(
    context: typer.Context,
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A checkpoint, a run's folder for its latest one, or a folder of Hugging Face's.",
        ),
    ] = None,
    layout: Layout = None,
    task: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Task to evaluate; each needs its own --data.", autocompletion=complete_task),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="The task's file, a .bin/.idx prefix, or any input of `lmtrain preprocess`."),
    ] = None,
    key: Annotated[str, typer.Option(help="Key or column of the text, unless the task fixes it.")] = "text",
    format_: InputFormat = None,
    suffix: Suffixes = None,
    baseline: Annotated[
        Path | None, typer.Option(metavar="PREFIX", help="A training .bin/.idx prefix: also score by its token counts.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of windows to score at once.")] = 8,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens between the starts of windows, unless the task fixes it.")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a window. [default: all that the model sees]")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Score only the first N items, marked as partial.")
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(metavar="all|N,N", help="Evaluate all checkpoints of a run, or those of these steps."),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="A B",
            help="Compare two checkpoints, or two --output files with --samples: B minus A, and how certain it is.",
        ),
    ] = None,
    device: Device = "auto",
    precision: Precision = "fp32",
    weights: Weights = "model",
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write JSON to this file; after a kill, the same command continues."),
    ] = None,
    samples: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a row of JSON for every item to this file.")
    ] = None,
    overwrite: Overwrite = False,
    plugin: Plugins = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Show all measures and facts that the JSON has.")] = False,
    list_tasks: Annotated[bool, typer.Option("--list", help="List the tasks with their recipes and stop.")] = False,
    nproc: NumProcesses = None,
    nproc_per_node: NumPerNode = None,
) -> None:  # fmt: skip
    """Evaluate a checkpoint with a published protocol or on any text.

    Each result is printed with the counts it was divided by, the way its text was cut into windows, and the sum from
    which it follows.
    """
    if list_tasks:
        refuse_unused_options(context, set(context.params) - {"list_tasks", "as_json", "plugin"}, "--list")
        return _print_tasks(as_json)
    if compare is not None and checkpoint is not None and "=" in str(checkpoint):
        checkpoint, layout = None, [str(checkpoint), *(layout or [])]
    _check_comparison(context, checkpoint, layout or [], compare, steps)
    refuse_loose_files(layout or [])
    refuse_unused_overwrite(overwrite, output, samples, subject="results that are only printed")
    _check_outputs(output, samples)
    compares_files = compare is not None and all(path.is_file() for path in compare)
    jobs = [] if compares_files else build_jobs(task, data, baseline, format_, key, suffix)
    if checkpoint is None and compare is None:
        raise UsageError("CHECKPOINT is missing. Give a checkpoint or a run's folder, as in `lmtrain eval runs/a ...`.")
    processes = ProcessOptions(nproc, nproc_per_node)
    env = detect_process(processes)

    from lmtrain.cli.eval.run_tasks import (
        Options,
        Session,
        check_device,
        choose_layout,
        compare_files,
        compare_models,
        evaluate_one,
        evaluate_steps,
        find_step_checkpoints,
    )
    from lmtrain.exchange.find_model_at_path import find_model

    options = Options(
        baseline=baseline, batch_size=batch_size, stride=stride, seq_len=seq_len, limit=limit, device=device,
        precision=precision, output=output, samples=samples, as_json=as_json, full=full,
    )  # fmt: skip
    if compare is not None and compares_files:
        options = _check_existing(options, ResultsOrigin.of(context.params, compare, []), overwrite)
        return compare_files(*compare, options)
    unblock_stops()
    # because: errors are reported at once if the checks come before the import of torch
    paths = list(compare or ()) if checkpoint is None else [checkpoint]
    if checkpoint is not None and steps is not None:
        paths = find_step_checkpoints(checkpoint, steps)
    sources = [find_model(path, weights) for path in paths]
    layouts = [choose_layout(layout or [], source.settings, env) for source in sources]
    check_device(device, env)
    check_tasks_fit(jobs, sources, seq_len, stride)
    if env.world_size > 1 and "-" in (data or []):
        raise UsageError(
            f"--data=- is standard input, which only one process can read, and the evaluation has {env.world_size} "
            "processes. Give a file with the text."
        )
    texts = [*(data or []), *([str(baseline)] if baseline is not None else [])]
    origin = ResultsOrigin.of(context.params, [source.path for source in sources], texts)
    options = _check_existing(options, origin, overwrite)
    if processes.are_started:
        return launch_evaluation(context.obj, env)
    session = Session(jobs, options, env, layouts)
    if compare is not None:
        return compare_models(sources, session)
    if steps is not None:
        return evaluate_steps(sources, session)
    evaluate_one(sources[0], session)
    return None


def refuse_loose_files(layout: Sequence[str]) -> None:
    """Raise UsageError if one of the words after the checkpoint, which are settings, is a file or folder."""
    files = [word for word in layout if "=" not in word and Path(word).exists()]
    if files:
        data = way(*(part for file in files for part in ("--data", file)), instead_of=files)
        raise UsageError(f"{', '.join(files)} stands where settings do. Did you mean {data}?")


def _check_comparison(
    context: typer.Context,
    checkpoint: Path | None,
    layout: Sequence[str],
    compare: tuple[Path, Path] | None,
    steps: str | None,
) -> None:
    """Raise a UsageError if a word was typed that has no effect with --compare (of files or of checkpoints) or with
    --steps, or if --compare has a file and a folder.
    """
    subject, unused, words = "", set[str](), list[str]()
    if compare is not None:
        words = [word for word in layout if "=" not in word]
        subject, unused = "--compare of two checkpoints", {"checkpoint", "steps", "samples", "baseline"}
        if all(path.is_file() for path in compare):
            subject = "--compare of two results files"
            unused = set(context.params) - {*_OPTIONS_FOR_FILES, "list_tasks"}
        elif any(path.is_file() for path in compare):
            raise UsageError(
                f"--compare {compare[0]} {compare[1]} mixes a file and a folder. Give two results files or two "
                "checkpoints."
            )
    elif steps is not None:
        subject, unused = "--steps", {"samples", "baseline"}
    if checkpoint is None:
        unused.discard("checkpoint")
    refuse_unused_options(context, unused, subject, words)


def _check_outputs(output: Path | None, samples: Path | None) -> None:
    """Raise OutputError if the file of --output or --samples cannot be written, or UsageError if both are the same
    file; called before scoring, which can take hours. None means not given.
    """
    for option, path in (("--output", output), ("--samples", samples)):
        if path is None:
            continue
        refuse_special_file(path)
        if path.is_dir():
            raise OutputError(f"{option}={path} is a folder, but a file is written. Give the name of a file.")
        check_output_folder(path.parent, f"The folder of {option}={path}", check_lock=False)
    if output is not None and samples is not None and output.absolute() == samples.absolute():
        raise UsageError(f"--output and --samples cannot both be {output}. Give two different files.")


def _check_existing(options: Options, origin: ResultsOrigin, overwrite: bool) -> Options:
    """Return the options of an evaluation of this origin with what is at the place of its outputs. Raise OutputError if
    that must not be replaced, and typer.Exit after a message if it is what the evaluation would write.
    """
    found = check_results(options.output, options.samples, origin, overwrite=overwrite)
    if found is Found.SAME and options.output is not None:
        if options.as_json:
            print_json(read_json(options.output), ensure_ascii=False)
        else:
            say_already_there(options.output)
        raise typer.Exit
    return replace(options, origin=origin, replaces=found is Found.OTHER)


def build_jobs(
    task_ids: list[str] | None, data_options: list[str] | None, baseline: Path | None, format_: str | None, key: str,
    suffixes: list[str] | None = None,
) -> list[Job]:  # fmt: skip
    """Return a pair (task, function that reads its data) for each --task ID (`task_ids`) and the --data PATH at the
    same position (`data_options`). Raise UsageError or MissingInputError if they do not fit or do not exist.
    """
    from lmtrain.eval.task import TextTask, all_tasks, find_task
    from lmtrain.eval.task_recipes.hash_and_count_texts import dataset_prefix
    from lmtrain.start.evaluation.tasks_and_texts import read_texts
    from lmtrain.units import plural

    task_ids, data_options = task_ids or [], data_options or []
    tasks = [find_task(name) for name in task_ids]
    if not task_ids:
        measured = way(*["--task", "perplexity"] * max(1, len(data_options)))
        raise UsageError(
            f"No --task was given. Use {measured} for the loss on any text; `lmtrain eval --list` shows the others."
        )
    if len(task_ids) != len(data_options):
        way_out = "Give as many of one as of the other"
        if missing := ["--data", "PATH"] * (len(task_ids) - len(data_options)):
            way_out = f"Add {fill_in(*missing)}"
        raise UsageError(
            f"Each --task needs its own --data, but {plural(len(task_ids), 'task')} and "
            f"{plural(len(data_options), '--data option')} were given. {way_out}; `lmtrain eval --list` shows which "
            "data each task reads."
        )
    if baseline is not None and not any(task.compares for task in tasks):
        usable_tasks = ", ".join(name for name, task in all_tasks().items() if task.compares)
        raise UsageError(
            f"--baseline={baseline} needs a task that scores whole documents. {leave_out()}, or choose one of these "
            f"tasks: {usable_tasks}."
        )

    def is_data(path: Path) -> bool:
        return path.exists() or dataset_prefix(path) is not None

    jobs: list[Job] = []
    reads_text = False
    for task, source in zip(tasks, data_options, strict=True):
        prefix = dataset_prefix(Path(source))
        if prefix is not None or not isinstance(task, TextTask):
            if prefix is None and not Path(source).exists():
                hint = "Give a file or a .bin/.idx prefix."
                raise MissingInputError(missing_path(source, hint, is_data, option="--data="))
            jobs.append((task, partial(lambda path, report: path, Path(source))))
        elif source != "-" and not Path(source).exists() and not any(mark in source for mark in "*?["):
            if paths_in_one_word(source):
                raise UsageError(
                    f"--data={source} is several paths in one word, and a task reads one: a file, a folder or a glob. "
                    "Repeat --task and --data for each."
                )
            hint = "Give a file, a folder or a .bin/.idx prefix."
            raise MissingInputError(missing_path(source, hint, is_data, option="--data="))
        else:
            found = find_sources(resolve_text_inputs([source], format_, suffixes))
            jobs.append((task, partial(read_texts, found, key)))
            reads_text = True
    suffix = suffixes[0] if suffixes else None
    for option, value in (("--format", format_), ("--suffix", suffix), ("--key", key if key != "text" else None)):
        if value is not None and not reads_text:
            raise UsageError(
                f"{option}={value} is about text files, and none of the given tasks reads text files. {leave_out()}."
            )
    return jobs


def check_tasks_fit(
    jobs: list[Job], sources: list[ModelSource], seq_len: int | None, stride: int | None = None
) -> None:
    """Raise UsageError if any task cannot score any of the models, because of the model's kind or because its context
    is shorter than the window of `seq_len` tokens (None: the task's own). `stride` is the distance of windows typed.
    """
    from lmtrain.eval.task import check_kind, choose_window

    for task, _ in jobs:
        for source in sources:
            check_kind(task, causal=source.settings.shape.causal, pairs="pair" in source.settings.terms)
            choose_window(task, source.settings.shape.seq_len, seq_len, stride)


def _print_tasks(as_json: bool) -> None:
    """Print the id, data and recipe of every task that `lmtrain eval` knows, as a table, or as JSON with `as_json`."""
    from lmtrain.eval.task import all_tasks

    tasks = all_tasks()
    if as_json:
        return print_json([
            {"id": name, "data": task.data, "headline": task.headline, "recipe": task.recipe}
            for name, task in tasks.items()
        ])  # fmt: skip
    from lmtrain.cli.screen.print_facts_and_tables import PlainConsole
    from lmtrain.eval.print_evaluation_results import render_tasks

    return PlainConsole(highlight=False).print(render_tasks(tasks))
