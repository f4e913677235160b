"""Read a Megatron-LM checkpoint as data: its arguments, and its weights by our names, still in the order of its ranks.

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
from typing import TYPE_CHECKING, Any

from lmtrain.checkpoint.disk.checkpoint_format import DTYPES, ITEM_BYTES
from lmtrain.checkpoint.disk.tensor_slice_geometry import Box, cover_problem, intersect
from lmtrain.errors import CheckpointError, MissingInputError, shorten
from lmtrain.exchange.detect_model_folder_format import METADATA, RANK_FOLDER, TRACKER
from lmtrain.exchange.megatron.weight_names import LAYER_PLACEHOLDER, lmtrain_name
from lmtrain.exchange.torch_files.read_pickle_as_data import (
    MAX_DEPTH,
    MAX_PICKLE_BYTES,
    CallRecord,
    Global,
    read_pickle,
    require_text,
)
from lmtrain.exchange.torch_files.read_pt_files_without_torch import DTYPE_CODES, StoredTensor, TorchFile
from lmtrain.runtime.files.atomic_files import is_safe_name, read_bytes

if TYPE_CHECKING:
    from torch import Tensor

RANK_FILE = "model_optim_rng.pt"
# The optimizer's fp32 weights; `param` is their name in folders whose optimizer is stored as fully_reshardable.
_MASTER = re.compile(r"(?:chained_0\.)?optimizer\.state\.(?:fp32_param|param)\.(.+)")
_OPTIMIZER = ("optimizer.", "chained_")
_COMMON_FILE = "common.pt"  # holds the arguments and the iteration, up to core v0.18
_COMMON_OBJECT = "common_state/shard_0_1"  # holds them since core v0.19: an entry of the folder's list of tensors
_MAX_LAYERS = 1 << 16
_MAX_NODES = 1 << 18  # of the dicts that hold a stage's tensors
_MAX_NAME = 1000
_MAX_ITERATION = 10**15
_MAX_AXES = 8
_VERSIONS = (0, 1, 2, 3)


@dataclass(frozen=True)
class WeightPart:
    """A part of a weight: that of one tensor-parallel rank, or the gate or up projection of a gated MLP's input."""

    code: str  # of its number type, such as BF16
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


PartsByHalf = dict[int | None, WeightPart]  # 0: gate projection, 1: up projection, None: a weight that is not halved


@dataclass(frozen=True)
class MegatronCheckpoint:
    """An opened Megatron-LM checkpoint. `weights` are by our names: a weight's parts by rank, or if its name is in
    `halves` its gate and up projection. `masters` are the optimizer's fp32 weights in the same form.

    `num_bytes` is the size of the files that hold the weights.
    """

    path: Path
    args: CallRecord | None
    version: float
    iteration: int
    weights: dict[str, list[WeightPart]]
    halves: frozenset[str]
    masters: dict[str, list[WeightPart]]
    has_optimizer: bool
    num_bytes: int
    unused: frozenset[str]  # Megatron-LM's names of tensors that are no weights


def open_megatron(path: Path) -> MegatronCheckpoint:
    """Open the Megatron-LM checkpoint at `path`, or the newest if `path` is a folder of checkpoints: read its arguments
    and list its weights, without reading them. Raise MissingInputError or CheckpointError if it is incomplete or of
    another format.
    """
    folder = _checkpoint_folder(path)
    if (folder / METADATA).is_file():
        return _open_distributed(folder)
    children = sorted(folder.iterdir())
    rank_folders = [(match, child) for child in children if (match := RANK_FOLDER.fullmatch(child.name))]
    if not rank_folders:
        raise MissingInputError(
            f"{folder} holds neither mp_rank_XX/{RANK_FILE} nor .metadata. Give the folder of a Megatron-LM checkpoint."
        )
    if any(match[3] for match, _ in rank_folders):
        raise CheckpointError(
            f"{folder} holds a model with experts, which lmtrain does not support. Choose another checkpoint."
        )
    ranks = {(int(match[1]), int(match[2] or 0)): child / RANK_FILE for match, child in rank_folders}
    if len(ranks) < len(rank_folders):
        raise CheckpointError(f"{folder} holds two folders for one rank. Keep only the folders of one checkpoint.")
    tp_size, pp_size = max(tp for tp, _ in ranks) + 1, max(pp for _, pp in ranks) + 1
    if len(ranks) < tp_size * pp_size:
        # because: a name can claim a grid of billions, so that only as many places are looked at as there are files
        first_missing = next((tp, pp) for tp in range(tp_size) for pp in range(pp_size) if (tp, pp) not in ranks)
        num_missing = tp_size * pp_size - len(ranks)
        raise CheckpointError(
            f"{folder} lacks the files of {num_missing} ranks, the first at (tp, pp) = {first_missing}. Get all files."
        )
    return _open_ranks(folder, {rank: TorchFile(path) for rank, path in ranks.items()})


