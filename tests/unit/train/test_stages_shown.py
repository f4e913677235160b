"""What a person is shown of a run in stages: the table of a dry run, and its warm-up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmtrain.config.compose_run_settings import compose
from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.tokenizer.train import train_wordpiece
from lmtrain.train.layouts.run_stages_table import dry_run_facts_of_stages, stage_lines, stage_rows
from lmtrain.train.run_config import RunConfig
from lmtrain.train.startup_checks.preflight import Inputs, load_stages
from tests.unit.data.writing import add_document

TINY = (
    "model=gpt_tiny", "model.positions=rotary", "model.seq_len=8", "train.global_batch=4", "train.micro_batch=2",
    "schedule=constant", "schedule.warmup_steps=2", "optim.lr=1e-3", "train.valid_interval_steps=0", "data=blend",
)  # fmt: skip
STAGES = (
    "stages.trunk.steps=10", "stages.decay.samples=19", "stages.decay.schedule=linear",
    "stages.long.tokens=1k", "stages.long.model.seq_len=16", "stages.long.train.global_batch=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the datasets a and b of 800 tokens each, and their tokenizer."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "tokenizer.json").write_bytes(train_wordpiece(["a cat sat on a mat"], 40, lowercase=True).to_bytes())
    for name in "ab":
        with DatasetWriter(folder / name, np.uint16) as writer:
            for document in range(80):
                add_document(writer, [np.full(10, 5 + document % 7 + (name == "b"))])
    return folder


def config(folder: Path, *overrides: str) -> RunConfig:
    parts = [f"{{path: {folder / name}, weight: {weight}}}" for name, weight in (("a", 3), ("b", 1))]
    only_b = f"stages.decay.data.datasets=[{{path: {folder / 'b'}, weight: 1}}]"
    words = [*TINY, f"data.datasets=[{', '.join(parts)}]", f"data.tokenizer={folder / 'tokenizer.json'}"]
    return compose(RunConfig, [*words, f"data.index_dir={folder}", *STAGES, only_b, *overrides])


def inputs_of(run: RunConfig) -> Inputs:
    first, *later = load_stages(run, None, None)
    return replace(first, later_stages=tuple(later))


def test_a_row_for_each_stage(folder: Path) -> None:
    run = config(folder)
    trunk, decay, long = stage_rows(run, inputs_of(run))
    assert [(row["steps"], row["samples"], row["tokens"]) for row in (trunk, decay, long)] == [
        (10, 40, 320), (5, 20, 160), (32, 64, 1024),
    ]  # fmt: skip
    assert [row["is_rounded"] for row in (trunk, decay, long)] == [False, True, True]
    assert [(row["batch_sizes"], row["seq_len"], row["micro_batch"]) for row in (trunk, long)] == [
        ([4], 8, 2), ([2], 16, 2),
    ]  # fmt: skip
    assert (trunk["lr_first"], trunk["lr_last"]) == (0.5e-3, 1e-3)
    assert (decay["lr_first"], decay["lr_last"]) == (1e-3, pytest.approx(1e-3 / 5))
    # 780 tokens of a dataset are trained on; of a, trunk reads 240 and long 768; of b, the stages read 80, 160 and 256
    epochs = [[source["epochs"] for source in row["sources"]] for row in (trunk, decay, long)]
    assert np.allclose(epochs[0], [240 / 780, 80 / 780])
    assert np.allclose(epochs[1], [240 / 780])
    assert np.allclose(epochs[2], [(240 + 768) / 780, (240 + 256) / 780])
    assert long["memory_bytes"] > trunk["memory_bytes"]


def test_the_run_is_the_sum_of_its_stages_and_needs_what_the_largest_does(folder: Path) -> None:
    run = config(folder, "hardware=cpu", "hardware.memory_GiB=1e-3")
    facts = dry_run_facts_of_stages(run, inputs_of(run))
    assert (facts["steps"], facts["tokens"]) == (47, 320 + 160 + 1024)
    assert facts["memory"].startswith("in the stage long, ")
    assert "tokens_per_step" not in facts
    assert facts["model_flops"] == pytest.approx(sum(
        stage.flops_per_token(stage.model.with_vocab(facts["vocabulary"])) * row["tokens"]
        for stage, row in zip(run.stage_configs, facts["stages"], strict=True)
    ))  # fmt: skip
    assert all(row["seconds_low"] < row["seconds"] < row["seconds_high"] for row in facts["stages"])
    lines = [*stage_lines(facts["stages"])]
    assert "stages.long.tokens=1k is rounded up to 32 whole steps: 1,024 tokens." in lines
    assert any("The stage long does not fit: it needs " in line for line in lines)


@pytest.mark.parametrize("step", [0, 10, 12])
def test_a_resumed_run_says_which_stage_it_is_in(folder: Path, step: int) -> None:
    run = config(folder)
    first, *later = load_stages(run, None, None)[1 if step >= 10 else 0 :]
    rows = stage_rows(run, replace(first, later_stages=tuple(later)), step=step)
    assert [row["status"] for row in rows] == {
        0: ["ahead"] * 3, 10: ["done", "ahead", "ahead"], 12: ["done", "current", "ahead"],
    }[step]  # fmt: skip
    assert rows[0]["sources"][0]["share"] == 0.75
    long = [source["epochs"] for source in rows[2]["sources"]]
    assert np.allclose(long, [(240 + 768) / 780, (240 + 256) / 780])  # what was read before counts
    text = "\n".join(stage_lines(rows))
    assert ("The run has reached step 12, in the stage decay." in text, "done" in text) == (step == 12, step >= 10)


def row(name: str, count: int = 1, **values: Any) -> dict[str, Any]:
    sources = [
        {"name": f"source-{k}", "share": 1 / count, "epochs": 0.123} for k in range(count)
    ]
    return {
        "stage": name, "status": "ahead", "steps": 1_234_567, "tokens": 123_456_789_012, "given": {"steps": 1},
        "is_rounded": False, "lr_first": 1.2345e-5, "lr_last": 1.2345e-6, "batch_sizes": [1000, 1024, 2048],
        "micro_batch": 16, "seq_len": 131_072, "sources": sources, "memory_bytes": 79 << 30, "seconds": 1e6,
    } | values  # fmt: skip


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["a", "long_context", "a-stage-with-a-name-of-several-words-that-goes-on"])
def test_the_table_fits_the_screen(width: int, name: str) -> None:
    rows = [row(name, 3, status="current", reached_step=1_234_567, fits=False, device_bytes=1), row("b", 1000)]
    lines = [*stage_lines(rows, width)]
    assert max(map(len, lines)) <= width
    assert "992 others 99.2%, at most 0.123 epochs" in " ".join(line.strip() for line in lines)
    heads = [line for line in lines if "1000-2048" in line]
    assert len({line.index("1000-2048") for line in heads}) == 1  # numbers stand below each other


def test_a_default_warm_up_fits_the_stages_that_follow_the_schedule() -> None:
    said: list[str] = []
    words = ["data.path=x", "model=gpt_tiny", "stages.a.steps=20", "stages.c.steps=500", "stages.c.schedule=linear"]
    run = compose(RunConfig, [*words, "stages.b.steps=30"], report=said.append)
    assert run.schedule.warmup_steps == 5
    assert said == ["schedule.warmup_steps=5 instead of 100, to fit the 50 steps of a, b together."]
    assert compose(RunConfig, [*words, "stages.b.steps=300"]).schedule.warmup_steps == 100
