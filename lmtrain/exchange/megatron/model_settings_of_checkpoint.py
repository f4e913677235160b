"""The model that a Megatron-LM checkpoint holds: its settings, and whether its weights are those of the settings.
Torch-free.

Called by the import, and by a run that starts from such a folder, before torch is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.disk.checkpoint_format import DTYPES
from lmtrain.errors import CheckpointError, join_few, shorten
from lmtrain.exchange.megatron.convert_arguments_and_settings import (
    WeightFacts,
    argument_getter,
    settings_from_arguments,
)
from lmtrain.exchange.megatron.read_arguments_and_weights import MegatronCheckpoint, WeightPart, open_megatron
from lmtrain.exchange.torch_files.read_pickle_as_data import CallRecord
from lmtrain.models.model_settings import ModelSettings, Shape, unpadded_shapes
from lmtrain.spec import Cut, Split

_POSITIONS = "embedding.position.weight"
_NO_OPTIMIZER = (
    "a run goes on from its data's order, schedule and loss scale as well, which are not taken from Megatron-LM; begin "
    "a new run with checkpoint.init_from"
)
_NO_MASTERS = (
    "the optimizer's float32 weights are missing or stored in a form that lmtrain does not read; Megatron-LM saves "
    "them readably with --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable"
)


@dataclass(frozen=True)
class MegatronModel:
    """A Megatron-LM checkpoint whose weights have been compared with its settings. `weights` are the model's by
    lmtrain's names, each in parts; `masters` are the optimizer's fp32 weights, empty unless all of them are there.
    """

    source: MegatronCheckpoint
    settings: ModelSettings
    weights: Mapping[str, list[WeightPart]]
    masters: Mapping[str, list[WeightPart]]
    arguments_read: frozenset[str]  # names of Megatron-LM's arguments that decide a setting

    def left_out(self) -> dict[str, str]:
        """Return a dict, name -> reason, of what the checkpoint holds and the import does not take, such as the
        optimizer.
        """
        rows = (part.shape[0] for part in self.weights["embedding.token.weight"])
        padding = sum(rows) - self.settings.shape.vocab_size
        return (
            ({"optimizer": _NO_OPTIMIZER} if self.source.has_optimizer else {})
            | ({f"{padding} rows of the embedding": "they pad the vocabulary"} if padding else {})
            | dict.fromkeys(sorted(self.source.unused), "it is no weight, or one under a second name")
        )

    def weights_from(self) -> str:
        """Return a phrase for the report: whether the import takes the fp32 master weights of the optimizer or the
        weights of the model, and the number types of the latter.
        """
        if self.masters:
            return "the optimizer, in float32"
        types = sorted({DTYPES[part.code] for parts in self.weights.values() for part in parts})
        is_exact = types == ["float32"] or not self.source.has_optimizer
        return f"the model, in {' and '.join(types)}" + ("" if is_exact else f": {_NO_MASTERS}")

    def ignored_arguments(self) -> dict[str, str]:
        """Return name -> reason for those of the checkpoint's arguments that no setting of lmtrain's model is read
        from.
        """
        state = self.source.args.state if self.source.args is not None else None
        names = {name for name in state if isinstance(name, str)} if isinstance(state, dict) else set()
        return dict.fromkeys(
            map(shorten, sorted(names - self.arguments_read)),
            "it is about training, data or machines, or not known to lmtrain",
        )


def read_megatron_model(
    folder: Path, tokenizer_vocab_size: int | None, overrides: Mapping[str, object]
) -> MegatronModel:
    """Read which model the Megatron-LM folder `folder` holds: its settings, and where its weights are.
    `tokenizer_vocab_size` is used if the checkpoint gives no vocabulary size; `overrides` are settings that the user
    gives. Raise CheckpointError if lmtrain does not compute the model, if the weights do not fit its settings, or if no
    vocabulary size is known.
    """
    source = open_megatron(folder)
    facts = _weight_facts(source)
    arguments_read = set[str]()
    read_argument = argument_getter(source.args or CallRecord(None))

    def get_argument(name: str, default: Any = None) -> Any:
        arguments_read.add(name)
        return read_argument(name, default)

    claimed_vocab = get_argument("vocab_size")
    vocab_size = claimed_vocab if type(claimed_vocab) is int else tokenizer_vocab_size
    if vocab_size is None:
        raise CheckpointError(
            f"{source.path} does not give the size of its vocabulary, as old files do not. Import it with its "
            f"tokenizer: lmtrain import {folder} --tokenizer PATH --output DIR."
        )
    settings = settings_from_arguments(
        get_argument, facts, vocab_size, dict(overrides), source.path, has_arguments=source.args is not None
    )
    if settings.shape.num_layers != facts.num_layers or settings.num_parameters > source.num_bytes:
        # because: the weights of a model are listed by name before they are looked for
        raise CheckpointError(
            f"{source.path} has {facts.num_layers} layers in {source.num_bytes} bytes, but its arguments describe a "
            f"model of {settings.shape.num_layers} layers and {settings.num_parameters} parameters. Get the folder "
            "again, or check --set."
        )
    weights = {name: parts for name, parts in source.weights.items() if name != "head.weight" or not settings.ties()}
    _check_weights(source, settings, weights)
    return MegatronModel(source, settings, weights, _complete_masters(source, settings), frozenset(arguments_read))


def _weight_facts(source: MegatronCheckpoint) -> WeightFacts:
    weights = source.weights
    token, down = _matrix_parts(source, "embedding.token.weight"), _matrix_parts(source, "blocks.0.mlp.down.weight")
    qkv_bias = "blocks.0.attention.qkv.bias"
    return WeightFacts(
        num_layers=len({int(name.split(".")[1]) for name in weights if name.startswith("blocks.")}),
        width=token[0].shape[1],
        ffn_width=sum(part.shape[1] for part in down),
        num_positions=_matrix_parts(source, _POSITIONS)[0].shape[0] if _POSITIONS in weights else None,
        is_encoder="head.dense.weight" in weights,
        bias="none" if qkv_bias not in weights else "all" if "blocks.0.mlp.up.bias" in weights else "qkv",
        norm_has_bias="norm.bias" in weights,
        has_output="head.weight" in weights,
        has_pair="pair.scores.weight" in weights,
    )


def _matrix_parts(source: MegatronCheckpoint, name: str) -> list[WeightPart]:
    parts = source.weights.get(name)
    if not parts or any(len(part.shape) != 2 for part in parts):
        raise CheckpointError(f"{source.path} lacks the matrix {name}, which every model has. Get all of its files.")
    return parts


def _check_weights(
    source: MegatronCheckpoint, settings: ModelSettings, weights: Mapping[str, list[WeightPart]]
) -> None:
    """Raise CheckpointError unless `weights` (lmtrain's name -> parts) has exactly the weights of a model with these
    settings, each in parts that join to its shape.
    """
    problems, shapes, cuts = [], unpadded_shapes(settings), settings.cuts()
    for name, shape in shapes.items():
        parts = weights.get(name)
        if parts is None:
            problems.append(f"{name} is missing")
        elif not _has_joined_shape(parts, shape, cuts[name], by_half=name in source.halves):
            problems.append(
                f"{name} has {len(parts)} parts of shape {list(parts[0].shape)}, which do not join to {list(shape)}"
            )
        elif len(cuts[name].sections) > 1 and not _holds_whole_sections(name, parts, settings, source):
            problems.append(f"{name} cannot be split as version {source.version:g} orders the rows of each rank")
    problems += [f"{name} is not a weight of the model" for name in weights.keys() - shapes.keys()]
    if problems:
        raise CheckpointError(
            f"{source.path} does not hold the model of its arguments: {join_few(sorted(problems), '; ')}. "
            "If the model has other settings, give them with --set KEY=VALUE."
        )


def _has_joined_shape(parts: list[WeightPart], shape: Shape, placement: Cut, *, by_half: bool) -> bool:
    axis = 1 if placement.split is Split.ROW else 0
    joined = list(parts[0].shape)
    if len(joined) != len(shape) or any(part.shape != parts[0].shape for part in parts):
        return False
    if by_half or placement.split is not Split.NONE:
        joined[axis] = sum(part.shape[axis] for part in parts)
    if placement.split is Split.VOCAB:
        return joined[0] >= shape[0] and joined[1:] == list(shape[1:])
    return joined == list(shape)


def _holds_whole_sections(
    name: str, parts: list[WeightPart], settings: ModelSettings, source: MegatronCheckpoint
) -> bool:
    """Return whether the rows that each tensor-parallel rank holds of the fused weight `name` can be divided into
    queries, keys and values, or into gate and up projection, in the row order of the checkpoint's version.
    """
    rows, shape = parts[0].shape[0], settings.shape
    if ".attention.qkv." not in name:
        return name in source.halves or rows % 2 == 0
    return source.version >= 2 or (shape.num_kv_heads == shape.num_heads and rows % (3 * shape.head_width) == 0)


def _complete_masters(source: MegatronCheckpoint, settings: ModelSettings) -> dict[str, list[WeightPart]]:
    """Return weight name -> parts for the fp32 master weights in the checkpoint's optimizer; {} unless all weights of
    the model are among them.
    """
    shapes, cuts = unpadded_shapes(settings), settings.cuts()
    is_complete = all(
        (parts := source.masters.get(name)) is not None
        and all(part.code == "F32" for part in parts)
        and _has_joined_shape(parts, shape, cuts[name], by_half=len(parts) == 2)
        for name, shape in shapes.items()
    )
    return source.masters if is_complete else {}