def _checkpoint_folder(path: Path) -> Path:
    if not path.is_dir():
        raise MissingInputError(f"{path} is not a folder. Give the folder of a Megatron-LM checkpoint.")
    if not (path / TRACKER).is_file():
        return path
    word = read_bytes(path / TRACKER, 1 << 10).decode(errors="replace").strip()[:40]
    number = int(word) if word.isdecimal() else -1
    name = "release" if word == "release" else f"iter_{number:07d}" if 0 <= number <= _MAX_ITERATION else ""
    if not name or not (path / name).is_dir():
        raise CheckpointError(
            f"{path / TRACKER} names the checkpoint {word!r}, which does not exist. Give the folder of a checkpoint."
        )
    return path / name


def _open_ranks(folder: Path, files: Mapping[tuple[int, int], TorchFile]) -> MegatronCheckpoint:
    tp_ranks, pp_ranks = sorted({tp for tp, _ in files}), sorted({pp for _, pp in files})
    first = _state_dict(files[0, 0])
    version, iteration = _version(first, folder), _iteration(first, folder)
    keys = ["model"] if "model" in first else [f"model{i}" for i in range(len(first)) if f"model{i}" in first]
    weights: dict[str, list[WeightPart]] = {}
    unused = set[str]()
    next_layer = 0
    for key in keys:  # a chunk of a virtual stage of all stages, then the next
        for pp in pp_ranks:
            chunk = [_flatten(files[tp, pp], key) for tp in tp_ranks]
            unused |= {name for name in chunk[0] if _translate_name(name, folder) is None}
            next_layer += _add_chunk(chunk, next_layer, weights, folder)
    return MegatronCheckpoint(
        path=folder,
        args=_args(first),
        version=version,
        iteration=iteration,
        weights=weights,
        halves=frozenset(),
        masters={},
        has_optimizer="optimizer" in first,
        num_bytes=sum(file.path.stat().st_size for file in files.values()),
        unused=frozenset(unused),
    )


def _state_dict(file: TorchFile) -> dict[str, Any]:
    if not isinstance(file.value, dict):
        raise CheckpointError(f"{file.path} is not the file of a checkpoint, which would hold a dict. Check the path.")
    return file.value


def _args(state: dict[str, Any]) -> CallRecord | None:
    args = state.get("args")
    return args if isinstance(args, CallRecord) else None


def _version(state: dict[str, Any], folder: Path) -> float:
    version = state.get("checkpoint_version", 0)
    if not isinstance(version, (int, float)) or version not in _VERSIONS:
        raise CheckpointError(
            f"{folder} is damaged: it has checkpoint_version {_number_text(version)}, but Megatron-LM wrote only "
            f"{', '.join(map(str, _VERSIONS))}. Get the folder again."
        )
    return float(version)


def _number_text(value: Any) -> str:
    return str(value) if isinstance(value, float) else shorten(value)


def _iteration(state: dict[str, Any], folder: Path) -> int:
    number = state.get("iteration", 0)
    if number is None or isinstance(number, (CallRecord, str)):
        return 0
    is_number = isinstance(number, (int, float)) and math.isfinite(number)
    if not is_number or not 0 <= number <= _MAX_ITERATION or number != int(number):
        raise CheckpointError(
            f"{folder} is damaged: its iteration {_number_text(number)} is no whole number from 0 to {_MAX_ITERATION}. "
            "Get the folder again."
        )
    return int(number)


