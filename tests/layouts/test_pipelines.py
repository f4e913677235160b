"""Any pipeline trains as one process does: every schedule, GPT and BERT, with every other way of cutting.

`python -m tests.layouts.replay NAME` runs one again and prints the comparison.
"""

from __future__ import annotations

import numpy as np
import pytest

from lmtrain.config.settings_base import kinds
from lmtrain.schedules.pipeline_schedule import PipelineSchedule, schedule_named
from lmtrain.schedules.schedule_simulator import activations_held
from tests.layouts import pipeline_bugs
from tests.layouts.arrays import beyond, few_and_the_rest, few_by_blocks, few_that_sum
from tests.layouts.cases import Case
from tests.layouts.outcome import LONG_LOSS, References, check, run
from tests.layouts.workers import Pool
from tests.marks import slow, wide

ZERO_BUBBLE = [
    pytest.param(f"deep-{pipeline}-dp2-{zero}-{precision}-micro5", marks=mark)
    for pipeline in ("pp2-zb_h1", "pp2-vp2-zb_v")
    for zero in ("zero0", "zero1", "zero2")
    for precision, mark in (("fp32", pytest.mark.wide), ("bf16", pytest.mark.slow))
]
# two copies of a tied weight, on ranks of their own and, as ZB-V folds its stages, on one
TIED = [
    "deep-pp2-vp2-interleaved-dp1-fp32-micro4",
    "deep-pp2-vp2-zb_v-dp2-zero1-fp32-micro4",
    "deep-pp4-dp1-fp32-micro8",
    "deepbert-pp2-tp2-dp1-sp-fp32-micro4",
]

# every stage makes the mask of a microbatch from its own copy of the batch
DOCUMENTS = [
    "window-pp2-tp2-dp1-sp-fp32-micro4-documents",
    "window-pp2-zb_h1-tp1-dp2-zero1-fp32-micro5-documents",
    "deepgqa-pp2-vp2-zb_v-tp1-dp1-bf16-micro8-documents",
    "deepuntied-pp4-gpipe-tp2-dp1-fp32-micro8-documents",
    "deep-pp2-vp2-interleaved-tp1-dp2-zero3-full-fp32-micro4-documents",
]


@pytest.mark.parametrize("case", few_and_the_rest("pipeline_pairs"))
def test_a_pipeline_equals_one_process(case: Case, pool: Pool, references: References) -> None:
    wrong = check(case, run(pool, case), references)
    assert not wrong, f"python -m tests.layouts.replay {case.name}\n" + "\n".join(wrong)


@pytest.mark.wide
@pytest.mark.parametrize("name", list(kinds(PipelineSchedule)))
def test_a_schedule_that_is_found_equals_one_process(name: str, pool: Pool, references: References) -> None:
    """A new one too, which the stored arrays do not have."""
    case = Case("deep", pp=2, vp=schedule_named(name).chunks, schedule=name, microbatches=4)
    wrong = check(case, run(pool, case), references)
    assert not wrong, f"python -m tests.layouts.replay {case.name}\n" + "\n".join(wrong)


@pytest.mark.wide
@pytest.mark.parametrize("case", few_by_blocks("pipeline_pairs"))
def test_masks_of_blocks_equal_masks_of_positions(case: Case, pool: Pool, references: References) -> None:
    wrong = check(case, run(pool, case), references)
    assert not wrong, f"python -m tests.layouts.replay {case.name}\n" + "\n".join(wrong)


@pytest.mark.wide
@pytest.mark.parametrize("case", few_that_sum("pipeline_pairs"))
def test_products_that_sum_equal_one_process(case: Case, pool: Pool, references: References) -> None:
    """The array again, where it makes a difference: several microbatches are under way, and all add to one sum."""
    wrong = check(case, run(pool, case), references)
    assert not wrong, f"python -m tests.layouts.replay {case.name}\n" + "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("case", beyond("pipeline_triples", "pipeline_pairs"))
def test_every_triple_of_settings_equals_one_process(case: Case, pool: Pool, references: References) -> None:
    wrong = check(case, run(pool, case), references)
    assert not wrong, f"python -m tests.layouts.replay {case.name}\n" + "\n".join(wrong)


@pytest.mark.parametrize("name", ZERO_BUBBLE)
def test_zero_bubble_with_copies_equals_one_process(name: str, pool: Pool, references: References) -> None:
    """Second halves of backwards add gradients after the hooks that shard and send them have run."""
    wrong = check(Case.named(name), run(pool, Case.named(name)), references)
    assert not wrong, "\n".join(wrong)


@pytest.mark.wide
@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_travel_with_their_microbatch(name: str, pool: Pool, references: References) -> None:
    wrong = check(Case.named(name), run(pool, Case.named(name)), references)
    assert not wrong, f"python -m tests.layouts.replay {name}\n" + "\n".join(wrong)


