"""Reshard: any layout from any other, bit for bit, whatever kills it when, within the memory it was given."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import pytest

from lmtrain.checkpoint.disk.checkpoint_format import Manifest, TensorEntry
from lmtrain.checkpoint.disk.tensor_slice_geometry import Box, cover_problem, full_box, intersect
from lmtrain.checkpoint.read_verified_contents import Contents
from lmtrain.checkpoint.reshard.reshard_tensors import list_segments
from lmtrain.checkpoint.reshard.write_target_files import Limits, files_of_layout
from lmtrain.errors import CheckpointError, MissingInputError, OutputError, StorageError, UsageError
from lmtrain.models.model_settings import ModelSettings
from lmtrain.placement.layers_and_shards_of_ranks import placements_of_rank
from lmtrain.runtime.processes.fault_injection import Fault, arm
from tests.marks import wide
from tests.unit.checkpoint.layouts import (
    LAYOUTS,
    MODELS,
    SLOTS,
    Arrays,
    assert_same,
    at,
    bytes_of,
    draw,
    read_all,
    reshard_to,
    write,
)

PAIRS = [(a, b) for a, b in product(LAYOUTS, LAYOUTS) if a != b]
MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("small_parts")


@pytest.fixture(scope="module")
def tied() -> Arrays:
    return draw(MODELS["tied"])


@pytest.fixture(scope="module")
def written(tied: Arrays, tmp_path_factory: pytest.TempPathFactory, small_parts: None) -> Path:
    """A checkpoint to be read, not to be changed."""
    return write(tmp_path_factory.mktemp("written"), MODELS["tied"], "dp=2,tp=2", tied)


@pytest.fixture
def source(written: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return shutil.copytree(written, tmp_path / "run" / written.name)


@pytest.fixture(scope="module")
def unbroken(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint that one attempt writes for pp=2. Tests only read it."""
    output = tmp_path_factory.mktemp("unbroken") / "out"
    reshard_to(written, output, "pp=2")
    return output


