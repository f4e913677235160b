"""`lmtrain slurm`: write an sbatch file for a run, after the checks of `pretrain --dry-run`; print or submit it.

The file has #SBATCH options, shell variables of this run, and the body slurm_body.sh, which is the same for all runs
and reads these variables. Only `submit` contacts Slurm, by running `sbatch`. Torch is never imported.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_type_hints

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
from lmtrain.cli.slurm.tasks_of_array import array_range, check_array_tasks, parse_array_tasks
from lmtrain.config.settings_file import words_for_command
from lmtrain.errors import (
    LayoutError,
    MissingInputError,
    UsageError,
    example,
    fill_in,
    leave_out,
    own,
    shell_quoted,
    way,
)
from lmtrain.layout import divisors
from lmtrain.runtime.files.atomic_files import atomic_file
from lmtrain.runtime.files.existing_output import Kind, check_output, holds
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.units import plural

if TYPE_CHECKING:
    from lmtrain.data.data_settings import DataChoice
    from lmtrain.placement.parallel_settings import ParallelSettings
    from lmtrain.train.run_config import RunConfig

app = typer.Typer(no_args_is_help=True)


# because: the layout and the restart logic set these options, so a user's value would contradict the file
_RESERVED_OPTIONS = {
    "--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node", "--array", "-a", "--requeue", "--no-requeue", "--open-mode",
    "--chdir", "-D", "--kill-on-bad-exit", "-K", "--exclude-node", "--no-kill", "-k", "--wrap", "--parsable",
}  # fmt: skip
# minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on; or no limit
_MOST_HOURS = 48  # a greater number without a unit is rather minutes
_TIME_LIMIT = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.ASCII | re.IGNORECASE)
# because: each of them counts, limits or binds tasks, and a node has a single task for all ranks
_PER_TASK_OPTIONS = {
    "--gpus-per-task", "--tres-per-task", "--ntasks-per-gpu", "--ntasks-per-socket", "--ntasks-per-core", "--gpu-bind",
    "--tres-bind",
}  # fmt: skip
_CPUS_PER_TASK = re.compile(r"(?:--cpus-per-task(?:=|\s+)|-c\s*)(.*)")
_CPUS_PER_GPU = re.compile(r"--cpus-per-gpu\b")
_NO_BINDING = re.compile(r"--(gpu|tres)-bind(=|\s+)none")
# short options of sbatch and srun that users give twice, in both forms
_LONG_NAMES = {
    "-J": "--job-name", "-o": "--output", "-e": "--error", "-c": "--cpus-per-task", "-q": "--qos", "-C": "--constraint",
    "-w": "--nodelist", "-x": "--exclude", "-d": "--dependency", "-L": "--licenses",
}  # fmt: skip
_REPEATABLE = ("--export", "--cpu-bind", "--gpu-bind")  # options with parts that add up
_MADE_BY = "Made by `lmtrain slurm`."
_SBATCH_FILE = Kind("an sbatch file that `lmtrain slurm` wrote", holds(_MADE_BY))
BODY = Path(__file__).with_name("slurm_body.sh")
_BINDS_EACH_TASK = re.compile(r"--cpu-bind(=|\s+)(.*,)?(map|mask|rank)")


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """The options that `render` and `submit` share."""

    overrides: Overrides = None
    config_dir: ConfigDir = None
    config_name: ConfigName = "pretrain"
    from_run: FromRun = None
    from_beginning: FromBeginning = False
    plugin: Plugins = None
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="GPUs to use on each node, with one process for each.")
    ] = None
    tasks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Processes on each node, where there are no GPUs.")
    ] = None
    tasks: Annotated[
        Literal["node", "rank"],
        typer.Option("--tasks", help="What srun starts: a task per node, which starts its ranks, or a task per rank."),
    ] = "node"
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Number of nodes, compared with the layout. [default: what the layout takes]"),
    ] = None
    spare_nodes: Annotated[
        int, typer.Option(min=0, help="Extra nodes to request; a node that loses a process is then left out.")
    ] = 0
    time: Annotated[
        str | None, typer.Option(metavar="LIMIT", help="Slurm's time limit, as in 4:00:00 or 2-12.")
    ] = None
    partition: Annotated[str | None, typer.Option(metavar="NAME", help="Slurm's partition.")] = None
    account: Annotated[str | None, typer.Option(metavar="NAME", help="Slurm's account.")] = None
    sbatch: Annotated[
        list[str] | None,
        typer.Option("--sbatch", metavar="OPTION", help="Another option of sbatch: --sbatch=--mem=0. Repeatable."),
    ] = None
    srun: Annotated[
        list[str] | None,
        typer.Option("--srun", metavar="OPTION", help="Another option of srun: --srun=--cpu-bind=cores. Repeatable."),
    ] = None
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Set this in all processes, and write it to the file. Repeatable."),
    ] = None
    setup: Annotated[
        list[str] | None,
        typer.Option(metavar="LINE", help="A line of bash to run first, as in 'module load cuda'. Repeatable."),
    ] = None
    container_image: Annotated[
        str | None,
        typer.Option(metavar="IMAGE", help="Run in this image, by srun's --container-image (pyxis, enroot)."),
    ] = None
    container_command: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="Command that starts a container, as in 'apptainer exec --nv image.sif'."),
    ] = None
    array: Annotated[
        bool, typer.Option("--array", help="An array of jobs, one for each combination of a=1,2 b=range(3).")
    ] = False
    array_tasks: Annotated[
        str | None,
        typer.Option(
            metavar="TASKS", help="Jobs of the array to start: 0,2 or 0-3, and at most 2 at a time: %2 or 0-3%2."
        ),
    ] = None

    def check(self) -> None:
        """Raise a UsageError on options that are missing, malformed, or contradict each other."""
        if self.gpus_per_node is not None and self.tasks_per_node is not None:
            leave = leave_out("--tasks-per-node", shown="Leave one of them out")
            raise UsageError(
                f"--gpus-per-node={self.gpus_per_node} and --tasks-per-node={self.tasks_per_node} are both given, and "
                f"each says how many processes a node has. {leave}."
            )
        if self.gpus_per_node is None and self.tasks_per_node is None:
            raise UsageError(
                "The number of processes on each node must be given, by exactly one option. Give "
                f"{fill_in('--gpus-per-node', 'N')}, or {fill_in('--tasks-per-node', 'N')} if there are no GPUs."
            )
        if self.container_image and self.container_command:
            raise UsageError(
                f"--container-image={self.container_image} and --container-command cannot be given together, because "
                "both start a container. Give one of them."
            )
        check_time_limit(self.time)
        if self.array_tasks is not None:
            parse_array_tasks(self.array_tasks)
            if not self.array:
                raise UsageError(f"--array-tasks={self.array_tasks} is for an array of jobs. Add {way('--array')}.")
        for option, words in (("--sbatch", self.sbatch), ("--srun", self.srun)):
            for word in words or ():
                _check_extra_option(option, word, words or ())
            _refuse_repeated(option, words or ())
        for variable in self.env or ():
            if not re.fullmatch(r"[A-Za-z_]\w*=.*", variable, re.ASCII | re.DOTALL):
                raise UsageError(
                    f"--env={variable} is not of the form NAME=VALUE, with letters, digits and _ in the name. Give one "
                    f"such as {example('OMP_NUM_THREADS=8')}."
                )

    @property
    def flags(self) -> list[str]:
        """The options to pass on to `lmtrain pretrain`, such as --config-dir=DIR; overrides and Slurm options are not
        among them.
        """
        return [
            *[f"--config-name={self.config_name}"] * (self.config_name != "pretrain"),
            *[f"--config-dir={self.config_dir}"] * (self.config_dir is not None),
            *[f"--from-run={self.from_run}"] * (self.from_run is not None),
            *["--from-beginning"] * self.from_beginning,
            *(f"--plugin={name}" for name in self.plugin or ()),
        ]

    def shape(self, parallel: ParallelSettings) -> tuple[int, int]:
        """Return (number of nodes, processes on each) for a run of this layout. Raise a LayoutError if its processes do
        not fill nodes evenly, or fill another number of nodes than --nodes.
        """
        option = "--gpus-per-node" if self.gpus_per_node else "--tasks-per-node"
        per_node = self.gpus_per_node or self.tasks_per_node or 1
        num_processes, layout = parallel.layout.world_size, parallel.layout_text
        if num_processes < per_node:
            raise LayoutError(
                f"{option}={per_node} is more than the {num_processes} that the layout takes: {layout}. Use "
                f"{_layout_way(parallel, (self.nodes or 1) * per_node)}{way(f'{option}={num_processes}')}."
            )
        if num_processes % per_node:
            divisor = max(size for size in divisors(num_processes) if size <= per_node)
            raise LayoutError(
                f"{option}={per_node} does not divide the {num_processes} processes of {layout}, but all nodes get the "
                f"same number. Use {way(f'{option}={divisor}')} on {num_processes // divisor} nodes, or another layout."
            )
        num_nodes = num_processes // per_node
        if self.nodes is not None and self.nodes != num_nodes:
            raise LayoutError(
                f"--nodes={self.nodes} does not fit the layout ({layout}), which takes {plural(num_nodes, 'node')} "
                f"with {option}={per_node}. Use "
                f"{_layout_way(parallel, self.nodes * per_node)}{way(f'--nodes={num_nodes}')}."
            )
        return num_nodes, per_node


def check_time_limit(text: str | None) -> None:
    """Raise UsageError unless `text` is None or a time limit of Slurm that says its units: a bare number is minutes to
    Slurm, and hours to many who type one.
    """
    if text is not None and (number := re.fullmatch(r"(\d{1,5})([hmd]?)", text, re.ASCII)):
        count, unit = int(number[1]), number[2]
        days, minutes = f"{count}-00", f"{count // 60:02}:{count % 60:02}:00"
        by_unit = {"d": days, "m": minutes, "h": f"{count}:00:00"}
        if unit:
            raise UsageError(f"--time={text} is not a time limit that Slurm accepts. Use {own(by_unit[unit])}.")
        hours_first = count <= _MOST_HOURS
        named = [f"{own(by_unit['h'])} for hours", f"{own(minutes)} for minutes"][:: 1 if hours_first else -1]
        raise UsageError(f"--time={text} does not say whether it is hours or minutes. Use {' or '.join(named)}.")
    if text is not None and not _TIME_LIMIT.fullmatch(text):
        raise UsageError(
            f"--time={text} is not a time limit that Slurm accepts. Give one such as {example('1:30:00')}, "
            f"{example('4:00:00')} or {example('2-12')} (days and hours)."
        )


def _layout_way(parallel: ParallelSettings, num_processes: int) -> str:
    """Return "parallel.dp_shard=N, or ", marked, the part of a message that makes a layout take `num_processes`
    processes; "" if no number of data-parallel copies does. Without ZeRO the copies are replicas.
    """
    axis, size = ("dp_shard", parallel.dp_shard) if parallel.zero else ("dp_replicate", parallel.dp_replicate)
    others = parallel.layout.world_size // size
    return "" if num_processes % others else f"{way(f'parallel.{axis}={num_processes // others}')}, or "


def _with_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Decorate a verb that takes `options: SlurmOptions`. Return a function for typer that has, instead of this
    parameter, one for each field of SlurmOptions, and calls the verb.
    """
    hints = get_type_hints(SlurmOptions, include_extras=True) | get_type_hints(verb, include_extras=True)
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
    if output is not None and re.search(r"%\w", output.name):
        log = way(f"--sbatch=--output={output}", instead_of="--output")
        raise UsageError(
            f"--output={output} is the sbatch file to write, in whose name Slurm replaces nothing. Use {log} for the "
            "job's log."
        )
    refuse_unused_overwrite(overwrite, output, subject="a file that is printed")
    if output is not None:
        check_output(output, _SBATCH_FILE, overwrite=overwrite)
    job = _build_job(options)
    if output is None:
        return print_text(job_script(job))
    _write_script(output, job_script(job))
    return print_notice(f"{output} is written. Start it with: {job.submit_command(shell_quoted(str(output)))}")