@pytest.mark.parametrize("name", [*wide(*TIED[:2]), *slow(*TIED[2:])])
def test_tied_copies_stay_one(name: str, pool: Pool, references: References) -> None:
    """To the bit, after 20 steps with clipping and weight decay."""
    case = Case.named(name)
    ranks = pool.run("tests.layouts.pipelines:tied", case.num_processes, {"name": name, "steps": 20})
    digests: dict[str, dict[str, str]] = {}
    for key, shard, digest in (copy for rank in ranks for copy in rank["copies"]):
        digests.setdefault(shard, {})[key] = digest
    assert len(digests) == case.dp * case.tp
    for names in digests.values():
        assert len(names) == 2
        assert len(set(names.values())) == 1
    one = references.of(case, 20)
    apart = [abs(a - b) / b for a, b in zip(ranks[0]["losses"], one.losses, strict=True)]
    assert max(apart) <= LONG_LOSS


# one that shows in losses and in gradients; the others show in one of them
SOON = {"pipeline_drops_the_last_microbatch"}


@pytest.mark.parametrize(
    ("bug", "name"),
    [pytest.param(*one, id=one[0], marks=[pytest.mark.wide] * (one[0] not in SOON))
     for one in pipeline_bugs.CASES.items()],
)  # fmt: skip
def test_a_planted_bug_is_noticed(bug: str, name: str, pool: Pool, references: References) -> None:
    case = Case.named(name)
    assert not case.problems()
    assert not references.wrong(case), "without the bug"
    assert check(case, run(pool, case, bug=bug), references), f"{bug} went unnoticed on {name}"


@pytest.mark.parametrize(
    "name",
    [
        "deepgqa-pp2-vp2-interleaved-dp1-fp32-micro4",
        *wide(
            "deepgqa-pp4-gpipe-dp1-fp32-micro8",
            "deepgqa-pp4-dp1-fp32-micro8",
            "deepgqa-pp4-zb_h1-dp1-fp32-micro8",
            "deepgqa-pp2-vp2-zb_v-dp1-fp32-micro8",
        ),
    ],
)
def test_a_rank_holds_the_activations_that_its_schedule_says(name: str, pool: Pool) -> None:
    case = Case.named(name)
    bounds = activations_held(case.parallel.pipeline.table(case.pp, case.vp, case.microbatches))
    for rank, found in enumerate(pool.run("tests.layouts.pipelines:in_flight", case.num_processes, {"name": name})):
        assert found["most"]["activations"] == bounds[rank], f"rank {rank}"
        assert found["most"].get("outputs", 0) <= bounds[rank], "an output is dropped once it has arrived"
        assert not any(found["left"].values()), "nothing outlives a step"


def test_stages_with_other_batches_are_told_so(pool: Pool) -> None:
    told = pool.run("tests.layouts.pipelines:disagree", 2, {"name": "deepgqa-pp2-dp1-fp32-micro4"})
    assert (
        "rank 0 sends 4 messages of [12, 24, 16] float32, and rank 1 expects 4 messages of [24, 24, 16]" in told[1]
    )


@pytest.mark.wide
@pytest.mark.parametrize("words", ["tp1-dp1", "tp2-dp1", "tp2-dp1-sp"])
def test_recompute_draws_the_same_dropout(words: str, pool: Pool) -> None:
    """In a pipeline other microbatches have been entered by the time one is computed again."""
    plain = run(pool, Case.named(f"deep-pp2-{words}-fp32-micro4-dropout"))
    again = run(pool, Case.named(f"deep-pp2-{words}-full-fp32-micro4-dropout"))
    assert (again.losses, again.norms) == (plain.losses, plain.norms)
    assert not again.quarrels


@pytest.mark.wide
def test_dropout_repeated_under_recompute_is_noticed(pool: Pool) -> None:
    plain = run(pool, Case.named("deep-pp2-tp2-dp1-fp32-micro4-dropout"))
    wrong = run(pool, Case.named("deep-pp2-tp2-dp1-full-fp32-micro4-dropout"), bug="dropout_repeated_under_recompute")
    assert wrong.norms[0] != pytest.approx(plain.norms[0], rel=1e-4)


@pytest.mark.parametrize("pipeline", ["pp2", *wide("pp4-zb_h1", "pp2-vp2-interleaved", "pp2-vp2-zb_v")])
def test_microbatches_may_change_and_validation_and_logits_are_those_of_one_process(pipeline: str, pool: Pool) -> None:
    (one,) = pool.run("tests.layouts.pipelines:vary", 1, {"name": "deepbert-fp32-micro4"})
    case = Case.named(f"deepbert-{pipeline}-dp1-fp32-micro4")
    for found in pool.run("tests.layouts.pipelines:vary", case.num_processes, {"name": case.name}):
        assert found["losses"] == pytest.approx(one["losses"], rel=1e-5)
        for key in ("valid", "logits"):
            assert np.allclose(found[key], one[key], rtol=1e-4, atol=1e-4), key
