"""Whether a checkpoint's tensors are those of the model that it says it is of. Torch-free.

Called by `lmtrain verify` after the hashes, and by `lmtrain reshard` before it writes: bytes may be what they were when
written and still not be this model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmtrain.checkpoint.contents import Contents
from lmtrain.checkpoint.described import model_of
from lmtrain.checkpoint.disk.format import MANIFEST, Manifest, TensorEntry
from lmtrain.errors import CheckpointError, nearest
from lmtrain.models.model_settings import ModelSettings, Shape, true_weights

_SHOWN = 4


def check_fit(contents: Contents) -> None:
    """Refuse a checkpoint that is whole and not of its model."""
    problems = fit_problems(contents.manifest)
    if problems:
        raise CheckpointError(f"{contents.path / MANIFEST} contradicts itself: {'; '.join(problems)}. Restore a copy.")


def fit_problems(manifest: Manifest) -> list[str]:
    """What is wrong with names, shapes and ties; nothing for a checkpoint that is of no model of ours."""
    if "model" not in manifest.state:
        return []
    try:
        model = model_of(manifest.state, "its state")
    except CheckpointError as error:
        return [str(error)]
    shapes = true_weights(model)
    weights = {name.removeprefix("model."): t for name, t in manifest.tensors.items() if name.startswith("model.")}
    return [
        *_tie_problems(model, weights),
        *_few(f"it has no model.{name}" for name in sorted(shapes.keys() - weights.keys())),
        *_few(_unknown(name, shapes, model) for name in sorted(weights.keys() - shapes.keys())),
        *_few(_shape_problem(f"model.{name}", weights[name], shapes[name]) for name in shapes.keys() & weights.keys()),
        *_few(_slot_problem(name, tensor, shapes) for name, tensor in manifest.tensors.items()),
    ]


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


def _few(texts: Any) -> list[str]:
    found = [text for text in texts if text]
    more = [f"and {len(found) - _SHOWN} more like this"] if len(found) > _SHOWN else []
    return found[:_SHOWN] + more
