"""A setting that would change nothing is refused with a way out, and the way out works."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.harness import Preset, Toy, lmtrain
from tests.marks import wide

# what is typed, what is said, and what is typed instead
UNUSED = {
    "schedule": (["parallel.schedule=gpipe"], "parallel.schedule=gpipe only applies to a pipeline", ["parallel.pp=2"]),
    "rotary_base": (["model.rotary_base=500000"], "Leave it out, which is 10000", ["model.positions=rotary"]),
    "keep": (["checkpoint.keep_every_steps=7", "checkpoint.interval_steps=null"], "Use checkpoint.interval_steps=7",
             ["checkpoint.interval_steps=7"]),
    "valid_path": (["data.valid_path=DATA"], "Add train.valid_interval_steps=200", ["train.valid_interval_steps=200"]),
}  # fmt: skip


@pytest.mark.parametrize("name", ["schedule", "keep", *wide("rotary_base", "valid_path")])
def test_refused_until_it_applies(toy: Toy, tmp_path: Path, name: str) -> None:
    typed, said, instead = UNUSED[name]
    words = [Preset(word.replace("DATA", str(toy.data))) for word in typed]
    typed = [*toy.settings(tmp_path / "run"), *words, "--dry-run"]
    assert said in lmtrain("pretrain", *typed, code=78 if name == "schedule" else 2)
    assert "parameters" in lmtrain("pretrain", *typed, *instead)


def test_a_blend_to_validate_on(toy: Toy, tmp_path: Path) -> None:
    parts = f"[{{path: {toy.data}, weight: 1}}]"
    typed = [word for word in toy.settings(tmp_path / "run") if not word.startswith("data.path=")]
    typed += ["data=blend", f"data.datasets={parts}", f"data.valid_datasets={parts}", "--dry-run"]
    said = f"data.valid_datasets=[{toy.data}] is never read with train.valid_interval_steps=0"
    assert said in lmtrain("pretrain", *typed, code=2)
    assert "parameters" in lmtrain("pretrain", *typed, "train.valid_interval_steps=200")


def test_a_layout_to_reshard_for_is_judged_likewise(toy: Toy, tmp_path: Path) -> None:
    lmtrain("pretrain", *toy.settings(tmp_path / "run", train__steps=1, schedule__warmup_steps=0))
    to = ["reshard", tmp_path / "run", "--output", tmp_path / "out", "--to"]
    assert "parallel.balance=cost only applies to a pipeline" in lmtrain(*to, "tp=2,balance=cost", code=78)
    assert "`lmtrain import` converts from" in lmtrain(*to, "tp=2", "--set", "dropout=0.1", code=2)
    lmtrain(*to, "pp=2,balance=cost")
