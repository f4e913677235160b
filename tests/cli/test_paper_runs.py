"""The runs that papers are known for, by name: each is judged and priced at the size that it had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmtrain.config.compose_run_settings import group_choices
from tests.cli.harness import Toy, lmtrain
from tests.marks import slow, wide

# as published: parameters in billions, devices, samples of a step, tokens of a sample
PUBLISHED: dict[str, tuple[float, int, int, int]] = {
    "megatron_2019_8_3b": (8.3, 512, 512, 1024),
    "megatron_2021_175b": (174.6, 1024, 1536, 2048),
    "megatron_2021_530b": (529.6, 2520, 2520, 2048),
    "megatron_2021_1t": (1008.0, 3072, 3072, 2048),
    "megascale_175b": (175.0, 12288, 6144, 2048),
    "scaling_study_7b": (6.74, 2048, 4096, 4096),
    "high_flyer_3_8b": (3.8, 128, 512, 1024),
}
QUICK = "high_flyer_3_8b"
SMALLER = (QUICK, "megatron_2019_8_3b", "megatron_2021_175b")
NAMES = [pytest.param(name, marks=[pytest.mark.wide] * (name != QUICK)) for name in PUBLISHED]


def dry_run(toy: Toy, *words: object) -> dict[str, Any]:
    data = f"data.path={toy.data}", f"data.valid_path={toy.data}"
    output = lmtrain("pretrain", *words, *data, "--dry-run", "--json")
    found: dict[str, Any] = json.loads(output[output.index('{"model"') :])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_a_paper_is_judged_at_its_full_size(name: str, toy: Toy) -> None:
    parameters, devices, batch, seq_len = PUBLISHED[name]
    facts = dry_run(toy, f"experiment={name}")
    assert facts["parameters"] == pytest.approx(1e9 * parameters, rel=0.01)
    assert facts["processes"] == len(facts["ranks"]) == devices
    assert facts["tokens_per_step"] == batch * seq_len
    assert facts["hardware"]
    assert "predicted" in facts["step_time"]
    assert "does not fit" not in facts["memory"]


@pytest.mark.parametrize("name", [*wide(*SMALLER), *slow(*(name for name in PUBLISHED if name not in SMALLER))])
def test_the_planner_finds_it_a_layout(name: str, toy: Toy, tmp_path: Path) -> None:
    """Which a run of that size accepts, on machines that are not here."""
    devices = PUBLISHED[name][1]
    facts = dry_run(toy, f"experiment={name}", "parallel=auto", f"run.dir={tmp_path / 'run'}", "--nproc", devices)
    assert facts["processes"] == devices
    assert "does not fit" not in facts["memory"]


def test_every_recipe_of_a_paper_is_here() -> None:
    assert {*PUBLISHED, "demo", "stages_demo"} == set(group_choices()["experiment"])
