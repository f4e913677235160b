"""The format of a checkpoint on disk: file names, types and manifest. Torch-free; independent of layouts and models.

A checkpoint is a folder step_00001000/ with
  rank_00000.safetensors   the pieces of one rank
  rank_00000.blocks.json   the SHA-256 of each of that file's 4 MiB blocks
  tokenizer.json, ...      extra files that are needed to use the model
  manifest.json            sizes and root hashes of all these, each tensor's place, the run's state; its own digest
The manifest is written last and the folder takes its name last, so that a folder of that name is complete.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from reprlib import repr as brief_repr  # because: a value in a message may be of any length
from typing import Any

from lmtrain.checkpoint.disk.tensor_slice_geometry import Box, cover_problem
from lmtrain.errors import CheckpointError
from lmtrain.runtime.files.atomic_files import MAX_JSON_BYTES, is_safe_name, json_size_problem

FORMAT = "lmtrain checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
BLOCK_BYTES = 4 << 20  # of a hash block: each block of a file has a SHA-256 of its own
MAX_MANIFEST_BYTES = 256 << 20
MAX_PIECES = 1_000_000  # because: the manifest lists them all, with about 250 bytes each
_DATA_PER_BYTE = 64  # a manifest beyond MAX_JSON_BYTES may have a byte for so many bytes of tensors
MAX_AXES = 8
MAX_NAME_LENGTH = 500
MAX_KEY_LENGTH = 700  # a name and the piece's offset
MAX_FILE_BYTES = 256 << 20  # of a file that is read as a whole
SLACK_BYTES = 1 << 20  # for a checkpoint's folder and the file system's records
_ROUNDED_BYTES = 16 << 10  # for each rank: the last blocks of its files are rounded up by the file system
# safetensors' names of types, and the names that torch and numpy share
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
FEWER_PIECES = (
    "Save fewer pieces: use a smaller parallel.tp, or a smaller parallel.dp_shard with a larger parallel.dp_replicate."
)
_CODES = {name: code for code, name in DTYPES.items()}
_HEX = re.compile(r"[0-9a-f]{64}")
_MAX_ELEMENTS = 1 << 56
_MAX_COUNT = 10**18


class NewerFormatError(CheckpointError):
    """Raised for a checkpoint that is not damaged but was written by a later version of this program."""


def dtype_code(tensor: Any) -> str:
    """Return the safetensors name, such as "F32", of the type of a torch tensor or numpy array. Raise CheckpointError
    for a type that a checkpoint cannot hold.
    """
    # because: numpy's name leaves out the byte order, and torch's types have no name, only their text
    name = getattr(tensor.dtype, "name", None) or str(tensor.dtype).removeprefix("torch.")
    if name not in _CODES:
        raise CheckpointError(f"A checkpoint cannot hold a tensor of type {name}. Use one of {', '.join(_CODES)}.")
    return _CODES[name]


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def blocks_file(name: str) -> str:
    return f"{name.removesuffix('.safetensors')}.blocks.json"


def overhead_bytes(num_pieces: int, num_key_chars: int, data_bytes: int, num_ranks: int = 1) -> int:
    """Return an upper estimate of the bytes of headers, block lists and manifest in addition to the tensors.

    `num_key_chars` is the length of all pieces' keys together.
    """
    return 3 * (num_key_chars + 200 * num_pieces) + 80 * (data_bytes // BLOCK_BYTES) + num_ranks * _ROUNDED_BYTES


@dataclass(frozen=True, slots=True)
class FileEntry:
    """The manifest's entry of a file."""
    size: int
    root: str  # SHA-256 of the digests of the file's blocks


@dataclass(frozen=True, slots=True)
class PieceEntry:
    """The manifest's entry of a piece, a rectangular part of a tensor: its file, its key in the file and its box in the
    tensor.
    """

    file: str
    key: str
    box: Box


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The manifest's entry of a tensor."""
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[PieceEntry, ...]


