"""The data of a stage, and of a run that goes on: what the checkpoint's history decides, and what it may not change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lmtrain.data.assemble_training_data import build_training_data, open_datasets
from lmtrain.data.cut_datasets_into_samples import DataRequirements
from lmtrain.data.data_settings import BlendPart, BlendSettings, DataChoice, DataSettings
from lmtrain.data.resume_position_by_source import DataHistory
from lmtrain.data.training_data_by_source import TrainingData
from lmtrain.errors import SettingsError
from tests.unit.data.conftest import Make

ASKED = DataRequirements(seq_len=8, vocab_size=10**6, seed=3, num_samples=60, validate=True)


def build(settings: DataChoice, history: DataHistory | None = None, first: int = 0, **asked: Any) -> TrainingData:
    """The data of a stage that begins at the position `first`; the history goes through a checkpoint's JSON."""
    past: dict[str, Any] = {} if history is None else {"history": DataHistory.from_dict(history.to_dict())}
    return build_training_data(settings, open_datasets(settings), replace(ASKED, first_position=first, **past, **asked))


def ids(data: TrainingData, first: int = 0) -> list[int]:
    found: list[int] = data.order.ids(first, 60 - first).tolist()
    return found


@pytest.fixture
def paths(make: Make) -> list[str]:
    return [str(make(f"d{i}", [9] * size, base=1000 * i, described=True).prefix) for i, size in enumerate((40, 25, 20))]


@pytest.mark.parametrize("values", [{}, {"order": "megatron"}, {"first_sample": 7}, {"packing": "document"}])
@pytest.mark.parametrize("num_datasets", [0, 1, 2])
def test_a_run_without_stages_goes_on_in_its_order(paths: list[str], values: dict[str, Any], num_datasets: int) -> None:
    """No dataset of a blend stands for a single dataset."""
    settings: DataChoice = DataSettings(path=paths[0], **values)
    if num_datasets:
        parts = tuple(BlendPart(path=path, weight=i + 1) for i, path in enumerate(paths[:num_datasets]))
        settings = BlendSettings(datasets=parts, **values)
    unbroken = build(settings)
    assert ids(build(settings, unbroken.history), 20) == ids(unbroken)[20:]


def test_shares_that_had_to_be_rounded_are_kept(paths: list[str]) -> None:
    parts = tuple(BlendPart(path=p, weight=w) for p, w in zip(paths, (1e-14, 1e-14, 1.0), strict=True))
    unbroken = build(BlendSettings(datasets=parts))
    resumed = build(BlendSettings(datasets=parts), unbroken.history)
    assert resumed.history.shares == tuple(part.share * sum(resumed.history.shares) for part in unbroken.parts)
    assert ids(resumed) == ids(unbroken)


def test_a_run_that_validates_on_its_own_training_data_goes_on(paths: list[str]) -> None:
    settings = DataSettings(path=paths[0], valid_path=paths[0])
    unbroken = build(settings)
    assert ids(build(settings, unbroken.history)) == ids(unbroken)


def test_what_was_validated_on_is_not_trained_on_later(paths: list[str]) -> None:
    past = build(DataSettings(path=paths[0], valid_path=paths[1])).history
    with pytest.raises(SettingsError, match=r"d1 was validated on in an earlier stage.*data\.train_on_held_out=true"):
        build(DataSettings(path=paths[1]), past, 60)
    build(DataSettings(path=paths[1], train_on_held_out=True), past, 60)
    later = build(DataSettings(path=paths[2], valid_path=paths[0]), past, 60).history
    with pytest.raises(SettingsError, match="d1 was validated on"):
        build(DataSettings(path=paths[1]), later, 120)


def test_documents_held_out_before_are_not_trained_on_later(paths: list[str]) -> None:
    past = build(DataSettings(path=paths[0], split=(0.75, 0.25))).history
    widest: dict[str, Any] = {"path": paths[0], "split": (0.95, 0.05)}
    assert build(DataSettings(**widest), past, 60).parts[0].documents == range(30)
    assert build(DataSettings(**widest, train_on_held_out=True), past, 60).parts[0].documents == range(38)
    later = build(DataSettings(path=paths[0], split=(0.5, 0.5)), past, 60).history
    assert build(DataSettings(**widest), later, 120).parts[0].documents == range(20)
    # what a stage held out itself, before it was resumed, is no limit of it
    assert build(DataSettings(**widest), later, 60).parts[0].documents == range(30)


@pytest.mark.parametrize(("packing", "tokens"), [("concatenate", range(360)), ("document", None)])
def test_a_document_that_was_cut_is_trained_on_before_the_cut(make: Make, packing: str, tokens: range | None) -> None:
    path = str(make("cut", [200, 200], described=True).prefix)
    past = build(DataSettings(path=path, split=(0.9, 0.1))).history
    assert past.held_out.tokens == {path_digits(path): 360}
    later = build(DataSettings(path=path, packing=packing, split=(1.0,)), past, 60, validate=False)  # type: ignore[arg-type]
    assert later.parts[0].documents == (range(2) if tokens else range(1))
    seen = later.train.batch(np.arange(later.train.num_samples)).tokens_BT
    assert seen.max() < (360 if tokens else 200)


def path_digits(path: str) -> str:
    return open_datasets(DataSettings(path=path)).train[0].content_digest[:16]


def test_nothing_left_to_train_on_is_refused_with_a_way_out(make: Make) -> None:
    path = str(make("only", [400], described=True).prefix)
    past = build(DataSettings(path=path, split=(0.9, 0.1))).history
    with pytest.raises(SettingsError, match=r"was held out.*by an earlier stage.*data\.train_on_held_out=true"):
        build(DataSettings(path=path, packing="document", split=(1.0,)), past, 60, validate=False)


def test_equal_contents_of_which_one_restarts_are_refused(make: Make) -> None:
    twice = [str(make(name, [9] * 20, described=True).prefix) for name in ("a", "b")]
    parts = (BlendPart(path=twice[0], weight=1.0), BlendPart(path=twice[1], weight=1.0, restart=True))
    with pytest.raises(SettingsError, match=r"equal content, one of them with restart=true.*Give each content once"):
        build(BlendSettings(datasets=parts), validate=False)


def test_a_changed_restart_is_a_change_of_the_data(paths: list[str]) -> None:
    """A stage that has begun knows whether its data restarted; the checks of a resume compare the identity."""
    ends = [build(DataSettings(path=paths[0], restart=flag)).sample_identity["restart"] for flag in (False, True)]
    assert ends == [None, [True]]
