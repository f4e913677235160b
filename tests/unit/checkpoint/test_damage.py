"""Damage by the hundred, by chance and by hand: every one is refused with the name of the file, by whoever reads."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmtrain.checkpoint.disk.block_hashed_file import encode_blocks, write_hashed
from lmtrain.checkpoint.disk.checkpoint_format import FileEntry, blocks_file, digest_of
from lmtrain.checkpoint.read_verified_contents import Contents, checked_model
from lmtrain.errors import LmtrainError
from lmtrain.models.gpt_settings import GPTSettings
from tests.unit.checkpoint.layouts import MODELS, draw, reshard_to, write

RANKS = [f"rank_{rank:05d}.safetensors" for rank in range(4)]
FILES = [*RANKS, *map(blocks_file, RANKS), "tokenizer.json", "manifest.json"]
MANIFEST = "manifest.json"
Damage = Callable[[Path, random.Random], tuple[str, ...]]  # gives names, one of which the message must have


def flipped_bit(path: Path, chance: random.Random) -> tuple[str, ...]:
    name = chance.choice(FILES)
    data = bytearray((path / name).read_bytes())
    data[chance.randrange(len(data) if chance.random() < 0.7 else min(len(data), 200))] ^= 1 << chance.randrange(8)
    (path / name).write_bytes(data)
    return (name,)


def other_length(path: Path, chance: random.Random) -> tuple[str, ...]:
    name = chance.choice(FILES)
    data = (path / name).read_bytes()
    grown = chance.random() < 0.3
    (path / name).write_bytes(data + chance.randbytes(5) if grown else data[: chance.randrange(len(data))])
    return (name,)


def zeroed_range(path: Path, chance: random.Random) -> tuple[str, ...]:
    name = chance.choice(RANKS)
    data = bytearray((path / name).read_bytes())
    at = chance.randrange(len(data) // 2)
    data[at : at + 512] = bytes(len(data[at : at + 512]))
    (path / name).write_bytes(data)
    return (name,)


def swapped_files(path: Path, chance: random.Random) -> tuple[str, ...]:
    a, b = chance.sample(FILES[:-2], 2)
    os.rename(path / a, path / "x")
    os.rename(path / b, path / a)
    os.rename(path / "x", path / b)
    return (a, b)


def missing_file(path: Path, chance: random.Random) -> tuple[str, ...]:
    name = chance.choice(FILES)
    (path / name).unlink()
    return (name,)


def file_of_another_checkpoint(path: Path, chance: random.Random) -> tuple[str, ...]:
    name = chance.choice(RANKS)
    shutil.copy(path.parents[1] / "another" / path.name / name, path / name)
    return (name,)


def link_or_pipe(path: Path, chance: random.Random) -> tuple[str, ...]:
    name = chance.choice(FILES)
    os.rename(path / name, path.parent / name)
    if chance.random() < 0.5:
        (path / name).symlink_to(path.parent / name)
    else:
        os.mkfifo(path / name)
    return (name,)


# By hand: whoever edits also makes hashes right


def sign(path: Path, manifest: dict[str, Any]) -> None:
    manifest["digest"] = digest_of(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest))


def read(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((path / MANIFEST).read_bytes())
    return value


def edited_shape(path: Path, chance: random.Random) -> tuple[str, ...]:
    manifest = read(path)
    tensor = manifest["tensors"][chance.choice(sorted(manifest["tensors"]))]
    target = tensor if chance.random() < 0.5 else chance.choice(tensor["pieces"])
    target["shape"] = [size + chance.choice((-1, 1, 7)) for size in target["shape"]] or [2]
    sign(path, manifest)
    return (MANIFEST, *RANKS)


def edited_place(path: Path, chance: random.Random) -> tuple[str, ...]:
    """A gap, an overlap, or a number beyond all."""
    manifest = read(path)
    tensors = [t for t in manifest["tensors"].values() if t["shape"]]
    tensor = chance.choice(tensors)
    piece = chance.choice(tensor["pieces"])
    match chance.randrange(3):
        case 0:
            tensor["pieces"].remove(piece)
        case 1:
            tensor["pieces"].append(dict(piece))
        case 2:
            piece["offset"][0] += chance.choice((1, 2**40, -1))
    sign(path, manifest)
    return (MANIFEST,)


def renamed_tensor(path: Path, chance: random.Random) -> tuple[str, ...]:
    manifest = read(path)
    name = chance.choice([n for n in manifest["tensors"] if n.startswith("model.")])
    manifest["tensors"][name + "s"] = manifest["tensors"].pop(name)
    sign(path, manifest)
    return (MANIFEST,)


def two_tensors_for_each_other(path: Path, chance: random.Random) -> tuple[str, ...]:
    """Keys of one shape stand under each other's names: hashes say nothing, names in the files do."""
    manifest = read(path)
    a, b = chance.sample([f"model.blocks.{i}.{n}.weight" for i in range(2) for n in ("attention_norm", "mlp_norm")], 2)
    tensors = manifest["tensors"]
    tensors[a]["shape"], tensors[b] = [25], tensors[a] | {"pieces": tensors[b]["pieces"]}
    sign(path, manifest)
    return (MANIFEST,)


