"""Readers of a run folder: its files, and whether the run is still running. Torch-free.

Used by every command that shows a run. `read_run` accepts a folder in any state (running, killed, damaged) and reports
which parts are missing; the other readers raise on damaged files.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lmtrain.errors import DataError, LmtrainError, MissingInputError, StoppedEarly, StoppedForGood, shorten, way
from lmtrain.runfolder.file_names import (
    CHECKPOINTS,
    CONFIG,
    DATA,
    ENVIRONMENT,
    FAILED_STARTS,
    HANGS,
    IMPORTED,
    LOG,
    METRICS,
    STOP,
    TENSORBOARD,
    TRACES,
    WORKING_DIRECTORY,
)
from lmtrain.runfolder.read_and_record_run_end import read_object_or_empty, read_stop, stop_stamp
from lmtrain.runfolder.stop_json_writer import DONE
from lmtrain.runtime.files.atomic_files import lock_holder, read_json
from lmtrain.runtime.files.similar_path import missing_path, refuse_lists
from lmtrain.runtime.processes.process_environment import process_identity

_RUN_FILES = (METRICS, LOG, ENVIRONMENT, CHECKPOINTS)  # every run has at least one of them
_FOLDERS_OF_RUN = (CHECKPOINTS, DATA, HANGS, IMPORTED, TENSORBOARD, TRACES)
_START_S = 600  # because: a start takes minutes at most until it locks the folder
_MAX_DEPTH = 4  # levels of folders that are searched for runs


@contextmanager
def record_errors(run: Path) -> Iterator[None]:
    """Context manager for code that reads the files of the run folder `run`: KeyError, TypeError, ValueError and the
    like, which unexpected content causes, become a DataError that names the folder.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"A file in the run folder {run} has unexpected content ({type(error).__name__}: {error}). "
            f"Look at its {CONFIG}, {STOP} and {METRICS}; --debug shows where reading failed."
        ) from error


def read_settings(run: Path) -> Any:
    """Return the settings of the run's newest start, as the start wrote them to config.json."""
    return read_json(run / CONFIG)


def read_working_directory(run: Path) -> Path | None:
    """Return the directory in which the newest start of a run was launched, as the run folder records it; None if it
    does not.
    """
    environment = read_json(run / ENVIRONMENT) if (run / ENVIRONMENT).is_file() else None
    folder = environment.get(WORKING_DIRECTORY) if isinstance(environment, dict) else None
    return Path(folder) if isinstance(folder, str) else None


def run_state(run: Path, stop: dict[str, Any] | None) -> dict[str, Any]:
    """Return a dict with a run's `state` ("running", "finished", "stopped", "failed", "killed" or "out of sight") and
    `process`, the process that holds the folder's lock, or None. `stop` is the content of stop.json, None without the
    file. "out of sight" means that the process is on another machine and may or may not be alive.
    """
    is_done = stop is not None and stop.get("cause") == DONE
    if not is_done and (start := _start_under_way(run)) is not None:
        return start
    if stop is not None:
        on_request = stop.get("exit_code") in (StoppedEarly.exit_code, StoppedForGood.exit_code)
        state = "finished" if is_done else "stopped" if on_request else "failed"
        return {"state": state, "process": None}
    holder, is_held = lock_holder(run) or (None, False)
    if holder is None:
        return {"state": "killed", "process": None}
    is_here = holder.endswith(f" on {socket.gethostname()}")
    return {"state": "running" if is_held else "killed" if is_here else "out of sight", "process": holder}


def _start_under_way(run: Path) -> dict[str, Any] | None:
    """Return the state of a run that a command is about to start or restart, and whose folder it has not locked; None
    if there is no such command: of this machine, a command whose process lives; of another one, a command that began a
    few minutes ago after the run's end.
    """
    lost = read_object_or_empty(run / FAILED_STARTS).get("lost")
    newest = lost[-1] if isinstance(lost, list) and lost and isinstance(lost[-1], dict) else {}
    # because: a launcher may restart the run after a loss; any other process has ended, or lives on in a notebook
    if "how" in newest and not newest.get("is_launched"):
        return None
    holder = lock_holder(run)
    identity, host = str(newest.get("command")), newest.get("host")
    pid = identity.partition(".")[0]
    process = f"process {pid} on {host}, which starts the run"
    if host == socket.gethostname():
        is_alive = pid.isdecimal() and process_identity(int(pid)) == identity and not (holder and holder[1])
        return {"state": "running", "process": process} if is_alive else None
    is_new = newest.get("stop_before") == stop_stamp(run) is not None and _is_recent(newest.get("began"))
    return {"state": "out of sight", "process": process} if is_new else None


