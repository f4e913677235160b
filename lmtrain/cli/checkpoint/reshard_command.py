"""`lmtrain reshard SOURCE --to ... --output DIR`: convert a checkpoint to another layout, or to or from other programs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lmtrain.cli.screen.print_output import echo, print_json, progress
from lmtrain.cli.shared_options import Json, Plugins, parse_size
from lmtrain.errors import UsageError
from lmtrain.placement.parallel_settings import check_layout, parse_layout
from lmtrain.runtime.files.safe_files import storage_errors
from lmtrain.runtime.processes.fault_injection import arm_from_env
from lmtrain.runtime.processes.process_environment import num_usable_cpus
from lmtrain.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lmtrain.observe.screen.command_progress import ProgressReporter


def reshard(
    source: Annotated[
        Path, typer.Argument(help="A checkpoint, a run's folder for its latest one, or with --from a folder.")
    ],
    output: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write.")],
    to: Annotated[
        str | None,
        typer.Option(
            metavar="LAYOUT|FORMAT", help="A layout, as in tp=2,pp=4; or hf; or megatron, megatron,tp=2,pp=2."
        ),
    ] = None,
    from_: Annotated[
        Literal["hf", "megatron"] | None, typer.Option("--from", help="The program that wrote the folder SOURCE.")
    ] = None,
    max_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory that a change of layout may use.")
    ] = "2GiB",
    workers: Annotated[int | None, typer.Option(min=1, help="Number of threads. [default: one per processor]")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that is already there.")] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="PATH", help="With --from: the tokenizer, if SOURCE has none.")
    ] = None,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"], typer.Option(help="With --to hf or megatron: number format of the weights.")
    ] = "fp32",
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE",
            help="With --from: a model setting that SOURCE does not hold; for hf only dropout=SHARE.",
        ),
    ] = None,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint to another parallel layout, or to or from the format of Hugging Face or Megatron-LM.

    With another layout the weights, the optimizer state and everything else that a run resumes from are kept. It needs
    no GPU and little memory. SOURCE stays as it is. If the command is killed, the same command continues where it
    stopped. With --to hf or megatron only the weights are written, for that program; with --from they are read from its
    folder. Both in one command need disk space for two copies for a while.
    """
    if from_ is None and (set_ or tokenizer):
        raise UsageError(
            f"{'--set' if set_ else '--tokenizer'} only has an effect with --from. Add --from hf or --from megatron, "
            "or leave it out."
        )
    resumes = to is not None and from_ is None and not _is_program(to)
    what_a_restart_does = "goes on where this one was" if resumes else "begins anew"
    interrupted = f"{output} is not there yet; the same command {what_a_restart_does}."
    with progress("written", "bytes", interrupted=interrupted) as report:
        memory_bytes = parse_size("--max-memory", max_memory)

        def write(source: Path) -> dict[str, Any]:
            if to is None:
                raise UsageError("--to is missing. Give a layout such as tp=2,pp=4, or hf, or megatron.")
            if _is_program(to):
                return _export_for_program(source, output, to, dtype, report)
            return _write_for_layout(source, output, to, memory_bytes, workers, overwrite, report)

        if from_ is None:
            facts = write(source)
        elif to is None:
            facts = _import_from_program(from_, source, output, tokenizer, set_ or [], report)
        else:
            if not _is_program(to):  # because: a wrong layout is reported before the import, not after it
                parse_layout(to)
            with _temporary_folder_for(output) as temporary:
                imported = _import_from_program(from_, source, temporary, tokenizer, set_ or [], report)
                facts = {key: value for key, value in imported.items() if key not in ("checkpoint", "bytes")}
                facts |= write(Path(imported["checkpoint"])) | {"from": str(source)}
    return print_json(facts, default=str) if as_json else _print(facts)


def _is_program(to: str) -> bool:
    """Return True if `--to` names another program (hf or megatron) and not a layout."""
    return to.partition(",")[0] in ("hf", "megatron")


@contextmanager
def _temporary_folder_for(output: Path) -> Iterator[Path]:
    """Context manager: yield a temporary folder beside `output`, and so on the same disk, which is removed at the end.
    """
    with storage_errors(output, "Importing for"):
        output.parent.mkdir(parents=True, exist_ok=True)
        folder = TemporaryDirectory(prefix=f".{output.name}.imported-", dir=output.parent)
    with folder as name:
        yield Path(name)