@app.command()
@_with_options
def submit(
    options: SlurmOptions,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what render prints, and submit nothing.")] = False,
) -> None:
    """Submit a run to Slurm and print the job's id. The sbatch file is kept in the run's folder as job.sbatch."""
    job = _build_job(options)
    if dry_run:
        return print_text(job_script(job))
    check_output(job.file, _SBATCH_FILE, overwrite=False, is_default=True)
    _write_script(job.file, job_script(job))
    try:
        result = subprocess.run(["sbatch", "--parsable", str(job.file)], capture_output=True, text=True)
    except FileNotFoundError:
        raise MissingInputError(
            "sbatch is not on the PATH of this machine, so nothing can be submitted. Run this on a login node, or "
            f"start {job.file} there."
        ) from None
    if result.returncode != 0:
        reason = " ".join(result.stderr.split()).removeprefix("sbatch: error: ")
        raise UsageError(
            f"sbatch refused {job.file}: {reason}. Change the options, or ask the administrators of this cluster."
        )
    number = result.stdout.strip().partition(";")[0]
    echo(number)
    log = job.log.replace("%j", number).replace("%A_%a", f"{number}_*")
    return print_notice(f"submitted: {job.file}; its log is {log}")


def _check_extra_option(option: str, word: str, words: Sequence[str]) -> None:
    """Raise a UsageError if `word`, one of the values `words` of `option` (--sbatch or --srun), does not look like an
    option of sbatch or srun, or is one that the sbatch file sets itself, such as --nodes.
    """
    name = re.match(r"--[\w-]+|-[A-Za-z]", word)
    if name is None or not word.isprintable():
        # because: the option can be repeated, and its other values stay
        ways = [f"{option}={f'--{word}' if each == word else each}" for each in words]
        is_clear = re.fullmatch(r"[A-Za-z][\w-]*(=\S*)?", word, re.ASCII)
        meant = way(*ways, instead_of=option, shown=f"{option}=--{word}")
        way_out = f"Use {meant}." if is_clear else f"Give one, as in {option}=--NAME=VALUE."
        raise UsageError(f"{option}={word} is not an option of {option[2:]}. {way_out}")
    if name[0] in ("--array", "-a"):
        tasks = word.removeprefix(name[0]).lstrip("= ")
        added = way("--array", "--array-tasks", tasks, instead_of=(f"{option}={word}", f"{option} {word}"))
        raise UsageError(
            f"{option}={word} numbers the tasks of an array, which are the runs of a sweep. Use {added}."
        )
    if name[0] in _RESERVED_OPTIONS:
        raise UsageError(
            f"{option}={word} would contradict the sbatch file, which takes nodes and processes from the layout and "
            f"restarts by exit codes. {_without(option, word)}, or change parallel.*, --gpus-per-node or --spare-nodes."
        )


