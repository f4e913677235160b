"""`lmtrain data` as users type it: every verb, its JSON, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from lmtrain.data.store.indexed_dataset import IndexedDataset, dataset_file
from tests.cli.harness import Toy, lmtrain
from tests.marks import wide


def test_inspect_and_verify(toy: Toy) -> None:
    facts = json.loads(lmtrain("data", "inspect", toy.data, "--json"))
    dataset = IndexedDataset.open(toy.data)
    assert dataset.info is not None
    assert (facts["documents"], facts["tokens"]) == (dataset.num_documents, dataset.num_tokens)
    assert facts["sidecar"]["content_sha256"] == dataset.info.content_sha256
    assert "content sha256" in lmtrain("data", "inspect", toy.data)
    [checked] = json.loads(lmtrain("data", "verify", toy.data, "--json"))
    assert checked["content_sha256"] == dataset.info.content_sha256
    assert f"is whole: sha256 {dataset.info.content_sha256}" in lmtrain("data", "verify", toy.data)


def test_a_damaged_dataset(toy: Toy, tmp_path: Path) -> None:
    lmtrain("data", "merge", toy.data, "--output", tmp_path / "copy")
    path = dataset_file(tmp_path / "copy", ".bin")
    path.write_bytes(b"\x01\x00" + path.read_bytes()[2:])
    assert "bytes 0 to 65535 (block 0)" in lmtrain("data", "verify", tmp_path / "copy", code=65)
    assert "does not exist" in lmtrain("data", "verify", tmp_path / "none", code=66)


def test_merge_and_split(toy: Toy, tmp_path: Path) -> None:
    number = IndexedDataset.open(toy.data).num_documents
    [made] = json.loads(lmtrain("data", "merge", toy.data, toy.data, "--output", tmp_path / "twice", "--json"))
    assert made["documents"] == 2 * number
    outputs = ["--output", tmp_path / "one", "--output", tmp_path / "two"]
    text = lmtrain("data", "split", tmp_path / "twice", "--shares", "1,1", *outputs)
    assert text.count(f"{number} documents") == 2
    assert dataset_file(tmp_path / "one", ".bin").read_bytes() == dataset_file(toy.data, ".bin").read_bytes()
    assert dataset_file(tmp_path / "two", ".idx").read_bytes() == dataset_file(toy.data, ".idx").read_bytes()
    again = lmtrain("data", "split", tmp_path / "twice", "--shares", "1,1", *outputs)
    assert again.count("is already there") == 2
    assert "--overwrite" in lmtrain("data", "split", tmp_path / "twice", "--shares", "1,2", *outputs, code=73)
    assert "not a list of numbers" in lmtrain("data", "split", toy.data, "--shares", "half", *outputs, code=2)


def test_a_folder_is_no_name_of_a_dataset(toy: Toy, tmp_path: Path) -> None:
    """A slash at the end is lost in a Path, and the files would lie beside the folder that was meant."""
    (tmp_path / "old").mkdir()
    made = ("preprocess", toy.text, "--tokenizer", toy.tokenizer), ("data", "merge", toy.data)
    for words, output in zip(made, ("new/", "old"), strict=True):
        said = lmtrain(*words, "--output", f"{tmp_path}/{output}", code=2)
        assert f"--output {tmp_path}/{output} is refused: {tmp_path}/{output} is a folder. Give the name" in said
        assert f"as in {(tmp_path / output / 'NAME')}." in said
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_documents_as_text(toy: Toy, tmp_path: Path) -> None:
    [row] = json.loads(lmtrain("data", "decode", toy.data, 1, "--json"))
    texts = [path.read_text() for path in sorted(toy.text.iterdir())]
    assert any(text in row["text"] for text in texts)
    [cut] = json.loads(lmtrain("data", "decode", toy.data, 1, "--most", 5, "--ids", "--json"))
    assert cut["ids"] == IndexedDataset.open(toy.data).document(1)[:5].tolist()
    assert "document 1: " in lmtrain("data", "decode", toy.data, 1, "--most", 5, "--ids")
    assert "Document 9999 is not in" in lmtrain("data", "decode", toy.data, 9999, code=2)
    drawn = [json.loads(lmtrain("data", "sample", toy.data, "-n", 4, "--seed", seed, "--json")) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len({row["document"] for row in drawn[0]}) == 4
    for suffix in (".bin", ".idx"):
        dataset_file(tmp_path / "foreign", suffix).write_bytes(dataset_file(toy.data, suffix).read_bytes())
    assert "was stored without a tokenizer" in lmtrain("data", "sample", tmp_path / "foreign", code=2)
    assert "document" in lmtrain("data", "sample", tmp_path / "foreign", "--tokenizer", toy.tokenizer)


def test_stats(toy: Toy) -> None:
    facts = json.loads(lmtrain("data", "stats", toy.data, "--json"))
    assert sum(bar["documents"] for bar in facts["lengths"]) == facts["documents"]
    drawn = lmtrain("data", "stats", toy.data)
    assert "tokens in a document" in drawn
    assert "█" in drawn


def check_sources(rows: list[dict[str, Any]]) -> None:
    """Losses by source add up to a step's, tokens to the run's, and epochs grow with tokens."""
    for row in rows:
        parts = row["sources"].values()
        check_weighted(row, [part for part in parts if part["labels"]], "labels")
        assert sum(part["tokens"] for part in parts) == row["tokens"]
        assert row["sources"].keys() == {"a", "b"}
        assert row["sources"]["a"]["tokens"] > 2 * row["sources"]["b"]["tokens"]
    for name in "ab":
        ends = [row["sources"][name] for row in (rows[0], rows[-1])]
        assert ends[1]["tokens"] * ends[0]["epochs"] == pytest.approx(ends[0]["tokens"] * ends[1]["epochs"])


def check_weighted(row: dict[str, Any], parts: Iterable[dict[str, Any]], weight: str) -> None:
    """The mean of the parts' losses, weighted by their labels, is the loss of the row."""
    total = sum(part[weight] for part in parts)
    assert sum(part["loss"] * part[weight] for part in parts) / total == pytest.approx(row["loss"], rel=1e-6)