def _write_for_layout(
    source: Path, output: Path, to: str, memory_bytes: int, workers: int | None, overwrite: bool,
    report: ProgressReporter,
) -> dict[str, Any]:
    """Write the checkpoint `source` for the layout `to` (such as "tp=2,pp=4"), or continue an interrupted conversion.
    Return the summary that is printed: path, step, old and new layout, counts, bytes and seconds.
    """
    from lmtrain.checkpoint.find_and_prune import resolve_checkpoint
    from lmtrain.checkpoint.read_verified_contents import Contents, checked_model, layout_of
    from lmtrain.checkpoint.reshard.reshard_tensors import reshard
    from lmtrain.checkpoint.reshard.write_target_files import Limits, files_of_layout, state_at_layout
    from lmtrain.train.layouts.layout_table import layout_words

    arm_from_env()
    began = perf_counter()
    limits = Limits(memory_bytes, workers or num_usable_cpus())
    contents = Contents(resolve_checkpoint(source), limits.num_cached_blocks)
    manifest, old_layout = contents.manifest, layout_of(contents.manifest.state)
    model, parallel = checked_model(contents), parse_layout(to, old_layout)
    check_layout(model, parallel)
    result = reshard(
        contents, output, files_of_layout(manifest, model, parallel),
        state_at_layout(manifest.state, parallel), limits, overwrite=overwrite, report=report,
    )  # fmt: skip
    return {
        "checkpoint": str(result.path), "step": manifest.step,
        "from": layout_words(old_layout) if old_layout else "not said",
        "to": layout_words(parallel), "processes": parallel.layout.world_size,
        "tensors": len(manifest.tensors), "files": result.num_files, "bytes": result.num_bytes,
        "bytes_done_before": result.num_bytes if result.was_finished else result.earlier_bytes,
        "seconds": round(perf_counter() - began, 2),
    }  # fmt: skip


def _export_for_program(source: Path, output: Path, to: str, dtype: str, report: ProgressReporter) -> dict[str, Any]:
    """Write the weights of the checkpoint `source` for Hugging Face or Megatron-LM; `to` is "hf" or, for example,
    "megatron,tp=2". Return the summary that is printed.
    """
    program, _, rest = to.partition(",")
    if program == "hf":
        from lmtrain.exchange.huggingface.import_and_export import export_hf

        if rest:
            raise UsageError(f"--to {to}: a Hugging Face folder has no parallel layout. Use --to hf.")
        return export_hf(source, output, dtype=dtype, report=report)
    pairs = _parse_pairs("--to", rest.split(",") if rest else [], ("tp", "pp"))
    sizes = {key: int(size) for key, size in pairs.items()}
    from lmtrain.exchange.megatron.import_and_export import export_megatron

    return export_megatron(source, output, tp=sizes.get("tp", 1), pp=sizes.get("pp", 1), dtype=dtype, report=report)


def _import_from_program(
    program: str, source: Path, output: Path, tokenizer: Path | None, overrides: list[str], report: ProgressReporter
) -> dict[str, Any]:
    """Convert a folder of Hugging Face or Megatron-LM (`program` is "hf" or "megatron") to a checkpoint. `overrides`
    are the KEY=VALUE texts of --set. Return the summary that is printed.
    """
    values = {key: _parse_value(text) for key, text in _parse_pairs("--set", overrides).items()}
    if program == "hf":
        from lmtrain.exchange.huggingface.import_and_export import import_hf

        return import_hf(source, output, tokenizer=tokenizer, overrides=values, report=report)
    from lmtrain.exchange.megatron.import_and_export import import_megatron

    return import_megatron(source, output, tokenizer=tokenizer, overrides=values, report=report)


def _parse_pairs(option: str, words: list[str], allowed_keys: tuple[str, ...] = ()) -> dict[str, str]:
    """Parse texts of the form KEY=VALUE to a dict. With `allowed_keys`, other keys are refused and values must be whole
    numbers above 0. Raise a UsageError, which names `option`, on a wrong or repeated text.
    """
    pairs = {key: value for key, equals, value in (word.partition("=") for word in words) if equals and value}
    are_numbers = not allowed_keys or all(value.isdecimal() and int(value) > 0 for value in pairs.values())
    if len(pairs) < len(words) or (allowed_keys and not pairs.keys() <= set(allowed_keys)) or not are_numbers:
        form = f"{' or '.join(allowed_keys)}=NUMBER" if allowed_keys else "KEY=VALUE"
        raise UsageError(f"{option} {','.join(words)} is malformed. Write it as {form}, each key only once.")
    return pairs


def _parse_value(text: str) -> Any:
    """Parse a text as JSON; return the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _print(facts: dict[str, Any]) -> None:
    for key, value in facts.items():
        if key == "bytes_done_before" and not value:
            continue
        if "bytes" in key and isinstance(value, int):
            value = format_bytes(value)
        elif key == "seconds":
            key, value = "time", format_seconds(value)
        elif isinstance(value, (int, float)):
            value = f"{value:,}" if isinstance(value, int) else f"{value:.2g}"
        echo(f"{key.removeprefix('num_').replace('_', ' '):18} {value}")
