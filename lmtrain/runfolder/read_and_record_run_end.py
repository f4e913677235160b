"""Writers and readers of stop.json, the record of how a run ended. Torch-free.

The command line's `attempt` writes the file when a run ends, and the launcher when one of its processes fails; the hub
of the watchdog writes it for a rank that cannot. All write through stop_json_writer.py. Readers are the next start, the
launcher, commands that show runs, sweeps, and the script of a Slurm job. If the file cannot be written, the problem is
reported, and the run ends in the same way as otherwise.
"""

from __future__ import annotations

import os
from dataclasses import replace as copy_with
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmtrain.errors import LmtrainError, OutputError, PeerLostError, StoppedEarly, shorten
from lmtrain.runfolder import stop_json_writer
from lmtrain.runfolder.file_names import CHECKPOINTS, STOP, checkpoint_names, step_from_name
from lmtrain.runtime.files.atomic_files import folder_lock, fsync_dir, read_json, refuse_special_file, storage_errors

if TYPE_CHECKING:
    from lmtrain.runtime.processes.local_rank_launcher import Outcome
    from lmtrain.runtime.processes.process_environment import ProcessEnv

_KEYS_FOR_NEXT_START = ("cause", "exit_code", "rank", "lost", "hang")
_MAX_CHARS = 300  # of a text that is kept for the next start


def request_file_cause(name: str) -> str:
    """Return the stop cause for a request file (SAVE, STOP or TRACE) found in the run folder."""
    return f"the file {name}"


def write_stop(folder: Path, cause: str, exit_code: int, *, replace: bool = True, **extra_facts: Any) -> str | None:
    """Write the cause of a run's end to stop.json as `stop_json_writer.write` does, and fsync the folder. Return an
    error message if that fails; None if it was written, or if the folder does not exist. With `replace` False, an
    existing file is left as it is.
    """
    path = folder / STOP
    if not folder.is_dir():
        return None
    try:
        with storage_errors(path, "Writing"):
            refuse_special_file(path)
            stop_json_writer.write(folder, cause, exit_code, replace=replace, **extra_facts)
            fsync_dir(folder)
    except LmtrainError as error:
        return f"The reason could not be written to {STOP}: {error}"
    return None


def write_failure(folder: Path, error: LmtrainError, env: ProcessEnv) -> None:
    """Write to stop.json the error with which this process fails. With several ranks an existing file is left as it is,
    because the first rank to fail has the true cause. An OutputError is not written. If writing fails, the reason is
    added to `error` as a note.
    """
    if isinstance(error, OutputError):
        return  # because: the folder belongs to another run, or cannot be written
    extra_facts: dict[str, Any] = {"rank": env.rank} if env.world_size > 1 else {}
    if isinstance(error, PeerLostError) and error.rank is not None:
        extra_facts = {"rank": error.rank, **({"hang": error.stacks} if error.stacks else {"lost": error.rank})}
    if problem := write_stop(folder, str(error), error.exit_code, replace=env.world_size == 1, **extra_facts):
        error.add_note(problem)


def write_unsaved_stop(folder: Path, cause: str) -> str | None:
    """Write to stop.json that the run was stopped on request before it had saved a checkpoint in this start. `cause`
    names the request, such as a signal. Return an error message, or None on success. This function takes the folder's
    lock itself.
    """
    try:
        with folder_lock(folder):
            names = checkpoint_names(folder / CHECKPOINTS)
            return write_stop(folder, cause, StoppedEarly.exit_code, step=step_from_name(names[-1]) if names else 0)
    except (LmtrainError, OSError) as error:
        return f"The reason could not be written to {STOP}: {error}"


def write_process_failure(folder: Path, outcome: Outcome) -> str | None:
    """Write to stop.json how a launcher's processes ended after one of them failed, unless by an output error. Return
    an error message if writing fails, else None.
    """
    if outcome.exit_code == OutputError.exit_code:
        return None  # because: an output error can mean that the folder belongs to another run
    lost_rank: dict[str, Any] = {"lost": outcome.rank} if outcome.signal else {}
    return write_stop(folder, str(outcome.cause), outcome.exit_code, rank=outcome.rank, **lost_rank)


def remove_stop(folder: Path) -> None:
    """Remove the previous start's stop.json, because a run that resumes has not stopped."""
    (folder / STOP).unlink(missing_ok=True)


def read_stop(folder: Path) -> Any:
    """Return the content of stop.json, or None if there is no such file. Raise if the file is damaged."""
    return read_json(folder / STOP) if (folder / STOP).is_file() else None


def read_stop_or_empty(folder: Path) -> dict[str, Any]:
    """Return the content of stop.json, or an empty dict if the file is missing or cannot be read."""
    return read_object_or_empty(folder / STOP)


def read_object_or_empty(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file as a dict; {} if the file is missing or damaged, or holds another type of value.
    """
    try:
        facts = read_json(path)
    except LmtrainError:
        return {}
    return facts if isinstance(facts, dict) else {}


def read_last_stop(folder: Path) -> dict[str, Any]:
    """Return why the previous start of a run ended, from stop.json: cause, exit code and the ranks at fault, with long
    texts cut. The next start records this in its metrics. Return {} if the file is missing or damaged.
    """
    facts = read_stop_or_empty(folder)
    return {
        key: shorten(facts[key], _MAX_CHARS) if isinstance(facts[key], str) else facts[key]
        for key in _KEYS_FOR_NEXT_START if key in facts
    }  # fmt: skip


def outcome_from_watchdog(folder: Path, outcome: Outcome, stamp_before: list[int] | None) -> Outcome | None:
    """Return a copy of a launcher's `outcome` with the rank and cause that a rank's watchdog wrote to stop.json because
    of a hung or lost process. Return None if the outcome is no lost peer, or if stop.json holds no such report or has
    not changed since the start, when its `stop_stamp` was `stamp_before`.
    """
    if not is_stop_written_since(folder, stamp_before) or outcome.exit_code != PeerLostError.exit_code:
        return None
    facts = read_stop_or_empty(folder)
    if not {"hang", "lost"} & facts.keys():
        return None
    return copy_with(outcome, rank=facts.get("rank"), cause=str(facts.get("cause")))


def stop_stamp(folder: Path) -> list[int] | None:
    """Return [size, mtime in ns] of stop.json, which is a different list after the file was rewritten. Return None if
    there is no such file.
    """
    try:
        stat = os.stat(folder / STOP)
    except OSError:
        return None
    return [stat.st_size, stat.st_mtime_ns]


def is_stop_written_since(folder: Path, stamp_before: list[int] | None) -> bool:
    """Return True if stop.json was written after `stamp_before` was taken; False if it was only removed."""
    return stop_stamp(folder) not in (None, stamp_before)
