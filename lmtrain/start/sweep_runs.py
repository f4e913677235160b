"""A sweep (`lmtrain pretrain -m`): every combination of settings as a run of its own, one after another. Torch-free."""

from __future__ import annotations

import hashlib
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

from lmtrain.config.compose_run_settings import expand_sweep, whole_sweep_in_ways
from lmtrain.config.parse_and_apply_overrides import FileSetting, hydra_quoted
from lmtrain.config.settings_file import words_for_command
from lmtrain.config.typed_words import without_settings
from lmtrain.data.data_settings import DataSettings
from lmtrain.errors import LayoutError, LmtrainError, StoppedEarly, UsageError, join_few
from lmtrain.runfolder.file_names import DATA, METRICS
from lmtrain.runfolder.folder_reader import record_errors
from lmtrain.runfolder.metrics_rows import loss_warning, read_metrics
from lmtrain.runfolder.read_and_record_run_end import read_stop_or_empty
from lmtrain.runfolder.run_facts import finite_or_none
from lmtrain.runfolder.stop_json_writer import DONE
from lmtrain.runtime.files.atomic_files import write_json
from lmtrain.runtime.processes.command_watch import note_interrupt_received, watch_command
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.runtime.processes.stop_signals import STOPS, Stopped, StopRequest, stop_requests
from lmtrain.start.settings_from_earlier_run import RunRequest, SourceRun, compose_run, imported_checkpoint
from lmtrain.train.run_config import RunConfig, read_run_config
from lmtrain.train.startup_checks.check_machine_and_processes import process_problems

SUMMARY = "sweep.json"  # settings, state and results of each run, for scripts
_DRY_OPTIONS = {"--dry-run", "--print-config"}
_LONGEST_NAME = 120  # because: a file system takes 255 bytes, and the folder's own files need some


@dataclass
class SweepRun:
    """A combination of a sweep: the settings that vary, its run folder, and its state."""

    changed: dict[str, str]
    folder: Path
    overrides: list[str]
    config: RunConfig
    state: str = "not begun"
    exit_code: int = 0


@dataclass(frozen=True)
class SweepViews:
    """Functions by which a sweep tells how far it is: they get a line on the run that begins, the output of a dry run,
    and the rows of all runs at the end, as `summarize_run` returns them.
    """

    begin_run: Callable[[str], None]
    show_plan: Callable[[str], None]
    show_results: Callable[[list[dict[str, Any]]], None]


def run_sweep(
    argv: Sequence[str], request: RunRequest, env: ProcessEnv, views: SweepViews, *, elastic: bool = False
) -> None:
    """Run every combination of the settings with several values, one after another, each in its own `lmtrain pretrain`
    process and run folder. If a run fails, the next ones still run; raise an LmtrainError at the end.

    `argv` is the command line, `request` what it asks for. Finished runs are skipped, so the same command continues a
    sweep that was stopped. If several processes run the sweep together, as under srun, only rank 0 calls `views`.
    """
    with stop_requests() as stop:
        try:
            stop.raise_at_once()
            jobs = plan_runs(request)
            stop.defer_to_step_end(lambda name: None)  # because: the run under way, or the next one, handles it
            flags = options_for_runs(argv, request.words)
            if not elastic and not _DRY_OPTIONS.intersection(flags):
                _check_layouts(jobs, env)
            _run_jobs(jobs, flags, _CommandRunner(stop), views if env.rank == 0 else None)
        except Stopped:
            raise StoppedEarly(
                f"The sweep was stopped by {stop.cause} while no run was under way. Run the same command again to go "
                "on."
            ) from None