@pytest.fixture(scope="module")
def broken(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The work folder of an attempt that ended amid its journal. To be copied."""
    output = tmp_path_factory.mktemp("broken") / "out"
    arm(Fault("exc", "reshard.journal", 5))
    with pytest.raises(RuntimeError):
        reshard_to(written, output, "pp=2")
    return output.with_name("out.resharding")


def there_and_back(tmp_path: Path, model: str, first: str, second: str) -> None:
    arrays = draw(MODELS[model])
    begin = write(tmp_path / "run", MODELS[model], first, arrays)
    before = bytes_of(begin)
    reshard_to(begin, tmp_path / "second", second, Limits(workers=2))
    assert_same(read_all(tmp_path / "second"), arrays)
    reshard_to(tmp_path / "second", tmp_path / "back", first)
    assert_same(read_all(tmp_path / "back"), arrays)
    assert bytes_of(begin) == before
    assert sorted(os.listdir(tmp_path)) == ["back", "run", "second"]
    states = [Contents(path).manifest.state for path in (begin, tmp_path / "second", tmp_path / "back")]
    assert states[0] == {key: value for key, value in states[2].items() if key != "resharded"}
    assert states[1]["settings"]["parallel"] == at(second).to_dict()
    for key in states[0].keys() - {"settings"}:
        assert states[1][key] == states[0][key]


@pytest.mark.parametrize(
    ("model", "first", "second"),
    [
        ("tied", "tp=2,pp=2", "pp=2,vp=2"), ("gqa", "dp_replicate=2,dp_shard=2,zero=3", "dp=2,tp=2,pp=2"),
        ("bert", "pp=3,dp_replicate=2,zero=0", "dp=2,tp=2"),
    ],
)  # fmt: skip
def test_there_and_back_is_bitwise_the_same(tmp_path: Path, model: str, first: str, second: str) -> None:
    there_and_back(tmp_path, model, first, second)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("pair", PAIRS, ids=" to ".join)
def test_every_pair_there_and_back(tmp_path: Path, model: str, pair: tuple[str, str]) -> None:
    there_and_back(tmp_path, model, *pair)


@pytest.fixture(scope="module")
def manifests(written: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Manifest]:
    """Return the manifest of each model's checkpoint, written by one process."""
    folders = {model: tmp_path_factory.mktemp(model) for model in MODELS}
    paths = {model: write(folder, MODELS[model], "tp=1", draw(MODELS[model])) for model, folder in folders.items()}
    return {model: Contents(path).manifest for model, path in paths.items()}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_reads_only_its_own_files(manifests: dict[str, Manifest], model: str, layout: str) -> None:
    """No file that a rank opens holds a number that it does not, and all its numbers are there."""
    files = files_of_layout(manifests[model], MODELS[model], at(layout))
    pieces = [(file, spec.name, spec.box) for file, specs in files.items() for spec in specs]
    for rank in range(at(layout).layout.world_size):
        held = held_by(rank, MODELS[model], layout, manifests[model].tensors)
        opened = {file for file, name, piece in pieces if any(intersect(piece, box) for box in held[name])}
        assert {(name, piece) for file, name, piece in pieces if file in opened} == {
            (name, box) for name in held for box in held[name]
        }


def held_by(rank: int, model: ModelSettings, layout: str, tensors: Mapping[str, TensorEntry]) -> dict[str, set[Box]]:
    """Which parts of which tensors a rank has in memory."""
    places = placements_of_rank(model, at(layout), at(layout).layout.coordinate(rank)).values()
    held: dict[str, set[Box]] = {name: set() for name in tensors}
    for place in places:
        for slot in SLOTS:
            held[f"{slot}.{place.name}"] = {Box(block.offset, block.shape) for block in place.regions}
    return held | {name: {full_box(tensors[name].shape)} for name in ("optim.scale", "optim.seen")}


def test_padding_is_in_no_file(manifests: dict[str, Manifest]) -> None:
    files = files_of_layout(manifests["tied"], MODELS["tied"], at("tp=2"))
    pieces = [spec for specs in files.values() for spec in specs if spec.name == "model.embedding.token.weight"]
    assert {spec.global_shape for spec in pieces} == {(67, 24)}
    assert sorted(spec.box.shape for spec in pieces) == [(33, 24), (34, 24)]
    assert not any(spec.name == "model.head.weight" for specs in files.values() for spec in specs)


# Interrupted


@pytest.mark.parametrize(
    ("point", "count"),
    [("segment", 3), ("finish", 1), ("publish", 1), ("cleanup", 1), *wide(("segment", 1), ("journal", 1))],
)
def test_a_failure_anywhere_and_the_same_call_again(
    source: Path, unbroken: Path, tmp_path: Path, point: str, count: int
) -> None:
    arm(Fault("exc", f"reshard.{point}", count))
    with pytest.raises(RuntimeError, match=point):
        reshard_to(source, tmp_path / "out", "pp=2", Limits(workers=2))
    assert (tmp_path / "out").exists() == (point == "cleanup")
    arm()
    again = reshard_to(source, tmp_path / "out", "pp=2", Limits(workers=1))
    assert again.was_finished == (point == "cleanup")
    assert bytes_of(tmp_path / "out") == bytes_of(unbroken)
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]


def test_what_one_attempt_makes_holds_every_number(unbroken: Path, tied: Arrays) -> None:
    assert_same(read_all(unbroken), tied)


_KILLED = """
import os, sys
from pathlib import Path
from lmtrain.checkpoint import read_verified_contents
from lmtrain.checkpoint.disk import block_hashed_file, safetensors_file
from lmtrain.checkpoint.reshard import reshard_tensors, write_target_files
from lmtrain.checkpoint.reshard.write_target_files import Limits
from lmtrain.runtime.processes.fault_injection import parse_fault, arm
from tests.unit.checkpoint.layouts import reshard_to
for module in (block_hashed_file, safetensors_file, read_verified_contents, write_target_files, reshard_tensors):
    module.BLOCK_BYTES = 4096
reshard_tensors.SEGMENT_BYTES = 64 << 10
write_target_files.PART_BYTES, write_target_files.MIN_PART_BYTES = 10 << 10, 10 << 10
for fault in sys.argv[3:]:
    if not (child := os.fork()):
        arm(parse_fault(fault))
        reshard_to(Path(sys.argv[1]), Path(sys.argv[2]), "pp=2", Limits(workers=2))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), os.path.exists(sys.argv[2]))
"""


