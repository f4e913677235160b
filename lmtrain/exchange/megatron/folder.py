"""A Megatron-LM checkpoint as data: its arguments, and its weights by our names, still in the order of its ranks.

Called by the Megatron import. Two formats: a file a rank (`torch`), cut by tensor and pipeline parallelism, and the
distributed one (`torch_dist`), whose tensors are whole and lie in pieces. Nothing in them is run.
"""

from __future__ import annotations

import io
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmtrain.checkpoint.disk.boxes import Box, cover_problem, intersect
from lmtrain.checkpoint.disk.format import DTYPES, ITEM_BYTES
from lmtrain.errors import CheckpointError, MissingInputError, shorten
from lmtrain.exchange.megatron.names import LAYER, our_name
from lmtrain.exchange.torch_files.pickle_data import (
    MAX_DEPTH,
    MAX_PICKLE_BYTES,
    Global,
    Made,
    checked_text,
    read_pickle,
)
from lmtrain.exchange.torch_files.reader import StoredTensor, TorchFile
from lmtrain.runtime.files.files import is_safe_name, read_bytes

TRACKER = "latest_checkpointed_iteration.txt"
RANK_FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_([0-9]{2,5})(?:_([0-9]{3,5}))?(_[0-9]{3,5})?")
_CODES = {f"torch.{name}": code for code, name in DTYPES.items()}
_MASTER = re.compile(r"(?:chained_0\.)?optimizer\.state\.fp32_param\.(.+)")
_MAX_LAYERS = 1 << 16
_MAX_NODES = 1 << 18  # of the dicts that hold a stage's tensors
_MAX_NAME = 1000
_MAX_ITERATION = 10**15
_MAX_AXES = 8
_VERSIONS = (0, 1, 2, 3)


