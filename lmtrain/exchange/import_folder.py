"""Import another program's model folder as a checkpoint, whatever its format.

Called by `lmtrain import` and by a run whose checkpoint.init_from names such a folder. The formats are in the folders
beside this file; source_format.py says which of them a folder has.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmtrain.exchange.huggingface.import_and_export import import_hf
from lmtrain.exchange.megatron.import_and_export import import_megatron
from lmtrain.exchange.source_format import Program, identify_source
from lmtrain.exchange.stream_tensors_to_disk import Report


def import_folder(
    source: Path,
    output: Path,
    *,
    program: Program | None = None,
    tokenizer: Path | None = None,
    overrides: Mapping[str, object] | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """Import the folder `source` as a checkpoint in the folder `output`. `program` is the program that wrote it,
    if the user names it; `tokenizer` is the path of a tokenizer that replaces the folder's; `overrides` are model
    settings that the folder does not hold. `report` is called with bytes done and in all. Return the facts that the
    command prints.
    """
    found = identify_source(source, program)
    importer = import_hf if found.program == "hf" else import_megatron
    facts = importer(source, output, tokenizer=tokenizer, overrides=overrides, report=report)
    return {"source": str(source), "found": str(found)} | facts
