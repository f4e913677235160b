"""Find, rank and remove the checkpoints of a run's folder. Torch-free.

Called by set-up (resume), the writer (which prunes after each save) and every command that takes a checkpoint. Knows
names, folders and whether a manifest can be read; tensor_reader.py reads the tensors.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import stat
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

from lmtrain.checkpoint.disk.checkpoint_format import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
    NewerFormatError,
    decode_manifest,
    max_manifest_bytes,
)
from lmtrain.errors import CheckpointError, DataError, MissingInputError, StorageError, UsageError, join_few, way
from lmtrain.runfolder.file_names import (
    CHECKPOINTS,
    CONFIG,
    METRICS,
    checkpoint_names,
    step_folder_name,
    step_from_name,
)
from lmtrain.runfolder.folder_reader import is_run, read_settings, run_around
from lmtrain.runfolder.lineage import waiting_branches
from lmtrain.runfolder.metrics_rows import read_metrics
from lmtrain.runfolder.tensorboard_metric_names import score_by_step
from lmtrain.runtime.files.atomic_files import (
    MAX_JSON_BYTES,
    free_bytes,
    fsync_dir,
    parse_json,
    read_bytes,
    read_errors,
    storage_errors,
)
from lmtrain.runtime.files.similar_path import missing_path
from lmtrain.runtime.processes.fault_injection import fault_point
from lmtrain.units import format_bytes

BEST_SUFFIX = "@best"  # after a run's folder: RUN@best
DEFAULT_MEASURE = "loss/valid"
_LEFTOVER = re.compile(r"(step_[0-9]{8,18})\.(tmp|replaced)-[0-9]+-[0-9]+")
_DAMAGED = re.compile(r"step_[0-9]{8,18}\.damaged-[0-9]+")


def rank_checkpoints(checkpoints: Mapping[int, Path], scores: Mapping[int, float]) -> list[Path]:
    """Return the checkpoints that have a score, best (highest) first; among equals the earliest first.

    Both mappings are by step.
    """
    return [checkpoints[step] for step in sorted(checkpoints.keys() & scores, key=lambda step: (-scores[step], step))]


def ranking_measure(run: Path) -> str:
    """Return the name of the measure by which a run's checkpoints are ranked, its checkpoint.best_by."""
    settings = read_settings(run).get("checkpoint", {})
    return str(settings.get("best_by", DEFAULT_MEASURE)) if isinstance(settings, dict) else DEFAULT_MEASURE


_attempt_numbers = itertools.count()


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints whose manifest can be read, oldest first; their files are not checked."""
    return [path for path in _step_folders(folder) if manifest_problem(path) is None]


def list_broken(folder: Path) -> list[Path]:
    """Return the folders with a checkpoint's name whose manifest cannot be read, oldest first: they are damaged."""
    return [path for path in _step_folders(folder) if manifest_problem(path) is not None]


def list_damaged(folder: Path) -> list[Path]:
    """Return the damaged checkpoints that `rename_damaged` has renamed."""
    return sorted(path for path in folder.iterdir() if _DAMAGED.fullmatch(path.name)) if folder.is_dir() else []


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint of a folder, damaged or not, or None.

    because: a damaged checkpoint must be reported, not silently skipped for an older one
    """
    return next(reversed(_step_folders(folder)), None)


def previous_checkpoint(path: Path) -> Path | None:
    """Return the path of the newest readable checkpoint in the same folder that is of an earlier step than the
    checkpoint `path`, or None if there is none.
    """
    step = step_from_name(path.name)
    older = [] if step is None else [p for p in _step_folders(path.parent) if (step_from_name(p.name) or 0) < step]
    return next((folder for folder in reversed(older) if manifest_problem(folder) is None), None)


def newer_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoints in the same folder that are newer than the checkpoint `path`, oldest first."""
    step = step_from_name(path.name)
    return [] if step is None else [p for p in _step_folders(path.parent) if (step_from_name(p.name) or 0) > step]


def _step_folders(folder: Path) -> list[Path]:
    return [folder / name for name in checkpoint_names(folder)]


def load_manifest(path: Path) -> Manifest:
    """Return a checkpoint's manifest. Raise CheckpointError if it is damaged; the message names the newest older
    checkpoint that can be read, if there is one.
    """
    try:
        return _read_manifest(path)
    except NewerFormatError:
        raise
    except CheckpointError as error:
        previous = previous_checkpoint(path)
        if previous is None:
            raise
        raise CheckpointError(f"{error} The newest readable checkpoint before it is {previous}.") from error


def manifest_problem(path: Path) -> str | None:
    """Return why the manifest of the checkpoint `path` cannot be read. Return None if it can, or if a newer lmtrain has
    written it.
    """
    try:
        status = os.lstat(path / MANIFEST)
        return _cached_problem(path, (status.st_ino, status.st_size, status.st_mtime_ns))
    except OSError:
        return _cached_problem.__wrapped__(path, ())


