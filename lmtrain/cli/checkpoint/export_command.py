"""`lmtrain export CHECKPOINT --to hf|megatron --output DIR`: write a checkpoint's weights for another program."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from lmtrain.cli.checkpoint.print_conversion_result import print_conversion
from lmtrain.cli.screen.print_messages_and_json import print_json, progress, say_already_there
from lmtrain.cli.shared_options import Json, Overwrite, Plugins, Weights
from lmtrain.errors import UsageError, leave_out, way
from lmtrain.runtime.files.existing_output import Found, made_from
from lmtrain.runtime.processes.fault_injection import arm_from_env

EXAMPLES = (
    ("lmtrain export runs/a --to hf --output models/a", "write a folder that transformers loads"),
    ("lmtrain export runs/a --to megatron --layout tp=2,pp=2 --output checkpoints/a", "write the files of four ranks"),
)

_TITLES = {"hf": "exported for Hugging Face", "megatron": "exported for Megatron-LM"}


def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint, a run's folder for its newest one, or RUN@best for its best.")
    ],
    to: Annotated[Literal["hf", "megatron"], typer.Option(help="The program that the folder is for.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write.")],
    layout: Annotated[
        str | None,
        typer.Option(metavar="tp=N,pp=N", help="With --to megatron: its parallel layout. [default: tp=1,pp=1]"),
    ] = None,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        typer.Option(help="Number format of the weights. [default: for hf that of an imported model, else fp32]"),
    ] = None,
    as_iteration: Annotated[
        bool,
        typer.Option("--as-iteration", help="With --to megatron: write iter_NNNNNNN in place of release."),
    ] = False,
    weights: Weights = "model",
    overwrite: Overwrite = False,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Write the weights of a checkpoint for Hugging Face or Megatron-LM.

    The tokenizer and the model's settings are written with them; the optimizer's state is not. A model that came from a
    Hugging Face folder gets that folder's small files back, such as its chat template. A Hugging Face folder is loaded
    again before it gets its name, by transformers too if it is installed and the model fits into memory, and is
    refused if its logits differ. The checkpoint may have any layout and stays as it is.
    """
    sizes = parse_layout(to, layout)
    if to == "hf" and as_iteration:
        without = leave_out("--as-iteration", shown="Leave it out")
        raise UsageError(
            f"--as-iteration names a folder of Megatron-LM, and a Hugging Face folder has no iterations. {without}, or "
            f"use {way('--to', 'megatron')}."
        )
    from lmtrain.checkpoint.disk.checkpoint_format import MANIFEST
    from lmtrain.checkpoint.find_and_prune import resolve_checkpoint
    from lmtrain.exchange.record_of_export import check_export, new_export

    arm_from_env()
    source = resolve_checkpoint(checkpoint)
    made = made_from(["export", to, sizes, dtype, as_iteration, weights], [source / MANIFEST])
    found = check_export(output, to, made, overwrite=overwrite)
    if found is Found.SAME:
        return say_already_there(output, as_json=as_json)
    open_folder = partial(new_export, program=to, made_from=made, replaces=found is Found.OTHER)
    with progress("written", "bytes", interrupted=f"{output} is not there; the same command begins anew.") as report:
        if to == "hf":
            from lmtrain.config.settings_base import facts_of
            from lmtrain.exchange.huggingface.import_and_export import export_hf
            from lmtrain.runfolder.run_facts import facts_of_checkpoint
            from lmtrain.train.run_config import RunConfig, config_of_checkpoint

            facts = export_hf(
                source, output, dtype=dtype, weights=weights, report=report, open_folder=open_folder,
                describe=lambda state: facts_of_checkpoint(config_of_checkpoint(state), state),
                is_path=lambda key: "path" in facts_of(RunConfig, key),
            )  # fmt: skip
        else:
            from lmtrain.exchange.megatron.import_and_export import export_megatron

            facts = export_megatron(
                source, output, tp=sizes.get("tp", 1), pp=sizes.get("pp", 1), dtype=dtype or "fp32",
                weights=weights, as_iteration=as_iteration, report=report, open_folder=open_folder,
            )  # fmt: skip
    return print_json(facts, default=str) if as_json else print_conversion(_TITLES[to], facts)


def parse_layout(to: str, layout: str | None) -> dict[str, int]:
    """Return the sizes that --layout names for the program `to`, {} if it is not given. Raise UsageError if the program
    has no layouts.
    """
    sizes = parse_sizes(layout) if layout is not None else {}
    if to == "hf" and layout is not None:
        raise UsageError(
            f"--layout {layout} cuts weights for the ranks of Megatron-LM, and a Hugging Face folder has no parallel "
            f"layout. {leave_out('--layout', shown='Leave --layout out')}, or use {way('--to', 'megatron')}."
        )
    return sizes


def parse_sizes(text: str) -> dict[str, int]:
    """Parse a layout of Megatron-LM such as "tp=2,pp=2" and return {"tp": 2, "pp": 2}; a key that the text does not
    name is absent. Raise UsageError on another key, a repeated key or a size below 1.
    """
    words = [word.partition("=") for word in text.split(",")]
    sizes = {key: int(size) for key, _, size in words if key in ("tp", "pp") and size.isdecimal() and int(size) > 0}
    if len(sizes) < len(words):
        raise UsageError(
            f"--layout {text} is not a layout that can be exported. Give tp=NUMBER, pp=NUMBER or both, each only "
            "once."
        )
    return sizes
