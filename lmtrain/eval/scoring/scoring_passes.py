"""Several tasks asked of one model share their work: what feeds the same tokens is scored once. Called by the runner.

LAMBADA's two protocols of Megatron feed nearly the same lines, and WikiText has two names for one text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b

from lmtrain.eval.scoring.scoring import Scored
from lmtrain.eval.text.windows import Request

MOST_TARGETS = 10_000_000  # that are remembered; because: they take 90 MB

Score = Callable[[Iterable[Request]], Iterable[Scored]]


class Passes:
    """One for each model, for as long as tasks may come."""

    def __init__(self) -> None:
        self.num_shared = 0  # requests answered without the model
        self._earlier: dict[bytes, Scored] = {}
        self._num_targets = 0

    def new(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Those that no earlier task has had scored."""
        return (request for request in requests if self._find(request) is None)

    def score(self, requests: Iterable[Request], score: Score) -> Iterator[Scored]:
        """Answers in the order of the requests, which are walked twice; the new ones are what `score` is given."""
        scored = iter(score(self.new(requests)))
        found: list[tuple[bytes, Scored]] = []
        for request in requests:
            answer = self._find(request)
            if answer is None:
                answer = next(scored)
                if self._num_targets < MOST_TARGETS:
                    self._num_targets += len(answer.nll)
                    found.append((_key(request), answer))
            else:
                self.num_shared += 1
            yield answer
        self._earlier.update(found)  # not before: `new` is still walking

    def _find(self, request: Request) -> Scored | None:
        found = self._earlier.get(_key(request)) if self._earlier else None
        if found is None or len(found.nll) < request.num_scored:
            return None
        start = len(found.nll) - request.num_scored
        return Scored(found.nll[start:], found.greedy[start:])


def _key(request: Request) -> bytes:
    return blake2b(request.key, digest_size=16).digest()
