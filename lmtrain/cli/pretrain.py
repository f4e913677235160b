"""`lmtrain pretrain`: the top of the staircase. Settings -> preflight -> set-up -> loop, in the order they can fail.

Everything up to preflight runs without torch, so that a wrong run is refused at once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmtrain.cli.plugins import Plugins
from lmtrain.errors import LmtrainError, OutputError, PeerLostError, StoppedEarly, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from lmtrain.runtime.process import ProcessEnv
    from lmtrain.train.config import RunConfig
    from lmtrain.train.loop import Summary
    from lmtrain.train.preflight import Inputs


def pretrain(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings: key=value, or group=choice as in model=gpt2_small.", metavar="KEY=VALUE"),
    ] = None,
    config_dir: Annotated[
        Path | None, typer.Option("--config-dir", help="A folder of your own configs; it wins over conf/.")
    ] = None,
    config_name: Annotated[str, typer.Option("--config-name", help="The root config to start from.")] = "pretrain",
    multirun: Annotated[
        bool, typer.Option("-m", "--multirun", help="Run every combination of a=1,2 b=range(3), one after another.")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the settled settings as YAML and stop.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, say what would run, and stop.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    plugin: Plugins = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", min=1, help="Start so many processes on this machine that share the work.")
    ] = None,
) -> None:
    """Pretrain a model, or go on with a run that was stopped: the same command does both."""
    from lmtrain.runtime.launch import follow_launcher
    from lmtrain.runtime.process import ProcessEnv, share_cores

    env = ProcessEnv.detect()
    share_cores()
    if env.launcher == "lmtrain":
        follow_launcher()
    if nproc is not None:
        env = env.as_launcher(nproc)
    overrides = list(overrides or [])
    flags = ["--config-name", config_name, *(["--config-dir", str(config_dir)] if config_dir else [])]
    flags += [f"--plugin={name}" for name in plugin or ()]
    flags += ["--json"] * as_json + ["--debug"] * ("--debug" in sys.argv)  # because: main has taken --debug out
    if multirun:
        flags += ["--dry-run"] * dry_run + ["--print-config"] * print_config
        flags += ["--nproc", str(nproc)] if nproc else []
        return _sweep(overrides, config_dir, config_name, flags, quiet=as_json)

    from lmtrain.config.compose import compose
    from lmtrain.train.config import RunConfig

    config = compose(RunConfig, overrides, config_dir=config_dir, name=config_name)
    if print_config:
        return _print_config(config, as_json)

    from lmtrain.runtime.faults import arm_from_env
    from lmtrain.runtime.signals import ignore_stops
    from lmtrain.train.preflight import preflight

    arm_from_env()
    inputs = preflight(config, env, starting=not dry_run)
    if dry_run:
        return _print_plan(config, inputs, as_json)
    if nproc is not None and nproc > 1:
        return _launch(config, [*flags, *overrides], nproc)
    try:
        summary = _train(config, inputs, env, as_json)
    except LmtrainError as error:
        _write_failure(config, error, env)
        raise
    if env.world_size > 1:
        ignore_stops()  # because: srun --kill-on-bad-exit ends tasks that leave a moment after the first with code 75
    facts = {"cause": summary.stopped_by or "done", "step": summary.step}
    stop = StoppedEarly(
        f"{summary.stopped_by} at step {summary.step} of {config.total_steps}: a checkpoint is saved. "
        "Run the same command again to go on."
    )
    code = stop.exit_code if summary.stopped_by else 0
    if env.rank > 0:
        raise typer.Exit(code)  # because: rank 0 speaks for all
    _write_stop(config, facts | {"exit_code": code, "requeue": bool(summary.stopped_by)})
    if summary.stopped_by:
        raise stop
    return None


def _launch(config: RunConfig, arguments: list[str], nproc: int) -> None:
    """This command in several processes; what it refuses has been said once by now."""
    from lmtrain.runtime.launch import launch

    outcome = launch([sys.executable, "-m", "lmtrain.cli.main", "pretrain", *arguments], nproc)
    if outcome.cause is not None:
        typer.echo(f"error: {outcome.cause}", err=True)
        lost = outcome.exit_code == PeerLostError.exit_code
        if outcome.exit_code != OutputError.exit_code:  # because: then the folder may be another run's
            facts = {"cause": outcome.cause, "exit_code": outcome.exit_code, "requeue": lost, "rank": outcome.rank}
            _write_stop(config, facts)
    if outcome.exit_code != 0:
        raise typer.Exit(outcome.exit_code)


def _train(config: RunConfig, inputs: Inputs, env: ProcessEnv, as_json: bool) -> Summary:
    from rich.console import Console

    from lmtrain.parallel.mesh import build_mesh
    from lmtrain.runtime.device import memory_errors, pick_device
    from lmtrain.runtime.process_group import start
    from lmtrain.train.loop import train
    from lmtrain.train.setup import open_run

    leads, timeout_s = env.rank == 0, config.parallel.timeout_s
    console = Console(stderr=as_json, quiet=not leads)
    smaller = f"train.micro_batch={max(1, config.train.micro_batch // 2)}, precision=bf16 or a smaller model.seq_len"
    with memory_errors(f"Use {smaller}."):
        device = pick_device(config.compute.device, env.local_rank)
        with start(env, device, timeout_s) as met:
            mesh = build_mesh(config.parallel.layout, device, timeout_s)
            with open_run(config, inputs, console, mesh, device, met.hosts) as run:
                summary = train(run)
    if leads:
        _print_summary(config, summary, console, as_json)
    return summary


def _print_summary(config: RunConfig, summary: Summary, console: Console, as_json: bool) -> None:
    from lmtrain.units import format_count, format_seconds

    if as_json:
        facts = {"run": config.run.dir, "step": summary.step, "loss": summary.loss, "valid_loss": summary.valid_loss}
        facts |= {"tokens": summary.tokens, "seconds": summary.seconds, "stopped_by": summary.stopped_by}
        typer.echo(json.dumps(facts))
        return
    parts = [f"{summary.step} steps", f"{format_count(summary.tokens)} tokens", format_seconds(summary.seconds)]
    if summary.loss is not None:
        parts.append(f"loss {summary.loss:.4f}")
    if summary.valid_loss is not None:
        parts.append(f"validation {summary.valid_loss:.4f}")
    word = "stopped" if summary.stopped_by else "done"
    console.print(f"{word}: {', '.join(parts)}; everything is in {config.run.dir}", highlight=False, soft_wrap=True)


def _write_failure(config: RunConfig, error: LmtrainError, env: ProcessEnv) -> None:
    """The first process that fails says why; those that lose it as a peer come later and leave that alone."""
    if isinstance(error, OutputError):
        return  # because: the folder is another run's, or cannot be written
    lost = isinstance(error, PeerLostError)
    if env.world_size == 1 or not (Path(config.run.dir) / "stop.json").exists():
        facts = {"cause": str(error), "exit_code": error.exit_code, "requeue": lost}
        _write_stop(config, facts | ({"rank": env.rank} if env.world_size > 1 else {}))


def _write_stop(config: RunConfig, facts: dict[str, Any]) -> None:
    """stop.json: why the run ended and whether a scheduler should start it again."""
    from lmtrain.runtime.files import write_json

    folder = Path(config.run.dir)
    if folder.is_dir():
        write_json(folder / "stop.json", facts)


def _print_config(config: RunConfig, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(config.to_dict(), indent=1))
        return
    from omegaconf import OmegaConf

    typer.echo(OmegaConf.to_yaml(config.to_dict()), nl=False)


def _print_plan(config: RunConfig, inputs: Inputs, as_json: bool) -> None:
    """What --dry-run says: the size of things and where each rank sits."""
    from rich.console import Console
    from rich.table import Table

    from lmtrain.train.layout_table import SINGLE_ROWS, layout_lines, merged, rank_rows
    from lmtrain.train.preview import plan_facts

    facts, ranks = plan_facts(config, inputs), rank_rows(config, inputs.model)
    if as_json:
        typer.echo(json.dumps(facts | {"ranks": ranks}))
        return
    console, table = Console(), Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for key, value in facts.items():
        table.add_row(key.replace("_", " "), _shown(key, value))
    console.print(table)
    for line in ("", *layout_lines(ranks if len(ranks) <= SINGLE_ROWS else merged(ranks))):
        console.print(line, highlight=False, soft_wrap=True)


def _shown(key: str, value: object) -> str:
    from lmtrain.units import format_count

    if not isinstance(value, (int, float)):
        return str(value)
    return str(value) if isinstance(value, int) and value < 10_000 else format_count(value)


def _sweep(
    overrides: list[str], config_dir: Path | None, config_name: str, flags: list[str], *, quiet: bool
) -> None:
    """Each combination in a process of its own, in a folder of its own; the first failure does not stop the rest."""
    from lmtrain.config.compose import compose, sweep
    from lmtrain.train.config import RunConfig

    combinations = sweep(overrides, config_dir=config_dir)
    fixed = set.intersection(*map(set, combinations))
    jobs: list[tuple[str, list[str]]] = []
    for combination in combinations:
        # because: all are refused before one is started
        config = compose(RunConfig, combination, config_dir=config_dir, name=config_name)
        name = ",".join(o.lstrip("+") for o in combination if o not in fixed) or "only"
        folder = str(Path(config.run.dir) / name.replace("/", "_"))
        jobs.append((folder, [*(o for o in combination if not o.startswith("run.dir=")), f"run.dir={_quoted(folder)}"]))
    failed = []
    for number, (folder, job) in enumerate(jobs, 1):
        typer.echo(f"run {number} of {len(jobs)}: {folder}", err=quiet)
        code = subprocess.run([sys.executable, "-m", "lmtrain.cli.main", "pretrain", *flags, *job]).returncode
        if code == StoppedEarly.exit_code:
            raise StoppedEarly(f"run {number} of {len(jobs)} was stopped. Run the same command again to go on.")
        if code != 0:
            failed.append(f"{folder} (exit code {code})")
    if failed:
        raise UsageError(
            f"{len(failed)} of {len(jobs)} runs failed: {', '.join(failed)}. Their folders say why in stop.json."
        )


def _quoted(text: str) -> str:
    """A value that Hydra's grammar takes as one text, whatever is in it."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