@dataclass(frozen=True)
class Manifest:
    """The contents of manifest.json."""

    step: int
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    state: dict[str, Any]
    digest: str = field(default="", compare=False)  # set if the manifest was read from a file


def encode_manifest(manifest: Manifest) -> bytes:
    """Return a manifest as the text of manifest.json, with a line for each file and each tensor. Raise CheckpointError
    if it would be too large to be read again.
    """
    value: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "state": manifest.state,
        "files": {name: asdict(file) for name, file in manifest.files.items()},
        "tensors": {name: _encode_tensor(tensor) for name, tensor in manifest.tensors.items()},
    }
    value["digest"] = digest_of(value)
    lines = []
    for key, entry in value.items():
        if key in ("files", "tensors"):
            inner = ",\n".join(_json_line(name, v) for name, v in entry.items())
            lines.append(f'"{key}": {{\n{inner}\n}}')
        else:
            lines.append(f'"{key}": {json.dumps(entry, allow_nan=False)}')
    # because: without a newline at the end there is no byte whose loss could go unnoticed
    text = ("{\n" + ",\n".join(lines) + "\n}").encode()
    if problem := json_size_problem(text, max_manifest_bytes(sum(file.size for file in manifest.files.values()))):
        raise CheckpointError(
            f"The manifest of the checkpoint of step {manifest.step} would be too large to be read: {problem}. "
            f"{FEWER_PIECES}"
        )
    return text


def manifest_line(name: str, entry: TensorEntry | FileEntry) -> str:
    """Return the line that a tensor or a file adds to a manifest."""
    return _json_line(name, asdict(entry) if isinstance(entry, FileEntry) else _encode_tensor(entry)) + ",\n"


def _json_line(name: str, value: dict[str, Any]) -> str:
    return f"  {json.dumps(name)}: {json.dumps(value)}"


