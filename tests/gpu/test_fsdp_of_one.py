"""FSDP on a world of one: nobody to talk to, and all of its copies, casts and hooks."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.gradients import Limits, by_lmtrain
from tests.layouts.cases import Case
from tests.marks import wide


@pytest.fixture(scope="module")
def limits() -> Limits:
    return Limits()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "name",
    [
        "tied-fp32-micro4", "gqa-full-bf16-micro4",
        *wide("bert-operators-fp16-micro4", "window-bf16-micro4", "postnorm-attention-fp32-micro4"),
    ],
)  # fmt: skip
def test_shards_of_one_have_the_gradients(name: str, device: torch.device, limits: Limits) -> None:
    case = Case.named(name)
    wrong = limits.wrong(case, device, by_lmtrain(case, device, always_shard=True))
    assert not wrong, "\n".join(wrong)
