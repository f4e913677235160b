"""`lmtrain eval`: score a checkpoint on tasks; print results with their recipes as a table or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmtrain.cli.ranks.process_options import NumPerNode, NumProcesses
from lmtrain.cli.screen.print_messages_and_json import print_json, print_notice, say_already_there
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
)
from lmtrain.errors import UsageError
from lmtrain.runtime.files.atomic_files import read_json
from lmtrain.runtime.files.existing_output import Found
from lmtrain.runtime.processes.stop_signals import unblock_stops
from lmtrain.start.evaluation.existing_results import ResultsOrigin, check_output_files, check_results
from lmtrain.start.evaluation.tasks_and_texts import (
    build_jobs,
    check_tasks_fit,
    refuse_loose_files,
    refuse_standard_input,
)
from lmtrain.start.processes_of_command import ProcessOptions, detect_process, launch_evaluation

if TYPE_CHECKING:
    from lmtrain.start.evaluation.run_tasks import Options

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
    check_output_files(output, samples)
    compares_files = compare is not None and all(path.is_file() for path in compare)
    jobs = [] if compares_files else build_jobs(task, data, baseline, format_, key, suffix, report=print_notice)
    if checkpoint is None and compare is None:
        raise UsageError("CHECKPOINT is missing. Give a checkpoint or a run's folder, as in `lmtrain eval runs/a ...`.")
    processes = ProcessOptions(nproc, nproc_per_node)
    env = detect_process(processes)

    from lmtrain.cli.eval.print_evaluation import EvaluationScreen
    from lmtrain.start.evaluation.compare_results import compare_files, compare_models
    from lmtrain.start.evaluation.run_tasks import (
        Options,
        Session,
        check_device,
        choose_layout,
        evaluate_one,
        evaluate_steps,
        find_step_checkpoints,
    )
    from lmtrain.start.find_model_at_path import find_model

    options = Options(
        baseline=baseline, batch_size=batch_size, stride=stride, seq_len=seq_len, limit=limit, device=device,
        precision=precision, output=output, samples=samples,
    )  # fmt: skip
    screen = EvaluationScreen(is_quiet=env.rank > 0, as_json=as_json, full=full)
    if compare is not None and compares_files:
        options = _check_existing(options, ResultsOrigin.of(context.params, compare, []), overwrite, as_json)
        return screen.print_comparison(compare_files(*compare, options))
    unblock_stops()
    # because: errors are reported at once if the checks come before the import of torch
    paths = list(compare or ()) if checkpoint is None else [checkpoint]
    if checkpoint is not None and steps is not None:
        paths = find_step_checkpoints(checkpoint, steps)
    sources = [find_model(path, weights) for path in paths]
    layouts = [choose_layout(layout or [], source.settings, env) for source in sources]
    check_device(device, env)
    check_tasks_fit(jobs, sources, seq_len, stride)
    refuse_standard_input(data or [], env.world_size)
    texts = [*(data or []), *([str(baseline)] if baseline is not None else [])]
    files = [file for task, _ in jobs for file in task.files]
    origin = ResultsOrigin.of(context.params, [source.path for source in sources], texts, files)
    options = _check_existing(options, origin, overwrite, as_json)
    if processes.are_started:
        return launch_evaluation(context.obj, env, print_notice)
    session = Session(jobs, options, env, layouts, screen.views())
    if compare is not None:
        return screen.print_comparison(compare_models(sources, session))
    if steps is not None:
        return screen.print_curves(evaluate_steps(sources, session, screen.print_step_result))
    evaluate_one(sources[0], session, screen.print_result)
    return None


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


def _check_existing(options: Options, origin: ResultsOrigin, overwrite: bool, as_json: bool) -> Options:
    """Return the options of an evaluation of this origin with what is at the place of its outputs. Raise OutputError if
    that must not be replaced, and typer.Exit after a message if it is what the evaluation would write.
    """
    found = check_results(options.output, options.samples, origin, overwrite=overwrite)
    if found is Found.SAME and options.output is not None:
        if as_json:
            print_json(read_json(options.output), ensure_ascii=False)
        else:
            say_already_there(options.output)
        raise typer.Exit
    return replace(options, origin=origin, replaces=found is Found.OTHER)


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
