"""What a dataset is on disk: the names, the header and the types of Megatron's .bin/.idx, and our sidecar. Torch-free.

Called by format.py, which reads datasets, and writer.py, which makes them. It opens no token file.
"""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.errors import DataError
from lmtrain.runtime import files

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, number of sequences, length of the document index
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}  # 6 and 7 are floats: no tokens
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
SUFFIXES = (".bin", ".idx", ".json", ".tokenizer.json")
CHUNK = 1 << 20  # entries looked at or written at once

Ints = NDArray[Any]


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)  # because: Megatron's own threshold


def part(prefix: Path, suffix: str) -> Path:
    """The file of a dataset with this suffix; a prefix may itself hold dots."""
    return prefix.with_name(prefix.name + suffix)


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """The sidecar. `content_sha256` covers the bytes of P.bin followed by those of P.idx."""

    tokenizer_fingerprint: str
    vocab_size: int
    eod_id: int | None
    max_id: int
    num_documents: int
    num_tokens: int
    num_bytes: int  # UTF-8 bytes of the source texts
    dtype: str
    content_sha256: str
    format: str = "lmtrain dataset"
    version: int = 1

    @classmethod
    def read(cls, path: Path) -> DatasetInfo:
        tree = files.read_json(path)
        if not isinstance(tree, dict) or tree.get("format") != cls.format:
            raise DataError(f"{path} is not a sidecar of a dataset. Move it away if P.bin and P.idx are not ours.")
        if tree.get("version") != cls.version:
            raise DataError(f"{path} has version={tree.get('version')!r}; this lmtrain reads 1. Upgrade lmtrain.")
        for field in dataclasses.fields(cls):
            kinds: tuple[type, ...] = (int,) if str(field.type).startswith("int") else (str,)
            value = tree.get(field.name)
            nullable = field.name == "eod_id" and value is None
            if not nullable and (type(value) not in kinds or (isinstance(value, int) and value < -1)):
                raise DataError(f"{path}: {field.name}={value!r} is not {kinds[0].__name__}. The sidecar is damaged.")
        return cls(**{field.name: tree[field.name] for field in dataclasses.fields(cls)})
