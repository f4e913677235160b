"""Every kernel means what its twin means, in every precision, for odd sizes, and each planted bug is noticed.

By Triton's interpreter, on the CPU: it shows meaning and no speed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from lmtrain.kernels.triton_availability import HAS_TRITON
from tests.unit.kernels.interpreted import BUGS, KERNELS, LIMITS

pytestmark = [pytest.mark.wide, pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")]


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.kernels.interpreted"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_kernels_equal_their_twins(measured: dict[str, Any]) -> None:
    wrong = {
        f"{kernel} {case}": value
        for case, kernels in measured["right"].items() for kernel, value in kernels.items()
        if not value <= LIMITS[case.split()[-1]]
    }  # fmt: skip
    assert all(kernels.keys() == KERNELS.keys() for kernels in measured["right"].values())
    assert not wrong


def test_rows_may_begin_further_apart_than_32_bits_count(measured: dict[str, Any]) -> None:
    assert measured["far"]["far"] <= LIMITS["bf16"]


def test_no_activation_hides_a_broken_number(measured: dict[str, Any]) -> None:
    assert measured["hide_nan"] == []


def test_a_model_trains_by_kernels_as_by_their_twins(measured: dict[str, Any]) -> None:
    """Through the functions that models, the loss and the optimizer call."""
    found, right = measured["trained"]["kernels"], measured["trained"]["twins"]
    assert found == pytest.approx(right, rel=2e-3)
    assert found[0] - found[-2] > 0.05  # it learns


def test_planted_bugs_are_noticed(measured: dict[str, Any]) -> None:
    assert len(measured["planted"]) == len(BUGS)
    assert {kernel for kernel, *_ in BUGS} == set(KERNELS)
    assert {bug: times for bug, times in measured["planted"].items() if times <= 3} == {}
