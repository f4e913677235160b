"""Import another program's model folder as a checkpoint, whatever its format.

Called by `lmtrain import` and by a run whose checkpoint.init_from names such a folder. The formats are in the folders
beside this file; detect_model_folder_format.py says which of them a folder has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.disk.checkpoint_format import MANIFEST
from lmtrain.checkpoint.find_and_prune import clear_leftovers, latest_checkpoint, load_manifest
from lmtrain.errors import LmtrainError, OutputError
from lmtrain.exchange.check_imported_files_unchanged import source_identity
from lmtrain.exchange.detect_model_folder_format import Program, identify_source
from lmtrain.exchange.huggingface.compare_with_transformers import check_import
from lmtrain.exchange.huggingface.import_and_export import check_settings, import_hf
from lmtrain.exchange.megatron.import_and_export import import_megatron
from lmtrain.exchange.stream_tensors_to_disk import Report
from lmtrain.runfolder.folder_reader import is_run
from lmtrain.runtime.files.atomic_files import folder_lock, remove, remove_empty_folders
from lmtrain.runtime.files.existing_output import Found, Kind, check_output, made_from
from lmtrain.tokenizer.text_to_ids_and_back import tokenizer_files


def import_folder(
    source: Path,
    output: Path,
    *,
    program: Program | None = None,
    tokenizer: Path | None = None,
    overrides: Mapping[str, object] | None = None,
    report: Report | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Import the model folder `source` as a checkpoint in the folder `output`, and return the facts to report, such as
    the checkpoint's path. `program` is the program that wrote it, None to find out; `tokenizer` is the path of a
    tokenizer to use in place of the folder's; `overrides` are model settings that the user gives, by key. `report` is
    called with bytes done and bytes in all. If `output` holds that checkpoint already, return only its path. Raise
    OutputError if it holds another one, unless `overwrite` is given and that one was imported too.
    """
    found = identify_source(source, program)
    _refuse_place(source, output)
    made = _made_from(source, found.program, tokenizer, overrides or {})
    _check_existing(output, made, overwrite)  # because: a refused import is to leave no lock file
    with _locked_output(output):
        existing, found_there = latest_checkpoint(output), _check_existing(output, made, overwrite)
        if found_there is Found.SAME:
            return {"checkpoint": str(existing)}
        facts = _import_checked(found.program, source, output, tokenizer, overrides or {}, report, made)
        if existing is not None and existing != Path(facts["checkpoint"]):
            remove(existing)
    return {"source": str(source), "found": str(found)} | facts


def _made_from(source: Path, program: Program, tokenizer: Path | None, overrides: Mapping[str, object]) -> str:
    """Return the text about the inputs and options of an import that the checkpoint records."""
    given = [] if tokenizer is None else tokenizer_files(tokenizer)
    return made_from(["import", program, overrides, source_identity(source)], given)


def _refuse_place(source: Path, output: Path) -> None:
    """Raise OutputError if a checkpoint cannot be written to the folder `output`, whatever it holds."""
    place = f"in the folder {source}, which is only read" if output.resolve().is_relative_to(source.resolve()) else ""
    place = "the folder of a run" if is_run(output) else place
    place = "a checkpoint itself" if (output / MANIFEST).exists() else place
    if place:
        raise OutputError(f"--output {output} is {place}. Choose another folder.")


def _check_existing(output: Path, made: str, overwrite: bool) -> Found:
    """Return what the newest checkpoint in the folder `output` is to an import of these inputs and options, `made`."""
    existing = latest_checkpoint(output)
    if existing is None:
        return Found.NOTHING
    return check_output(existing, _IMPORT, overwrite=overwrite, is_same=_imported(existing).get("made_from") == made)


def _imported(checkpoint: Path) -> dict[str, Any]:
    """Return what a checkpoint records of its import, {} if it was not imported or is damaged."""
    with suppress(LmtrainError):
        record = load_manifest(checkpoint).state.get("imported")
        return record if isinstance(record, dict) else {}
    return {}


_IMPORT = Kind("a checkpoint that `lmtrain import` wrote", lambda path: bool(_imported(path)), is_folder=True)


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
    report: Report | None, made: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Import the folder `source` and return the facts to report. A Hugging Face folder is first checked by comparing
    lmtrain's logits with those of transformers, if that is installed; Megatron-LM is never run. The parameters are
    those of `import_folder`; `made` is what the checkpoint records of inputs and options.
    """
    if program == "megatron":
        return import_megatron(
            source, output, tokenizer=tokenizer, overrides=overrides, report=report, made_from=made
        ) | {"compared_with": "nothing: Megatron-LM is not run here"}
    check_settings(overrides)
    checked = check_import(source, overrides.get("dropout"))
    return import_hf(source, output, tokenizer=tokenizer, overrides=overrides, report=report, made_from=made) | checked


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