def test_killed_again_and_again(source: Path, unbroken: Path, tied: Arrays, tmp_path: Path) -> None:
    before = bytes_of(source)
    instants = ("segment:count=3", "journal:count=4", "publish:count=1")
    faults = [f"kill:point=reshard.{instant}" for instant in instants]
    command = map(str, [sys.executable, "-c", _KILLED, source, tmp_path / "out", *faults])
    ran = subprocess.run([*command], check=True, timeout=120, capture_output=True, text=True)
    assert ran.stdout == "-9 False\n" * len(instants)
    resharded = reshard_to(source, tmp_path / "out", "pp=2")
    assert resharded.earlier_bytes == sum(array.nbytes for array in tied.values())
    assert bytes_of(tmp_path / "out") == bytes_of(unbroken)
    assert bytes_of(source) == before


def test_an_attempt_after_a_torn_line_leaves_a_journal_that_the_next_one_reads(
    source: Path, unbroken: Path, broken: Path, tmp_path: Path
) -> None:
    journal = shutil.copytree(broken, tmp_path / "out.resharding") / "journal.jsonl"
    os.truncate(journal, journal.stat().st_size - 9)
    arm(Fault("exc", "reshard.journal", 2))
    with pytest.raises(RuntimeError):
        reshard_to(source, tmp_path / "out", "pp=2")
    assert reshard_to(source, tmp_path / "out", "pp=2").earlier_bytes > 0
    assert bytes_of(tmp_path / "out") == bytes_of(unbroken)


@pytest.mark.parametrize("harm", ["shorter file", "missing file", "no journal"])
def test_what_an_attempt_left_is_not_believed_when_it_is_not_whole(
    source: Path, unbroken: Path, broken: Path, tmp_path: Path, harm: str
) -> None:
    work = shutil.copytree(broken, tmp_path / "out.resharding")
    journal, file = work / "journal.jsonl", work / "files" / "rank_00001.safetensors"
    assert len(journal.read_bytes().splitlines()) >= 6
    match harm:
        case "shorter file":
            os.truncate(file, file.stat().st_size - 1)
        case "missing file":
            file.unlink()
        case "no journal":
            journal.unlink()
    seen: list[tuple[int, ...]] = []
    resharded = reshard_to(source, tmp_path / "out", "pp=2", report=lambda *now: seen.append(now))
    assert resharded.earlier_bytes == 0
    assert seen[-1][0] == seen[-1][1] > 0
    assert [done for done, *_ in seen] == sorted(done for done, *_ in seen)
    assert bytes_of(tmp_path / "out") == bytes_of(unbroken)


LEFTOVERS = [0, *wide(*range(1, 15))]


@pytest.mark.parametrize("seed", LEFTOVERS)
def test_what_changed_since_is_done_again(source: Path, unbroken: Path, tmp_path: Path, seed: int) -> None:
    """Wherever bits of leftovers were flipped or lost, and links planted, the result is that of an unbroken attempt."""
    chance = random.Random(seed)
    point, most = chance.choice([("segment", 8), ("journal", 8), ("finish", 1), ("publish", 1)])
    arm(Fault("exc", f"reshard.{point}", chance.randint(1, most)))
    with pytest.raises(RuntimeError):
        reshard_to(source, tmp_path / "out", "pp=2", Limits(workers=2))
    arm()
    work = tmp_path / "out.resharding"
    for _ in range(chance.randint(1, 3)):
        harm(chance, chance.choice([file for file in work.rglob("*") if file.is_file() and file.name != ".lock"]))
    reshard_to(source, tmp_path / "out", "pp=2", Limits(workers=2))
    assert bytes_of(tmp_path / "out") == bytes_of(unbroken)
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]


def harm(chance: random.Random, file: Path) -> None:
    data, kind = bytearray(file.read_bytes()), chance.choice(["flip", "flip", "zeros", "cut", "grow", "link", "folder"])
    at = chance.randrange(len(data) or 1)
    if kind in ("flip", "zeros") and data:
        data[at : at + 300] = bytes(len(data[at : at + 300])) if kind == "zeros" else bytes([data[at] ^ 1 << at % 8])
    if kind in ("link", "folder"):
        file.unlink()
        if kind == "link":
            file.symlink_to("/dev/null")
        else:
            (file / "inside").mkdir(parents=True)
        return
    file.write_bytes(data[:at] if kind == "cut" else data + b"more" if kind == "grow" else data)


