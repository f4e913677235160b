"""Masked tokens and pairs: numbers of a slow twin, closed forms, windows, and mistakes that a test must notice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmtrain.batch import Batch
from lmtrain.data.data_settings import MaskedSettings
from lmtrain.data.samples import masked_language_samples as sampling
from lmtrain.data.samples.masked_language_samples import MaskedDataset, MaskVocabulary
from lmtrain.data.samples.masked_samples_python_fallback import CONTINUES, MaskedSamplerTwin
from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.data.store.indexed_dataset import IndexedDataset
from lmtrain.errors import DataError, LmtrainError, UsageError
from lmtrain.eval import score_targets
from lmtrain.eval.run_task import Outcome, run
from lmtrain.eval.score_targets import Subject
from lmtrain.eval.task import TaskOptions, all_tasks, check_kind, find_task
from lmtrain.eval.tasks import masked
from lmtrain.eval.tasks.masked import SEED
from lmtrain.eval.windows import Window, windows
from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.runtime.derive_random_seeds import derive_seed
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from tests.unit.data.writing import add_document
from tests.unit.eval.masked_models import SEQ_LEN, TEXTS, build, constant, measured, texts_of, tokenizer_of

ROOM = SEQ_LEN - 2
PAIR_TASKS = ["masked/sentence-order", "masked/next-sentence"]


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture(scope="module")
def model(pieces: Tokenizer) -> ParallelModel:
    return build(pieces.vocab_size)


@pytest.fixture(scope="module")
def sentences(pieces: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of sentences, 8 documents."""
    prefix = tmp_path_factory.mktemp("sentences") / "set"
    parts = [part for text in TEXTS for part in text.split(" . ") if part]
    with DatasetWriter(prefix, np.uint16) as writer:
        for number in range(8):
            add_document(writer, [np.array(pieces.encode(parts[(number + i) % len(parts)])) for i in range(6)])
    return prefix


@torch.no_grad()
def row_scores(model: ParallelModel, fed: list[int], segments: list[int] | None = None) -> tuple[Any, Any]:
    """Log-probabilities at each place, and of a pair's two labels, of one row without padding."""
    module: Any = model.model
    tokens = torch.tensor([fed])
    batch = Batch(tokens, tokens, segments_BT=None if segments is None else torch.tensor([segments]))
    hidden = module(batch)
    scores = module.logits(hidden)[0, :, : model.settings.shape.vocab_size].double().log_softmax(-1)
    return scores.numpy(), module.pair_logits(hidden)[0].double().log_softmax(-1).numpy()


@dataclass
class Twin:
    nll: float = 0.0
    targets: int = 0
    greedy: int = 0

    def add(self, scores_V: Any, target: int) -> None:
        self.nll -= float(scores_V[target])
        self.targets += 1
        self.greedy += int(scores_V.argmax()) == target


def masked_twin(model: ParallelModel, pieces: Tokenizer) -> Twin:
    """Windows and masks from their description: every piece of a masked word is asked for."""
    found, vocabulary = Twin(), MaskVocabulary.of(pieces)
    windows = [ids[at : at + ROOM] for ids in pieces.encode_batch(TEXTS) for at in range(0, len(ids), ROOM)]
    sizes = [len(window) for window in windows]
    sampler = MaskedSamplerTwin(
        tokens=np.concatenate(windows), lengths=np.array(sizes), pointers=(np.cumsum(sizes) - sizes) * 8,
        bounds=np.array([0, len(windows)]), rows=np.array([(i, i + 1, ROOM) for i in range(len(windows))]),
        kinds=vocabulary.kinds, specials=sorted(vocabulary.special.values()), cls=2, sep=3, mask=4, pad=0,
        seq_len=SEQ_LEN, pairs=0, share=round(0.15 * 2**32), max_predictions=SEQ_LEN, ngram_thresholds=[],
        seed=derive_seed(SEED, "masks"),
    )  # fmt: skip
    for number, window in enumerate(windows):
        sample = sampler.sample(number)
        assert sample.tokens == [2, *window, 3]
        fed = list(sample.tokens)
        for place, put in zip(sample.masked, sample.replaced, strict=True):
            fed[place] = put
        scores_TV, _ = row_scores(model, fed)
        for place in sample.masked:
            found.add(scores_TV[place], sample.tokens[place])
    return found


def pseudo_twin(model: ParallelModel, pieces: Tokenizer) -> Twin:
    found = Twin()
    for ids in pieces.encode_batch(TEXTS):
        for first in range(0, len(ids), ROOM):
            last = min(first + ROOM, len(ids))
            start = max(last - ROOM, 0)
            for place in range(first, last):
                fed = [2, *ids[start:place], 4, *ids[place + 1 : last], 3]
                found.add(row_scores(model, fed)[0][place - start + 1], ids[place])
    return found


TWINS = {"masked/tokens": masked_twin, "masked/pseudo-perplexity": pseudo_twin}


