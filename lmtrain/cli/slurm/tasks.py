"""Options of sbatch and srun that are of a task, where one task starts all ranks of its node. Called by slurm.

What the user gives is meant for each rank: CPUs are multiplied, and what cannot be is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lmtrain.errors import UsageError

# because: each of them counts, limits or places tasks, of which a node has one
_OF_A_TASK = {
    "--gpus-per-task", "--tres-per-task", "--ntasks-per-gpu", "--ntasks-per-socket", "--ntasks-per-core", "--gpu-bind",
    "--tres-bind",
}  # fmt: skip
_CPUS = re.compile(r"(?:--cpus-per-task(?:=|\s+)|-c\s*)(.*)")
_CPUS_OF_GPUS = re.compile(r"--cpus-per-gpu\b")
_HARMLESS = re.compile(r"--(gpu|tres)-bind(=|\s+)none")
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