def _is_recent(time: Any) -> bool:
    """Return whether `time`, an ISO time with its zone, is less than _START_S ago."""
    with suppress(TypeError, ValueError):
        return (datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds() < _START_S
    return False


def read_run_state(run: Path) -> dict[str, Any]:
    """Read stop.json and return the run's state as `run_state` does, with the file's content as `stopped`."""
    stop = read_stop(run)
    return run_state(run, stop) | {"stopped": stop}


def is_run(path: Path) -> bool:
    """Return True if the folder is that of a run: it holds metrics.jsonl, or config.json with another file of a run."""
    return (path / METRICS).is_file() or (
        (path / CONFIG).is_file() and any((path / name).exists() for name in _RUN_FILES)
    )


def run_around(path: Path) -> Path | None:
    """Return the folder of the run in which a path lies, such as that of a checkpoint; None if it lies in no run."""
    return next((folder for folder in path.parents if is_run(folder)), None)


def not_a_run(path: Path, reason: str, hint: str = "Give the run.dir of a run.") -> str:
    """Return the error message for a path that should be a run: with the run in which it lies or, if it does not exist,
    a run of a similar name as a way out, else with the `reason` why it is no run and `hint`, a sentence.
    """
    if (run := run_around(path)) is not None:
        return f"{path} lies in a run, and the run itself is needed. Use {way(str(run), instead_of=str(path))}."
    if not path.exists():
        return missing_path(path, hint, is_run)
    return f"{path} is not the folder of a run: {reason}. {hint}"


def find_runs(folder: Path, max_depth: int = _MAX_DEPTH) -> Iterator[Path]:
    """Yield `folder` if it is a run folder, and all run folders in it, sorted by path, down to `max_depth` levels
    below. Hidden folders, links and the folders that a run itself writes are not searched.
    """
    own_folders: tuple[str, ...] = ()
    if is_run(folder):
        yield folder
        own_folders = _FOLDERS_OF_RUN
    subfolders: list[Path] = []
    with suppress(OSError):
        subfolders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    for subfolder in subfolders if max_depth else ():
        if not subfolder.name.startswith(".") and subfolder.name not in own_folders:
            yield from find_runs(subfolder, max_depth - 1)


def expand_runs(paths: Iterable[Path]) -> list[Path]:
    """Return each run once, with a folder of runs (such as a sweep's) that is no run itself replaced by its runs.

    A path without runs is kept, so that the caller can refuse it.
    """
    return [*{run.resolve(): run for path in paths for run in _runs_named_by(path)}.values()]


def _runs_named_by(path: Path) -> list[Path]:
    return [path] if is_run(path) else [*find_runs(path)] or [path]


@dataclass
class RunFolder:
    """A run as read from its folder. `problems` are sentences about files that could not be read."""

    path: Path
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    stop: dict[str, Any] | None = None
    state: str = "killed"
    problems: list[str] = field(default_factory=list)

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    @property
    def end_reason(self) -> str:
        """Reason why the run ended, in words, as stop.json tells it; for a killed run, that it left no such file. "" if
        the run finished or is running.
        """
        if self.stop is None:
            return f"left no {STOP}" if self.state == "killed" else ""
        return "" if self.state == "finished" else str(self.stop.get("cause", "?"))

    def read(self, name: str, consequence: str) -> dict[str, Any] | None:
        """Return the dict in the JSON file `name` of the run folder. If it cannot be read, return None and append a
        sentence to `self.problems` that ends with `consequence`, such as "its settings are not known".
        """
        path = self.path / name
        try:
            content = read_json(path)
            if isinstance(content, dict):
                return content
            problem = "holds no object of JSON"
        except (LmtrainError, OSError) as error:
            problem = "is not there" if not path.exists() else f"cannot be read ({shorten(error, 120)})"
        self.problems.append(f"{name} {problem}: {consequence}")
        return None


def read_run(path: Path, name: str) -> RunFolder:
    """Read a run folder, which may be that of a live run or damaged: what cannot be read is listed in the result's
    `problems`. `name` is the name under which output shows the run. Raise MissingInputError if it is not a run folder.
    """
    if not is_run(path):
        has_not = f"it has neither {METRICS} nor {CONFIG} with other files of a run"
        raise MissingInputError(not_a_run(path, has_not, "Give the run.dir of a run of `lmtrain pretrain`."))
    run = RunFolder(path, name)
    run.settings = run.read(CONFIG, "its settings, layout and model are not known") or {}
    run.environment = run.read(ENVIRONMENT, "versions and machine are not known") or {}
    run.stop = run.read(STOP, "why it stopped is not known") if (path / STOP).exists() else None
    try:
        run.state = str(run_state(path, run.stop)["state"])
    except (LmtrainError, OSError) as error:
        run.problems.append(f"whether it still runs is not known: {shorten(error)}")
    return run


def read_runs_below(folders: Sequence[Path]) -> list[RunFolder]:
    """Return the runs in the folders and their subfolders, each once. Raise UsageError if a folder is a list of paths
    in one word, and MissingInputError if one holds no runs.
    """
    refuse_lists(folders)
    if empty := next((folder for folder in folders if next(find_runs(folder), None) is None), None):
        hint = "Name a folder in which `lmtrain pretrain` has written runs."
        if not empty.exists():
            raise MissingInputError(missing_path(empty, hint, lambda path: next(find_runs(path), None) is not None))
        raise MissingInputError(f"{empty} is not a folder that holds runs. {hint}")
    runs = read_runs([*{run.resolve(): run for folder in folders for run in find_runs(folder)}.values()])
    for run in runs if len(folders) == 1 else ():  # so that the name of a sweep's run includes the sweep's
        run.name = str(run.path.relative_to(folders[0])) if run.path != folders[0] else run.name
    return runs


def read_runs(paths: list[Path]) -> list[RunFolder]:
    """Read several run folders. The `name` of each is the end of its path, with as many folder names as are needed to
    make all names different.
    """
    paths_parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, paths_parts), default=1) + 1):
        names = ["/".join(parts[-length:]) for parts in paths_parts]
        if len(set(names)) == len(names):
            break
    return [read_run(path, name) for path, name in zip(paths, names, strict=True)] if paths else []