def _refuse_repeated(option: str, words: Sequence[str]) -> None:
    """Raise a UsageError if `words`, the values of `option` (--sbatch or --srun), give one of its options two values,
    of which Slurm would silently take the last.
    """
    first: dict[str, str] = {}
    for word in words:
        short = re.split(r"[=\s]", word, maxsplit=1)[0]
        name = _LONG_NAMES.get(short[:2], short) if not short.startswith("--") else short
        if name not in _REPEATABLE and first.setdefault(name, word) != word:
            either = [_without(option, each, shown=f"{option}={each}") for each in (first[name], word)]
            raise UsageError(
                f"Slurm's {name} has one value, and is given two by {option}. Leave out {' or '.join(either)}."
            )


def _without(option: str, word: str, shown: str = "Leave it out") -> str:
    """Return the advice to remove one value of a repeatable option."""
    return leave_out(f"{option}={word}", f"{option} {word}", shown=shown)


def _build_job(options: SlurmOptions) -> SbatchJob:
    """Check the command's options and the settings of its runs, and return the content of the sbatch file. Raise an
    LmtrainError if a check fails.
    """
    options.check()
    folder, runs = _compose_runs(options)
    return _job_of_runs(options, folder, runs, [options.flags] * len(runs))


def branches_script(
    words: Sequence[str], folder: Path, runs: Sequence[tuple[RunConfig, list[str]]], flags: Sequence[list[str]]
) -> str:
    """Return the text of an sbatch file for an array of jobs, one for each entry (settings, overrides) of `runs`.
    `words` are options of `lmtrain slurm render`, `flags` has the options of `lmtrain pretrain` for each run, and logs
    go to `folder`. Raise an LmtrainError if the options or the runs do not fit.
    """
    from lmtrain.cli.subcommands import build_verb

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
    return job_script(_job_of_runs(options, folder, runs, [[*options.flags, *own] for own in flags]))