def _flatten(file: TorchFile, key: str) -> dict[str, StoredTensor]:
    """Return path -> tensor for all tensors in the nested dicts under `key`, such as "model", of a rank's file; {} if
    it lacks the key. A path joins the keys of the dicts by dots.
    """
    result: dict[str, StoredTensor] = {}
    pending, count = [("", _state_dict(file).get(key, {}), 0)], 0
    while pending:
        prefix, node, depth = pending.pop()
        if isinstance(node, StoredTensor):
            result[prefix] = node
        elif isinstance(node, dict):
            count += len(node)
            # because: dicts that hold each other, or the same one twice and so on, have endlessly many paths
            if count > _MAX_NODES or depth > MAX_DEPTH or len(prefix) > _MAX_NAME:
                raise CheckpointError(f"{file.path} holds more names than any model has. Get the file again.")
            for name, value in node.items():
                word = shorten(name) if isinstance(name, str) else str(name) if type(name) is int else "?"
                pending.append((f"{prefix}.{word}" if prefix else word, value, depth + 1))
    return result


def _add_chunk(
    chunk: list[dict[str, StoredTensor]], first_layer: int, weights: dict[str, list[WeightPart]], folder: Path
) -> int:
    """Add the weights of a pipeline stage, or of one model chunk of an interleaved stage, to `weights`: lmtrain's name
    -> a part for each tensor-parallel rank. `chunk` has each of these ranks' tensors by Megatron-LM's names, in which
    layers count from 0; layer 0 is the model's layer `first_layer`. Return the number of its layers.
    """
    layers, names = set[int](), set[str]()
    for megatron_name in chunk[0]:
        translated = _translate_name(megatron_name, folder)
        if translated is None:
            continue
        name, _ = translated
        if name.startswith("blocks."):
            _, number, inner = name.split(".", 2)
            layers.add(int(number))
            name = f"blocks.{first_layer + int(number)}.{inner}"
        tensors = [rank.get(megatron_name) for rank in chunk]
        if None in tensors:
            raise CheckpointError(
                f"Some tensor-parallel ranks in {folder} lack {shorten(megatron_name)}. Get all files again."
            )
        # because: a later stage repeats the embedding that it shares with the first
        if name in names:
            raise CheckpointError(f"{folder}: a stage has {shorten(megatron_name)} under two names. Get it again.")
        names.add(name)
        parts = [WeightPart(tensor.code, tensor.shape, tensor.read) for tensor in tensors if tensor is not None]
        weights.setdefault(name, parts)
    if layers != set(range(len(layers))):
        raise CheckpointError(
            f"{folder}: a stage has layers {sorted(layers)[:4]}..., but must number them from 0. Get all files again."
        )
    return len(layers)


def _translate_name(megatron_name: str, folder: Path) -> tuple[str, int | None] | None:
    try:
        return lmtrain_name(megatron_name)
    except KeyError as error:
        raise CheckpointError(
            f"{folder} holds {shorten(megatron_name)}, which lmtrain's models do not have. Import a plain GPT or "
            "BERT."
        ) from error


@dataclass(frozen=True)
class StoredObject:
    """The bytes of a file of a distributed checkpoint that hold what torch.save wrote."""

    path: Path
    start: int
    num_bytes: int

    def read(self) -> Any:
        """Return the saved value, with tensors as StoredTensor."""
        return TorchFile(self.path, self.start, self.num_bytes).value


@dataclass(frozen=True)
class Chunk:
    """A rectangular part of a distributed tensor, and where it is stored."""

    box: Box
    stored: StoredObject


