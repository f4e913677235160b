"""`lmtrain pretrain -m`: every combination of settings as a run of its own, one after another. Called by pretrain."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

from lmtrain.cli.inspect.run_view import finite, four
from lmtrain.cli.pretrain.from_run import Source, compose_run
from lmtrain.cli.pretrain.summary import print_plan
from lmtrain.cli.screen.console import print_table
from lmtrain.cli.screen.terminal import echo, print_json
from lmtrain.config.compose import expand_sweep
from lmtrain.config.overrides import hydra_quoted
from lmtrain.errors import LayoutError, LmtrainError, StoppedEarly, UsageError, join_few
from lmtrain.runfolder.ends import read_stop_or_empty
from lmtrain.runfolder.folder import record_errors
from lmtrain.runfolder.names import METRICS
from lmtrain.runfolder.rows import loss_warning, read_metrics
from lmtrain.runfolder.stop import DONE
from lmtrain.runtime.files.files import write_json
from lmtrain.runtime.processes.process import ProcessEnv
from lmtrain.runtime.processes.signals import STOPS, Stopped, StopRequest, listening
from lmtrain.train.before.preflight import process_problems
from lmtrain.train.config import RunConfig, config_of
from lmtrain.units import format_count

SUMMARY = "sweep.json"  # what each folder is, and how it stands, for scripts
_LOOKS = {"--dry-run", "--print-config"}
_LONGEST_NAME = 120  # because: a file system takes 255 bytes, and the folder's own files need some


@dataclass
class SweepRun:
    """One combination: what varies, where it runs, and how it stands."""

    changed: dict[str, str]
    folder: Path
    overrides: list[str]
    config: RunConfig
    state: str = "not begun"
    exit_code: int = 0


def run_all(
    words: Sequence[str], overrides: list[str], config_dir: Path | None, config_name: str, from_run: Path | None,
    env: ProcessEnv, *, elastic: bool = False,
) -> None:  # fmt: skip
    """Run each combination in a process of its own, in a folder of its own; a failure does not stop the rest.

    `words` are the command line, `overrides` its settings. A run that is done is not run again: the same command
    goes on with a sweep that was stopped. Of several processes that sweep together, as srun starts them, rank 0 prints.
    """
    with listening() as stop:
        try:
            stop.at_once()
            jobs = plan(overrides, config_dir, config_name, from_run)
            stop.politely(lambda name: None)  # because: the run of the moment hears it, or else the next one
            flags = options_of(words, overrides)
            if not elastic and not _LOOKS.intersection(flags):
                _refuse_layouts(jobs, env)
            _run(jobs, flags, _Runner(stop), speaks=env.rank == 0)
        except Stopped:
            raise StoppedEarly(f"{stop.cause}: no run was under way. Run the same command again to go on.") from None


def options_of(words: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return what a command line says beside its verb and its settings, for each run of the sweep."""
    rest = [word for word in words if word not in ("-m", "--multirun", "--", *overrides)]
    rest.remove("pretrain")
    return rest


def _run(jobs: Sequence[SweepRun], flags: list[str], runner: _Runner, *, speaks: bool) -> None:
    only_looks, as_json = bool(_LOOKS.intersection(flags)), "--json" in flags
    compares = only_looks and not as_json and "--print-config" not in flags
    first = None
    for number, job in enumerate(jobs, 1):
        done = not only_looks and is_done(job)
        if speaks:
            echo(f"run {number} of {len(jobs)}: {job.folder}{', which is done' * done}", err=as_json)
        job.state = "done"
        if not done:
            job.exit_code, said = runner.run(["pretrain", *flags, *["--json"] * compares, *job.overrides], compares)
            first = print_plans(said, first) if speaks else None
            ended = "stopped" if runner.stopped else f"failed, exit code {job.exit_code}"
            job.state = ended if job.exit_code else "done"
        if runner.stopped:
            break
    if only_looks:
        return _refuse_failures(jobs)
    if speaks:
        rows = [summary(job.folder, job.changed, job.state) for job in jobs]
        base = Path(jobs[0].config.run.dir)
        if base.is_dir() and base != jobs[0].folder:
            write_json(base / SUMMARY, {"runs": rows})
        if as_json:
            print_json({"runs": rows}, indent=None)
        else:
            print_rows(rows)
    if runner.stopped:
        raise StoppedEarly(f"Stopped in run {number} of {len(jobs)}. Run the same command again to go on.")
    return _refuse_failures(jobs)


