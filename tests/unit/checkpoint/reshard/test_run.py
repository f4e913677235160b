"""Reshard: any layout from any other, bit for bit, whatever kills it when, within the memory it was given."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import pytest

from lmtrain.checkpoint.contents import Contents
from lmtrain.checkpoint.disk.boxes import Box, cover_problem, intersect, whole
from lmtrain.checkpoint.disk.format import TensorEntry
from lmtrain.checkpoint.reshard import attempt, limits
from lmtrain.checkpoint.reshard.attempt import segments
from lmtrain.checkpoint.reshard.limits import Limits
from lmtrain.errors import CheckpointError, MissingInputError, OutputError, StorageError, UsageError
from lmtrain.models.model_settings import ModelSettings
from lmtrain.placement.stages import places_of_rank
from lmtrain.runtime.faults import Fault, arm
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
POINTS = ("reshard.segment", "reshard.journal", "reshard.finish", "reshard.publish", "reshard.cleanup")
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _small(small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4 KiB, segments of 64 and parts of 10: small models then have many."""
    monkeypatch.setattr(attempt, "SEGMENT_BYTES", 64 << 10)
    monkeypatch.setattr(limits, "PART_BYTES", 10 << 10)
    monkeypatch.setattr(limits, "MIN_PART_BYTES", 10 << 10)


@pytest.fixture(scope="module")
def tied() -> Arrays:
    return draw(MODELS["tied"])


@pytest.fixture
def source(tied: Arrays, tmp_path: Path) -> Path:
    return write(tmp_path / "run", MODELS["tied"], "dp=2,tp=2", tied)


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


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("pair", random.Random(5).sample(PAIRS, 2), ids=" to ".join)
def test_there_and_back_is_bitwise_the_same(tmp_path: Path, model: str, pair: tuple[str, str]) -> None:
    there_and_back(tmp_path, model, *pair)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("pair", PAIRS, ids=" to ".join)
def test_every_pair_there_and_back(tmp_path: Path, model: str, pair: tuple[str, str]) -> None:
    there_and_back(tmp_path, model, *pair)


@pytest.mark.parametrize(
    ("model", "layout"), [*(("tied", a) for a in LAYOUTS), *((m, a) for m in ("gqa", "bert") for a in LAYOUTS[6:])]
)
def test_a_rank_reads_only_its_own_files(tmp_path: Path, model: str, layout: str) -> None:
    """No file that a rank opens holds a number that it does not, and all its numbers are there."""
    begin = write(tmp_path / "run", MODELS[model], "tp=1", draw(MODELS[model]))
    reshard_to(begin, tmp_path / "out", layout)
    tensors = Contents(tmp_path / "out").manifest.tensors
    for rank in range(at(layout).layout.world_size):
        held = held_by(rank, MODELS[model], layout, tensors)
        pieces = [(name, piece) for name, tensor in tensors.items() for piece in tensor.pieces]
        opened = {p.file for name, p in pieces if any(intersect(p.box, box) for box in held[name])}
        assert {(n, p.box) for n, p in pieces if p.file in opened} == {(n, box) for n in held for box in held[n]}


def held_by(rank: int, model: ModelSettings, layout: str, tensors: Mapping[str, TensorEntry]) -> dict[str, set[Box]]:
    """Which parts of which tensors a rank has in memory."""
    places = places_of_rank(model, at(layout), at(layout).layout.coordinate(rank)).values()
    held: dict[str, set[Box]] = {name: set() for name in tensors}
    for place in places:
        for slot in SLOTS:
            held[f"{slot}.{place.name}"] = {Box(block.offset, block.shape) for block in place.regions}
    return held | {name: {whole(tensors[name].shape)} for name in ("optim.scale", "optim.seen")}


def test_padding_is_in_no_file(tmp_path: Path) -> None:
    begin = write(tmp_path / "run", MODELS["tied"], "tp=1", draw(MODELS["tied"]))
    reshard_to(begin, tmp_path / "out", "tp=2")
    tensors = Contents(tmp_path / "out").manifest.tensors
    assert tensors["model.embedding.token.weight"].shape == (67, 24)
    assert sorted(p.box.shape for p in tensors["model.embedding.token.weight"].pieces) == [(33, 24), (34, 24)]
    assert "model.head.weight" not in tensors


