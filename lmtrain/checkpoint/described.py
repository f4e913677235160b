"""What a checkpoint says that it is, a model saved from a layout, and whether its tensors are that model's. Torch-free.

Called by whoever reads a checkpoint without a run's settings. What it says is judged as settings are, and bytes may be
what they were when written and still not be this model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmtrain.checkpoint.contents import Contents
from lmtrain.checkpoint.disk.format import MANIFEST, Manifest, TensorEntry
from lmtrain.config.build import build_settings
from lmtrain.errors import CheckpointError, LmtrainError, SettingsError, a_few, nearest
from lmtrain.models.model_settings import ModelSettings, Shape, true_weights
from lmtrain.placement.parallel_settings import ParallelSettings


def model_of(state: Mapping[str, Any], where: object) -> ModelSettings:
    """The model that a checkpoint says it is of."""
    try:
        return build_settings(ModelSettings, state.get("model"), "model")  # type: ignore[type-abstract]
    except LmtrainError as error:
        raise CheckpointError(f"{where} does not say what model it is of: {error}") from error


def layout_of(state: Mapping[str, Any]) -> ParallelSettings | None:
    """The settings of parallelism that a checkpoint was made with, where it says so in words that are still known."""
    settings = state.get("settings")
    found = settings.get("parallel") if isinstance(settings, dict) else None
    try:
        return build_settings(ParallelSettings, found, "parallel")
    except SettingsError:
        return None


def checked_model(contents: Contents) -> ModelSettings:
    """The model of a checkpoint, refused where its tensors are not that model's."""
    model = model_of(contents.manifest.state, contents.path)
    problems = fit_problems(contents.manifest, model)
    if problems:
        raise CheckpointError(f"{contents.path / MANIFEST} contradicts itself: {'; '.join(problems)}. Restore a copy.")
    return model


def fit_problems(manifest: Manifest, model: ModelSettings) -> list[str]:
    """What is wrong with names, shapes and ties."""
    shapes = true_weights(model)
    weights = {name.removeprefix("model."): t for name, t in manifest.tensors.items() if name.startswith("model.")}
    kinds = (
        _tie_problems(model, weights),
        (f"it has no model.{name}" for name in sorted(shapes.keys() - weights.keys())),
        (_unknown(name, shapes, model) for name in sorted(weights.keys() - shapes.keys())),
        (_shape_problem(f"model.{name}", weights[name], shapes[name]) for name in shapes.keys() & weights.keys()),
        (_slot_problem(name, tensor, shapes) for name, tensor in manifest.tensors.items()),
    )
    return [text for kind in kinds if (text := a_few(filter(None, kind), "; "))]


def _tie_problems(model: ModelSettings, weights: Mapping[str, TensorEntry]) -> list[str]:
    return [
        f"it holds model.{tie.second}, which is one with model.{tie.first} and is stored under that name alone"
        for tie in model.ties()
        if tie.second in weights
    ]


def _unknown(name: str, shapes: Mapping[str, Shape], model: ModelSettings) -> str:
    if name in {tie.second for tie in model.ties()}:
        return ""
    return f"it holds model.{name}, which its model does not have. {nearest(name, shapes)}"


def _shape_problem(name: str, tensor: TensorEntry, shape: Shape) -> str:
    if tensor.shape == shape:
        return ""
    return f"{name} has shape {list(tensor.shape)} and the model says {list(shape)}"


def _slot_problem(name: str, tensor: TensorEntry, shapes: Mapping[str, Shape]) -> str:
    """`optim.exp_avg.norm.weight` has the shape of `norm.weight`."""
    prefix, _, rest = name.partition(".")
    parameter = rest.partition(".")[2]
    return _shape_problem(name, tensor, shapes[parameter]) if prefix == "optim" and parameter in shapes else ""