@lru_cache(maxsize=256)  # because: each save checks all checkpoints of the run again
def _cached_problem(path: Path, version: tuple[int, ...]) -> str | None:
    """Return why the manifest of the checkpoint `path` cannot be read; None if it can, or if a newer lmtrain has
    written it. `version`, the manifest's inode, size and time of change, is part of the key of the cache.
    """
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
            raise CheckpointError(f"{path} is not a folder. Give the folder of a checkpoint.")
        text = read_bytes(where, MAX_MANIFEST_BYTES, follow_links=False)
        data_bytes = 0
        if len(text) > MAX_JSON_BYTES:  # because: only a large manifest's limit depends on the size of the data
            data_bytes = sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(path))
        manifest = decode_manifest(parse_json(text, where, max_manifest_bytes(data_bytes)), where)
    except CheckpointError:
        raise
    except (DataError, MissingInputError) as error:
        if not os.path.lexists(path):
            raise MissingInputError(f"{path} does not exist. Give the folder of a checkpoint.") from error
        raise CheckpointError(f"The checkpoint {path} cannot be used without its manifest: {error}") from error
    if step_from_name(path.name) not in (None, manifest.step):
        raise CheckpointError(
            f"{path} has been renamed: it holds the checkpoint of step {manifest.step}. Give it its original name."
        )
    return manifest


def rename_damaged(path: Path) -> Path:
    """Rename a damaged checkpoint to NAME.damaged-1 or a higher number, and return its new path. It is then not taken
    for a checkpoint any more, and never removed.
    """
    names = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
    new_path = next(name for name in names if not os.path.lexists(name))
    os.rename(path, new_path)
    return new_path


def resolve_checkpoint(path: Path | str) -> Path:
    """Return the checkpoint that `path` names: a checkpoint itself, the newest in the folder of a run or of
    checkpoints, or for RUN@best the best that the run has kept, by its checkpoint.best_by. Raise MissingInputError if
    there is none.
    """
    path = Path(path)
    if is_best(path):
        return best_checkpoint(Path(str(path).removesuffix(BEST_SUFFIX)))
    if not path.is_dir():
        hint = f"Give a run's folder, or a checkpoint such as RUN/{CHECKPOINTS}/step_00001000."
        if (run := run_around(path)) is not None:
            hint = f"Give {way(str(run), instead_of=str(path))} for the newest checkpoint of this run."
        raise MissingInputError(missing_path(path, checkpoints_beside(path) or hint, is_run_or_checkpoint))
    if os.path.lexists(path / MANIFEST) or step_from_name(path.name) is not None:
        return path
    newest = latest_checkpoint(path / CHECKPOINTS) or latest_checkpoint(path)
    if newest is None:
        raise MissingInputError(f"{path} holds no finished checkpoint. Give a checkpoint, or a run that has saved one.")
    return newest


def checkpoints_beside(path: Path) -> str:
    """Return the sentence that names the checkpoints where `path`, which has a number, was looked for: in its folder or
    in that of the run that this is; "" if there are none.
    """
    steps = [each.name for each in list_checkpoints(path.parent / CHECKPOINTS) or list_checkpoints(path.parent)]
    return f"{path.parent} has {join_few(steps)}. Give one of them." if steps and re.search(r"\d", path.name) else ""


def is_run_or_checkpoint(path: Path) -> bool:
    """Return whether a path is the folder of a run, a checkpoint, or a folder of either lmtrain's or Hugging Face's
    checkpoints.
    """
    has_files = any((path / name).is_file() for name in (MANIFEST, CONFIG))
    return is_run(path) or has_files or latest_checkpoint(path) is not None


