"""`lmtrain pretrain`: the top of the staircase. Settings -> preflight -> set-up -> loop, in the order they can fail.

Everything up to preflight runs without torch, so that a wrong run is refused at once.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from lmtrain.cli.launching import NumProcesses, run_processes, this_process, told_to_peers
from lmtrain.cli.options import ConfigDir, ConfigName, FromRun, Overrides, Plugins
from lmtrain.cli.say import tell, warn_of
from lmtrain.errors import LmtrainError, RanksDifferError, StoppedEarly

if TYPE_CHECKING:
    from rich.console import Console

    from lmtrain.eval.planned import Planned
    from lmtrain.runtime.process import ProcessEnv
    from lmtrain.train.config import RunConfig
    from lmtrain.train.loop import Summary
    from lmtrain.train.preflight import Inputs


def pretrain(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    config_name: ConfigName = "pretrain",
    from_run: FromRun = None,
    multirun: Annotated[
        bool, typer.Option("-m", "--multirun", help="Run every combination of a=1,2 b=range(3), one after another.")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the settled settings as YAML and stop.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, say what would run, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    plugin: Plugins = None,
    nproc: NumProcesses = None,
) -> None:
    """Pretrain a model, or go on with a run that was stopped: the same command does both."""
    env, overrides = this_process(nproc), list(overrides or [])
    flags = ["--config-name", config_name, *(["--config-dir", str(config_dir)] if config_dir else [])]
    flags += [f"--from-run={from_run}"] * (from_run is not None) + [f"--plugin={name}" for name in plugin or ()]
    flags += ["--json"] * as_json + ["--debug"] * ("--debug" in sys.argv)  # because: main has taken --debug out
    if multirun:
        flags += ["--dry-run"] * dry_run + ["--print-config"] * print_config + ["--nproc", str(nproc)] * bool(nproc)
        from lmtrain.cli.sweep import run_all

        return run_all(overrides, config_dir, config_name, from_run, flags)

    from lmtrain.cli.from_run import compose_run
    from lmtrain.cli.pretrain_view import left_behind, print_preview, print_settings, print_summary

    waited_for = None if nproc or dry_run or print_config else env
    with told_to_peers(waited_for):
        config = compose_run(overrides, from_run=from_run, config_dir=config_dir, name=config_name)
    if print_config:
        return print_settings(config, as_json)

    from lmtrain.cli.evaluations import plan
    from lmtrain.runtime.faults import arm_from_env, fault_point
    from lmtrain.runtime.signals import ignore_stops
    from lmtrain.train.preflight import preflight
    from lmtrain.train.stop_file import cause_known, write_end, write_failure, write_stop

    arm_from_env()
    with told_to_peers(waited_for):
        inputs, planned = plan(config, preflight(config, env, starting=not dry_run))
    if dry_run:
        return print_preview(config, inputs, as_json)
    if nproc is not None and nproc > 1:
        failed = lambda outcome: warn_of(write_end(config, outcome))  # noqa: E731
        return run_processes(["pretrain", *flags, *overrides], nproc, failed, partial(cause_known, config))
    from lmtrain.cli.screen import Screen

    console = Screen(stderr=as_json, quiet=env.rank > 0)
    fault_point("start.imports")
    try:
        summary = _train(config, inputs, planned, env, console)
    except RanksDifferError as error:
        if env.rank > 0:
            raise typer.Exit(error.exit_code) from None  # because: rank 0 speaks for all
        raise
    except LmtrainError as error:
        write_failure(config, error, env)
        raise
    except KeyboardInterrupt:
        if env.rank == 0:
            tell(f"\nstopped at once: {left_behind(config)}")
        raise
    if env.world_size > 1:
        ignore_stops()  # because: srun --kill-on-bad-exit ends tasks that leave a moment after the first with code 75
    facts = {"cause": summary.stopped_by or "done", "step": summary.step}
    stop = StoppedEarly(f"{summary.stopped_by} at step {summary.step} of {config.total_steps}: {left_behind(config)}")
    code = stop.exit_code if summary.stopped_by else 0
    if env.rank > 0:
        raise typer.Exit(code)  # because: rank 0 speaks for all
    warn_of(write_stop(config, facts | {"exit_code": code, "requeue": bool(summary.stopped_by)}))
    print_summary(config, summary, console, as_json)
    if summary.stopped_by:
        raise stop
    return None


def _train(config: RunConfig, inputs: Inputs, planned: list[Planned], env: ProcessEnv, console: Console) -> Summary:
    from lmtrain.cli.evaluations import evaluation
    from lmtrain.cli.watching import watched_run
    from lmtrain.observe import phases
    from lmtrain.parallel.mesh import build_mesh
    from lmtrain.runtime.device import memory_errors, pick_device
    from lmtrain.runtime.process_group import start
    from lmtrain.train.agreement import agree
    from lmtrain.train.loop import train
    from lmtrain.train.setup import open_run

    smaller = f"train.micro_batch={max(1, config.train.micro_batch // 2)}, precision=bf16 or a smaller model.seq_len"
    with memory_errors(f"Use {smaller}."):
        with told_to_peers(env):
            device = pick_device(config.compute.device, env.local_rank)
        phases.enter("rendezvous")
        with start(env, device, config.parallel.timeout_s) as met, watched_run(config, env, met):
            agree(config, inputs, env, met.hosts)
            mesh = build_mesh(config.parallel.layout, device, config.parallel.timeout_s)
            with open_run(config, inputs, console, mesh, device, met.hosts) as run:
                return train(run, evaluation(config, inputs, planned))