@dataclass(frozen=True)
class DistributedTensor:
    """A tensor of a distributed checkpoint, which lies in chunks in one or more files."""

    code: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def read(self, box: Box) -> Tensor:
        import torch  # because: a folder is looked at without it

        result = torch.empty(box.shape, dtype=getattr(torch, DTYPES[self.code]))
        for chunk in self.chunks:
            common = intersect(chunk.box, box)
            if common is None:
                continue
            value = chunk.stored.read()
            if not isinstance(value, StoredTensor) or value.shape != chunk.box.shape:
                raise CheckpointError(
                    f"{chunk.stored.path} does not hold the tensor that .metadata lists. Get it again."
                )
            part = value.read()[common.relative_to(chunk.box.offset).slices()]
            result[common.relative_to(box.offset).slices()] = part
        return result


def _open_distributed(folder: Path) -> MegatronCheckpoint:
    tensors, common_object = _read_metadata(folder)
    state = _read_common_state(folder, common_object)
    weights, masters = defaultdict[str, PartsByHalf](dict), defaultdict[str, PartsByHalf](dict)
    unused = set[str]()
    for megatron_name, stacked in tensors.items():
        master = _MASTER.fullmatch(megatron_name)
        if master is None and megatron_name.startswith((*_OPTIMIZER, "rng_state", "rerun_state")):
            continue
        translated = _translate_name(master[1] if master else megatron_name, folder)
        if translated is None:
            unused.add(megatron_name)
        else:
            for name, part in _split_layers(translated[0], stacked):
                (masters if master else weights)[name][translated[1]] = part
    paths = {chunk.stored.path for stacked in tensors.values() for chunk in stacked.chunks}
    return MegatronCheckpoint(
        path=folder,
        args=_args(state),
        version=3.0,  # because: whatever the version says, these folders have only ever had today's order
        iteration=_iteration(state, folder),
        weights=_order_parts(weights),
        halves=frozenset(name for name, parts in weights.items() if None not in parts),
        masters=_order_parts(masters),
        has_optimizer=any(name.startswith(_OPTIMIZER) for name in tensors),
        num_bytes=sum(path.stat().st_size for path in paths if path.is_file()),
        unused=frozenset(unused),
    )


def _read_common_state(folder: Path, common_object: StoredObject | None) -> dict[str, Any]:
    """Return the dict that a distributed checkpoint stores once for all ranks, with arguments and iteration: from
    common.pt or, if there is none, from `common_object`. Raise CheckpointError if it holds no arguments, since another
    model of the same shapes could then be taken for this one.
    """
    if (folder / _COMMON_FILE).is_file():
        state = TorchFile(folder / _COMMON_FILE).value
    else:
        # because: the object is saved as the list of the parts of all ranks, and this one has a single part
        parts = common_object.read() if common_object is not None else None
        state = parts[0] if isinstance(parts, list) and parts else None
    if not isinstance(state, dict) or _args(state) is None:
        raise CheckpointError(
            f"{folder} does not hold the arguments of its model, which Megatron-LM writes to {_COMMON_FILE} or, since "
            f"core v0.19, to {_COMMON_OBJECT} in {METADATA}. Get the whole folder again."
        )
    return state


def _order_parts(parts_by_half: Mapping[str, PartsByHalf]) -> dict[str, list[WeightPart]]:
    """Return weight name -> list of its parts: the whole weight alone, or its gate and then its up projection if the
    two are stored separately. `parts_by_half` has the same parts by 0 (gate), 1 (up) or None (whole).
    """
    return {
        name: [parts[None]] if None in parts else [parts[half] for half in (0, 1) if half in parts]
        for name, parts in parts_by_half.items()
    }


def _split_layers(name: str, tensor: DistributedTensor) -> Iterator[tuple[str, WeightPart]]:
    """Yield (weight name, part of the weight): once for each layer if `name` contains LAYER_PLACEHOLDER, since `tensor`
    then stacks all layers along its first axis; otherwise once, for the whole tensor. The placeholder is replaced by
    the layer's number.
    """
    if LAYER_PLACEHOLDER not in name:
        box = Box((0,) * len(tensor.shape), tensor.shape)
        yield name, WeightPart(tensor.code, tensor.shape, lambda: tensor.read(box))
        return
    shape = tensor.shape[1:]
    for layer in range(tensor.shape[0]):
        box = Box((layer, *(0 for _ in shape)), (1, *shape))
        part = WeightPart(tensor.code, shape, lambda box=box: tensor.read(box)[0])  # type: ignore[misc]
        yield name.replace(LAYER_PLACEHOLDER, str(layer)), part


