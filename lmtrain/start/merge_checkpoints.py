"""Checkpoints merged into one (`lmtrain merge`): which they are, what is said of them, and the result as plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

from lmtrain.checkpoint.find_and_prune import list_checkpoints, resolve_checkpoint
from lmtrain.checkpoint.merge.average_checkpoint_contents import COPIES, MergedContents, has_moments
from lmtrain.checkpoint.merge.check_parents import check_parents, sort_parents
from lmtrain.checkpoint.merge.merge_coefficients import merge_weights
from lmtrain.checkpoint.read_verified_contents import Contents
from lmtrain.checkpoint.reshard.reshard_tensors import MERGE, write_checkpoint
from lmtrain.checkpoint.reshard.write_target_files import Limits, Report
from lmtrain.config.build_typed_settings import build_settings
from lmtrain.errors import LmtrainError, MissingInputError, UsageError, fill_in, join_few, leave_out, way
from lmtrain.runfolder.file_names import CHECKPOINTS
from lmtrain.runfolder.folder_reader import not_a_run, run_around
from lmtrain.runtime.files.similar_path import missing_path, refuse_lists
from lmtrain.runtime.processes.process_environment import num_usable_cpus
from lmtrain.train.run_config import RunConfig

_MOST_WORKERS = 16  # because: more need more than the default memory, and read no disk faster


def find_checkpoints(checkpoints: Sequence[Path], last: int | None, of: Path | None) -> list[Path]:
    """Return the folders of the checkpoints to merge: those that `checkpoints` names, in that order, or the `last`
    newest of the run folder `of`, oldest first. Raise UsageError unless exactly one of these two ways is used, and
    MissingInputError if the run has fewer than `last`.
    """
    given = [f"--last {last}"] * (last is not None) + [f"--of {of}"] * (of is not None)
    if len(given) == 1 and of is None and len(checkpoints) == 1:
        folder = str(checkpoints[0])
        meant = way("--of", folder, instead_of=(folder, f"{folder}/"))
        raise UsageError(f"{given[0]} needs --of RUN. Use {meant}.")
    if checkpoints and given:
        options = [word.partition(" ")[0] for word in given]
        raise UsageError(
            f"{checkpoints[0]} and {' '.join(given)} both say what to merge. "
            f"{leave_out(*options, shown='Leave ' + ' and '.join(options) + ' out')}, or "
            f"{leave_out(*map(str, checkpoints), shown='give them alone')}."
        )
    if len(given) == 1:
        missing = "--last N" if last is None else "--of RUN"
        raise UsageError(f"{given[0]} needs {missing}. Add {fill_in(*missing.split())}.")
    if of is None or last is None:
        if not checkpoints:
            raise UsageError("No checkpoints are given. Name them, or give --last N --of RUN for the newest of a run.")
        refuse_lists(checkpoints)
        return [resolve_checkpoint(path) for path in checkpoints]
    if not of.is_dir():
        raise MissingInputError(missing_path(of, "Give the folder of a run.", Path.is_dir, option="--of "))
    there = list_checkpoints(of / CHECKPOINTS) or list_checkpoints(of)
    if not there and run_around(of) is not None:
        raise MissingInputError(not_a_run(of, "it holds no checkpoints"))
    if len(there) < last:
        have = f"{len(there)}: {join_few([path.name for path in there])}" if there else "none"
        way_out = f"Use {way('--last', str(len(there)))}" if len(there) > 1 else "Give another run"
        raise MissingInputError(
            f"--last {last} asks for {last} checkpoints, and {of} holds {have}. {way_out}. A run keeps more "
            "checkpoints with checkpoint.keep_last=N or checkpoint.keep_every_steps=N."
        )
    return there[-last:]


def merge_checkpoints(
    paths: Sequence[Path], output: Path, mean: str, moments: Literal["newest", "none"] | None, *, force: bool,
    max_memory: int, workers: int | None, overwrite: bool, warn: Callable[[str], None], report: Report,
) -> dict[str, Any]:  # fmt: skip
    """Write the average of the checkpoints in the folders `paths` to the folder `output`, by the weights that `mean`
    gives them, and return the result as JSON-ready data. The other parameters are those of the command, with
    `max_memory` in bytes; `warn` is called with each warning, `report` while it writes.
    """
    began = perf_counter()
    limits = Limits(max_memory, workers or min(num_usable_cpus(), _MOST_WORKERS), COPIES)
    parents = sort_parents([Contents(path, limits.num_cached_blocks // len(paths)) for path in paths])
    check_parents(parents, force=force)
    keeps_moments = has_moments(parents[-1]) and moments != "none"
    if moments == "newest" and not keeps_moments:
        raise UsageError(
            f"--moments newest has nothing to keep: the newest checkpoint, {parents[-1].path}, holds no optimizer "
            f"state. Use {way('--moments', 'none')}; a run that begins from the merged weights needs a warm-up."
        )
    merged = MergedContents(parents, merge_weights(mean, len(parents)), mean, keeps_moments)
    for warning in _warnings(parents):
        warn(warning)
    result = write_checkpoint(
        merged, output, merged.files(), merged.state(), MERGE, limits, overwrite=overwrite, report=report
    )
    return {
        "checkpoint": str(result.path), "step": merged.manifest.step, "mean": mean,
        "moments": "newest" if keeps_moments else "none",
        "parents": [
            {"checkpoint": str(parent.path), "step": parent.manifest.step, "weight": share}
            for parent, share in zip(parents, merged.shares, strict=True)
        ],
        "left_out": _left_out(merged), "tensors": len(merged.manifest.tensors), "files": result.num_files,
        "bytes": result.num_bytes,
        "bytes_done_before": result.num_bytes if result.was_finished else result.earlier_bytes,
        "seconds": round(perf_counter() - began, 2),
    }  # fmt: skip


def _warnings(parents: Sequence[Contents]) -> Iterator[str]:
    """Yield a warning if there is a single checkpoint, whose mean is itself, if a border between training stages lies
    between the checkpoints, and if they were saved at different learning rates, each computed from the settings in the
    checkpoint. Checkpoints without readable settings are ignored.
    """
    if len(parents) == 1:
        only = parents[0].path
        yield f"warning: {only} is the only checkpoint, and the mean of one is itself: its weights are copied."
    stages = {str(parent.path): stage for parent in parents if (stage := _stage_before(parent)) is not None}
    # because: a run without stages and the first stage of its branch, which repeats it, are the same training
    if len({stage.stage_name if stage.first_step else "" for stage in stages.values()}) > 1:
        words = join_few([f"{stage.stage_name or 'no stage'} at {path}" for path, stage in stages.items()], max_shown=4)
        yield (
            f"warning: the checkpoints are of different training stages: {words}. Their data or settings changed at "
            "the border in between, and the merge goes on with those of the newest."
        )
    last_steps = {str(parent.path): max(parent.manifest.step - 1, 0) for parent in parents}
    rates = {path: stage.learning_rate(last_steps[path]) for path, stage in stages.items()}
    if rates and max(rates.values()) - min(rates.values()) > 1e-9 * max(rates.values()):
        words = join_few([f"{rate:.4g} at {path}" for path, rate in rates.items()], max_shown=4)
        yield (
            f"warning: the learning rates of the checkpoints differ: {words}. A merge stands in for a decay, which "
            "--emulate-decay shapes, if the checkpoints are of a phase of one learning rate."
        )


def _stage_before(contents: Contents) -> RunConfig | None:
    """Return the settings of the stage to which the last step before the checkpoint belonged, or of the whole run if it
    has no stages. Return None if the checkpoint has no settings or this version cannot read them.
    """
    step = max(contents.manifest.step - 1, 0)
    try:
        return build_settings(RunConfig, contents.manifest.state.get("settings")).stage_at(step)
    except LmtrainError:  # because: settings of another version, or none, change a warning, not the merge
        return None


def _left_out(merged: MergedContents) -> dict[str, str]:
    """Return the name of each thing that the merged checkpoint lacks although its parents may have it, such as
    "optimizer state", with the reason.
    """
    averages = dict.fromkeys(merged.averages_left_out, "its average of the run's weights is not merged")
    if merged.keeps_moments:
        return averages
    return averages | {"optimizer state": "a run begins from the weights, with a warm-up: checkpoint.init_from"}
