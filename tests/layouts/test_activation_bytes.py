"""What a forward keeps for its backward is placement's closed form, to the byte, for every way to do it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest

from lmtrain.placement.attention_activation_bytes import AttentionSizes
from lmtrain.placement.weight_and_activation_bytes import ActivationSizes
from tests.layouts.cases import MODELS, RECOMPUTE, WORD_MODELS, Case
from tests.layouts.test_held import planned_of
from tests.layouts.workers import Pool
from tests.marks import slow

pytestmark = pytest.mark.wide

WITH_WORDS = (*WORD_MODELS, "onekey")
LAYOUTS: list[dict[str, Any]] = [{}, {"tp": 2}, {"tp": 2, "sequence": True}]
Measured = Callable[[str, int, str], dict[str, dict[str, int]]]  # bytes by kind, by the case's name


def cases_of(model: str, tp: int, precision: str) -> list[Case]:
    layouts = [layout for layout in LAYOUTS if layout.get("tp", 1) == tp]
    found = [
        Case(model, recompute=recompute, precision=precision, microbatches=4, documents=documents, **layout)
        for recompute, layout, documents in product(RECOMPUTE, layouts, (False, True))
    ]
    if (tp, precision) == (1, "fp32"):
        found += [Case(model, recompute=recompute, microbatches=4, dropout=True) for recompute in RECOMPUTE]
    return [case for case in found if not case.problems()]


@pytest.fixture(scope="module")
def measured(pool: Pool) -> Measured:
    @cache
    def measured(model: str, tp: int, precision: str) -> dict[str, dict[str, int]]:
        """Of the rank that keeps most: only the last has a vocabulary that is padded."""
        names = [case.name for case in cases_of(model, tp, precision)]
        ranks = pool.run("tests.layouts.saved:measure_all", tp, {"names": names}, timeout_s=300.0)
        return {name: found[-1] for name, *found in zip(names, *ranks, strict=True)}

    return measured


def wrong(found: dict[str, dict[str, int]]) -> Iterator[str]:
    for name, held in found.items():
        run = planned_of(Case.named(name))
        kept = run.layers.activation_bytes(run.stages[0][0])
        said = {"activations": round(kept.hidden), "logits": round(kept.logits)}
        if said != held:
            yield f"{name} keeps {held}, and is said to keep {said}"


CASES = [
    *product((*MODELS, *WITH_WORDS), (1,), ("fp32",)),
    *product((*MODELS, *WITH_WORDS), (2,), ("bf16",)),
    *slow(*product((*MODELS, *WITH_WORDS), (1,), ("bf16",)), *product((*MODELS, *WITH_WORDS), (2,), ("fp32",))),
    *slow(*product(MODELS, (1, 2), ("fp16",))),
]


@pytest.mark.parametrize(("model", "tp", "precision"), CASES)
def test_a_forward_keeps_what_the_closed_form_says(model: str, tp: int, precision: str, measured: Measured) -> None:
    problems = list(wrong(measured(model, tp, precision)))
    assert not problems, "\n".join(problems)


TERMS = [
    (ActivationSizes, "block_bytes"), (ActivationSizes, "norm_bytes"), (ActivationSizes, "mlp_bytes"),
    (ActivationSizes, "head_bytes"), (ActivationSizes, "embedding_bytes"), (AttentionSizes, "core_bytes"),
    (AttentionSizes, "projection_bytes"), (AttentionSizes, "product_bytes"), (AttentionSizes, "mask_bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "term"), TERMS)
def test_a_byte_of_a_token_too_many_is_noticed(
    sizes: type, term: str, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(sizes, term)
    monkeypatch.setattr(sizes, term, lambda *args: right(*args) + 1)
    assert list(wrong(measured("gqa", 1, "bf16")))