# Interrupted


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("count", [3, *wide(1)])
def test_a_failure_anywhere_and_the_same_call_again(
    source: Path, tied: Arrays, tmp_path: Path, point: str, count: int
) -> None:
    reshard_to(source, tmp_path / "unbroken", "pp=2,tp=2")
    arm(Fault("exc", point, count))
    broken = point in POINTS[:2] or count == 1
    if broken:
        with pytest.raises(RuntimeError, match=point):
            reshard_to(source, tmp_path / "out", "pp=2,tp=2", Limits(workers=2))
        assert (tmp_path / "out").exists() == (point == "reshard.cleanup")
    arm(None)
    again = reshard_to(source, tmp_path / "out", "pp=2,tp=2", Limits(workers=1))
    assert again.was_there == (point == "reshard.cleanup" and broken)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "unbroken")
    assert sorted(os.listdir(tmp_path)) == ["out", "run", "unbroken"]
    assert_same(read_all(tmp_path / "out"), tied)


_KILLED = """
import sys
from pathlib import Path
from lmtrain.checkpoint import contents
from lmtrain.checkpoint.disk import hashed, tensor_file
from lmtrain.checkpoint.reshard import attempt, limits, targets
from lmtrain.checkpoint.reshard.limits import Limits
from lmtrain.runtime.faults import parse_fault, arm
from tests.unit.checkpoint.layouts import reshard_to
for module in (hashed, tensor_file, contents, targets, attempt, limits):
    module.BLOCK_BYTES = 4096
attempt.SEGMENT_BYTES, limits.PART_BYTES, limits.MIN_PART_BYTES = 64 << 10, 10 << 10, 10 << 10
arm(parse_fault(sys.argv[3]))
reshard_to(Path(sys.argv[1]), Path(sys.argv[2]), "pp=2,tp=2", Limits(workers=2))
"""


@pytest.mark.parametrize("instants", [("segment:count=3", "journal:count=4", "publish:count=1")], ids=["three kills"])
def test_killed_again_and_again(source: Path, tied: Arrays, tmp_path: Path, instants: tuple[str, ...]) -> None:
    before = bytes_of(source)
    reshard_to(source, tmp_path / "unbroken", "pp=2,tp=2")
    for instant in instants:
        command = [sys.executable, "-c", _KILLED, source, tmp_path / "out", f"kill:point=reshard.{instant}"]
        assert subprocess.run([*map(str, command)], check=False, timeout=120).returncode == -9
        assert not (tmp_path / "out").exists()
    resharded = reshard_to(source, tmp_path / "out", "pp=2,tp=2")
    assert resharded.earlier_bytes == sum(array.nbytes for array in tied.values())
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "unbroken")
    assert bytes_of(source) == before


def test_an_attempt_after_a_torn_line_leaves_a_journal_that_the_next_one_reads(source: Path, tmp_path: Path) -> None:
    reshard_to(source, tmp_path / "unbroken", "pp=2")
    for _ in range(2):
        arm(Fault("exc", "reshard.journal", 5))
        with pytest.raises(RuntimeError):
            reshard_to(source, tmp_path / "out", "pp=2")
        journal = tmp_path / "out.resharding" / "journal.jsonl"
        os.truncate(journal, journal.stat().st_size - 9)
    resharded = reshard_to(source, tmp_path / "out", "pp=2")
    assert resharded.earlier_bytes > 0
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "unbroken")


@pytest.mark.parametrize("harm", ["foreign", "shorter file", "missing file", "no journal", "wrong block"])
def test_what_an_attempt_left_is_not_believed_when_it_is_not_whole(source: Path, tmp_path: Path, harm: str) -> None:
    reshard_to(source, tmp_path / "unbroken", "pp=2")
    arm(Fault("exc", "reshard.journal", 5))
    with pytest.raises(RuntimeError):
        reshard_to(source, tmp_path / "out", "pp=2")
    work = tmp_path / "out.resharding"
    journal, file = work / "journal.jsonl", work / "files" / "rank_00001.safetensors"
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) >= 6
    match harm:
        case "foreign":
            journal.write_bytes(b"".join([lines[0].replace(b'"key":"', b'"key":"0'), *lines[1:]]))
        case "shorter file":
            os.truncate(file, file.stat().st_size - 1)
        case "missing file":
            file.unlink()
        case "no journal":
            journal.unlink()
        case "wrong block":
            wrong = {"blocks": {file.name: {str(10**6): "0" * 64}}}
            journal.write_bytes(b"".join([*lines, json.dumps(wrong).encode(), b"\n"]))
    seen: list[tuple[int, ...]] = []
    resharded = reshard_to(source, tmp_path / "out", "pp=2", report=lambda *now: seen.append(now))
    assert resharded.earlier_bytes == 0
    assert seen[-1][0] == seen[-1][1] > 0
    assert [done for done, *_ in seen] == sorted(done for done, *_ in seen)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "unbroken")