def options_for_runs(argv: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return the options, such as --json, that each run of a sweep gets: the words of the sweep's command line `argv`
    without `pretrain`, `-m`, the overrides and the file of settings.
    """
    files = {str(word.file) for word in overrides if isinstance(word, FileSetting)}
    rest = [word for word in argv if word not in ("-m", "--multirun", "--", *files, *overrides)]
    rest.remove("pretrain")
    return rest


def _run_jobs(jobs: Sequence[SweepRun], flags: list[str], runner: _CommandRunner, views: SweepViews | None) -> None:
    """Run `lmtrain pretrain` with the options `flags` for each job that is not finished yet, and store the job's state
    in it. Then, given `views`, write sweep.json and show the results. Raise StoppedEarly if a run was stopped,
    LmtrainError if any failed.
    """
    is_dry = bool(_DRY_OPTIONS.intersection(flags))
    compares_plans = is_dry and not {"--json", "--print-config"}.intersection(flags)
    for number, job in enumerate(jobs, 1):
        is_done = not is_dry and is_finished(job)
        if views is not None:
            views.begin_run(f"run {number} of {len(jobs)}: {job.folder}{', which is done' * is_done}")
        job.state = "done"
        if not is_done:
            command = ["pretrain", *flags, *["--json"] * compares_plans, *job.overrides]
            job.exit_code, output = runner.run(command, compares_plans)
            if views is not None and output:
                views.show_plan(output)
            ended = "stopped" if runner.stopped else f"failed, exit code {job.exit_code}"
            job.state = ended if job.exit_code else "done"
        if runner.stopped:
            break
    if is_dry:
        return _raise_if_failed(jobs)
    if views is not None:
        rows = [summarize_run(job.folder, job.changed, job.state) for job in jobs]
        base = Path(jobs[0].config.run.dir)
        if base != jobs[0].folder and any(job.folder.is_dir() for job in jobs):
            write_json(base / SUMMARY, {"runs": rows})
        views.show_results(rows)
    if runner.stopped:
        raise StoppedEarly(f"The sweep stopped in run {number} of {len(jobs)}. Run the same command again to go on.")
    return _raise_if_failed(jobs)


def _check_layouts(jobs: Sequence[SweepRun], env: ProcessEnv) -> None:
    """Raise a LayoutError if the parallel layout of any run does not fit the number of processes in `env`. Runs with
    parallel=auto are not checked.
    """
    problems = [
        problem
        for job in jobs
        if not job.config.parallel.auto
        for problem in process_problems(
            job.config.parallel.layout, env, job.config.train, zero=job.config.parallel.zero
        )
    ]
    if problems:
        raise LayoutError(*dict.fromkeys(problems))


def plan_runs(request: RunRequest) -> list[SweepRun]:
    """Return the sweep's runs, one for each combination of the words with several values, each with its composed
    settings and its own folder below run.dir. Raise an LmtrainError, such as SettingsError, if any combination is
    wrong.
    """
    from_run, every = request.from_run, expand_sweep(request.words, config_dir=request.config_dir)
    combinations = [list(words) for words in dict.fromkeys(map(tuple, every))]
    fixed = set.intersection(*map(set, combinations))
    jobs: list[SweepRun] = []
    for combination in combinations:
        with whole_sweep_in_ways(combination, combinations):
            config = compose_run(replace(request, words=combination))
        varying = [text.lstrip("+") for text in combination if text not in fixed]
        changed = {key: value for key, _, value in (text.partition("=") for text in varying) if key != "run.dir"}
        folder = _choose_folder(Path(config.run.dir), changed, ",".join(varying), {job.folder for job in jobs})
        rest = without_settings(words_for_command(combination), ["run.dir"])
        jobs.append(SweepRun(changed, folder, [*rest, f"run.dir={hydra_quoted(str(folder))}"], config))
    _place_text_datasets(jobs, request)
    if (
        from_run is not None
        and imported_checkpoint(from_run) is None
        and Path(jobs[0].config.run.dir).resolve() == SourceRun.find(from_run).run.resolve()
        and jobs[0].changed
    ):
        raise UsageError(
            f"-m makes several runs, and they cannot use the folder of --from-run={from_run}. Give run.dir=DIR, a "
            "folder for the new runs."
        )
    return jobs


def _place_text_datasets(jobs: Sequence[SweepRun], request: RunRequest) -> None:
    """Set data.text_dir, the folder of the dataset, in place for each run that makes one from data.text: to a common
    folder if all these runs would make the same dataset, so that it is made once, else to each run's own. `request`
    is that of the sweep.
    """
    making = [
        (job, data)
        for job in jobs
        if isinstance(data := job.config.data, DataSettings) and data.text is not None and data.text_dir is None
        if job.folder != Path(job.config.run.dir)
    ]
    recipes = set()
    for job, data in making:
        model, checkpoint = job.config.model.to_dict(), job.config.checkpoint
        text = (data.kind, data.text, data.text_suffixes, data.text_key, data.text_split, data.tokenizer)
        recipes.add((*text, checkpoint.init_from, checkpoint.resume, model.get("vocab_size")))
    for job, _ in making:
        folder = Path(job.config.run.dir) if len(recipes) == 1 else job.folder
        job.overrides.append(f"data.text_dir={hydra_quoted(str(folder / DATA))}")
        job.config = replace(compose_run(replace(request, words=job.overrides)), run=job.config.run)


def run_folder_name(changed: dict[str, str]) -> str:
    """Return a folder name for a run of a sweep from its varied settings (key -> text), such as
    `optim.lr_1e-3__train.seed_2`. It has no character that needs quoting in a shell or an override; a long name ends in
    a hash.
    """
    plain = {key: re.sub(r"[^A-Za-z0-9.+-]+", "_", value).strip("_") or "empty" for key, value in changed.items()}
    name = "__".join(f"{key}_{value}" for key, value in plain.items())
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}__{digest}"


def is_finished(job: SweepRun) -> bool:
    """Return True if the job's folder holds a run that has finished, with the same settings as the job. Settings that
    the run chooses itself, as under parallel=auto, do not count.
    """
    if read_stop_or_empty(job.folder).get("cause") != DONE:
        return False
    try:  # because: an earlier version, which lacked some settings, may have written the folder
        saved = read_run_config(job.folder)
    except LmtrainError:
        return False
    wanted = replace(job.config, run=saved.run)  # because: other time limits do not matter for a finished run
    if wanted.parallel.auto:  # because: the run itself has chosen these
        train = replace(wanted.train, micro_batch=saved.train.micro_batch)
        wanted = replace(wanted, parallel=saved.parallel, recompute=saved.recompute, train=train)
    wanted_values, saved_values = wanted.to_dict(), saved.to_dict()
    if wanted_values["model"].get("vocab_size") is None:  # because: the tokenizer of the data decides it
        wanted_values["model"]["vocab_size"] = saved_values["model"].get("vocab_size")
    return saved.run.dir == str(job.folder) and wanted_values == saved_values


class _CommandRunner:
    """Runs one command at a time; forwards a stop signal to the running command, which saves and ends."""

    def __init__(self, stop: StopRequest) -> None:
        self._stop, self._forwarded = stop, False  # stop requests between two runs; True after a signal during one
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def stopped(self) -> bool:
        return self._forwarded or self._stop.requested is not None

    def run(self, words: Sequence[str], captures_output: bool = False) -> tuple[int, str]:
        """Run the command `lmtrain WORDS` in a child process and wait for it. Return (exit code, stdout); stdout is
        empty, and goes to the terminal, unless `captures_output` is set.
        """
        old_handlers = {number: signal.signal(number, self._forward) for number in STOPS}
        try:
            stdout = subprocess.PIPE if captures_output else None
            # because: the child prints how far it is
            command = [sys.executable, "-m", "lmtrain", *words]
            with watch_command(None), subprocess.Popen(command, stdout=stdout) as self._child:
                if self.stopped:  # because: a signal can arrive while the process is being created
                    self._child.terminate()
                output = self._child.communicate()[0] or b""
                code = self._child.returncode
        finally:
            for number, handler in old_handlers.items():
                signal.signal(number, handler)
        self._forwarded = self._forwarded or code == StoppedEarly.exit_code
        return code, output.decode()

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Forward the signal `number` to the child process; a signal handler. If the terminal has sent Ctrl-C to the
        child as well, the child counts the two signals as one.
        """
        note_interrupt_received()
        self._forwarded = True
        if self._child is not None:
            self._child.send_signal(number)


def _choose_folder(base: Path, changed: dict[str, str], old_name: str, used_folders: set[Path]) -> Path:
    """Return the folder for a run of a sweep: below `base`, named after its `changed` settings, or `base` itself if
    there are none. A number is added if the path is among `used_folders`. If the folder `base`/`old_name`, as earlier
    versions named it, exists, return that.
    """
    old = base / (old_name or "only").replace("/", "_")
    if old.is_dir():
        return old
    folder = base / run_folder_name(changed) if changed else base
    number = 2
    while folder in used_folders:  # because: values that differ only in special characters get the same name
        folder, number = base / f"{run_folder_name(changed)}__{number}", number + 1
    return folder


def _raise_if_failed(jobs: Sequence[SweepRun]) -> None:
    failed = [job for job in jobs if job.exit_code != 0]
    if not failed:
        return
    names = join_few(f"{job.folder} (exit code {job.exit_code})" for job in failed)
    error = LmtrainError(
        f"{len(failed)} of {len(jobs)} runs failed: {names}. "
        "Their messages are above; the same command repeats them, and skips the runs that are done."
    )
    codes = {job.exit_code for job in failed}
    error.exit_code = code if len(codes) == 1 and (code := codes.pop()) > 0 else LmtrainError.exit_code
    raise error


def summarize_run(folder: Path, changed: dict[str, str], state: str) -> dict[str, Any]:
    """Return a run's row for sweep.json: the arguments, and from the run's metrics.jsonl the last step and loss, the
    best validation loss and the median tokens per second. Numbers that were not recorded are None, the step 0.
    """
    try:
        rows = read_metrics(folder / METRICS)
    except LmtrainError:
        rows = []
    with record_errors(folder):
        steps = [row for row in rows if row["event"] == "step"]
        losses = [finite_or_none(row.get("loss")) for row in rows if row["event"] == "valid"]
        speeds = [row["tokens_per_s"] for row in steps if row.get("tokens_per_s") is not None]
        return {
            "folder": str(folder), "settings": changed, "state": state,
            "steps": steps[-1]["step"] if steps else 0, "loss": finite_or_none(steps[-1]["loss"]) if steps else None,
            "best_valid_loss": min((loss for loss in losses if loss is not None), default=None),
            "tokens_per_s": median(speeds) if speeds else None,
            "went_wrong": loss_warning(steps[0], steps[-1]) if steps and state == "done" else "",
        }  # fmt: skip
