"""--elastic chooses only legal layouts, misses none, and stays as near to the settings as possible."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from lmtrain.config.compose_run_settings import compose
from lmtrain.errors import LayoutError, LmtrainError
from lmtrain.layout import divisors
from lmtrain.train.layouts.choose_parallel_layout import adapt_to_processes, adaptation_message
from lmtrain.train.run_config import RunConfig

MOST = 12  # processes


def config(*overrides: str) -> RunConfig:
    small = ["data.path=x", "model.seq_len=24", "model.width=24", "model.num_layers=6", "model.num_heads=6"]
    usual = {"train.global_batch": "24", "train.micro_batch": "2"} | dict(one.split("=", 1) for one in overrides)
    return compose(RunConfig, [*small, *(f"{key}={value}" for key, value in usual.items())])


PLAIN = config()


@st.composite
def legal_configs(draw: st.DrawFn) -> RunConfig:
    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    pp = one_of(1, 2, 3)
    model: Any = replace(cast(Any, PLAIN.model), num_layers=one_of(1, 2, 3, 4, 6), num_heads=one_of(1, 2, 3, 6))
    try:
        parallel = replace(
            PLAIN.parallel, pp=pp, tp=one_of(1, 2, 3), dp_shard=one_of(1, 2, 3), dp_replicate=one_of(1, 2),
            zero=one_of(0, 1, 2, 3), schedule="1f1b" if pp == 1 else one_of("1f1b", "interleaved", "zb_v", "gpipe"),
            vp=1 if pp == 1 else one_of(1, 2), balance="layers" if pp == 1 else one_of("layers", "cost"),
        )  # fmt: skip
        train = replace(PLAIN.train, global_batch=one_of(4, 6, 8, 12, 24), micro_batch=one_of(1, 2, 4))
        return replace(PLAIN, model=model, parallel=parallel, train=train)
    except LmtrainError:
        assume(False)
        raise


def all_legal(asked: RunConfig, num_processes: int) -> Iterator[RunConfig]:
    """By trying everything, with the settings' own rules alone."""
    sizes = divisors(num_processes)
    for pp, tp, shard, replicate in itertools.product(sizes, repeat=4):
        if pp * tp * shard * replicate != num_processes:
            continue
        for schedule, vp, zero in itertools.product(
            {asked.parallel.schedule, "1f1b"}, range(1, 7), {asked.parallel.zero, 1}
        ):
            try:
                parallel = replace(
                    asked.parallel, pp=pp, tp=tp, dp_shard=shard, dp_replicate=replicate, schedule=schedule, vp=vp,
                    zero=zero, balance=asked.parallel.balance if pp > 1 else "layers",
                )  # fmt: skip
            except LmtrainError:
                continue
            for micro in divisors(asked.train.micro_batch):
                try:
                    yield replace(asked, parallel=parallel, train=replace(asked.train, micro_batch=micro))
                except LmtrainError:
                    continue


def check(asked: RunConfig, num_processes: int) -> None:
    legal = list(all_legal(asked, num_processes))
    if not legal:
        with pytest.raises(LayoutError, match=r"Start .*, which can keep"):
            adapt_to_processes(asked, num_processes)
        return
    found = adapt_to_processes(asked, num_processes)
    assert found in legal
    assert (found == asked) == (num_processes == asked.parallel.layout.world_size)
    assert (adaptation_message(asked, found) is None) == (found == asked)
    for keys in (("tp", "pp"), ("tp",), ("pp",)):  # in the order in which they are given up
        want = [getattr(asked.parallel, key) for key in keys]
        if any([getattr(one.parallel, key) for key in keys] == want for one in legal):
            assert [getattr(found.parallel, key) for key in keys] == want, (asked.parallel, found.parallel)
            break
    same = [one for one in legal if one.parallel == found.parallel]
    assert found.train.micro_batch == max(one.train.micro_batch for one in same)
    axes = [one for one in legal if (one.parallel.tp, one.parallel.pp) == (found.parallel.tp, found.parallel.pp)]
    if any(one.parallel.dp_shard == asked.parallel.dp_shard and one.parallel.vp == found.parallel.vp for one in axes):
        assert found.parallel.dp_shard == asked.parallel.dp_shard
    kept = {"global_batch", "rampup", "seed", "steps", "tokens"}
    assert all(getattr(found.train, key) == getattr(asked.train, key) for key in kept)


@given(legal_configs(), st.integers(1, MOST))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_against_trying_everything(asked: RunConfig, num_processes: int) -> None:
    check(asked, num_processes)


@pytest.mark.wide
@given(legal_configs(), st.integers(1, MOST))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_against_trying_everything_for_long(asked: RunConfig, num_processes: int) -> None:
    check(asked, num_processes)


@pytest.mark.parametrize(
    ("overrides", "num_processes", "changed"),
    [
        # copies go first, then shards
        (["dp_replicate=2", "dp_shard=2"], 2, {"dp_replicate": 1, "dp_shard": 2}),
        (["dp_shard=4"], 2, {"dp_shard": 2}),
        (["dp_shard=2"], 4, {"dp_shard": 2, "dp_replicate": 2}),
        (["dp_shard=2", "tp=2", "pp=2"], 4, {"dp_shard": 1}),
        # who would share the weights with nobody keeps them
        (["dp_shard=2", "zero=3"], 1, {"dp_shard": 1, "zero": 1}),
        # tp before pp, and what belongs to stages goes with them
        (["tp=2", "pp=2"], 2, {"pp": 1}),
        (["pp=2", "vp=3", "schedule=interleaved"], 1, {"pp": 1, "vp": 1, "schedule": "1f1b"}),
        (["pp=2", "vp=3", "schedule=interleaved"], 3, {"pp": 3, "vp": 2}),
        (["tp=2", "pp=2"], 6, {"pp": 3}),
    ],
)
def test_what_is_given_up_first(overrides: list[str], num_processes: int, changed: dict[str, object]) -> None:
    asked = config(*(f"parallel.{one}" for one in overrides))
    assert adapt_to_processes(asked, num_processes).parallel == replace(asked.parallel, **changed)  # type: ignore[arg-type]


def test_a_microbatch_shrinks_where_it_must_and_is_said() -> None:
    asked = config("train.micro_batch=4", "train.global_batch=12", "parallel.dp_shard=3")
    found = adapt_to_processes(asked, 6)
    assert (found.parallel.layout.dp, found.train.micro_batch, found.train.global_batch) == (6, 2, 12)
    said = adaptation_message(asked, found)
    assert said is not None
    assert "6 processes share the work of 3" in said
    assert "train.micro_batch=2" in said


def test_a_refusal_names_the_rules_and_what_would_do() -> None:
    with pytest.raises(LayoutError, match=r"^7 processes .* train.global_batch=24.* Start 2, 3, 4, 6, 8 or 12, which"):
        adapt_to_processes(config(), 7)
