"""Recompute changes no bit of a gradient, keeps fewer bytes, and runs forward again only where it is told to."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from lmtrain.config.build_typed_settings import build_settings
from lmtrain.errors import SettingsError, split_ways
from lmtrain.parallel.blocks.recompute_and_compile import RecomputedForward, apply_recompute
from lmtrain.parallel.device_and_precision_settings import FullRecomputeSettings, RecomputeSettings
from tests.layouts.workers import Pool
from tests.marks import wide
from tests.unit.parallel import recomputing
from tests.unit.parallel.recomputing import build, gradients, saved_bytes

NONE = {"kind": "none"}
ALL: list[dict[str, Any]] = [
    {"kind": "attention"}, {"kind": "operators"}, {"kind": "full"}, {"kind": "full", "blocks": 1},
    {"kind": "operators", "blocks": 2},
]  # fmt: skip


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"dropout": 0.0, "window": 5, "parallel_block": "one_norm", "norm": "layernorm"},
        *wide(
            {"dropout": 0.0},
            {"attention_cap": 2.0, "attention_scale": 0.3, "window": 5, "layer_pattern": "wfF", "qk_norm": "head"},
            {"attention_cap": 2.0, "dropout": 0.0, "norm_order": "sandwich", "activation": "relu2"},
        ),
    ],
)
def test_gradients_are_bit_for_bit_those_of_none(model: dict[str, Any]) -> None:
    assert recomputing.different(ALL, {}, model) == []


@pytest.mark.parametrize(
    "parallel",
    [
        {"tp": 2},
        {"dp_shard": 2, "zero": 3},
        {"tp": 2, "pp": 2, "sequence_parallel": False},  # a micro-batch is recomputed after the next one has begun
        *wide({"tp": 2, "sequence_parallel": False}, {"dp_shard": 2, "zero": 1}),
    ],
    ids=lambda parallel: "-".join(f"{key}{value}" for key, value in parallel.items()),
)
def test_on_a_layout_too(pool: Pool, parallel: dict[str, Any]) -> None:
    """Dropout included: shared noise, split noise and FSDP's gathers are as they were in the first forward."""
    arguments = {"recomputes": ALL[:3], "parallel": parallel, "model": {}}
    num_ranks = math.prod(parallel.get(axis, 1) for axis in ("tp", "pp", "dp_shard"))
    assert pool.run("tests.unit.parallel.recomputing:different", num_ranks, arguments) == [[]] * num_ranks


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["attention", "operators", "full"])
def test_compiled_too_and_in_one_graph(kind: str) -> None:
    """Blocks share one graph without breaks, whatever is made again inside or around it.

    `full` runs the same graph twice, bit for bit. The other two change the graph: a compiler may fuse it in another
    way, which shows in the last bits on some processors.
    """
    torch._dynamo.reset()
    expected = gradients(build(NONE, compile=True))
    torch._dynamo.reset()
    counters.clear()
    found = gradients(build({"kind": kind}, compile=True))
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2  # a block and the loss
    worst = max(float((found[name] - g).abs().max() / g.abs().max()) for name, g in expected.items())
    assert worst == 0 if kind == "full" else worst < 2e-6


@pytest.mark.wide
def test_compiled_over_tp_nothing_breaks_the_graph(pool: Pool) -> None:
    """Collectives, the loss over a cut vocabulary and recompute are inside two graphs: a block's and the loss's."""
    arguments = {"parallel": {"tp": 2}, "recomputes": [{"kind": "operators"}]}
    for rank in pool.run("tests.unit.parallel.recomputing:compiled", 2, arguments, timeout_s=600):
        assert rank["broken"] == 0
        assert rank["graphs"] == [2]
        assert rank["worst"] < 1e-5


def test_fewer_bytes_are_kept() -> None:
    none, attention, operators, full = (saved_bytes({"kind": k}) for k in ("none", "attention", "operators", "full"))
    assert full < operators < none
    assert full < attention < none
    blocks = [saved_bytes({"kind": "full", "blocks": n}) for n in (1, 2, 3)]
    assert blocks[2] == full
    assert none - blocks[0] == blocks[0] - blocks[1] == blocks[1] - blocks[2] > 0


def test_full_keeps_a_blocks_input_alone() -> None:
    """One more block costs what its input costs: 2 x 32 x 32 numbers of four bytes."""
    more, less = (saved_bytes({"kind": "full"}, num_layers=n, dropout=0.0) for n in (4, 3))
    assert more - less == 2 * 32 * 32 * 4


@pytest.mark.parametrize(("recompute", "expected"), [(NONE, [2, 2, 2]), (ALL[2], [4, 4, 4]), (ALL[3], [4, 2, 2])])
def test_only_the_first_blocks_run_again(recompute: dict[str, Any], expected: list[int]) -> None:
    built = build(recompute)
    counts = [0] * 3
    for layer, block in built.model.blocks.items():

        def count(*_: Any, at: int = int(layer)) -> None:
            counts[at] += 1

        block.get_submodule("mlp.up").register_forward_pre_hook(count)
    gradients(built)
    assert counts == expected


def test_blocks_count_in_the_whole_model() -> None:
    """The second of two stages, blocks 2 and 3, computes one of the first three again."""
    settings = replace(recomputing.SETTINGS, num_layers=4)
    for blocks, expected in ((3, [True, False]), (2, [False, False]), (None, [True, True])):
        with torch.device("meta"):
            model = settings.build()
        model.cut(range(2, 4), first=False, last=True)
        noise = build(NONE).dropout_seeds
        said = apply_recompute(model, FullRecomputeSettings(blocks=blocks), noise, compiled=False)
        assert [isinstance(block.forward, RecomputedForward) for block in model.blocks.values()] == expected
        assert said == (f"recompute: full, {sum(expected)} blocks" if any(expected) else None)


def test_without_gradients_nothing_is_kept_or_run_again() -> None:
    plain, full = build(NONE), build({"kind": "full"})
    batch = recomputing.step_of(plain).microbatches[0]
    assert torch.equal(plain.logits(batch), full.logits(batch))


def test_names_stay() -> None:
    assert list(build({"kind": "attention"}).parameters) == list(build(NONE).parameters)


def test_settings() -> None:
    settings = build_settings(RecomputeSettings, {"kind": "full", "blocks": 2}, "recompute")
    assert settings == FullRecomputeSettings(blocks=2)
    with pytest.raises(SettingsError, match=r"recompute\.blocks=0 must be at least 1"):
        build_settings(RecomputeSettings, {"kind": "attention", "blocks": 0}, "recompute")
    assert list(settings.problems_in_model(2)) == []
    (problem,) = settings.problems_in_model(1)
    text, _ = split_ways(problem.text())
    assert text == "blocks=2 is more than model.num_layers=1. Use 1 or less, or null for all blocks."