def _job_of_runs(
    options: SlurmOptions, folder: Path, runs: Sequence[tuple[RunConfig, list[str]]], flags: Sequence[list[str]]
) -> SbatchJob:
    """Check the runs, given as (settings, overrides), and return the content of an sbatch file that starts them.
    `flags` has the options of `lmtrain pretrain` for each run. Raise LayoutError if they take different numbers of
    processes or leave the layout to parallel=auto.
    """

    sizes = {config.parallel.layout.world_size for config, _ in runs}
    if len(sizes) > 1:
        raise LayoutError(
            f"The runs of this array take {min(sizes)} to {max(sizes)} processes, but all tasks of an array get the "
            "same resources. Submit one array for each layout."
        )
    if any(config.parallel.auto for config, _ in runs):
        raise LayoutError(
            "parallel.auto=true chooses a layout when the run starts, but the sbatch file needs the number of "
            "processes to start. Give a layout: `lmtrain plan` prints the settings of the best one."
        )
    layout = runs[0][0].parallel.layout_text
    if options.array_tasks is not None:
        check_array_tasks(options.array_tasks, len(runs))
    nodes, ranks_per_node = options.shape(runs[0][0].parallel)
    tasks = TaskOptions(options.sbatch or [], options.srun or [])
    if starts_ranks := options.tasks == "node" and ranks_per_node > 1:
        typed_cpus = _parse_cpus("--sbatch", tasks.sbatch_options) or _parse_cpus("--srun", tasks.srun_options)
        tasks = task_options(tasks.sbatch_options, tasks.srun_options, ranks_per_node)
        if typed_cpus:
            print_notice(
                f"--cpus-per-task={typed_cpus} is for each rank: the task of a node, which starts {ranks_per_node}, "
                f"gets {tasks.cpus}"
            )
    _check_runs(runs, ranks_per_node)
    spare_note = f" and {options.spare_nodes} spare" * (options.spare_nodes > 0)
    runs_note = f"{len(runs)} runs, each of them " * options.array
    per_node = [f"--nproc-per-node={ranks_per_node}"] * starts_ranks
    in_container = options.container_image is not None or options.container_command is not None
    return SbatchJob(
        about=f"{folder.name}: {runs_note}{layout} on {plural(nodes, 'node')}{spare_note}. {_MADE_BY}",
        nodes=nodes, ranks_per_node=ranks_per_node, tasks_per_node=1 if starts_ranks else ranks_per_node,
        options=options, tasks=tasks, folder=folder, cwd=Path.cwd(),
        runs=[
            (Path(config.run.dir).absolute(), [*own_flags, *per_node, *words])
            for (config, words), own_flags in zip(runs, flags, strict=True)
        ],
        program=("lmtrain",) if in_container else (sys.executable, "-m", "lmtrain"),
    )  # fmt: skip


