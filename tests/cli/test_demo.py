"""`lmtrain demo`: every stage in its order, a second time too, and the same figure from the resharded checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmtrain.checkpoint.read_verified_contents import Contents
from lmtrain.cli.demo_command import LAYOUT, check_same_scores, read_result
from lmtrain.errors import LmtrainError
from tests.cli.harness import Preset, start

SHORT = (
    Preset("train.steps=4"),
    "schedule.warmup_steps=1",
    "train.valid_samples=1",
    "model.num_layers=2",
    "model.width=32",
    "model.ffn_width=32",
)

RANKS = {f"rank_{rank:05d}" for rank in range(4)}


def demo(output: Path, *settings: str) -> str:
    process = start("demo", "--output", output, *SHORT, *settings, env={"COLUMNS": "80"})
    text = process.communicate(timeout=900)[0]
    assert process.returncode == 0, text
    return text


@pytest.mark.slow
def test_the_whole_of_it_twice(tmp_path: Path) -> None:
    """The second time with a longer training, whose checkpoint takes the place of the first one's results."""
    steps = []
    for settings in ((), ("train.steps=6",)):
        text = demo(tmp_path / "demo", *settings)
        verbs = [line.split()[2] for line in text.splitlines() if line.startswith("$ lmtrain")]
        assert verbs == [
            "tokenizer", "preprocess", "preprocess", "pretrain", "eval", "reshard", "eval", "export", "generate",
        ]  # fmt: skip
        ours, cut = (read_result(tmp_path / "demo" / f"evaluation{name}.json") for name in ("", "_resharded"))
        assert ours["nll_sum_nats"] == cut["nll_sum_nats"]
        assert f"{cut['nll_sum_nats']:.6f} nats, the same to the last digit" in text
        rows = {line[2:22].strip(): line.split()[-3:-1] for line in text.splitlines() if line.startswith("│ ")}
        assert rows["this model"] == rows[f"resharded to {LAYOUT}"[:20]]
        assert rows["this model"][0] == f"{ours['measures']['bits_per_byte']:.3f}"
        contents = Contents(tmp_path / "demo" / "resharded")
        assert {name[:10] for name in contents.manifest.files if name.startswith("rank")} == RANKS
        assert json.loads((tmp_path / "demo" / "hf" / "config.json").read_text())["model_type"] == "llama"
        steps.append(contents.manifest.step)
    assert steps == [4, 6]


def test_another_figure_is_an_error() -> None:
    result: dict[str, Any] = {"nll_sum_nats": 513701.642084, "measures": {"bits_per_byte": 1.5432}}
    check_same_scores(result, dict(result))
    for wrong in ({"nll_sum_nats": 513701.642085}, {"measures": {"bits_per_byte": 1.5433}}):
        with pytest.raises(LmtrainError, match=rf"resharded to {LAYOUT} scores 513701\.64208. nats, but"):
            check_same_scores(result, result | wrong)
