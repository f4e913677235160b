"""Tasks are found by themselves, say what they need, and never name a measure just "perplexity"."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lmtrain.errors import UsageError
from lmtrain.eval import tasks as room
from lmtrain.eval.task import all_tasks, bits_per_byte, find_task, perplexity


def test_every_file_of_the_folder_is_a_task() -> None:
    files = {path.stem for path in Path(room.__path__[0]).glob("*.py")} - {"__init__"}
    assert len(all_tasks()) == len(files) >= 3
    assert {"perplexity", "wikitext103/megatron-o32", "lambada/megatron-strict"} <= set(all_tasks())


def test_a_misspelt_task_is_told_the_nearest() -> None:
    with pytest.raises(UsageError, match="Did you mean perplexity"):
        find_task("perplexty")


def test_ratios_at_their_edges() -> None:
    assert perplexity(math.log(7) * 3, 3) == pytest.approx(7)
    assert perplexity(1e9, 1) == math.inf
    assert math.isnan(perplexity(1.0, 0))
    assert bits_per_byte(8 * math.log(2), 4) == pytest.approx(2)
    assert math.isnan(bits_per_byte(1.0, 0))
