"""docs/reference/models.md: a preset's parameters and the best row of `lmtrain plan`. `make docs` writes all rows."""

from __future__ import annotations

import json

import pytest

from lmtrain.cli.plan.model_presets_page import presets_page
from tests.cli.harness import lmtrain


@pytest.mark.wide
def test_a_row_is_the_first_of_the_plan_for_the_fewest_gpus() -> None:
    rows = [line for line in presets_page(["llama_7b", "gpt2"]).splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[:3] for row in cells] == [["`gpt2`", "124,439,808", "1"], ["`llama_7b`", "6,738,415,616", "8"]]
    best = json.loads(lmtrain("plan", "model=llama_7b", "hardware=h100", "gpus=8", "--json"))["best"][0]
    assert cells[1][6:8] == [f"1x{best['parallel']['dp_shard']}", str(best["parallel"]["zero"])]
    assert cells[1][-2] == f"{best['mfu']:.1%}"
