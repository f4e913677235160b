"""`lmtrain slurm`: a run's settings as an sbatch file, judged as by `pretrain --dry-run`, printed or submitted.

The file has what Slurm is asked for, what is this run's own, and a body that is the same for all: slurm_body.sh, which
reads the variables that stand above it; nothing is put into it. Nothing here talks to Slurm but `sbatch` in submit, and
torch is never imported.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_type_hints

import typer

from lmtrain.cli.options import ConfigDir, ConfigName, FromRun, Overrides, Plugins, parse_output_file
from lmtrain.cli.screen.terminal import echo, print_notice, print_text
from lmtrain.config.overrides import shell_quoted
from lmtrain.errors import LayoutError, MissingInputError, UsageError
from lmtrain.layout import divisors
from lmtrain.runtime.files.files import atomic_file
from lmtrain.runtime.processes.process import ProcessEnv

if TYPE_CHECKING:
    from lmtrain.train.config import RunConfig

app = typer.Typer(no_args_is_help=True)


# because: the layout and the restarts decide these, and the file would contradict itself
_OURS = {
    "--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node", "--array", "-a", "--requeue", "--no-requeue", "--open-mode",
    "--chdir", "-D", "--kill-on-bad-exit", "-K", "--exclude-node", "--no-kill", "-k", "--wrap", "--parsable",
}  # fmt: skip
# minutes, minutes:seconds, hours:minutes:seconds, or with days before the hours; none at all
_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.ASCII | re.IGNORECASE)
# because: each of them counts, limits or places tasks, of which a node has one
_OF_A_TASK = {
    "--gpus-per-task", "--tres-per-task", "--ntasks-per-gpu", "--ntasks-per-socket", "--ntasks-per-core", "--gpu-bind",
    "--tres-bind",
}  # fmt: skip
_CPUS = re.compile(r"(?:--cpus-per-task(?:=|\s+)|-c\s*)(.*)")
_CPUS_OF_GPUS = re.compile(r"--cpus-per-gpu\b")
_HARMLESS = re.compile(r"--(gpu|tres)-bind(=|\s+)none")
BODY = Path(__file__).with_name("slurm_body.sh")
_BINDS_EACH = re.compile(r"--cpu-bind(=|\s+)(.*,)?(map|mask|rank)")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of both verbs."""

    overrides: Overrides = None
    config_dir: ConfigDir = None
    config_name: ConfigName = "pretrain"
    from_run: FromRun = None
    plugin: Plugins = None
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="GPUs to use of each node, a process for each.")
    ] = None
    tasks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Processes on each node, where there are no GPUs.")
    ] = None
    tasks: Annotated[
        Literal["node", "rank"],
        typer.Option("--tasks", help="What srun starts: a task on each node, which starts the ranks, or each rank."),
    ] = "node"
    spare_nodes: Annotated[
        int, typer.Option(min=0, help="Ask for so many nodes more; a node that loses a process is then left out.")
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
        typer.Option(metavar="NAME=VALUE", help="Set this for all processes. It stands in the file. Repeatable."),
    ] = None
    setup: Annotated[
        list[str] | None,
        typer.Option(metavar="LINE", help="A line of bash to begin with, as in 'module load cuda'. Repeatable."),
    ] = None
    container_image: Annotated[
        str | None,
        typer.Option(metavar="IMAGE", help="Run in this image by srun's --container-image (pyxis, enroot)."),
    ] = None
    container_command: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="Run behind this command: 'apptainer exec --nv image.sif'."),
    ] = None
    array: Annotated[
        bool, typer.Option("--array", help="An array of jobs, one for each combination of a=1,2 b=range(3).")
    ] = False

    def check(self) -> None:
        if (self.gpus_per_node is None) == (self.tasks_per_node is None):
            raise UsageError(
                "How many processes a node has must be said once. Give --gpus-per-node N, or --tasks-per-node N where "
                "there are no GPUs."
            )
        if self.container_image and self.container_command:
            raise UsageError(
                f"--container-image={self.container_image} and --container-command both start a container. "
                "Give one of them."
            )
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise UsageError(
                f"--time={self.time} is not a time limit of Slurm's. Write it as in 90 (minutes), 4:00:00 or 2-12 "
                "(days and hours)."
            )
        for option, words in (("--sbatch", self.sbatch), ("--srun", self.srun)):
            for word in words or ():
                _check_passed_on(option, word)
        for one in self.env or ():
            if not re.fullmatch(r"[A-Za-z_]\w*=.*", one, re.ASCII | re.DOTALL):
                raise UsageError(f"--env={one} is not NAME=VALUE, where a name has letters, digits and _. Write it so.")

    @property
    def flags(self) -> list[str]:
        """Return the options of `lmtrain pretrain` besides its settings."""
        return [
            *[f"--config-name={self.config_name}"] * (self.config_name != "pretrain"),
            *[f"--config-dir={self.config_dir}"] * (self.config_dir is not None),
            *[f"--from-run={self.from_run}"] * (self.from_run is not None),
            *(f"--plugin={name}" for name in self.plugin or ()),
        ]

    def nodes(self, num_processes: int, layout: str) -> tuple[int, int]:
        """Return the number of nodes, and of processes on each."""
        option = "--gpus-per-node" if self.gpus_per_node else "--tasks-per-node"
        each = self.gpus_per_node or self.tasks_per_node or 1
        if num_processes <= each:
            return 1, num_processes
        if num_processes % each:
            even = max(size for size in divisors(num_processes) if size <= each)
            raise LayoutError(
                f"{option}={each} does not divide the {num_processes} processes of {layout}, and nodes are "
                f"all alike. Use {option}={even} on {num_processes // even} nodes, or another layout."
            )
        return num_processes // each, each


