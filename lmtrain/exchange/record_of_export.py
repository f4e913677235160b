"""The record that `lmtrain export` leaves in a folder for another program, by which it knows what it has written.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lmtrain.errors import LmtrainError
from lmtrain.runtime.files.atomic_files import new_folder, read_json, write_json
from lmtrain.runtime.files.existing_output import Found, Kind, check_output

RECORD = "lmtrain_export.json"


def check_export(output: Path, program: str, made_from: str, *, overwrite: bool) -> Found:
    """Return what is at the place of an export for a program; it is the same if its record has this `made_from`. Raise
    OutputError if it must not be replaced.
    """
    recorded = _read(output)
    name = f"a folder that `lmtrain export --to {program}` wrote"
    kind = Kind(name, lambda path: _read(path).get("program") == program, is_folder=True)
    return check_output(output, kind, overwrite=overwrite, is_same=recorded.get("made_from") == made_from)


@contextmanager
def new_export(output: Path, *, program: str, made_from: str, replaces: bool) -> Iterator[Path]:
    """Yield a temporary folder for the files of an export, as `new_folder` does, and add the record to them."""
    with new_folder(output, replaces=replaces) as folder:
        yield folder
        write_json(folder / RECORD, {"program": program, "made_from": made_from})


def _read(output: Path) -> dict[str, Any]:
    """Return the record of an export, {} if the folder has none."""
    with suppress(LmtrainError):
        content = read_json(output / RECORD)
        return content if isinstance(content, dict) else {}
    return {}
