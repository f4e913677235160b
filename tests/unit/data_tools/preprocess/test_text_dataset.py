"""A tokenizer and a dataset made of a text: the vocabulary, a kill between the steps, and a text that has changed."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest

from data_tools.preprocess.tokenizer_and_dataset_from_text import (
    TextChangedError,
    TextDataset,
    TextFolder,
    TextRequest,
    estimate_text_bytes,
)
from data_tools.read.find_input_files import TextSuffixes, find_sources
from lmtrain.errors import DataError, MissingInputError, UsageError
from lmtrain.runtime.files.atomic_files import folder_lock
from lmtrain.runtime.processes.fault_injection import Fault, arm
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer

WORDS = "the fox and the dog saw the other fox; then the dog ran. " * 40

KEPT = ("tokenizer.json", "text.bin", "text.idx")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "notes.txt"
    path.write_text(f"{WORDS}\n\n{WORDS}\nand more\n")
    return path


def make(request: TextRequest, folder: Path) -> TextDataset:
    with TextFolder(folder / "text", folder / "record.json").make(request, lambda *_: None, lambda _: None) as made:
        return made


def find(request: TextRequest, folder: Path) -> TextDataset | None:
    return TextFolder(folder / "text", folder / "record.json").find(request)


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    arm()


def test_the_vocabulary_grows_with_the_root_of_the_text(text: Path) -> None:
    free, bound = TextRequest(texts=(str(text),)), TextRequest(texts=(str(text),), max_vocab=300)
    sizes = {0: 512, 10**6: 512, 2**22: 2048, 10**8: 8192, 10**12: 32768}
    assert {count: free.vocab_size(count) for count in sizes} == sizes
    assert bound.vocab_size(10**8) == 300


@pytest.mark.parametrize("point", ["text.tokenizer", "text.dataset", "data.slice", "data.publish", "text.record"])
def test_after_a_kill_the_finished_steps_are_kept(text: Path, tmp_path: Path, point: str) -> None:
    request, folder = TextRequest(texts=(str(text),)), tmp_path / "made"
    whole = make(request, tmp_path / "whole")
    arm(Fault("exc", point))
    with pytest.raises(RuntimeError, match=point):
        make(request, folder)
    assert find(request, folder) is None
    kept = {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.name in KEPT}
    assert kept.keys() == set(KEPT[: {"text.tokenizer": 0, "text.record": 3}.get(point, 1)])
    made = make(request, folder)
    assert {name: (folder / name).stat().st_mtime_ns for name in kept} == kept
    assert (made.tokenizer_seconds is None) == (point != "text.tokenizer")
    assert (made.num_documents, made.num_tokens) == (whole.num_documents, whole.num_tokens)
    assert (folder / "text.bin").read_bytes() == (tmp_path / "whole/text.bin").read_bytes()
    assert find(request, folder) is not None


def test_one_that_waits_takes_what_the_other_has_made(text: Path, tmp_path: Path) -> None:
    request, folder, said = TextRequest(texts=(str(text),)), tmp_path / "made", []
    made = make(request, folder)
    with ExitStack() as other:
        other.enter_context(folder_lock(folder))

        def end_the_wait(notice: str) -> None:
            said.append(notice)
            other.close()

        text_folder = TextFolder(folder / "text", folder / "record.json")
        with text_folder.make(request, lambda *_: None, end_the_wait) as found:
            assert found == made
    assert [notice.endswith(f", which makes the dataset in {folder}") for notice in said] == [True]


def test_a_text_that_changes_while_it_is_read_is_refused(text: Path, tmp_path: Path) -> None:
    text_folder = TextFolder(tmp_path / "made/text", tmp_path / "made/record.json")
    with (
        pytest.raises(DataError, match=r"notes\.txt has changed while it was read\. Run the same command again"),
        text_folder.make(TextRequest(texts=(str(text),)), lambda *_: os.utime(text), lambda _: None),
    ):
        pass
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["scan.tiff", "tokenizer.json"])
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\xff\0")
    with pytest.raises(UsageError, match=rf"{name} is a .*, which is no text"):
        TextRequest(texts=(str(tmp_path / name),)).find_sources()


def test_a_text_that_changes_before_all_is_made_starts_anew(text: Path, tmp_path: Path) -> None:
    request, folder = TextRequest(texts=(str(text),)), tmp_path / "made"
    arm(Fault("exc", "text.record"))
    with pytest.raises(RuntimeError):
        make(request, folder)
    text.write_text(WORDS.upper())
    make(request, folder)
    make(request, tmp_path / "whole")
    for name in ("text.bin", "tokenizer.json"):
        assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_what_has_changed_is_named(text: Path, tmp_path: Path) -> None:
    folder, root = tmp_path / "made", tmp_path / "texts"
    root.mkdir()
    (root / "a.txt").write_text(WORDS)
    request = TextRequest(texts=(str(root),))
    make(request, folder)
    (root / "notes.md").write_text("this suffix is not read")
    assert find(request, folder) is not None
    (root / "b.txt").write_text(WORDS)
    with pytest.raises(TextChangedError, match=r"^b.txt was not there then$"):
        find(request, folder)
    (root / "b.txt").unlink()
    (root / "a.txt").write_text(WORDS.replace("fox", "cat"))
    with pytest.raises(TextChangedError, match=r"^a.txt has changed since$"):
        find(request, folder)
    (root / "a.txt").rename(root / "c.txt")
    with pytest.raises(TextChangedError, match=r"^a.txt is no longer there$"):
        find(request, folder)
    (root / "c.txt").rename(root / "a.txt")
    (root / "a.txt").write_text(WORDS)
    with pytest.raises(TextChangedError, match=r"^text_split was file then and is line now$"):
        find(TextRequest(texts=(str(root),), split="line"), folder)
    for path in (*root.iterdir(), root):
        path.rmdir() if path.is_dir() else path.unlink()
    assert find(request, folder) is not None  # the text is needed no more


def test_several_texts_are_one_whose_order_counts(tmp_path: Path) -> None:
    folder, root = tmp_path / "made", tmp_path / "texts"
    (root / "b").mkdir(parents=True)
    for name, words in (("a.txt", "one"), ("b/b.txt", "two"), ("b/c.txt", "three"), ("code.py", "four")):
        (root / name).write_text(f"{words} {WORDS}")
    texts = str(root / "b"), str(root / "a.txt")
    made = make(TextRequest(texts=texts), folder)
    assert (made.num_files, made.num_documents) == (3, 3)
    assert find(TextRequest(texts=(str(root / "b/*.txt"), texts[1])), folder) == made  # the same files, named otherwise
    with pytest.raises(TextChangedError, match=r"^its files were in another order then$"):
        find(TextRequest(texts=(texts[1], texts[0])), folder)
    with pytest.raises(TextChangedError, match=r"^its files were in another order then$"):
        find(TextRequest(texts=(str(root),)), folder)
    with pytest.raises(TextChangedError, match=r"^code\.py was not there then$"):
        find(TextRequest(texts=(*texts, str(root / "*.py")), suffixes=TextSuffixes((".py",))), folder)
    (root / "a.txt").rename(tmp_path / "a.txt")
    with pytest.raises(TextChangedError, match=r"^a\.txt is no longer there$"):
        find(TextRequest(texts=texts), folder)


def test_a_glob_counts_as_its_folder(tmp_path: Path) -> None:
    for name in ("x/a.txt", "x/b.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(WORDS)
    made = make(TextRequest(texts=(str(tmp_path / "x/*.txt"),)), tmp_path / "made")
    assert find(TextRequest(texts=(str(tmp_path / "x"),)), tmp_path / "made") == made
    single = make(TextRequest(texts=(str(tmp_path / "x/a.txt"),)), tmp_path / "one")
    assert '"a.txt"' in (tmp_path / "one/record.json").read_text()
    assert find(TextRequest(texts=(str(tmp_path / "x/a*"),)), tmp_path / "one") == single
    with pytest.raises(MissingInputError, match=r"x/\*\.md matches no file"):
        make(TextRequest(texts=(str(tmp_path / "x/*.md"),)), tmp_path / "none")
    with pytest.raises(TextChangedError):
        make(TextRequest(texts=(str(tmp_path / "x"),)), tmp_path / "one")
    folder = TextFolder(tmp_path / "one/text", tmp_path / "one/record.json")
    request = TextRequest(texts=(str(tmp_path / "x"),))
    with folder.make(request, lambda *_: None, lambda _: None, replaces=True) as made:
        assert made.num_files == 2


def test_a_damaged_record_counts_as_none(text: Path, tmp_path: Path) -> None:
    request, folder = TextRequest(texts=(str(text),)), tmp_path / "made"
    make(request, folder)
    record = folder / "record.json"
    whole = record.read_text()
    others = whole.replace('"num_tokens": ', '"num_tokens": 1'), whole.replace("notes", "other")
    for damaged in ("", "[]", "{}", *others):
        record.write_text(damaged)
        assert find(request, folder) is None
    make(request, folder)
    assert record.read_text() != whole  # other times
    assert find(request, folder) is not None


def test_a_tokenizer_that_is_given_is_used(text: Path, tmp_path: Path) -> None:
    make(TextRequest(texts=(str(text),)), tmp_path / "a")
    text.write_text(WORDS.upper())
    made = make(TextRequest(texts=(str(text),), tokenizer=tmp_path / "a"), tmp_path / "b")
    assert made.tokenizer_source == str(tmp_path / "a")
    assert not (tmp_path / "b/tokenizer.json").exists()
    assert Tokenizer.load(tmp_path / "b/text.tokenizer.json").fingerprint == Tokenizer.load(tmp_path / "a").fingerprint


def test_the_size_of_a_compressed_text_is_estimated(tmp_path: Path) -> None:
    text = Random(1).randbytes(3 << 20).hex().encode()
    sizes = {"small": 100_000, "large": len(text)}
    for name, size in sizes.items():
        (tmp_path / f"{name}.txt.gz").write_bytes(gzip.compress(text[:size], 1))
    (tmp_path / "zeros.txt.gz").write_bytes(gzip.compress(b"0" * (5 << 20)))
    (tmp_path / "cut__.txt.gz").write_bytes(gzip.compress(text[:100_000], 0)[:65_000])
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name, rows in (("rows_", ["four"] * 50), ("none_", [])):
        parquet.write_table(pyarrow.table({"text": pyarrow.array(rows, "string")}), tmp_path / f"{name}.parquet")
    found = {path.name[:5]: estimate_text_bytes(find_sources([path]), "text") for path in tmp_path.iterdir()}
    assert (found["small"], found["zeros"]) == (100_000, 5 << 20)
    assert (found["rows_"], found["none_"]) == (200, 0)
    assert 0 <= found["cut__"] < 65_000
    assert abs(found["large"] - len(text)) < len(text) // 10