@dataclass(frozen=True)
class Part:
    """What one tensor-parallel rank, or one half of a gated input, has of a weight."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


ByHalf = dict[int | None, Part]  # by its number, or None for what is no half


@dataclass(frozen=True)
class Source:
    """`weights` has each one's parts by rank, but of those in `halves` gate and up; `masters` are the optimizer's.

    `num_bytes` is the size of the files that hold them.
    """

    path: Path
    args: Made | None
    version: float
    iteration: int
    weights: dict[str, list[Part]]
    halves: frozenset[str]
    masters: dict[str, list[Part]]
    has_optimizer: bool
    num_bytes: int


def open_megatron(path: Path) -> Source:
    """Open a Megatron-LM checkpoint, or the newest in a folder of them."""
    folder = _checkpoint(path)
    if (folder / ".metadata").is_file():
        return _open_distributed(folder)
    found = [(match, child) for child in sorted(folder.iterdir()) if (match := _RANK.fullmatch(child.name))]
    if not found:
        raise MissingInputError(
            f"{folder} holds neither {RANK_FILE} under mp_rank_XX nor .metadata. Give a checkpoint of Megatron-LM."
        )
    if any(match[3] for match, _ in found):
        raise CheckpointError(f"{folder} is of a model with experts, which lmtrain's models do not have. Give another.")
    ranks = {(int(match[1]), int(match[2] or 0)): child / RANK_FILE for match, child in found}
    if len(ranks) < len(found):
        raise CheckpointError(f"{folder} holds two folders for one rank. Leave those of one checkpoint in it.")
    tps, pps = max(tp for tp, _ in ranks) + 1, max(pp for _, pp in ranks) + 1
    if len(ranks) < tps * pps:
        # because: a name can claim a grid of billions, so that only as many places are looked at as there are files
        missing = next((tp, pp) for tp in range(tps) for pp in range(pps) if (tp, pp) not in ranks)
        count = tps * pps - len(ranks)
        raise CheckpointError(f"{folder} lacks the files of {count} ranks, as of tp, pp={missing}. Get all.")
    return _open_ranks(folder, {rank: TorchFile(path) for rank, path in ranks.items()})


def _checkpoint(path: Path) -> Path:
    if not path.is_dir():
        raise MissingInputError(f"{path} is not a folder. Give the folder of a Megatron-LM checkpoint.")
    if not (path / TRACKER).is_file():
        return path
    word = read_bytes(path / TRACKER, 1 << 10).decode(errors="replace").strip()[:40]
    number = int(word) if word.isdecimal() else -1
    name = "release" if word == "release" else f"iter_{number:07d}" if 0 <= number <= _MAX_ITERATION else ""
    if not name or not (path / name).is_dir():
        raise CheckpointError(f"{path / TRACKER} names {word!r}, which is not there. Give the checkpoint itself.")
    return path / name


def _open_ranks(folder: Path, files: Mapping[tuple[int, int], TorchFile]) -> Source:
    tps, pps = sorted({tp for tp, _ in files}), sorted({pp for _, pp in files})
    first = _top(files[0, 0])
    version, iteration = _version(first, folder), _iteration(first, folder)
    keys = ["model"] if "model" in first else [f"model{i}" for i in range(len(first)) if f"model{i}" in first]
    weights: dict[str, list[Part]] = {}
    next_layer = 0
    for key in keys:  # a chunk of a virtual stage of all stages, then the next
        for pp in pps:
            next_layer += _take_chunk([_flat(files[tp, pp], key) for tp in tps], next_layer, weights, folder)
    return Source(
        path=folder,
        args=_args(first),
        version=version,
        iteration=iteration,
        weights=weights,
        halves=frozenset(),
        masters={},
        has_optimizer="optimizer" in first,
        num_bytes=sum(file.path.stat().st_size for file in files.values()),
    )


def _top(file: TorchFile) -> dict[str, Any]:
    if not isinstance(file.value, dict):
        raise CheckpointError(f"{file.path} holds no state of a model. Check the path.")
    return file.value


def _args(state: dict[str, Any]) -> Made | None:
    args = state.get("args")
    return args if isinstance(args, Made) else None


def _version(state: dict[str, Any], folder: Path) -> float:
    version = state.get("checkpoint_version", 0)
    if not isinstance(version, (int, float)) or version not in _VERSIONS:
        raise CheckpointError(
            f"{folder} has checkpoint_version {_said(version)}, and its tensors are laid out by one of "
            f"{', '.join(map(str, _VERSIONS))}. It is damaged: get the folder again."
        )
    return float(version)


def _said(value: Any) -> str:
    return str(value) if isinstance(value, float) else shorten(value)


def _iteration(state: dict[str, Any], folder: Path) -> int:
    number = state.get("iteration", 0)
    if number is None or isinstance(number, (Made, str)):
        return 0
    is_number = isinstance(number, (int, float)) and math.isfinite(number)
    if not is_number or not 0 <= number <= _MAX_ITERATION or number != int(number):
        raise CheckpointError(
            f"{folder} has the iteration {_said(number)}, which is no whole number from 0 to {_MAX_ITERATION}. "
            "It is damaged: get the folder again."
        )
    return int(number)


def _flat(file: TorchFile, key: str) -> dict[str, StoredTensor]:
    """Tensors by their path; the first layouts nest a dict for each module."""
    result: dict[str, StoredTensor] = {}
    todo, count = [("", _top(file).get(key, {}), 0)], 0
    while todo:
        prefix, node, depth = todo.pop()
        if isinstance(node, StoredTensor):
            result[prefix] = node
        elif isinstance(node, dict):
            count += len(node)
            # because: dicts that hold each other, or the same one twice and so on, have endlessly many paths
            if count > _MAX_NODES or depth > MAX_DEPTH or len(prefix) > _MAX_NAME:
                raise CheckpointError(f"{file.path} holds more names than any model. Get the file again.")
            for name, value in node.items():
                word = shorten(name) if isinstance(name, str) else str(name) if type(name) is int else "?"
                todo.append((f"{prefix}.{word}" if prefix else word, value, depth + 1))
    return result


def _take_chunk(
    chunk: list[dict[str, StoredTensor]], first_layer: int, weights: dict[str, list[Part]], folder: Path
) -> int:
    """Add the weights of one stage's ranks, whose layers count from 0; returns how many layers it has."""
    layers, taken = set[int](), set[str]()
    for theirs in chunk[0]:
        ours = _our_name(theirs, folder)
        if ours is None:
            continue
        name, _ = ours
        if name.startswith("blocks."):
            _, number, inner = name.split(".", 2)
            layers.add(int(number))
            name = f"blocks.{first_layer + int(number)}.{inner}"
        tensors = [rank.get(theirs) for rank in chunk]
        if None in tensors:
            raise CheckpointError(
                f"{folder}: not every tensor-parallel rank has {shorten(theirs)}. Get all files again."
            )
        # because: a later stage repeats the embedding that it shares with the first
        if name in taken:
            raise CheckpointError(f"{folder}: a stage has {shorten(theirs)} under two names. Get it again.")
        taken.add(name)
        weights.setdefault(name, [Part(tensor.shape, tensor.read) for tensor in tensors if tensor is not None])
    if layers != set(range(len(layers))):
        raise CheckpointError(f"{folder}: a stage has layers {sorted(layers)[:4]}..., not all from 0. Get it again.")
    return len(layers)


def _our_name(theirs: str, folder: Path) -> tuple[str, int | None] | None:
    try:
        return our_name(theirs)
    except KeyError as error:
        raise CheckpointError(
            f"{folder} holds {shorten(theirs)}, which lmtrain's models do not have. Only plain GPTs and BERTs are read."
        ) from error


@dataclass(frozen=True)
class Chunk:
    box: Box
    path: Path
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Stacked:
    """A tensor of a distributed checkpoint, in chunks."""

    code: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def read(self, box: Box) -> Tensor:
        result = torch.empty(box.shape, dtype=getattr(torch, DTYPES[self.code]))
        for chunk in self.chunks:
            common = intersect(chunk.box, box)
            if common is None:
                continue
            value = TorchFile(chunk.path, chunk.start, chunk.num_bytes).value
            if not isinstance(value, StoredTensor) or value.shape != chunk.box.shape:
                raise CheckpointError(f"{chunk.path} does not hold what .metadata says. Get the folder again.")
            part = value.read()[common.relative_to(chunk.box.offset).slices()]
            result[common.relative_to(box.offset).slices()] = part
        return result


