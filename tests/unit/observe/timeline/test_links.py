"""Sends find their receives, and members of a collective one another, by rank, step and number alone."""

from __future__ import annotations

import numpy as np

from lmtrain.layout import Layout
from lmtrain.observe.spans.span_file import Axis, Flag, Kind
from lmtrain.observe.timeline.merge_ranks import MERGED, collective_groups, lowest_ranks, message_pairs


def spans(*rows: tuple[int, Kind, int, int, int, Axis, int]) -> np.ndarray:
    """(rank, kind, peer, step, number, axis, flags)"""
    found = np.zeros(len(rows), MERGED)
    names = ("rank", "kind", "peer", "step", "number", "axis", "flags")
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        found[name] = column
    return found


def test_a_message_is_known_by_both_ranks_its_step_and_its_number() -> None:
    pp, send, receive = Axis.PP, Kind.SEND, Kind.RECEIVE
    found = spans(
        (0, send, 1, 5, 0, pp, 0), (0, send, 1, 5, 1, pp, 0), (0, send, 1, 6, 0, pp, 0), (1, send, 0, 5, 0, pp, 0),
        (0, send, 1, 5, 0, pp, Flag.EARLY), (1, receive, 0, 6, 0, pp, 0), (1, receive, 0, 5, 1, pp, 0),
        (0, receive, 1, 5, 0, pp, 0), (1, receive, 0, 7, 0, pp, 0),
    )  # fmt: skip
    sent, received = message_pairs(found)
    assert sorted(zip(sent.tolist(), received.tolist(), strict=True)) == [(1, 6), (2, 5), (3, 7)]
    assert [part.size for part in message_pairs(found[:2])] == [0, 0]


def test_groups_of_every_axis() -> None:
    layout = Layout(pp=2, dp_replicate=2, dp_shard=2, tp=2)
    first = lowest_ranks(layout)
    for axis, size in ((Axis.PP, 2), (Axis.DP, 4), (Axis.DP_REPLICATE, 2), (Axis.DP_SHARD, 2), (Axis.TP, 2),
                       (Axis.PLANE, 8), (Axis.WORLD, 16)):  # fmt: skip
        assert np.bincount(first[axis])[np.unique(first[axis])].tolist() == [size] * (16 // size)
    assert [int(first[axis, 15]) for axis in (Axis.PP, Axis.DP, Axis.TP, Axis.PLANE)] == [7, 9, 14, 8]


def test_members_of_a_collective() -> None:
    layout, one = Layout(dp_shard=2, tp=2), Kind.COLLECTIVE
    found = spans(
        (0, one, -1, 1, 0, Axis.TP, 0), (0, one, -1, 1, 0, Axis.DP, 0), (0, one, 3, 1, 0, Axis.DP, 0),
        (1, one, -1, 1, 0, Axis.TP, 0), (2, one, -1, 1, 0, Axis.DP, 0), (2, one, -1, 1, 0, Axis.TP, 0),
        (3, one, 0, 1, 0, Axis.DP, 0), (3, one, -1, 1, 0, Axis.NONE, 0), (3, one, -1, 1, 0, Axis.TP, Flag.ASIDE),
    )  # fmt: skip
    place, which = collective_groups(found, layout)
    groups = {tuple(place[which == number].tolist()) for number in np.unique(which)}
    assert groups == {(0, 3), (1, 4), (2, 6), (5,)}
