"""Ranking of layouts: the fastest that fits, and why the others are not better."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from lmtrain.plan.cost_model.step_time_and_energy import price_step
from lmtrain.plan.cost_model.training_workload import stack_cases
from lmtrain.plan.run_estimates.closed_form_memory import GIB, price_memory
from lmtrain.plan.run_estimates.simulate_pipeline import price_runs
from lmtrain.plan.run_estimates.workload_from_settings import build_case
from lmtrain.plan.search.order_layouts_by_speed import SHARDING_COLUMNS
from tests.unit.plan.ranked_run import LARGE, h100, ranked, run_of, study


def test_the_fastest_stand_first_and_all_of_them_fit() -> None:
    found = ranked()
    every = list(islice(found.iter_fitting(found.fastest), 60))
    seconds, held = found.seconds[every], [found.count_bytes(place) for place in every]
    assert every[0] == found.best_index
    assert np.all(np.diff(seconds) >= -1e-5 * seconds[1:])
    assert max(held) <= 0.92 * found.hardware.memory_bytes == 0.92 * 79.1 * GIB


def test_what_fits_is_what_its_ranks_are_counted_to() -> None:
    """The closed form leads, and the count decides, whichever way the closed form is wrong."""
    found = ranked(memory_GiB=12.0)
    faster = [place for place in found.fastest.tolist() if found.seconds[place] < found.seconds[found.best_index or 0]]
    assert faster
    assert all(found.count_bytes(place) > found.usable_bytes for place in faster)
    few = list(islice(found.iter_fitting(found.fastest), 200))
    assert min(found.estimated_bytes[few]) < found.usable_bytes
    assert max(found.count_bytes(place) for place in few) <= found.usable_bytes


def test_what_was_counted_is_not_guessed_again() -> None:
    """Whatever has been learned since from layouts that are like it."""
    found = study().rank_layouts(16)
    before = list(islice(found.iter_fitting(found.fastest), 20))
    found._count_ratios.update(dict.fromkeys(found._count_ratios, 10.0))
    assert list(islice(found.iter_fitting(found.fastest), 20)) == before


@pytest.mark.parametrize("memory_GiB", [12.0, 79.1])
def test_the_closed_form_is_near_what_ranks_are_counted_to(memory_GiB: float) -> None:
    """Of every schedule and way to do work again, so that nothing that fits is far from being asked."""
    found = ranked(memory_GiB=memory_GiB)
    rows = found.rows[found.estimated_bytes < 2 * found.hardware.memory_bytes]
    places = np.flatnonzero(found.estimated_bytes < 2 * found.hardware.memory_bytes)
    chosen = places[np.random.default_rng(7).permutation(len(rows))[:150]]
    off = np.array([found.estimated_bytes[place] / found.count_bytes(int(place)) for place in chosen])
    assert len(set(found.space.column("schedule", found.rows[chosen]))) == 4
    assert 0.7 < off.min() < off.max() < 1.35
    assert np.median(np.abs(off - 1)) < 0.08


def test_prices_are_those_of_the_layout_alone() -> None:
    found = ranked()
    for place in found.fastest[[0, 7, -1]]:
        alone = stack_cases([build_case(found.space.run_at(int(found.rows[place])), h100())])
        assert np.isclose(price_step(alone, found.cost_model.time).total[0], found.seconds[place])
        assert np.isclose(price_memory(alone, found.cost_model.memory).total[0], found.estimated_bytes[place])


def test_what_stands_first_is_replayed() -> None:
    """Fifteen layers make stages of one and of two, and the closed form knows none but even ones."""
    run = run_of(replace(LARGE, num_layers=15, vocab_size=128256), 64)
    found = replace(study(), run=run, fixed_settings={"tp": 4}).rank_layouts(16)
    first = list(islice(found.iter_fitting(found.fastest), 16))
    time, _ = price_runs([found.run_at(place) for place in first], h100(), found.cost_model.time)
    assert found.seconds[first] == pytest.approx(time.total)
    assert np.all(np.diff(time.total) >= -1e-5 * time.total[1:])
    closed = price_step(found.space.columns(found.rows[first]), found.cost_model.time).total
    assert np.max(np.abs(closed / time.total - 1)) > 0.01


def test_the_most_frugal_takes_fewest_joules() -> None:
    found = ranked()
    best = next(found.iter_fitting(found.most_frugal))
    assert found.joules[best] <= min(found.joules[place] for place in islice(found.iter_fitting(found.fastest), 40))


def test_what_is_faster_and_too_large_is_known() -> None:
    small = ranked(memory_GiB=12.0)
    assert small.best_index is not None
    best = small.seconds[small.best_index]
    assert len(small.faster_but_too_large) > 0
    assert np.all(small.seconds[small.faster_but_too_large] < best)
    assert all(small.count_bytes(int(place)) > small.usable_bytes for place in small.faster_but_too_large[:20])
    assert best > ranked().seconds[ranked().fastest[0]]


def test_a_family_is_named_by_its_best() -> None:
    found = ranked()
    firsts = list(found.iter_fitting(found.fastest, SHARDING_COLUMNS))
    keys = [tuple(found.space.column(name, found.rows[[place]])[0] for name in SHARDING_COLUMNS) for place in firsts]
    assert len(set(keys)) == len(keys) > 5
    assert firsts[0] == found.best_index


def test_a_larger_margin_leaves_fewer() -> None:
    assert 0 < ranked(margin=0.5).num_fitting < ranked().num_fitting


def test_what_shares_weights_stays_below_one_switch() -> None:
    few = ranked(switch=8)
    rows = few.rows[few.fastest]
    assert (few.space.column("shard", rows) * few.space.column("tp", rows)).max() == 8
    every = ranked().rows[ranked().fastest]
    assert (ranked().space.column("shard", every) * ranked().space.column("tp", every)).max() == 16
