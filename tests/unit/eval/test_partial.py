"""The first items alone: requests may be walked again, and other items never show."""

from __future__ import annotations

import numpy as np

from lmtrain.eval.runner import FirstDocuments, FirstRequests
from lmtrain.eval.windows import WindowedRequests


def test_requests_and_documents_can_be_walked_twice() -> None:
    sequences = [np.arange(n) for n in (9, 1, 5, 7)]
    requests = FirstRequests(WindowedRequests(sequences, 4, 4), 3)
    assert [request.item for request in requests] == [request.item for request in requests] == [0, 0, 2]
    documents = FirstDocuments(sequences, 3)
    assert [len(one) for one in documents] == [len(one) for one in documents] == [9, 1, 5]
