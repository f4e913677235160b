"""From the options of `lmtrain slurm` to the content of an sbatch file: its runs are composed, and checked as `pretrain
--dry-run` checks them. Torch is never imported.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from lmtrain.config.settings_file import words_for_command
from lmtrain.data.data_settings import DataChoice
from lmtrain.errors import LayoutError, MissingInputError, UsageError
from lmtrain.observe.screen.command_progress import ShowProgress
from lmtrain.runtime.files.atomic_files import atomic_file
from lmtrain.runtime.files.existing_output import Kind, check_output, holds
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.start.dataset_from_text import preview_data_of_text
from lmtrain.start.prepare_inputs_and_eval_tasks import prepare_inputs
from lmtrain.start.settings_from_earlier_run import RunRequest, compose_run
from lmtrain.start.slurm_job.sbatch_file import SbatchJob, job_script
from lmtrain.start.slurm_job.sbatch_options import SlurmOptions, TaskOptions, parse_cpus, task_options
from lmtrain.start.slurm_job.tasks_of_array import check_array_tasks
from lmtrain.start.sweep_runs import plan_runs
from lmtrain.train.run_config import RunConfig
from lmtrain.train.startup_checks.preflight import check_run_folder
from lmtrain.units import plural

_MADE_BY = "Made by `lmtrain slurm`."
SBATCH_FILE = Kind("an sbatch file that `lmtrain slurm` wrote", holds(_MADE_BY))


def build_job(options: SlurmOptions, report: Callable[[str], None], show_progress: ShowProgress) -> SbatchJob:
    """Check the options and the settings of their runs, and return the content of the sbatch file. Raise an
    LmtrainError if a check fails. `report` receives notes and warnings, `show_progress` shows how far a check is.
    """
    options.check()
    folder, runs = _compose_runs(options)
    return job_of_runs(options, folder, runs, [options.flags] * len(runs), report, show_progress)


def job_of_runs(
    options: SlurmOptions, folder: Path, runs: Sequence[tuple[RunConfig, list[str]]], flags: Sequence[list[str]],
    report: Callable[[str], None], show_progress: ShowProgress,
) -> SbatchJob:  # fmt: skip
    """Check the runs, given as (settings, overrides), and return the content of an sbatch file that starts them.
    `flags` has the options of `lmtrain pretrain` for each run; `report` and `show_progress` are those of `build_job`.
    Raise LayoutError if the runs take different numbers of processes or leave the layout to parallel=auto.
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
        typed_cpus = parse_cpus("--sbatch", tasks.sbatch_options) or parse_cpus("--srun", tasks.srun_options)
        tasks = task_options(tasks.sbatch_options, tasks.srun_options, ranks_per_node)
        if typed_cpus:
            report(
                f"--cpus-per-task={typed_cpus} is for each rank: the task of a node, which starts {ranks_per_node}, "
                f"gets {tasks.cpus}"
            )
    _check_runs(runs, ranks_per_node, report, show_progress)
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


def _check_runs(
    runs: Iterable[tuple[RunConfig, list[str]]], ranks_per_node: int, report: Callable[[str], None],
    show_progress: ShowProgress,
) -> None:  # fmt: skip
    """Check the settings, data and folder of each run, given as (settings, overrides), and raise an LmtrainError if one
    could not start. A dataset that several runs will make from the same data.text is made for the checks only once.
    """
    with ExitStack() as previews:
        known: dict[str, DataChoice] = {}
        for config, overrides in runs:
            digest = config.data.digest()
            if digest not in known:
                known[digest] = previews.enter_context(preview_data_of_text(config, overrides, report))[0].data
            _check_run(replace(config, data=known[digest]), ranks_per_node, report, show_progress)


def _check_run(
    config: RunConfig, ranks_per_node: int, report: Callable[[str], None], show_progress: ShowProgress
) -> None:
    """Check that a run with `ranks_per_node` ranks on each node could start, by its settings, data and folder, as
    `pretrain --dry-run` does; this machine's own devices are not checked. Report warnings, and raise an LmtrainError on
    errors.
    """
    env = ProcessEnv(world_size=0, local_world_size=ranks_per_node, host="each node")
    inputs, _ = prepare_inputs(config, env, show_progress, starts_run=False)
    for warning in (*inputs.warnings, *check_run_folder(config, inputs.model, inputs.tokenizer, check_lock=False)):
        report(warning)


def write_job(job: SbatchJob, path: Path) -> None:
    """Write the job's sbatch file to `path`."""
    with atomic_file(path) as file:
        file.write(job_script(job).encode(errors="surrogateescape"))


def submit_job(job: SbatchJob) -> str:
    """Write the job's sbatch file to its folder and submit it; return the job's number. Raise MissingInputError where
    there is no sbatch, UsageError if it refuses the file.
    """
    check_output(job.file, SBATCH_FILE, overwrite=False, is_default=True)
    write_job(job, job.file)
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
    return result.stdout.strip().partition(";")[0]