def agree(model: ParallelModel, pieces: Tokenizer, name: str, batch_size: int = 8) -> Outcome:
    outcome, twin = measured(model, pieces, name, texts_of(TEXTS), batch_size=batch_size), TWINS[name](model, pieces)
    assert outcome.result.num_targets == twin.targets
    assert outcome.result.nll_sum_nats == pytest.approx(twin.nll, rel=1e-6)
    measures, per_token = outcome.result.measures, math.exp(twin.nll / twin.targets)
    assert measures["masked_token_accuracy"] == twin.greedy / twin.targets
    assert measures[outcome.result.headline] == pytest.approx(per_token, rel=1e-6)
    return outcome


@pytest.mark.parametrize("name", TWINS)
def test_a_text_is_scored_as_row_by_row(model: ParallelModel, pieces: Tokenizer, name: str) -> None:
    sums = [agree(model, pieces, name, batch_size).columns["nll"] for batch_size in (1, 7, 64)]
    for other in sums[1:]:
        assert other == pytest.approx(sums[0], rel=1e-6)
    assert sums[0][2] == 0.0, "a document without a token"


@pytest.mark.parametrize("name", PAIR_TASKS)
def test_pairs_are_counted_as_validation_counts_them(
    model: ParallelModel, pieces: Tokenizer, sentences: Path, name: str
) -> None:
    settings = MaskedSettings(path="set", pairs="sentence_order" if "order" in name else "next_sentence")
    indexed = IndexedDataset.open(sentences)
    dataset = MaskedDataset(indexed, range(8), SEQ_LEN, MaskVocabulary.of(pieces), settings, SEED)
    twin = Twin()
    for number in range(dataset.num_samples):
        batch = dataset.batch(np.array([number]))
        fed, segments = batch.tokens_BT[0, batch.not_padding_BT[0]], batch.segments_BT[0, batch.not_padding_BT[0]]
        twin.add(row_scores(model, fed.tolist(), segments.tolist())[1], int(batch.pair_labels_B[0]))
    for batch_size in (1, 7):
        result = measured(model, pieces, name, sentences, batch_size=batch_size).result
        assert result.num_targets == twin.targets > 8
        assert result.nll_sum_nats == pytest.approx(twin.nll, rel=1e-6)
        assert result.measures["pair_accuracy"] == twin.greedy / twin.targets
    assert 0 < twin.greedy < twin.targets


def test_a_dataset_is_masked_as_its_text(model: ParallelModel, pieces: Tokenizer, tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "set", np.uint16) as writer:
        for text in TEXTS:
            add_document(writer, [np.array(pieces.encode(part), np.int64) for part in (text[:40], text[40:])])
    texts = [text[:40] + " " + text[40:] for text in TEXTS]
    documents = [pieces.encode(text[:40]) + pieces.encode(text[40:]) for text in TEXTS]
    assert documents == pieces.encode_batch(texts)
    for name in TWINS:
        ours = measured(model, pieces, name, tmp_path / "set").result
        theirs = measured(model, pieces, name, texts_of(texts)).result
        assert (ours.nll_sum_nats, ours.num_targets) == (theirs.nll_sum_nats, theirs.num_targets)


@dataclass
class FirstPieces:
    """A sampler that asks for the first piece of a masked word alone."""

    of: Any
    kinds: Any

    def batch(self, ids: Any) -> Any:
        tokens, labels, *rest = self.of.batch(ids)
        return tokens, np.where((labels >= 0) & (self.kinds[np.maximum(labels, 0)] == CONTINUES), -100, labels), *rest

    def counts(self, ids: Any) -> Any:
        return (self.batch(ids)[1] >= 0).sum(1)[:, None], None


def _collated(**changes: Any) -> Any:
    collate = score_targets.collate_masked
    return lambda requests: replace(collate(requests), **dict.fromkeys(changes))


def _first_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    make = sampling.build_sampler
    monkeypatch.setattr(
        masked, "build_sampler", lambda sentences, vocabulary, *more: FirstPieces(
            make(sentences, vocabulary, *more), vocabulary.kinds
        ),
    )  # fmt: skip


def _other_windows(num_tokens: int, room: int, stride: int, *, last_looks_back: bool) -> Iterator[Window]:
    return (Window(cut.first_scored - 1, cut.stop, cut.first_scored) for cut in windows(num_tokens, room, stride))


