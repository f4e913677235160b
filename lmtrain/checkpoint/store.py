"""Which checkpoints exist, which one is newest, and which may go. Torch-free.

Called by set-up (resume), the writer (which prunes after each save) and every command that takes a checkpoint. Knows
names, folders and whether a manifest can be read; what a checkpoint holds is the reader's business.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from lmtrain.checkpoint.disk.format import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
    NewerFormatError,
    decode_manifest,
    most_bytes,
)
from lmtrain.errors import CheckpointError, DataError, MissingInputError, StorageError
from lmtrain.observe.measure.named_measures import score_by_step
from lmtrain.runfolder.folder import read_settings
from lmtrain.runfolder.names import CHECKPOINTS, METRICS, checkpoint_names, step_folder_name, step_from_name
from lmtrain.runfolder.rows import read_metrics
from lmtrain.runtime.files.files import (
    MAX_JSON_BYTES,
    free_bytes,
    parse_json,
    read_bytes,
    read_errors,
    storage_errors,
)
from lmtrain.runtime.processes.faults import fault_point
from lmtrain.units import format_bytes

BEST = "@best"  # behind a run's folder
DEFAULT = "loss/valid"
_LEFTOVER = re.compile(r"(step_[0-9]{8,18})\.(tmp|replaced)-[0-9]+-[0-9]+")
_SET_ASIDE = re.compile(r"step_[0-9]{8,18}\.damaged-[0-9]+")


def best_first(checkpoints: Mapping[int, Path], worth: Mapping[int, float]) -> list[Path]:
    """Return the measured checkpoints, best first; among equals the earliest first, which later ones do not replace."""
    return [checkpoints[step] for step in sorted(checkpoints.keys() & worth, key=lambda step: (-worth[step], step))]


def measure_of(run: Path) -> str:
    """Return the name of the measure by which a run's checkpoints are ranked."""
    settings = read_settings(run).get("checkpoint", {})
    return str(settings.get("best_by", DEFAULT)) if isinstance(settings, dict) else DEFAULT


def worth_in(run: Path) -> dict[int, float]:
    """Return step -> score of a run's checkpoints from its rows; a higher score is better."""
    return score_by_step(read_metrics(run / METRICS), measure_of(run))


_attempts = itertools.count()


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints whose manifest can be read, oldest first. Damage to their files is for the reader to find."""
    return [path for path in _step_folders(folder) if manifest_problem(path) is None]


def list_broken(folder: Path) -> list[Path]:
    """Folders with a checkpoint's name whose manifest cannot be read: worth a warning, since none is made so."""
    return [path for path in _step_folders(folder) if manifest_problem(path) is not None]


def list_set_aside(folder: Path) -> list[Path]:
    """Damaged checkpoints that have left their name to another, or to none."""
    return sorted(path for path in folder.iterdir() if _SET_ASIDE.fullmatch(path.name)) if folder.is_dir() else []


def latest(folder: Path) -> Path | None:
    """Return the newest checkpoint, damaged or not: a damaged one is reported by name, not skipped for an older one."""
    return next(reversed(_step_folders(folder)), None)


def before(path: Path) -> Path | None:
    """Return the newest readable checkpoint beside this one that is older."""
    step = step_from_name(path.name)
    older = [] if step is None else [p for p in _step_folders(path.parent) if (step_from_name(p.name) or 0) < step]
    return next((one for one in reversed(older) if manifest_problem(one) is None), None)


def newer_than(path: Path) -> list[Path]:
    """Checkpoints beside this one that come after it, oldest first."""
    step = step_from_name(path.name)
    return [] if step is None else [one for one in _step_folders(path.parent) if (step_from_name(one.name) or 0) > step]


def _step_folders(folder: Path) -> list[Path]:
    return [folder / name for name in checkpoint_names(folder)]


def load_manifest(path: Path) -> Manifest:
    """Return a checkpoint's manifest; raise if it is damaged, and name an older checkpoint that can be read."""
    try:
        return _read_manifest(path)
    except NewerFormatError:
        raise
    except CheckpointError as error:
        other = before(path)
        if other is None:
            raise
        raise CheckpointError(f"{error} The newest one before it that can be read is {other}.") from error


def manifest_problem(path: Path) -> str | None:
    """Return why a manifest cannot be read; None if it can, or if a newer version of this program could."""
    try:
        found = os.lstat(path / MANIFEST)
        return _judged(path, (found.st_ino, found.st_size, found.st_mtime_ns))
    except OSError:
        return _judged.__wrapped__(path, ())


@lru_cache(maxsize=256)  # because: each save asks again about all that a run has kept
def _judged(path: Path, version: tuple[int, ...]) -> str | None:
    try:
        _read_manifest(path)
    except NewerFormatError:
        return None
    except (CheckpointError, MissingInputError) as error:
        return str(error)
    return None


def _read_manifest(path: Path) -> Manifest:
    where = path / MANIFEST
    try:
        with read_errors(path):
            is_folder = stat.S_ISDIR(os.stat(path).st_mode)
        if not is_folder:
            raise CheckpointError(f"{path} is not a folder. Give a checkpoint's folder.")
        text = read_bytes(where, MAX_MANIFEST_BYTES, follow_links=False)
        data_bytes = 0
        if len(text) > MAX_JSON_BYTES:  # what lies beside a manifest, of one that is large enough to ask
            data_bytes = sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(path))
        manifest = decode_manifest(parse_json(text, where, most_bytes(data_bytes)), where)
    except CheckpointError:
        raise
    except (DataError, MissingInputError) as error:
        if not os.path.lexists(path):
            raise MissingInputError(f"{path} does not exist. Give a checkpoint's folder.") from error
        raise CheckpointError(f"{error} Without it the checkpoint cannot be used.") from error
    if step_from_name(path.name) not in (None, manifest.step):
        raise CheckpointError(f"{path} holds step {manifest.step}. Give the folder its own name back.")
    return manifest


