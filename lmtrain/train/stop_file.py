"""stop.json in a run's folder: why the run ended, and whether a scheduler should start it again.

Written by the command line when a run ends, by the launcher when one of its processes fails. A file that cannot be
written is said, and changes nothing of how the run ends. Torch-free.
"""

from __future__ import annotations

import os
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.store import CHECKPOINTS, latest, step_of
from lmtrain.errors import LmtrainError, OutputError, PeerLostError, StoppedEarly, brief
from lmtrain.runtime.files.files import folder_lock, read_json, write_json
from lmtrain.runtime.processes.launch import Outcome
from lmtrain.runtime.processes.process import ProcessEnv
from lmtrain.train.config import RunConfig

STOP = "stop.json"
_TOLD, _LONGEST = ("cause", "exit_code", "rank", "lost", "hang"), 300  # to the next start; characters of a text
SAVE_FILE, STOP_FILE, TRACE_FILE = "SAVE", "STOP", "TRACE"  # what somebody puts into the folder to ask for it


def write_failure(config: RunConfig, error: LmtrainError, env: ProcessEnv) -> None:
    """The first process that fails says why; those that lose it as a peer come later and leave that alone.

    What goes wrong here becomes a note of the error, which is printed below it.
    """
    if isinstance(error, OutputError):
        return  # because: the folder is another run's, or cannot be written
    requeue = error.exit_code in (StoppedEarly.exit_code, PeerLostError.exit_code)
    facts = {"cause": str(error), "exit_code": error.exit_code, "requeue": requeue}
    if env.world_size > 1:
        facts |= {"rank": env.rank}
    if isinstance(error, PeerLostError) and error.rank is not None:
        facts |= {"rank": error.rank, **({"hang": error.stacks} if error.stacks else {"lost": error.rank})}
    if problem := write_stop(config, facts, replace=env.world_size == 1):
        error.add_note(problem)


def write_cut_off(config: RunConfig, cause: str) -> str | None:
    """Of a run that was asked to stop when it had nothing of its own to save, or no time. It may not have its folder.

    Returns what went wrong, in words.
    """
    newest = latest(Path(config.run.dir) / CHECKPOINTS)
    step = step_of(newest.name) if newest is not None else 0
    facts = {"cause": cause, "step": step, "exit_code": StoppedEarly.exit_code, "requeue": True}
    try:
        with folder_lock(Path(config.run.dir)):
            return write_stop(config, facts)
    except (LmtrainError, OSError) as error:
        return f"The reason stands in no file: {error}"


def said_by_watch(config: RunConfig, outcome: Outcome, before: list[int] | None) -> Outcome | None:
    """What the watch has said and written of a process that hung or was lost; None where it has nothing to add.

    `before` is the file's identity when the processes started: one that still has it is of an earlier start.
    """
    folder = Path(config.run.dir)
    if not is_written_since(folder, before) or outcome.exit_code != PeerLostError.exit_code:
        return None
    try:
        facts = read_json(folder / STOP)
    except LmtrainError:
        return None
    if not isinstance(facts, dict) or not {"hang", "lost"} & facts.keys():
        return None
    return changed(outcome, rank=facts.get("rank"), cause=str(facts.get("cause")))


def identity(folder: Path) -> list[int] | None:
    """Of what stop.json says: whoever writes it anew gives it another one. None where there is none."""
    try:
        found = os.stat(folder / STOP)
    except OSError:
        return None
    return [found.st_ino, found.st_size, found.st_mtime_ns]


def is_written_since(folder: Path, before: list[int] | None) -> bool:
    """Return whether stop.json has been written since its identity was `before`; removing it is no writing."""
    return identity(folder) not in (None, before)


def last_end(folder: Path) -> dict[str, Any]:
    """How the last start ended, briefly, for the row of the next one; nothing where it could not say so."""
    try:
        facts = read_json(folder / STOP)
    except LmtrainError:
        return {}
    kept = {key: facts[key] for key in _TOLD if key in facts} if isinstance(facts, dict) else {}
    return {key: brief(value, _LONGEST) if isinstance(value, str) else value for key, value in kept.items()}


def asked_by(name: str) -> str:
    """The cause of what one of the files above brings about."""
    return f"the file {name}"


def write_end(config: RunConfig, outcome: Outcome) -> str | None:
    """Of processes that one of them has ended. Returns what went wrong, in words."""
    if outcome.exit_code == OutputError.exit_code:
        return None  # because: then the folder may be another run's
    requeue = outcome.stopped or outcome.exit_code == PeerLostError.exit_code
    facts = {"cause": outcome.cause, "exit_code": outcome.exit_code, "requeue": requeue, "rank": outcome.rank}
    if outcome.signal:
        facts["lost"] = outcome.rank
    return write_stop(config, facts)


def write_stop(config: RunConfig, facts: dict[str, Any], *, replace: bool = True) -> str | None:
    """With the checkpoint that there is to go on from, if any. Returns what went wrong, in words."""
    folder = Path(config.run.dir)
    try:
        if folder.is_dir() and (replace or not (folder / STOP).exists()):
            newest = latest(folder / CHECKPOINTS)
            write_json(folder / STOP, facts | {"resume": newest and str(newest)})
    except (LmtrainError, OSError) as error:
        return f"The reason stands in no file: {error}"
    return None
