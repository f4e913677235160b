"""The lineage of a run that starts: from which checkpoints of other runs it descends, and whether its parent is still
the one that it began from. Torch-free.

Called by preflight. The lineage is recorded in the run's folder at its first start, and in each of its checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.disk.checkpoint_format import MANIFEST
from lmtrain.checkpoint.find_and_prune import BEST_SUFFIX, load_manifest
from lmtrain.errors import CheckpointError
from lmtrain.runfolder.file_names import CHECKPOINTS
from lmtrain.runfolder.lineage import RESUMED, WEIGHTS, Parent, file_sha256, parse_lineage, read_lineage
from lmtrain.runfolder.settings_differences import compare_settings
from lmtrain.train.run_config import RunConfig

# settings that name the parent itself, or become known only with the data
_NO_DIFFERENCES = ("checkpoint.resume", "checkpoint.init_from", "model.vocab_size")


def find_lineage(config: RunConfig, resume_from: Path | None, weights_from: Path | None) -> tuple[Parent, ...]:
    """Return the checkpoints of other runs from which this run descends, oldest first. `resume_from` is the checkpoint
    that it resumes from, `weights_from` the one whose weights it begins with.
    """
    folder = Path(config.run.dir)
    path = resume_from or weights_from
    if path is None or not (path / MANIFEST).is_file():
        return tuple(read_lineage(folder))
    state = load_manifest(path).state
    earlier = parse_lineage(state.get("lineage"), path / MANIFEST)
    is_imported = "data" not in state and "merged" not in state  # from another program
    if path.resolve().is_relative_to(folder.resolve()) or is_imported:
        return tuple(earlier)
    kind = RESUMED if resume_from is not None else WEIGHTS
    return (*earlier, _parent(kind, path, state, config))


def _parent(kind: str, path: Path, state: Mapping[str, Any], config: RunConfig) -> Parent:
    """Return the entry of a lineage for the checkpoint at `path`, whose state is `state`."""
    before, after = (dict(_leaves(settings)) for settings in (state.get("settings", {}), config.to_dict()))
    # because: stages of a branch are there in place of the run's length, and are settings of the branch alone
    differences: dict[str, list[Any]] = compare_settings(before, after)
    added = {key: [None, value] for key, value in after.items() if key.startswith("stages.") and key not in before}
    return Parent.of_checkpoint(
        kind, path, int(state["step"]), file_sha256(path / MANIFEST),
        {key: values for key, values in (differences | added).items() if key not in _NO_DIFFERENCES},
    )  # fmt: skip


def _leaves(settings: Mapping[str, Any], key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for each setting; lists, such as data.datasets, stay whole."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{key}{name}.")
        else:
            yield f"{key}{name}", value


def recorded_parent(config: RunConfig) -> Path | None:
    """Return the checkpoint of another run from which this run has begun, by the record in its folder, if the settings
    still name that run; None for a run that descends from no other. Raise CheckpointError if another checkpoint is in
    its place.
    """
    parents = read_lineage(Path(config.run.dir))
    named = config.checkpoint.init_from or config.checkpoint.resume
    if not parents or named in ("auto", "none"):
        return None
    parent, folder = parents[-1], Path(config.run.dir)
    path = Path(parent.checkpoint)
    if not Path(named.removesuffix(BEST_SUFFIX)).resolve().is_relative_to(parent.folder):
        return None
    digest = file_sha256(path / MANIFEST) if (path / MANIFEST).is_file() else None
    if digest is not None and digest != parent.manifest_sha256:
        raise CheckpointError(
            f"The run in {folder} began from the checkpoint {path}, and another checkpoint is there now: its manifest "
            f"has the SHA-256 {digest[:12]}..., and {parent.manifest_sha256[:12]}... is recorded. "
            f"Restore the checkpoint, or choose another run.dir to begin anew{_way_on(folder)}."
        )
    return path


def _way_on(folder: Path) -> str:
    """Return the clause of a message that says how a run in `folder` goes on without its parent; "" if it cannot."""
    has_own = any((folder / CHECKPOINTS).glob(f"step_*/{MANIFEST}"))
    return "; checkpoint.resume=auto goes on from the run's own checkpoints" if has_own else ""
