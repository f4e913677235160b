"""Reading the average that a checkpoint holds in place of its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmtrain.checkpoint.disk.checkpoint_format import Manifest, TensorEntry
from lmtrain.checkpoint.read_verified_contents import Contents, checked_model, fit_problems
from lmtrain.checkpoint.tensor_reader import CheckpointReader
from lmtrain.checkpoint.unopened_model_on_disk import checkpoint_source
from lmtrain.checkpoint.view_with_ema_as_weights import average_facts, check_weight_set
from lmtrain.errors import CheckpointError, UsageError
from tests.unit.checkpoint.layouts import AVERAGE, MODELS, draw, read_all, reshard_to, write

TIED = MODELS["tied"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("average"), TIED, "tp=2,pp=2", draw(TIED, average=True))


def test_the_average_is_read_by_the_names_of_the_weights(checkpoint: Path) -> None:
    arrays = draw(TIED, average=True)
    model, average = CheckpointReader(checkpoint), CheckpointReader(checkpoint, "ema")
    for name in ("model.norm.weight", "model.embedding.token.weight"):
        assert (model.read(name).numpy() == arrays[name]).all()
        assert (average.read(name).numpy() == arrays[name] / 2).all()
    assert not [name for name in average.manifest.tensors if name.startswith(("ema.", "optim."))]
    assert Contents(checkpoint, weights="ema").find_damage() == []
    assert checked_model(Contents(checkpoint, weights="ema")) == TIED


def test_the_facts_say_which_weights_are_read(checkpoint: Path, tmp_path: Path) -> None:
    facts = checkpoint_source(checkpoint, "ema").facts
    assert facts["weights"] == "ema"
    assert facts["average"] == "exponential average of decay 0.999, updated every step since step 2"
    assert checkpoint_source(checkpoint).facts["weights"] == "model"
    assert "weights" not in checkpoint_source(write(tmp_path, TIED, "tp=1", draw(TIED))).facts


def test_a_checkpoint_without_an_average_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, TIED, "tp=1", draw(TIED))
    with pytest.raises(CheckpointError, match=r"step_00000007 holds no average .* checkpoint\.ema\.decay=0\.999"):
        CheckpointReader(path, "ema")


@pytest.mark.wide
def test_a_reshard_cuts_the_average_like_the_weights(checkpoint: Path, tmp_path: Path) -> None:
    reshard_to(checkpoint, tmp_path / "out", "dp=2,zero=3")
    tensors = Contents(tmp_path / "out").manifest.tensors
    for name, tensor in tensors.items():
        if name.startswith("model."):
            average = tensors[name.replace("model.", "ema.", 1)]
            assert [piece.box for piece in average.pieces] == [piece.box for piece in tensor.pieces], name
    arrays, found = draw(TIED, average=True), read_all(tmp_path / "out")
    assert all(np.array_equal(found[name], arrays[name]) for name in arrays)


def changed(manifest: Manifest, change: Callable[[dict[str, TensorEntry]], object]) -> Manifest:
    tensors = dict(manifest.tensors)
    change(tensors)
    return replace(manifest, tensors=tensors)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("ema.norm.weight"), "it has no ema.norm.weight"),
        (lambda t: [t.pop(name) for name in list(t) if name.startswith("ema.")], "it has no ema.blocks.0"),
        (lambda t: t.update({"ema.nrm.weight": t["ema.norm.weight"]}), "ema.nrm.weight, which its model does not"),
        (lambda t: t.update({"ema.head.weight": t["ema.norm.weight"]}), "ema.head.weight, which is tied to ema.embed"),
        (
            lambda t: t.update({"ema.norm.weight": replace(t["ema.norm.weight"], shape=(5,))}),
            r"ema.norm.weight has shape \[5\] and the model says \[24\]",
        ),
        (
            lambda t: t.update({"ema.norm.weight": replace(t["ema.norm.weight"], dtype="BF16")}),
            "ema.norm.weight has the type BF16, and an average has F32",
        ),
    ],
)
def test_an_average_that_does_not_fit_the_model(
    checkpoint: Path, change: Callable[[dict[str, TensorEntry]], object], said: str
) -> None:
    contents = Contents(checkpoint, weights="ema")
    contents.stored_manifest = changed(contents.stored_manifest, change)
    with pytest.raises(CheckpointError, match=f"contradicts itself: .*{said}"):
        checked_model(contents)


def test_a_model_without_an_average_fits(tmp_path: Path) -> None:
    assert fit_problems(Contents(write(tmp_path, TIED, "tp=1", draw(TIED))).manifest, TIED) == []


@pytest.mark.parametrize("change", [{"decay": "0.9"}, {"decay": 2}, {"since_step": -1}, {"every_steps": True}])
def test_a_malformed_entry_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="there does not state how its average was made"):
        average_facts({"ema": AVERAGE | change}, "there")


def test_unknown_weights_are_refused() -> None:
    assert check_weight_set("ema") == "ema"
    with pytest.raises(UsageError, match=r"weights=swa are not weights .* Use model .* or ema"):
        check_weight_set("swa")
