"""Every layout that cannot work is refused with the key, the rule and a legal value, all at once."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from lmtrain.errors import SettingsError, split_ways
from lmtrain.layout import Layout
from lmtrain.placement.parallel_settings import ParallelSettings, layout_problems
from lmtrain.spec import ModelShape

SHAPE = ModelShape(
    num_layers=2, width=48, num_heads=12, num_kv_heads=6, head_width=4, ffn_width=64, gated=True, vocab_size=13,
    seq_len=10,
)  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tp": 0}, "tp=0 must be at least 1"),
        ({"pp": 0}, "pp=0 must be at least 1"),
        ({"vp": 2}, "vp=2 needs a pipeline, and pp=1 has none"),
        ({"pp": 2, "vp": 2}, "vp=2 does not fit parallel.schedule=1f1b, which has one stage a rank"),
        ({"pp": 2, "schedule": "zb_v"}, "has exactly two stages a rank. Use vp=2"),
        ({"pp": 2, "schedule": "zb_h1", "zero": 3, "dp_shard": 2}, "zero=3 releases the weights"),
        ({"zero": 4}, "zero=4 is not a ZeRO level. Use 0, 1, 2 or 3"),
        ({"zero": 0, "dp_shard": 4, "dp_replicate": 2}, "Use zero=1, or dp_shard=1 dp_replicate=8"),
        ({"zero": 3, "dp_replicate": 2}, "zero=3 has nothing to shard over"),
        ({"pp": 2, "schedule": "1fb1"}, "schedule=1fb1 is not a pipeline schedule. Did you mean 1f1b? If it is"),
        ({"timeout_s": 0.0}, "timeout_s=0.0 must be above 0"),
    ],
)
def test_a_wrong_value_is_refused_with_a_way_out(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as refused:
        ParallelSettings(**settings)
    assert words in str(refused.value)


def test_all_problems_come_at_once() -> None:
    with pytest.raises(SettingsError) as refused:
        ParallelSettings(pp=2, vp=3, tp=-1, zero=7)
    assert all(key in str(refused.value) for key in ("vp=3", "tp=-1", "zero=7"))


def problems(
    shape: ModelShape = SHAPE, *, uses_dropout: bool = False, compiles: bool = False, **parallel: Any
) -> list[str]:
    settings = ParallelSettings(**parallel)
    found = layout_problems(shape, settings, uses_dropout=uses_dropout, compiles=compiles)
    return [split_ways(problem.text())[0] for problem in found]


def test_tp_divides_heads_and_columns() -> None:
    found = problems(tp=4, sequence_parallel=False)
    assert found == ["parallel.tp=4 neither divides model.num_kv_heads=6 nor is a multiple of it. Use 1 or 2."]
    assert problems(tp=2) == []


def test_sequence_parallel_cuts_the_sequence_evenly() -> None:
    """Everything that a degree does not divide is one problem, whose way out fits all of it."""
    assert problems(tp=3) == [
        "parallel.tp=3 does not divide model.ffn_width=64 or model.seq_len=10, which parallel.sequence_parallel "
        "splits. Use 1 or 2."
    ]
    assert problems(tp=3, sequence_parallel=False) == ["parallel.tp=3 does not divide model.ffn_width=64. Use 1 or 2."]
    found = problems(replace(SHAPE, num_heads=4, num_kv_heads=4), tp=4)
    splits = "model.seq_len=10, which parallel.sequence_parallel splits. Use 1 or 2, or parallel.tp=4 parallel.seq"
    assert splits in found[0]
    assert problems(replace(SHAPE, num_heads=4, num_kv_heads=4), tp=4, sequence_parallel=False) == []


@pytest.mark.parametrize(
    ("num_layers", "parallel"),
    [
        (3, {"pp": 2, "vp": 2, "schedule": "interleaved"}), (5, {"pp": 4, "vp": 2, "schedule": "zb_v"}),
        (1, {"pp": 4, "vp": 2, "schedule": "zb_v", "balance": "cost"}), (1, {"pp": 2, "schedule": "zb_h1"}),
        (2, {"pp": 3}), (2, {"pp": 3, "schedule": "zb_h1"}), (3, {"pp": 4, "balance": "cost"}),
        (7, {"pp": 4, "vp": 3, "schedule": "interleaved"}),
    ],
)  # fmt: skip
def test_the_advice_on_too_many_stages_is_accepted(num_layers: int, parallel: dict[str, Any]) -> None:
    shape = replace(SHAPE, num_layers=num_layers)
    [problem] = problems(shape, **parallel)
    assert f"stages, more than model.num_layers={num_layers}. Use parallel.pp=" in problem
    advice = dict(re.findall(r"parallel\.(\w+)=(\w+)", problem.partition("Use ")[2]))
    changed = parallel | {key: int(value) if value.isdecimal() else value for key, value in advice.items()}
    assert problems(shape, **changed) == []
    if "or less" in problem:
        assert problems(shape, **changed | {"pp": 1}) == []


def test_dropout_that_a_compiler_cannot_trace() -> None:
    assert len(problems(tp=2, sequence_parallel=False, uses_dropout=True, compiles=True)) == 1
    for change in ({"sequence_parallel": True}, {"uses_dropout": False}, {"compiles": False}, {"tp": 1}):
        asked: dict[str, Any] = {"tp": 2, "sequence_parallel": False, "uses_dropout": True, "compiles": True} | change
        assert problems(**asked) == []


def test_the_layout_is_what_was_asked_for() -> None:
    assert ParallelSettings(dp_replicate=2, dp_shard=3, tp=4).layout == Layout(dp_replicate=2, dp_shard=3, tp=4)
