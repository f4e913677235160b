"""What several tasks feed alike is scored once, and every task gets its own answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from lmtrain.eval import score_targets
from lmtrain.eval.score_targets import Scorer, SharedAnswers, TargetScores
from lmtrain.eval.windows import MaskedRequest, Request, WindowedRequests

IDS = np.random.default_rng(0).integers(0, 37, 75)


class Counted:
    """A scorer that says how many requests it has been given."""

    def __init__(self, model: Any) -> None:
        self.scorer, self.num = Scorer(model, batch_size=3), 0

    def score(self, requests: Iterable[Request]) -> Iterator[TargetScores]:
        def counted() -> Iterator[Request]:
            for request in requests:
                self.num += 1
                yield request

        return self.scorer.score(counted())


@pytest.fixture
def counted(build_gpt: Callable[..., Any]) -> Counted:
    return Counted(build_gpt())


def same(ours: list[TargetScores], other: list[TargetScores]) -> None:
    for one, another in zip(ours, other, strict=True):
        np.testing.assert_allclose(one.nll, another.nll, rtol=0, atol=5e-6)
        assert np.array_equal(one.greedy, another.greedy)


def test_a_text_of_two_names_is_scored_once(counted: Counted) -> None:
    together, requests = SharedAnswers(), WindowedRequests([IDS, IDS[:9]], 16, 5)
    first = list(together.score(requests, counted.score))
    num = counted.num
    second = list(together.score(requests, counted.score))
    assert num == counted.num == len(first), "the second time nothing is fed"
    assert all(np.array_equal(one.nll, other.nll) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize(("order", "num_shared"), [((0, 1), 16), ((1, 0), 5)])
def test_other_tokens_and_more_targets_are_asked_of_the_model(
    counted: Counted, order: tuple[int, int], num_shared: int
) -> None:
    """Some lines end in words of several tokens, of which another task, of most of these lines, asks for the last."""
    words = [Request(IDS[i : i + 8], 1 + i % 3, i) for i in range(20)]
    last = [Request(words[i].tokens if i % 5 else IDS[i + 1 : i + 8], 1, i) for i in range(20)]
    together = SharedAnswers()
    for requests in [(words, last)[which] for which in order]:
        same(list(together.score(requests, counted.score)), list(counted.scorer.score(requests)))
    assert counted.num == 40 - num_shared


def test_equal_requests_of_one_task_are_each_answered(counted: Counted) -> None:
    requests = [Request(IDS[:8], 2), Request(IDS[:8], 3), Request(IDS[1:9], 1)]
    together = SharedAnswers()
    for _ in range(2):
        same(list(together.score(requests, counted.score)), list(counted.scorer.score(requests)))


def test_only_so_much_is_remembered(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_targets, "MAX_SHARED_TARGETS", 5)
    together, requests = SharedAnswers(), [Request(IDS[i : i + 8], 4, i) for i in range(6)]
    for num in (6, 6 + 4):
        list(together.score(requests, counted.score))
        assert counted.num == num


def test_masks_at_other_places_are_another_question() -> None:
    """Tokens that stand as they were where they are asked for do not tell which of two alike is meant."""
    fed, scored = np.array([2, 7, 8, 7, 3]), []

    def asked(place: int, segments: Any = None) -> MaskedRequest:
        return MaskedRequest(np.append(fed, 7), 1, places=np.array([place]), segments=segments)

    def score(requests: Iterable[Request]) -> Iterator[TargetScores]:
        for request in requests:
            assert isinstance(request, MaskedRequest)
            assert request.places is not None
            scored.append(request)
            yield TargetScores(request.places.astype(np.float64), np.array([True]))

    together = SharedAnswers()
    tasks = [[asked(1)], [asked(3)], [asked(1, np.zeros(5, np.int64))], [asked(1)]]
    answers = [one.nll[0] for requests in tasks for one in together.score(requests, score)]
    assert (answers, len(scored)) == ([1, 3, 1, 1], 3)
