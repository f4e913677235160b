"""`lmtrain branch RUN --at STEPS`: the commands that decay a run from several of its checkpoints, each as a branch."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from lmtrain.cli.screen.print_messages_and_json import echo, print_notice, print_text
from lmtrain.cli.shared_options import Overrides, Plugins, parse_count_option

EXAMPLES = (
    ("lmtrain branch runs/trunk --at 20k,40k,60k", "print a command for each: a decay of a tenth of the branch"),
    ("lmtrain branch runs/trunk --at 20k,40k --shape sqrt | sh", "run them, one after another"),
    ("lmtrain branch runs/trunk --at 60k --decay-tokens 2B stages.decay.data.path=data/clean", "on other data"),
    ("lmtrain branch runs/trunk --at 20k,40k --slurm='--gpus-per-node 8' > job.sbatch", "an array of Slurm's jobs"),
)


def branch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of the run to branch from.")],
    overrides: Overrides = None,
    at: Annotated[
        str, typer.Option("--at", metavar="STEPS", help="The steps whose checkpoints to begin from, as in 20k,40k.")
    ] = "",
    decay: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT", help="Length of the decay, as a share of the branch's whole run. [default: 10%]"
        ),
    ] = None,
    decay_steps: Annotated[
        int | None, typer.Option(metavar="N", parser=parse_count_option, help="The same in steps, as in 2k.")
    ] = None,
    decay_tokens: Annotated[
        int | None, typer.Option(metavar="N", parser=parse_count_option, help="The same in tokens, as in 1B.")
    ] = None,
    shape: Annotated[
        Literal["linear", "sqrt", "cosine"],
        typer.Option(help="How the learning rate falls to 0: a line, 1 - sqrt(share done), or half a cosine."),
    ] = "linear",
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where the run folders go. [default: beside RUN]")
    ] = None,
    slurm: Annotated[
        str | None,
        typer.Option(
            metavar="OPTIONS",
            help="Print an sbatch file with an array of jobs instead. OPTIONS are those of `lmtrain slurm render`, as "
            "one word: --slurm='--gpus-per-node 8 --time 4:00:00'.",
        ),
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Print the commands that decay a run from several of its checkpoints, each as a run of its own.

    A run with a stable learning rate is thus finished at several lengths. Each command begins with everything that the
    checkpoint holds, adds a stage named decay, and can be pasted or piped into sh.
    """
    from lmtrain.start.decay_branches import build_branches, folder_of_branches, pruning_warning

    branches = build_branches(run, at, decay, decay_steps, decay_tokens, shape, output, overrides)
    if warning := pruning_warning(run, at):
        print_notice(warning)
    if slurm is None:
        for each in branches:
            echo(each.command)
        return None
    from lmtrain.cli.slurm.slurm_command import branches_script

    runs = [(each.config, each.overrides) for each in branches]
    flags = [[f"--from-run={each.checkpoint.absolute()}"] for each in branches]
    return print_text(branches_script(shlex.split(slurm), folder_of_branches(run, output), runs, flags))
