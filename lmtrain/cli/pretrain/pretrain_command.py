"""`lmtrain pretrain`: the order of a start: settings, preflight checks, set-up, training loop.

Everything up to preflight runs without torch, so that a wrong run is refused at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lmtrain.cli.ranks import process_options
from lmtrain.cli.screen.print_messages_and_json import print_error, print_notice, print_wait, progress
from lmtrain.cli.shared_options import ConfigDir, ConfigName, FromBeginning, FromRun, Multirun, Overrides, Plugins
from lmtrain.runtime.processes.stop_signals import restore_default_handlers
from lmtrain.start.launch_ranks import choose_layout
from lmtrain.start.processes_of_command import ProcessOptions, detect_process, launch_training

if TYPE_CHECKING:
    from rich.console import Console

    from lmtrain.eval.evaluate_during_training import PlannedEvaluation
    from lmtrain.start.run_attempt_bookkeeping import Attempt
    from lmtrain.train.loop import Summary
    from lmtrain.train.startup_checks.preflight import Inputs


def pretrain(
    context: typer.Context,
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    config_name: ConfigName = "pretrain",
    from_run: FromRun = None,
    from_beginning: FromBeginning = False,
    multirun: Multirun = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the settings as YAML and stop.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, say what would run, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    plugin: Plugins = None,
    nproc: process_options.NumProcesses = None,
    nproc_per_node: process_options.NumPerNode = None,
    max_restarts: process_options.MaxRestarts = None,
    elastic: process_options.Elastic = False,
) -> None:
    """Pretrain a model, or continue a stopped run: the same command does both."""
    from lmtrain.start.settings_from_earlier_run import RunRequest, compose_run

    processes = ProcessOptions(nproc, nproc_per_node, max_restarts)
    env = detect_process(processes)
    request = RunRequest(overrides or [], config_dir, config_name, from_run, from_beginning)
    if dry_run or print_config:
        restore_default_handlers()
    if multirun:
        from lmtrain.cli.pretrain.print_sweep import sweep_views
        from lmtrain.start.sweep_runs import run_sweep

        return run_sweep(context.obj, request, env, sweep_views(as_json=as_json), elastic=elastic)

    from lmtrain.cli.pretrain.print_dry_run_and_summary import print_preview, print_settings, print_summary
    from lmtrain.start.dataset_from_text import make_data_of_text, preview_data_of_text
    from lmtrain.start.run_attempt_bookkeeping import run_attempt

    report = print_notice if env.rank == 0 and not env.is_child else None
    if dry_run or print_config:
        show = print_settings if print_config else print_preview
        composed = compose_run(request, report)
        with preview_data_of_text(composed, request.words, print_notice, needed=not print_config) as (checked, text):
            return show(choose_layout(checked, request.words, env, print_notice, elastic=elastic), env, as_json, text)
    with run_attempt(env, print_error, print_wait, raises_reported="--debug" in context.obj) as attempt:
        composed = compose_run(request, report)
        attempt.accept_settings(composed)
        make_data_of_text(composed, request.words, env, attempt.made_text, print_notice, progress, elastic=elastic)
        config = attempt.config = choose_layout(composed, request.words, env, print_notice, elastic=elastic)

        # because: wrong settings are refused before these are imported
        from lmtrain.cli.screen.print_facts_and_tables import PlainConsole
        from lmtrain.start.prepare_inputs_and_eval_tasks import prepare_inputs

        inputs, evaluations = prepare_inputs(config, env, progress)
        attempt.count_start(inputs, starts_ranks=processes.are_started)
        if processes.are_started:
            shared = None if plugin or from_run else composed
            return launch_training(
                context.obj, config, inputs, env, max_restarts, shared, process_options.PREPARE_FUNCTION, print_notice
            )
        console = PlainConsole(stderr=as_json, quiet=env.rank > 0)
        summary = _train(attempt, inputs, evaluations, console)
        attempt.record_result(summary)
        print_summary(config, summary, console, as_json)
    return None


def _train(attempt: Attempt, inputs: Inputs, evaluations: list[list[PlannedEvaluation]], console: Console) -> Summary:
    """Train the stages of a run that are not finished, one after another, in this process as one rank; all ranks must
    call it. A run without stages counts as one stage. `evaluations` holds a list for each of these stages. Return a
    summary of them together.
    """
    from lmtrain.start.prepare_inputs_and_eval_tasks import build_evaluation
    from lmtrain.train.loop import train
    from lmtrain.train.set_up_run import open_run

    config = attempt.config
    with attempt.join_peers(inputs) as (mesh, device, hosts):
        summary = None
        for (stage, stage_inputs), planned in zip(inputs.stages(config), evaluations, strict=True):
            with open_run(stage, stage_inputs, console, mesh, device, hosts) as run:
                evaluation = build_evaluation(stage, stage_inputs, planned)
                summary = train(run, attempt.stop, evaluation, summary)
            del run  # because: the model of the next stage needs the memory of this one's
            if summary.stopped_by:
                break
        assert summary is not None
        return summary
