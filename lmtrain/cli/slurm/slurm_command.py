"""`lmtrain slurm`: write an sbatch file for a run, after the checks of `pretrain --dry-run`; print or submit it.

Only `submit` contacts Slurm, by running `sbatch`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from lmtrain.cli.screen.print_messages_and_json import echo, print_notice, print_text, progress
from lmtrain.cli.shared_options import (
    ConfigDir,
    ConfigName,
    FromBeginning,
    FromRun,
    Overrides,
    Overwrite,
    Plugins,
    parse_output_file,
    refuse_unused_overwrite,
)
from lmtrain.errors import UsageError, shell_quoted, way
from lmtrain.runtime.files.existing_output import check_output
from lmtrain.start.slurm_job.sbatch_options import SlurmOptions

if TYPE_CHECKING:
    from lmtrain.train.run_config import RunConfig

app = typer.Typer(no_args_is_help=True)

_HINTS: dict[str, Any] = {  # type and option of each field of SlurmOptions
    "overrides": Overrides,
    "config_dir": ConfigDir,
    "config_name": ConfigName,
    "from_run": FromRun,
    "from_beginning": FromBeginning,
    "plugin": Plugins,
    "gpus_per_node": Annotated[
        int | None, typer.Option(min=1, help="GPUs to use on each node, with one process for each.")
    ],
    "tasks_per_node": Annotated[
        int | None, typer.Option(min=1, help="Processes on each node, where there are no GPUs.")
    ],
    "tasks": Annotated[
        Literal["node", "rank"],
        typer.Option("--tasks", help="What srun starts: a task per node, which starts its ranks, or a task per rank."),
    ],
    "nodes": Annotated[
        int | None,
        typer.Option(min=1, help="Number of nodes, compared with the layout. [default: what the layout takes]"),
    ],
    "spare_nodes": Annotated[
        int, typer.Option(min=0, help="Extra nodes to request; a node that loses a process is then left out.")
    ],
    "time": Annotated[
        str | None, typer.Option(metavar="LIMIT", help="Slurm's time limit, as in 4:00:00 or 2-12.")
    ],
    "partition": Annotated[str | None, typer.Option(metavar="NAME", help="Slurm's partition.")],
    "account": Annotated[str | None, typer.Option(metavar="NAME", help="Slurm's account.")],
    "sbatch": Annotated[
        list[str] | None,
        typer.Option("--sbatch", metavar="OPTION", help="Another option of sbatch: --sbatch=--mem=0. Repeatable."),
    ],
    "srun": Annotated[
        list[str] | None,
        typer.Option("--srun", metavar="OPTION", help="Another option of srun: --srun=--cpu-bind=cores. Repeatable."),
    ],
    "env": Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Set this in all processes, and write it to the file. Repeatable."),
    ],
    "setup": Annotated[
        list[str] | None,
        typer.Option(metavar="LINE", help="A line of bash to run first, as in 'module load cuda'. Repeatable."),
    ],
    "container_image": Annotated[
        str | None,
        typer.Option(metavar="IMAGE", help="Run in this image, by srun's --container-image (pyxis, enroot)."),
    ],
    "container_command": Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="Command that starts a container, as in 'apptainer exec --nv image.sif'."),
    ],
    "array": Annotated[
        bool, typer.Option("--array", help="An array of jobs, one for each combination of a=1,2 b=range(3).")
    ],
    "array_tasks": Annotated[
        str | None,
        typer.Option(
            metavar="TASKS", help="Jobs of the array to start: 0,2 or 0-3, and at most 2 at a time: %2 or 0-3%2."
        ),
    ],
}


def _with_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Decorate a verb that takes `options: SlurmOptions`. Return a function for typer that has, instead of this
    parameter, one for each field of SlurmOptions, and calls the verb.
    """
    hints = _HINTS | get_type_hints(verb, include_extras=True)
    own = {name: parameter.default for name, parameter in signature(verb).parameters.items() if name != "options"}
    defaults = {parameter.name: parameter.default for parameter in fields(SlurmOptions)} | own

    def command(**values: Any) -> None:
        verb(**{name: values.pop(name) for name in own}, options=SlurmOptions(**values))

    # because: typer reads these four attributes
    command.__name__, command.__doc__ = verb.__name__, verb.__doc__
    command.__annotations__ = {name: hints[name] for name in defaults}
    vars(command)["__signature__"] = Signature([
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
        for name, default in defaults.items()
    ])  # fmt: skip
    return command


