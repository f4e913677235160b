"""How a run ended, by its stop.json: said by who ends it, and read by who starts it again. Torch-free.

Said here by `attempt` in the command line when a run ends and by the launcher when one of its processes fails; for a
rank that cannot, the watch's hub says it. All of them write through stop.py. Read by the next start, the launcher,
verbs that show runs, sweeps, and the script of a Slurm job. A file that cannot be written is said, and changes nothing
of how the run ends.
"""

from __future__ import annotations

import os
from dataclasses import replace as changed
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmtrain.errors import LmtrainError, OutputError, PeerLostError, StoppedEarly, brief
from lmtrain.runfolder import stop
from lmtrain.runfolder.names import CHECKPOINTS, STOP, step_names, step_of
from lmtrain.runtime.files.files import folder_lock, fsync_dir, read_json, refuse_odd_output, storage_errors

if TYPE_CHECKING:
    from lmtrain.runtime.processes.launch import Outcome
    from lmtrain.runtime.processes.process import ProcessEnv

_TOLD, _LONGEST = ("cause", "exit_code", "rank", "lost", "hang"), 300  # to the next start; characters of a text


def asked_by(name: str) -> str:
    """Return the cause of what SAVE, STOP or TRACE in the folder brings about."""
    return f"the file {name}"


def write_stop(folder: Path, cause: str, exit_code: int, *, replace: bool = True, **more: Any) -> str | None:
    """Write why a run ends, by the rule of `stop.write`, if it has a folder. Return what went wrong, in words."""
    path = folder / STOP
    if not folder.is_dir():
        return None
    try:
        with storage_errors(path, "Writing"):
            refuse_odd_output(path)
            stop.write(folder, cause, exit_code, replace=replace, **more)
            fsync_dir(folder)
    except LmtrainError as error:
        return f"The reason stands in no file: {error}"
    return None


def write_failure(folder: Path, error: LmtrainError, env: ProcessEnv) -> None:
    """Write why this process fails. Those that lose it as a peer come later and leave that alone.

    What goes wrong here becomes a note of the error, which is printed below it.
    """
    if isinstance(error, OutputError):
        return  # because: the folder is another run's, or cannot be written
    more: dict[str, Any] = {"rank": env.rank} if env.world_size > 1 else {}
    if isinstance(error, PeerLostError) and error.rank is not None:
        more = {"rank": error.rank, **({"hang": error.stacks} if error.stacks else {"lost": error.rank})}
    if problem := write_stop(folder, str(error), error.exit_code, replace=env.world_size == 1, **more):
        error.add_note(problem)


def write_cut_off(folder: Path, cause: str) -> str | None:
    """Write of a run that it was asked to stop when it had nothing of its own to save, or no time.

    It may not have its folder. Return what went wrong, in words.
    """
    try:
        with folder_lock(folder):
            names = step_names(folder / CHECKPOINTS)
            return write_stop(folder, cause, StoppedEarly.exit_code, step=step_of(names[-1]) if names else 0)
    except (LmtrainError, OSError) as error:
        return f"The reason stands in no file: {error}"


def write_end(folder: Path, outcome: Outcome) -> str | None:
    """Write how processes ended that one of them has ended. Return what went wrong, in words."""
    if outcome.exit_code == OutputError.exit_code:
        return None  # because: then the folder may be another run's
    lost: dict[str, Any] = {"lost": outcome.rank} if outcome.signal else {}
    return write_stop(folder, str(outcome.cause), outcome.exit_code, rank=outcome.rank, **lost)


def remove_stop(folder: Path) -> None:
    """Remove what the start before has left: a run that goes on has not stopped."""
    (folder / STOP).unlink(missing_ok=True)


def read_stop(folder: Path) -> Any:
    """Return what stop.json says, None where there is none; refuse a damaged one."""
    return read_json(folder / STOP) if (folder / STOP).is_file() else None


def stop_told(folder: Path) -> dict[str, Any]:
    """Return what stop.json says; nothing where it is not there or cannot be read."""
    return told(folder / STOP)


def told(path: Path) -> dict[str, Any]:
    """Return what a file of JSON says; nothing where it is not there or cannot be read."""
    try:
        facts = read_json(path)
    except LmtrainError:
        return {}
    return facts if isinstance(facts, dict) else {}


def last_end(folder: Path) -> dict[str, Any]:
    """Return how the last start ended, briefly, for the row of the next one; nothing where it could not say so."""
    facts = stop_told(folder)
    kept = {key: facts[key] for key in _TOLD if key in facts}
    return {key: brief(value, _LONGEST) if isinstance(value, str) else value for key, value in kept.items()}


def said_by_watch(folder: Path, outcome: Outcome, before: list[int] | None) -> Outcome | None:
    """Return what the watch has said and written of a process that hung or was lost; None where it adds nothing.

    `before` is the file's stamp when the processes started: one that still has it is of an earlier start.
    """
    if not is_written_since(folder, before) or outcome.exit_code != PeerLostError.exit_code:
        return None
    facts = stop_told(folder)
    if not {"hang", "lost"} & facts.keys():
        return None
    return changed(outcome, rank=facts.get("rank"), cause=str(facts.get("cause")))


def stop_stamp(folder: Path) -> list[int] | None:
    """Return what tells this stop.json from one that is written anew; None where there is none."""
    try:
        found = os.stat(folder / STOP)
    except OSError:
        return None
    return [found.st_ino, found.st_size, found.st_mtime_ns]


def is_written_since(folder: Path, before: list[int] | None) -> bool:
    """Return whether stop.json has been written since its stamp was `before`; removing it is no writing."""
    return stop_stamp(folder) not in (None, before)