def _with_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Return a command that takes the options of `Asked`, and hands them to the verb as one, beside its own."""
    hints = get_type_hints(Asked, include_extras=True) | get_type_hints(verb, include_extras=True)
    own = {name: one.default for name, one in signature(verb).parameters.items() if name != "asked"}
    every = {one.name: one.default for one in fields(Asked)} | own

    def command(**given: Any) -> None:
        verb(**{name: given.pop(name) for name in own}, asked=Asked(**given))

    # because: typer asks for these four
    command.__name__, command.__doc__ = verb.__name__, verb.__doc__
    command.__annotations__ = {name: hints[name] for name in every}
    vars(command)["__signature__"] = Signature([
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
        for name, default in every.items()
    ])  # fmt: skip
    return command


@app.command()
@_with_options
def render(
    asked: Asked,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", parser=parse_output_file, help="Write it there. [default: print it]"),
    ] = None,
) -> None:
    """Print the sbatch file of a run: it starts all processes, starts them again, and queues itself again."""
    job = _job(asked)
    if output is None:
        return print_text(script(job))
    _write(output, script(job))
    return print_notice(f"{output} is written. Start it with: {job.started_by(shell_quoted(str(output)))}")


@app.command()
@_with_options
def submit(
    asked: Asked,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what render prints, and submit nothing.")] = False,
) -> None:
    """Hand a run to Slurm. The sbatch file is kept as job.sbatch in the run's folder, and the job's id is printed."""
    job = _job(asked)
    if dry_run:
        return print_text(script(job))
    _write(job.file, script(job))
    try:
        done = subprocess.run(["sbatch", "--parsable", str(job.file)], capture_output=True, text=True)
    except FileNotFoundError:
        raise MissingInputError(
            "sbatch is not on the PATH here, so nothing can be submitted. Type this on a machine that submits jobs, or "
            f"start {job.file} there."
        ) from None
    if done.returncode != 0:
        said = " ".join(done.stderr.split()).removeprefix("sbatch: error: ")
        raise UsageError(f"sbatch refuses {job.file}: {said}. Change the options, or ask who runs this Slurm.")
    number = done.stdout.strip().partition(";")[0]
    echo(number)
    log = job.log.replace("%j", number).replace("%A_%a", f"{number}_*")
    return print_notice(f"submitted: {job.file}; its log is {log}")


def _check_passed_on(option: str, word: str) -> None:
    name = re.match(r"--[\w-]+|-[A-Za-z]", word)
    if name is None or not word.isprintable():
        raise UsageError(f"{option}={word} is not an option of {option[2:]}. Write it as in {option}=--mem=0.")
    if name[0] in _OURS:
        raise UsageError(
            f"{option}={word} would undo what the file says itself: nodes and processes follow from the layout, and "
            "restarts from exit codes. Leave it out, or change parallel.*, --gpus-per-node or --spare-nodes."
        )


def _job(asked: Asked) -> SbatchJob:
    """Build the job of a command line; raise for everything that can be wrong with it."""
    from lmtrain.train.layouts.layout_table import layout_words

    asked.check()
    folder, runs = _runs(asked)
    sizes = {config.parallel.layout.world_size for config, _ in runs}
    if len(sizes) > 1:
        raise LayoutError(
            f"The runs of this array take {min(sizes)} to {max(sizes)} processes, and an array's tasks are all alike. "
            "Make an array for each layout."
        )
    if any(config.parallel.auto for config, _ in runs):
        raise LayoutError(
            "parallel.auto=true chooses a layout for the processes that there are, and the file has to say how many to "
            "start. Choose it before: `lmtrain plan` prints the settings of the best."
        )
    layout = layout_words(runs[0][0].parallel)
    nodes, ranks_per_node = asked.nodes(sizes.pop(), layout)
    of_sbatch, of_srun, cpus, takes_all_cpus = asked.sbatch or [], asked.srun or [], None, False
    if starts_ranks := asked.tasks == "node" and ranks_per_node > 1:
        of_sbatch, of_srun, cpus, takes_all_cpus = task_options(of_sbatch, of_srun, ranks_per_node)
    for config, _ in runs:
        _judge(config, ranks_per_node)
    spare = f" and {asked.spare_nodes} spare" * (asked.spare_nodes > 0)
    many = f"{len(runs)} runs, each of them " * asked.array
    places = {"time": asked.time, "partition": asked.partition, "account": asked.account}
    flags = [*asked.flags, *[f"--nproc-per-node={ranks_per_node}"] * starts_ranks]
    image = [f"--container-image={asked.container_image}"] * (asked.container_image is not None)
    return SbatchJob(
        about=f"{folder.name}: {many}{layout} on {nodes} node{'s' * (nodes > 1)}{spare}. Made by `lmtrain slurm`.",
        nodes=nodes, ranks_per_node=ranks_per_node, tasks_per_node=1 if starts_ranks else ranks_per_node,
        cpus_per_task=cpus, takes_all_cpus=takes_all_cpus, gpus=asked.gpus_per_node is not None,
        spare_nodes=asked.spare_nodes, folder=folder, cwd=Path.cwd(), is_array=asked.array,
        runs=[(Path(config.run.dir).absolute(), [*flags, *words]) for config, words in runs],
        program=("lmtrain",) if image or asked.container_command is not None else (sys.executable, "-m", "lmtrain"),
        container=shlex.split(asked.container_command or ""), of_srun=[*image, *of_srun],
        of_sbatch=[*(f"--{name}={value}" for name, value in places.items() if value), *of_sbatch],
        env=asked.env or (), setup=asked.setup or (),
    )  # fmt: skip


def _runs(asked: Asked) -> tuple[Path, list[tuple[RunConfig, list[str]]]]:
    """Return the folder of the job's file and logs, and each run's settings with their overrides."""
    from lmtrain.cli.pretrain.from_run import compose_run
    from lmtrain.cli.pretrain.sweep import plan_runs

    words, config_dir, name, from_run = list(asked.overrides or ()), asked.config_dir, asked.config_name, asked.from_run
    if asked.array:
        jobs = plan_runs(words, config_dir, name, from_run)
        runs = [
            (replace(job.config, run=replace(job.config.run, dir=str(job.folder))), job.overrides) for job in jobs
        ]
        folder = Path(jobs[0].config.run.dir).absolute()
    else:
        config = compose_run(words, from_run=from_run, config_dir=config_dir, name=name)
        runs, folder = [(config, words)], Path(config.run.dir).absolute()
    for path in (folder, Path.cwd()):
        if not str(path).isprintable():
            raise UsageError(f"{str(path)!r} cannot stand in an sbatch file. Choose a run.dir of plain characters.")
    return folder, runs


def _judge(config: RunConfig, ranks_per_node: int) -> None:
    """Check a run as `pretrain --dry-run` does for processes on other machines, and its folder."""
    from lmtrain.cli.pretrain.eval_tasks import prepare_eval_tasks
    from lmtrain.train.before.preflight import check_run_folder, preflight

    elsewhere = ProcessEnv(world_size=0, local_world_size=ranks_per_node, host="each node")
    inputs, _ = prepare_eval_tasks(config, preflight(config, elsewhere, starting=False))
    for warning in (*inputs.warnings, *check_run_folder(config, inputs.model, inputs.tokenizer, lock=False)):
        print_notice(warning)


def _write(path: Path, text: str) -> None:
    with atomic_file(path) as file:
        file.write(text.encode(errors="surrogateescape"))


# ---- the file --------------------------------------------------------------------------------------------------------


class TaskOptions(NamedTuple):
    """The options of a job whose tasks start several ranks each."""

    of_sbatch: list[str]
    of_srun: list[str]
    cpus: int | None  # that a task asks for; None where another option says it
    takes_all_cpus: bool  # that the job has on its node, since the user has given no number


def task_options(of_sbatch: Sequence[str], of_srun: Sequence[str], num_ranks: int) -> TaskOptions:
    """Make what was meant for each rank fit tasks that start `num_ranks` ranks each."""
    for option, words in (("--sbatch", of_sbatch), ("--srun", of_srun)):
        for word in words:
            _check(option, word, num_ranks)
    of_job, of_step = _cpus("--sbatch", of_sbatch), _cpus("--srun", of_srun)
    each = of_job or of_step
    step = [f"--cpus-per-task={of_step * num_ranks}"] if of_job and of_step else []
    by_gpu = any(_CPUS_OF_GPUS.match(word) for word in (*of_sbatch, *of_srun))
    cpus = None if by_gpu and each is None else (each or 1) * num_ranks
    return TaskOptions(_without_cpus(of_sbatch), _without_cpus(of_srun) + step, cpus, each is None and not by_gpu)


def _check(option: str, word: str, num_ranks: int) -> None:
    name = re.split(r"[=\s]", word, maxsplit=1)[0]
    if (name in _OF_A_TASK and not _HARMLESS.fullmatch(word)) or _BINDS_EACH.match(word):
        raise UsageError(
            f"{option}={word} is about a task, and one task starts all {num_ranks} ranks of its node. Leave it out, or "
            "add --tasks rank, which makes each rank a task."
        )


def _cpus(option: str, words: Sequence[str]) -> int | None:
    """Return the CPUs that the last of these options gives a task."""
    found = None
    for word in words:
        if given := _CPUS.fullmatch(word):
            if not re.fullmatch(r"[1-9][0-9]{0,5}", given[1], re.ASCII):
                raise UsageError(
                    f"{option}={word} is not a number of CPUs. Write how many each rank is to have, as in "
                    f"{option}=--cpus-per-task=8."
                )
            found = int(given[1])
    return found


def _without_cpus(words: Sequence[str]) -> list[str]:
    return [word for word in words if not _CPUS.fullmatch(word)]


@dataclass(frozen=True, kw_only=True)
class SbatchJob:
    """What a file is written from. Of an array each line of `runs` is a task's; otherwise there is one."""

    about: str  # a line of words
    nodes: int
    ranks_per_node: int
    tasks_per_node: int  # as many, or one that starts them all
    gpus: bool
    cpus_per_task: int | None = None
    takes_all_cpus: bool = False  # that the job has on a node, whatever it has asked for
    spare_nodes: int = 0
    folder: Path  # of logs and of this file
    cwd: Path
    runs: Sequence[tuple[Path, Sequence[str]]]  # the folder, and the words behind `lmtrain pretrain`
    is_array: bool = False
    program: Sequence[str] = ("lmtrain",)
    container: Sequence[str] = ()  # a command that starts another one in a container
    of_srun: Sequence[str] = ()
    of_sbatch: Sequence[str] = ()
    env: Sequence[str] = ()  # NAME=VALUE
    setup: Sequence[str] = ()  # lines of bash

    @property
    def file(self) -> Path:
        return self.folder / "job.sbatch"

    def started_by(self, file: str) -> str:
        """Slurm makes no folder for a log, and a job whose log cannot be opened fails without a word."""
        return f"mkdir -p {shell_quoted(str(self.folder))} && sbatch {file}"

    @property
    def log(self) -> str:
        """Slurm puts the numbers in."""
        return f"{self.folder}/slurm-{'%A_%a' if self.is_array else '%j'}.out"


