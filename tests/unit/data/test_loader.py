"""The loader's state is its step: any start, any number of ranks, any read-ahead gives the same samples."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from lmtrain.batch import IGNORED, Batch, StepBatches
from lmtrain.data.batch_size_per_step import BatchPlan
from lmtrain.data.loader import Loader
from lmtrain.data.sample_dataset_interface import Counts, Dataset, ShuffledOrder
from lmtrain.data.samples.causal_language_samples import CausalDataset
from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.data.store.indexed_dataset import IndexedDataset
from lmtrain.errors import SettingsError
from tests.unit.data.writing import add_document

PLAN = BatchPlan(8)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> CausalDataset:
    prefix = tmp_path_factory.mktemp("loader") / "a"
    chance = np.random.default_rng(0)
    with DatasetWriter(prefix, np.uint16) as writer:
        for _ in range(40):
            add_document(writer, [chance.integers(0, 500, chance.integers(1, 20))])
    indexed = IndexedDataset.open(prefix)
    return CausalDataset(indexed, range(indexed.num_documents), 8, document_mask=True)


def build(dataset: Dataset, dp_index: int = 0, dp_size: int = 1, micro_batch: int = 2, prefetch: int = 2) -> Loader:
    order = ShuffledOrder(dataset.num_samples, 5)
    return Loader(dataset, order, PLAN, micro_batch, dp_index, dp_size, prefetch_steps=prefetch)


def plain(step: StepBatches) -> tuple[object, ...]:
    arrays = [
        [batch.tokens_BT.tolist(), batch.labels_BT.tolist(), batch.positions_BT.tolist(), batch.documents_BT.tolist()]
        for batch in step.microbatches
    ]
    return step.step, arrays, step.num_samples, step.counts, step.num_tokens, step.sample_ids.tolist()


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_starting_anywhere_equals_going_through(dataset: CausalDataset, prefetch: int) -> None:
    unbroken = [plain(step) for step in build(dataset).steps(0, 20)]  # several epochs
    loader = build(dataset, prefetch=prefetch)
    for start in (0, 1, 7, 19, 20):
        assert [plain(step) for step in loader.steps(start, 20)] == unbroken[start:]
    loader.close()


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_any_number_of_ranks_reads_the_same_samples(dataset: CausalDataset, dp_size: int) -> None:
    alone = list(build(dataset, micro_batch=1).steps(0, 6))
    ranks = [list(build(dataset, rank, dp_size).steps(0, 6)) for rank in range(dp_size)]
    for step, expected in enumerate(alone):
        turns = [rank[step].microbatches[m] for m in range(8 // dp_size // 2) for rank in ranks]
        together = [row for batch in turns for row in batch.tokens_BT.tolist()]
        assert together == [batch.tokens_BT[0].tolist() for batch in expected.microbatches]
        for rank in ranks:
            assert (rank[step].counts, rank[step].num_tokens) == (expected.counts, 64)
            assert rank[step].sample_ids.tolist() == expected.sample_ids.tolist()
        labels = [batch.labels_BT for rank in ranks for batch in rank[step].microbatches]
        assert sum(int((label != IGNORED).sum()) for label in labels) == expected.counts[0]


def test_an_epoch_reads_every_sample_once(dataset: CausalDataset) -> None:
    ids = np.concatenate([step.sample_ids for step in build(dataset).steps(0, 20)])
    assert sorted(ids[: dataset.num_samples].tolist()) == list(range(dataset.num_samples))


def test_stopping_early_ends_the_thread(dataset: CausalDataset) -> None:
    loader = build(dataset, prefetch=1)
    steps = loader.steps(0, 1000)
    next(steps)
    assert any(thread.name == "loader" for thread in threading.enumerate())
    loader.close()
    assert not any(thread.name == "loader" for thread in threading.enumerate())
    with pytest.raises(RuntimeError, match="closed"):
        next(steps)
    assert [step.step for step in loader.steps(3, 5)] == [3, 4]
    assert not any(thread.name == "loader" for thread in threading.enumerate())


class Failing:
    num_samples = 100

    def counts(self, sample_ids: object) -> Counts:
        return Counts(1, 1)

    def batch(self, sample_ids: object) -> Batch:
        raise OSError("the disk is gone")


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_failure_of_the_thread_reaches_the_consumer(prefetch: int) -> None:
    with pytest.raises(OSError, match="the disk is gone"):
        next(build(Failing(), prefetch=prefetch).steps(0, 5))


def test_the_wait_is_measured(dataset: CausalDataset) -> None:
    loader = build(dataset)
    next(loader.steps(0, 1))
    assert loader.data_wait_s > 0
    loader.close()


def test_a_batch_that_does_not_divide(dataset: CausalDataset) -> None:
    with pytest.raises(SettingsError, match=r"not a multiple of micro_batch=3 x dp=1\. Give a multiple of 3"):
        build(dataset, micro_batch=3)


def test_only_the_batches_that_are_left_must_fit_the_layout(dataset: CausalDataset) -> None:
    plan = BatchPlan(2).continued(3, 8)
    Loader(dataset, ShuffledOrder(dataset.num_samples, 1), plan, micro_batch=4, dp_size=2, first_step=3)
    with pytest.raises(SettingsError, match="A global batch of 2 samples is not a multiple of micro_batch=4 x dp=2"):
        Loader(dataset, ShuffledOrder(dataset.num_samples, 1), plan, micro_batch=4, dp_size=2, first_step=2)
