"""The sbatch file of a run: what Slurm is asked for, what is this run's own, and a body that is the same for all.

Called by slurm. The body, slurm_body.sh, reads the variables that stand above it; nothing is put into it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmtrain.config.overrides import shell

BODY = Path(__file__).with_name("slurm_body.sh")


@dataclass(frozen=True, kw_only=True)
class Job:
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
        return f"mkdir -p {shell(str(self.folder))} && sbatch {file}"

    @property
    def log(self) -> str:
        """Slurm puts the numbers in."""
        return f"{self.folder}/slurm-{'%A_%a' if self.is_array else '%j'}.out"


def script(job: Job) -> str:
    return "\n".join([*_head(job), "", *_own(job), "", BODY.read_text()])


def _head(job: Job) -> Iterator[str]:
    yield "#!/bin/bash"
    yield f"# {job.about}"
    yield "# lmtrain's exit code decides: 75 queues this job again, 76 or a killed task starts all tasks again at"
    yield "# once, and any other ends it."
    yield f"# Start it with: {job.started_by('THIS_FILE')}"
    options: dict[str, object] = {"job-name": job.folder.name, "nodes": job.nodes + job.spare_nodes}
    options |= {"ntasks-per-node": job.tasks_per_node} | ({"gpus-per-node": job.ranks_per_node} if job.gpus else {})
    options |= {"cpus-per-task": job.cpus_per_task} if job.cpus_per_task else {}
    options |= {"array": f"0-{len(job.runs) - 1}"} if job.is_array else {}
    log = job.log.replace(str(job.folder), str(job.folder).replace("%", "%%"), 1)
    options |= {"chdir": job.cwd, "output": log, "open-mode": "append"}
    yield from (f"#SBATCH --{name}={_in_quotes(str(value))}" for name, value in options.items())
    yield "#SBATCH --requeue"
    if job.spare_nodes:
        yield "# a node that is lost ends the tasks, and not the job"
        yield "#SBATCH --no-kill"
    yield from (f"#SBATCH {option}" for option in job.of_sbatch)


def _own(job: Job) -> Iterator[str]:
    yield from (f"export {name}={shell(value)}" for name, _, value in (one.partition("=") for one in job.env))
    yield from job.setup
    ranks, tasks = job.nodes * job.ranks_per_node, job.nodes * job.tasks_per_node
    all_cpus = "yes" if job.takes_all_cpus else "''"
    yield f"nodes={job.nodes} tasks={tasks} ranks={ranks} spare_nodes={job.spare_nodes} all_cpus={all_cpus}"
    for name, words in (("lmtrain", job.program), ("container", job.container), ("of_srun", job.of_srun)):
        yield f"{name}=({' '.join(map(shell, words))})"
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
    yield f"{indent}run={shell(str(folder))}"
    yield f"{indent}words=("
    yield from (f"{indent}  {shell(word)}" for word in words)
    yield f"{indent})"


def _in_quotes(value: str) -> str:
    """As sbatch reads a value: in quotes where it has more than plain characters."""
    return value if re.fullmatch(r"[\w@%+=:,./-]+", value) else '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