@app.command()
@_with_options
def render(
    options: SlurmOptions,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", parser=parse_output_file, help="File to write. [default: print it]"),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Print the sbatch file of a run. The job starts all processes, restarts them after a loss, and requeues itself."""
    from lmtrain.start.slurm_job.jobs_of_runs import SBATCH_FILE, build_job, write_job
    from lmtrain.start.slurm_job.sbatch_file import job_script

    if output is not None and re.search(r"%\w", output.name):
        log = way(f"--sbatch=--output={output}", instead_of="--output")
        raise UsageError(
            f"--output={output} is the sbatch file to write, in whose name Slurm replaces nothing. Use {log} for the "
            "job's log."
        )
    refuse_unused_overwrite(overwrite, output, subject="a file that is printed")
    if output is not None:
        check_output(output, SBATCH_FILE, overwrite=overwrite)
    job = build_job(options, print_notice, progress)
    if output is None:
        return print_text(job_script(job))
    write_job(job, output)
    return print_notice(f"{output} is written. Start it with: {job.submit_command(shell_quoted(str(output)))}")


@app.command()
@_with_options
def submit(
    options: SlurmOptions,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what render prints, and submit nothing.")] = False,
) -> None:
    """Submit a run to Slurm and print the job's id. The sbatch file is kept in the run's folder as job.sbatch."""
    from lmtrain.start.slurm_job.jobs_of_runs import build_job, submit_job
    from lmtrain.start.slurm_job.sbatch_file import job_script

    job = build_job(options, print_notice, progress)
    if dry_run:
        return print_text(job_script(job))
    number = submit_job(job)
    echo(number)
    log = job.log.replace("%j", number).replace("%A_%a", f"{number}_*")
    return print_notice(f"submitted: {job.file}; its log is {log}")


def branches_script(
    words: Sequence[str], folder: Path, runs: Sequence[tuple[RunConfig, list[str]]], flags: Sequence[list[str]]
) -> str:
    """Return the text of an sbatch file for an array of jobs, one for each entry (settings, overrides) of `runs`.
    `words` are options of `lmtrain slurm render`, `flags` has the options of `lmtrain pretrain` for each run, and logs
    go to `folder`. Raise an LmtrainError if the options or the runs do not fit.
    """
    from lmtrain.cli.subcommands import build_verb
    from lmtrain.start.slurm_job.jobs_of_runs import job_of_runs
    from lmtrain.start.slurm_job.sbatch_file import job_script

    verb = build_verb("slurm").commands["render"]
    with verb.make_context("lmtrain branch --slurm", list(words)) as context:
        values = {field.name: context.params[field.name] for field in fields(SlurmOptions)}
        refused = ("overrides", "from_run", "from_beginning", "array", "array_tasks", "output", "overwrite")
        unused = [name for name in refused if context.params[name]]
    if unused:
        raise UsageError(
            f"--slurm takes no {unused[0].replace('_', '-')} of `lmtrain slurm render`, since `lmtrain branch` sets "
            "the runs of the array itself. Leave it out of the text after --slurm."
        )
    options = SlurmOptions(**values | {"array": True})
    options.check()
    own_flags = [[*options.flags, *own] for own in flags]
    return job_script(job_of_runs(options, folder, runs, own_flags, print_notice, progress))
