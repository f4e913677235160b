"""Runs of several processes through the command line: the curve of one process, and checkpoints that fit any layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lmtrain.checkpoint.read_verified_contents import Contents
from lmtrain.checkpoint.tensor_reader import CheckpointReader
from lmtrain.observe.metrics import read_metrics
from tests.cli.harness import Toy, lmtrain, start

CHANGED = {"train__global_batch": 8, "train__valid_interval_steps": 6, "train__valid_samples": 5}
FOUR = ("parallel.tp=2", "parallel.dp_shard=2", "parallel.zero=2", "parallel.timeout_s=60")
TWO = ("parallel.dp_shard=2", "parallel.zero=3", "parallel.timeout_s=60")
EXACT = ("step", "loss", "grad_norm", "lr", "samples", "tokens", "samples_hash", "skipped")


def run(nproc: int, *settings: object, code: int = 0, fault: str | None = None) -> str:
    """`lmtrain pretrain --nproc N`, started as users do."""
    env = {"LMTRAIN_FAULT": fault, "LMTRAIN_ALLOW_FAULTS": "1"} if fault else {}
    process = start("pretrain", "--nproc", nproc, *settings, env=env)
    output = process.communicate(timeout=900)[0]
    assert process.returncode == code, output
    return output


def rows(folder: Path, event: str = "step") -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["event"] == event]


def exact(folder: Path) -> list[tuple[Any, ...]]:
    return [tuple(row[key] for key in EXACT) for row in rows(folder)]


def roots(folder: Path) -> dict[str, str]:
    """The hash of each rank's tensors in the last checkpoint."""
    manifest = json.loads((folder / "checkpoints/step_00000012/manifest.json").read_text())
    return {name: entry["root"] for name, entry in manifest["files"].items() if name.endswith(".safetensors")}


def assert_same_curve(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    assert [row["samples_hash"] for row in ours] == [row["samples_hash"] for row in theirs]
    assert [row["tokens"] for row in ours] == [row["tokens"] for row in theirs]
    assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in theirs], rel=1e-5)
    assert [row["grad_norm"] for row in ours] == pytest.approx([row["grad_norm"] for row in theirs], rel=1e-4)


@pytest.fixture(scope="module")
def one(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "run"
    lmtrain("pretrain", *toy.settings(folder, **CHANGED))
    return folder


@pytest.fixture(scope="module")
def four(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four") / "run"
    output = run(4, *toy.settings(folder, **CHANGED), *FOUR)
    assert "layout dp_shard 2 x tp 2, zero 2" in output
    assert output.count("step  1/12") == output.count("done: 12 steps") == 1  # one process speaks
    assert any(line.startswith("0-3") for line in output.splitlines())  # one row: all ranks hold equally much
    return folder


@pytest.mark.wide
def test_four_processes_give_the_curve_of_one(one: Path, four: Path) -> None:
    assert_same_curve(rows(four), rows(one))
    ours, theirs = rows(four, "valid"), rows(one, "valid")
    assert [row["tokens"] for row in ours] == [row["tokens"] for row in theirs]
    assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in theirs], rel=1e-5)
    cut, whole = (CheckpointReader(folder / "checkpoints/step_00000012") for folder in (four, one))
    assert Contents(cut.path).find_damage() == []
    shapes = [{name: tensor.shape for name, tensor in c.manifest.tensors.items()} for c in (cut, whole)]
    assert shapes[0] == shapes[1]
    assert len(roots(four)) == 4
    begun = [rows(folder, "start")[0] for folder in (one, four)]
    assert begun[0]["weights_digest"] == begun[1]["weights_digest"], "the same bits at any layout"
    assert [len(row["peak_bytes"]) for row in rows(four, "memory")][:1] == [4]
    assert min(rows(four, "memory")[-1]["peak_bytes"]) > 1 << 20
    assert rows(one, "memory") == []


@pytest.mark.wide
def test_a_killed_rank_and_the_same_command_again(toy: Toy, four: Path, tmp_path: Path) -> None:
    settings = [*toy.settings(tmp_path / "run", **CHANGED), *FOUR]
    output = run(4, *settings, code=76, fault="kill:rank=2:point=opt_step:count=7")
    assert "rank 2" in output
    assert "at step 4" in run(4, *settings)
    assert exact(tmp_path / "run") == exact(four)
    assert roots(tmp_path / "run") == roots(four)
    assert not list((tmp_path / "run/checkpoints").glob("*.tmp*"))


