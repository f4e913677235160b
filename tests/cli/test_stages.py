"""Runs in stages through the command line: killed, stopped, cut or resharded anywhere, they are the unbroken run.

Three stages differ in blend, length of sequences, batch, learning rate and schedule.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lmtrain.observe.metrics import read_metrics
from tests.cli.harness import Toy, lmtrain, start
from tests.marks import slow, wide

EXACT = ("step", "loss", "grad_norm", "lr", "samples", "tokens", "samples_hash", "skipped", "loss_scale", "stage")
END = 20
STAGES = (  # 8 steps, 5 and 7
    "stages.trunk.steps=8", "stages.decay.samples=36", "stages.decay.schedule=linear", "stages.decay.optim.lr=1e-3",
    "stages.decay.data.datasets=[{path: B, weight: 2}, {path: C, weight: 1}]",
    "stages.long.tokens=1600", "stages.long.model.seq_len=64", "stages.long.model.rotary_base=50000",
    "stages.long.model.rotary_scaling=yarn", "stages.long.model.rotary_factor=2",
    "stages.long.model.rotary_original_len=32",
    "stages.long.train.global_batch=4",
)  # fmt: skip
KILLS = (
    "step:step=1", "step:step=4", "ckpt.before_rename:step=7", "start.build:count=2", "start.load", "step:step=8",
    "ckpt.mid_write", "step:step=11", "ckpt.before_manifest:step=12", "start.load:count=2", "step:step=13",
    "ckpt.after_rename:count=2",
)  # fmt: skip
FEW_KILLS = ("ckpt.before_rename:step=7", "start.build:count=2", "start.load:count=2", "step:step=13")
LAYOUTS = {
    "one": [],
    "tp2 x dp2": ["parallel.tp=2", "parallel.dp_shard=2", "parallel.zero=2"],
    "pp2 x dp2": ["parallel.pp=2", "parallel.dp_replicate=2"],
}


@pytest.fixture(scope="module")
def blends(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three datasets of a third of the texts each."""
    folder, pages = tmp_path_factory.mktemp("blends"), sorted(toy.text.iterdir())
    found = {}
    for i, name in enumerate("ABC"):
        text = folder / name
        text.mkdir()
        for page in pages[i::3]:
            shutil.copy(page, text)
        found[name] = folder / "data" / name
        lmtrain("preprocess", text, "--tokenizer", toy.tokenizer, "--output", found[name])
    return found


def words(toy: Toy, blends: dict[str, Path], folder: Path, *more: str, stages: Sequence[str] = STAGES) -> list[str]:
    base = toy.settings(
        folder, train__global_batch=8, train__micro_batch=1, train__rampup="{start: 4, increment: 4, samples: 20}",
        model__dropout=0.1, model__positions="rotary", checkpoint__interval_steps=3, checkpoint__keep_last=2,
        checkpoint__ema__decay=0.9, schedule__warmup_steps=3, data__split="[0.9,0.1]", train__valid_interval_steps=6,
        train__valid_samples=4, parallel__timeout_s=60,
    )  # fmt: skip
    base = [word for word in base if not word.startswith(("data.path=", "train.steps="))]
    groups = [word for word in more if "." not in word.partition("=")[0]]
    blend = ["data=blend", "data.datasets=[{path: A, weight: 1}, {path: B, weight: 2}]"]
    given = [*groups, *blend, *base, *stages, *(word for word in more if word not in groups)]
    keys = [word.partition("=")[0] for word in given]
    given = [word for at, word in enumerate(given) if keys[at] not in keys[at + 1 :]]
    for name, path in blends.items():
        given = [word.replace(f"path: {name},", f"path: {path},") for word in given]
    return given


def curve(folder: Path, end: int = END, first: int = 1) -> list[tuple[Any, ...]]:
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["event"] == "step"]
    assert [row["step"] for row in rows] == list(range(first, end + 1))
    return [tuple(row.get(key) for key in EXACT) for row in rows]


def measured(folder: Path) -> list[tuple[Any, ...]]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [(row["step"], row["loss"], row["tokens"]) for row in rows if row["event"] == "valid"]


def weights(folder: Path, end: int = END) -> dict[str, str]:
    """The root hash of each tensor file of the last checkpoint: weights, their average and optimizer."""
    manifest = json.loads((folder / "checkpoints" / f"step_{end:08d}" / "manifest.json").read_text())
    return {name: entry["root"] for name, entry in manifest["files"].items() if name.endswith(".safetensors")}


def history(folder: Path, end: int = END) -> Any:
    return json.loads((folder / "checkpoints" / f"step_{end:08d}" / "manifest.json").read_text())["state"]["history"]


