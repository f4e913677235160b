"""`lmtrain import SOURCE --output DIR`: make a checkpoint from a folder of Hugging Face or Megatron-LM."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lmtrain.cli.checkpoint.print_conversion_result import print_conversion
from lmtrain.cli.screen.print_messages_and_json import print_json, progress, say_already_there
from lmtrain.cli.shared_options import Json, Overwrite
from lmtrain.errors import UsageError
from lmtrain.runtime.processes.fault_injection import arm_from_env

EXAMPLES = (
    ("lmtrain import models/gpt2 --output runs/gpt2", "make a checkpoint from a Hugging Face folder"),
    ("lmtrain import checkpoints/gpt --tokenizer gpt2/ --output runs/gpt", "the same from Megatron-LM, which keeps no "
     "tokenizer"),
    ("lmtrain pretrain --from-run runs/gpt2 data.path=data/mine run.dir=runs/mine", "train on from its weights"),
)  # fmt: skip


def import_(
    source: Annotated[Path, typer.Argument(help="A folder of a Hugging Face model or of a Megatron-LM checkpoint.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="The folder for the checkpoint.")],
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="PATH", help="The model's tokenizer, if SOURCE has none or another.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE",
            help="A model setting that SOURCE does not hold; for Hugging Face only dropout=SHARE. Repeatable.",
        ),
    ] = None,
    format_: Annotated[
        Literal["hf", "megatron"] | None,
        typer.Option("--format", help="The program that wrote SOURCE. [default: found from its files]"),
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Make a checkpoint from a model of Hugging Face or Megatron-LM.

    Weights, settings and tokenizer come along; an optimizer does not. If transformers is installed and the model fits
    into memory, both programs compute logits of the same tokens first, and a model whose logits differ is refused. The
    checkpoint can be evaluated, generated from, resharded, exported, and trained on. SOURCE is only read, nothing in
    it is run, and nothing is written unless all of it can be imported.
    """
    overrides = parse_settings(set_ or [])
    arm_from_env()
    interrupted = f"{output} holds no new checkpoint; the same command begins anew."
    with progress("written", "bytes", interrupted=interrupted) as report:
        from lmtrain.exchange.detect_model_folder_format import identify_source

        identify_source(source, format_)  # because: a wrong source is refused before torch is imported
        from lmtrain.exchange.import_foreign_model import import_folder

        facts = import_folder(
            source, output, program=format_, tokenizer=tokenizer, overrides=overrides, report=report,
            overwrite=overwrite,
        )  # fmt: skip
    if "settings" not in facts:
        return say_already_there(Path(facts["checkpoint"]), as_json=as_json)
    return print_json(facts, default=str) if as_json else print_conversion(f"imported {facts['found']}", facts)


def parse_settings(words: Sequence[str]) -> dict[str, Any]:
    """Parse texts of the form KEY=VALUE and return them as a dict. A value that is valid JSON is parsed; any other
    value stays a text. Raise UsageError if a text does not have this form or a key occurs twice.
    """
    pairs = [word.partition("=")[::2] for word in words]
    keys = [key for key, _ in pairs]
    if wrong := [
        word for word, (key, value) in zip(words, pairs, strict=True) if not (key and value) or keys.count(key) > 1
    ]:
        raise UsageError(f"--set {' --set '.join(wrong)} is malformed. Give KEY=VALUE, each key only once.")
    return {key: _parse_value(value) for key, value in pairs}


def _parse_value(text: str) -> Any:
    """Parse a text as JSON; return the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text