@pytest.mark.slow
def test_a_killed_pipeline_goes_on_to_the_bit_with_dropout(toy: Toy, tmp_path: Path) -> None:
    """A layout's masks are its own, at every resume."""
    changed = CHANGED | {"model__dropout": 0.1, "train__micro_batch": 1, "model__num_layers": 4}
    pipeline = ("parallel.pp=2", "parallel.vp=2", "parallel.schedule=interleaved", "parallel.dp_shard=2")
    run(4, *toy.settings(tmp_path / "unbroken", **changed), *pipeline)
    settings = [*toy.settings(tmp_path / "run", **changed), *pipeline, "parallel.timeout_s=60"]
    run(4, *settings, code=76, fault="kill:rank=3:point=opt_step:count=7")
    assert "at step 4" in run(4, *settings)
    assert exact(tmp_path / "run") == exact(tmp_path / "unbroken")
    assert roots(tmp_path / "run") == roots(tmp_path / "unbroken")


@pytest.mark.wide
def test_one_process_goes_on_from_four(toy: Toy, one: Path, four: Path, tmp_path: Path) -> None:
    step = four / "checkpoints/step_00000008"
    assert "at step 8" in lmtrain("pretrain", *toy.settings(tmp_path / "run", checkpoint__resume=step, **CHANGED))
    assert_same_curve(rows(tmp_path / "run"), rows(one)[8:])


@pytest.mark.wide
def test_another_layout_goes_on_with_one_rank_s_disk_full(toy: Toy, one: Path, four: Path, tmp_path: Path) -> None:
    """tp 2 x dp 2 of ZeRO-2 becomes dp 2 of ZeRO-3; the save that cannot be is survived by both ranks."""
    settings = toy.settings(
        tmp_path / "run", checkpoint__resume=four / "checkpoints/step_00000008", checkpoint__interval_steps=2, **CHANGED
    )
    output = run(2, *settings, *TWO, fault="enospc:rank=1:point=ckpt.mid_write")
    assert "The checkpoint before this one failed: rank 1 of 2: Saving a checkpoint in" in output
    assert "the disk is full" in output
    assert "Training goes on." in output
    assert_same_curve(rows(tmp_path / "run"), rows(one)[8:])
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step_00000012"]
    assert Contents(tmp_path / "run/checkpoints/step_00000012").find_damage() == []


@pytest.mark.wide
def test_a_damaged_part_of_a_checkpoint_is_refused_by_all(toy: Toy, four: Path, tmp_path: Path) -> None:
    shutil.copytree(four, tmp_path / "run")
    file = tmp_path / "run/checkpoints/step_00000012/rank_00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 16
    file.write_bytes(data)
    before = exact(tmp_path / "run")
    output = run(2, *toy.settings(tmp_path / "run", **CHANGED | {"train__steps": 20}), *TWO, code=65)
    assert "rank_00002.safetensors is damaged" in output
    assert exact(tmp_path / "run") == before


@pytest.mark.wide
def test_the_fp16_scale_of_all_ranks_is_kept(toy: Toy, tmp_path: Path) -> None:
    """A scale far too large overflows and halves until it fits; one process goes on with it."""
    # because: 2^24 x a large gradient of this toy is above fp16's 65504
    half = ("precision=fp16", "precision.initial_scale=16777216")
    run(2, *toy.settings(tmp_path / "a", **CHANGED), "parallel.tp=2", "parallel.timeout_s=60", *half)
    manifest = json.loads((tmp_path / "a/checkpoints/step_00000008/manifest.json").read_text())
    skipped = manifest["state"]["skipped"]
    assert skipped > 0
    assert manifest["state"]["precision"]["loss_scale"] == 2.0 ** (24 - skipped)
    other = toy.settings(tmp_path / "b", checkpoint__resume=tmp_path / "a/checkpoints/step_00000008", **CHANGED)
    lmtrain("pretrain", *other, *half)
    ours, theirs = rows(tmp_path / "b"), rows(tmp_path / "a")[8:]
    assert [row["skipped"] for row in ours] == [row["skipped"] for row in theirs]
    assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in theirs], rel=2e-3)


def test_dry_run_shows_every_rank_of_a_layout(toy: Toy, tmp_path: Path) -> None:
    settings = toy.settings(tmp_path / "run", train__global_batch=256)
    plan = json.loads(lmtrain("pretrain", *settings, *FOUR, "--dry-run", "--json"))
    assert [row["rank"] for row in plan["ranks"]] == [0, 1, 2, 3]
    assert plan["processes"] == 4
    for ranks in (8, 256):
        sizes = ("parallel.tp=2", f"parallel.dp_shard={ranks // 2}", "train.micro_batch=1", "model.num_layers=3")
        text = lmtrain("pretrain", *settings, *sizes, "--dry-run", env={"COLUMNS": "80"})
        table = text[text.index("\nrank ") + 1 :].splitlines()
        assert max(map(len, table)) <= 80
        assert len(table) - 1 == 8 if ranks == 8 else len(table) - 1 < 16
    assert not (tmp_path / "run").exists()