def _open_distributed(folder: Path) -> Source:
    tensors = _metadata(folder)
    state = _top(TorchFile(folder / "common.pt")) if (folder / "common.pt").is_file() else {}
    weights, masters = defaultdict[str, ByHalf](dict), defaultdict[str, ByHalf](dict)
    for theirs, stacked in tensors.items():
        master = _MASTER.fullmatch(theirs)
        if master is None and theirs.startswith(("optimizer.", "chained_", "rng_state", "rerun_state")):
            continue
        ours = _our_name(master[1] if master else theirs, folder)
        if ours is not None:
            for name, part in _unstacked(ours[0], stacked):
                (masters if master else weights)[name][ours[1]] = part
    paths = {chunk.path for stacked in tensors.values() for chunk in stacked.chunks}
    return Source(
        path=folder,
        args=_args(state),
        version=3.0,  # because: whatever the version says, these folders have only ever had today's order
        iteration=_iteration(state, folder),
        weights=_in_order(weights),
        halves=frozenset(name for name, parts in weights.items() if None not in parts),
        masters=_in_order(masters),
        has_optimizer=any(".state." in name for name in tensors),
        num_bytes=sum(path.stat().st_size for path in paths if path.is_file()),
    )


def _in_order(found: Mapping[str, ByHalf]) -> dict[str, list[Part]]:
    """Return of each weight the one part, or its halves in their order."""
    return {
        name: [parts[None]] if None in parts else [parts[half] for half in (0, 1) if half in parts]
        for name, parts in found.items()
    }


def _unstacked(name: str, stacked: Stacked) -> Iterator[tuple[str, Part]]:
    """Yield a tensor for each layer if the first axis counts layers, else the tensor itself."""
    if LAYER not in name:
        box = Box((0,) * len(stacked.shape), stacked.shape)
        yield name, Part(stacked.shape, lambda: stacked.read(box))
        return
    shape = stacked.shape[1:]
    for layer in range(stacked.shape[0]):
        box = Box((layer, *(0 for _ in shape)), (1, *shape))
        yield name.replace(LAYER, str(layer)), Part(shape, lambda box=box: stacked.read(box)[0])  # type: ignore[misc]


def _metadata(folder: Path) -> dict[str, Stacked]:
    """.metadata is a pickle of torch's: read as data, and judged like a manifest."""
    path = folder / ".metadata"
    value = read_pickle(io.BytesIO(read_bytes(path, MAX_PICKLE_BYTES)), path)
    try:
        places = {
            (checked_text(index.get("fqn"), "a name"), _sizes(index.get("offset") or ())): info
            for index, info in value.get("storage_data").items()
        }
        return {
            name: _stacked(checked_text(name, "a name"), entry, places, folder)
            for name, entry in value.get("state_dict_metadata").items()
            if isinstance(entry, Made) and entry.path.endswith(".TensorStorageMetadata")
        }
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{path} is not torch's list of tensors ({shorten(error)}). Get the folder again."
        ) from error


def _stacked(name: str, entry: Made, places: Mapping[Any, Made], folder: Path) -> Stacked:
    properties, shape = entry.get("properties"), _sizes(entry.get("size"))
    dtype = properties.state[0] if isinstance(properties.state, tuple) else properties.get("dtype")
    code = _CODES.get(dtype.path if isinstance(dtype, Global) else "", "")
    if code not in ITEM_BYTES:
        raise ValueError(f"{name} has no type that is read")
    if LAYER in name or (shape and max(shape) > 1 << 40):
        raise ValueError("a name or a shape that no model has")
    chunks = []
    for chunk in entry.get("chunks"):
        box = Box(_sizes(chunk.get("offsets")), _sizes(chunk.get("sizes")))
        info = places[name, box.offset]
        file, start, num_bytes = info.get("relative_path"), info.get("offset"), info.get("length")
        if not is_safe_name(file) or info.get("transform_descriptors"):
            raise ValueError(f"{name} lies in a file that is not read")
        if not all(type(n) is int and n >= 0 for n in (start, num_bytes)):
            raise ValueError(f"{name} lies nowhere")
        if box.volume * ITEM_BYTES[code] > num_bytes:
            raise ValueError(f"{name} has {num_bytes} bytes for {box.volume} items")
        chunks.append(Chunk(box, folder / file, start, num_bytes))
    if (problem := cover_problem(shape, [chunk.box for chunk in chunks])) is not None:
        raise ValueError(f"{name} is not whole: {problem}")
    if ".layers." in f".{name}" and shape and shape[0] > _MAX_LAYERS and not re.search(r"layers\.\d", name):
        raise ValueError(f"{name} has {shape[0]} layers")
    return Stacked(code, shape, tuple(chunks))


def _sizes(value: Any) -> tuple[int, ...]:
    is_short = isinstance(value, (tuple, list)) and len(value) <= _MAX_AXES
    if not is_short or not all(type(n) is int and 0 <= n < 1 << 48 for n in value):
        raise ValueError("a shape that is none")
    return tuple(value)
