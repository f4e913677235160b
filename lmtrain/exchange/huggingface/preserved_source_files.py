"""The small files of an imported Hugging Face folder, which its checkpoint keeps and an export writes. Torch-free.

A checkpoint keeps them as extra files named huggingface.NAME, with hashes like its other files. Resharding copies
extra files, and a run that starts from the checkpoint's weights saves them with its own checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.unopened_model_on_disk import ORIGINAL_PREFIX
from lmtrain.errors import DataError, MissingInputError
from lmtrain.runtime.files.atomic_files import is_safe_name, parse_json, read_bytes
from lmtrain.tokenizer.text_to_ids_and_back import MAX_BYTES, Tokenizer

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP = "tokenizer_config.json", "special_tokens_map.json"
MODEL_FILES = (CONFIG, GENERATION_CONFIG)
_TOKENIZER_FILES = (
    TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, "added_tokens.json", "chat_template.jinja", "chat_template.json",
    "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model",
)  # fmt: skip
_TEMPLATES = "additional_chat_templates"  # a folder of NAME.jinja
_MAX_TEMPLATES = 100


def path_in_folder(folder: Path, name: str) -> Path:
    """Return the path of the file `name` in a Hugging Face folder, whether or not it exists. Raise DataError if it is a
    symbolic link out of the folder, unless into the blobs of the hub's cache.
    """
    path = folder / name
    if path.is_symlink():
        real, home = Path(os.path.realpath(path)), folder.resolve()
        homes = [home, *([home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [])]
        if not any(real.is_relative_to(place) for place in homes):
            raise DataError(f"{path} is a symbolic link out of its folder. Put the file itself in its place.")
    return path


def read_original_files(folder: Path, tokenizer: Tokenizer, tokenizer_path: Path | None) -> dict[str, bytes]:
    """Read the small files of the Hugging Face folder `folder` that an imported checkpoint keeps for a later export;
    return name in the checkpoint -> content. Tokenizer files come from `tokenizer_path` if that is a folder, and are
    left out if they belong to another tokenizer than `tokenizer`; a tokenizer.json is always there. Raise DataError for
    a .json file that holds no JSON object.
    """
    home = tokenizer_path if tokenizer_path is not None and tokenizer_path.is_dir() else folder
    files = _read_files(folder, MODEL_FILES)
    if _is_tokenizer_of(tokenizer, home):
        templates = sorted(path.name for path in (home / _TEMPLATES).glob("*.jinja"))[:_MAX_TEMPLATES]
        files |= _read_files(home, [*_TOKENIZER_FILES, *(f"{_TEMPLATES}/{name}" for name in templates)])
    # because: a checkpoint has no folders
    kept = {ORIGINAL_PREFIX + name.replace("/", "."): data for name, data in files.items()}
    return {name: data for name, data in kept.items() if is_safe_name(name)} | _tokenizer_json(tokenizer)


def _is_tokenizer_of(tokenizer: Tokenizer, folder: Path) -> bool:
    try:
        return Tokenizer.load(folder).fingerprint == tokenizer.fingerprint
    except (DataError, MissingInputError):
        return False


def _read_files(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Return name -> content of those of the files `names` that are in `folder`; missing ones are skipped. Raise
    DataError for a .json file that holds no JSON object.
    """
    files = {}
    for name in names:
        if (folder / name).is_file():
            path = path_in_folder(folder, name)
            files[name] = read_bytes(path, MAX_BYTES)
            if path.suffix == ".json" and not isinstance(parse_json(files[name], path), dict):
                raise DataError(f"{path} holds no JSON object. Get the file again, or remove it.")
    return files


def _tokenizer_json(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return {"tokenizer.json": content} for a checkpoint with this tokenizer: the tokenizer.json that it was loaded
    from, byte for byte, or else the tokenizer converted into that format.
    """
    path = Path(tokenizer.source)
    is_own_format = path.suffix != ".json" or path.name.endswith("vocab.json")
    return {"tokenizer.json": tokenizer.to_bytes() if is_own_format else read_bytes(path, MAX_BYTES)}


def restore_names(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the original files among a checkpoint's extra files (name -> content), by their path in a Hugging Face
    folder.
    """
    names = {name: name.removeprefix(ORIGINAL_PREFIX) for name in files if name.startswith(ORIGINAL_PREFIX)}
    return {path.replace(f"{_TEMPLATES}.", f"{_TEMPLATES}/"): files[name] for name, path in names.items()}


def parse_original(original: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return the content of one of the original JSON files, {} if it is not among them."""
    value = parse_json(original[name], Path(name)) if name in original else {}
    return value if isinstance(value, dict) else {}
