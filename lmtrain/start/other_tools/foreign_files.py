"""Files of settings that were written for another tool, such as a TOML file of torchtitan: their settings as words.

Called by explain_foreign_line. lmtrain itself reads .yaml files alone, with its own keys.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmtrain.config.setting_origins import iter_leaves
from lmtrain.config.settings_base import show
from lmtrain.config.settings_file import FILE_NAMES
from lmtrain.errors import LmtrainError

_MAX_BYTES = 1 << 18
FILE_SUFFIXES = (".toml", ".json", ".yaml", ".yml")
_OTHER_SUFFIXES = (".toml", ".json")  # of files that are another tool's by their format alone


def file_named(unit: Sequence[str]) -> str | None:
    """Return the file of settings that a typed unit names: a word alone, or the value of an option such as --config.
    Return None if it names none, or one that lmtrain reads as it is.
    """
    option, sign, value = unit[0].partition("=")
    if not sign and len(unit) == 1:
        return unit[0] if unit[0].endswith(FILE_SUFFIXES) and not unit[0].startswith("-") else None
    name = option.lstrip("-+").replace("-", "_").rpartition(".")[2]
    file = value if sign else unit[1]
    return file if name in FILE_NAMES.split() and file.endswith(_OTHER_SUFFIXES) else None


def file_words(file: str) -> list[str] | None:
    """Return the settings in a file as words KEY=VALUE, in its order; those that are null are left out. Return None if
    it cannot be read.
    """
    path = Path(file)
    with suppress(OSError, ValueError, LmtrainError):
        if path.stat().st_size > _MAX_BYTES:
            return None
        leaves = iter_leaves(_read(path))
        return [f"{'.'.join(keys)}={_text(value)}" for keys, value in leaves if value is not None]
    return None


def _read(path: Path) -> Mapping[str, Any]:
    if path.suffix == ".toml":
        return tomllib.loads(path.read_text("utf-8"))
    if path.suffix == ".json":
        data = json.loads(path.read_text("utf-8"))
        return data if isinstance(data, dict) else {}
    # because: yaml is slow to import
    from lmtrain.config.strict_yaml import read_yaml

    return read_yaml(path).data


def _text(value: Any) -> str:
    """Return a value as it is typed for an option of another tool."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_text, value))}]"
    return value if isinstance(value, str) else show(value)
