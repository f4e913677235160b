"""Documents by position: each in one part, however the input is cut; bad input is treated as in preprocessing."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from data_tools.corpus.flow.run_one_corpus_step_in_workers import (
    OFFSET_BITS,
    CollectStep,
    ReadOptions,
    find_step_sources,
    read_documents,
    to_line,
)
from data_tools.preprocess.preprocess_pipeline import Options, preprocess
from data_tools.read.cut_files_into_chunks import WHOLE_PART, SizeLimits, TaskPart
from data_tools.read.parse_chunks_and_bad_lines import OnError
from lmtrain.errors import LmtrainError, UsageError
from lmtrain.tokenizer.train import train_bpe
from tests.unit.data_tools.corpus_files import read_jsonl, run, write_jsonl

PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress
}  # fmt: skip
TOKENIZER = train_bpe(["a few words to learn from"], 280)


def positions(files: list[Path], part: TaskPart = WHOLE_PART, slice_bytes: int = 1 << 20) -> list[tuple[int, str]]:
    reading = ReadOptions(limits=SizeLimits(slice_bytes), part=part)
    documents = read_documents(find_step_sources(files), reading, lambda bad: None)
    return [(at, document["text"]) for at, document in documents]


@settings(max_examples=40)
@given(
    lengths=st.lists(st.lists(st.integers(0, 60), max_size=12), min_size=1, max_size=4),
    count=st.integers(1, 7),
    slice_bytes=st.integers(1, 200),
)
def test_every_document_is_in_one_part_whatever_the_parts_and_chunks(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[list[int]], count: int, slice_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("lines")
    files = [
        write_jsonl(folder / f"{i}.jsonl", [{"text": f"{i}.{k} " + "ä" * length} for k, length in enumerate(some)])
        for i, some in enumerate(lengths)
    ]
    whole = positions(files)
    assert [item for i in range(count) for item in positions(files, TaskPart(i, count), slice_bytes)] == whole
    assert len(whole) == sum(map(len, lengths))
    assert [at for at, _ in whole] == sorted({at for at, _ in whole})


@pytest.mark.parametrize("suffix", PACK)
def test_packed_files_give_the_same_documents_to_one_part(tmp_path: Path, suffix: str) -> None:
    plain = write_jsonl(tmp_path / "a.jsonl", [{"text": f"{i}" * 50} for i in range(100)])
    packed = tmp_path / f"a.jsonl{suffix}"
    packed.write_bytes(PACK[suffix](plain.read_bytes()))
    assert positions([packed], slice_bytes=300) == positions([plain])
    assert [bool(positions([packed], TaskPart(i, 3), 300)) for i in range(3)] == [True, False, False]


def test_a_position_names_the_file_and_the_byte(tmp_path: Path) -> None:
    files = [write_jsonl(tmp_path / name, [{"text": "x"}, {"text": "y"}]) for name in ("a.jsonl", "b.jsonl")]
    files[0].write_bytes(b"\xef\xbb\xbf" + files[0].read_bytes())
    found = [divmod(at, 1 << OFFSET_BITS) for at, _ in positions(files)]
    assert found == [(0, 0), (0, 17), (1, 0), (1, 14)]


def test_standard_input_cannot_be_read_again() -> None:
    with pytest.raises(UsageError, match="Give files"):
        find_step_sources(["-"])


def test_other_keys_of_a_document_are_kept(tmp_path: Path) -> None:
    line = b'{"text": "a", "odd": "\\ud800", "n": [1.5, null, 12345678901234567890]}\n'
    (tmp_path / "a.jsonl").write_bytes(line)
    ((_, document),) = read_documents(find_step_sources([tmp_path / "a.jsonl"]), ReadOptions(), lambda bad: None)
    assert to_line(document) == line


GOOD = b'{"text": "good"}\n'
ODD: dict[str, bytes] = {  # file names and what is in them
    "mark.jsonl": b"\xef\xbb\xbf" + GOOD,
    "ends.jsonl": b'{"text": "a\xe2\x80\xa8b"}\r\n\n  \n{"text": "\\ud83d\\ude00"}',
    "empty.jsonl": b"",
    "empty.jsonl.gz": b"",
    "empty.txt": b"",
    "twice.jsonl": b'{"text": "a", "n": 1, "n": 2}\n',
    "text.txt": b"one text\nof two lines",
    "odd.txt": b"one\ntwo \xff",
    "long.txt": b"x" * 2000,
    "notes.md": b"text",
    "none": b"text",
    "bad.parquet": b"PAR1",
    "bomb.jsonl.gz": gzip.compress(bytes(80 << 20), 9),
    "bomb.txt.xz": lzma.compress(bytes(80 << 20), preset=0),
    "damaged.jsonl.bz2": bz2.compress(GOOD * 100) + b"garbage",
    **{f"short.jsonl{suffix}": pack(GOOD * 1000)[:-9] for suffix, pack in PACK.items()},
    **{f"fine.jsonl{suffix}": pack(GOOD) for suffix, pack in PACK.items()},
    **{f"fine.txt{suffix}": pack(b"text") for suffix, pack in PACK.items()},
    "fine.json.gz": gzip.compress(GOOD),
    "fine.zst": zstandard.compress(GOOD),
    **{
        f"{name}.jsonl": GOOD + line + b"\n" + GOOD
        for name, line in {
            "json": b'{"text": "a"',
            "utf8": b'{"text": "\xff"}',
            "list": b'["text"]',
            "number": b'{"text": 5}',
            "key": b'{"body": "a"}',
            "keys": b'{"text": "a", "text": "b"}',
            "nan": b'{"text": "a", "n": NaN}',
            "digits": b'{"text": "a", "n": ' + b"9" * 900 + b"}",
            "half": b'{"text": "\\ud800"}',
            "half_beside": b'{"text": "a", "n": "\\ud800"}',
            "deep": b"[" * 900,
            "long": b'{"text": "' + b"a" * 2000 + b'"}',
        }.items()
    },
}


def outcome(work: Callable[[], int]) -> int | tuple[str, str]:
    """How many documents there are, or the refusal."""
    try:
        return work()
    except LmtrainError as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("on_error", [OnError.STOP, OnError.SKIP])
@pytest.mark.parametrize("name", [*ODD, "rows.parquet"])
def test_corpus_steps_and_preprocessing_accept_and_refuse_the_same_files(
    tmp_path: Path, name: str, on_error: OnError
) -> None:
    path = tmp_path / name
    if name == "rows.parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "b"]}), path)
    else:
        path.write_bytes(ODD[name])
    inputs = [path, write_jsonl(tmp_path / "last.jsonl", [{"text": "words"}])]
    counts = []

    def collect() -> int:
        tally = run(CollectStep(), inputs, tmp_path / "out.jsonl", on_error=on_error, max_doc_bytes=1000).tally
        counts.append({cause.removeprefix("bad line: "): number for cause, number in tally.dropped.items()})
        assert len(read_jsonl(tmp_path / "out.jsonl")) == tally.num_out
        return tally.num_out

    def encode() -> int:
        options = Options(on_error=on_error, limits=SizeLimits(max_doc_bytes=1000))
        summary = preprocess(inputs, TOKENIZER, tmp_path / "data", options)
        counts.append(summary.rejects)
        return summary.num_documents

    collected = outcome(collect)
    assert collected == outcome(encode)
    assert counts[1:] == counts[:1]
