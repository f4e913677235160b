"""Masked samples: the layout, the masked shares, the same in any batch, in C++ and in Python."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lmtrain.batch import IGNORED, Batch
from lmtrain.data.data_settings import MaskedSettings
from lmtrain.data.samples.group_sentences_into_samples import Draws, stream_key
from lmtrain.data.samples.masked_language_samples import (
    ContinuingOrder,
    MaskedDataset,
    MaskVocabulary,
    ngram_thresholds,
)
from lmtrain.data.samples.masked_samples_python_fallback import (
    BEGINS,
    CONTINUES,
    SPECIAL,
    MaskedSamplerTwin,
    Pairs,
    shorten_segments,
)
from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.data.store.index_cache import IndexCache
from lmtrain.data.store.indexed_dataset import IndexedDataset
from lmtrain.errors import DataError, SettingsError
from lmtrain.runtime import compiled_helpers
from tests.unit.data.writing import add_document, read_sequence

VOCAB = 400
ROLES = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 399}
KINDS = np.full(VOCAB, BEGINS, np.uint8)
KINDS[300:399] = CONTINUES
KINDS[list(ROLES.values())] = SPECIAL
VOCABULARY = MaskVocabulary(KINDS, ROLES)
NUM_DOCUMENTS = 60
ALL_SETTINGS = st.fixed_dictionaries({
    "pairs": st.sampled_from(["sentence_order", "next_sentence", "none"]),
    "max_ngram": st.integers(1, 4),
    "whole_word": st.booleans(),
    "mask_share": st.sampled_from([0.01, 0.15, 0.6]),
    "max_predictions": st.sampled_from([None, 5]),
    "short_share": st.sampled_from([0.0, 0.3]),
})  # fmt: skip


def write(prefix: Path, dtype: Any = np.uint16, seed: int = 0) -> IndexedDataset:
    random = np.random.default_rng(seed)
    with DatasetWriter(prefix, dtype) as writer:
        for _ in range(NUM_DOCUMENTS):
            sizes = random.integers(1, 40, random.integers(0, 14))
            words = [np.where(random.random(size) < 0.02, 1, random.integers(4, 399, size)) for size in sizes]
            add_document(writer, words)
    return IndexedDataset.open(prefix)


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    return write(tmp_path_factory.mktemp("masked") / "a")


def made(indexed: IndexedDataset, seq_len: int = 64, seed: int = 1, twin: bool = False, **values: Any) -> MaskedDataset:
    with pytest.MonkeyPatch.context() as patch:
        if twin:
            patch.setattr(compiled_helpers, "lib", None)
        settings = MaskedSettings(path="a", **values)
        return MaskedDataset(indexed, range(3, 57), seq_len, VOCABULARY, settings, seed)


def sampler(dataset: MaskedDataset) -> MaskedSamplerTwin:
    assert isinstance(dataset._sampler, MaskedSamplerTwin)
    return dataset._sampler


def arrays(batch: Batch) -> list[Any]:
    return [None if value is None else value.tolist() for value in vars(batch).values()]


def unmasked(batch: Batch) -> NDArray[np.int64]:
    result: NDArray[np.int64] = np.where(batch.labels_BT == IGNORED, batch.tokens_BT, batch.labels_BT)
    return result


# ---- layout


@pytest.mark.parametrize("pairs", ["sentence_order", "next_sentence"])
def test_a_pair_is_laid_out_as_bert_reads_it(indexed: IndexedDataset, pairs: str) -> None:
    dataset = made(indexed, pairs=pairs)
    batch = dataset.batch(np.arange(dataset.num_samples))
    assert batch.tokens_BT.shape == (dataset.num_samples, 64)
    assert [batch.tokens_BT.dtype, batch.labels_BT.dtype, batch.segments_BT.dtype] == [np.int64] * 3
    assert (batch.not_padding_BT.dtype, batch.pair_labels_B.dtype) == (np.bool_, np.int64)
    for tokens, segments, real in zip(unmasked(batch), batch.segments_BT, batch.not_padding_BT, strict=True):
        size = int(real.sum())
        first = int((segments[:size] == 0).sum())
        assert real[:size].all()
        assert (tokens[size:] == ROLES["pad"]).all()
        assert (segments[size:] == 0).all()
        assert (np.diff(segments[:size]) >= 0).all()
        assert np.flatnonzero(tokens == ROLES["cls"]).tolist() == [0]
        assert np.flatnonzero(tokens == ROLES["sep"]).tolist() == [first - 1, size - 1]
        assert 3 < first < size - 1  # both have text


def test_one_segment_without_pairs(indexed: IndexedDataset) -> None:
    dataset = made(indexed, pairs="none", min_sentences=1)
    batch = dataset.batch(np.arange(dataset.num_samples))
    assert batch.segments_BT is None
    assert batch.pair_labels_B is None
    assert ((batch.tokens_BT == ROLES["sep"]).sum(1) == 1).all()
    assert batch.not_padding_BT.sum(1).max() == 64  # 62 of text


def text_of(indexed: IndexedDataset, first: int, end: int) -> list[int]:
    return [token for i in range(first, end) for token in read_sequence(indexed, i)]


def test_the_text_is_that_of_the_sentences(indexed: IndexedDataset) -> None:
    """Samples that need not be cut hold every token of their sentences; swapped ones in the other order."""
    dataset = made(indexed, seq_len=512, short_share=0.0)
    batch = dataset.batch(np.arange(dataset.num_samples))
    seen = set()
    for row, tokens, segments, real, label in zip(
        dataset._rows.tolist(), unmasked(batch), batch.segments_BT, batch.not_padding_BT, batch.pair_labels_B,
        strict=True,
    ):
        a, b = (tokens[real & (segments == s)].tolist() for s in (0, 1))
        first, second = (b, a) if label else (a, b)
        strip = set(ROLES.values()) - {ROLES["unk"]}
        assert [t for t in first + second if t not in strip] == text_of(indexed, row[0], row[1])
        seen.add(int(label))
    assert seen == {0, 1}


def test_next_sentences_are_of_another_document_in_half_of_the_samples(indexed: IndexedDataset) -> None:
    twin = sampler(made(indexed, twin=True, pairs="next_sentence"))
    document_of = np.searchsorted(twin.bounds, np.arange(int(twin.bounds[-1])), side="right")
    reached = set()
    for number in range(400):
        sentence = int(twin.rows[number % len(twin.rows), 0])
        start, size = twin._other_document_run(sentence, 30, Draws(stream_key(1, number)))
        other = int(np.searchsorted(np.cumsum(indexed.lengths), start, side="right"))
        assert start == indexed.pointers[other] // 2  # the beginning of a sentence
        assert document_of[other] != document_of[sentence]
        last = int(np.searchsorted(np.cumsum(indexed.lengths), start + size - 1, side="right"))
        assert document_of[last] == document_of[other]
        reached.add(int(document_of[other]))
    assert len(reached) > 30
    labels = made(indexed, pairs="next_sentence").batch(np.arange(3000)).pair_labels_B
    assert 0.46 < labels.mean() < 0.54


@settings(max_examples=80, deadline=None)
@given(a=st.integers(0, 300), b=st.integers(0, 300), target=st.integers(2, 300), key=st.integers(0, 2**64 - 1))
def test_shortening_takes_from_the_longer_as_if_one_by_one(a: int, b: int, target: int, key: int) -> None:
    sizes = [a, b]
    while sum(sizes) > target:
        sizes[0 if sizes[0] > sizes[1] else 1] -= 1
    (begin_a, size_a), (begin_b, size_b) = shorten_segments((1000, a), (5000, b), target, Draws(key))
    assert [size_a, size_b] == sizes
    assert 1000 <= begin_a <= 1000 + a - size_a
    assert 5000 <= begin_b <= 5000 + b - size_b


# ---- what is masked


def test_masking_has_the_promised_shares(indexed: IndexedDataset) -> None:
    dataset = made(indexed, seq_len=128)
    batch = dataset.batch(np.arange(40_000))
    masked = batch.labels_BT != IGNORED
    assert 0.145 < masked.sum() / batch.not_padding_BT.sum() < 0.155
    tokens, labels = batch.tokens_BT[masked], batch.labels_BT[masked]
    hidden, kept = (tokens == ROLES["mask"]).mean(), (tokens == labels).mean()
    assert 0.795 < hidden < 0.805
    assert 0.095 < kept < 0.105
    other = tokens[(tokens != ROLES["mask"]) & (tokens != labels)]
    assert KINDS[other].max() < SPECIAL  # never replaced by a special token
    counts = np.bincount(other, minlength=VOCAB)[KINDS != SPECIAL]
    assert counts.min() > 0.6 * counts.mean()  # but by any other
    assert not np.isin(labels, list(ROLES.values())).any()  # no special token is masked


def test_the_budget_is_kept(indexed: IndexedDataset) -> None:
    batch = made(indexed, mask_share=0.6, max_predictions=7).batch(np.arange(200))
    assert (batch.labels_BT != IGNORED).sum(1).max() == 7
    batch = made(indexed, mask_share=0.001, whole_word=False).batch(np.arange(200))
    assert ((batch.labels_BT != IGNORED).sum(1) == 1).all()  # one at least


@pytest.mark.parametrize("max_ngram", [1, 3])
def test_words_are_masked_whole(indexed: IndexedDataset, max_ngram: int) -> None:
    batch = made(indexed, seq_len=128, max_ngram=max_ngram).batch(np.arange(500))
    masked, kinds = batch.labels_BT != IGNORED, KINDS[unmasked(batch)]
    goes_on = (kinds[:, 1:] == CONTINUES) & (kinds[:, :-1] != SPECIAL)
    assert goes_on.sum() > 1000
    assert (masked[:, 1:] == masked[:, :-1])[goes_on].all()
    pieces = made(indexed, seq_len=128, whole_word=False).batch(np.arange(500)).labels_BT != IGNORED
    assert (pieces[:, 1:] != pieces[:, :-1])[goes_on].any()


def test_ngram_lengths_go_by_one_over_n(indexed: IndexedDataset) -> None:
    twin = sampler(made(indexed, seq_len=256, twin=True, max_ngram=3))
    drawn = Counter(twin.draw_ngram_length(Draws(stream_key(2, i))) for i in range(11_000))
    assert all(abs(drawn[n] - 6000 / n) < 250 for n in (1, 2, 3))
    # The first n-gram of a row meets neither another nor the end of the budget; the others do, a little.
    words = [(place, place + 1) for place in range(1, 255)]
    first, all_of_them = Counter[int](), Counter[int]()
    for i in range(2000):
        sizes = [end - begin for begin, end in twin.choose_ngrams(words, 256, Draws(stream_key(3, i)))]
        first[sizes[0]] += 1
        all_of_them.update(sizes)
    for counts, tolerance in ((first, 0.04), (all_of_them, 0.10)):
        for n in (1, 2, 3):
            assert abs(counts[n] / counts.total() - 6 / 11 / n) < tolerance
    assert first.keys() == {1, 2, 3}


def test_ngrams_end_with_their_segment(indexed: IndexedDataset) -> None:
    twin = sampler(made(indexed, twin=True, max_ngram=4, mask_share=0.6))
    words = [(1, 2), (2, 4), (5, 6), (6, 7)]  # something special at 4
    for i in range(300):
        assert all(not begin <= 4 < end for begin, end in twin.choose_ngrams(words, 8, Draws(stream_key(4, i))))


def test_thresholds_are_exact() -> None:
    assert ngram_thresholds(1) == []
    assert ngram_thresholds(3) == [6 * 2**32 // 11, 9 * 2**32 // 11]


# ---- a pure function of seed and number


@settings(max_examples=80, deadline=None)
@given(values=ALL_SETTINGS, seq_len=st.integers(8, 100), seed=st.integers(0, 2**31), data=st.data())
def test_the_twin_makes_the_same(
    indexed: IndexedDataset, values: dict[str, Any], seq_len: int, seed: int, data: st.DataObject
) -> None:
    here, twin = made(indexed, seq_len, seed, **values), made(indexed, seq_len, seed, twin=True, **values)
    ids = np.array(data.draw(st.lists(st.integers(0, 2**40), min_size=1, max_size=6)))
    batch = here.batch(ids)
    assert arrays(batch) == arrays(twin.batch(ids))
    assert here.counts(ids) == twin.counts(ids) == ((batch.labels_BT != IGNORED).sum(), batch.not_padding_BT.sum())


def test_other_dtypes_of_tokens(indexed: IndexedDataset, tmp_path: Path) -> None:
    ids = np.arange(20)
    expected = arrays(made(indexed).batch(ids))
    for dtype in (np.int32, np.int64):
        assert arrays(made(write(tmp_path / np.dtype(dtype).name, dtype)).batch(ids)) == expected


def test_a_sample_is_the_same_in_any_batch_and_order(indexed: IndexedDataset) -> None:
    dataset = made(indexed, max_ngram=3)
    ids = np.array([5, 0, 17, 5, 3])
    together = dataset.batch(ids)
    alone = [dataset.batch(ids[i : i + 1]) for i in range(5)]
    assert together.tokens_BT.tolist() == [row.tokens_BT[0].tolist() for row in alone]
    assert together.labels_BT.tolist() == [row.labels_BT[0].tolist() for row in alone]
    assert arrays(made(indexed, max_ngram=3).batch(ids)) == arrays(together)
    assert arrays(made(indexed, seed=2, max_ngram=3).batch(ids)) != arrays(together)


def test_each_epoch_reads_every_sample_once_and_masks_it_anew(indexed: IndexedDataset) -> None:
    dataset = made(indexed, seq_len=512, short_share=0.0)
    n, order = dataset.num_samples, ContinuingOrder(dataset.num_samples, 4)
    epochs = [order.ids(epoch * n, n) for epoch in range(3)]
    for epoch, ids in enumerate(epochs):
        assert sorted(ids.tolist()) == list(range(epoch * n, (epoch + 1) * n))
    assert (epochs[0] % n).tolist() != (epochs[1] % n).tolist()
    assert order.ids(n - 2, 5).tolist() == [*epochs[0][-2:].tolist(), *epochs[1][:3].tolist()]
    first, second = dataset.batch(np.arange(n)), dataset.batch(np.arange(n, 2 * n))
    same = (first.pair_labels_B == second.pair_labels_B) & (first.segments_BT == second.segments_BT).all(1)
    assert same.any()
    assert (unmasked(first)[same] == unmasked(second)[same]).all()
    assert ((first.labels_BT != second.labels_BT).any(1))[same].mean() > 0.9


def test_megatrons_order(indexed: IndexedDataset) -> None:
    settings = MaskedSettings(path="a", order="megatron")
    dataset = MaskedDataset(indexed, range(60), 64, VOCABULARY, settings, 1234, run_samples=500)
    assert 500 <= dataset.num_samples < 1000
    assert dataset.batch(np.arange(500)).tokens_BT.shape == (500, 64)


# ---- refusals


def test_a_dataset_of_whole_documents(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "whole", np.uint16) as writer:
        for size in (70, 0, 50):
            add_document(writer, [np.arange(4, 4 + size)])
    whole = IndexedDataset.open(tmp_path / "whole")
    both: tuple[Literal["sentence_order", "none"], ...] = ("sentence_order", "none")
    for pairs in both:
        settings = MaskedSettings(path="a", pairs=pairs)
        with pytest.raises(DataError, match=r"per document \(the longest has 70 tokens\).*--split-sentences"):
            MaskedDataset(whole, range(3), 64, VOCABULARY, settings, 0)
    settings = MaskedSettings(path="a", pairs="none", min_sentences=1)
    assert MaskedDataset(whole, range(3), 72, VOCABULARY, settings, 0).num_samples == 2  # short texts, no sentence lost


def test_too_little_data(indexed: IndexedDataset, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.split gives 0 samples: none of its 0 documents"):
        MaskedDataset(indexed, range(5, 5), 64, VOCABULARY, MaskedSettings(path="a"), 0)
    with pytest.raises(DataError, match="has 50 sentences"):
        made(indexed, min_sentences=50)
    with pytest.raises(SettingsError, match="A sequence length of 7 tokens has no room"):
        made(indexed, seq_len=7)
    with DatasetWriter(tmp_path / "one", np.uint16) as writer:
        add_document(writer, [np.arange(4, 9)])
        add_document(writer, [np.arange(4, 30)] * 9)
    one = IndexedDataset.open(tmp_path / "one")
    with pytest.raises(DataError, match="needs sentences of two documents, but only one"):
        MaskedDataset(one, range(2), 64, VOCABULARY, MaskedSettings(path="a", pairs="next_sentence"), 0)


@pytest.mark.parametrize("twin", [False, True])
def test_ids_outside_the_vocabulary(indexed: IndexedDataset, twin: bool) -> None:
    small = MaskVocabulary(KINDS[:390], ROLES | {"mask": 4})
    with pytest.MonkeyPatch.context() as patch:
        if twin:
            patch.setattr(compiled_helpers, "lib", None)
        dataset = MaskedDataset(indexed, range(60), 64, small, MaskedSettings(path="a"), 0)
    for ask in (dataset.batch, dataset.counts):
        with pytest.raises(DataError, match=r"a\.bin is damaged or was made with another tokenizer: .*the id 39\d"):
            ask(np.arange(dataset.num_samples))
    with pytest.raises(ValueError, match="ids begin at 0"):
        dataset.batch(np.array([-1]))


class Words:
    vocab_size = 6
    special: dict[str, int] = {"pad": 0, "cls": 1, "sep": 2, "mask": 3}  # noqa: RUF012 - read only

    def piece(self, token: int) -> str:
        return ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "un", "##do"][token]


def test_a_vocabulary_is_classified_by_its_pieces() -> None:
    assert MaskVocabulary.of(Words()).kinds.tolist() == [SPECIAL] * 4 + [BEGINS, CONTINUES]
    words = Words()
    words.special = {"pad": 0, "cls": 1}
    with pytest.raises(DataError, match=r"no \[SEP\], \[MASK\]"):
        MaskVocabulary.of(words)


def test_the_kinds_of_pairs_have_the_settings_names() -> None:
    assert [pair.name for pair in Pairs] == ["none", "next_sentence", "sentence_order"]


def test_the_map_is_kept_and_found_again(
    indexed: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmtrain.data.samples.masked_language_samples._CACHED_FROM", 1)
    cache = IndexCache(tmp_path / "index")

    def build(
        cache: IndexCache | None, seed: int = 1, documents: range = range(3, 57), seq_len: int = 64,
        of: IndexedDataset = indexed, run_samples: int | None = None, **values: Any,
    ) -> list[Any]:  # fmt: skip
        settings = MaskedSettings(path="a", **values)
        dataset = MaskedDataset(of, documents, seq_len, VOCABULARY, settings, seed, run_samples, cache)
        return arrays(dataset.batch(np.arange(30)))

    changes: list[dict[str, Any]] = [
        {}, {"seed": 2}, {"short_share": 0.5}, {"min_sentences": 4}, {"documents": range(2, 56)}, {"seq_len": 48},
        {"of": write(tmp_path / "other", seed=1)},
    ]  # fmt: skip
    changes += [{"order": "megatron"} | change for change in (*changes, {"run_samples": 400})]
    for change in [*changes, {}]:
        assert build(cache, **change) == build(None, **change)
    assert len(list(cache.folder.glob("sentences-*")) if cache.folder else []) == len(changes)
