"""`lmtrain merge CHECKPOINT... --output DIR`: average the weights of several checkpoints, instead of a decay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lmtrain.cli.checkpoint.print_conversion_result import print_conversion
from lmtrain.cli.screen.print_messages_and_json import print_json, print_notice, progress
from lmtrain.cli.shared_options import Json, Overwrite, Plugins, parse_size
from lmtrain.errors import LmtrainError, MissingInputError, UsageError, fill_in, join_few, leave_out, way
from lmtrain.runtime.files.similar_path import missing_path, refuse_lists
from lmtrain.runtime.processes.fault_injection import arm_from_env
from lmtrain.runtime.processes.process_environment import num_usable_cpus

if TYPE_CHECKING:
    from lmtrain.checkpoint.merge.average_checkpoint_contents import MergedContents
    from lmtrain.checkpoint.read_verified_contents import Contents
    from lmtrain.train.run_config import RunConfig

_MOST_WORKERS = 16  # because: more need more than the default memory, and read no disk faster
EXAMPLES = (
    ("lmtrain merge --last 6 --of runs/trunk --output runs/merged", "the mean of a run's last six checkpoints"),
    ("lmtrain merge --last 10 --of runs/trunk --emulate-decay sqrt --output runs/merged", "as after a decay, 1 - sqrt"),
    ("lmtrain merge runs/decay_a runs/decay_b --output runs/soup", "two branches, each by its newest checkpoint"),
)


def merge(
    output: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write.")],
    checkpoints: Annotated[
        list[Path] | None,
        typer.Argument(metavar="CHECKPOINT", help="Checkpoints, or runs' folders for their latest ones."),
    ] = None,
    last: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Merge the newest N checkpoints of the run --of.")
    ] = None,
    of: Annotated[Path | None, typer.Option(metavar="RUN", help="The folder of the run for --last.")] = None,
    mean: Annotated[
        str | None,
        typer.Option(
            metavar="MEAN",
            help="How much each checkpoint counts: uniform, linear (the oldest 1, the next 2, ...) or ema:0.9, an "
            "average that begins as the oldest and takes a tenth of each newer one. [default: uniform]",
        ),
    ] = None,
    emulate_decay: Annotated[
        Literal["linear", "sqrt"] | None,
        typer.Option(help="Instead of --mean: weigh the checkpoints as a decay of the learning rate would have done."),
    ] = None,
    moments: Annotated[
        Literal["newest", "none"] | None,
        typer.Option(
            help="Keep the optimizer state of the newest checkpoint, or leave it out. [default: newest, if it has any]"
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Merge checkpoints for which no common ancestor is found.")
    ] = False,
    max_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory that the command may use.")] = "1GiB",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of threads. [default: one per processor, at most 16]")
    ] = None,
    overwrite: Overwrite = False,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Average the weights of several checkpoints of one model, instead of a decay of the learning rate.

    Checkpoints may have any layouts. They are ordered by the samples that their runs had read. The result has the step,
    the data position, the tokenizer and the layout of the newest one, names all of them, and is used like any
    checkpoint. It needs no GPU and little memory. If the command is killed, the same command continues where it
    stopped.
    """
    from lmtrain.checkpoint.merge.merge_coefficients import UNIFORM, decay_mean, parse_mean

    if mean is not None and emulate_decay is not None:
        raise UsageError(
            f"--mean {mean} and --emulate-decay {emulate_decay} both say how much each checkpoint counts. "
            f"{leave_out('--mean', shown='Leave out --mean')} or "
            f"{leave_out('--emulate-decay', shown='--emulate-decay')}."
        )
    mean = decay_mean(emulate_decay) if emulate_decay else parse_mean(mean or UNIFORM)
    paths = find_checkpoints(checkpoints or [], last, of)
    interrupted = f"{output} is not there yet; the same command goes on where this one was."
    with progress("written", "bytes", interrupted=interrupted) as report:
        from lmtrain.checkpoint.merge.average_checkpoint_contents import COPIES, MergedContents, has_moments
        from lmtrain.checkpoint.merge.check_parents import check_parents, sort_parents
        from lmtrain.checkpoint.merge.merge_coefficients import merge_weights
        from lmtrain.checkpoint.read_verified_contents import Contents
        from lmtrain.checkpoint.reshard.reshard_tensors import MERGE, write_checkpoint
        from lmtrain.checkpoint.reshard.write_target_files import Limits

        arm_from_env()
        began = perf_counter()
        workers = workers or min(num_usable_cpus(), _MOST_WORKERS)
        limits = Limits(parse_size("--max-memory", max_memory), workers, COPIES)
        parents = sort_parents([Contents(path, limits.num_cached_blocks // len(paths)) for path in paths])
        check_parents(parents, force=force)
        keeps_moments = has_moments(parents[-1]) and moments != "none"
        if moments == "newest" and not keeps_moments:
            raise UsageError(
                f"--moments newest has nothing to keep: the newest checkpoint, {parents[-1].path}, holds no optimizer "
                f"state. Use {way('--moments', 'none')}; a run that begins from the merged weights needs a warm-up."
            )
        merged = MergedContents(parents, merge_weights(mean, len(parents)), mean, keeps_moments)
        _warn_of_one_checkpoint_or_several_stages(parents)
        _warn_of_learning_rates(parents)
        result = write_checkpoint(
            merged, output, merged.files(), merged.state(), MERGE, limits, overwrite=overwrite, report=report
        )
    facts: dict[str, Any] = {
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
    return print_json(facts, default=str) if as_json else print_conversion("merged", _for_screen(facts))


def find_checkpoints(checkpoints: Sequence[Path], last: int | None, of: Path | None) -> list[Path]:
    """Return the folders of the checkpoints to merge: those that `checkpoints` names, in that order, or the `last`
    newest of the run folder `of`, oldest first. Raise UsageError unless exactly one of these two ways is used, and
    MissingInputError if the run has fewer than `last`.
    """
    from lmtrain.checkpoint.find_and_prune import list_checkpoints, resolve_checkpoint
    from lmtrain.runfolder.file_names import CHECKPOINTS
    from lmtrain.runfolder.folder_reader import not_a_run, run_around

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


def _warn_of_learning_rates(parents: Sequence[Contents]) -> None:
    """Print a warning on stderr if the checkpoints were saved at different learning rates, each computed from the
    settings in the checkpoint. Checkpoints without readable settings are ignored.
    """
    rates = {str(parent.path): rate for parent in parents if (rate := _learning_rate(parent)) is not None}
    if rates and max(rates.values()) - min(rates.values()) > 1e-9 * max(rates.values()):
        words = join_few([f"{rate:.4g} at {path}" for path, rate in rates.items()], max_shown=4)
        print_notice(
            f"warning: the learning rates of the checkpoints differ: {words}. A merge stands in for a decay, which "
            "--emulate-decay shapes, if the checkpoints are of a phase of one learning rate."
        )


def _warn_of_one_checkpoint_or_several_stages(parents: Sequence[Contents]) -> None:
    """Print a warning on stderr if there is a single checkpoint, whose mean is itself, or if a border between training
    stages lies between the checkpoints.
    """
    if len(parents) == 1:
        print_notice(
            f"warning: {parents[0].path} is the only checkpoint, and the mean of one is itself: its weights are copied."
        )
    stages = {str(parent.path): stage for parent in parents if (stage := _stage_before(parent)) is not None}
    # because: a run without stages and the first stage of its branch, which repeats it, are the same training
    if len({stage.stage_name if stage.first_step else "" for stage in stages.values()}) > 1:
        words = join_few([f"{stage.stage_name or 'no stage'} at {path}" for path, stage in stages.items()], max_shown=4)
        print_notice(
            f"warning: the checkpoints are of different training stages: {words}. Their data or settings changed at "
            "the border in between, and the merge goes on with those of the newest."
        )


def _learning_rate(contents: Contents) -> float | None:
    """Return the learning rate of the last training step before the checkpoint, computed from the run's settings in the
    checkpoint. Return None if it has no settings or this version cannot read them.
    """
    stage = _stage_before(contents)
    return None if stage is None else stage.learning_rate(max(contents.manifest.step - 1, 0))


def _stage_before(contents: Contents) -> RunConfig | None:
    """Return the settings of the stage to which the last step before the checkpoint belonged, or of the whole run if it
    has no stages. Return None if the checkpoint has no settings or this version cannot read them.
    """
    from lmtrain.config.build_typed_settings import build_settings
    from lmtrain.train.run_config import RunConfig

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


def _for_screen(facts: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the command's result `facts` for printing: the list `parents` is replaced by a line of text for
    each, under the keys "parent 1", "parent 2", ...
    """
    lines = {
        f"parent {number}": f"weight {parent['weight']:.4f}, step {parent['step']:,}, {parent['checkpoint']}"
        for number, parent in enumerate(facts["parents"], 1)
    }
    first = {key: facts[key] for key in ("checkpoint", "step", "mean", "moments")}
    return first | lines | {key: value for key, value in facts.items() if key not in first and key != "parents"}
