"""`lmtrain pretrain`: the top of the staircase. Settings -> preflight -> set-up -> loop, in the order they can fail.

Everything up to preflight runs without torch, so that a wrong run is refused at once.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from lmtrain.cli.options import ConfigDir, ConfigName, FromRun, Overrides, Plugins
from lmtrain.cli.ranks import launching
from lmtrain.cli.ranks.launching import Processes, laid_out
from lmtrain.cli.screen.terminal import tell
from lmtrain.runtime.processes.signals import give_back

if TYPE_CHECKING:
    from rich.console import Console

    from lmtrain.cli.pretrain.attempt import Attempt
    from lmtrain.eval.in_training import Planned
    from lmtrain.train.before.preflight import Inputs
    from lmtrain.train.loop import Summary


def pretrain(
    context: typer.Context,
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    config_name: ConfigName = "pretrain",
    from_run: FromRun = None,
    multirun: Annotated[
        bool, typer.Option("-m", "--multirun", help="Run every combination of a=1,2 b=range(3), one after another.")
    ] = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the settings as YAML and stop.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, say what would run, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    plugin: Plugins = None,
    nproc: launching.NumProcesses = None,
    nproc_per_node: launching.NumPerNode = None,
    max_restarts: launching.MaxRestarts = None,
    elastic: launching.Elastic = False,
) -> None:
    """Pretrain a model, or go on with a run that was stopped: the same command does both."""
    processes = Processes(nproc, nproc_per_node, max_restarts)
    env, overrides = launching.this_process(processes), list(overrides or [])
    if dry_run or print_config:
        give_back()
    if multirun:
        from lmtrain.cli.pretrain.sweep import run_all

        return run_all(context.obj, overrides, config_dir, config_name, from_run, env, elastic=elastic)

    from lmtrain.cli.pretrain.attempt import attempt
    from lmtrain.cli.pretrain.from_run import compose_run
    from lmtrain.cli.pretrain.summary import print_preview, print_settings, print_summary

    say = tell if env.rank == 0 and not env.is_child else None
    compose = partial(compose_run, overrides, from_run=from_run, config_dir=config_dir, name=config_name, say=say)
    if dry_run or print_config:
        config = laid_out(compose(), overrides, env, elastic=elastic)
        return print_settings(config, env, as_json) if print_config else print_preview(config, env, as_json)
    with attempt(env) as this:
        composed = compose()
        config = laid_out(composed, overrides, env, elastic=elastic)
        this.settle(config)

        # because: settings that are wrong are refused before this is imported
        from lmtrain.cli.pretrain.eval_tasks import plan
        from lmtrain.cli.screen.console import Screen
        from lmtrain.train.before.preflight import preflight

        inputs, planned = plan(config, preflight(config, env))
        this.begin(inputs, in_ranks=processes.are_started)
        if processes.are_started:
            shared = None if plugin or from_run else composed
            return launching.run_attempts(context.obj, config, inputs, env, max_restarts, shared)
        console = Screen(stderr=as_json, quiet=env.rank > 0)
        summary = _train(this, inputs, planned, console)
        this.conclude(summary)
        print_summary(config, summary, console, as_json)
    return None


def _train(this: Attempt, inputs: Inputs, planned: list[Planned], console: Console) -> Summary:
    from lmtrain.cli.pretrain.eval_tasks import evaluation
    from lmtrain.parallel.mesh import build_mesh
    from lmtrain.train.loop import train
    from lmtrain.train.ranks.same_everywhere import agree
    from lmtrain.train.setup import open_run

    config = this.config
    with this.met() as (device, hosts):
        agree(config, inputs, hosts)
        mesh = build_mesh(config.parallel.layout, device, config.parallel.timeout_s)
        with open_run(config, inputs, console, mesh, device, hosts) as run:
            return train(run, this.stop, evaluation(config, inputs, planned))
