"""Merge: the mean in float64 rounded once, of any layouts; whole or absent, whatever kills it; what its state says."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lmtrain.checkpoint.disk.checkpoint_format import MANIFEST
from lmtrain.checkpoint.merge import average_checkpoint_contents
from lmtrain.checkpoint.merge.merge_coefficients import merge_weights
from lmtrain.checkpoint.read_merge_record import merge_record
from lmtrain.checkpoint.read_verified_contents import Contents
from lmtrain.errors import CheckpointError, OutputError, StorageError, UsageError
from lmtrain.runfolder.lineage import file_sha256
from lmtrain.runtime.files.atomic_files import folder_lock
from lmtrain.runtime.processes.fault_injection import Fault, arm
from tests.unit.checkpoint.layouts import MODELS, assert_same, bytes_of, draw, read_all, reshard_to, write
from tests.unit.checkpoint.merge.merges import SMALL, mean_of, merge_to, merged, write_run, write_step
from tests.unit.checkpoint.merge.test_merge_weights import MEANS

PARENT = {"run": "a", "checkpoint": "a/step_00000004", "step": 4, "manifest_sha256": "0" * 64, "weight": 0.5}
MIXED = ("tp=2,pp=2", "dp=2,tp=2", "dp_replicate=2,dp_shard=2,zero=3", "pp=3,dp_replicate=2,zero=0")


@pytest.fixture(scope="module", autouse=True)
def _small(small_parts: None) -> Iterator[None]:
    """Sums of 1000 numbers at a time, so that a part of a small model has several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(average_checkpoint_contents, "_CHUNK", 1000)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, _small: None) -> list[Path]:
    """Checkpoints of four steps at four layouts; tests only read them."""
    return write_run(tmp_path_factory.mktemp("mixed"), MIXED)


def test_a_mean_is_summed_in_float64_and_rounded_once(tmp_path: Path) -> None:
    paths = [write_step(tmp_path, step) for step in (1, 2, 3)]
    shares = merge_weights("decay:sqrt", 3)
    wanted = mean_of([draw(SMALL, seed=step) for step in (1, 2, 3)], shares)
    mean = merged(paths, "decay:sqrt")
    assert_same({name: mean.read_bits(name).view(wanted[name].dtype) for name in mean.manifest.tensors}, wanted)


@pytest.mark.wide
@pytest.mark.parametrize("mean", MEANS)
def test_every_mean_of_every_layout(run: list[Path], tmp_path: Path, mean: str) -> None:
    result = merge_to(tmp_path / "out", run, mean, workers=2)
    wanted = mean_of([draw(MODELS["tied"], seed=step) for step in (1, 2, 3, 4)], merge_weights(mean, 4))
    assert_same(read_all(result.path), wanted)
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.wide
@pytest.mark.parametrize("model", ["tied", "gqa", "bert"])
def test_layouts_merge_as_their_copies_at_one_layout(tmp_path: Path, model: str) -> None:
    """No tied weight and no row of padding counts twice: the newest's files are those of a merge at its layout."""
    paths = write_run(tmp_path / "run", MIXED, MODELS[model])
    copies = [tmp_path / "copies" / "checkpoints" / path.name for path in paths]
    for path, copy in zip(paths, copies, strict=True):
        copy.parent.mkdir(parents=True, exist_ok=True)
        reshard_to(path, copy, "tp=1")
    merge_to(tmp_path / "a", paths, "ema:0.9")
    merge_to(tmp_path / "b", copies, "ema:0.9")
    assert_same(read_all(tmp_path / "a"), read_all(tmp_path / "b"))


@pytest.mark.wide
def test_one_checkpoint_stays_as_it_is(tmp_path: Path) -> None:
    """Bit for bit: also a NaN with a payload and a zero with a sign."""
    arrays = draw(SMALL)
    weight = arrays["model.embedding.token.weight"]
    weight.view(np.uint32).reshape(-1)[:3] = (0x7F800001, 0x80000000, 1)
    path = write(tmp_path / "run" / "checkpoints", SMALL, "tp=2", arrays)
    merge_to(tmp_path / "out", [path], "decay:sqrt")
    files = [Contents(folder).manifest.files for folder in (path, tmp_path / "out")]
    assert files[0] == files[1]


def test_order_is_by_samples(tmp_path: Path) -> None:
    """Neither the arguments nor the steps decide: a run with larger batches is further at fewer steps."""
    paths = [write_step(tmp_path, step, samples=samples) for step, samples in ((5, 100), (3, 900), (4, 500))]
    mean = merged([paths[1], paths[0], paths[2]])
    assert [parent.manifest.step for parent in mean.parents] == [5, 4, 3]
    assert mean.manifest.step == 3


def test_state(tmp_path: Path) -> None:
    paths = [write_step(tmp_path, step) for step in (1, 2)]
    state = json.loads(json.dumps(merged(paths, "linear").state()))
    newest = Contents(paths[1]).manifest.state
    assert state.items() >= newest.items()
    assert state["optimizer"] == {"kind": "adamw", "num_updates": 2}
    assert state.keys() - newest.keys() == {"merged", "lineage"}
    digests = [file_sha256(path / MANIFEST) for path in paths]
    assert state["merged"] == {
        "mean": "linear", "moments": "newest",
        "parents": [
            {"run": str(tmp_path), "checkpoint": str(path), "step": step, "manifest_sha256": digest, "weight": step / 3}
            for step, (path, digest) in enumerate(zip(paths, digests, strict=True), 1)
        ],
    }  # fmt: skip
    assert [(p["kind"], p["path"], p["step"], p["manifest_sha256"]) for p in state["lineage"]] == [
        ("merge", str(tmp_path), 2, digests[1])
    ]


