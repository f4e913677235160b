"""The short case of a drill, and what drills compute: a difference is found, and a plan is the same twice."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path

import pytest

from tests.cli.harness import Toy
from tests.drills import day, hangs, injections, starts
from tests.drills.broken import LAYOUTS, Options, World
from tests.toytext import write_toy_last_words


@pytest.fixture(scope="module")
def options(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Options:
    folder = tmp_path_factory.mktemp("drills")
    lines = folder / "lambada_test.jsonl"
    write_toy_last_words(lines, 4)
    return Options(World(toy.text, toy.data, lines), folder)


def test_a_plan_is_the_same_for_a_seed_and_every_point_is_in_it() -> None:
    layouts = tuple(LAYOUTS)
    assert injections.plan(3, layouts, 40) == injections.plan(3, layouts, 40)
    assert injections.plan(3, layouts, 40) != injections.plan(4, layouts, 40)
    faults = " ".join(str(one) for layout, run in injections.plan(1, ("pp2",), 12) for one in run)
    for point in ("start.imports", "ckpt.mid_write", "pipeline.message", "valid.batch", "shutdown", "SIGUSR1"):
        assert point in faults


def test_the_time_that_counts() -> None:
    assert day.effective(10.0, 0.0, 0.0, 1e9) == pytest.approx(1.0)
    assert day.young(2.0, 100.0) == 20.0
    assert day.effective(4.0, 0.5, 7.0, 20.0) == pytest.approx(played(4.0, 0.5, 7.0, 20.0)[0], rel=0.01)
    at_young = day.effective(day.young(0.5, 50.0), 0.5, 7.0, 50.0)
    assert 0.99 * day.best(0.5, 7.0, 50.0) < at_young <= day.best(0.5, 7.0, 50.0)


def test_failures_in_a_start_count_once() -> None:
    """Daly's own formula takes a start's undisturbed length and failures at any time."""
    interval, save, undisturbed, between = 4.0, 0.5, 7.0, 20.0
    share, start = played(interval, save, undisturbed, between, in_starts=True)
    assert start == pytest.approx(between * math.expm1(undisturbed / between), rel=0.02)
    assert share == pytest.approx(day.effective(interval, save, start, between), rel=0.01)
    dalys = interval / (between * math.exp(undisturbed / between) * math.expm1((interval + save) / between))
    assert share == pytest.approx(dalys, rel=0.01)


def played(
    interval: float, save: float, undisturbed: float, between: float, in_starts: bool = False
) -> tuple[float, float]:
    """(the share that counted, the mean start) of many days: failures at random, a start after each, saves between."""
    rng, counted, starting, up, times = random.Random(7), 0.0, 0.0, 0.0, 50_000
    for _ in range(times):
        lasts = rng.expovariate(1 / between)
        counted, up = counted + lasts // (interval + save) * interval, up + lasts
        while in_starts and (failed := rng.expovariate(1 / between)) < undisturbed:
            starting += failed
        starting += undisturbed
    return counted / (up + starting), starting / times


@pytest.mark.wide
def test_two_injections_into_one_run(options: Options) -> None:
    injected = [injections.Injection("kill:point=ckpt.mid_write"), injections.Injection("usr1:point=start.build")]
    row = injections.broken_run(options, 0, "one", injected)
    assert row["wrong"] == []
    assert [one["kind"] for one in row["struck"]] == ["kill", "usr1"]
    other = injections.unbroken(options, "one")
    other["steps"][-1][1] += 1e-6
    (options.folder / "unbroken one.json").write_text(json.dumps(other))
    row = injections.broken_run(dataclasses.replace(options), 2, "one", injected[:1])
    assert row["wrong"] == ["steps differ from those of an unbroken run"]


def test_starts_are_struck_at_every_process_and_the_same_for_a_seed() -> None:
    assert starts.cases(3, 80) == starts.cases(3, 80)
    blows = [blow for _, found in starts.cases(1, 80) for blow in found]
    assert {blow.target for blow in blows} == set(starts.TARGETS)
    asked = [blow for blow in blows if blow.action in starts.STOPS]
    assert len({blow.moment for blow in asked if isinstance(blow.moment, float)}) >= starts.NUM_MOMENTS


@pytest.mark.slow
def test_a_start_that_loses_its_server(options: Options, tmp_path: Path) -> None:
    options = dataclasses.replace(options, folder=tmp_path)
    row = starts.struck_start(options, 0, "tp2", [starts.Blow("server", "KILL", "guardian")])
    assert (row["wrong"], row["sent"], row["code"]) == ([], ["KILL to server"], 0)
    other = starts.unbroken(options, "tp2")
    other["steps"][-1][1] += 1e-6
    (tmp_path / "unbroken tp2.json").write_text(json.dumps(other))
    row = starts.struck_start(options, 1, "tp2", [starts.Blow("launcher", "TERM", "server")])
    assert row["code"] == 75
    assert row["wrong"] == ["steps differ from those of an unbroken run"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stop", "gil", "skip", "loop"])
def test_a_hang_names_its_rank(options: Options, kind: str, tmp_path: Path) -> None:
    row = hangs.hang(dataclasses.replace(options, folder=tmp_path), kind, 0, random.Random(kind))
    assert row["code"] == 76
    assert row["left"] == []