def _compose_runs(options: SlurmOptions) -> tuple[Path, list[tuple[RunConfig, list[str]]]]:
    """Return the absolute folder for the sbatch file and its logs, and a list of (settings, overrides): one entry, or
    with --array one for each combination of the overrides with several values.
    """
    from lmtrain.cli.pretrain.sweep import plan_runs
    from lmtrain.start.settings_from_earlier_run import RunRequest, compose_run

    words = list(options.overrides or ())
    request = RunRequest(words, options.config_dir, options.config_name, options.from_run, options.from_beginning)
    if options.array:
        jobs = plan_runs(request)
        runs = [
            (replace(job.config, run=replace(job.config.run, dir=str(job.folder))), job.overrides) for job in jobs
        ]
        folder = Path(jobs[0].config.run.dir).absolute()
    else:
        config = compose_run(request)
        runs, folder = [(config, words_for_command(words))], Path(config.run.dir).absolute()
    for path in (folder, Path.cwd()):
        if not str(path).isprintable():
            raise UsageError(
                f"{str(path)!r} has characters that an sbatch file cannot hold. Choose a run.dir of printable "
                "characters."
            )
    return folder, runs


def _check_runs(runs: Iterable[tuple[RunConfig, list[str]]], ranks_per_node: int) -> None:
    """Check the settings, data and folder of each run, given as (settings, overrides), and raise an LmtrainError if one
    could not start. A dataset that several runs will make from the same data.text is made for the checks only once.
    """
    from lmtrain.start.dataset_from_text import preview_data_of_text

    with ExitStack() as previews:
        known: dict[str, DataChoice] = {}
        for config, overrides in runs:
            digest = config.data.digest()
            if digest not in known:
                known[digest] = previews.enter_context(preview_data_of_text(config, overrides, print_notice))[0].data
            _check_run(replace(config, data=known[digest]), ranks_per_node)


