"""Wide loads and stores are chosen for an update only if all addresses and the size allow them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lmtrain.kernels.adamw_tensors_and_rates import AdamWTensors


def numbers(size: int, begin: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """So many, which begin so many behind an address that any load may begin at."""
    whole = torch.zeros(size + begin + 16, dtype=dtype)
    assert whole.data_ptr() % 16 == 0
    return whole[begin : begin + size]


def moved(size: int, *, gradient: int = 0, rounded: int | None = None) -> AdamWTensors:
    copy = None if rounded is None else numbers(size, rounded, torch.bfloat16)
    return AdamWTensors(numbers(size), numbers(size, gradient), numbers(size), numbers(size), copy)


@pytest.mark.parametrize(
    ("one", "wide"),
    [
        (moved(48), True),
        (moved(48, gradient=4), True),
        (moved(48, rounded=8), True),
        (moved(49), False),
        (moved(56), False),
        (moved(48, gradient=1), False),
        (moved(48, rounded=4), False),
    ],
    ids=["even", "behind another", "a copy behind another", "odd size", "half a load too many", "odd address",
         "odd address of the copy"],
)  # fmt: skip
def test_loads_are_wide_where_all_addresses_and_the_size_allow_it(one: AdamWTensors, wide: bool) -> None:
    assert one.alignment == (16 if wide else 1)
