"""The engine against loops and closed forms; each likely mistake must change the number."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lmtrain.batch import Batch
from lmtrain.errors import NonFiniteLossError
from lmtrain.eval.score_targets import Scorer, TargetScores
from lmtrain.eval.windows import Request, WindowedRequests

VOCAB_SIZE, SEQ_LEN = 37, 16
IDS: NDArray[np.int64] = np.random.default_rng(0).integers(0, VOCAB_SIZE, 75)


def direct_nll(model: Any, context: NDArray[Any], target: int) -> float:
    """-ln P(target | context), one forward for one target."""
    tokens = torch.from_numpy(context[None].astype(np.int64))
    row = model.logits(Batch(tokens_BT=tokens, labels_BT=tokens))[0, -1].double()
    return float(row.logsumexp(-1) - row[target])


def total(model: Any, requests: Any, batch_size: int = 4) -> float:
    return sum(float(s.nll.sum()) for s in Scorer(model, batch_size=batch_size).score(requests))


def test_equals_a_loop_over_single_targets(build_gpt: Callable[..., Any]) -> None:
    model = build_gpt()
    scored = list(Scorer(model, batch_size=3).score(WindowedRequests([IDS], SEQ_LEN, 5)))
    nll = np.concatenate([s.nll for s in scored])
    expected = []
    for target in range(1, len(IDS)):
        window = max(math.ceil((target - SEQ_LEN) / 5), 0)
        expected.append(direct_nll(model, IDS[window * 5 : target], int(IDS[target])))
    np.testing.assert_allclose(nll, expected, rtol=2e-6)


def test_megatrons_padded_windows_give_the_same_sum(build_gpt: Callable[..., Any]) -> None:
    """Every window is padded to full length with a real token and masked, those of nothing but padding included."""
    model, stride, eod = build_gpt(), 5, 0
    expected, count = 0.0, max(math.ceil(max(len(IDS) - 1 - stride, 0) / stride) + 1, 1)
    for index in range(count):
        tokens = IDS[index * stride : index * stride + SEQ_LEN + 1]
        padding = SEQ_LEN + 1 - len(tokens)
        padded = torch.from_numpy(np.concatenate([tokens, np.full(padding, eod)]))
        mask = torch.ones(SEQ_LEN)
        mask[SEQ_LEN - padding :] = 0
        if index:
            mask[:-stride] = 0
        logits = model.logits(Batch(tokens_BT=padded[None, :-1], labels_BT=padded[None, 1:]))[0]
        losses = torch.nn.functional.cross_entropy(logits, padded[1:], reduction="none")
        expected += float((losses * mask).double().sum())
    assert total(model, WindowedRequests([IDS], SEQ_LEN, stride)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("batch_size", [4, 16])
def test_batch_size_does_not_matter(build_gpt: Callable[..., Any], batch_size: int) -> None:
    model = build_gpt()
    requests = WindowedRequests([IDS, IDS[:3], IDS[:30]], SEQ_LEN, 7)
    one = list(Scorer(model, batch_size=1).score(requests))
    many = list(Scorer(model, batch_size=batch_size).score(requests))
    assert [len(s.nll) for s in many] == [len(s.nll) for s in one] == [r.num_scored for r in requests]
    np.testing.assert_allclose(
        np.concatenate([s.nll for s in many]), np.concatenate([s.nll for s in one]), rtol=0, atol=2e-6
    )
    assert sum(s.nll.sum() for s in many) == pytest.approx(sum(s.nll.sum() for s in one), rel=1e-6)


def test_answers_come_in_the_order_asked_whatever_their_lengths(build_table: Callable[..., Any]) -> None:
    table = np.random.default_rng(1).normal(size=(VOCAB_SIZE, VOCAB_SIZE))
    model = build_table(table)
    lengths = np.random.default_rng(2).integers(2, 12, 200)
    requests = [Request(IDS[:length], 1) for length in lengths]
    answers = list(Scorer(model, batch_size=3).score(iter(requests)))
    for length, answer in zip(lengths, answers, strict=True):
        assert answer.nll[0] == pytest.approx(direct_nll(model, IDS[: length - 1], int(IDS[length - 1])), rel=1e-12)


def test_only_scored_positions_go_through_the_head(build_gpt: Callable[..., Any]) -> None:
    model = build_gpt()
    requests = WindowedRequests([IDS], SEQ_LEN, 2)
    answers: list[TargetScores] = list(Scorer(model, batch_size=8).score(requests))
    assert sum(model.rows_through_head) == sum(len(a.nll) for a in answers) == len(IDS) - 1


@pytest.mark.parametrize("vocab_multiple", [1, 64])
def test_a_uniform_model_has_the_true_vocabulary_as_perplexity(
    build_gpt: Callable[..., Any], vocab_multiple: int
) -> None:
    model = build_gpt(vocab_multiple=vocab_multiple)
    for parameter in model.model.parameters():
        parameter.data.zero_()
    nll = total(model, WindowedRequests([IDS], SEQ_LEN, 4))
    assert math.exp(nll / (len(IDS) - 1)) == pytest.approx(VOCAB_SIZE, rel=1e-14)


def test_padded_columns_are_never_the_argmax(build_gpt: Callable[..., Any]) -> None:
    model = build_gpt()
    with torch.no_grad():
        model.model.embedding.token.weight[VOCAB_SIZE:] = 50.0  # would win every time
    widths = model.logits(Batch(tokens_BT=torch.from_numpy(IDS[None, :8]), labels_BT=None)).argmax(-1)
    assert widths.max() < VOCAB_SIZE
    assert math.isfinite(total(model, WindowedRequests([IDS], SEQ_LEN, 4)))


def test_a_unigram_has_its_closed_form(build_table: Callable[..., Any]) -> None:
    probabilities = np.arange(1, VOCAB_SIZE + 1) / np.arange(1, VOCAB_SIZE + 1).sum()
    model = build_table(np.tile(np.log(probabilities), (VOCAB_SIZE, 1)))
    expected = -np.log(probabilities[IDS[1:]]).sum()
    assert total(model, WindowedRequests([IDS], SEQ_LEN, 4)) == pytest.approx(expected, rel=1e-13)


def test_greedy_flags_say_where_the_target_was_likeliest(build_table: Callable[..., Any]) -> None:
    table = np.zeros((5, 5))
    table[np.arange(5), (np.arange(5) + 1) % 5] = 9.0  # a token is followed by the next one
    answers = list(Scorer(build_table(table), batch_size=2).score([Request(np.array([0, 1, 2, 2, 3]), 4)]))
    assert answers[0].greedy.tolist() == [True, True, False, True]


def test_a_damaged_model_is_an_error_and_no_number(build_table: Callable[..., Any]) -> None:
    with pytest.raises(NonFiniteLossError, match="2 of 2 targets"):
        total(build_table(np.full((5, 5), np.nan)), [Request(np.array([0, 1, 2]), 2)])


MISTAKES: dict[str, Callable[[list[Request]], list[Request]]] = {
    "a window scores one target too few": lambda rs: [
        dataclasses.replace(r, num_scored=r.num_scored - (i > 0)) for i, r in enumerate(rs)
    ],
    "a window scores one target too many": lambda rs: [
        dataclasses.replace(r, num_scored=r.num_scored + (i > 0)) for i, r in enumerate(rs)
    ],
    "the context is cut on the wrong side": lambda rs: [
        dataclasses.replace(r, tokens=r.tokens[-r.num_scored - 1 :]) for r in rs
    ],
    "the padding is scored": lambda rs: [
        Request(np.append(r.tokens, [0] * (SEQ_LEN + 1 - len(r.tokens))), r.num_scored + SEQ_LEN + 1 - len(r.tokens))
        for r in rs
    ],
    "inputs and targets are shifted": lambda rs: [dataclasses.replace(r, tokens=np.roll(r.tokens, 1)) for r in rs],
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_likely_mistake_changes_the_mean(build_gpt: Callable[..., Any], mistake: str) -> None:
    model = build_gpt()
    right = list(WindowedRequests([IDS], SEQ_LEN, 4))
    wrong = MISTAKES[mistake](right)
    means = [total(model, rs) / sum(r.num_scored for r in rs) for rs in (right, wrong)]
    assert abs(means[0] - means[1]) > 1e-4 * means[0]


@pytest.mark.parametrize("stride", [3, 15, 16])
def test_a_stride_off_by_one_changes_the_sum(build_gpt: Callable[..., Any], stride: int) -> None:
    model = build_gpt()
    ours, other = (total(model, WindowedRequests([IDS], SEQ_LEN, s)) for s in (stride, stride - 1))
    assert abs(ours - other) > 1e-4 * ours