LEFTOVERS = [0, *wide(*range(1, 15))]


@pytest.mark.parametrize("seed", LEFTOVERS)
def test_what_changed_since_is_done_again(source: Path, tmp_path: Path, seed: int) -> None:
    """Wherever bits of leftovers were flipped or lost, and links planted, the result is that of an unbroken attempt."""
    chance = random.Random(seed)
    reshard_to(source, tmp_path / "unbroken", "pp=2,tp=2")
    point, most = chance.choice([("segment", 8), ("journal", 8), ("finish", 1), ("publish", 1)])
    arm(Fault("exc", f"reshard.{point}", chance.randint(1, most)))
    with pytest.raises(RuntimeError):
        reshard_to(source, tmp_path / "out", "pp=2,tp=2", Limits(workers=2))
    arm(None)
    work = tmp_path / "out.resharding"
    for _ in range(chance.randint(1, 3)):
        harm(chance, chance.choice([file for file in work.rglob("*") if file.is_file() and file.name != ".lock"]))
    reshard_to(source, tmp_path / "out", "pp=2,tp=2", Limits(workers=2))
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "unbroken")
    assert sorted(os.listdir(tmp_path)) == ["out", "run", "unbroken"]


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
    assert not Contents(tmp_path / "out").damages()


def test_harm_to_what_is_done_is_not_passed_for_done(source: Path, tmp_path: Path) -> None:
    reshard_to(source, tmp_path / "out", "pp=2")
    before = bytes_of(tmp_path / "out")
    file = tmp_path / "out" / "rank_00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    with pytest.raises(OutputError, match=r"out is what this command has made, and damaged since: .*rank_00001\."):
        reshard_to(source, tmp_path / "out", "pp=2")
    reshard_to(source, tmp_path / "out", "pp=2", overwrite=True)
    assert bytes_of(tmp_path / "out") == before


def test_done_already(source: Path, tmp_path: Path) -> None:
    reshard_to(source, tmp_path / "out", "pp=2")
    before = bytes_of(tmp_path / "out")
    assert reshard_to(source, tmp_path / "out", "pp=2").was_there
    assert bytes_of(tmp_path / "out") == before
    with pytest.raises(OutputError, match="exists"):
        reshard_to(source, tmp_path / "out", "pp=3")
    other = write(tmp_path / "other", MODELS["tied"], "dp=2,tp=2", draw(MODELS["tied"], seed=4))
    with pytest.raises(OutputError, match="exists"):
        reshard_to(other, tmp_path / "out", "pp=2")
    os.truncate(tmp_path / "out" / "rank_00000.safetensors", 100)
    with pytest.raises(OutputError, match="exists"):
        reshard_to(source, tmp_path / "out", "pp=2")
    reshard_to(source, tmp_path / "out", "pp=2", overwrite=True)
    assert bytes_of(tmp_path / "out") == before
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
        with pytest.raises(UsageError, match="stays as it is"):
            reshard_to(source, wrong, "pp=2", overwrite=True)
    with pytest.raises(UsageError, match="another step than 7"):
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
    monkeypatch.setattr("lmtrain.checkpoint.store.free_bytes", lambda path: 1000)
    with pytest.raises(StorageError, match="1000 B free"):
        reshard_to(source, tmp_path / "out", "pp=2")
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_a_disk_that_fills_up_leaves_what_was_done(source: Path, tmp_path: Path) -> None:
    arm(Fault("enospc", "reshard.segment", 4))
    with pytest.raises(StorageError, match="disk is full"):
        reshard_to(source, tmp_path / "out", "pp=2")
    assert reshard_to(source, tmp_path / "out", "pp=2").earlier_bytes > 0


# Copy jobs


def test_segments_hold_every_number_once(source: Path) -> None:
    manifest = Contents(source).manifest
    found: dict[str, list[Box]] = {}
    for segment in segments(manifest):
        for name, box in segment:
            found.setdefault(name, []).append(box)
    assert len(list(segments(manifest))) > 5
    for name, tensor in manifest.tensors.items():
        assert cover_problem(tensor.shape, found.get(name, [])) is None