def test_little_is_done_again_for_little_harm(source: Path, tmp_path: Path) -> None:
    arm(Fault("exc", "reshard.publish"))
    with pytest.raises(RuntimeError):
        reshard_to(source, tmp_path / "out", "pp=2")
    file = tmp_path / "out.resharding" / "files" / "rank_00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    seen: list[tuple[int, ...]] = []
    done = reshard_to(source, tmp_path / "out", "pp=2", report=lambda *now: seen.append(now))
    total = seen[-1][1]
    assert 0.8 * total < done.earlier_bytes < total
    assert not Contents(tmp_path / "out").find_damage()


def test_harm_to_what_is_done_is_not_passed_for_done(written: Path, unbroken: Path, tmp_path: Path) -> None:
    file = shutil.copytree(unbroken, tmp_path / "out") / "rank_00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    with pytest.raises(OutputError, match=r"out, made by this command earlier, is damaged: .*rank_00001\."):
        reshard_to(written, tmp_path / "out", "pp=2")
    os.truncate(file, 100)
    with pytest.raises(OutputError, match="is there already"):
        reshard_to(written, tmp_path / "out", "pp=2")
    reshard_to(written, tmp_path / "out", "pp=2", overwrite=True)
    assert bytes_of(tmp_path / "out") == bytes_of(unbroken)
    assert os.listdir(tmp_path) == ["out"]


def test_done_already(written: Path, unbroken: Path, tmp_path: Path) -> None:
    shutil.copytree(unbroken, tmp_path / "out")
    assert reshard_to(written, tmp_path / "out", "pp=2").was_finished
    other = write(tmp_path / "other", MODELS["tied"], "dp=2,tp=2", draw(MODELS["tied"], seed=4))
    for source, layout in ((written, "pp=3"), (other, "pp=2"), (written, "pp=2,schedule=gpipe")):
        with pytest.raises(OutputError, match="is there already"):
            reshard_to(source, tmp_path / "out", layout)
    assert bytes_of(tmp_path / "out") == bytes_of(unbroken)
    assert not (tmp_path / "out.resharding").exists()


# Refused


def test_a_damaged_source_is_named_and_nothing_is_left(source: Path, tmp_path: Path) -> None:
    data = bytearray((source / "rank_00002.safetensors").read_bytes())
    data[len(data) // 2] ^= 4
    (source / "rank_00002.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank_00002\.safetensors is damaged in bytes"):
        reshard_to(source, tmp_path / "out", "pp=2")
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_outputs_that_are_refused(source: Path, tmp_path: Path) -> None:
    for wrong in (source, source / "inside", tmp_path / "run"):
        with pytest.raises(UsageError, match="must not change"):
            reshard_to(source, wrong, "pp=2", overwrite=True)
    with pytest.raises(UsageError, match="is the name of another step; the checkpoint is of step 7"):
        reshard_to(source, tmp_path / "step_00000008", "pp=2")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("")
    (tmp_path / "link").symlink_to(source)
    for wrong in (tmp_path / "precious", tmp_path / "link"):
        with pytest.raises((OutputError, UsageError)):
            reshard_to(source, wrong, "pp=2", overwrite=True)
    with pytest.raises(MissingInputError):
        reshard_to(tmp_path / "nowhere", tmp_path / "out", "pp=2")
    assert sorted(os.listdir(tmp_path)) == ["link", "precious", "run"]


def test_a_full_disk_is_said_before_a_byte_is_copied(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmtrain.checkpoint.find_and_prune.free_bytes", lambda path: 1000)
    with pytest.raises(StorageError, match="1000 B free"):
        reshard_to(source, tmp_path / "out", "pp=2")
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_a_disk_that_fills_up_leaves_what_was_done(source: Path, tmp_path: Path) -> None:
    arm(Fault("enospc", "reshard.segment", 4))
    with pytest.raises(StorageError, match="disk is full"):
        reshard_to(source, tmp_path / "out", "pp=2")
    assert reshard_to(source, tmp_path / "out", "pp=2").earlier_bytes > 0


# Copy jobs


def test_segments_hold_every_number_once(written: Path) -> None:
    manifest = Contents(written).manifest
    found: dict[str, list[Box]] = {}
    for segment in list_segments(manifest):
        for name, box in segment:
            found.setdefault(name, []).append(box)
    assert len(list(list_segments(manifest))) > 5
    for name, tensor in manifest.tensors.items():
        assert cover_problem(tensor.shape, found.get(name, [])) is None
