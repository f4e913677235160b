"""A ring's seconds follow from size, bytes and the narrowest link."""

from __future__ import annotations

import numpy as np
import pytest

from lmtrain.plan.case import columns
from lmtrain.plan.communicate import dp_group, send, tp_group
from tests.unit.plan.cases import gpt3
from tests.unit.plan.machines import nominal

F = nominal()
GB = np.full(1, 1e9)


def test_a_ring_inside_a_node() -> None:
    found = float(tp_group(columns([gpt3()]), F).reduced(GB)[0])
    assert found == pytest.approx(2 * 7 / 8 / (300 * F["link_share"]), rel=0.01)


def test_one_rank_sends_nothing() -> None:
    assert float(tp_group(columns([gpt3(tp=1)]), F).reduced(GB)[0]) == 0.0


@pytest.mark.parametrize(("tp", "share"), [(8, 1 / 8), (4, 1 / 4), (2, 1 / 2), (1, 1.0)])
def test_groups_of_a_node_share_its_adapters(tp: int, share: float) -> None:
    c = columns([gpt3(tp=tp, dp=64)])
    found = float(dp_group(c, F, c.dp).shared(GB)[0])
    assert found == pytest.approx(63 / 64 / (200 * share * F["nic_share"]), rel=0.05)


def test_a_gather_passes_every_rank_and_a_sum_goes_by_trees() -> None:
    few, many = (columns([gpt3(tp=1, dp=dp)]) for dp in (128, 2048))
    nothing = np.zeros(1)
    gathers = [float(dp_group(c, F, c.dp).shared(nothing)[0]) for c in (few, many)]
    sums = [float(dp_group(c, F, c.dp).reduced(nothing)[0]) for c in (few, many)]
    assert gathers[1] == pytest.approx(16 * gathers[0], rel=0.1)
    assert sums[1] < 8 * sums[0]


def test_a_message_to_the_next_node_takes_an_adapter() -> None:
    near, far = (float(send(columns([gpt3(dp=dp, tp=tp)]), F, GB)[0]) for dp, tp in ((1, 2), (8, 8)))
    assert far > 5 * near