def script(job: SbatchJob) -> str:
    return "\n".join([*_head(job), "", *_own(job), "", BODY.read_text()])


def _head(job: SbatchJob) -> Iterator[str]:
    yield "#!/bin/bash"
    yield f"# {job.about}"
    yield "# lmtrain's exit code decides: 75 queues this job again, 76 or a killed task starts all tasks again at"
    yield "# once, and any other ends it."
    yield f"# Start it with: {job.started_by('THIS_FILE')}"
    options = {
        "job-name": job.folder.name, "nodes": job.nodes + job.spare_nodes, "ntasks-per-node": job.tasks_per_node,
        "gpus-per-node": job.ranks_per_node if job.gpus else None, "cpus-per-task": job.cpus_per_task,
        "array": f"0-{len(job.runs) - 1}" if job.is_array else None, "chdir": job.cwd,
        "output": job.log.replace(str(job.folder), str(job.folder).replace("%", "%%"), 1), "open-mode": "append",
    }  # fmt: skip
    yield from (f"#SBATCH --{name}={_in_quotes(str(value))}" for name, value in options.items() if value is not None)
    yield "#SBATCH --requeue"
    if job.spare_nodes:
        yield "# a node that is lost ends the tasks, and not the job"
        yield "#SBATCH --no-kill"
    yield from (f"#SBATCH {option}" for option in job.of_sbatch)


