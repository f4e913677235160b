"""Whether tensors are those of the model: names, shapes, ties, slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmtrain.checkpoint.disk.checkpoint_format import Manifest, TensorEntry
from lmtrain.checkpoint.read_verified_contents import Contents, checked_model, fit_problems
from lmtrain.errors import CheckpointError
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.model_settings import unpadded_shapes
from tests.unit.checkpoint.layouts import MODELS, draw, write

Tensors = dict[str, TensorEntry]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("fit")
    return Contents(write(folder, MODELS["tied"], "tp=1", draw(MODELS["tied"]))).manifest


@pytest.mark.parametrize("model", MODELS)
def test_every_model_fits_itself(tmp_path: Path, model: str) -> None:
    checked_model(Contents(write(tmp_path, MODELS[model], "tp=2", draw(MODELS[model]))))


def other_rows(tensors: Tensors, name: str, rows: int) -> None:
    tensors[name] = replace(tensors[name], shape=(rows, *tensors[name].shape[1:]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("model.norm.weight"), "it has no model.norm.weight"),
        (lambda t: t.update({"model.norm.wieght": t["model.norm.weight"]}), "norm.wieght, .* Did you mean norm.weight"),
        (
            lambda t: t.update({"model.head.weight": t["model.embedding.token.weight"]}),
            "is tied to model.embedding.to",
        ),
        (
            lambda t: other_rows(t, "model.embedding.token.weight", 68),
            r"shape \[68, 24\] and the model says \[67, 24\]",
        ),
        (lambda t: other_rows(t, "optim.exp_avg.norm.bias", 4), r"optim.exp_avg.norm.bias has shape \[4\]"),
        (lambda t: [t.pop(n) for n in list(t) if "blocks.0" in n], "and 8 more"),
    ],
)
def test_what_does_not_fit_is_said(manifest: Manifest, change: Callable[[Tensors], None], said: str) -> None:
    tensors = dict(manifest.tensors)
    change(tensors)
    contents = Contents.__new__(Contents)
    contents.path, contents.stored_manifest = Path("there"), replace(manifest, tensors=tensors)
    contents.manifest = contents.stored_manifest
    with pytest.raises(CheckpointError, match=f"there/manifest.json contradicts itself: .*{said}"):
        checked_model(contents)


def test_a_vocabulary_is_not_padded_beyond_what_the_weights_are(manifest: Manifest) -> None:
    usual = GPTSettings(num_layers=1, width=480, num_heads=4, vocab_size=67, seq_len=8)
    model = replace(usual, vocab_multiple=1 << 16)
    tensors = {f"model.{name}": TensorEntry("F32", shape, ()) for name, shape in unpadded_shapes(model).items()}
    contents = replace(manifest, tensors=tensors)
    assert fit_problems(contents, usual) == []
    (said,) = fit_problems(contents, model)
    assert said == f"the rows that pad its vocabulary would be {480 * (65_536 - 67)} numbers, more than its weights are"


@pytest.mark.parametrize("state", [{}, {"model": {"kind": "gpt", "width": 8}}])
def test_a_checkpoint_of_no_model_or_of_an_unknown_one(manifest: Manifest, state: dict[str, Any]) -> None:
    contents = Contents.__new__(Contents)
    contents.path, contents.manifest = Path("there"), replace(manifest, state=state)
    with pytest.raises(CheckpointError, match="there has invalid model settings"):
        checked_model(contents)