def kill(given: Sequence[object], fault: str) -> None:
    process = start("pretrain", *given, env={"LMTRAIN_FAULT": f"kill:point={fault}", "LMTRAIN_ALLOW_FAULTS": "1"})
    output = process.communicate(timeout=600)[0]
    assert process.returncode != 0, output
    assert "done:" not in output, output


def assert_same(ours: Path, theirs: Path, end: int = END) -> None:
    assert curve(ours, end) == curve(theirs, end)
    assert measured(ours) == measured(theirs)
    assert weights(ours, end) == weights(theirs, end)
    assert history(ours, end) == history(theirs, end)


@pytest.fixture(scope="module")
def unbroken(toy: Toy, blends: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    lmtrain("pretrain", *words(toy, blends, folder))
    return folder


@pytest.mark.wide
@pytest.mark.parametrize(
    ("layout", "kills"),
    [("one", KILLS), ("pp2 x dp2", FEW_KILLS), *slow(("tp2 x dp2", FEW_KILLS))],
)
def test_killed_anywhere_it_is_the_unbroken_run(
    toy: Toy, blends: dict[str, Path], tmp_path: Path, layout: str, kills: Sequence[str]
) -> None:
    folders = tmp_path / "unbroken", tmp_path / "killed"
    nproc = ["--nproc", 4] if LAYOUTS[layout] else []
    whole, cut = ([*words(toy, blends, folder, *LAYOUTS[layout]), *nproc] for folder in folders)
    process = start("pretrain", *whole)
    assert f"done: {END} steps" in process.communicate(timeout=600)[0]
    for fault in kills:
        (folders[1] / "starts.json").unlink(missing_ok=True)  # because: three starts may end before a checkpoint
        kill(cut, fault)
    process = start("pretrain", *cut)
    assert f"done: {END} steps" in process.communicate(timeout=600)[0]
    assert_same(folders[1], folders[0])


@pytest.mark.wide
@pytest.mark.parametrize("end", [2, 5, 9])  # inside the ramp-up, after it, in the decay
def test_stages_of_equal_settings_are_one_run(toy: Toy, blends: dict[str, Path], tmp_path: Path, end: int) -> None:
    wsd = ("schedule=wsd", "schedule.decay_fraction=0.5")
    lmtrain("pretrain", *words(toy, blends, tmp_path / "one", *wsd, "train.steps=12", stages=()))
    cut = (f"stages.a.steps={end}", f"stages.b.steps={12 - end}")
    lmtrain("pretrain", *words(toy, blends, tmp_path / "two", *wsd, stages=cut))
    one, two = (curve(tmp_path / name, 12) for name in ("one", "two"))
    assert [row[:-1] for row in two] == [row[:-1] for row in one]
    assert [row[-1] for row in two] == ["a"] * end + ["b"] * (12 - end)
    assert weights(tmp_path / "two", 12) == weights(tmp_path / "one", 12)
    assert history(tmp_path / "two", 12) == history(tmp_path / "one", 12)


@pytest.mark.wide
def test_a_branch_without_changes_is_the_trunk(
    toy: Toy, blends: dict[str, Path], unbroken: Path, tmp_path: Path
) -> None:
    """A branch begins from the checkpoint at a border, which is kept, and from a later one."""
    for step in (13, 18):
        folder = tmp_path / str(step)
        trunk = unbroken / "checkpoints" / f"step_{step:08d}"
        lmtrain("pretrain", "--from-run", trunk, f"run.dir={folder}")
        assert curve(folder, first=step + 1) == curve(unbroken)[step:]
        assert weights(folder) == weights(unbroken)


@pytest.mark.wide
def test_it_stops_at_a_border_and_goes_on_at_another_layout(
    toy: Toy, blends: dict[str, Path], tmp_path: Path
) -> None:
    unbroken, folder = tmp_path / "unbroken", tmp_path / "run"
    lmtrain("pretrain", *words(toy, blends, unbroken, "model.dropout=0"))  # because: layouts draw other masks
    given = words(toy, blends, folder, "model.dropout=0", "stages.decay.stop_after=true")
    assert "stages.decay.stop_after" in lmtrain("pretrain", *given, code=75)
    assert curve(folder, 13) == curve(unbroken)[:13]
    assert weights(folder, 13) == weights(unbroken, 13)
    other = tmp_path / "other"
    lmtrain("reshard", folder, "--to", "tp=2", "--output", other)
    moved = words(toy, blends, tmp_path / "moved", "model.dropout=0", f"checkpoint.resume={other}", "parallel.tp=2")
    process = start("pretrain", *moved, "--nproc", 2)
    assert f"done: {END} steps" in process.communicate(timeout=600)[0]
    ours, theirs = curve(tmp_path / "moved", first=14), curve(unbroken)[13:]
    assert [row[3:7] for row in ours] == [row[3:7] for row in theirs]
    assert [row[1] for row in ours] == pytest.approx([row[1] for row in theirs], rel=1e-5)
    assert history(tmp_path / "moved") == history(unbroken)


@pytest.mark.wide
def test_a_validation_cut_off_at_a_border_is_made_with_the_data_of_its_stage(
    toy: Toy, blends: dict[str, Path], unbroken: Path, tmp_path: Path
) -> None:
    given = words(toy, blends, tmp_path / "run")
    # in the measurement of the average at step 8
    fault = {"LMTRAIN_FAULT": "term:point=valid.batch:count=14", "LMTRAIN_ALLOW_FAULTS": "1"}
    process = start("pretrain", *given, env=fault)
    output = process.communicate(timeout=600)[0]
    assert (process.returncode, "validation of step 8: left to the next start" in output) == (75, True), output
    lmtrain("pretrain", *given)
    assert_same(tmp_path / "run", unbroken)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["stage"] for row in rows if (row["event"], row["step"]) == ("valid", 8)] == ["trunk"]


