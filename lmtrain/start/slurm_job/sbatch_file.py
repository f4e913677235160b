"""The text of an sbatch file: #SBATCH options, shell variables of its runs, and the body slurm_body.sh, which is the
same for all runs and reads these variables.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmtrain.errors import shell_quoted
from lmtrain.start.slurm_job.sbatch_options import SlurmOptions, TaskOptions
from lmtrain.start.slurm_job.tasks_of_array import array_range

BODY = Path(__file__).with_name("slurm_body.sh")


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
