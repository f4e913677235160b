"""Every kind of bad line, by every policy: named by file, line and byte, counted by cause, never lost silently."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from data_tools.preprocess.preprocess_pipeline import Options, Summary, preprocess
from data_tools.read.cut_files_into_chunks import Chunk, SizeLimits
from data_tools.read.find_input_files import STDIN, find_sources
from data_tools.read.parse_chunks_and_bad_lines import BadLine, BadLines, OnError, SourceTexts
from lmtrain.data.store.indexed_dataset import IndexedDataset
from lmtrain.errors import DataError
from lmtrain.tokenizer.train import train_bpe
from tests.marks import wide

TOKENIZER = train_bpe(["some text to learn a few words from"], 280)
PACK: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "zst": zstandard.compress}
GOOD = '{"text": "é"}\n'.encode()
BAD = [  # the line, the byte that is named, the cause
    (b'{"text": "a"', 12, "not valid JSON"),
    (b"nonsense", 0, "not valid JSON"),
    (b'{"text": "a"} x', 14, "not valid JSON"),
    (b'{"n": NaN, "text": "a"}', 0, "not valid JSON"),
    (b'{"n": ' + b"9" * 5000 + b', "text": "a"}', 0, "not valid JSON"),
    (b'{"n": ' + b"[" * 5000 + b"]" * 5000 + b', "text": "a"}', 0, "not valid JSON"),
    (b'["text"]', 0, "not a JSON object"),
    (b'"text"', 0, "not a JSON object"),
    (b'{"body": "a"}', 0, "no key 'text'"),
    (b'{"text": "a", "text": "b"}', 0, "the key 'text' appears twice"),
    (b'{"text": null}', 0, "the value of 'text' is not text"),
    (b'{"text": 1}', 0, "the value of 'text' is not text"),
    (b'{"text": ["a"]}', 0, "the value of 'text' is not text"),
    (b'{"text": {"text": "a"}}', 0, "the value of 'text' is not text"),
    (b'{"text": "\\ud800"}', 0, "the text holds a lone surrogate, which is no character"),
    (b'{"text": "a\xff"}', 11, "invalid UTF-8"),
    (b'{"text": "\xed\xa0\x80"}', 10, "invalid UTF-8"),
]
FINE = [  # the line, the text in it
    (b'{"text": "a\\r"}\r', "a\r"),
    (b'{"n": {"text": 1}, "text": "b\\u2028\\ud83d\\ude00"}', "b\u2028😀"),
    ('{"text": "a\u2028b\x85c"}'.encode(), "a\u2028b\x85c"),
    (b'{"text": ""}', ""),
    (b'{"text": "  \\n "}', "  \n "),
]


def run(path: Path, output: Path, **options: Any) -> Summary:
    return preprocess([path], TOKENIZER, output, Options(**options))


def documents(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset.open(prefix)
    return [dataset.document(d).tolist() for d in range(dataset.num_documents)]


def expected(texts: list[str]) -> list[list[int]]:
    return [ids + [0] * bool(ids) for ids in TOKENIZER.encode_batch(texts)]


@pytest.mark.parametrize(("line", "at", "cause"), BAD)
@pytest.mark.parametrize("packed", [False, True])
def test_the_first_bad_line_stops(tmp_path: Path, line: bytes, at: int, cause: str, packed: bool) -> None:
    data = GOOD * 3 + line + b"\n" + GOOD
    path = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    path.write_bytes(gzip.compress(data) if packed else data)
    for slice_bytes in (7, 1 << 20):
        with pytest.raises(DataError, match=cause) as caught:
            run(path, tmp_path / "out" / "data", limits=SizeLimits(slice_bytes), workers=2)
        assert str(caught.value).startswith(f"{path}:4 (byte {3 * len(GOOD) + at}): ")
        assert caught.value.exit_code == 65
        assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(DataError, match=cause) as caught:
        list(SourceTexts(find_sources([path]), "text"))
    assert str(caught.value).startswith(f"{path}:4 (byte {3 * len(GOOD) + at}): ")


@pytest.mark.parametrize(
    ("policy", "slice_bytes", "workers", "packed"),  # every pair of them
    [
        (OnError.SKIP, 7, 1, False), (OnError.SKIP, 1 << 20, 2, True), (OnError.QUARANTINE, 7, 2, True),
        (OnError.QUARANTINE, 1 << 20, 1, True), (OnError.QUARANTINE, 1 << 20, 2, False),
    ],
)  # fmt: skip
def test_the_whole_table_left_out(
    tmp_path: Path, policy: OnError, slice_bytes: int, workers: int, packed: bool
) -> None:
    data, texts, where = b"\xef\xbb\xbf", [], []
    for number, (line, at, _) in enumerate(BAD):
        good, text = FINE[number % len(FINE)]
        where.append((data.count(b"\n") + 1, len(data) + at))
        data += line + b"\n" + good + b"\n \n"
        texts.append(text)
    data += b'{"text": "no end"}'
    path = tmp_path / ("a.jsonl.zst" if packed else "a.jsonl")
    path.write_bytes(zstandard.compress(data) if packed else data)
    summary = run(path, tmp_path / "out", limits=SizeLimits(slice_bytes), workers=workers, on_error=policy)
    assert documents(tmp_path / "out") == expected([*texts, "no end"])
    causes = [cause for _, _, cause in BAD]
    assert summary.rejects == {cause: causes.count(cause) for cause in causes}
    rejects = [json.loads(line) for line in (tmp_path / "out.rejects.jsonl").read_text().split("\n")[:-1]]
    assert [(reject["line"], reject["byte"]) for reject in rejects] == where
    assert [reject["cause"].partition(" (")[0] for reject in rejects] == causes
    assert {reject["file"] for reject in rejects} == {str(path)}
    kept = [content(reject) for reject in rejects]
    assert kept == ([line for line, _, _ in BAD] if policy is OnError.QUARANTINE else [None] * len(BAD))


def content(reject: dict[str, Any]) -> bytes | None:
    if "content_base64" in reject:
        return base64.b64decode(reject["content_base64"])
    return reject["content"].encode() if "content" in reject else None


def test_lines_are_counted_in_each_file_by_itself(tmp_path: Path) -> None:
    """However far behind the last bad line of the file before, and however short its lines."""
    long = b'{"text": "' + b"a" * 50 + b'"}\n'
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(GOOD * 3 + b"nonsense\n" + GOOD)
    (tmp_path / "in" / "b.jsonl").write_bytes(long * 4 + b"nonsense\n" + GOOD)
    run(tmp_path / "in", tmp_path / "out", limits=SizeLimits(7), on_error=OnError.SKIP)
    rejects = [json.loads(line) for line in (tmp_path / "out.rejects.jsonl").read_text().splitlines()]
    assert [(Path(reject["file"]).name, reject["line"]) for reject in rejects] == [("a.jsonl", 4), ("b.jsonl", 5)]


def test_more_bad_lines_than_allowed_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes((GOOD + b"nonsense\n") * 5)
    assert sum(run(tmp_path / "a.jsonl", tmp_path / "out", on_error=OnError.SKIP, max_bad=5).rejects.values()) == 5
    with pytest.raises(DataError, match=r"has 5 bad lines \(5 not valid JSON\), but --max-bad allows 4.*a\.jsonl:10"):
        run(tmp_path / "a.jsonl", tmp_path / "out2", on_error=OnError.SKIP, max_bad=4)
    assert not (tmp_path / "out2.idx").exists()


def test_a_file_that_is_not_json_lines_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_tools.read.parse_chunks_and_bad_lines.MAX_BAD_LINES", 1000)
    (tmp_path / "a.jsonl").write_bytes(b"1\n" * 1001)
    with pytest.raises(DataError, match="not a jsonl file"):
        run(tmp_path / "a.jsonl", tmp_path / "out", on_error=OnError.SKIP)


def test_a_dataset_without_bad_lines_removes_an_old_rejects_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + b"nonsense\n")
    assert run(path, tmp_path / "out", on_error=OnError.SKIP).files[-1].endswith("out.rejects.jsonl")
    path.write_bytes(GOOD)
    run(path, tmp_path / "out", on_error=OnError.SKIP, overwrite=True)
    assert not (tmp_path / "out.rejects.jsonl").exists()


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
@pytest.mark.parametrize("slice_bytes", [10, 64, 1 << 20])
def test_a_long_line_is_passed_over(tmp_path: Path, suffix: str, slice_bytes: int) -> None:
    long, longest = b'{"text": "' + b"b" * 187 + b'"}', b'{"text": "' + b"c" * 188 + b'"}'
    assert (len(long), len(longest)) == (199, 200)
    data = b"\xef\xbb\xbf" + long + b"\n" + longest + b"x\n" + GOOD + longest + b"\n" + b"[" * 5000
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    limits = SizeLimits(slice_bytes, max_doc_bytes=200)
    summary = run(path, tmp_path / "out", limits=limits, on_error=OnError.QUARANTINE)
    assert documents(tmp_path / "out") == expected(["b" * 187, "é", "c" * 188])
    assert summary.rejects == {"longer than a document may be": 2}
    rejects = [json.loads(line) for line in (tmp_path / "out.rejects.jsonl").read_text().splitlines()]
    ends = [i for i, byte in enumerate(data) if byte == 10]
    assert [(r["line"], r["byte"]) for r in rejects] == [(2, ends[0] + 1), (5, ends[3] + 1)]


@pytest.mark.parametrize("suffix", ["txt", "txt.gz"])
def test_text_files_are_one_document_each(tmp_path: Path, suffix: str) -> None:
    def put(name: str, data: bytes) -> None:
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{name}.{suffix}").write_bytes(gzip.compress(data) if suffix == "txt.gz" else data)

    put("a", b"\xef\xbb\xbfone\r\ntwo\n")
    put("b", b"one\ntwo \xff")
    put("c", b"")
    put("d", b"x" * 201)
    put("e", b"x" * 200)
    limits = SizeLimits(max_doc_bytes=200)
    summary = run(tmp_path / "in", tmp_path / "out", on_error=OnError.SKIP, limits=limits)
    assert documents(tmp_path / "out") == expected(["one\r\ntwo\n", "", "x" * 200])
    assert summary.rejects == {"whole file: invalid UTF-8": 1, "whole file: longer than a document may be": 1}
    rejects = [json.loads(line) for line in (tmp_path / "out.rejects.jsonl").read_text().splitlines()]
    assert [(Path(r["file"]).name[0], r["line"], r["byte"]) for r in rejects] == [("b", 2, 8), ("d", 1, 0)]
    with pytest.raises(DataError, match=r"b\.txt(\.gz)?:2 \(byte 8\): invalid UTF-8"):
        run(tmp_path / "in", tmp_path / "out2", limits=limits)


@pytest.mark.parametrize("codec", ["gz", "zst"])
def test_an_archive_that_is_cut_short(tmp_path: Path, codec: str) -> None:
    packed = PACK[codec](GOOD * 100_000)
    path = tmp_path / f"a.jsonl.{codec}"
    path.write_bytes(packed[: len(packed) - 1])
    with pytest.raises(DataError, match="the archive is cut short"):
        run(path, tmp_path / "out")
    summary = run(path, tmp_path / "out", on_error=OnError.SKIP)
    assert summary.rejects == {"the archive is cut short": 1}
    assert 90_000 < summary.num_documents <= 100_000


@pytest.mark.parametrize("codec", ["gz", *wide("zst")])
def test_a_decompression_bomb_is_refused(tmp_path: Path, codec: str) -> None:
    packed = PACK[codec](bytes(64 << 20))
    path = tmp_path / f"a.jsonl.{codec}"
    path.write_bytes(packed * 160)  # 10 GiB of zeros
    with pytest.raises(DataError, match="grows to more than the allowed 250 times its size"):
        run(path, tmp_path / "out", limits=SizeLimits(max_doc_bytes=1 << 40))
    with pytest.raises(DataError, match=r"longer than|250 times"):
        run(path, tmp_path / "out", limits=SizeLimits(max_doc_bytes=1 << 20))


def test_a_document_of_a_gibibyte_is_refused_before_it_is_held(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(GOOD)
        file.truncate(1 << 30)  # a hole, which takes no room on disk
    with pytest.raises(DataError, match=r"a\.jsonl:2 \(byte 15\): longer than a document may be .268435456 bytes"):
        run(path, tmp_path / "out", workers=2)


def test_plain_text_in_a_pipe_gets_the_advice_to_set_the_format() -> None:
    chunk = Chunk(source=0, path=STDIN, kind="jsonl", start=0, stop=9, num_bytes=9)
    with pytest.raises(DataError, match=r"not valid JSON \(x\)\. If it is plain text, add --format txt\.$"):
        BadLines(OnError.STOP).add(chunk, [BadLine(0, 0, "not valid JSON (x)")], 1)


def test_a_text_file_with_two_bad_bytes_is_left_out_as_a_whole_and_counted_so(tmp_path: Path) -> None:
    """The whole file is lost, not a line of it: the summary says so, and which option loses less."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "bad.txt").write_bytes(b"good\n\nb\xffd \xfe\n\ngood")
    (folder / "good.txt").write_bytes(b"fine")
    summary = run(folder, tmp_path / "whole", on_error=OnError.SKIP)
    assert (summary.rejects, summary.num_documents) == ({"whole file: invalid UTF-8": 1}, 1)
    rejects = (tmp_path / "whole.rejects.jsonl").read_text()
    assert json.loads(rejects) == {
        "file": str(folder / "bad.txt"), "line": 3, "byte": 7, "cause": "invalid UTF-8", "left_out_bytes": 17
    }  # fmt: skip
    summary = run(folder, tmp_path / "parts", on_error=OnError.SKIP, text_split="blank-line")
    assert (summary.rejects, summary.num_documents) == ({"invalid UTF-8": 1}, 3)
    (folder / "bad.txt").write_bytes("\N{EURO SIGN}".encode() + b"\xff")
    with pytest.raises(DataError, match="or skip such files, each as a whole: --on-error skip"):
        run(folder, tmp_path / "stopped")
