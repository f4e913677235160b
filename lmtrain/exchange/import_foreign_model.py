"""Import another program's model folder as a checkpoint, whatever its format.

Called by `lmtrain import` and by a run whose checkpoint.init_from names such a folder. The formats are in the folders
beside this file; detect_model_folder_format.py says which of them a folder has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.find_and_prune import clear_leftovers, latest_checkpoint
from lmtrain.errors import OutputError
from lmtrain.exchange.detect_model_folder_format import Program, identify_source
from lmtrain.exchange.huggingface.compare_with_transformers import check_import
from lmtrain.exchange.huggingface.import_and_export import check_settings, import_hf
from lmtrain.exchange.megatron.import_and_export import import_megatron
from lmtrain.exchange.stream_tensors_to_disk import Report
from lmtrain.runfolder.folder_reader import is_run
from lmtrain.runtime.files.atomic_files import folder_lock, remove_empty_folders


def import_folder(
    source: Path,
    output: Path,
    *,
    program: Program | None = None,
    tokenizer: Path | None = None,
    overrides: Mapping[str, object] | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """Import the model folder `source` as a checkpoint in the folder `output`, and return the facts to report, such as
    the checkpoint's path. `program` is the program that wrote it, None to find out; `tokenizer` is the path of a
    tokenizer to use in place of the folder's; `overrides` are model settings that the user gives, by key. `report` is
    called with bytes done and bytes in all. Raise OutputError if `output` holds a checkpoint already.
    """
    found = identify_source(source, program)
    if output.resolve().is_relative_to(source.resolve()) or is_run(output):
        place = "the folder of a run" if is_run(output) else f"in the folder {source}, which is only read"
        raise OutputError(f"--output {output} is {place}. Choose another folder.")
    with _locked_output(output):
        if latest_checkpoint(output) is not None:
            raise OutputError(f"--output {output} holds a checkpoint already. Choose another folder.")
        facts = _import_checked(found.program, source, output, tokenizer, overrides or {}, report)
    return {"source": str(source), "found": str(found)} | facts


def import_once(
    source: Path, output: Path, tokenizer: Path | None, overrides: Mapping[str, object], report: Report
) -> Path:
    """Return the path of the checkpoint in the folder `output`; if there is none yet, import it from the folder
    `source` first. Several processes may call this at once: one imports while the others wait. The other parameters are
    those of `import_folder`.
    """
    found = identify_source(source)
    with _locked_output(output):
        if (checkpoint := latest_checkpoint(output)) is not None:
            return checkpoint
        facts = _import_checked(found.program, source, output, tokenizer, overrides, report)
    return Path(facts["checkpoint"])


def _import_checked(
    program: Program, source: Path, output: Path, tokenizer: Path | None, overrides: Mapping[str, object],
    report: Report | None,
) -> dict[str, Any]:  # fmt: skip
    """Import the folder `source` and return the facts to report. A Hugging Face folder is first checked by comparing
    lmtrain's logits with those of transformers, if that is installed; Megatron-LM is never run. The parameters are
    those of `import_folder`.
    """
    if program == "megatron":
        return import_megatron(source, output, tokenizer=tokenizer, overrides=overrides, report=report) | {
            "compared_with": "nothing: Megatron-LM is not run here"
        }
    check_settings(overrides)
    checked = check_import(source, overrides.get("dropout"))
    return import_hf(source, output, tokenizer=tokenizer, overrides=overrides, report=report) | checked


@contextmanager
def _locked_output(output: Path) -> Iterator[None]:
    """Context manager: hold the lock of `output`, the folder that an import writes to, and remove what killed imports
    left in it. If the block raises, folders that did not exist before are removed if they are empty.
    """
    missing = [folder for folder in (output, *output.parents) if not folder.exists()]
    try:
        with folder_lock(output, on_wait=lambda holder: None):
            clear_leftovers(output)
            yield
    except BaseException:
        remove_empty_folders(missing)
        raise
