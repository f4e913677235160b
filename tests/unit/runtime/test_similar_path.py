"""What is said of a path that does not exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmtrain.errors import MissingInputError, split_ways
from lmtrain.runtime.files.similar_path import missing_path, paths_in_one_word, similar_path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("runs/base", "runs/other", "data"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("notes.txt", "docs.jsonl", "data/web.bin", "data/web.idx"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("runs/bsae", "runs/base"), ("rnus/base", "runs/base"), ("rnus/bsae", "runs/base"), ("ntoes.txt", "notes.txt"),
        ("docs", "docs.jsonl"), ("runs/something", None), ("nowhere/near", None), ("notes.txt/inside", None),
    ],
)  # fmt: skip
def test_the_nearest_name(folder: Path, typed: str, meant: str | None) -> None:
    assert similar_path(folder / typed) == (None if meant is None else folder / meant)


def test_a_checkpoint_is_found_by_its_number_and_no_other_is_meant(folder: Path) -> None:
    step = folder / "runs/base/checkpoints/step_00000020"
    step.mkdir(parents=True)
    for name in ("checkpoint-20", "step-20", "iter_0000020", "checkpoints/20"):
        assert similar_path(folder / "runs/base" / name) == step
    for name in ("checkpoint-2", "checkpoints/step_00000030", "checkpoints/step_000000020x1"):
        assert similar_path(folder / "runs/base" / name) is None
    assert similar_path(folder / "more.jsonl") is None, "a suffix alone makes no names similar"


def test_only_what_can_be_meant(folder: Path) -> None:
    assert similar_path(folder / "data/wbe", lambda path: path.with_suffix(".idx").exists()) == folder / "data/web"
    assert similar_path(folder / "notes.tx", Path.is_dir) is None


def test_the_message(folder: Path) -> None:
    error = MissingInputError(missing_path(folder / "ntoes.txt", "Give a text.", option="--data="))
    assert str(error) == f"--data={folder}/ntoes.txt does not exist. Did you mean {folder}/notes.txt?"
    [[way]] = error.ways
    assert (way.new, way.old) == ((f"{folder}/notes.txt",), (f"{folder}/ntoes.txt",))
    assert missing_path(folder / "none", "Give a text.") == f"{folder}/none does not exist. Give a text."
    assert missing_path(folder / "notes.txt", "Give a run.") == f"{folder}/notes.txt is not a folder. Give a run."


def test_a_list_in_one_word_is_told_from_a_name(folder: Path) -> None:
    notes, docs = folder / "notes.txt", folder / "docs.jsonl"
    for sign in (",", ", ", ":", " "):
        text, ways = split_ways(paths_in_one_word(f"{notes}{sign}{docs}"))
        assert text.endswith(f"is several paths in one word. Write {notes} {docs}.")
        assert [way.new for way in ways] == [(str(notes), str(docs))]
    (folder / "a,b").touch()
    for name in (f"{notes},{folder}/missing", notes, folder / "a,b", f"{notes},"):
        assert paths_in_one_word(name) == ""


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("https:/x.org/a.txt", "https://x.org/a.txt is an address, and only files of this machine are read. First "
         "`wget https://x.org/a.txt`; then give the file."),
        ("s3://bucket/a.jsonl", "First `aws s3 cp s3://bucket/a.jsonl .`"),
        ("Qwen/Qwen3-0.6B", "`hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B` fetches"),
        ("nowhere.txt", "nowhere.txt does not exist. Check it."), ("lmtrain/nowhere", "does not exist. Check it."),
    ],
)  # fmt: skip
def test_what_is_elsewhere(path: str, said: str) -> None:
    assert said in missing_path(Path(path), "Check it.")
