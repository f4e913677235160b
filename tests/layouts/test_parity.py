"""Any layout trains as one process does: losses, norms and each parameter's gradient, over seeded arrays of cases.

`python -m tests.layouts.replay NAME` runs one again and prints the comparison.
"""

from __future__ import annotations

import pytest

from tests.layouts.arrays import beyond, few_and_the_rest, few_by_blocks, few_that_sum
from tests.layouts.cases import Case
from tests.layouts.outcome import LONG_LOSS, References, check, run
from tests.layouts.workers import Pool
from tests.marks import slow

# every way of cutting at once, for as long as errors need to grow
LONG = [
    "tied-tp2-dp2-zero1-sp-fp32-micro1",
    "gqa-tp2-dp4-zero3-hybrid-sp-full-fp32-micro4",
    "untied-tp4-dp2-zero2-fp32-micro4",
    "parallel-tp1-dp8-zero3-fp32-micro1",
    "window-tp8-dp1-sp-attention-fp32-micro1",
    "gqa-tp3-dp2-zero0-sp-fp32-micro1",
]

# what the array does not have
DOCUMENTS = ["window-tp2-dp1-sp-bf16-micro4-documents-compile", "tied-dp2-zero3-full-fp32-micro4-documents-compile"]


@pytest.mark.parametrize("case", few_and_the_rest("pairs"))
def test_a_layout_equals_one_process(case: Case, pool: Pool, references: References) -> None:
    wrong = check(case, run(pool, case), references)
    assert not wrong, f"python -m tests.layouts.replay {case.name}\n" + "\n".join(wrong)


# what the arrays do not have: sums in a compiled graph, of a weight that is tied, handed to FSDP after second halves;
# and at ZeRO 2 and 3, where each microbatch's gradients are sent, none
SUMMED = [
    "tied-tp2-sp-bf16-micro4-summed",
    "tied-dp2-zero1-fp16-micro4-summed",
    "untied-dp2-zero2-bf16-micro4-summed",
    "gqa-dp2-zero3-bf16-micro4-summed",
    "deep-pp2-zb_h1-dp1-bf16-micro4-summed",
    "deep-pp2-zb_h1-dp2-zero1-bf16-micro5-summed",
]
COMPILED = [
    "tied-tp1-dp1-bf16-micro4-summed-compile",
    "gqa-tp2-sp-bf16-micro4-summed-compile",
    "untied-dp2-zero1-operators-bf16-micro4-summed-compile",
]


@pytest.mark.wide
@pytest.mark.parametrize("case", [*few_that_sum("pairs"), *map(Case.named, SUMMED), *slow(*map(Case.named, COMPILED))])
def test_products_that_sum_equal_one_process(case: Case, pool: Pool, references: References) -> None:
    """The array again, where it makes a difference: gradients are added up as on a GPU."""
    wrong = check(case, run(pool, case), references)
    assert not wrong, f"python -m tests.layouts.replay {case.name}\n" + "\n".join(wrong)


@pytest.mark.wide
@pytest.mark.parametrize(
    "name", ["tied-dp2-zero0-fp32-micro4-dropout", "gqa-dp4-zero3-hybrid-full-fp32-micro4-dropout"]
)
def test_dropout_over_dp_equals_one_process(name: str, pool: Pool, references: References) -> None:
    """Masks are a function of the microbatch's number, so ranks draw what one process draws, one after the other."""
    case = Case.named(name)
    wrong = check(case, run(pool, case), references)
    assert not wrong, "\n".join(wrong)


@pytest.mark.wide
@pytest.mark.parametrize(
    "name",
    [
        "zloss-tp3-dp2-zero2-sp-full-fp32-micro4",
        "zloss-dp2-zero3-fp16-micro4",
        "zloss-tp2-dp1-bf16-micro4-summed",
        "deepzloss-pp2-vp2-interleaved-tp2-dp1-fp32-micro4",
        "deepzloss-pp2-zb_h1-dp2-zero1-fp32-micro5",
    ],
)
def test_a_z_loss_at_a_layout_equals_one_process(name: str, pool: Pool, references: References) -> None:
    case = Case.named(name)
    wrong = check(case, run(pool, case), references)
    assert not wrong, f"python -m tests.layouts.replay {case.name}\n" + "\n".join(wrong)


@pytest.mark.wide
@pytest.mark.parametrize("case", few_by_blocks("pairs"))
def test_masks_of_blocks_equal_masks_of_positions(case: Case, pool: Pool, references: References) -> None:
    """The array again, where it makes a difference: one process has masks of all positions."""
    wrong = check(case, run(pool, case), references)
    assert not wrong, f"python -m tests.layouts.replay {case.name}\n" + "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCUMENTS)
def test_compiled_documents_equal_one_process(name: str, pool: Pool, references: References) -> None:
    wrong = check(Case.named(name), run(pool, Case.named(name)), references)
    assert not wrong, f"python -m tests.layouts.replay {name}\n" + "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("case", beyond("triples", "pairs"))
def test_every_triple_of_settings_equals_one_process(case: Case, pool: Pool, references: References) -> None:
    wrong = check(case, run(pool, case), references)
    assert not wrong, f"python -m tests.layouts.replay {case.name}\n" + "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_a_hundred_steps_stay_together(name: str, pool: Pool, references: References) -> None:
    case = Case.named(name)
    found, one = run(pool, case, steps=100), references.of(case, 100)
    assert not found.quarrels
    assert one.losses[-1] < 0.9 * one.losses[0], "the reference must learn, or the comparison says little"
    apart = [abs(a - b) / b for a, b in zip(found.losses, one.losses, strict=True)]
    assert max(apart) <= LONG_LOSS, f"step {apart.index(max(apart))} is off by {max(apart):.1e}"