@pytest.fixture
def blended(toy: Toy, tmp_path: Path) -> list[str]:
    outputs = ["--output", tmp_path / "a", "--output", tmp_path / "b"]
    lmtrain("data", "split", toy.data, "--shares", "2,1", *outputs)
    parts = f"[{{path: '{tmp_path / 'a'}', weight: 3}}, {{path: '{tmp_path / 'b'}', weight: 1}}]"
    settings = [one for one in toy.settings(tmp_path / "run") if not one.startswith("data.path")]
    return ["data=blend", f"data.datasets={parts}", "data.split=[0.8,0.2]", *settings]


def test_blend_and_index(blended: list[str]) -> None:
    rows = json.loads(lmtrain("data", "blend", *blended, "--json"))
    assert [(row["share"], row["run_samples"]) for row in rows] == [(0.75, 36), (0.25, 12)]
    table = lmtrain("data", "blend", *blended)
    assert "75.0000%" in table
    assert "2 datasets" in table
    samples = sum(row["samples"] for row in rows)
    assert table.split()[-1] == f"{48 / samples:.3g}"  # how often the whole is read
    facts = json.loads(lmtrain("data", "index", *blended, "--json"))
    assert facts["datasets"] == 2
    assert facts["samples"] == samples


def test_a_source_that_is_read_too_often_is_named(blended: list[str]) -> None:
    epochs = {row["dataset"]: row["epochs"] for row in json.loads(lmtrain("data", "blend", *blended, "--json"))}
    less, more = sorted(epochs, key=lambda path: epochs[path])
    limit = (epochs[less] + epochs[more]) / 2
    words = [*blended, f"data.max_epochs={limit}", "--dry-run", "--json"]
    warning = json.loads(lmtrain("pretrain", *words).splitlines()[-1])["warning"]
    assert f"The run reads {Path(more).name} for" in warning
    assert f" {Path(less).name} for" not in warning


@pytest.mark.parametrize(
    "extra",
    [
        [],
        *wide(
            ["data.packing=best_fit", "data.document_mask=true"],
            ["data.order=megatron", "data.first_sample=7", "data.megatron_samples=100"],
        ),
    ],
    ids=["blend", "best_fit", "megatron"],
)
def test_a_run_on_a_blend_stops_and_goes_on(blended: list[str], tmp_path: Path, extra: list[str]) -> None:
    settings = [*blended, *extra, "train.steps=6", "train.valid_interval_steps=3", "train.valid_samples=8"]
    whole = json.loads(lmtrain("pretrain", *settings, f"run.dir={tmp_path / 'whole'}", "--json").splitlines()[-1])
    assert whole["step"] == 6
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    checkpoint = tmp_path / "whole" / "checkpoints" / "step_00000004"
    lmtrain("pretrain", *settings, f"run.dir={tmp_path / 'half'}", f"checkpoint.resume={checkpoint}", "--json")
    after = [json.loads(line) for line in (tmp_path / "half" / "metrics.jsonl").read_text().splitlines()]
    want = [
        (row["loss"], row["samples_hash"], row["sources"]) for row in rows if row["event"] == "step" and row["step"] > 4
    ]
    assert [(row["loss"], row["samples_hash"], row["sources"]) for row in after if row["event"] == "step"] == want
    check_sources([row for row in rows if row["event"] == "step"])
    (valid,) = (row for row in rows if row["event"] == "valid" and row["step"] == 6)
    check_weighted(valid, valid["domains"].values(), "tokens")
    other = [one.replace("weight: 3", "weight: 2") if "weight: 3" in one else one for one in settings]
    refused = lmtrain("pretrain", *other, f"run.dir={tmp_path / 'half'}", code=65)
    assert "data: blend is" in refused