VARIANTS: dict[str, tuple[str, ...]] = {
    "fp16, LAMB": ("precision=fp16", "precision.initial_scale=1073741824", "optim=lamb"),
    "bf16, Muon, best fit": ("precision=bf16", "optim=muon", "data.packing=best_fit", "data.document_mask=true"),
    "recompute, dropout, restart": (
        "stages.decay.recompute=full", "stages.decay.model.dropout=0.3", "stages.long.model.dropout=0",
        "stages.long.data.datasets=[{path: A, weight: 1, restart: true}, {path: B, weight: 2}]",
        "stages.long.model.seq_len=32", "stages.long.tokens=800",
    ),
    "the same data, then one dataset": (
        "stages.decay.data.datasets=[{path: A, weight: 1}, {path: B, weight: 2}]",
        "stages.long.data={kind: dataset, path: PATH}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", wide(*VARIANTS))
def test_stopped_at_each_border_and_killed_between_it_is_the_unbroken_run(
    toy: Toy, blends: dict[str, Path], tmp_path: Path, variant: str
) -> None:
    changes = [word.replace("PATH", str(blends["A"])) for word in VARIANTS[variant]]
    lmtrain("pretrain", *words(toy, blends, tmp_path / "whole", *changes))
    cut = words(toy, blends, tmp_path / "cut", *changes)
    lmtrain("pretrain", *cut, "stages.trunk.stop_after=true", code=75)
    kill(cut, "step:step=10")
    lmtrain("pretrain", *cut, "stages.decay.stop_after=true", code=75)
    kill(cut, "step:step=17")
    lmtrain("pretrain", *cut)
    assert_same(tmp_path / "cut", tmp_path / "whole")
    if "fp16" in variant:
        assert any(row[7] for row in curve(tmp_path / "whole"))  # steps were skipped, so the loss scale has changed


@pytest.mark.wide
def test_bert_with_longer_sequences_later(sentences: Toy, tmp_path: Path) -> None:
    given = [
        "model=bert_tiny", "data=masked", "data.split=[0.8,0.2]", "model.num_positions=64", "stages.short.steps=6",
        "stages.long.samples=20", "stages.long.model.seq_len=64", "stages.long.train.global_batch=2",
    ]  # fmt: skip
    groups, rest = given[:2], given[2:]

    def run(name: str) -> list[str]:
        base = [word for word in sentences.settings(tmp_path / name) if not word.startswith("train.steps=")]
        return [*groups, *base, *rest]

    lmtrain("pretrain", *run("whole"))
    lmtrain("pretrain", *run("cut"), "stages.short.stop_after=true", code=75)
    kill(run("cut"), "step:step=11")
    lmtrain("pretrain", *run("cut"))
    assert_same(tmp_path / "cut", tmp_path / "whole", 16)


@pytest.mark.slow
def test_compiled_stages(toy: Toy, blends: dict[str, Path], tmp_path: Path) -> None:
    given = ("compute.compile=true", "model.dropout=0", "stages.long.tokens=600")
    lmtrain("pretrain", *words(toy, blends, tmp_path / "whole", *given))
    cut = words(toy, blends, tmp_path / "cut", *given)
    lmtrain("pretrain", *cut, "stages.decay.stop_after=true", code=75)
    lmtrain("pretrain", *cut)
    assert_same(tmp_path / "cut", tmp_path / "whole", 16)