def _check_run(config: RunConfig, ranks_per_node: int) -> None:
    """Check that a run with `ranks_per_node` ranks on each node could start, by its settings, data and folder, as
    `pretrain --dry-run` does; this machine's own devices are not checked. Print warnings, and raise an LmtrainError on
    errors.
    """
    from lmtrain.start.prepare_inputs_and_eval_tasks import prepare_inputs
    from lmtrain.train.startup_checks.preflight import check_run_folder

    env = ProcessEnv(world_size=0, local_world_size=ranks_per_node, host="each node")
    inputs, _ = prepare_inputs(config, env, progress, starts_run=False)
    for warning in (*inputs.warnings, *check_run_folder(config, inputs.model, inputs.tokenizer, check_lock=False)):
        print_notice(warning)


def _write_script(path: Path, text: str) -> None:
    with atomic_file(path) as file:
        file.write(text.encode(errors="surrogateescape"))


# ---- the file --------------------------------------------------------------------------------------------------------


class TaskOptions(NamedTuple):
    """The user's options of sbatch and srun for the tasks of a job, and their CPUs if a task starts several ranks."""

    sbatch_options: list[str]
    srun_options: list[str]
    cpus: int | None = None  # CPUs per task; None if another option sets them
    takes_all_cpus: bool = False  # True if the user has given no number, so that tasks use all CPUs of the node


