"""Contents under damage: whatever is flipped, cut, swapped, missing, linked or forged is refused by name."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmtrain.checkpoint.compare_or_verify_checkpoints import verify_checkpoint
from lmtrain.checkpoint.disk.checkpoint_format import digest_of
from lmtrain.checkpoint.read_verified_contents import Contents
from lmtrain.checkpoint.tensor_reader import CheckpointReader
from lmtrain.errors import CheckpointError
from lmtrain.layout import Piece

Arrays = dict[str, np.ndarray]
BLOCK_BYTES = 4096  # as the fixture small_blocks makes it
RANK0, RANK1 = "rank_00000.safetensors", "rank_00001.safetensors"
FILES = (RANK0, RANK1, "rank_00000.blocks.json", "rank_00001.blocks.json", "tokenizer.json", "manifest.json")


def targets(arrays: Arrays) -> list[Piece]:
    """What a run of one process asks for, filled with something else."""
    return [
        Piece(n, a.shape, (0,) * a.ndim, torch.full(a.shape, 5).to(torch.from_numpy(a).dtype))
        for n, a in arrays.items()
    ]


def load_all(path: Path, arrays: Arrays) -> None:
    reader = CheckpointReader(path)
    pieces = targets(arrays)
    reader.load_into(pieces)
    reader.read_file("tokenizer.json")
    for piece in pieces:
        assert torch.equal(piece.block, torch.from_numpy(arrays[piece.name]))


# Damage by chance: the hashes are what they were


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / checkpoint.name))


def refused(path: Path, arrays: Arrays, name: str) -> None:
    """Loading and verifying both refuse, and name the file."""
    with pytest.raises(CheckpointError) as loading:
        load_all(path, arrays)
    facts = verify_checkpoint(path)
    assert name in str(loading.value)
    assert name in " ".join(facts["problems"])


@pytest.mark.parametrize("seed", range(96))
def test_a_flipped_bit_is_refused(copy: Path, arrays: Arrays, seed: int) -> None:
    generator = random.Random(seed)
    name = FILES[seed % len(FILES)]
    data = bytearray((copy / name).read_bytes())
    # a quarter of them near the beginning, where the headers are
    at = generator.randrange(min(len(data), 300) if seed % 4 == 0 else len(data))
    data[at] ^= 1 << generator.randrange(8)
    (copy / name).write_bytes(data)
    refused(copy, arrays, name)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("size", ["0", "8", "n // 2", "n - 1", "n + 1", "n + 4 * 2**20"])
def test_another_size_is_refused(copy: Path, arrays: Arrays, name: str, size: str) -> None:
    n = (copy / name).stat().st_size
    os.truncate(
        copy / name, {"0": 0, "8": 8, "n // 2": n // 2, "n - 1": n - 1, "n + 1": n + 1}.get(size, n + 4 * 2**20)
    )
    refused(copy, arrays, name)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["missing", "folder", "link", "pipe", "zeros"])
def test_a_missing_or_foreign_file_is_refused(copy: Path, arrays: Arrays, name: str, kind: str) -> None:
    size = (copy / name).stat().st_size
    (copy / name).rename(copy.parent / "moved")
    if kind == "folder":
        (copy / name).mkdir()
    elif kind == "link":
        (copy / name).symlink_to(copy.parent / "moved")
    elif kind == "pipe":
        os.mkfifo(copy / name)
    elif kind == "zeros":
        (copy / name).write_bytes(bytes(size))
    refused(copy, arrays, name)


@pytest.mark.parametrize(
    ("a", "b"), [(RANK0, RANK1), ("rank_00000.blocks.json", "rank_00001.blocks.json"), ("tokenizer.json", RANK0)]
)
def test_swapped_files_are_refused(copy: Path, arrays: Arrays, a: str, b: str) -> None:
    (copy / a).rename(copy / "c")
    (copy / b).rename(copy / a)
    (copy / "c").rename(copy / b)
    refused(copy, arrays, "rank_00000")


def test_swapped_blocks_of_a_file_are_refused(copy: Path, arrays: Arrays) -> None:
    data = (copy / RANK1).read_bytes()
    (copy / RANK1).write_bytes(data[:1000] + data[2000:3000] + data[1000:2000] + data[3000:])
    refused(copy, arrays, RANK1)


def test_a_stray_file_is_named_by_the_full_check(copy: Path, arrays: Arrays) -> None:
    (copy / "rank_00002.safetensors").write_bytes(b"x")
    (problem,) = Contents(copy).find_damage()
    assert "rank_00002.safetensors does not belong" in problem
    load_all(copy, arrays)


def test_the_full_check_names_every_damaged_file(copy: Path) -> None:
    for name in (RANK0, "tokenizer.json"):
        data = bytearray((copy / name).read_bytes())
        data[-1] ^= 1
        (copy / name).write_bytes(data)
    assert [problem.split(" is damaged")[0] for problem in Contents(copy).find_damage()] == [
        str(copy / RANK0), str(copy / "tokenizer.json")
    ]  # fmt: skip


def test_a_folder_under_another_steps_name_is_refused(copy: Path) -> None:
    renamed = copy.rename(copy.with_name("step_00000009"))
    with pytest.raises(CheckpointError, match="step_00000009 has been renamed: it holds the checkpoint of step 7"):
        CheckpointReader(renamed)
    assert Contents(renamed.rename(copy.with_name("best"))).find_damage() == []


# Damage by intent: whoever edits can also compute the hashes


def reseal(path: Path, edit: Callable[[dict[str, Any]], None] = lambda manifest: None) -> None:
    """Make all hashes fit what now lies in the folder, edit the manifest, and seal it."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    for name in (RANK0, RANK1):
        data = (path / name).read_bytes()
        blocks = [hashlib.sha256(data[i : i + BLOCK_BYTES]).digest() for i in range(0, len(data), BLOCK_BYTES)]
        listing = {
            "size": len(data),
            "block_bytes": BLOCK_BYTES,
            "root": "",
            "blocks": [b.hex() for b in blocks],
        }
        text = json.dumps(listing).encode()
        (path / name.replace("safetensors", "blocks.json")).write_bytes(text)
        root = hashlib.sha256(b"".join(blocks)).hexdigest()
        manifest["files"][name] = {"size": len(data), "root": root}
        root = hashlib.sha256(hashlib.sha256(text).digest()).hexdigest()
        manifest["files"][name.replace("safetensors", "blocks.json")] = {"size": len(text), "root": root}
    edit(manifest)
    manifest["digest"] = digest_of(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def rewrite_header(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def test_resealing_alone_changes_nothing(copy: Path, arrays: Arrays) -> None:
    reseal(copy)
    load_all(copy, arrays)
    assert Contents(copy).find_damage() == []


def edit_shape(manifest: dict[str, Any]) -> None:
    entry = manifest["tensors"]["flags"]
    entry["shape"] = entry["pieces"][0]["shape"] = [5, 3]


def swap_files(manifest: dict[str, Any]) -> None:
    for piece in manifest["tensors"]["wide"]["pieces"]:
        piece["file"] = RANK1 if piece["file"] == RANK0 else RANK0


def escape(manifest: dict[str, Any]) -> None:
    manifest["files"]["../../x"] = manifest["files"].pop(RANK1)
    for tensor in manifest["tensors"].values():
        for piece in tensor["pieces"]:
            piece["file"] = piece["file"].replace(RANK1, "../../x")


def grow(manifest: dict[str, Any]) -> None:
    entry = manifest["tensors"]["flags"]
    entry["shape"] = entry["pieces"][0]["shape"] = [2**20, 2**30]


def share_bytes(manifest: dict[str, Any]) -> None:
    piece = manifest["tensors"]["flags"]["pieces"][0]
    manifest["tensors"]["flags"] = {
        "dtype": "U8",
        "shape": [300, 5],
        "pieces": [{**piece, "offset": [3 * i, 0]} for i in range(100)],
    }


EDITS: dict[str, Callable[[dict[str, Any]], None]] = {
    "shape": edit_shape,
    "swapped": swap_files,
    "escape": escape,
    "grown": grow,
    "shared": share_bytes,
    "huge file": lambda m: m["files"][RANK0].update(size=2**60),
    "dtype": lambda m: m["tensors"]["flags"].update(dtype="I8"),
    "gap": lambda m: m["tensors"]["wide"]["pieces"].pop(),
    "overlap": lambda m: m["tensors"]["wide"]["pieces"][1].update(offset=[0, 599]),
    "key": lambda m: m["tensors"]["flags"]["pieces"][0].update(key="nothing"),
    "not tensors": lambda m: m["tensors"]["flags"]["pieces"][0].update(file="tokenizer.json"),
    "unlisted": lambda m: m["files"].pop("rank_00001.blocks.json"),
    "renamed": lambda m: m["tensors"].update(other=m["tensors"].pop("flags")),
    "deep": lambda m: m["state"].update(deep=json.loads("[" * 500 + "]" * 500)),
    "newer": lambda m: m.update(version=2),
    "step": lambda m: m.update(step=8),
}


@pytest.mark.parametrize("name", EDITS)
def test_edited_and_resealed_manifests_are_refused(copy: Path, arrays: Arrays, name: str) -> None:
    reseal(copy, EDITS[name])
    with pytest.raises(CheckpointError, match="step_00000007"):
        load_all(copy, arrays)


def test_bytes_that_serve_twice_are_refused(copy: Path) -> None:
    """Else a small file could claim tensors of any size."""
    reseal(copy, share_bytes)
    with pytest.raises(CheckpointError, match="two pieces share the key 'flags'"):
        CheckpointReader(copy)


def test_json_without_bottom_is_refused(copy: Path, arrays: Arrays) -> None:
    (copy / "manifest.json").write_text('{"format": "lmtrain checkpoint", "x": ' + "[" * 200_000 + "]" * 200_000 + "}")
    refused(copy, arrays, "manifest.json")


HEADER_EDITS: dict[str, Callable[[dict[str, Any]], None]] = {
    "shape": lambda h: h["flags"].update(shape=[5, 3]),
    "dtype": lambda h: h["bias"].update(dtype="I32"),
    "renamed": lambda h: h.update(other=h.pop("flags")),
    "gap": lambda h: h.pop("flags"),
    "offsets": lambda h: h["flags"].update(data_offsets=[0, 15]),
    "far": lambda h: h["flags"].update(data_offsets=[2**60, 2**60 + 15]),
    "no object": lambda h: h.update(flags=[1, 2]),
}


@pytest.mark.parametrize("name", HEADER_EDITS)
def test_edited_and_resealed_headers_are_refused(copy: Path, arrays: Arrays, name: str) -> None:
    rewrite_header(copy / RANK1, HEADER_EDITS[name])
    reseal(copy)
    refused(copy, arrays, RANK1)


def test_a_header_that_claims_a_vast_length_is_refused(copy: Path, arrays: Arrays) -> None:
    data = (copy / RANK1).read_bytes()
    (copy / RANK1).write_bytes(struct.pack("<Q", 2**60) + data[8:])
    reseal(copy)
    refused(copy, arrays, "states a header of 1152921504606846976 bytes")


@pytest.mark.parametrize(
    "listing",
    [
        b"",
        b"[]",
        b"{}",
        b'{"block_bytes": 4096, "blocks": "abc"}',
        b'{"block_bytes": 1, "blocks": []}',
        b'{"block_bytes": 4096, "blocks": [7]}',
        b'{"block_bytes": 4096, "blocks": []}',
    ],
)
def test_foreign_lists_of_blocks_are_refused(copy: Path, arrays: Arrays, listing: bytes) -> None:
    (copy / "rank_00001.blocks.json").write_bytes(listing)

    def seal(manifest: dict[str, Any]) -> None:
        digests = hashlib.sha256(listing).digest() if listing else b""
        manifest["files"]["rank_00001.blocks.json"] = {
            "size": len(listing),
            "root": hashlib.sha256(digests).hexdigest(),
        }

    reseal(copy, seal)
    (copy / "rank_00001.blocks.json").write_bytes(listing)
    refused(copy, arrays, "rank_00001")


def test_random_resealed_edits_load_the_same_or_are_refused(copy: Path, arrays: Arrays) -> None:
    """Numbers and names of the manifest exchanged at random: never another exception, never other contents."""
    original = json.loads((copy / "manifest.json").read_bytes())
    generator = random.Random(11)
    num_refused = 0
    for _ in range(300):
        manifest = json.loads(json.dumps(original))
        entry = generator.choice(list(manifest["tensors"].values()))
        piece = generator.choice(entry["pieces"])
        target, key = generator.choice([(entry, "dtype"), (entry, "shape"), *[(piece, k) for k in piece]])
        other = generator.choice(generator.choice(list(manifest["tensors"].values()))["pieces"])
        target[key] = generator.choice(["F16", "U8", [0], [5, 3], 2**63, other.get(key, None), -1, "../x"])
        manifest["digest"] = digest_of(manifest)
        (copy / "manifest.json").write_text(json.dumps(manifest))
        try:
            load_all(copy, arrays)
        except CheckpointError:
            num_refused += 1
    assert 150 < num_refused < 300
