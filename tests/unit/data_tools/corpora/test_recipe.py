"""Recipes: all are found, pinned and safe; each reads local files; archives are read as streams and never unpacked."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
from dataclasses import replace
from pathlib import Path

import pytest

from data_tools.corpora.corpus_definition import (
    PublishedTexts,
    Recipe,
    fetch_files,
    find_recipe,
    get_corpus,
    recipes,
    split_from_name,
)
from data_tools.corpora.download import RemoteFile, check_address
from data_tools.corpus.flow.run_one_corpus_step_in_workers import Report
from data_tools.read.compressed_and_parquet_readers import ALWAYS_ALLOWED_BYTES
from lmtrain.errors import DataError, MissingInputError, StorageError, UsageError
from lmtrain.runtime.files.atomic_files import is_safe_name
from tests.unit.data_tools.corpora.packing import tarred, zipped
from tests.unit.data_tools.corpus_files import read_jsonl, texts

ARTICLES = [
    " \n = One ( song ) = \n \n First <unk> text . \n \n = = Part = = \n \n More . \n",
    " \n = 1933 = \n \n Second . \n",
]


def corpus(name: str) -> Recipe:
    found = find_recipe(name)
    assert isinstance(found, Recipe)
    return found


def get(name: str, files: list[Path], output: Path) -> Report:
    report = get_corpus(corpus(name), files, output, overwrite=True)
    assert report is not None
    return report


def test_every_recipe_is_found_pinned_and_safe() -> None:
    assert recipes().keys() >= {"c4", "wikitext103_raw", "wikitext103"}
    for name, recipe in recipes().items():
        assert recipe.name == name
        archives = recipe.archives if isinstance(recipe, PublishedTexts) else ()
        for file in recipe.files + archives:
            assert is_safe_name(file.name)
            assert len(bytes.fromhex(file.sha256)) == 32
            assert file.num_bytes
            assert all(url.startswith("https://") for url in file.urls)
            assert file.urls or archives
            for url in file.urls:
                check_address(url)
    with pytest.raises(UsageError, match="Did you mean wikitext103"):
        find_recipe("wikitext1030")


def test_wikitext_falls_into_articles_whose_sum_is_the_file(tmp_path: Path) -> None:
    (tmp_path / "wiki.test.tokens").write_text("".join(ARTICLES))
    tally = get("wikitext103_raw", [tmp_path / "wiki.test.tokens"], tmp_path / "out").tally
    rows = read_jsonl(tmp_path / "out" / "test.jsonl")
    assert [row["title"] for row in rows] == ["One ( song )", "1933"]
    assert [row["text"] for row in rows] == ARTICLES
    assert [row["id"] for row in rows] == ["wikitext103/test/0", "wikitext103/test/1"]
    assert tally.changed == {"to test": 2}


def test_the_real_test_set_has_sixty_articles(tmp_path: Path, shared_data: Path) -> None:
    source = shared_data / "wt103.wiki.test.tokens"
    get("wikitext103_raw", [source], tmp_path)
    rows = read_jsonl(tmp_path / "test.jsonl")
    assert len(rows) == 60
    assert [row["title"] for row in rows[:3]] == ["Robert Boulter", "Du Fu", "Kiss You ( One Direction song )"]
    assert "".join(row["text"] for row in rows) == source.read_text(encoding="utf-8")


def wikitext_zip(path: Path, names: dict[str, str]) -> Path:
    path.write_bytes(zipped({name: text.encode() for name, text in names.items()}))
    return path


def test_a_zip_gives_all_splits_and_its_names_are_no_paths(tmp_path: Path) -> None:
    names = {
        "wikitext-103-raw/wiki.train.raw": ARTICLES[0], "../../wiki.test.raw": ARTICLES[1],
        "/etc/wiki.valid.raw": "".join(ARTICLES), "../evil.sh": "boo", "wikitext-103-raw/": "",
    }  # fmt: skip
    (tmp_path / "in").mkdir()
    path = wikitext_zip(tmp_path / "in" / "w.zip", names)
    get("wikitext103_raw", [path], tmp_path / "out")
    found = {file.name: len(texts(file)) for file in (tmp_path / "out").glob("*.jsonl")}
    assert found == {"train.jsonl": 1, "test.jsonl": 1, "valid.jsonl": 2}
    get("wikitext103_raw", [wikitext_zip(path, {"wiki.test.raw": ARTICLES[0]})], tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").glob("*.jsonl")] == ["test.jsonl"]  # the other splits are gone
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".jsonl") == [
        "get.report.json", "w.zip"
    ]  # fmt: skip


def test_zip_bombs_and_broken_zips_are_refused(tmp_path: Path) -> None:
    bomb = wikitext_zip(tmp_path / "bomb.zip", {"wiki.test.raw": "\0" * (ALWAYS_ALLOWED_BYTES + (4 << 20))})
    with pytest.raises(DataError, match="grows to more than the allowed 250 times"):
        get("wikitext103_raw", [bomb], tmp_path / "out")
    good = wikitext_zip(tmp_path / "good.zip", {"wiki.test.raw": ARTICLES[0] * 50}).read_bytes()
    for damaged in (good[:-30], good[:60] + b"xxxx" + good[64:], b"no zip"):
        (tmp_path / "bad.zip").write_bytes(damaged)
        with pytest.raises(DataError):
            get("wikitext103_raw", [tmp_path / "bad.zip"], tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.jsonl"))


def test_openwebtext_is_read_through_its_tars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = lzma.compress(tarred({"0001-a.txt": b"first page\n", "../../0002-b.txt": b"zweite", "3.txt": b"\xff"}))
    whole = lzma.compress(tarred({"openwebtext/urlsf_subset00-1_data.xz": inner, "openwebtext/readme": b"no page"}))
    for name, data in (("openwebtext.tar.xz", whole), ("urlsf_subset00-1_data.xz", inner)):
        (tmp_path / name).write_bytes(data)
        tally = get("openwebtext", [tmp_path / name], tmp_path / "out").tally
        rows = read_jsonl(tmp_path / "out" / "train.jsonl")
        assert [row["text"] for row in rows] == ["first page\n", "zweite"]
        assert [row["id"] for row in rows] == ["openwebtext/0001-a", "openwebtext/0002-b"]
        assert tally.dropped == {"not UTF-8": 1}
    assert not list(tmp_path.rglob("*.txt"))
    monkeypatch.setattr("data_tools.corpora.openwebtext.MAX_DOC_BYTES", 10)
    tally = get("openwebtext", [tmp_path / name], tmp_path / "out").tally
    assert (texts(tmp_path / "out" / "train.jsonl"), tally.dropped["too long"]) == (["zweite"], 1)


def test_damaged_and_hostile_tars_are_refused(tmp_path: Path) -> None:
    bomb = lzma.compress(tarred({"a/b.xz": lzma.compress(bytes(ALWAYS_ALLOWED_BYTES + (4 << 20)), preset=0)}))
    inner = lzma.compress(tarred({"0001-a.txt": b"first page\n" * 100}))
    path = tmp_path / "openwebtext.tar.xz"
    for data in (bomb, inner[:-20], lzma.compress(b"no tar at all" * 100)):
        path.write_bytes(data)
        with pytest.raises(DataError):
            get("openwebtext", [path], tmp_path / "out")


def test_c4_keeps_its_keys_and_names_documents_by_their_address(tmp_path: Path) -> None:
    rows = [{"text": "a", "url": "http://x/1", "timestamp": "t"}, {"text": "b"}, {"no": "text"}]
    path = tmp_path / "c4-validation.00000-of-00008.json.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    tally = get("c4", [path], tmp_path / "out").tally
    found = read_jsonl(tmp_path / "out" / "valid.jsonl")
    assert found[0] == {"id": "http://x/1", **rows[0]}
    assert found[1]["id"].startswith("c4/c4-validation")
    assert (tally.num_in, tally.num_out) == (3, 2)
    assert tally.dropped.total() == 1


def test_fetched_files_come_from_their_place(tmp_path: Path) -> None:
    content = b'{"text": "x"}\n'
    remote = RemoteFile("t.json.gz", ("https://example.invalid/t",), *_known(gzip.compress(content)))
    recipe = replace(corpus("c4"), files=(remote,))
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "t.json.gz").write_bytes(gzip.compress(content))
    get_corpus(recipe, [], tmp_path, offline=True)
    assert texts(tmp_path / "train.jsonl") == ["x"]


def _known(content: bytes) -> tuple[str, int]:
    return hashlib.sha256(content).hexdigest(), len(content)


@pytest.mark.parametrize("offline", [True, False])
def test_without_a_network_the_instructions_are_given(tmp_path: Path, offline: bool) -> None:
    remote = RemoteFile("t.json.gz", ("https://127.0.0.1:1/a/t.json.gz",), "a1" * 32, 12_345)
    with pytest.raises(UsageError if offline else StorageError) as refused:
        get_corpus(replace(corpus("c4"), files=(remote,)), [], tmp_path / "my out", offline=offline)
    words = [
        "ring it by other means:", "t.json.gz, 12,345 bytes, SHA-256 " + "a1" * 32, remote.urls[0],
        f"Put it into {tmp_path}/my out/source and run", f"lmtrain corpus get c4 --output '{tmp_path}/my out'",
        f"lmtrain corpus get c4 PATH --output '{tmp_path}/my out'",
    ]  # fmt: skip
    assert all(word in str(refused.value) for word in words), refused.value


def test_a_corpus_without_its_files_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no fixed release to fetch"):
        fetch_files(corpus("c4"), tmp_path, False, None)
    with pytest.raises(MissingInputError, match=r"absent\.zip does not exist"):
        get("wikitext103_raw", [tmp_path / "absent.zip"], tmp_path)
    with pytest.raises(MissingInputError, match=rf"{tmp_path} is not a file\. For wikitext103_raw, give .*\.$"):
        get("wikitext103_raw", [tmp_path], tmp_path)
    (tmp_path / "wiki.test.tokens").write_bytes(ARTICLES[0].encode() + b"caf\xe9\n")
    with pytest.raises(DataError, match=r"wiki\.test\.tokens is not UTF-8 text in line 9\. Get it again"):
        get("wikitext103_raw", [tmp_path / "wiki.test.tokens"], tmp_path)
    (tmp_path / "empty.txt").write_text("no article here\n")
    with pytest.raises(DataError, match="holds no document of wikitext103_raw"):
        get("wikitext103_raw", [tmp_path / "empty.txt"], tmp_path)


def test_splits_are_told_by_names() -> None:
    names = ["wiki.train.raw", "c4-validation.0", "lambada_development.txt", "x_test.jsonl", "other"]
    assert [split_from_name(name) for name in names] == ["train", "valid", "valid", "test", "train"]
