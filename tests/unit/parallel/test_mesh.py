"""Who is in which group; real groups add up; at 4,096 ranks each rank still makes only its own few groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lmtrain.errors import LayoutError
from lmtrain.layout import Layout
from lmtrain.parallel.mesh import Axis, build_mesh
from tests.layouts.workers import Pool
from tests.marks import wide

CPU = torch.device("cpu")


def test_one_process_needs_no_group() -> None:
    mesh = build_mesh(Layout(), CPU)
    assert mesh.tp == mesh.dp == mesh.pp == mesh.world == Axis(1, 0, None, (0,))
    assert not dist.is_initialized()


def test_a_layout_of_another_size_is_refused() -> None:
    with pytest.raises(LayoutError, match="1 processes were started, but the layout needs 2"):
        build_mesh(Layout(tp=2), CPU)


def sums(layout: dict[str, int]) -> dict[str, Any]:
    """What each axis adds up when every rank gives its own number."""
    mesh = build_mesh(Layout(**layout), CPU, 30.0)
    found: dict[str, Any] = {"coordinate": vars(mesh.coordinate)}
    for name in ("tp", "dp_shard", "dp_replicate", "dp", "world"):
        axis: Axis = getattr(mesh, name)
        number = torch.tensor([float(mesh.rank)])
        if axis.group is not None:
            dist.all_reduce(number, group=axis.group)  # collective: sum over the axis
            assert dist.get_rank(axis.group) == axis.index
        found[name] = [axis.size, axis.index, number.item()]
    plane = mesh.data_mesh()
    found["plane"] = [plane.mesh.tolist(), plane.get_coordinate()]
    shared = torch.tensor([float(mesh.rank)])
    dist.all_reduce(shared, group=plane.get_group("dp_shard"))  # collective: sum over dp_shard
    found["shared"] = shared.item()
    return found


@pytest.mark.parametrize(
    "layout",
    [
        {"dp_shard": 3}, {"tp": 2, "dp_replicate": 2, "dp_shard": 2},
        *wide({"tp": 2, "dp_shard": 2}, {"tp": 2, "dp_replicate": 2}, {"dp_replicate": 2, "dp_shard": 2}, {"tp": 4}),
    ],
    ids=lambda layout: "-".join(f"{axis}{size}" for axis, size in layout.items()),
)  # fmt: skip
def test_each_axis_adds_up_its_own_ranks(pool: Pool, layout: dict[str, int]) -> None:
    """Checked against the coordinates themselves: the ranks that agree with this one in all other axes."""
    where = Layout(**layout)
    places = {rank: where.coordinate(rank) for rank in range(where.world_size)}
    for rank, found in enumerate(pool.run(f"{__name__}:sums", where.world_size, {"layout": layout})):
        at = places[rank]
        assert found["coordinate"] == vars(at)
        for name, free in {"tp": {"tp"}, "dp_shard": {"dp_shard"}, "dp_replicate": {"dp_replicate"},
                           "dp": {"dp_shard", "dp_replicate"},
                           "world": {"tp", "dp_shard", "dp_replicate", "pp"}}.items():  # fmt: skip
            others = [r for r, p in places.items() if all(vars(p)[a] == vars(at)[a] for a in set(vars(at)) - free)]
            assert found[name] == [len(others), others.index(rank), sum(others)], name
        ours = [r for r, p in places.items() if p.tp == at.tp]
        rows = [ours[i : i + where.dp_shard] for i in range(0, len(ours), where.dp_shard)]
        assert found["plane"] == [rows, [at.dp_replicate, at.dp_shard]]
        assert found["shared"] == found["dp_shard"][2]


RANKS = 4096


@pytest.fixture
def fake_world(request: pytest.FixtureRequest) -> Iterator[int]:
    """One rank of many that do not exist: torch's fake back-end answers for them."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=RANKS)
    yield request.param
    dist.destroy_process_group()


LAYOUTS = [
    Layout(tp=8, dp_shard=8, dp_replicate=64),
    Layout(tp=8, dp_shard=512),
    Layout(dp_shard=4096),
    Layout(tp=4096),
]


@pytest.mark.parametrize(
    ("fake_world", "layout"),
    [(0, LAYOUTS[3]), (1234, LAYOUTS[0]), (1234, LAYOUTS[2]), (RANKS - 1, LAYOUTS[1])],
    indirect=["fake_world"],
)
def test_thousands_of_ranks_make_no_group_of_others(
    fake_world: int, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[int]] = []
    torchs = dist.new_group

    def counted(ranks: list[int], **options: Any) -> Any:
        made.append(ranks)
        return torchs(ranks, **options)

    monkeypatch.setattr(dist, "new_group", counted)
    mesh = build_mesh(layout, CPU)
    mesh.data_mesh()
    assert mesh.rank == fake_world
    assert len(made) <= 5  # tp, dp_shard, dp_replicate, dp, and this rank alone
    assert all(fake_world in ranks for ranks in made)
    assert len({tuple(ranks) for ranks in made}) == len(made)  # axes with the same ranks share a group
    axes = layout.tp + layout.dp_shard + layout.dp_replicate + layout.dp + 1
    assert sum(len(ranks) for ranks in made) <= axes
