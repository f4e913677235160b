"""Loss by position: every target once, in the row of the tokens that it could see."""

from __future__ import annotations

import numpy as np

from lmtrain.eval.run_task import PositionLosses
from lmtrain.eval.windows import Request


def test_targets_are_counted_by_the_tokens_before_them() -> None:
    found = PositionLosses()
    found.add(Request(np.arange(9), 8), np.arange(1.0, 9.0))  # before them: 1, 2, ... 8
    found.add(Request(np.arange(9), 1), np.array([10.0]))  # before it: 8
    assert [tuple(row.values()) for row in found.rows()] == [
        (1, 1, 1, 1.0), (2, 3, 2, 2.5), (4, 7, 4, 5.5), (8, 15, 2, 9.0),
    ]  # fmt: skip


def test_without_targets_there_are_no_rows() -> None:
    assert PositionLosses().rows() == ()
