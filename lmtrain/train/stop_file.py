"""stop.json in a run's folder: why the run ended, and whether a scheduler should start it again.

Written by the command line when a run ends, by the launcher when one of its processes fails. A file that cannot be
written is said, and changes nothing of how the run ends. Torch-free.
"""

from __future__ import annotations

from dataclasses import replace as changed
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.store import CHECKPOINTS, latest, step_of
from lmtrain.errors import LmtrainError, OutputError, PeerLostError, StoppedEarly
from lmtrain.runtime.files import folder_lock, parse_json, read_bytes, write_json
from lmtrain.runtime.launch import Outcome
from lmtrain.runtime.process import ProcessEnv
from lmtrain.train.config import RunConfig

STOP = "stop.json"
SAVE_FILE, STOP_FILE = "SAVE", "STOP"  # what somebody puts into the folder to ask for the one or the other
_MAX_BYTES = 1 << 20


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


def said_by_watch(config: RunConfig, outcome: Outcome, before: bytes | None) -> Outcome | None:
    """What the watch has said and written of a process that hung or was lost; None where it has nothing to add.

    `before` is the file as it was when the processes started: what stands in it still is of an earlier start.
    """
    path, text = Path(config.run.dir) / STOP, stop_bytes(config)
    if text is None or text == before or outcome.exit_code != PeerLostError.exit_code:
        return None
    try:
        facts = parse_json(text, path)
    except LmtrainError:
        return None
    if not isinstance(facts, dict) or not {"hang", "lost"} & facts.keys():
        return None
    return changed(outcome, rank=facts.get("rank"), cause=str(facts.get("cause")))


def stop_bytes(config: RunConfig) -> bytes | None:
    try:
        return read_bytes(Path(config.run.dir) / STOP, _MAX_BYTES)
    except (LmtrainError, OSError):
        return None


def write_end(config: RunConfig, outcome: Outcome) -> str | None:
    """Of processes that one of them has ended. Returns what went wrong, in words."""
    if outcome.exit_code == OutputError.exit_code:
        return None  # because: then the folder may be another run's
    requeue = outcome.stopped or outcome.exit_code == PeerLostError.exit_code
    facts = {"cause": outcome.cause, "exit_code": outcome.exit_code, "requeue": requeue, "rank": outcome.rank}
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
