"""Datasets of a blend have names, counts and epochs of their own; of many, a few are shown and the rest together."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from lmtrain.data.assemble_training_data import build_training_data, open_datasets
from lmtrain.data.batch_size_per_step import BatchPlan
from lmtrain.data.cut_datasets_into_samples import DataRequirements
from lmtrain.data.data_settings import BlendPart, BlendSettings, DataSettings, source_names
from lmtrain.data.loader import Loader
from lmtrain.data.training_data_by_source import (
    MAX_SHOWN,
    TrainingData,
    ValidationSource,
    epoch_warnings,
    shown_sources,
    tokens_at_end,
    tokens_of_order,
)
from lmtrain.errors import SettingsError
from tests.unit.data.conftest import Make

REQUIREMENTS = DataRequirements(seq_len=8, vocab_size=10**6, seed=3, num_samples=96, validate=True)


def parts_of(*names: str | None) -> list[BlendPart]:
    return [BlendPart(path=f"d{i}/web.v2", weight=1.0, name=name) for i, name in enumerate(names)]


def test_names_are_typed_or_from_the_path_and_never_alike() -> None:
    assert source_names(parts_of(None, "books", None, "web_v2-2")) == ["web_v2", "books", "web_v2-3", "web_v2-2"]
    reserved = [BlendPart(path=f"data/{name}", weight=1.0) for name in ("loss", "rest", "..")]
    assert source_names(reserved) == ["loss-2", "rest-2", "__"]


@pytest.mark.parametrize("name", ["a b", "", "a/b", "loss", "ppl", "rest"])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=r"is not a valid name for d0/web\.v2; a name is letters, digits, - and _"):
        parts_of(name)


def test_a_name_is_given_once() -> None:
    with pytest.raises(SettingsError, match="valid_datasets=a is the name of several datasets"):
        BlendSettings(datasets=tuple(parts_of("a")), valid_datasets=tuple(parts_of("a", "a")))


def test_a_recorded_blend_without_names_is_unchanged() -> None:
    assert parts_of(None)[0].to_dict().keys() == {"path", "weight", "tokens", "epochs"}
    assert parts_of("a")[0].to_dict()["name"] == "a"


@pytest.mark.parametrize("count", [2, MAX_SHOWN + 1, MAX_SHOWN + 2, 1000])
def test_the_largest_are_shown_and_the_rest_together(count: int) -> None:
    sources = [ValidationSource(f"s{i}", Fraction(i % 100 + 1)) for i in range(count)]
    shown = shown_sources(sources)
    assert sorted(index for indices in shown.values() for index in indices) == list(range(count))
    assert len(shown) == (count if count <= MAX_SHOWN + 1 else MAX_SHOWN + 1)
    if count > MAX_SHOWN + 1:
        smallest_shown = min(sources[index].share for name, (index, *_) in shown.items() if name != "rest")
        assert all(sources[index].share <= smallest_shown for index in shown["rest"])


@pytest.fixture
def paths(make: Make) -> list[str]:
    chance = np.random.default_rng(0)
    lengths = [chance.integers(1, 30, size).tolist() for size in (40, 25, 60)]
    return [str(make(f"d{i}", sizes, base=10_000 * i, described=True).prefix) for i, sizes in enumerate(lengths)]


def blend(paths: list[str], **options: object) -> tuple[BlendSettings, TrainingData]:
    parts = tuple(BlendPart(path=path, weight=w) for path, w in zip(paths, (3.0, 1.0, 0.5), strict=True))
    settings = BlendSettings(datasets=parts, split=(0.7, 0.3), **options)  # type: ignore[arg-type]
    return settings, build_training_data(settings, open_datasets(settings), REQUIREMENTS)


@pytest.mark.parametrize("packing", ["concatenate", "document"])
def test_a_step_is_counted_by_source(paths: list[str], packing: str) -> None:
    _, data = blend(paths, packing=packing)
    whole = Loader(data.train, data.order, BatchPlan(8), micro_batch=8, prefetch_steps=0).read(2)
    rows = np.concatenate([counts.rows_S for counts in whole.by_source])
    assert sorted(rows.tolist()) == list(range(8))
    offsets = np.cumsum([part.dataset.num_samples for part in data.parts])
    for counts in whole.by_source:
        ids = whole.sample_ids[counts.rows_S]
        assert set(np.searchsorted(offsets, ids, side="right").tolist()) == {counts.number}
        assert (counts.labels, counts.tokens) == data.train.counts(ids)
    assert whole.counts == (sum(counts.labels for counts in whole.by_source),)
    assert whole.num_tokens == sum(counts.tokens for counts in whole.by_source)


def test_a_single_dataset_is_not_counted_by_source(paths: list[str]) -> None:
    for settings in (DataSettings(path=paths[0]), BlendSettings(datasets=(BlendPart(path=paths[0], weight=1.0),))):
        data = build_training_data(settings, open_datasets(settings), REQUIREMENTS)
        assert Loader(data.train, data.order, BatchPlan(8), 8, prefetch_steps=0).read(0).by_source == ()


@pytest.mark.parametrize("first_sample", [0, 17])
def test_tokens_of_a_run_that_did_not_count_them(paths: list[str], first_sample: int) -> None:
    _, data = blend(paths, first_sample=first_sample)
    loader = Loader(data.train, data.order, BatchPlan(8), 8, prefetch_steps=0)
    counted = {part.key: 0 for part in data.parts}
    for step in range(5):
        for counts in loader.read(step).by_source:
            counted[data.parts[counts.number].key] += counts.tokens
    assert tokens_of_order(data, 40, 40 * 8) == counted


def test_epochs_are_tokens_of_the_documents_that_are_trained_on(paths: list[str]) -> None:
    settings, data = blend(paths)
    tokens = [int(part.indexed.lengths[part.documents.start : part.documents.stop].sum()) for part in data.parts]
    assert [part.num_tokens for part in data.parts] == tokens
    first = data.parts[0]
    read = tokens_at_end(data, 8, {first.key: 100})
    assert [read[part.key] for part in data.parts] == [64 * 8 + 100, 22 * 8, 10 * 8]
    after_9 = tokens_of_order(data, 9, 9 * 8)
    assert tokens_at_end(data, 8, after_9, samples_before=9) == tokens_at_end(data, 8, {})
    assert list(epoch_warnings([(settings, data, 8)], {})) == []
    limited = replace(settings, max_epochs=64 * 8 / first.num_tokens)
    assert not [text for text in epoch_warnings([(limited, data, 8)], {}) if "d0" in text]
    (warning,) = epoch_warnings([(limited, data, 8)], {first.key: 1})
    assert "d0 for" in warning
    assert "data.max_epochs=" in warning
    two_stages = [(limited, data, 8), (replace(limited, max_epochs=1.5 * (limited.max_epochs or 0)), data, 8)]
    (warning,) = epoch_warnings(two_stages, {})
    assert f"d0 for {2 * 64 * 8 / first.num_tokens:.3g} epochs" in warning, "tokens of both stages"


def test_validation_knows_the_names_of_its_blend(paths: list[str]) -> None:
    assert [source.name for source in blend(paths)[1].valid_sources] == ["d0", "d1", "d2"]
    valid = (BlendPart(path=paths[2], weight=1.0, name="x"), BlendPart(path=paths[1], weight=2.0))
    names = [(source.name, source.share) for source in blend(paths, valid_datasets=valid)[1].valid_sources]
    assert [name for name, _ in names] == ["x", "d1"]
    assert names[1][1] == 2 * names[0][1]