def _refuse_layouts(jobs: Sequence[SweepRun], env: ProcessEnv) -> None:
    """Refuse layouts that these processes cannot have, before the first run starts."""
    problems = [
        problem
        for job in jobs
        if not job.config.parallel.auto
        for problem in process_problems(job.config.parallel.layout, env, job.config.train)
    ]
    if problems:
        raise LayoutError("\n".join(dict.fromkeys(problems)))


def plan(overrides: list[str], config_dir: Path | None, config_name: str, from_run: Path | None) -> list[SweepRun]:
    """Compose every combination; raise before the first one starts if any of them is wrong."""
    combinations = [list(one) for one in dict.fromkeys(map(tuple, expand_sweep(overrides, config_dir=config_dir)))]
    fixed = set.intersection(*map(set, combinations))
    jobs: list[SweepRun] = []
    for combination in combinations:
        config = compose_run(combination, from_run=from_run, config_dir=config_dir, name=config_name)
        varying = [text.lstrip("+") for text in combination if text not in fixed]
        changed = {key: value for key, _, value in (text.partition("=") for text in varying) if key != "run.dir"}
        folder = _folder(Path(config.run.dir), changed, ",".join(varying), {job.folder for job in jobs})
        rest = [text for text in combination if not text.lstrip("+").startswith("run.dir=")]
        jobs.append(SweepRun(changed, folder, [*rest, f"run.dir={hydra_quoted(str(folder))}"], config))
    own = from_run is not None and Path(jobs[0].config.run.dir).resolve() == Source.find(from_run).run.resolve()
    if own and jobs[0].changed:
        raise UsageError(f"-m makes several runs of --from-run={from_run}, which need a folder. Add run.dir=DIR.")
    return jobs


def folder_name(changed: dict[str, str]) -> str:
    """`optim.lr_1e-3__train.seed_2`: nothing that a shell or the grammar of overrides reads as more than a name."""
    plain = {key: re.sub(r"[^A-Za-z0-9.+-]+", "_", value).strip("_") or "empty" for key, value in changed.items()}
    name = "__".join(f"{key}_{value}" for key, value in plain.items())
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}__{digest}"


def is_done(job: SweepRun) -> bool:
    """Return whether a run with exactly these settings has finished."""
    if read_stop_or_empty(job.folder).get("cause") != DONE:
        return False
    try:  # because: an earlier version may have written it, without settings that are new
        then = config_of(job.folder)
    except LmtrainError:
        return False
    now = replace(job.config, run=then.run)  # because: its limits of time may change, and it is done all the same
    if now.parallel.auto:  # because: the run has chosen these
        train = replace(now.train, micro_batch=then.train.micro_batch)
        now = replace(now, parallel=then.parallel, recompute=then.recompute, train=train)
    ours, theirs = now.to_dict(), then.to_dict()
    if ours["model"].get("vocab_size") is None:  # because: the data has decided it
        ours["model"]["vocab_size"] = theirs["model"].get("vocab_size")
    return then.run.dir == str(job.folder) and ours == theirs