MISTAKES: dict[str, tuple[str, Any]] = {
    "the first piece of a masked word alone": ("masked/tokens", _first_pieces),
    "padding seen": (
        "masked/tokens", lambda patch: patch.setattr(score_targets, "collate_masked", _collated(not_padding_BT=None)),
    ),
    "other masks": ("masked/tokens", lambda patch: patch.setattr(masked, "SEED", 2)),
    "a last window that does not look back": (
        "masked/pseudo-perplexity", lambda patch: patch.setattr(masked, "windows", _other_windows),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_noticed(
    mistake: str, model: ParallelModel, pieces: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, plant = MISTAKES[mistake]
    agree(model, pieces, name)
    plant(monkeypatch)
    with pytest.raises((AssertionError, LmtrainError)):
        agree(model, pieces, name)


def test_closed_forms(pieces: Tokenizer, sentences: Path) -> None:
    """Uniform over the true vocabulary, which is padded; a coin for pairs; right where one word is all there is."""
    model = build(pieces.vocab_size, vocab_multiple=64)
    assert model.settings.padded_vocab_size == 64
    constant(model)
    for name in TWINS:
        measures = measured(model, pieces, name, texts_of(TEXTS)).result.measures
        assert measures[all_tasks()[name].headline] == pytest.approx(pieces.vocab_size, rel=1e-12)
    coin = measured(model, pieces, PAIR_TASKS[0], sentences).result
    assert coin.measures["nll_per_pair_nats"] == pytest.approx(math.log(2), rel=1e-12)
    constant(model, pieces.encode("mill")[0])
    for name in TWINS:
        result = measured(model, pieces, name, texts_of(["mill " * 40, "mill"])).result
        assert (result.measures["masked_token_accuracy"], result.nll_sum_nats) == (1.0, 0.0)


@pytest.mark.parametrize("stride", [1, 3, ROOM])
@pytest.mark.parametrize("num_tokens", [0, 1, ROOM - 1, ROOM, ROOM + 1, 3 * ROOM + 2])
def test_each_token_is_asked_once_in_a_full_window(num_tokens: int, stride: int) -> None:
    found = list(windows(num_tokens + 1, ROOM, stride, last_looks_back=True))
    asked = [place for cut in found for place in range(cut.first_scored - 1, cut.stop)]
    assert asked == list(range(num_tokens))
    assert all(cut.stop - cut.start == min(ROOM, num_tokens) for cut in found)
    assert all(cut.start < cut.first_scored for cut in found)


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_batches_hold_each_request_once_and_little_padding(pieces: Tokenizer, batch_size: int) -> None:
    task = find_task("masked/pseudo-perplexity")
    prepared = task.prepare_texts(texts_of(TEXTS), TaskOptions(tokenizer=pieces, seq_len=SEQ_LEN))  # type: ignore[attr-defined]
    requests = list(prepared.requests)
    found = list(score_targets.batch_indices(requests, batch_size, packs=False))
    assert sorted(row for rows in found for row in rows) == list(range(len(requests)))
    for rows in found:
        batch = score_targets.collate([requests[row] for row in rows], packs=False)
        assert len(rows) <= batch_size
        assert batch.not_padding_BT.mean() >= 0.95
        assert (batch.labels_BT >= 0).sum() == len(rows)


def test_what_fits_whom(pieces: Tokenizer, model: ParallelModel, sentences: Path) -> None:
    with pytest.raises(UsageError, match=r"on both sides.*tasks: masked/tokens, masked/pseudo-perplexity,"):
        check_kind(find_task("perplexity"), causal=False, pairs=True)
    with pytest.raises(UsageError, match=r"no head for pairs.*these tasks: masked/tokens, masked/pseudo-perplexity\.$"):
        check_kind(find_task(PAIR_TASKS[0]), causal=False, pairs=False)
    with pytest.raises(UsageError, match=r"scores masked tokens.*these tasks: choice/arc, .*perplexity"):
        check_kind(find_task("masked/tokens"), causal=True, pairs=False)
    subject = Subject(model=model, tokenizer=pieces, seq_len=SEQ_LEN, vocab_size=pieces.vocab_size, dtype="fp32")
    with pytest.raises(UsageError, match="scores masked tokens"):
        run(find_task("masked/tokens"), subject, texts_of(TEXTS))


def test_refusals(
    pieces: Tokenizer, model: ParallelModel, sentences: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    texts = texts_of(TEXTS)
    with pytest.raises(UsageError, match="--stride=3 does not apply to masked/tokens"):
        measured(model, pieces, "masked/tokens", texts, stride=3)
    with pytest.raises(UsageError, match="A stride of 15 does not fit"):
        measured(model, pieces, "masked/pseudo-perplexity", texts, stride=15)
    with pytest.raises(UsageError, match="Use --seq-len 8 or more"):
        measured(model, pieces, "masked/tokens", texts, seq_len=7)
    with pytest.raises(UsageError, match="has no overlapping windows"):
        measured(model, pieces, PAIR_TASKS[0], sentences, stride=3)
    (tmp_path / "a.txt").write_text("the mill")
    with pytest.raises(DataError, match="--split-sentences"):
        measured(model, pieces, PAIR_TASKS[0], tmp_path / "a.txt")
    with pytest.raises(DataError, match="Give a WordPiece vocabulary"):
        find_task("masked/tokens").prepare_texts(texts, TaskOptions(tokenizer=tokenizer, seq_len=16))  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="no token that could be predicted"):
        measured(model, pieces, "masked/tokens", texts_of([""]))
