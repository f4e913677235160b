"""Data settings report their own problems; the configs in conf/data need only the paths to read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lmtrain.config.build_typed_settings import build_settings
from lmtrain.data.data_settings import BlendPart, BlendSettings, DataChoice, DataSettings, MaskedSettings
from lmtrain.errors import SettingsError, Way


def shipped(repository: Path, name: str) -> dict[str, Any]:
    tree = OmegaConf.to_container(OmegaConf.load(repository / "conf" / "data" / f"{name}.yaml"))
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def test_the_config_asks_for_the_path(repository: Path) -> None:
    tree = shipped(repository, "dataset")
    with pytest.raises(SettingsError) as caught:
        build_settings(DataChoice, tree, "data")
    advice = "Give data.path=PREFIX of a dataset, or data.text=FILE to make a dataset of a text."
    assert str(caught.value) == f"data.path is not set. {advice}"
    assert build_settings(DataChoice, tree | {"path": "books"}, "data") == DataSettings(path="books")


def test_the_blend_config_asks_for_datasets(repository: Path) -> None:
    tree = shipped(repository, "blend")
    with pytest.raises(SettingsError, match=r"data\.datasets=\[\] names no dataset to blend"):
        build_settings(DataChoice, tree, "data")
    parts = [{"path": "a", "tokens": "2B"}, {"path": "b", "epochs": 1.5}]
    made = build_settings(DataChoice, tree | {"datasets": parts}, "data")
    assert made == BlendSettings(datasets=(BlendPart(path="a", tokens=2 * 10**9), BlendPart(path="b", epochs=1.5)))


def test_blends_survive_being_written_down() -> None:
    made = BlendSettings(
        datasets=(BlendPart(path="a", weight=2.0), BlendPart(path="b", weight=1)),
        valid_datasets=(BlendPart(path="c", epochs=1.0),), document_mask=True, packing="best_fit",
    )  # fmt: skip
    assert build_settings(DataChoice, made.to_dict()) == made
    assert made.digest() != BlendSettings(datasets=made.datasets).digest()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"split": (0.0, 1.0)}, r"split=\[0.0,1.0\] must be"),
        ({"split": (1.0, -1.0)}, "none negative"),
        ({"split": ()}, "one to three"),
        ({"split": (1.0, 0.0, 0.0, 0.0)}, "one to three"),
        ({"split": (float("nan"),)}, "one to three"),
        ({"path": ""}, "names no dataset"),
        ({"prefetch_steps": -1}, "at least 0"),
        ({"packing": "best_fit"}, r"Add document_mask=true"),
        ({"packing": "document", "order": "megatron"}, "not supported by Megatron-LM"),
        ({"megatron_samples": 5}, "has no meaning with data.order=own"),
        ({"order": "megatron", "megatron_samples": 0}, "at least 1"),
        ({"first_sample": -1}, "first_sample=-1 must be at least 0"),
    ],
)
def test_wrong_values(values: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        DataSettings(**({"path": "books"} | values))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "has none of weight, tokens and epochs"),
        ({"weight": 1.0, "epochs": 1.0}, "has 2 of weight, tokens and epochs"),
        ({"weight": 0.0}, "weight=0.0 is not a valid share for a"),
        ({"tokens": -5}, "not a valid share"),
        ({"epochs": float("nan")}, "not a valid share"),
        ({"path": "", "weight": 1.0}, "names no dataset"),
    ],
)
def test_wrong_parts(values: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        BlendPart(**({"path": "a"} | values))


A, B, LOT = BlendPart(path="a", weight=1.0), BlendPart(path="b", weight=1.0), BlendPart(path="c", tokens=5)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"datasets": (A, LOT)}, "datasets=1 weights for 2 datasets mixes weights"),
        ({"datasets": (A, B, A)}, "datasets=a is listed twice"),
        ({"datasets": (A,), "valid_datasets": (B, LOT)}, "valid_datasets=1 weights for 2 datasets"),
        ({"datasets": (LOT,), "order": "megatron"}, "blends by weights only"),
    ],
)
def test_wrong_blends(values: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        BlendSettings(**values)


def test_the_ways_out_are_words_to_type() -> None:
    with pytest.raises(SettingsError) as caught:
        build_settings(
            DataChoice, {"kind": "blend", "datasets": [{"path": "a", "tokens": 5, "name": "loss"}]}, "data"
        )
    assert caught.value.ways == ((Way(("data.datasets[0].name=loss-2",)),),)
    with pytest.raises(SettingsError) as caught:
        build_settings(
            DataChoice, {"kind": "blend", "datasets": [{"path": "a", "tokens": 5}], "order": "megatron"}, "data"
        )
    assert caught.value.ways == ((Way(("data.order=own",), ("data.megatron_samples",)),),)


def test_a_packing_of_masked_samples_is_left_out_and_gets_no_mask() -> None:
    with pytest.raises(SettingsError) as caught:
        build_settings(MaskedSettings, {"path": "a", "packing": "best_fit"}, "data")
    assert caught.value.ways == ((Way((), ("data.packing",)),),)


def test_validation_restarts_are_named_one_by_one() -> None:
    parts = (B, BlendPart(path="c", weight=1.0, restart=True))
    with pytest.raises(SettingsError, match=r"valid_datasets\[1\].restart=true has no effect") as caught:
        BlendSettings(datasets=(A,), valid_datasets=parts)
    assert caught.value.ways == ((Way(("valid_datasets[1].restart=false",)),),)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "loss", "accuracy", "ppl", "wïki"])
def test_a_domain_has_a_plain_name(name: str) -> None:
    with pytest.raises(SettingsError, match="names a domain"):
        DataSettings(path="x", valid_paths={name: "y"})


def test_a_domain_has_a_dataset() -> None:
    with pytest.raises(SettingsError, match="names no dataset for wiki"):
        DataSettings(path="x", valid_paths={"wiki": " "})
    with pytest.raises(SettingsError, match=r"and data.valid_path are both set"):
        DataSettings(path="x", valid_path="z", valid_paths={"wiki": "y"})
    parts = (BlendPart(path="x", weight=1.0),)
    with pytest.raises(SettingsError, match=r"and data.valid_datasets are both set"):
        BlendSettings(datasets=parts, valid_datasets=parts, valid_paths={"wiki": "y"})