def task_options(sbatch_options: Sequence[str], srun_options: Sequence[str], num_ranks: int) -> TaskOptions:
    """Return the user's sbatch and srun options for a job in which one Slurm task starts all `num_ranks` ranks of a
    node. Numbers that the user gives per rank, such as --cpus-per-task, are multiplied. Raise a UsageError on options
    that cannot be converted.
    """
    for option, words in (("--sbatch", sbatch_options), ("--srun", srun_options)):
        for word in words:
            _check_per_task_option(option, word, num_ranks)
    job_cpus, step_cpus = _parse_cpus("--sbatch", sbatch_options), _parse_cpus("--srun", srun_options)
    rank_cpus = job_cpus or step_cpus
    step_options = [f"--cpus-per-task={step_cpus * num_ranks}"] if job_cpus and step_cpus else []
    by_gpu = any(_CPUS_PER_GPU.match(word) for word in (*sbatch_options, *srun_options))
    cpus = None if by_gpu and rank_cpus is None else (rank_cpus or 1) * num_ranks
    return TaskOptions(
        _without_cpus(sbatch_options), _without_cpus(srun_options) + step_options, cpus,
        takes_all_cpus=rank_cpus is None and not by_gpu,
    )  # fmt: skip


def _check_per_task_option(option: str, word: str, num_ranks: int) -> None:
    """Raise a UsageError if `word`, a value of `option` (--sbatch or --srun), is a Slurm option that acts on each task,
    such as a binding to GPUs: it cannot act on the `num_ranks` ranks that one task starts.
    """
    name = re.split(r"[=\s]", word, maxsplit=1)[0]
    if (name in _PER_TASK_OPTIONS and not _NO_BINDING.fullmatch(word)) or _BINDS_EACH_TASK.match(word):
        raise UsageError(
            f"{option}={word} applies to each Slurm task, and one task starts all {num_ranks} ranks of its node. Add "
            f"{way('--tasks', 'rank')}, which makes each rank a task, or "
            f"{_without(option, word, shown='leave it out')}."
        )


def _parse_cpus(option: str, words: Sequence[str]) -> int | None:
    """Return the number in the last --cpus-per-task (-c) among `words`, the values of `option` (--sbatch or --srun);
    None if there is none. Raise a UsageError if it is not a number.
    """
    cpus = None
    for word in words:
        if match := _CPUS_PER_TASK.fullmatch(word):
            if not re.fullmatch(r"[1-9][0-9]{0,5}", match[1], re.ASCII):
                raise UsageError(
                    f"{option}={word} is not a number of CPUs. Give the number for each rank, "
                    f"{option}=--cpus-per-task=N."
                )
            cpus = int(match[1])
    return cpus


def _without_cpus(words: Sequence[str]) -> list[str]:
    return [word for word in words if not _CPUS_PER_TASK.fullmatch(word)]


@dataclass(frozen=True, kw_only=True)
class SbatchJob:
    """The content of an sbatch file; `runs` has one entry for each task of an array, else a single one."""

    about: str  # a line of description
    nodes: int
    ranks_per_node: int
    tasks_per_node: int  # ranks_per_node, or 1 if a task starts all ranks of its node
    options: SlurmOptions
    tasks: TaskOptions
    folder: Path  # for the logs and this file
    cwd: Path
    runs: Sequence[tuple[Path, Sequence[str]]]  # run folder, arguments of `lmtrain pretrain`
    program: Sequence[str] = ("lmtrain",)

    @property
    def file(self) -> Path:
        return self.folder / "job.sbatch"

    def submit_command(self, file: str) -> str:
        """Return the shell command that submits `file`.

        It first creates the folder, since a job whose log file cannot be opened fails without a message.
        """
        return f"mkdir -p {shell_quoted(str(self.folder))} && sbatch {file}"

    @property
    def log(self) -> str:
        """The path of the log, with placeholders that Slurm replaces by the job's numbers."""
        return f"{self.folder}/slurm-{'%A_%a' if self.options.array else '%j'}.out"


