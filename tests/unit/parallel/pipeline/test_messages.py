"""A first message along each lane: which there are, and that no order of schedules makes ranks wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lmtrain.errors import LayoutError
from lmtrain.layout import Layout
from lmtrain.parallel.mesh import build_mesh
from lmtrain.parallel.pipeline.stage_to_stage_messages import (
    DirectionGroups,
    Header,
    Inbox,
    Mailbox,
    MessageKey,
    MessagePlan,
    Outbox,
    connect_pairs,
    message_pairs,
    message_sent_after,
)
from lmtrain.runtime.processes.process_group import new_group
from lmtrain.schedules.pipeline_schedule import schedule_named
from lmtrain.schedules.table import Kind
from tests.layouts.workers import Pool

Pair = tuple[int, int]
SCHEDULES = [
    (name, pp, vp)
    for name in ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v")
    for pp in (2, 3, 4, 8)
    for vp in (1, 2, 3)
    if schedule_named(name).allows(vp)
]


def sent(name: str, pp: int, vp: int) -> list[list[Pair]]:
    """(sender, receiver) of each rank's first messages, in the order in which its row makes them."""
    table = schedule_named(name).table(pp, vp, 2 * pp)
    rows = []
    for rank, row in enumerate(table.actions):
        letters = [letter for action in row if (letter := message_sent_after(action, pp * vp - 1))]
        receivers = [table.rank_of[letter.stage] for letter in letters]
        rows.append(list(dict.fromkeys((rank, receiver) for receiver in receivers if receiver != rank)))
    return rows


@pytest.mark.parametrize(("name", "pp", "vp"), SCHEDULES)
def test_every_lane_of_a_schedule_is_warmed_and_no_other(name: str, pp: int, vp: int) -> None:
    owners = schedule_named(name).ranks_of_stages(pp, vp)
    pairs = message_pairs(owners)
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == {pair for row in sent(name, pp, vp) for pair in row}


def rounds(orders: Sequence[Sequence[Pair]]) -> int | None:
    """How often all look who has come, where a pair meets once both of it are there, as when NCCL makes a communicator;
    None where they wait for ever."""
    at, count = [0] * len(orders), 0
    while any(place < len(order) for place, order in zip(at, orders, strict=True)):
        heads = [order[place] if place < len(order) else None for place, order in zip(at, orders, strict=True)]
        met = {pair for pair in heads if pair and heads[pair[0]] == heads[pair[1]]}
        if not met:
            return None
        at = [place + (head in met) for place, head in zip(at, heads, strict=True)]
        count += 1
    return count


@pytest.mark.parametrize(("name", "pp", "vp"), SCHEDULES)
def test_ranks_that_go_through_the_lanes_in_one_order_all_come_through(name: str, pp: int, vp: int) -> None:
    pairs = message_pairs(schedule_named(name).ranks_of_stages(pp, vp))
    assert rounds([[pair for pair in pairs if rank in pair] for rank in range(pp)]) is not None


def test_more_stages_take_no_more_rounds() -> None:
    for pp in (4, 64):
        pairs = message_pairs(range(pp))
        assert rounds([[pair for pair in pairs if rank in pair] for rank in range(pp)]) == 4
    one_by_one = [*pairwise(range(64))]
    assert rounds([[pair for pair in one_by_one if rank in pair] for rank in range(64)]) == 63


def test_an_order_of_each_rank_s_own_stands_still() -> None:
    """The planted bug: each rank begins with what it receives, as its receives are posted ahead."""
    pairs = message_pairs(schedule_named("interleaved").ranks_of_stages(4, 2))
    receives = [[pair for pair in sorted(pairs) if pair[1] == rank] for rank in range(4)]
    sends = [[pair for pair in sorted(pairs) if pair[0] == rank] for rank in range(4)]
    assert rounds([first + then for first, then in zip(receives, sends, strict=True)]) is None


