"""`lmtrain merge CHECKPOINT... --output DIR`: average the weights of several checkpoints, instead of a decay."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lmtrain.cli.checkpoint.print_conversion_result import print_conversion
from lmtrain.cli.screen.print_messages_and_json import print_json, print_notice, progress
from lmtrain.cli.shared_options import Json, Overwrite, Plugins, parse_size
from lmtrain.errors import UsageError, leave_out
from lmtrain.runtime.processes.fault_injection import arm_from_env

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
    from lmtrain.start.merge_checkpoints import find_checkpoints, merge_checkpoints

    paths = find_checkpoints(checkpoints or [], last, of)
    interrupted = f"{output} is not there yet; the same command goes on where this one was."
    with progress("written", "bytes", interrupted=interrupted) as report:
        arm_from_env()
        facts = merge_checkpoints(
            paths, output, mean, moments, force=force, max_memory=parse_size("--max-memory", max_memory),
            workers=workers, overwrite=overwrite, warn=print_notice, report=report,
        )  # fmt: skip
    return print_json(facts, default=str) if as_json else print_conversion("merged", _for_screen(facts))


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
