"""What `lmtrain slurm` is asked for: its options, checked, and those of sbatch and srun among them, made fit a node."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from lmtrain.errors import LayoutError, UsageError, example, fill_in, leave_out, own, way
from lmtrain.start.slurm_job.tasks_of_array import parse_array_tasks
from lmtrain.units import plural

if TYPE_CHECKING:
    from lmtrain.placement.parallel_settings import ParallelSettings

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
_BINDS_EACH_TASK = re.compile(r"--cpu-bind(=|\s+)(.*,)?(map|mask|rank)")


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """The options of `lmtrain slurm` that decide what its sbatch file holds; the help of the command explains each."""

    overrides: Sequence[str] | None = None
    config_dir: Path | None = None
    config_name: str = "pretrain"
    from_run: Path | None = None
    from_beginning: bool = False
    plugin: Sequence[str] | None = None
    gpus_per_node: int | None = None
    tasks_per_node: int | None = None
    tasks: Literal["node", "rank"] = "node"
    nodes: int | None = None
    spare_nodes: int = 0
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    sbatch: list[str] | None = None
    srun: list[str] | None = None
    env: Sequence[str] | None = None
    setup: Sequence[str] | None = None
    container_image: str | None = None
    container_command: str | None = None
    array: bool = False
    array_tasks: str | None = None

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
            divisor = max(size for size in range(1, per_node) if num_processes % size == 0)
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
    job_cpus, step_cpus = parse_cpus("--sbatch", sbatch_options), parse_cpus("--srun", srun_options)
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


def parse_cpus(option: str, words: Sequence[str]) -> int | None:
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
