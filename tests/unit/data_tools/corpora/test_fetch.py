"""Fetching from a local server: broken transfers continue, wrong bytes are deleted."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

from data_tools.corpora import download as fetching
from data_tools.corpora.download import check_address, fetch
from lmtrain.errors import DataError, OutputError, StorageError, UsageError
from tests.unit.data_tools.corpora.serving import Behaviour

CONTENT = random.Random(0).randbytes(3_000_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def server(server: tuple[str, Behaviour]) -> tuple[str, Behaviour]:
    server[1].content = CONTENT
    return server


def test_a_file_is_fetched_once_and_verified(tmp_path: Path, server: tuple[str, Behaviour]) -> None:
    url, behaviour = server
    seen: list[tuple[int, int | None]] = []
    target = tmp_path / "deep" / "file"
    assert fetch([url], target, sha256=SHA256, report=lambda done, total: seen.append((done, total)))
    assert target.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert not fetch([url], target, sha256=SHA256)
    assert len(behaviour.asked) == 1
    assert [path.name for path in target.parent.iterdir()] == ["file"]


def test_a_broken_transfer_is_continued_where_it_stopped(tmp_path: Path, server: tuple[str, Behaviour]) -> None:
    url, behaviour = server
    behaviour.break_after = 1_234_567
    with pytest.raises(StorageError, match="was lost after 1234567 of 3000000 bytes"):
        fetch([url], tmp_path / "file", sha256=SHA256)
    assert (tmp_path / "file.part").stat().st_size == 1_234_567
    fetch([url], tmp_path / "file", sha256=SHA256)
    assert behaviour.asked == [None, "bytes=1234567-"]
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_server_without_ranges_begins_anew(tmp_path: Path, server: tuple[str, Behaviour]) -> None:
    url, behaviour = server
    behaviour.ranges = False
    (tmp_path / "file.part").write_bytes(b"something of another length" * 1000)
    fetch([url], tmp_path / "file", sha256=SHA256)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_part_that_is_whole_already_is_only_verified(tmp_path: Path, server: tuple[str, Behaviour]) -> None:
    url, behaviour = server
    (tmp_path / "file.part").write_bytes(CONTENT)
    fetch([url], tmp_path / "file", sha256=SHA256)
    assert behaviour.asked == [f"bytes={len(CONTENT)}-"]  # which the server refuses: there is no more
    (tmp_path / "file").rename(tmp_path / "file.part")
    fetch([url], tmp_path / "file", sha256=SHA256, num_bytes=len(CONTENT))
    assert len(behaviour.asked) == 1


def test_wrong_bytes_are_thrown_away(tmp_path: Path, server: tuple[str, Behaviour]) -> None:
    url, behaviour = server
    behaviour.content = CONTENT[:-1] + b"!"
    with pytest.raises(DataError, match=f"not {SHA256}"):
        fetch([url], tmp_path / "file", sha256=SHA256)
    assert not list(tmp_path.iterdir())


def test_a_download_longer_than_expected_is_refused_at_once(tmp_path: Path, server: tuple[str, Behaviour]) -> None:
    url, behaviour = server
    behaviour.content = CONTENT * 4
    with pytest.raises(DataError, match="sends more than"):
        fetch([url], tmp_path / "file", sha256=SHA256, num_bytes=len(CONTENT))
    assert not list(tmp_path.iterdir())


def test_the_next_address_is_tried(tmp_path: Path, server: tuple[str, Behaviour]) -> None:
    url, _ = server
    fetch(["http://127.0.0.1:1/absent", url], tmp_path / "file", sha256=SHA256)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_an_address_that_gives_another_file_is_passed_over(tmp_path: Path, server: tuple[str, Behaviour]) -> None:
    url, behaviour = server
    behaviour.others["/login"] = b"<html>who are you?</html>"
    assert fetch([url.replace("/file", "/login"), url], tmp_path / "file", sha256=SHA256, num_bytes=len(CONTENT))
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_without_a_network_the_hosts_are_named(tmp_path: Path, server: tuple[str, Behaviour]) -> None:
    urls = ["http://127.0.0.1:1/a", "http://127.0.0.1:1/b", "http://localhost:1/a"]
    with pytest.raises(StorageError, match=r"fetched \(127\.0\.0\.1:1, localhost:1: .*refused\). Start again"):
        fetch(urls, tmp_path / "file", sha256=SHA256)
    url, server[1].status = server[0], 404
    with pytest.raises(StorageError, match="Not Found"):
        fetch([url], tmp_path / "file", sha256=SHA256)


def test_a_redirection_to_an_unsafe_address_is_not_followed(tmp_path: Path, server: tuple[str, Behaviour]) -> None:
    url, behaviour = server
    for target in ("http://example.org/file", "file:///etc/passwd", "ftp://127.0.0.1/x"):
        behaviour.redirect_to = target
        with pytest.raises((UsageError, StorageError)):
            fetch([url], tmp_path / "file", sha256=SHA256)
    assert not (tmp_path / "file").exists()
    behaviour.redirect_to, behaviour.others = url.replace("/file", "/moved"), {"/moved": behaviour.content}
    fetch([url], tmp_path / "file", sha256=SHA256)
    assert (tmp_path / "file").read_bytes() == behaviour.content


def test_another_file_in_its_place_is_never_overwritten(tmp_path: Path, server: tuple[str, Behaviour]) -> None:
    url, behaviour = server
    (tmp_path / "file").write_text("precious")
    with pytest.raises(OutputError, match="is not the file with this SHA-256"):
        fetch([url], tmp_path / "file", sha256=SHA256)
    assert behaviour.asked == []
    with pytest.raises(UsageError, match="is not a SHA-256"):
        fetch([url], tmp_path / "other", sha256="abc")


@pytest.mark.parametrize("url", ["http://example.org/x", "file:///etc/passwd", "ftp://a/b", "x"])
def test_only_https_is_fetched(url: str) -> None:
    with pytest.raises(UsageError, match="not an https address"):
        check_address(url)


def test_local_and_safe_addresses_pass() -> None:
    check_address("https://example.org/x")
    check_address("http://localhost:8000/x")
    assert fetching.TIMEOUT_S > 0
