"""On-disk format of a dataset: names, header and dtypes of Megatron's .bin/.idx, and lmtrain's sidecar. Torch-free.

Called by indexed_dataset.py, the reader, and dataset_writer.py, the writer. This file opens no token file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.errors import DataError
from lmtrain.runtime.files import safe_files

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, number of sequences, length of the document index
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}  # 6 and 7 are float dtypes
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
SUFFIXES = (".bin", ".idx", ".json", ".tokenizer.json", ".blocks")
CHUNK = 1 << 20  # entries checked or written at once
_HASH_KEY = "sidecar_sha256"

Ints = NDArray[Any]


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype for ids below vocab_size: uint16 or int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)  # because: Megatron uses the same threshold


def dataset_file(prefix: Path, suffix: str) -> Path:
    """Return the dataset's file with this suffix; the prefix itself may contain dots."""
    return prefix.with_name(prefix.name + suffix)


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """Content of the sidecar. `content_sha256` covers the bytes of P.bin followed by those of P.idx."""

    tokenizer_fingerprint: str
    vocab_size: int
    eod_id: int | None
    max_id: int
    num_documents: int
    num_tokens: int
    num_bytes: int  # UTF-8 bytes of the source texts
    dtype: str
    content_sha256: str
    blocks_sha256: str | None = None  # hash of P.blocks; None in older sidecars
    tokenizer_sha256: str | None = None  # hash of P.tokenizer.json; None in older sidecars
    sidecar_sha256: str | None = None  # hash of all other keys; None in older sidecars
    format: str = "lmtrain dataset"
    version: int = 1

    def with_hash(self) -> DatasetInfo:
        """Return a copy with `sidecar_sha256`, the hash of all other fields."""
        return dataclasses.replace(self, sidecar_sha256=hash_without(dataclasses.asdict(self)))

    def to_bytes(self) -> bytes:
        """Return the content of P.json."""
        return (json.dumps(dataclasses.asdict(self), indent=1) + "\n").encode()

    @classmethod
    def read(cls, path: Path) -> DatasetInfo:
        """Read the .json sidecar of a dataset, which describes it. Raise DataError if it is damaged or of an unknown
        version.
        """
        tree = safe_files.read_json(path)
        if not isinstance(tree, dict) or tree.get("format") != cls.format:
            raise DataError(f"{path} does not describe a dataset of lmtrain. Move it away if another tool wrote it.")
        if tree.get("version") != cls.version:
            raise DataError(f"{path} has version={tree.get('version')!r}; this lmtrain reads only 1. Upgrade lmtrain.")
        for field in dataclasses.fields(cls):
            kinds: tuple[type, ...] = (int,) if str(field.type).startswith("int") else (str,)
            value = tree.get(field.name)
            nullable = str(field.type).endswith("None") and value is None
            if not nullable and (type(value) not in kinds or (isinstance(value, int) and not -1 <= value < 2**63)):
                type_text = "a whole number" if kinds == (int,) else "a text"
                raise DataError(f"{path}: {field.name}={value!r} is not {type_text}. Restore the damaged file.")
        _check_hash(path, tree)
        values: dict[str, Any] = {field.name: tree.get(field.name) for field in dataclasses.fields(cls)}
        info = cls(**values)
        for name, value in (("max_id", info.max_id), ("eod_id", info.eod_id)):
            if value is not None and value >= info.vocab_size:
                raise DataError(
                    f"{path} is damaged: {name}={value} is outside vocab_size={info.vocab_size}. Restore it, or make "
                    "the dataset again."
                )
        return info


def hash_without(tree: dict[str, Any], hash_key: str = _HASH_KEY) -> str:
    """Return the SHA-256 of all keys except `hash_key`: of their JSON with sorted keys and without spaces."""
    rest = {key: value for key, value in tree.items() if key != hash_key}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _check_hash(path: Path, tree: dict[str, Any]) -> None:
    """Raise DataError if the .json sidecar of a dataset does not have the hash that its key `sidecar_sha256` states.
    `tree` is its JSON object and `path` its file, for the message.

    A sidecar without a hash is accepted only if it is an old one: all old keys and no newer ones.
    """
    # because: a sidecar must not pass as an old one when a letter in the name of its hash key is damaged
    new_keys = {"blocks_sha256", "tokenizer_sha256", _HASH_KEY}
    old_keys = {field.name for field in dataclasses.fields(DatasetInfo)} - new_keys
    stored, newer_keys = tree.get(_HASH_KEY), sorted(set(tree) - old_keys)
    if stored is None and not newer_keys:
        if missing := sorted(old_keys - set(tree)):
            raise DataError(
                f"{path} is damaged: it has no key {missing[0]}. Restore it, or make the dataset again."
            )
    elif stored != hash_without(tree):
        cause = "it has no hash of itself" if stored is None else "it does not match its own hash"
        raise DataError(f"{path} is damaged: {cause}. Restore it, or make the dataset again.")
