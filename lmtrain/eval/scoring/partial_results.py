"""The first items of what a task has prepared, for a quick look: another protocol, and named so. Called by the runner.

Knows no task: a request says which item it is of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from lmtrain.errors import UsageError
from lmtrain.eval.task import Prepared
from lmtrain.eval.text.windows import Request, Tokens


def first_items(prepared: Prepared, limit: int) -> Prepared:
    """Facts stay those of the whole text, but for the protocol's id and what is divided by."""
    num_items = prepared.num_items
    facts = prepared.facts
    if num_items == 1:
        raise UsageError(
            f"--limit={limit} takes the first items of a text, and to {facts.protocol} this text is one item. "
            "Leave --limit out, or give a shorter text."
        )
    if limit >= num_items:
        return prepared
    requests = FirstRequests(prepared.requests, limit)
    return dataclasses.replace(
        prepared,
        requests=requests,
        num_targets=sum(request.num_scored for request in requests),
        known={name: values[:limit] for name, values in prepared.known.items()},
        documents=None if prepared.documents is None else FirstDocuments(prepared.documents, limit),
        facts=dataclasses.replace(
            facts,
            protocol=f"{facts.protocol}-first{limit}",
            denominator=f"what the first {limit} of {num_items} items have; all of them: {facts.denominator}",
            limit=limit,
        ),
    )


@dataclass(frozen=True)
class FirstRequests:
    """May be walked as often as what it is made of."""

    requests: Iterable[Request]
    limit: int

    def __iter__(self) -> Iterator[Request]:
        return (request for request in self.requests if request.item < self.limit)


@dataclass(frozen=True)
class FirstDocuments:
    documents: Iterable[Tokens]
    limit: int

    def __iter__(self) -> Iterator[Tokens]:
        return islice(iter(self.documents), self.limit)
