"""A ring's seconds follow from size, bytes and the narrowest link."""

from __future__ import annotations

import numpy as np
import pytest

from lmtrain.plan.cost_model.step_time_and_energy import dp_group, ranks_per_node, replica_group, send_seconds, tp_group
from lmtrain.plan.cost_model.training_workload import stack_cases
from tests.unit.plan.cases import CONF, gpt3
from tests.unit.plan.machines import hardware_named, nominal

F = nominal()
GB = np.full(1, 1e9)


def test_a_ring_inside_a_node() -> None:
    found = float(tp_group(stack_cases([gpt3()]), F).all_reduce_seconds(GB)[0])
    assert found == pytest.approx(2 * 7 / 8 / (300 * F["link_share"]), rel=0.01)


def test_one_rank_sends_nothing() -> None:
    assert float(tp_group(stack_cases([gpt3(tp=1)]), F).all_reduce_seconds(GB)[0]) == 0.0


@pytest.mark.parametrize(("tp", "share"), [(8, 1 / 8), (4, 1 / 4), (2, 1 / 2), (1, 1.0)])
def test_groups_of_a_node_share_its_adapters(tp: int, share: float) -> None:
    c = stack_cases([gpt3(tp=tp, dp=64)])
    found = float(dp_group(c, F, c.dp).all_gather_seconds(GB)[0])
    assert found == pytest.approx(63 / 64 / (200 * share * F["nic_share"]), rel=0.05)


@pytest.mark.parametrize("tp", [3, 6, 12, 16])
def test_a_group_that_lies_across_nodes_takes_adapters(tp: int) -> None:
    """Of 8: ranks 6 to 8 are on two nodes."""
    one = tp_group(stack_cases([gpt3(tp=tp, dp=64)]), F)
    assert one.bytes_per_s[0] <= 200e9 * F["nic_share"] * (1.0 if tp == 16 else 0.5)
    alone = tp_group(stack_cases([gpt3(tp=3, dp=2, pp=1)]), F)
    assert alone.bytes_per_s[0] == pytest.approx(300e9 * F["link_share"]), "six devices are all on one node"


def test_a_run_is_spread_evenly_over_the_nodes_it_needs() -> None:
    rack = hardware_named("gb200", CONF)
    c = stack_cases([gpt3(hardware=rack, pp=1, tp=2, dp=64)])
    assert ranks_per_node(c, c.dp, c.tp)[0] == 32, "64 of 72 in each of two racks"


@pytest.mark.parametrize(("dp", "tp", "local"), [(15, 1, 7), (30, 1, 7), (15, 2, 3), (12, 1, 6), (16, 1, 8)])
def test_a_group_that_is_all_of_the_run_has_all_of_a_node(dp: int, tp: int, local: int) -> None:
    """15 on nodes of 8 are 8 and 7, and its ring leaves a node once: it is no dearer than that of 16."""
    c = stack_cases([gpt3(pp=1, tp=tp, dp=dp)])
    found = dp_group(c, F, c.dp)
    assert ranks_per_node(c, c.dp, c.tp)[0] == local
    assert found.bytes_per_s[0] == pytest.approx(200e9 * F["nic_share"] * local / 8)


def test_copies_of_a_node_that_is_cut_in_two_share_its_adapters() -> None:
    """Eight ranks of a node are in as many groups, however many cuts there are."""
    speeds = [
        float(dp_group(c, F, c.dp).bytes_per_s[0]) for c in (stack_cases([gpt3(tp=tp, dp=64)]) for tp in (8, 16, 32))
    ]
    assert speeds == pytest.approx([200e9 / 8 * F["nic_share"]] * 3)


def test_copies_lie_as_far_apart_as_there_are_shards() -> None:
    """With eight shards each rank of a node sends to its own copies; with one, the node is one ring's."""
    groups = [replica_group(stack_cases([gpt3(tp=1, dp=64, zero=3, shard=shard)]), F) for shard in (8, 2, 1)]
    assert [float(one.num_ranks[0]) for one in groups] == [8, 32, 64]
    assert [float(one.bytes_per_s[0]) for one in groups] == pytest.approx(
        [200e9 / share * F["nic_share"] for share in (8, 2, 1)]
    )


def test_a_gather_passes_every_rank_and_a_sum_goes_by_trees() -> None:
    few, many = (stack_cases([gpt3(tp=1, dp=dp)]) for dp in (128, 2048))
    nothing = np.zeros(1)
    gathers = [float(dp_group(c, F, c.dp).all_gather_seconds(nothing)[0]) for c in (few, many)]
    sums = [float(dp_group(c, F, c.dp).all_reduce_seconds(nothing)[0]) for c in (few, many)]
    assert gathers[1] == pytest.approx(16 * gathers[0], rel=0.1)
    assert sums[1] < 8 * sums[0]


def test_a_message_to_the_next_node_takes_an_adapter() -> None:
    """All stages in a node; two stages a node, of which each has one neighbour in another; a node or more a stage."""
    places = ((4, 1, 2), (16, 1, 4), (16, 8, 8))
    near, mixed, far = (
        float(send_seconds(stack_cases([gpt3(pp=pp, dp=dp, tp=tp)]), F, GB)[0]) for pp, dp, tp in places
    )
    assert far > 5 * near
    assert mixed == pytest.approx((near + far) / 2)