def _read_metadata(folder: Path) -> tuple[dict[str, DistributedTensor], StoredObject | None]:
    """Read .metadata, the pickled list of contents of a distributed checkpoint, without running the pickle. Return
    (tensor name -> where its chunks are stored, where the object with Megatron-LM's arguments is stored, or None).
    Raise CheckpointError if the list is malformed.
    """
    path = folder / METADATA
    value = read_pickle(io.BytesIO(read_bytes(path, MAX_PICKLE_BYTES)), path)
    try:
        places = {
            (require_text(index.get("fqn"), "a name"), _parse_sizes(index.get("offset") or ())): info
            for index, info in value.get("storage_data").items()
        }
        tensors = {
            name: _parse_tensor(require_text(name, "a name"), entry, places, folder)
            for name, entry in value.get("state_dict_metadata").items()
            if isinstance(entry, CallRecord) and entry.path.endswith(".TensorStorageMetadata")
        }
        common_place = places.get((_COMMON_OBJECT, ()))
        return tensors, None if common_place is None else _parse_place(_COMMON_OBJECT, common_place, folder)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{path} is not a valid list of tensors ({shorten(error)}). Get the folder again."
        ) from error


def _parse_tensor(name: str, entry: CallRecord, places: Mapping[Any, CallRecord], folder: Path) -> DistributedTensor:
    properties, shape = entry.get("properties"), _parse_sizes(entry.get("size"))
    dtype = properties.state[0] if isinstance(properties.state, tuple) else properties.get("dtype")
    code = DTYPE_CODES.get(dtype.path if isinstance(dtype, Global) else "", "")
    if code not in ITEM_BYTES:
        raise ValueError(f"the tensor {name} has a dtype that lmtrain does not read")
    if LAYER_PLACEHOLDER in name or (shape and max(shape) > 1 << 40):
        raise ValueError(f"the tensor {shorten(name)} has an impossible name or shape")
    chunks = []
    for chunk in entry.get("chunks"):
        box = Box(_parse_sizes(chunk.get("offsets")), _parse_sizes(chunk.get("sizes")))
        stored = _parse_place(name, places[name, box.offset], folder)
        if box.volume * ITEM_BYTES[code] > stored.num_bytes:
            raise ValueError(f"the tensor {name} has {stored.num_bytes} bytes, too few for its {box.volume} elements")
        chunks.append(Chunk(box, stored))
    if (problem := cover_problem(shape, [chunk.box for chunk in chunks])) is not None:
        raise ValueError(f"the tensor {name} is incomplete: {problem}")
    if ".layers." in f".{name}" and shape and shape[0] > _MAX_LAYERS and not re.search(r"layers\.\d", name):
        raise ValueError(f"the tensor {name} has {shape[0]} layers; at most {_MAX_LAYERS} are allowed")
    return DistributedTensor(code, shape, tuple(chunks))


def _parse_place(name: str, info: CallRecord, folder: Path) -> StoredObject:
    """Return the file and the byte range in which `name`, an entry of .metadata, is stored; `info` is the record that
    says so. Raise ValueError if the bytes are transformed (compressed, say), or if file name or range are invalid.
    """
    file, start, num_bytes = info.get("relative_path"), info.get("offset"), info.get("length")
    if not is_safe_name(file) or info.get("transform_descriptors"):
        raise ValueError(f"{name} is in a file that is transformed or has an unsafe name")
    if not all(type(n) is int and n >= 0 for n in (start, num_bytes)):
        raise ValueError(f"{name} has no valid offset or length")
    return StoredObject(folder / file, start, num_bytes)


def _parse_sizes(value: Any) -> tuple[int, ...]:
    is_short = isinstance(value, (tuple, list)) and len(value) <= _MAX_AXES
    if not is_short or not all(type(n) is int and 0 <= n < 1 << 48 for n in value):
        raise ValueError(f"a shape or offset is not a list of at most {_MAX_AXES} whole numbers")
    return tuple(value)