def name_that_is_a_path(path: Path, chance: random.Random) -> tuple[str, ...]:
    manifest = read(path)
    wrong = chance.choice(["../../x", "/etc/passwd", "a/b", "..\\x", "x\0y", ".hidden", "n" * 300, ""])
    old = chance.choice(RANKS)
    manifest["files"][wrong] = manifest["files"].pop(old)
    for tensor in manifest["tensors"].values():
        for piece in tensor["pieces"]:
            piece["file"] = wrong if piece["file"] == old else piece["file"]
    sign(path, manifest)
    return (MANIFEST,)


def claim(path: Path, chance: random.Random) -> tuple[str, ...]:
    """Sizes beyond the disk, in the manifest or in a header whose hashes are right."""
    manifest = read(path)
    name = chance.choice(RANKS)
    huge = chance.choice([2**60, 2**63, 2**64 - 1, 10**30])
    match chance.randrange(3):
        case 0:
            manifest["files"][name]["size"] = huge
            sign(path, manifest)
            return (MANIFEST, name, blocks_file(name))
        case 1:
            tensor = manifest["tensors"][chance.choice(sorted(manifest["tensors"]))]
            tensor["shape"] = tensor["pieces"][0]["shape"] = [huge, 8]
            tensor["pieces"] = tensor["pieces"][:1]
            tensor["pieces"][0]["offset"] = [0, 0]
            sign(path, manifest)
            return (MANIFEST,)
    data = (path / name).read_bytes()
    forge(path, manifest, name, struct.pack("<Q", min(huge, 2**64 - 1)) + data[8:])
    return (name,)


def edited_header(path: Path, chance: random.Random) -> tuple[str, ...]:
    """A tensor's header inside its file, with all hashes made right."""
    manifest, name = read(path), chance.choice(RANKS)
    data = (path / name).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    key = chance.choice([k for k in header if k != "__metadata__" and header[k]["shape"]])
    match chance.randrange(4):
        case 0:
            header[key]["shape"] = [*header[key]["shape"], 1]
        case 1:
            header[key]["data_offsets"][1] += 4
        case 2:
            header["../../" + key] = header.pop(key)
        case 3:
            header[key]["dtype"] = chance.choice(["I32", "F64", "__reduce__", "F32 "])
    text = json.dumps(header).encode()
    forge(path, manifest, name, struct.pack("<Q", len(text)) + text + data[8 + length :])
    return (name,)


def forge(path: Path, manifest: dict[str, Any], name: str, data: bytes) -> None:
    """Put these bytes there and make every hash right."""
    for stale in (name, blocks_file(name)):
        (path / stale).unlink()
    entry, digests = write_hashed(path / name, [data])
    listing, _ = write_hashed(path / blocks_file(name), [encode_blocks(entry, digests)])
    for file, found in ((name, entry), (blocks_file(name), listing)):
        assert isinstance(found, FileEntry)
        manifest["files"][file] = {"size": found.size, "root": found.root}
    sign(path, manifest)


DAMAGES: list[Damage] = [
    flipped_bit, other_length, zeroed_range, swapped_files, missing_file, file_of_another_checkpoint, link_or_pipe,
    edited_shape, edited_place, renamed_tensor, two_tensors_for_each_other, name_that_is_a_path, claim, edited_header,
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, small_blocks: None) -> Path:
    folder, tied = tmp_path_factory.mktemp("damage"), MODELS["tied"]
    assert isinstance(tied, GPTSettings)
    model = replace(tied, num_layers=2)
    write(folder / "another", model, "dp=2,tp=2", draw(model, seed=4))
    return write(folder / "whole", model, "dp=2,tp=2", draw(model))


def check(whole: Path, tmp_path: Path, seed: int) -> None:
    shutil.copytree(whole.parents[1], tmp_path, dirs_exist_ok=True)
    path = tmp_path / "whole" / whole.name
    names = DAMAGES[seed % len(DAMAGES)](path, random.Random(seed))
    for use in (verify, load, lambda path: reshard_to(path, tmp_path / "out", "pp=2")):
        with pytest.raises(LmtrainError) as refused:
            use(path)
        assert refused.value.exit_code in (65, 66), str(refused.value)
        assert any(name in str(refused.value) for name in names), (names, str(refused.value))
    assert sorted(os.listdir(tmp_path)) == ["another", "whole"]


def verify(path: Path) -> None:
    """As `lmtrain verify`."""
    contents = Contents(path)
    damages = contents.find_damage()
    if damages:
        raise contents_error(damages)
    checked_model(contents)


def contents_error(damages: list[str]) -> LmtrainError:
    error = LmtrainError("\n".join(damages))
    error.exit_code = 65
    return error


def load(path: Path) -> None:
    """Every tensor and file, as a run that goes on and an evaluation do."""
    contents = Contents(path)
    for name in contents.manifest.tensors:
        contents.read_bits(name)
    for name in contents.manifest.files:
        contents.read_file(name)
    checked_model(contents)


@pytest.mark.parametrize("seed", range(28))
def test_damage_is_refused_by_name(whole: Path, tmp_path: Path, seed: int) -> None:
    check(whole, tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(28, 328))
def test_more_damage_is_refused_by_name(whole: Path, tmp_path: Path, seed: int) -> None:
    check(whole, tmp_path, seed)


def test_what_is_not_damaged_is_not_refused(whole: Path, tmp_path: Path) -> None:
    verify(whole)
    load(whole)
    reshard_to(whole, tmp_path / "out", "pp=2")
