"""Evaluation texts: any byte-identical copy is accepted, in any archive and under any name; no other is."""

from __future__ import annotations

import gzip
import hashlib
import lzma
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from data_tools.corpora.corpus_definition import PublishedTexts, find_recipe, get_texts
from data_tools.corpora.download import RemoteFile
from lmtrain.errors import DataError, MissingInputError, OutputError, StorageError, UsageError
from tests.unit.data_tools.corpora.packing import tarred, zipped
from tests.unit.data_tools.corpora.serving import Behaviour

TEST, VALID = b"a test\r\nof bytes\n" * 50, b"another text \n" * 40
MEMBERS = {"w/wiki.test.tokens": TEST, "w/wiki.valid.tokens": VALID, "w/wiki.train.tokens": b"long " * 5000}
ARCHIVE = zipped(MEMBERS)
BOTH = {"wiki.test.tokens": TEST, "wiki.valid.tokens": VALID}


def known(name: str, data: bytes, *urls: str) -> RemoteFile:
    return RemoteFile(name, urls, hashlib.sha256(data).hexdigest(), len(data))


def words(*, direct: tuple[str, ...] = (), archive: str = "http://127.0.0.1:1/w.zip") -> PublishedTexts:
    files = (known("wiki.test.tokens", TEST, *direct), known("wiki.valid.tokens", VALID))
    return PublishedTexts("words", "two texts", files, (known("w.zip", ARCHIVE, archive),))


def brought(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in output.iterdir() if path.is_file()} if output.exists() else {}


@pytest.mark.parametrize(
    "files",
    [
        {"deep/er/wiki.test.tokens": TEST, "wiki.valid.tokens": VALID, "readme": b"x"},
        {"renamed by somebody": TEST, "v": VALID},
        {"wiki.test.tokens.gz": gzip.compress(TEST), "v": VALID},
        {"w.zip": ARCHIVE},
        {"mirror/w.zip": zipped(BOTH)},  # packed by somebody else
        {"w.zip": gzip.compress(tarred(MEMBERS))},
        {"wikitext-2/wiki.test.tokens": b"of another corpus", "wikitext-103/wiki.test.tokens": TEST, "v": VALID},
    ],
)
@pytest.mark.parametrize("place", ["given", "source"])
def test_a_folder_is_searched_for_the_texts(tmp_path: Path, files: dict[str, bytes], place: str) -> None:
    output = tmp_path / "out"
    folder = output / "source" if place == "source" else tmp_path / "given"
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    placed = get_texts(words(), [folder] if place == "given" else [], output, offline=True)
    assert brought(output) == BOTH
    assert list(placed) == [output / name for name in BOTH]
    assert all(found and str(folder) in found for found in placed.values())


ARCHIVES = {
    "zip": ARCHIVE, "zip of others": zipped(BOTH), "tar": tarred(MEMBERS), "tar.xz": lzma.compress(tarred(BOTH))
}  # fmt: skip


@pytest.mark.parametrize("packing", ARCHIVES)
def test_an_archive_of_any_name_and_packing_is_known_by_its_members(tmp_path: Path, packing: str) -> None:
    (tmp_path / "download(1)").write_bytes(ARCHIVES[packing])
    get_texts(words(), [tmp_path / "download(1)"], tmp_path / "out")
    assert brought(tmp_path / "out") == BOTH


def test_rows_of_the_hub_are_put_together_again(tmp_path: Path) -> None:
    wiki, novel = " \n = One = \n \n Words of it . \n \n", "lower case , the first\nand the second\n"
    rows = {"t.parquet": ["", " = One = \n", "", " Words of it . \n", ""], "v.parquet": novel.splitlines()}
    for name, texts in rows.items():
        parquet.write_table(pyarrow.table({"text": texts, "domain": [None] * len(texts)}), tmp_path / name)
    two = PublishedTexts("words", "two texts", (known("wiki", wiki.encode()), known("novel", novel.encode())))
    get_texts(two, [tmp_path / name for name in rows], tmp_path / "out")
    assert brought(tmp_path / "out") == {"wiki": wiki.encode(), "novel": novel.encode()}
    parquet.write_table(pyarrow.table({"text": texts * 50}), tmp_path / "v.parquet")
    with pytest.raises(DataError, match=r"v\.parquet is damaged or another text: it has more than"):
        get_texts(two, [tmp_path / "v.parquet"], tmp_path / "other")


def test_one_of_two_may_be_brought_and_the_other_later(tmp_path: Path) -> None:
    output = tmp_path / "out"
    (tmp_path / "t").write_bytes(TEST)
    (tmp_path / "v").write_bytes(VALID)
    assert list(get_texts(words(), [tmp_path / "t"], output).values()) == [f"from {tmp_path / 't'}", None]
    origins = list(get_texts(words(), [tmp_path / "v"], output).values())
    assert origins == ["was there already", f"from {tmp_path / 'v'}"]
    assert set(get_texts(words(), [], output).values()) == {"was there already"}
    assert brought(output) == BOTH


