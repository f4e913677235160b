"""`lmtrain reshard CHECKPOINT --to LAYOUT --output DIR`: convert a checkpoint to another parallel layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from lmtrain.cli.checkpoint.print_conversion_result import print_conversion
from lmtrain.cli.screen.print_messages_and_json import print_json, progress
from lmtrain.cli.shared_options import Json, Overwrite, Plugins, parse_size
from lmtrain.errors import UsageError, fill_in, leave_out, shell_quoted
from lmtrain.placement.layout_option_ways import ways_in_layout_option
from lmtrain.placement.parallel_settings import check_layout, parse_layout
from lmtrain.runtime.processes.fault_injection import arm_from_env
from lmtrain.runtime.processes.process_environment import num_usable_cpus

_FOR_OTHER_VERBS = typer.Option(hidden=True)  # options that `lmtrain import` or `export` has; refused with the command


def reshard(
    source: Annotated[Path, typer.Argument(help="A checkpoint, or a run's folder for its latest one.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write.")],
    to: Annotated[str | None, typer.Option(metavar="LAYOUT", help="The new layout, as in tp=2,pp=4.")] = None,
    max_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory that the command may use.")] = "2GiB",
    workers: Annotated[int | None, typer.Option(min=1, help="Number of threads. [default: one per processor]")] = None,
    overwrite: Overwrite = False,
    plugin: Plugins = None,
    as_json: Json = False,
    from_: Annotated[str | None, typer.Option("--from", hidden=True)] = None,
    tokenizer: Annotated[str | None, _FOR_OTHER_VERBS] = None,
    dtype: Annotated[str | None, _FOR_OTHER_VERBS] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", hidden=True)] = None,
) -> None:
    """Convert a checkpoint to another parallel layout.

    The weights, the optimizer state and everything else that a run resumes from are kept. It needs no GPU and little
    memory. SOURCE stays as it is. If the command is killed, the same command continues where it stopped. `lmtrain
    import` and `lmtrain export` convert from and to the formats of Hugging Face and Megatron-LM.
    """
    to = check_options(source, output, to, from_, tokenizer, dtype, set_ or [])
    interrupted = f"{output} is not there yet; the same command goes on where this one was."
    with progress("written", "bytes", interrupted=interrupted) as report:
        from lmtrain.checkpoint.find_and_prune import resolve_checkpoint
        from lmtrain.checkpoint.read_verified_contents import Contents, checked_model, layout_of
        from lmtrain.checkpoint.reshard.reshard_tensors import reshard
        from lmtrain.checkpoint.reshard.write_target_files import Limits, files_of_layout, state_at_layout

        arm_from_env()
        began = perf_counter()
        limits = Limits(parse_size("--max-memory", max_memory), workers or num_usable_cpus())
        contents = Contents(resolve_checkpoint(source), limits.num_cached_blocks)
        manifest, old_layout = contents.manifest, layout_of(contents.manifest.state)
        model = checked_model(contents)
        with ways_in_layout_option("--to", to):
            parallel = parse_layout(to, old_layout)
            # because: whether a sequence is split is no part of the option's layout
            splits_evenly = model.shape.seq_len % max(parallel.tp, 1) == 0
            parallel = replace(parallel, sequence_parallel=parallel.sequence_parallel and splits_evenly)
            check_layout(model, parallel)
        result = reshard(
            contents, output, files_of_layout(manifest, model, parallel),
            state_at_layout(manifest.state, parallel), limits, overwrite=overwrite, report=report,
        )  # fmt: skip
    facts: dict[str, Any] = {
        "checkpoint": str(result.path), "step": manifest.step,
        "from": old_layout.layout_text if old_layout else "not said",
        "to": parallel.layout_text, "processes": parallel.layout.world_size,
        "tensors": len(manifest.tensors), "files": result.num_files, "bytes": result.num_bytes,
        "bytes_done_before": result.num_bytes if result.was_finished else result.earlier_bytes,
        "seconds": round(perf_counter() - began, 2),
    }  # fmt: skip
    return print_json(facts, default=str) if as_json else print_conversion("resharded", facts)


def check_options(
    source: Path, output: Path, to: str | None, from_: str | None, tokenizer: str | None, dtype: str | None,
    settings: Sequence[str],
) -> str:  # fmt: skip
    """Return the layout, the value of --to. Raise UsageError if it is missing, or as refuse_other_programs does."""
    refuse_other_programs(source, output, to, from_, tokenizer, dtype, settings)
    if to is None:
        raise UsageError(f"--to is missing. Give {fill_in('--to', 'LAYOUT')}, sizes such as tp=N,pp=N.")
    return to


def refuse_other_programs(
    source: Path, output: Path, to: str | None, from_: str | None, tokenizer: str | None, dtype: str | None,
    settings: Sequence[str],
) -> None:  # fmt: skip
    """Raise UsageError if the options typed for `lmtrain reshard` ask for the job of `lmtrain import` or `lmtrain
    export`; the message lists the commands to type instead. The arguments are the values of the options of the same
    names, and `settings` those of --set. Return without effect otherwise.
    """
    program, _, sizes = (to or "").partition(",")
    exports, imports = program in ("hf", "megatron"), from_ is not None or bool(tokenizer or settings)
    if dtype and not (exports or imports):
        raise UsageError(
            f"--dtype {dtype} is not an option of lmtrain reshard, which keeps every number as it is. "
            f"{leave_out('--dtype')}; `lmtrain export` writes the weights for another program in another number format."
        )
    if not (exports or imports):
        return
    commands, between = [], source
    if imports:
        between = output if to is None else output.parent / f"{output.name}_imported"
        words = ["import", source, "--output", between, *(["--tokenizer", tokenizer] if tokenizer else [])]
        commands.append([*words, *(word for setting in settings for word in ("--set", setting))])
    if exports:
        layout = ["--layout", sizes] if sizes else []
        commands.append(["export", between, "--to", program, *layout, "--output", output])
        commands[-1] += ["--dtype", dtype] if dtype else []
    elif to is not None:
        commands.append(["reshard", between, "--to", to, "--output", output])
    lines = "".join(f"\n  lmtrain {' '.join(shell_quoted(str(word)) for word in command)}" for command in commands)
    verbs = " and ".join(["`lmtrain import`"] * imports + ["`lmtrain export`"] * exports)
    convert = "convert" if imports and exports else "converts"
    raise UsageError(
        f"lmtrain reshard changes the layout of a checkpoint; {verbs} {convert} from or to another program's format. "
        f"Type{', one after the other' * (len(commands) > 1)}:{lines}"
    )
