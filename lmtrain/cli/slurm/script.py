"""The sbatch file of a run: what Slurm is asked for, what is this run's own, and a body that is the same for all.

Called by slurm. The body, slurm_body.sh, reads the variables that stand above it; nothing is put into it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmtrain.config.overrides import shell
from lmtrain.errors import UsageError

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


@dataclass(frozen=True)
class TaskOptions:
    """The options of a job whose tasks start `num_ranks` ranks each."""

    of_sbatch: list[str]
    of_srun: list[str]
    cpus: int | None  # that a task asks for; None where another option says it
    takes_all_cpus: bool  # that the job has on its node, since the user has given no number

    @classmethod
    def of(cls, of_sbatch: Sequence[str], of_srun: Sequence[str], num_ranks: int) -> TaskOptions:
        for option, words in (("--sbatch", of_sbatch), ("--srun", of_srun)):
            for word in words:
                _check(option, word, num_ranks)
        of_job, of_step = _cpus("--sbatch", of_sbatch), _cpus("--srun", of_srun)
        each = of_job or of_step
        step = [f"--cpus-per-task={of_step * num_ranks}"] if of_job and of_step else []
        by_gpu = any(_CPUS_OF_GPUS.match(word) for word in (*of_sbatch, *of_srun))
        cpus = None if by_gpu and each is None else (each or 1) * num_ranks
        return cls(_without_cpus(of_sbatch), _without_cpus(of_srun) + step, cpus, each is None and not by_gpu)


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