def warmed(pp: int) -> list[list[Any]]:
    """What a worker sends and receives of it, in its order."""
    mesh, done = build_mesh(Layout(pp=pp, vp=2), torch.device("cpu"), 60.0), []
    lanes = DirectionGroups(new_group(mesh.pp.ranks, 60.0, 4), new_group(mesh.pp.ranks, 60.0, 4))
    right = dist.isend, dist.irecv

    def noted(start: Any, kind: str) -> Any:
        def call(tensor: Any, peer: int, group: Any) -> Any:
            done.append([kind, peer, "up" if group is lanes.up else "down"])
            return start(tensor, peer, group=group)

        return call

    dist.isend, dist.irecv = noted(right[0], "send"), noted(right[1], "receive")
    try:
        pairs = message_pairs(schedule_named("interleaved").ranks_of_stages(pp, 2))
        connect_pairs(lanes, pairs, mesh.pp, torch.zeros(1))
    finally:
        dist.isend, dist.irecv = right
    return done


def test_lanes_are_warmed(pool: Pool) -> None:
    ranks = pool.run(f"{__name__}:warmed", 2, {"pp": 2})
    assert ranks == [[["send", 1, "up"], ["receive", 1, "down"]], [["receive", 0, "up"], ["send", 0, "down"]]]


EXPECTED = Header(3, 72, (4, 3, 2), torch.float32)
OTHERS = {
    "other rows": (Header(3, 36, (2, 3, 2), torch.float32), "3 messages of [2, 3, 2] float32"),
    "fewer": (Header(2, 48, (4, 3, 2), torch.float32), "2 messages of [4, 3, 2] float32"),
    "fewer rows later": (Header(3, 60, (4, 3, 2), torch.float32), "[4, 3, 2] and other shapes, 60 numbers in all,"),
    "others behind the first": (
        Header(3, 72, (4, 3, 2), torch.float32, 7), "3 messages of [4, 3, 2] float32, but others behind the first"
    ),
    "another precision": (Header(3, 72, (4, 3, 2), torch.bfloat16), "3 messages of [4, 3, 2] bfloat16"),
}


def told_of_others() -> list[str]:
    """Return the errors that a receiver gets for messages it does not expect, and none on the rank that sends them."""
    group, told = dist.group.WORLD, []
    assert group is not None
    for terms, _ in OTHERS.values():
        if dist.get_rank() == 0:
            Outbox(1, group, terms).free_sent()
            continue
        with pytest.raises(LayoutError) as refused:
            Inbox([], 0, group, lambda letter: torch.empty(0), EXPECTED).receive(MessageKey(False, 1, 0))
        told.append(str(refused.value))
    return told


def test_stages_with_other_messages_are_told_so_however_alike_they_begin(pool: Pool) -> None:
    _, told = pool.run(f"{__name__}:told_of_others", 2)
    for words, (_, sent) in zip(told, OTHERS.values(), strict=True):
        assert "do not have the same batch: rank 0 sends " in words
        assert sent in words.partition("rank 1 expects")[0]
        assert f"rank 1 expects {EXPECTED}. Give" in words


def told_of_another_micro_batch(rows: Sequence[int]) -> str:
    """Return the error that the second stage gets if its three micro-batches have 4, 2 and 4 rows, and the second and
    third of the first stage have `rows`.
    """
    mesh, table = build_mesh(Layout(pp=2), torch.device("cpu"), 60.0), schedule_named("1f1b").table(2, 1, 3)
    forwards = [[action for action in row if action.kind is Kind.FORWARD] for row in table.actions]
    groups = DirectionGroups(new_group(mesh.pp.ranks, 60.0, 4), new_group(mesh.pp.ranks, 60.0, 4))
    shapes = [(4, 3, 2), *((count, 3, 2) for count in ((2, 4) if mesh.pp.index else rows))]
    plan = MessagePlan.of(forwards, table.rank_of, mesh.pp.index)
    mailbox = Mailbox(plan, shapes, torch.empty(0), mesh, groups, split_over_tp=False)
    if mesh.pp.index == 0:
        mailbox.outboxes[1].free_sent()
        return ""
    with pytest.raises(LayoutError) as refused:
        mailbox.inboxes[0].receive(MessageKey(False, 1, 0))
    return str(refused.value)


@pytest.mark.parametrize(
    ("rows", "says"), [((2, 2), "48 numbers in all, float32, and"), ((4, 2), "float32, but others behind the first")]
)
def test_what_is_announced_counts_every_micro_batch(pool: Pool, rows: tuple[int, int], says: str) -> None:
    """The same micro-batches in another order are others, too: a receiver would wait for rows that never come."""
    _, told = pool.run(f"{__name__}:told_of_another_micro_batch", 2, {"rows": rows})
    assert "rank 0 sends 3 messages of [4, 3, 2] and other shapes, " in told
    assert says in told
