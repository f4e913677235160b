"""What is fastest among what fits, and what was in the way of the others."""

from __future__ import annotations

import numpy as np

from lmtrain.plan.case import columns
from lmtrain.plan.memory import GIB, price_memory
from lmtrain.plan.ours import case_of
from lmtrain.plan.rank import FAMILY
from lmtrain.plan.step import price_step
from tests.unit.plan.searched import h100, ranked


def test_the_fastest_stand_first_and_all_of_them_fit() -> None:
    found = ranked()
    seconds, held = found.seconds[found.fastest], found.held[found.fastest]
    assert len(found.fastest) == found.fits.sum() > 50
    assert np.all(np.diff(seconds) >= -1e-5 * seconds[1:])
    assert held.max() <= 0.92 * found.room == 0.92 * 79.1 * GIB
    assert np.all(found.held[~found.fits] > 0.92 * found.room)


def test_prices_are_those_of_the_layout_alone() -> None:
    found = ranked()
    for place in found.fastest[[0, 7, -1]]:
        alone = columns([case_of(found.space.planned(int(found.rows[place])), h100())])
        assert np.isclose(price_step(alone, found.prices.time).total[0], found.seconds[place])
        assert np.isclose(price_memory(alone, found.prices.memory).total[0], found.held[place])


def test_the_most_frugal_takes_fewest_joules() -> None:
    found = ranked()
    assert found.joules[found.frugal[0]] == found.joules[found.fits].min()


def test_what_is_faster_and_too_large_is_known() -> None:
    small = ranked(memory_GiB=12.0)
    best = small.seconds[small.fastest[0]]
    assert len(small.unfitting) > 0
    assert np.all(small.seconds[small.unfitting] < best)
    assert not np.any(small.fits[small.unfitting])
    assert best > ranked().seconds[ranked().fastest[0]]


def test_a_family_is_named_by_its_best() -> None:
    found = ranked()
    firsts = found.firsts(found.fastest)
    keys = [tuple(found.space.column(name, found.rows[[place]])[0] for name in FAMILY) for place in firsts]
    assert len(set(keys)) == len(keys) > 5
    assert firsts[0] == found.fastest[0]
    every = {tuple(row) for row in np.stack([found.space.column(name, found.rows[found.fastest]) for name in FAMILY]).T}
    assert set(keys) == every


def test_a_larger_margin_leaves_fewer() -> None:
    assert 0 < ranked(margin=0.5).fits.sum() < ranked().fits.sum()


def test_what_shares_weights_stays_below_one_switch() -> None:
    few = ranked(switch=8)
    rows = few.rows[few.fits]
    assert (few.space.column("shard", rows) * few.space.column("tp", rows)).max() == 8
    every = ranked().rows[ranked().fits]
    assert (ranked().space.column("shard", every) * ranked().space.column("tp", every)).max() == 16