def job_script(job: SbatchJob) -> str:
    """Return the text of the sbatch file."""
    return "\n".join([*_header_lines(job), "", *_variable_lines(job), "", BODY.read_text()])


def _header_lines(job: SbatchJob) -> Iterator[str]:
    """Yield the lines at the top of the sbatch file: #!/bin/bash, comments, and the #SBATCH options."""
    yield "#!/bin/bash"
    yield f"# {job.about}"
    yield "# lmtrain's exit code decides: 75 queues this job again, 76 or a killed task starts all tasks again at"
    yield "# once, and any other ends it."
    yield f"# Start it with: {job.submit_command('THIS_FILE')}"
    user = job.options
    options = {
        "job-name": job.folder.name, "nodes": job.nodes + user.spare_nodes, "ntasks-per-node": job.tasks_per_node,
        "gpus-per-node": job.ranks_per_node if user.gpus_per_node else None, "cpus-per-task": job.tasks.cpus,
        "array": array_range(user.array_tasks, len(job.runs)) if user.array else None, "chdir": job.cwd,
        "output": job.log.replace(str(job.folder), str(job.folder).replace("%", "%%"), 1), "open-mode": "append",
    }  # fmt: skip
    yield from (
        f"#SBATCH --{name}={_quote_for_sbatch(str(value))}" for name, value in options.items() if value is not None
    )
    yield "#SBATCH --requeue"
    if user.spare_nodes:
        yield "# a node that is lost ends the tasks, and not the job"
        yield "#SBATCH --no-kill"
    resources = {"time": user.time, "partition": user.partition, "account": user.account}
    yield from (f"#SBATCH --{name}={value}" for name, value in resources.items() if value)
    yield from (f"#SBATCH {option}" for option in job.tasks.sbatch_options)


def _variable_lines(job: SbatchJob) -> Iterator[str]:
    """Yield the middle lines of the sbatch file: the user's environment variables and set-up commands, then the shell
    variables that its last part, slurm_body.sh, reads. In an array of jobs, the run's folder and arguments are chosen
    by the task id.
    """
    user = job.options
    variables = [variable.partition("=") for variable in user.env or ()]
    yield from (f"export {name}={shell_quoted(value)}" for name, _, value in variables)
    yield from user.setup or ()
    ranks, tasks = job.nodes * job.ranks_per_node, job.nodes * job.tasks_per_node
    all_cpus = "yes" if job.tasks.takes_all_cpus else "''"
    yield f"nodes={job.nodes} tasks={tasks} ranks={ranks} spare_nodes={user.spare_nodes} all_cpus={all_cpus}"
    image = [] if user.container_image is None else [f"--container-image={user.container_image}"]
    container, of_srun = shlex.split(user.container_command or ""), [*image, *job.tasks.srun_options]
    for name, words in (("lmtrain", job.program), ("container", container), ("of_srun", of_srun)):
        yield f"{name}=({' '.join(map(shell_quoted, words))})"
    if not user.array:
        ((folder, words),) = job.runs
        yield from _run_lines(folder, words, "")
        return
    yield "case $SLURM_ARRAY_TASK_ID in"
    for number, (folder, words) in enumerate(job.runs):
        yield f"  {number})"
        yield from _run_lines(folder, words, "    ")
        yield "    ;;"
    yield "esac"


def _run_lines(folder: Path, words: Iterable[str], indent: str) -> Iterator[str]:
    """Yield shell lines that set the variable `run` to a run's folder and the array `words` to the arguments of its
    `lmtrain pretrain`. `indent` is put before each line.
    """
    yield f"{indent}run={shell_quoted(str(folder))}"
    yield f"{indent}words=("
    yield from (f"{indent}  {shell_quoted(word)}" for word in words)
    yield f"{indent})"


def _quote_for_sbatch(value: str) -> str:
    """Quote a value for an #SBATCH line if it has special characters."""
    return value if re.fullmatch(r"[\w@%+=:,./-]+", value) else '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
