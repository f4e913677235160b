"""`lmtrain pretrain`: the top of the staircase. Settings -> preflight -> set-up -> loop, in the order they can fail.

Everything up to preflight runs without torch, so that a wrong run is refused at once.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from lmtrain.cli.options import ConfigDir, ConfigName, FromRun, Overrides, Plugins
from lmtrain.cli.pretrain.ending import conclude, heard_by_peers, reasons_kept, refuse_stop_file, stoppable
from lmtrain.cli.ranks import launching
from lmtrain.cli.ranks.launching import NumPerNode, NumProcesses, Processes, told_to_peers
from lmtrain.runtime.processes.signals import give_back

if TYPE_CHECKING:
    from rich.console import Console

    from lmtrain.eval.in_training import Planned
    from lmtrain.runtime.processes.process import ProcessEnv
    from lmtrain.runtime.processes.signals import StopRequest
    from lmtrain.train.before.preflight import Inputs
    from lmtrain.train.config import RunConfig
    from lmtrain.train.loop import Summary


def pretrain(
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
    nproc: NumProcesses = None,
    nproc_per_node: NumPerNode = None,
    max_restarts: launching.MaxRestarts = None,
    elastic: launching.Elastic = False,
) -> None:
    """Pretrain a model, or go on with a run that was stopped: the same command does both."""
    processes = Processes(nproc, nproc_per_node, max_restarts)
    env, overrides = launching.this_process(processes), list(overrides or [])
    flags = ["--config-name", config_name, *(["--config-dir", str(config_dir)] if config_dir else [])]
    flags += [f"--from-run={from_run}"] * (from_run is not None) + [f"--plugin={name}" for name in plugin or ()]
    flags += ["--json"] * as_json + ["--elastic"] * elastic + ["--debug"] * ("--debug" in sys.argv)  # main took it out
    if dry_run or print_config:
        give_back()
    if multirun:
        flags += ["--dry-run"] * dry_run + ["--print-config"] * print_config + processes.flags
        from lmtrain.cli.pretrain.sweep import run_all

        return run_all(overrides, config_dir, config_name, from_run, flags, speaks=env.rank == 0)

    from lmtrain.cli.pretrain.from_run import compose_run
    from lmtrain.cli.pretrain.summary import print_preview, print_settings, print_summary

    waited_for = None if dry_run or print_config else env
    with told_to_peers(waited_for):
        composed = compose_run(overrides, from_run=from_run, config_dir=config_dir, name=config_name)
        config = launching.laid_out(composed, overrides, env, elastic=elastic)
    if print_config:
        return print_settings(config, as_json) if env.rank == 0 else None

    from lmtrain.cli.pretrain.eval_tasks import plan
    from lmtrain.runtime.processes.faults import arm_from_env, fault_point
    from lmtrain.runtime.processes.process import BEGAN, set_env_default
    from lmtrain.train.before.preflight import preflight

    arm_from_env()
    if dry_run:
        inputs, _ = plan(config, preflight(config, launching.seen_from_here(config, env), starting=False))
        return print_preview(config, inputs, as_json) if env.rank == 0 else None
    with stoppable(config, env, waited_for) as stop:
        with told_to_peers(waited_for):
            refuse_stop_file(config, env)
            inputs, planned = plan(config, preflight(config, env))
        if processes.are_started:
            set_env_default(BEGAN, repr(stop.began_s))
            shared = None if plugin or from_run else launching.Composed(composed, overrides, config_dir, config_name)
            return launching.run_attempts(["pretrain", *flags, *overrides], config, inputs, env, max_restarts, shared)
        from lmtrain.cli.screen.console import Screen

        console = Screen(stderr=as_json, quiet=env.rank > 0)
        fault_point("start.imports")
        with launching.counted_start(config, inputs, env), reasons_kept(config, env):
            summary = _train(config, inputs, planned, env, console, stop)
        stopped = conclude(config, summary, env)
        print_summary(config, summary, console, as_json)
        if stopped is not None:
            raise stopped
    return None


def _train(
    config: RunConfig, inputs: Inputs, planned: list[Planned], env: ProcessEnv, console: Console, stop: StopRequest
) -> Summary:
    from lmtrain.cli.pretrain.ending import watched_run
    from lmtrain.cli.pretrain.eval_tasks import evaluation
    from lmtrain.observe.measure import phases
    from lmtrain.parallel.mesh import build_mesh
    from lmtrain.runtime.machine.device import memory_errors, pick_device
    from lmtrain.runtime.processes.process_group import start
    from lmtrain.train.loop import train
    from lmtrain.train.ranks.same_everywhere import agree
    from lmtrain.train.setup import open_run

    smaller = f"train.micro_batch={max(1, config.train.micro_batch // 2)}, precision=bf16 or a smaller model.seq_len"
    with memory_errors(f"Use {smaller}."):
        with told_to_peers(env):
            device = pick_device(config.compute.device, env)
        stop.hold()
        phases.enter("rendezvous")
        with (
            start(env, device, config.parallel.timeout_s) as met,
            watched_run(config, env, met, stop.hear, on_device=device.type == "cuda") as watch,
            heard_by_peers(stop, watch.tell_stop),
        ):
            agree(config, inputs, env, met.hosts)
            mesh = build_mesh(config.parallel.layout, device, config.parallel.timeout_s)
            with open_run(config, inputs, console, mesh, device, met.hosts) as run:
                return train(run, stop, evaluation(config, inputs, planned))
