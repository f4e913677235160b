"""What a checkpoint says that it is, a model saved from a layout, and whether its tensors are that model's. Torch-free.

Called by whoever reads a checkpoint without a run's settings. What it says is judged as settings are, and compared with
the tensors and the files that are there before anything of the stated size is made.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lmtrain.checkpoint.contents import Contents, near
from lmtrain.checkpoint.disk.format import MANIFEST, Manifest
from lmtrain.config.build import build_settings
from lmtrain.errors import CheckpointError, LmtrainError, a_few
from lmtrain.models.model_settings import ModelSettings, Shape, true_weights
from lmtrain.placement.parallel_settings import ParallelSettings

_MOST_SETTINGS = 200  # of a model
_FEW_LAYERS = 1024  # a model's own list of so many layers is soon made, however few tensors there are
_LITTLE_PADDING = 1 << 24  # numbers
_LONGEST = 1000  # characters of what is wrong with settings


def model_of(state: Mapping[str, Any], where: object) -> ModelSettings:
    """The model that a checkpoint says it is of."""
    found = state.get("model")
    if isinstance(found, dict) and len(found) > _MOST_SETTINGS:
        raise CheckpointError(f"{where} gives its model {len(found)} settings, and no model has so many. Restore it.")
    try:
        return build_settings(ModelSettings, found, "model")  # type: ignore[type-abstract]
    except LmtrainError as error:
        raise CheckpointError(f"{where} does not say what model it is of: {str(error)[:_LONGEST]}") from error


def layout_of(state: Mapping[str, Any]) -> ParallelSettings | None:
    """The settings of parallelism that a checkpoint was made with, where it says so in words that are still known."""
    settings = state.get("settings")
    found = settings.get("parallel") if isinstance(settings, dict) else None
    if not isinstance(found, dict) or len(found) > _MOST_SETTINGS:
        return None
    try:
        return build_settings(ParallelSettings, found, "parallel")
    except LmtrainError:
        return None


def checked_model(contents: Contents) -> ModelSettings:
    """The model of a checkpoint, refused where its tensors are not that model's or are not there."""
    model = model_of(contents.manifest.state, contents.path)
    problems = fit_problems(contents.manifest, model)
    if problems:
        raise CheckpointError(f"{contents.path / MANIFEST} contradicts itself: {'; '.join(problems)}. Restore a copy.")
    _check_files(contents)
    return model


def fit_problems(manifest: Manifest, model: ModelSettings) -> list[str]:
    """What is wrong with names, shapes and ties. Costs what the tensors cost, whatever size of model is claimed."""
    num_layers, num_tensors = model.shape.num_layers, len(manifest.tensors)
    if num_layers > max(_FEW_LAYERS, num_tensors):
        return [f"its model has {num_layers} layers and it holds {num_tensors} tensors"]
    shapes, first = true_weights(model), {tie.second: tie.first for tie in model.ties()}
    weights = {name.removeprefix("model."): t for name, t in manifest.tensors.items() if name.startswith("model.")}
    told = {f"model.{name}": shapes[name] for name in shapes if name in weights}
    told |= {name: shape for name in manifest.tensors if (shape := _slot_shape(name, shapes)) is not None}
    kinds = (
        _said(
            (name for name in first if name in weights),
            lambda name: f"it holds model.{name}, which is one with model.{first[name]} and is stored under that name "
            "alone",
        ),
        _said(sorted(shapes.keys() - weights.keys()), lambda name: f"it has no model.{name}"),
        _said(
            sorted(weights.keys() - shapes.keys() - first.keys()),
            lambda name: f"it holds model.{name}, which its model does not have. {near(name, shapes)}",
        ),
        _said(
            (name for name, shape in told.items() if manifest.tensors[name].shape != shape),
            lambda name: f"{name} has shape {list(manifest.tensors[name].shape)} and the model says {list(told[name])}",
        ),
        _padding_problem(model, shapes),
    )
    return [text for text in kinds if text]


def _said(names: Iterable[str], words: Callable[[str], str]) -> str:
    """The first of them in words: to word each of a hundred thousand would take hours."""
    names = list(names)
    return a_few([words(name) if number < 4 else name for number, name in enumerate(names)], "; ")


def _slot_shape(name: str, shapes: Mapping[str, Shape]) -> Shape | None:
    """`optim.exp_avg.norm.weight` has the shape of `norm.weight`."""
    prefix, _, rest = name.partition(".")
    return shapes.get(rest.partition(".")[2]) if prefix == "optim" else None


def _padding_problem(model: ModelSettings, shapes: Mapping[str, Shape]) -> str:
    """Rows that pad a vocabulary are in no file, so they have a bound of their own."""
    true, padded = (sum(map(math.prod, some.values())) for some in (shapes, model.weights()))
    if padded - true <= max(true, _LITTLE_PADDING):
        return ""
    return f"the rows that pad its vocabulary would be {padded - true} numbers, more than its weights are"


def _check_files(contents: Contents) -> None:
    """Whether what the manifest says of sizes is on the disk, told without reading."""
    manifest = contents.manifest
    for name in sorted({piece.file for tensor in manifest.tensors.values() for piece in tensor.pieces}):
        try:
            found = os.lstat(contents.path / name)
            size = found.st_size if stat.S_ISREG(found.st_mode) else None
        except OSError:
            size = None
        if size != manifest.files[name].size:
            held = "is not there as a plain file" if size is None else f"has {size} bytes"
            raise CheckpointError(
                f"{contents.path / name} {held} and the manifest says {manifest.files[name].size} bytes. "
                "Restore it from a copy."
            )
