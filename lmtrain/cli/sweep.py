"""`lmtrain pretrain -m`: every combination of settings as a run of its own, one after another. Called by pretrain."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import typer

from lmtrain.errors import StoppedEarly, UsageError


def run_all(
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
