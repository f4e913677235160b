"""The manifest: what is written is read back, and nothing in it is believed unchecked."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from lmtrain.checkpoint.disk import checkpoint_format as format_
from lmtrain.checkpoint.disk.checkpoint_format import (
    FileEntry,
    Manifest,
    PieceEntry,
    TensorEntry,
    check_num_pieces,
    decode_manifest,
    digest_of,
    encode_manifest,
)
from lmtrain.checkpoint.disk.tensor_slice_geometry import Box
from lmtrain.errors import CheckpointError

ROOT = "ab" * 32


def example() -> Manifest:
    pieces = tuple(PieceEntry("rank_00000.safetensors", f"w@{i},0", Box((i, 0), (1, 3))) for i in range(2))
    return Manifest(
        step=12,
        files={"rank_00000.safetensors": FileEntry(100, ROOT), "tokenizer.json": FileEntry(0, ROOT)},
        tensors={
            "w": TensorEntry("F32", (2, 3), pieces),
            "naïve name": TensorEntry(
                "I64", (), (PieceEntry("rank_00000.safetensors", "s", Box((), ())),)
            ),
        },
        state={"step": 12, "loss": 0.1 + 0.2, "big": 2**70, "nested": {"list \ud800 \u2028": [1, None, True, "é"]}},
    )


def sealed(value: dict[str, Any]) -> dict[str, Any]:
    """The digest that an attacker would compute as well."""
    return {**value, "digest": digest_of(value)}


def test_round_trip() -> None:
    assert decode_manifest(json.loads(encode_manifest(example())), "here") == example()


def test_two_writings_are_the_same_bytes() -> None:
    assert encode_manifest(example()) == encode_manifest(example())


def test_newer_versions_are_refused_with_a_way_out() -> None:
    value = json.loads(encode_manifest(example()))
    with pytest.raises(CheckpointError, match=r"format version 2, but this lmtrain reads up to 1\. Install a newer"):
        decode_manifest(sealed({**value, "version": 2}), "here")
    # a newer version may seal itself differently, so the version is judged before the digest
    with pytest.raises(CheckpointError, match="format version 99"):
        decode_manifest({**value, "version": 99, "digest": "new"}, "here")


@pytest.mark.parametrize("value", [None, [], 3, {}, {"format": "other"}, {"format": ["lmtrain checkpoint"]}])
def test_foreign_json_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match="here is not the manifest of an lmtrain checkpoint"):
        decode_manifest(value, "here")


def test_an_edit_is_noticed() -> None:
    value = json.loads(encode_manifest(example()))
    value["state"]["step"] = 13
    with pytest.raises(CheckpointError, match="digest"):
        decode_manifest(value, Path("manifest.json"))


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/passwd", "a/b", "..", ".hidden", "a\\b", "a\0b", "", "x" * 300, "C:x", "manifest.json"]
)
def test_names_that_are_no_plain_file_names_are_refused(name: str) -> None:
    value = json.loads(encode_manifest(example()))
    value["files"][name] = value["files"].pop("tokenizer.json")
    with pytest.raises(CheckpointError, match="plain file name"):
        decode_manifest(sealed(value), "here")


def nodes(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for key, child in children for p in nodes(child, (*path, key)))]


JUNK: list[Any] = [
    None, True, -1, 0, 1, 2**62, 2**80, 0.5, 1e308, "", "x", "../x", "F32", [], {}, [[]], [-1], [2**40, 2**40],
    [1] * 70, {"a": {}}, ["a"], {"size": 1}, "ab" * 32,
]  # fmt: skip


def test_no_value_anywhere_is_trusted() -> None:
    """Every node replaced by every kind of junk, resealed: a CheckpointError or a manifest, never another exception."""
    text = encode_manifest(example())
    refused = 0
    for path in nodes(json.loads(text))[1:]:
        for junk in JUNK:
            value = json.loads(text)
            node = value
            for key in path[:-1]:
                node = node[key]
            node[path[-1]] = junk
            try:
                decode_manifest(sealed(value) if path != ("digest",) else value, "here")
            except CheckpointError:
                refused += 1
    assert refused > 500


def test_random_edits_of_the_text_are_refused() -> None:
    text = encode_manifest(example())
    generator = random.Random(5)
    for _ in range(300):
        at = generator.randrange(len(text))
        damaged = bytearray(text)
        damaged[at] ^= 1 << generator.randrange(8)
        try:
            value = json.loads(bytes(damaged))
        except ValueError:
            continue
        with pytest.raises(CheckpointError):
            decode_manifest(value, "here")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda value: value["files"]["rank_00000.safetensors"].update(size=31), "31 bytes, but its pieces have 32"),
        (lambda value: value["tensors"].update({"a\x1b[31m": value["tensors"].pop("w")}), "not the name of a tensor"),
        (lambda value: value["tensors"].update({"w" * 501: value["tensors"].pop("w")}), "not the name of a tensor"),
        (lambda value: value["tensors"]["w"]["pieces"][0].update(key="\ud800"), "has the invalid key"),
        (lambda value: value["tensors"]["w"].update(shape=[1] * 9), "is not a short list of whole numbers"),
        (lambda value: value.update(step=10**30), "its step is not a whole number"),
    ],
)
def test_claims_beyond_bounds_are_refused_however_they_are_sealed(change: Any, said: str) -> None:
    value = json.loads(encode_manifest(example()))
    change(value)
    with pytest.raises(CheckpointError, match=said):
        decode_manifest(sealed(value), "here")


def test_what_could_not_be_read_again_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="would hold 1,000,001 pieces of tensors; at most 1,000,000 are allowed"):
        check_num_pieces(1_000_001)
    monkeypatch.setattr(format_, "MAX_JSON_BYTES", 500)
    with pytest.raises(CheckpointError, match="step 12 would be too large to be read: it is larger than 500 B"):
        encode_manifest(example())


def test_a_large_manifest_has_tensors_to_show_for_it() -> None:
    assert [format_.max_manifest_bytes(size) >> 20 for size in (0, 1 << 30, 8 << 30, 1 << 40)] == [64, 64, 128, 256]