DAMAGED = {
    "cut": TEST[:-100], "longer": TEST + b"more", "a flipped bit": bytes([TEST[0] ^ 1]) + TEST[1:],
    "other line ends": TEST.replace(b"\r\n", b"\n"), "empty": b"",
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("packing", ["alone", "folder", "zip", "gz", "source"])
def test_a_damaged_copy_is_refused_with_what_was_expected(tmp_path: Path, damage: str, packing: str) -> None:
    data, output = DAMAGED[damage], tmp_path / "out"
    folder = output / "source" if packing == "source" else tmp_path / "in"
    folder.mkdir(parents=True)
    packed = {"zip": zipped({"wiki.test.tokens": data, "v": VALID}), "gz": gzip.compress(data)}.get(packing, data)
    path = folder / "wiki.test.tokens"
    path.write_bytes(packed)
    local = {"folder": [folder], "source": []}.get(packing, [path])
    with pytest.raises(DataError) as refused:
        get_texts(words(), local, output)
    said = str(refused.value)
    found = f"{len(data):,} bytes, and SHA-256 {hashlib.sha256(data).hexdigest()}"
    assert (found if len(data) <= len(TEST) else f"more than {len(TEST):,} bytes") in said
    assert f"wiki.test.tokens, {len(TEST):,} bytes, SHA-256 {hashlib.sha256(TEST).hexdigest()}" in said
    assert f"lmtrain corpus get words --output {output}" in said
    assert brought(output) == {}


def test_a_cut_archive_is_refused_with_what_was_expected(tmp_path: Path) -> None:
    (tmp_path / "w.zip").write_bytes(ARCHIVE[:-30])
    with pytest.raises(DataError, match=r"(?s)not a complete zip archive.*Get them again:.*w\.zip, .* bytes, SHA-256"):
        get_texts(words(), [tmp_path], tmp_path / "out")


def test_what_holds_nothing_of_it(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match="absent does not exist"):
        get_texts(words(), [tmp_path / "absent"], tmp_path / "out")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "notes.txt").write_text("nothing of the kind")
    with pytest.raises(DataError, match="in contains no file of words"):
        get_texts(words(), [tmp_path / "in"], tmp_path / "out")
    (tmp_path / "x.zip").write_bytes(zipped({"notes.txt": b"x"}))
    with pytest.raises(DataError, match=r"x\.zip contains no file of words"):
        get_texts(words(), [tmp_path / "x.zip"], tmp_path / "out")


def test_another_file_in_its_place_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(TEST)
    (tmp_path / "wiki.test.tokens").write_bytes(b"precious")
    with pytest.raises(OutputError, match="is not the file with this SHA-256"):
        get_texts(words(), [tmp_path / "t"], tmp_path)
    assert (tmp_path / "wiki.test.tokens").read_bytes() == b"precious"


def test_offline_gives_instructions_without_a_request(tmp_path: Path, server: tuple[str, Behaviour]) -> None:
    url, behaviour = server
    with pytest.raises(UsageError, match=r"(?s)--offline was given.*wiki\.valid\.tokens.*contained in.*w\.zip"):
        get_texts(words(archive=url), [], tmp_path, offline=True)
    assert behaviour.asked == []
    with pytest.raises(StorageError, match=r"(?s)127\.0\.0\.1:1: .*refused.*, or bring it by other means:.*w\.zip"):
        get_texts(words(), [], tmp_path)
    assert brought(tmp_path) == {}


def test_each_file_has_its_own_address_and_the_archive_the_rest(tmp_path: Path, server: tuple[str, Behaviour]) -> None:
    url, behaviour = server
    behaviour.others |= {"/test": TEST, "/w.zip": ARCHIVE}
    origin = url.removesuffix("/file")
    placed = get_texts(words(direct=(f"{origin}/test",), archive=f"{origin}/w.zip"), [], tmp_path)
    assert brought(tmp_path) == BOTH
    assert list(placed.values()) == ["fetched", f"from wiki.valid.tokens in {tmp_path}/source/w.zip"]
    assert not list((tmp_path / "source").iterdir())


def test_wrong_bytes_of_an_address_never_arrive(tmp_path: Path, server: tuple[str, Behaviour]) -> None:
    url, behaviour = server
    behaviour.content = b"<html>log in first</html>"
    with pytest.raises(DataError, match=r"(?s)gave a file with SHA-256 .* Bring it by other means:.*w\.zip"):
        get_texts(words(direct=(url,), archive=url), [], tmp_path)
    assert brought(tmp_path) == {}


@pytest.mark.parametrize("name", ["lambada", "lambada_standard", "wikitext103"])
def test_the_real_texts_are_known(tmp_path: Path, shared_data: Path, name: str) -> None:
    recipe = find_recipe(name)
    assert isinstance(recipe, PublishedTexts)
    copies = {"wiki.test.tokens": "wt103.wiki.test.tokens", "wiki.valid.tokens": "wt103.wiki.valid.tokens"}
    paths = [shared_data / copies.get(file.name, file.name) for file in recipe.files]
    get_texts(recipe, paths, tmp_path, offline=True)
    assert brought(tmp_path) == {f.name: path.read_bytes() for f, path in zip(recipe.files, paths, strict=True)}
    for file in recipe.files:
        data = (tmp_path / file.name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file.num_bytes, file.sha256)


def test_a_rebuilt_copy_of_the_raw_text_is_not_the_published_one(tmp_path: Path, shared_data: Path) -> None:
    recipe = find_recipe("wikitext2")
    assert isinstance(recipe, PublishedTexts)
    with pytest.raises(DataError, match=r"1,290,586 bytes.*(?s:.*)1,290,590 bytes"):
        get_texts(recipe, [shared_data / "wiki.test.raw"], tmp_path)