def set_aside(path: Path) -> Path:
    """Give a damaged checkpoint another name, under which nothing takes it for one and nothing removes it."""
    names = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
    aside = next(name for name in names if not os.path.lexists(name))
    os.rename(path, aside)
    return aside


def resolve(path: Path | str) -> Path:
    """Return the checkpoint that a path names: itself, or the newest one of a run's folder or its checkpoints' folder.

    RUN@best means the best of those that the run has kept, by its checkpoint.best_by.
    """
    path = Path(path)
    if is_best(path):
        return best(Path(str(path).removesuffix(BEST)))
    if not path.is_dir():
        state = "is not a folder" if path.exists() else "does not exist"
        raise MissingInputError(
            f"{path} {state}. Give a run's folder, or a checkpoint such as RUN/{CHECKPOINTS}/step_00001000."
        )
    if os.path.lexists(path / MANIFEST) or step_from_name(path.name) is not None:
        return path
    newest = latest(path / CHECKPOINTS) or latest(path)
    if newest is None:
        raise MissingInputError(f"{path} holds no finished checkpoint. Give a checkpoint, or a run that has saved one.")
    return newest


def is_best(path: Path) -> bool:
    """Return whether a path is RUN@best and no folder of that name exists."""
    return path.name.endswith(BEST) and not path.exists()


def best(run: Path) -> Path:
    """Return the best measured checkpoint that a run has kept."""
    by_step = {step_from_name(path.name) or 0: path for path in list_checkpoints(run / CHECKPOINTS)}
    found = best_first(by_step, worth_in(run))
    if not found:
        raise MissingInputError(
            f"{run}{BEST} is not there: no checkpoint of {run} was measured by {measure_of(run)} at its step. "
            f"Give one by its name, as in {run / CHECKPOINTS}/step_00001000, or {run} for the newest."
        )
    return found[0]


def new_leftover(folder: Path, step: int, kind: str = "tmp") -> Path:
    """Return an unused name for a folder that `sweep` may remove."""
    paths = (leftover(folder, step, (os.getpid(), number), kind) for number in _attempts)
    return next(path for path in paths if not path.exists())


def leftover(folder: Path, step: int, numbers: Sequence[int], kind: str = "tmp") -> Path:
    """Return such a name from its two numbers, which is all that processes exchange about it."""
    process, attempt = numbers
    return folder / f"{step_folder_name(step)}.{kind}-{process}-{attempt}"


def leftover_numbers(path: Path) -> tuple[int, int]:
    process, attempt = path.name.rpartition(".")[2].split("-")[1:]
    return int(process), int(attempt)


def check_room(folder: Path, need: int) -> None:
    free = free_bytes(folder)
    if free < need:
        raise StorageError(
            f"A checkpoint in {folder} needs {format_bytes(need)} and the disk has {format_bytes(free)} free. "
            "Free some space."
        )


def sweep(folder: Path) -> list[str]:
    """Clear what killed processes left. Only the owner of the run's lock may call it, with no save in flight.

    A checkpoint that was moved aside for its replacement comes back if the replacement never took its place.
    """
    if not folder.is_dir():
        return []
    swept = []
    with storage_errors(folder, "Sweeping"):
        for path in sorted(folder.iterdir()):
            match = _LEFTOVER.fullmatch(path.name)
            if match is None or path.is_symlink():
                continue
            home = folder / match[1]
            if match[2] == "replaced" and not home.exists():
                os.rename(path, home)
            else:
                shutil.rmtree(path)
            swept.append(path.name)
    return swept


def prune(
    folder: Path, keep_last: int, saved: Path | None = None, keep_every_steps: int | None = None, *,
    keep_best: int = 0, worth: Mapping[int, float] | None = None,
) -> list[str]:  # fmt: skip
    """Remove all but the newest checkpoints; at least one always stays, and so does the one just saved.

    One whose manifest cannot be read is neither counted nor removed: whoever looks into the damage needs it.
    Those whose step is a multiple of `keep_every_steps` are never removed, nor are the `keep_best` that are worth most.
    A run that went back to an earlier step saves below the steps it had reached before.
    """
    removed = []
    with storage_errors(folder, "Pruning"):
        there = {int(path.name.removeprefix("step_")): path for path in list_checkpoints(folder)}
        good = best_first(there, worth or {})[:keep_best]
        for step, path in list(there.items())[: -max(1, keep_last)]:
            for_good = keep_every_steps is not None and step % keep_every_steps == 0
            if for_good or path == saved or path in good or path.is_symlink():
                continue  # because: somebody put a link there by hand, and what it leads to is not ours
            # because: a kill amid the removal must not leave half a checkpoint under a checkpoint's name
            going = new_leftover(folder, step)
            os.rename(path, going)
            fault_point("ckpt.prune")
            shutil.rmtree(going)
            removed.append(path.name)
    return removed