def max_manifest_bytes(data_bytes: int) -> int:
    """Return the size limit in bytes of a manifest of `data_bytes` of tensors."""
    return max(MAX_JSON_BYTES, min(MAX_MANIFEST_BYTES, data_bytes // _DATA_PER_BYTE))


def check_num_pieces(num_pieces: int) -> None:
    """Raise CheckpointError if a checkpoint would have more pieces (separately stored parts of tensors) than a manifest
    may list. Call it before anything is written.
    """
    if num_pieces > MAX_PIECES:
        raise CheckpointError(
            f"The checkpoint would hold {num_pieces:,} pieces of tensors; at most {MAX_PIECES:,} are allowed. "
            f"{FEWER_PIECES}"
        )


def _encode_tensor(tensor: TensorEntry) -> dict[str, Any]:
    return {
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "pieces": [
            {"file": p.file, "key": p.key, "offset": list(p.box.offset), "shape": list(p.box.shape)}
            for p in tensor.pieces
        ],
    }


def digest_of(value: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest: of the canonical JSON of `value`, the dict in manifest.json, without "digest".
    """
    rest = {key: v for key, v in value.items() if key != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def decode_manifest(value: Any, where: object) -> Manifest:
    """Check `value`, the parsed JSON of manifest.json, completely and return it as a Manifest. Raise CheckpointError,
    which names `where`, if it is wrong, and NewerFormatError if a newer lmtrain has written it.
    """
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise CheckpointError(f"{where} is not the manifest of an lmtrain checkpoint. Check the path.")
    version: Any = value.get("version")
    if is_count(version) and version > VERSION:
        raise NewerFormatError(
            f"{where} has format version {version}, but this lmtrain reads up to {VERSION}. Install a newer lmtrain."
        )
    try:
        _require(value.get("digest") == digest_of(value), "its digest is wrong, so it is damaged or was edited")
        files = {name: _decode_file(name, entry) for name, entry in value["files"].items()}
        tensors = {name: _decode_tensor(name, entry, files) for name, entry in value["tensors"].items()}
        _require(is_count(version) and version >= 1, "its version is not a whole number from 1")
        _require(is_count(value["step"]), "its step is not a whole number from 0")
        _require(isinstance(value["state"], dict), "its state is not a JSON object")
        _check_pieces(tensors, files)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{where} cannot be trusted: {reason}. Restore it from a copy.") from error
    return Manifest(value["step"], files, tensors, value["state"], value["digest"])


def _decode_file(name: str, entry: Any) -> FileEntry:
    _require(is_safe_name(name) and name != MANIFEST, f"{brief_repr(name)} is not a plain file name")
    _require(is_count(entry["size"]), f"the size of {name} is not a number from 0")
    is_hash = isinstance(entry["root"], str) and bool(_HEX.fullmatch(entry["root"]))
    _require(is_hash, f"{name} has no SHA-256 as its root")
    return FileEntry(entry["size"], entry["root"])


def _decode_tensor(name: str, entry: Any, files: dict[str, FileEntry]) -> TensorEntry:
    _require(_is_name(name), f"{brief_repr(name)} is not the name of a tensor")
    dtype, shape = entry["dtype"], _decode_sizes(entry["shape"])
    _require(dtype in ITEM_BYTES, f"{brief_repr(dtype)} is not a tensor type")
    pieces = []
    for piece in entry["pieces"]:
        file, key = piece["file"], piece["key"]
        if file not in files:
            raise ValueError(f"a piece of {name} is in the file {brief_repr(file)}, which the manifest does not list")
        if not _is_name(key, MAX_KEY_LENGTH):
            raise ValueError(f"a piece of {name} has the invalid key {brief_repr(key)}")
        pieces.append(PieceEntry(file, key, Box(_decode_sizes(piece["offset"]), _decode_sizes(piece["shape"]))))
    problem = cover_problem(shape, [piece.box for piece in pieces])
    _require(problem is None, f"{name} of shape {list(shape)} is not complete: {problem}")
    return TensorEntry(dtype, shape, tuple(pieces))


def _decode_sizes(value: Any) -> tuple[int, ...]:
    if not (isinstance(value, list) and len(value) <= MAX_AXES and all(is_count(v) for v in value)):
        raise ValueError(f"the shape or offset {brief_repr(value)} is not a short list of whole numbers from 0")
    # because: numpy and torch refuse products beyond 63 bits even where a zero makes the tensor empty
    if math.prod(max(v, 1) for v in value) > _MAX_ELEMENTS:
        raise ValueError(f"the shape or offset {brief_repr(value)} is larger than any tensor")
    return tuple(value)


def _check_pieces(tensors: dict[str, TensorEntry], files: dict[str, FileEntry]) -> None:
    """Raise ValueError if two pieces (stored parts of tensors) in one file have the same key, or if a file has fewer
    bytes than its pieces together. `tensors` and `files` are the entries of the manifest by name.
    """
    keys: set[tuple[str, str]] = set()
    piece_bytes: Counter[str] = Counter()
    for tensor in tensors.values():
        for piece in tensor.pieces:
            _require((piece.file, piece.key) not in keys, f"two pieces share the key {piece.key!r}")
            keys.add((piece.file, piece.key))
            piece_bytes[piece.file] += piece.box.volume * ITEM_BYTES[tensor.dtype]
    for name, size in piece_bytes.items():
        _require(size <= files[name].size, f"{name} has {files[name].size} bytes, but its pieces have {size}")


def _is_name(value: Any, max_length: int = MAX_NAME_LENGTH) -> bool:
    return isinstance(value, str) and 0 < len(value) <= max_length and value.isprintable()


def is_count(value: Any) -> bool:
    """Return whether a value that was read is a valid count."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_COUNT


def _require(condition: bool, rule: str) -> None:
    """Raise ValueError with the text `rule` if a condition is false."""
    if not condition:
        raise ValueError(rule)