def checkpoint_of_step(run: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step in the folder of a run or of checkpoints. Raise MissingInputError,
    with the steps that there are, if it has no such checkpoint, and UsageError if the folder is none of a run.
    """
    folder = run / CHECKPOINTS if (run / CHECKPOINTS).is_dir() else run
    checkpoints = {step_from_name(path.name): path for path in _step_folders(folder)}
    if step in checkpoints:
        return checkpoints[step]
    if not checkpoints and not is_run(run):
        raise UsageError(
            f"step={step} chooses a checkpoint of a run, and {run} is not the folder of a run. Leave step out, or give "
            "the folder that was run.dir."
        )
    steps = join_few(map(str, checkpoints), max_shown=20)
    way_out = f"Give one of these steps: {steps}." if steps else "The run has saved none yet."
    raise MissingInputError(f"{run} has no checkpoint of step {step}. {way_out}")


def is_best(path: Path) -> bool:
    """Return whether a path is RUN@best and no folder of that name exists."""
    return path.name.endswith(BEST_SUFFIX) and not path.exists()


def best_checkpoint(run: Path) -> Path:
    """Return the path of the best checkpoint in the folder of the run `run`: the one with the best value of the measure
    that the run's setting checkpoint.best_by names. Raise MissingInputError if no checkpoint has a value.
    """
    by_step = {step_from_name(path.name) or 0: path for path in list_checkpoints(run / CHECKPOINTS)}
    ranked = rank_checkpoints(by_step, score_by_step(read_metrics(run / METRICS), ranking_measure(run)))
    if not ranked:
        raise MissingInputError(
            f"{run}{BEST_SUFFIX} does not exist, because no checkpoint of {run} has a value of {ranking_measure(run)}. "
            f"Give a checkpoint by name, as in {run / CHECKPOINTS}/step_00001000, or {run} for the newest."
        )
    return ranked[0]


def new_leftover_path(folder: Path, step: int, kind: str = "tmp") -> Path:
    """Return an unused path for a temporary folder, which `clear_leftovers` removes if a killed process leaves it.

    `kind` is "tmp", or "replaced" for a checkpoint that is being replaced.
    """
    paths = (leftover_path(folder, step, (os.getpid(), number), kind) for number in _attempt_numbers)
    return next(path for path in paths if not path.exists())


def leftover_path(folder: Path, step: int, numbers: Sequence[int], kind: str = "tmp") -> Path:
    """Return the path of a temporary folder from its two numbers, process id and attempt, which ranks exchange."""
    process, attempt = numbers
    return folder / f"{step_folder_name(step)}.{kind}-{process}-{attempt}"


def leftover_numbers(path: Path) -> tuple[int, int]:
    """Return the process id and the attempt in a temporary folder's name."""
    process, attempt = path.name.rpartition(".")[2].split("-")[1:]
    return int(process), int(attempt)


def check_free_space(folder: Path, need_bytes: int) -> None:
    """Raise StorageError if the disk that holds a folder has less than the `need_bytes` free that a checkpoint needs.
    """
    have_bytes = free_bytes(folder)
    if have_bytes < need_bytes:
        raise StorageError(
            f"A checkpoint in {folder} needs {format_bytes(need_bytes)}, but the disk has only "
            f"{format_bytes(have_bytes)} free. Free some space."
        )


def clear_leftovers(folder: Path) -> list[str]:
    """Remove the temporary folders that killed processes have left in `folder`, a folder of checkpoints, and return
    their names. Return an empty list if there are none, or no such folder.

    A checkpoint that was moved aside for its replacement gets its name back if the replacement never took its place.
    Only the owner of the run's lock may call this, with no save in flight.
    """
    if not folder.is_dir():
        return []
    cleared = []
    with storage_errors(folder, "Cleaning up"):
        for path in sorted(folder.iterdir()):
            match = _LEFTOVER.fullmatch(path.name)
            if match is None or path.is_symlink():
                continue
            home = folder / match[1]
            if match[2] == "replaced" and not home.exists():
                os.rename(path, home)
            else:
                shutil.rmtree(path)
            cleared.append(path.name)
    return cleared


def prune_checkpoints(
    folder: Path, keep_last: int | Literal["all"], saved: Path | None = None, keep_every_steps: int | None = None, *,
    keep_best: int = 0, scores: Mapping[int, float] | None = None, keep_steps: Collection[int] = (),
) -> list[str]:  # fmt: skip
    """Remove old checkpoints from `folder`, and return the names of the removed. These stay: the `keep_last` newest (at
    least one), `saved`, those whose step is a multiple of `keep_every_steps` or in `keep_steps`, the `keep_best` with
    the highest `scores` (step -> score), and those from which another run was started that has not saved a checkpoint
    of its own yet.

    A checkpoint whose manifest cannot be read is neither counted nor removed: it may be needed to find the cause.
    `saved` need not be the newest: a run that went back to an earlier step saves below later ones.
    """
    if keep_last == "all":
        return []
    removed = []
    with storage_errors(folder, "Pruning"):
        checkpoints = {int(path.name.removeprefix("step_")): path for path in list_checkpoints(folder)}
        best = rank_checkpoints(checkpoints, scores or {})[:keep_best]
        old = list(checkpoints.items())[: -max(1, keep_last)]
        branched = {name for _, name in waiting_branches(folder.parent)} if old else set()
        for step, path in old:
            for_good = step in keep_steps or (keep_every_steps is not None and step % keep_every_steps == 0)
            if for_good or path == saved or path in best or path.name in branched or path.is_symlink():
                continue  # because: a link was made by a user, and its target is not ours to remove
            # because: a kill or a power cut in the removal must not leave half a checkpoint under a checkpoint's name
            leftover = new_leftover_path(folder, step)
            os.rename(path, leftover)
            fsync_dir(folder)
            fault_point("ckpt.prune")
            shutil.rmtree(leftover)
            removed.append(path.name)
    return removed
