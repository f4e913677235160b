"""Sharding is real: bytes of weights on each rank and the collectives of a step are what the tables say."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

import pytest

from tests.layouts import closed_forms
from tests.layouts.cases import Case
from tests.layouts.workers import Pool
from tests.marks import wide

WORDS = {
    "allreduce_": closed_forms.REDUCE, "_allgather_base_": closed_forms.GATHER,
    "_reduce_scatter_base_": closed_forms.SCATTER,
}  # fmt: skip


@pytest.mark.wide
@pytest.mark.parametrize(
    "name",
    [
        "tied-tp2-dp2-zero3-bf16-micro4",
        "tied-tp2-dp2-zero1-bf16-micro4",
        "tied-tp1-dp1-bf16-micro4",
        "tied-tp2-dp2-zero2-bf16-micro4",
        "tied-tp2-bf16-micro4",
        "tied-tp2-dp2-zero0-bf16-micro4",
        "tied-dp8-zero1-bf16-micro4",
        "tied-dp8-zero3-bf16-micro4",  # the last shard of a norm is empty
        "gqa-tp2-dp4-zero2-hybrid-sp-bf16-micro4",
        "gqa-tp2-dp4-zero3-hybrid-full-bf16-micro4",
    ],
)
def test_each_rank_holds_what_the_closed_form_says(name: str, pool: Pool) -> None:
    case = Case.named(name)
    for rank, found in enumerate(pool.run("tests.layouts.measuring:weights", case.num_processes, {"name": name})):
        assert found | {"average": 0} == asdict(closed_forms.weights(case, rank)), f"rank {rank}"


def test_each_level_holds_less_than_the_one_before() -> None:
    """The levels' promise, of the closed forms: optimizer state, then gradients, then weights go down to a share."""
    zero = [closed_forms.weights(Case("untied", tp=2, dp=4, zero=level, precision="bf16"), 0) for level in range(4)]
    assert zero[0].optimizer / zero[1].optimizer == pytest.approx(4, rel=0.02)
    assert zero[0].masters / zero[1].masters == pytest.approx(4, rel=0.02)
    assert zero[1].gradients / zero[2].gradients == pytest.approx(4, rel=0.02)
    assert (zero[2].work, zero[3].work) == (zero[0].work, 0)
    assert zero[0].gradients == zero[1].gradients


@pytest.mark.parametrize(
    "name",
    [
        "tied-tp2-dp2-zero3-sp-first-fp32-micro4",
        *wide(
            "tied-tp2-sp-operators-fp32-micro4",
            "tied-tp1-dp1-fp32-micro4",
            "gqa-tp3-attention-fp32-micro1",
            "tied-tp2-dp4-zero0-fp32-micro4",
            "tied-tp2-dp4-zero1-hybrid-bf16-micro4",
            "untied-tp2-dp4-zero2-hybrid-sp-bf16-micro4",
            "gqa-tp2-dp4-zero3-hybrid-sp-bf16-micro4",
            "parallel-tp4-dp2-zero3-sp-fp32-micro1",
            "untied-tp2-full-fp32-micro1",
            "window-tp1-dp3-zero2-fp32-micro4",
        ),
    ],
)
def test_a_step_sends_what_the_table_says(name: str, pool: Pool) -> None:
    case = Case.named(name)
    ranks = pool.run("tests.layouts.measuring:collectives", case.num_processes, {"name": name})
    table = closed_forms.collectives(case)
    assert ranks[0] == ranks[-1], "every rank sends the same"
    found = Counter((WORDS[operator], axis, size) for operator, axis, size in ranks[0])
    if case.num_processes == 1:
        assert not found
        return
    assert found == named_alike(table, case)


def named_alike(table: Counter[closed_forms.Sent], case: Case) -> Counter[closed_forms.Sent]:
    """Axes over the same ranks are one group, which goes by the name of the first of them."""
    parallel = case.parallel
    names = {"dp": "dp_shard" if parallel.dp_replicate == 1 else "dp_replicate" if parallel.dp_shard == 1 else "dp"}
    names["world"] = "tp" if case.dp == 1 else names["dp"] if case.tp == 1 else "world"
    result: Counter[closed_forms.Sent] = Counter()
    for (operator, axis, size), count in table.items():
        result[operator, names.get(axis, axis), size] += count
    return result
