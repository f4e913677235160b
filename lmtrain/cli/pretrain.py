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

from lmtrain.errors import LmtrainError, StoppedEarly, UsageError

if TYPE_CHECKING:
    from rich.console import Console

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
) -> None:
    """Pretrain a model, or go on with a run that was stopped: the same command does both."""
    overrides = list(overrides or [])
    if multirun:
        return _sweep(overrides, config_dir, config_name, dry_run=dry_run, print_config=print_config, as_json=as_json)

    from lmtrain.config.compose import compose
    from lmtrain.train.config import RunConfig

    config = compose(RunConfig, overrides, config_dir=config_dir, name=config_name)
    if print_config:
        return _print_config(config, as_json)

    from lmtrain.runtime.faults import arm_from_env
    from lmtrain.runtime.process import ProcessEnv
    from lmtrain.train.preflight import preflight

    arm_from_env()
    inputs = preflight(config, ProcessEnv.detect())
    if dry_run:
        return _print_plan(config, inputs, as_json)
    try:
        summary = _train(config, inputs, as_json)
    except LmtrainError as error:
        _write_stop(config, {"cause": str(error), "exit_code": error.exit_code, "requeue": False})
        raise
    facts = {"cause": summary.stopped_by or "done", "step": summary.step}
    stop = StoppedEarly(
        f"{summary.stopped_by} at step {summary.step} of {config.total_steps}: a checkpoint is saved. "
        "Run the same command again to go on."
    )
    code = stop.exit_code if summary.stopped_by else 0
    _write_stop(config, facts | {"exit_code": code, "requeue": bool(summary.stopped_by)})
    if summary.stopped_by:
        raise stop
    return None


def _train(config: RunConfig, inputs: Inputs, as_json: bool) -> Summary:
    from rich.console import Console

    from lmtrain.runtime.device import memory_errors
    from lmtrain.train.loop import train
    from lmtrain.train.setup import open_run

    console = Console(stderr=as_json)
    smaller = f"train.micro_batch={max(1, config.train.micro_batch // 2)}, precision=bf16 or a smaller model.seq_len"
    with memory_errors(f"Use {smaller}."), open_run(config, inputs, console) as run:
        summary = train(run)
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
    console.print(f"done: {', '.join(parts)}; everything is in {config.run.dir}", highlight=False, soft_wrap=True)


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
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from lmtrain.train.plan import plan_facts, rank_rows

    facts, ranks = plan_facts(config, inputs), rank_rows(config, inputs)
    if as_json:
        typer.echo(json.dumps(facts | {"ranks": ranks}))
        return
    console, table = Console(), Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for key, value in facts.items():
        table.add_row(key.replace("_", " "), _shown(key, value))
    console.print(table)
    layout = Table(title="layout", title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    for column in ranks[0]:
        layout.add_column(_SHORT.get(column, column.removesuffix("_bytes")), justify="right", no_wrap=True)
    for row in ranks:
        layout.add_row(*(_shown(key, value) for key, value in row.items()))
    console.print(layout)


_SHORT = {"parameters": "params", "gradients_bytes": "grads", "optimizer_bytes": "optim"}  # for 80 columns


def _shown(key: str, value: object) -> str:
    from lmtrain.units import format_bytes, format_count

    if not isinstance(value, (int, float)):
        return str(value)
    if key.endswith("_bytes"):
        return format_bytes(value)
    return str(value) if isinstance(value, int) and value < 10_000 else format_count(value)


def _sweep(
    overrides: list[str], config_dir: Path | None, config_name: str, *, dry_run: bool, print_config: bool, as_json: bool
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
    flags = ["--config-name", config_name, *(["--config-dir", str(config_dir)] if config_dir else [])]
    flags += ["--dry-run"] * dry_run + ["--print-config"] * print_config + ["--json"] * as_json
    failed = []
    for number, (folder, job) in enumerate(jobs, 1):
        typer.echo(f"run {number} of {len(jobs)}: {folder}", err=as_json)
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
