"""Stages that a checkpoint has behind it are compared with what the run did: ends, settings, and data by content."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lmtrain.config.compose_run_settings import compose
from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.data.store.indexed_dataset import IndexedDataset
from lmtrain.tokenizer.train import train_wordpiece
from lmtrain.train.run_config import RunConfig
from lmtrain.train.startup_checks.compare_past_stages import past_pairs
from lmtrain.train.startup_checks.preflight import load_stages
from tests.unit.data.writing import add_document

Differences = Callable[..., list[str]]
STEP = 9  # of the checkpoint: the stages one and two, of 4 steps each, are behind it
ONE = {"datasets": [{"path": "a", "weight": 1}, {"path": "b", "weight": 1}], "kind": "blend"}
TWO = {"path": "c", "valid_path": "d"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four datasets; c2 has the content of c."""
    folder, tokenizer = tmp_path_factory.mktemp("data"), train_wordpiece(["a cat sat on a mat"], 40, lowercase=True)
    for number, name in enumerate("abcd"):
        chance = np.random.default_rng(number)
        with DatasetWriter(folder / name, np.uint16) as writer:
            for _ in range(12):
                add_document(writer, [chance.integers(0, tokenizer.vocab_size, 9)])
            writer.describe(
                tokenizer=tokenizer.to_bytes(), fingerprint=tokenizer.fingerprint, num_bytes=42, eod_id=None,
                vocab_size=tokenizer.vocab_size,
            )  # fmt: skip
    for file in folder.glob("c.*"):
        shutil.copy(file, folder / f"c2{file.name[1:]}")
    return folder


@pytest.fixture(scope="module")
def differences(folder: Path) -> Differences:
    def configured(one: dict[str, Any], two: dict[str, Any], *words: str) -> RunConfig:
        given = [json.dumps(tree).replace('"', "").replace(" ", "") for tree in (one, two)]
        for name in ("a", "b", "c", "c2", "d", "gone"):
            given = [text.replace(f"path:{name}", f"path:{folder}/{name}") for text in given]
        stages = {"one.steps": "4", "two.steps": "4", "three.steps": "4", "one.data": given[0], "two.data": given[1]}
        typed = dict(word.split("=", 1) for word in words)
        return compose(RunConfig, [
            f"data.path={folder}/a", "data.split=[0.9,0.1]", "model.positions=rotary", "model.width=8",
            "model.num_layers=1",
            "model.num_heads=2", "model.seq_len=4", "train.global_batch=2", "train.micro_batch=1", "run.dir=x",
            "train.valid_interval_steps=4", "train.valid_samples=2", "schedule.warmup_steps=0", "optim.lr=1e-2",
            *(f"stages.{key}={text}" for key, text in (stages | typed).items() if text != "none"),
        ])  # fmt: skip

    def found(
        one: dict[str, Any] = ONE, two: dict[str, Any] = TWO, *words: str, without: tuple[str, ...] = ()
    ) -> list[str]:
        """The names of what differs between a run with these data and the checkpoint of one with ONE and TWO."""
        saved = configured(ONE, TWO)
        history = load_stages(saved, None, None)[-1].data.history.to_dict()
        history = {key: value for key, value in history.items() if key not in without}
        config = configured(one, two, *words)
        pairs = past_pairs(config.stage_at(STEP), {"step": STEP, "settings": saved.to_dict(), "history": history})
        return [name for name, value, saved_value in pairs if value != saved_value]

    return found


def blend(*names: str) -> dict[str, Any]:
    return {"kind": "blend", "datasets": [{"path": name, "weight": 1} for name in names]}


def test_the_same_past_is_no_other(differences: Differences) -> None:
    assert differences() == []
    assert differences(ONE, {"path": "c2", "valid_path": "d"}) == []  # the same content
    assert differences(blend("a", "gone"), {"path": "gone", "valid_path": "gone"}) == []
    assert differences(ONE, TWO | {"prefetch_steps": 0, "verify": "none", "max_epochs": 7}) == []
    assert differences(ONE, TWO, "three.steps=9", "three.optim={lr:1}") == []


@pytest.mark.parametrize(
    ("one", "two", "names"),
    [
        (blend("b", "a"), TWO, ["data.datasets[0].path of the stage one", "data.datasets[1].path of the stage one"]),
        (blend("a", "c"), TWO | {"path": "b"},
         ["data.datasets[1].path of the stage one", "data.path of the stage two"]),
        (ONE, TWO | {"path": "a"}, ["data.path of the stage two"]),
        (ONE, TWO | {"valid_path": "b"}, ["data.valid_path of the stage two"]),
        (ONE, {"path": "c"}, ["data.valid_path of the stage two"]),
        (ONE, {"path": "c", "valid_paths": {"new": "d"}},
         ["data.valid_path of the stage two", "data.valid_paths.new of the stage two"]),
        (ONE, TWO | {"document_mask": True}, ["data.document_mask of the stage two"]),
        (ONE | {"split": [0.8, 0.2]}, TWO, ["data.split of the stage one"]),
    ],
)  # fmt: skip
def test_other_data_of_a_stage_behind_are_found(
    differences: Differences, one: dict[str, Any], two: dict[str, Any], names: list[str]
) -> None:
    assert differences(one, two) == names


def test_the_masking_of_a_stage_behind_is_compared() -> None:
    def masked(share: float) -> RunConfig:
        return compose(RunConfig, [
            "model=bert_tiny", "data=masked", "data.path=x", "run.dir=x", f"stages.one.data.mask_share={share}",
            "stages.one.steps=4", "stages.two.steps=4", "schedule.warmup_steps=0",
        ])  # fmt: skip

    pairs = past_pairs(masked(0.3).stage_at(5), {"step": 5, "settings": masked(0.2).to_dict()})
    assert [pair for pair in pairs if pair[1] != pair[2]] == [("data.mask_share of the stage one", 0.3, 0.2)]


def test_files_that_have_become_others_under_their_paths_are_found(
    differences: Differences, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = IndexedDataset.open

    def swapped(prefix: Path, *arguments: Any) -> IndexedDataset:
        name = {"a": "b", "b": "a"}.get(Path(prefix).name, Path(prefix).name)
        return real(Path(prefix).with_name(name), *arguments)

    assert differences() == []
    from lmtrain.train.startup_checks import compare_past_stages

    monkeypatch.setattr(compare_past_stages, "open_dataset", swapped)
    assert differences() == ["data.datasets[0].path of the stage one", "data.datasets[1].path of the stage one"]


def test_a_checkpoint_of_an_older_version_has_the_saved_paths_and_what_was_read(differences: Differences) -> None:
    assert differences(without=("past",)) == []
    assert differences(blend("b", "a"), without=("past",)) == [
        "data.datasets[0].path of the stage one", "data.datasets[1].path of the stage one"
    ]  # fmt: skip
    assert differences(blend("gone", "a"), without=("past",)) == ["data.datasets[1].path of the stage one"]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["one.steps=9", "two=none"], ["the last step of the stage one", "the last step of the stage two"]),
        (["two.steps=9"], ["the last step of the stage two"]),
        (["one.steps=5", "two.steps=3"], ["the last step of the stage one"]),
    ],
)
def test_a_stage_behind_has_no_other_end(differences: Differences, words: list[str], names: list[str]) -> None:
    assert [name for name in differences(ONE, TWO, *words) if "last step" in name] == names


def test_a_run_that_has_only_its_checkpoint_has_nothing_behind_it() -> None:
    assert past_pairs(SimpleNamespace(stage_configs=(), first_step=0), {"step": 3}) == []  # type: ignore[arg-type]
