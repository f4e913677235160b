"""`experiment=stages_demo` with the commands of docs/how_to/train_in_stages.md, on a small part of the library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from data_tools.corpora.stdlib import build_stdlib_corpus
from lmtrain.config.compose_run_settings import compose
from lmtrain.observe.metrics import read_metrics
from lmtrain.train.run_config import RunConfig
from tests.cli.harness import ROOT, lmtrain
from tests.docs.pages import blocks

PAGE = ROOT / "docs/how_to/train_in_stages.md"
SHORT = (
    "stages.trunk.tokens=4k", "stages.decay.tokens=2k", "stages.long.tokens=2k", "stages.long.schedule.warmup_steps=0",
    "schedule.warmup_steps=1", "train.valid_samples=1", "model.num_layers=1", "model.width=32", "model.ffn_width=32",
)  # fmt: skip


def test_every_step_of_the_demo_reads_as_many_tokens_and_every_stage_is_judged_alike() -> None:
    stages = compose(RunConfig, ["experiment=stages_demo"]).stage_configs
    assert [stage.stage_name for stage in stages] == ["trunk", "decay", "long"]
    assert {stage.train.global_batch * stage.seq_len for stage in stages} == {1024}
    assert len({str((stage.data.valid_paths, stage.eval.tasks)) for stage in stages}) == 1


@pytest.mark.wide
def test_the_commands_of_the_page_train_three_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    demo = Path("runs/demo")
    build_stdlib_corpus(demo / "corpus", heldout_ratio=0.2, max_bytes=2 << 20)
    train, heldout, tokenizer = demo / "corpus/train.jsonl", demo / "corpus/heldout.jsonl", demo / "tokenizer"
    lmtrain("tokenizer", "train", train, "--output", tokenizer, "--vocab-size", 400)
    Path("few.jsonl").write_text(min(heldout.read_text().splitlines(), key=len))  # because: all take a minute to score
    lmtrain("preprocess", "few.jsonl", "--tokenizer", tokenizer, "--output", demo / "data/heldout")
    (commands,) = [block.commands for block in blocks(PAGE.read_text("utf-8")) if "stages_demo" in block.text]
    for line in commands[1:5]:
        type_in_shell(line)
    lmtrain(*commands[5].split()[1:], *SHORT)
    rows = read_metrics(demo / "stages" / "metrics.jsonl")
    judged = [(row["event"], row["stage"], row["step"]) for row in rows if row["event"] in ("valid", "eval")]
    assert judged == [(event, *end) for end in (("trunk", 4), ("decay", 6), ("long", 8)) for event in ("valid", "eval")]


def type_in_shell(line: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    subprocess.run(["bash", "-c", line], check=True, env=env)