class _Runner:
    """Runs one command after another; a signal goes to the one that runs, which saves and ends."""

    def __init__(self, stop: StopRequest) -> None:
        self._stop, self._forwarded = stop, False  # what comes between two runs, and what comes within one
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def stopped(self) -> bool:
        return self._forwarded or self._stop.requested is not None

    def run(self, words: Sequence[str], reads: bool = False) -> tuple[int, str]:
        """Run a command; return its exit code, and its output if `reads` is set."""
        before = {number: signal.signal(number, self._forward) for number in STOPS}
        try:
            output = subprocess.PIPE if reads else None
            with subprocess.Popen([sys.executable, "-m", "lmtrain", *words], stdout=output) as self._child:
                if self.stopped:  # because: a signal can come while the process is being made
                    self._child.terminate()
                said = self._child.communicate()[0] or b""
                code = self._child.returncode
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        self._forwarded = self._forwarded or code == StoppedEarly.exit_code
        return code, said.decode()

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-C reaches the child from the terminal as well, and it takes the two for one."""
        self._forwarded = True
        if self._child is not None:
            self._child.send_signal(number)


def _folder(base: Path, changed: dict[str, str], old_name: str, taken: set[Path]) -> Path:
    """Return the folder of a combination; a folder that an earlier version has made for it is used again."""
    old = base / (old_name or "only").replace("/", "_")
    if old.is_dir():
        return old
    folder = base / folder_name(changed) if changed else base
    number = 2
    while folder in taken:  # because: values that differ in signs alone have one name
        folder, number = base / f"{folder_name(changed)}__{number}", number + 1
    return folder


def _refuse_failures(jobs: Sequence[SweepRun]) -> None:
    failed = [job for job in jobs if job.exit_code != 0]
    if not failed:
        return
    names = join_few(f"{job.folder} (exit code {job.exit_code})" for job in failed)
    error = LmtrainError(
        f"{len(failed)} of {len(jobs)} runs failed: {names}. "
        "Their messages are above; the same command tries them again, and leaves alone those that are done."
    )
    codes = {job.exit_code for job in failed}
    error.exit_code = code if len(codes) == 1 and (code := codes.pop()) > 0 else LmtrainError.exit_code
    raise error


def summary(folder: Path, changed: dict[str, str], state: str) -> dict[str, Any]:
    """Return a run's changed settings, its state, and figures of its metrics.jsonl; None for figures not there yet."""
    try:
        rows = read_metrics(folder / METRICS)
    except LmtrainError:
        rows = []
    with record_errors(folder):
        steps = [row for row in rows if row["event"] == "step"]
        valid = [row["loss"] for row in rows if row["event"] == "valid" and row.get("loss") is not None]
        speeds = [row["tokens_per_s"] for row in steps if row.get("tokens_per_s") is not None]
        return {
            "folder": str(folder), "settings": changed, "state": state,
            "steps": steps[-1]["step"] if steps else 0, "loss": finite(steps[-1]["loss"]) if steps else None,
            "best_valid_loss": finite(min(valid)) if valid else None,
            "tokens_per_s": median(speeds) if speeds else None,
            "went_wrong": loss_warning(steps[0], steps[-1]) if steps and state == "done" else "",
        }  # fmt: skip


def print_plans(said: str, first: dict[str, Any] | None) -> dict[str, Any] | None:
    """Print the JSON of a dry run: all facts of the first run, and of another run those that differ."""
    if not said:
        return first
    facts: dict[str, Any] = json.loads(said.splitlines()[-1])
    if first is None:
        print_plan(facts)
        return facts
    other = {key: value for key, value in facts.items() if key not in first or value != first[key]}
    other.pop("run_folder", None)
    if other:
        print_plan(other)
    else:
        echo("in numbers as the first one")
    return first


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Print a row for each run, in the order in which they ran, and the folder of the best."""
    keys = list(dict.fromkeys(key for row in rows for key in row["settings"]))
    echo()
    print_table([
        {f"<{key}": row["settings"].get(key, "") for key in keys}
        | {"<state": ", ".join(filter(None, (row["state"], row["went_wrong"])))}
        | {"steps": str(row["steps"]), "loss": four(row["loss"])}
        | {"best valid": four(row["best_valid_loss"])}
        | {"tokens/s": "" if row["tokens_per_s"] is None else format_count(row["tokens_per_s"])}
        for row in rows
    ])  # fmt: skip
    best = [row for row in rows if row["best_valid_loss"] is not None]
    if len(best) > 1:
        echo(f"best validation: {min(best, key=lambda row: row['best_valid_loss'])['folder']}")
