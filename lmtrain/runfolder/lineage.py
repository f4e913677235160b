"""The lineage of a run: the checkpoints of other runs from which it descends, oldest first. Torch-free.

Written to the run's folder and to its checkpoints when a run begins from another run's checkpoint; read by the commands
that show runs, and by each start of the run.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lmtrain.errors import DataError, LmtrainError
from lmtrain.runfolder.file_names import CHECKPOINTS, LINEAGE, checkpoint_names
from lmtrain.runtime.files.atomic_files import read_json

# kinds of a parent: everything of the checkpoint was taken, its weights alone, or it is the newest of those merged
RESUMED, WEIGHTS, MERGED = "run", "weights", "merge"


@dataclass(frozen=True)
class Parent:
    """A checkpoint from which a run began, or from which a merged checkpoint was made. `differences` are the settings
    that differ: key -> [there, here].
    """

    kind: str
    run: str  # the folder of the run as the user gave it
    path: str  # the same, absolute, without links
    checkpoint: str  # path of the checkpoint, absolute, without links
    step: int
    manifest_sha256: str
    differences: Mapping[str, list[Any]] = field(default_factory=dict)

    @classmethod
    def of_checkpoint(
        cls, kind: str, checkpoint: Path, step: int, manifest_sha256: str, differences: Mapping[str, list[Any]] = {}
    ) -> Parent:
        """Return the entry for the checkpoint at the path `checkpoint`, as the user gave it. A checkpoint outside of a
        run's folder stands for its run itself.
        """
        run = run_of_checkpoint(checkpoint)
        return cls(kind, str(run), str(run.resolve()), str(checkpoint.resolve()), step, manifest_sha256, differences)

    @property
    def folder(self) -> Path:
        """The folder of the run, absolute."""
        return Path(self.path)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as JSON data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Parent:
        """Build a Parent from the dict that `to_dict` returned. Raise ValueError, TypeError or KeyError if `data` is
        malformed.
        """
        texts = {key: data[key] for key in ("kind", "run", "path", "checkpoint", "manifest_sha256")}
        if not all(isinstance(text, str) for text in texts.values()) or type(data["step"]) is not int:
            raise ValueError(f"{data!r} is not the parent of a run")
        differences = data.get("differences", {})
        if not isinstance(differences, dict):
            raise ValueError(f"{differences!r} does not hold differences of settings")
        return cls(**texts, step=data["step"], differences=differences)


def run_of_checkpoint(checkpoint: Path) -> Path:
    """Return the folder of the run that has saved a checkpoint; the checkpoint itself if it is in no run's folder."""
    return checkpoint.parent.parent if checkpoint.parent.name == CHECKPOINTS else checkpoint


def parse_lineage(entries: object, place: Path) -> list[Parent]:
    """Convert `entries`, a run's lineage as a list of dicts from JSON, to Parent objects in the same order; None gives
    []. Raise DataError if it is malformed, with `place` as the name of the file.
    """
    try:
        return [] if entries is None else [Parent.from_dict(entry) for entry in entries]  # type: ignore[attr-defined]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{place} is damaged: its lineage, the list of the checkpoints of other runs from which this run descends, "
            f"is malformed ({error!r}). Restore the file from a copy."
        ) from error


def read_lineage(run: Path) -> list[Parent]:
    """Return the parents that a run's folder records, oldest first; none if it records none."""
    path = run / LINEAGE
    return parse_lineage(read_json(path), path) if path.is_file() else []


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, as hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def waiting_branches(run: Path) -> Iterator[tuple[Path, str]]:
    """Yield (run folder, checkpoint's name) for each other run in the folder of `run` that began from one of the
    checkpoints of `run` and has not saved any of its own yet. Such a run still needs that checkpoint to resume.
    """
    for folder in sorted(run.resolve().parent.iterdir()):
        if not os.path.isfile(folder / LINEAGE):
            continue
        try:
            parents = read_lineage(folder)
        except LmtrainError:  # because: a run whose lineage cannot be read cannot go on either
            continue
        is_of_run = bool(parents) and Path(parents[-1].checkpoint).parent.parent == run.resolve()
        if is_of_run and not checkpoint_names(folder / CHECKPOINTS):
            yield folder, Path(parents[-1].checkpoint).name