def test_moments_and_averages_are_left_out_whole(tmp_path: Path) -> None:
    weights = draw(SMALL, seed=2)
    arrays = weights | {name.replace("model.", "ema."): value for name, value in weights.items() if "model." in name}
    paths = [write_step(tmp_path, 1)]
    paths.append(write(tmp_path / "checkpoints", SMALL, "tp=1", arrays, 2, samples=8, seed=1))
    kept, dropped = merged(paths), merged(paths, moments=False)
    assert {name.partition(".")[0] for name in kept.manifest.tensors} == {"model", "optim"}
    assert {name.partition(".")[0] for name in dropped.manifest.tensors} == {"model"}
    assert kept.averages_left_out == [str(paths[1])]
    assert not {"ema", "optimizer"} & dropped.state().keys()
    assert dropped.state()["merged"]["moments"] == "none"


# Whole or absent


@pytest.mark.wide
def test_a_killed_merge_goes_on_and_another_one_does_not_take_its_blocks(run: list[Path], tmp_path: Path) -> None:
    merge_to(tmp_path / "whole", run, "linear")
    for mean in ("linear", "uniform"):
        arm(Fault("exc", "reshard.journal", 4))
        with pytest.raises(RuntimeError):
            merge_to(tmp_path / "out", run, mean)
        assert sorted(os.listdir(tmp_path)) == ["out.merging", "whole"]
    assert merge_to(tmp_path / "out", run, "linear").earlier_bytes == 0
    shutil.rmtree(tmp_path / "out")
    arm(Fault("exc", "reshard.journal", 4))
    with pytest.raises(RuntimeError):
        merge_to(tmp_path / "out", run, "linear")
    assert merge_to(tmp_path / "out", run, "linear").earlier_bytes > 0
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")
    assert merge_to(tmp_path / "out", run, "linear").was_finished
    with pytest.raises(OutputError, match="is there already"):
        merge_to(tmp_path / "out", run, "uniform")


@pytest.mark.wide
def test_a_resharded_copy_in_its_place_is_no_finished_merge(run: list[Path], tmp_path: Path) -> None:
    merge_to(tmp_path / "merged", run)
    reshard_to(tmp_path / "merged", tmp_path / "out", "tp=1")
    with pytest.raises(OutputError, match="is there already"):
        merge_to(tmp_path / "out", run)


@pytest.mark.wide
@pytest.mark.parametrize("number", range(4))
def test_damage_of_any_parent_is_named_and_nothing_is_left(run: list[Path], tmp_path: Path, number: int) -> None:
    paths = [shutil.copytree(path, tmp_path / "run" / "checkpoints" / path.name) for path in run]
    file = next(p.file for n, t in Contents(paths[number]).manifest.tensors.items() if "model" in n for p in t.pieces)
    data = bytearray((paths[number] / file).read_bytes())
    data[5000] ^= 1
    (paths[number] / file).write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"{paths[number].name}.*{file} is damaged in bytes"):
        merge_to(tmp_path / "out", paths)
    assert os.listdir(tmp_path) == ["run"]


def test_outputs_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [write_step(tmp_path / "run", step) for step in (1, 2)]
    for wrong in (paths[0], paths[0] / "inside", tmp_path / "run"):
        with pytest.raises(UsageError, match="must not change"):
            merge_to(wrong, paths, overwrite=True)
    with pytest.raises(UsageError, match="is the name of another step; the checkpoint is of step 2"):
        merge_to(tmp_path / "step_00000001", paths)
    with folder_lock(tmp_path / "out.merging"), pytest.raises(OutputError, match=r"out\.merging"):
        merge_to(tmp_path / "out", paths)
    shutil.rmtree(tmp_path / "out.merging")
    monkeypatch.setattr("lmtrain.checkpoint.find_and_prune.free_bytes", lambda path: 1000)
    with pytest.raises(StorageError, match="1000 B free"):
        merge_to(tmp_path / "out", paths)
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"parents": []}, "names no parents"), ({"mean": 7}, "no mean"), ({"moments": None}, "no moments"),
        ({"parents": [{"run": "a"}]}, "checkpoint"), ({"parents": 3}, "not iterable"),
        *(({"parents": [PARENT | {key: wrong}]}, "is not a checkpoint with its weight")
          for key, wrong in (("run", 1), ("step", -1), ("step", 1.5), ("weight", "0.5"), ("weight", True))),
    ],
)  # fmt: skip
def test_a_damaged_record_of_a_merge_is_refused(change: dict[str, object], says: str) -> None:
    entry = {"mean": "uniform", "moments": "none", "parents": [PARENT]}
    record = merge_record({"merged": entry}, "here")
    assert record is not None
    assert record.parents[0].weight == 0.5
    with pytest.raises(CheckpointError, match=f"here does not state how it was merged: .*{says}"):
        merge_record({"merged": entry | change}, "here")