def _own(job: SbatchJob) -> Iterator[str]:
    yield from (f"export {name}={shell_quoted(value)}" for name, _, value in (one.partition("=") for one in job.env))
    yield from job.setup
    ranks, tasks = job.nodes * job.ranks_per_node, job.nodes * job.tasks_per_node
    all_cpus = "yes" if job.takes_all_cpus else "''"
    yield f"nodes={job.nodes} tasks={tasks} ranks={ranks} spare_nodes={job.spare_nodes} all_cpus={all_cpus}"
    for name, words in (("lmtrain", job.program), ("container", job.container), ("of_srun", job.of_srun)):
        yield f"{name}=({' '.join(map(shell_quoted, words))})"
    if not job.is_array:
        ((folder, words),) = job.runs
        yield from _run(folder, words, "")
        return
    yield "case $SLURM_ARRAY_TASK_ID in"
    for number, (folder, words) in enumerate(job.runs):
        yield f"  {number})"
        yield from _run(folder, words, "    ")
        yield "    ;;"
    yield "esac"


def _run(folder: Path, words: Iterable[str], indent: str) -> Iterator[str]:
    yield f"{indent}run={shell_quoted(str(folder))}"
    yield f"{indent}words=("
    yield from (f"{indent}  {shell_quoted(word)}" for word in words)
    yield f"{indent})"


def _in_quotes(value: str) -> str:
    """Quote a value for sbatch if it has more than plain characters."""
    return value if re.fullmatch(r"[\w@%+=:,./-]+", value) else '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
