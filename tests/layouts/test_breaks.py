"""A compiler takes each kind of model's blocks whole, and the loss: a graph that breaks goes back to Python."""

from __future__ import annotations

import pytest

from tests.layouts.breaks import BUGS
from tests.layouts.cases import MODELS, Case
from tests.layouts.family_models import FAMILY_MODELS
from tests.layouts.workers import Pool

KINDS = [f"{model}-fp32-micro1" for model in [*MODELS, *FAMILY_MODELS]]
OTHERS = [
    "tied-bf16-micro4",
    "gqa-fp32-micro4-dropout",
    "bert-operators-bf16-micro4-dropout",
    "gqa-tp2-dp1-sp-fp32-micro1",
    "bert-tp2-dp1-sp-bf16-micro1",
    "untied-dp2-zero3-bf16-micro4",
    "deepgqa-pp2-vp2-interleaved-tp1-dp1-bf16-micro4",
    "deep-pp2-tp1-dp1-fp32-micro4",
]


@pytest.mark.wide
@pytest.mark.parametrize("name", [*KINDS, *OTHERS])
def test_no_graph_breaks(name: str, pool: Pool) -> None:
    for found in pool.run("tests.layouts.breaks:graphs", Case.named(name).num_processes, {"name": name}):
        assert found["graphs"], "something is compiled"
        assert not found["breaks"]


@pytest.mark.wide
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_break_is_noticed(bug: str, pool: Pool) -> None:
    (found,) = pool.run("tests.layouts.breaks:graphs", 1, {"name": KINDS[0], "bug": bug})
    assert found["breaks"]
