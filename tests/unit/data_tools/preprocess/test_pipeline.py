"""The same files for any number of workers; shards join to the whole; keys stay aligned; complete or no output."""

from __future__ import annotations

import gzip
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from data_tools.preprocess.length_and_script_filters import Filters
from data_tools.preprocess.preprocess_pipeline import Options, Progress, Summary, preprocess
from data_tools.read.cut_files_into_chunks import SizeLimits
from data_tools.read.parse_chunks_and_bad_lines import OnError
from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.data.store.indexed_dataset import IndexedDataset
from lmtrain.data.store.merge_split_verify_datasets import merge, verify
from lmtrain.errors import DataError, OutputError, UsageError
from lmtrain.runtime import compiled_helpers
from lmtrain.runtime.machine.pip_install_hint import install_command
from lmtrain.tokenizer.bulk_encoding import dtype_for
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.tokenizer.train import train_bpe, train_wordpiece
from tests.unit.data.writing import add_document

TEXTS = [f"document {i} says: the cat's {i % 5} mats — naïve\u2028\n" * (i % 7) for i in range(60)]
TOKENIZER = train_bpe(TEXTS, 300)
SMALL = SizeLimits(slice_bytes=700)


def lines(texts: list[str], **more: Any) -> bytes:
    return "".join(json.dumps({"text": t} | more, ensure_ascii=False) + "\n" for t in texts).encode()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """One document after the other in every kind of file that there is."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines(TEXTS[:20]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS[20:30])))
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(lines(TEXTS[30:40])))
    table = pyarrow.table({"id": list(range(10)), "text": TEXTS[40:50]})
    pyarrow.parquet.write_table(table, folder / "d.parquet", row_group_size=4)
    for number, text in enumerate(TEXTS[50:58]):
        (folder / f"e{number}.txt").write_text(text)
    (folder / "f.txt.gz").write_bytes(gzip.compress(TEXTS[58].encode()))
    (folder / "g.txt.zst").write_bytes(zstandard.compress(TEXTS[59].encode()))
    return folder


def run(inputs: Path, output: Path, **options: Any) -> Summary:
    return preprocess([inputs], TOKENIZER, output, Options(**{"limits": SMALL} | options))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def documents(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset.open(prefix)
    verify(dataset)
    return [dataset.document(d).tolist() for d in range(dataset.num_documents)]


def expected(texts: list[str]) -> list[list[int]]:
    return [ids + [0] * bool(ids) for ids in TOKENIZER.encode_batch(texts)]


@pytest.mark.parametrize("looked_at", [False, True])
def test_the_number_of_workers_does_not_matter(corpus: Path, tmp_path: Path, looked_at: bool) -> None:
    """Threads with the compiled encoder; processes where filters or the twin need the interpreter."""
    made = []
    for workers in (1, 3):
        output = tmp_path / str(workers) / "data"
        filters = Filters(min_chars=1) if looked_at else Filters()
        summary = run(corpus, output, workers=workers, filters=filters)
        assert (summary.num_documents, summary.files[0]) == (51 if looked_at else 60, str(output) + ".bin")
        made.append(files(output.parent))
    assert made[0] == made[1]
    assert sorted(made[0]) == ["data.bin", "data.blocks", "data.idx", "data.json", "data.tokenizer.json"]


def test_what_is_written(corpus: Path, tmp_path: Path) -> None:
    calls: list[Progress] = []
    summary = preprocess([corpus], TOKENIZER, tmp_path / "out", Options(limits=SMALL), report=calls.append)
    assert documents(tmp_path / "out") == expected(TEXTS)
    info = IndexedDataset.open(tmp_path / "out").info
    assert info is not None
    assert info.tokenizer_fingerprint == TOKENIZER.fingerprint
    assert info.num_bytes == summary.num_bytes == sum(len(text.encode()) for text in TEXTS)
    assert Tokenizer.load(tmp_path / "out.tokenizer.json").fingerprint == TOKENIZER.fingerprint
    total = sum(path.stat().st_size for path in corpus.iterdir())
    assert (calls[-1].done_bytes, calls[-1].total_bytes) == (total, total)
    assert calls[-1].num_tokens == summary.num_tokens == info.num_tokens
    assert [call.done_bytes for call in calls] == sorted(call.done_bytes for call in calls)
    lengths = [len(ids) for ids in expected(TEXTS)]
    bins = {name: count for name, count in summary.lengths.items() if count}
    assert bins["0"] == lengths.count(0)
    assert bins["16-31"] == sum(16 <= length <= 31 for length in lengths)
    assert sum(bins.values()) == 60


def test_the_bytes_are_those_of_megatrons_rules(tmp_path: Path) -> None:
    """An end is put behind documents with tokens only; an empty document has no sequence."""
    texts = ["ab", "", "c"]
    (tmp_path / "a.jsonl").write_bytes(lines(texts))
    run(tmp_path / "a.jsonl", tmp_path / "out")
    ids = [i for text in texts for i in TOKENIZER.encode(text) + [0] * bool(text)]
    sizes = [len(TOKENIZER.encode(text)) + 1 for text in texts if text]
    assert (tmp_path / "out.bin").read_bytes() == np.array(ids, "<u2").tobytes()
    assert (tmp_path / "out.idx").read_bytes() == (
        b"MMIDIDX\x00\x00" + np.array([1], "<u8").tobytes() + b"\x08" + np.array([2, 4], "<u8").tobytes()
        + np.array(sizes, "<i4").tobytes() + np.array([0, 2 * sizes[0]], "<i8").tobytes()
        + np.array([0, 1, 1, 2], "<i8").tobytes()
    )  # fmt: skip


def test_a_begin_token_stands_before_each_document_that_has_text(corpus: Path, tmp_path: Path) -> None:
    begin = {"id": 300, "content": "<s>", "special": True, **dict.fromkeys(("lstrip", "rstrip", "normalized"), False)}
    begin["single_word"] = False
    tree = TOKENIZER.tree | {"added_tokens": [*TOKENIZER.tree["added_tokens"], begin]}
    tokenizer = Tokenizer.from_bytes(json.dumps(tree).encode())
    for name, begins in (("plain", False), ("begun", True)):
        for eod in (True, False):
            options = Options(limits=SMALL, prepend_bos=begins, append_eod=eod)
            preprocess([corpus], tokenizer, tmp_path / f"{name}{eod}", options)
    for eod in (True, False):
        plain, begun = (IndexedDataset.open(tmp_path / f"{name}{eod}") for name in ("plain", "begun"))
        assert begun.num_documents == plain.num_documents
        for number in range(plain.num_documents):
            ids = plain.document(number).tolist()
            assert begun.document(number).tolist() == [300] * bool(ids) + ids
    with pytest.raises(UsageError, match="--prepend-bos needs a beginning-of-text token, but the tokenizer has none"):
        preprocess([corpus], TOKENIZER, tmp_path / "none", Options(prepend_bos=True))
    with pytest.raises(UsageError, match="--prepend-bos is for whole documents"):
        preprocess([corpus], tokenizer, tmp_path / "none", Options(prepend_bos=True, split_sentences=True))


def test_a_slow_tokenizer_gives_one_notice(corpus: Path, tmp_path: Path) -> None:
    slow = Tokenizer.from_bytes(json.dumps(TOKENIZER.tree | {"normalizer": {"type": "NFC"}}).encode())
    said: list[str] = []
    for name, tokenizer in (("slow", slow), ("fast", TOKENIZER)):
        preprocess([corpus], tokenizer, tmp_path / name, Options(limits=SMALL, workers=1), notify=said.append)
    assert [notice[:30] for notice in said] == ["this tokenizer is slow because"] * (1 if compiled_helpers.lib else 2)


def test_ends_of_documents(corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path / "bare", append_eod=False)
    assert TOKENIZER.eod_id not in IndexedDataset.open(tmp_path / "bare").tokens.tolist()
    wordpiece = train_wordpiece(TEXTS, 100, lowercase=True)
    preprocess([corpus], wordpiece, tmp_path / "words")
    assert IndexedDataset.open(tmp_path / "words").document(1).tolist() == wordpiece.encode(TEXTS[1])
    with pytest.raises(UsageError, match="--no-append-eod"):
        preprocess([corpus], wordpiece, tmp_path / "none", Options(append_eod=True))


def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines(TEXTS))))
    summary = preprocess(["-"], TOKENIZER, tmp_path / "out", Options(limits=SMALL, workers=2))
    assert summary.num_documents == 60
    assert documents(tmp_path / "out") == expected(TEXTS)


def test_several_keys_stay_side_by_side(tmp_path: Path) -> None:
    rows = [{"text": TEXTS[i], "title": f"title {i}"} for i in range(1, 7)]
    rows[2]["title"] = None  # type: ignore[assignment]
    del rows[4]["text"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = run(tmp_path / "a.jsonl", tmp_path / "out", keys=("text", "title"), on_error=OnError.SKIP)
    good = [1, 2, 4, 6]
    assert documents(tmp_path / "out_text") == expected([TEXTS[i] for i in good])
    assert documents(tmp_path / "out_title") == expected([f"title {i}" for i in good])
    assert summary.num_documents == 4
    assert summary.rejects == {"the value of 'title' is not text": 1, "no key 'text'": 1}
    table = pyarrow.table({key: [row.get(key) for row in rows] for key in rows[0]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    long = Filters(min_tokens=len(TOKENIZER.encode(TEXTS[1])) + 1)
    summary = run(tmp_path / "a.parquet", tmp_path / "p", keys=("text", "title"), on_error=OnError.SKIP, filters=long)
    kept = [i for i in good if len(TOKENIZER.encode(TEXTS[i])) >= (long.min_tokens or 0)]
    assert documents(tmp_path / "p_title") == expected([f"title {i}" for i in kept])
    assert summary.filtered == {"min_tokens": len(good) - len(kept)}
    (tmp_path / "b.txt").write_text("x")
    with pytest.raises(UsageError, match="plain text without keys"):
        run(tmp_path / "b.txt", tmp_path / "out2", keys=("text", "title"))
    with pytest.raises(UsageError, match="once"):
        Options(keys=("a", "a"))


def test_the_bytes_of_each_key_add_up_over_the_shards(tmp_path: Path) -> None:
    rows = [{"text": text, "title": f"title {i}"} for i, text in enumerate(TEXTS)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = run(tmp_path / "a.jsonl", tmp_path / "out", keys=("text", "title"), shard_tokens=500)
    assert summary.num_shards > 2
    for key in ("text", "title"):
        infos = [IndexedDataset.open(tmp_path / f"out_{key}-{i:05d}").info for i in range(summary.num_shards)]
        assert sum(info.num_bytes for info in infos if info) == sum(len(str(row[key]).encode()) for row in rows)


@pytest.mark.parametrize("workers", [1, 2])
def test_shards_put_together_are_the_whole(corpus: Path, tmp_path: Path, workers: int) -> None:
    run(corpus, tmp_path / "whole")
    summary = run(corpus, tmp_path / "parts", shard_tokens=500, workers=workers)
    prefixes = sorted(path.with_suffix("") for path in tmp_path.glob("parts-*.idx"))
    assert [prefix.name for prefix in prefixes] == [f"parts-{i:05d}" for i in range(summary.num_shards)]
    assert summary.num_shards >= 3
    sizes = [IndexedDataset.open(prefix).num_tokens for prefix in prefixes]
    assert min(sizes[:-1]) >= 500
    merge(prefixes, tmp_path / "joined")
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"joined{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()
    infos = [IndexedDataset.open(prefix).info for prefix in prefixes]
    assert sum(info.num_bytes for info in infos if info) == summary.num_bytes
    with pytest.raises(OutputError, match=r"parts-00000.* is there already"):
        run(corpus, tmp_path / "parts", shard_tokens=700)
    again = run(corpus, tmp_path / "parts", shard_tokens=1200, overwrite=True)
    assert len(list(tmp_path.glob("parts-*.idx"))) == again.num_shards < summary.num_shards


def test_filters_are_counted(tmp_path: Path) -> None:
    texts = ["short", "x" * 200, "что-то на русском языке", "in plain letters", "", "of several words here and there"]
    (tmp_path / "a.jsonl").write_bytes(lines(texts))
    more = len(TOKENIZER.encode(texts[3])) + 1
    filters = Filters(min_chars=6, max_chars=100, scripts=(("latin", 0.9),), min_tokens=more)
    summary = run(tmp_path / "a.jsonl", tmp_path / "out", filters=filters)
    assert summary.filtered == {"min_chars": 2, "max_chars": 1, "script latin": 1, "min_tokens": 1}
    assert documents(tmp_path / "out") == expected(texts[5:])
    assert summary.num_bytes == len(texts[5])
    with pytest.raises(DataError, match="filtered documents: 6"):
        run(tmp_path / "a.jsonl", tmp_path / "none", filters=Filters(max_tokens=-1))


def test_the_output_is_guarded(corpus: Path, tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "out", dtype_for(300)) as writer:
        with pytest.raises(OutputError, match="in use") as caught:
            run(corpus, tmp_path / "out")
        assert caught.value.exit_code == 73
        add_document(writer, [])
    before = files(tmp_path / "corpus")
    with pytest.raises(OutputError, match="--overwrite"):
        run(corpus, tmp_path / "out")
    assert not (tmp_path / ".out.tmp").exists()
    run(corpus, tmp_path / "out", overwrite=True)
    assert IndexedDataset.open(tmp_path / "out").num_documents == 60
    assert files(tmp_path / "corpus") == before


def test_no_text_at_all(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="holds no text"):
        run(tmp_path / "a.txt", tmp_path / "out")
    with pytest.raises(UsageError, match="--workers=0"):
        Options(workers=0)


def test_keys_are_columns_of_parquet(tmp_path: Path) -> None:
    texts = ["same text"] * 50 + [None, *TEXTS[:3]]
    table = pyarrow.table({"body": texts, "n": list(range(54))})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    summary = run(tmp_path / "a.parquet", tmp_path / "out", keys=("body",), on_error=OnError.SKIP)
    assert documents(tmp_path / "out") == expected([text for text in texts if text is not None])
    assert summary.rejects == {"the value of 'body' is not text": 1}
    (reject,) = (tmp_path / "out.rejects.jsonl").read_text().splitlines()
    assert json.loads(reject)["row"] == 51
    with pytest.raises(DataError, match=r"row 51: the value of 'body' is not text"):
        run(tmp_path / "a.parquet", tmp_path / "out2", keys=("body",))
    with pytest.raises(DataError, match="no column 'text', only body, n"):
        run(tmp_path / "a.parquet", tmp_path / "out2")
    with pytest.raises(DataError, match="has int64, not text, in its column 'n'"):
        run(tmp_path / "a.parquet", tmp_path / "out2", keys=("n",))
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    with pytest.raises(DataError, match="cannot be read as"):
        run(tmp_path / "b.parquet", tmp_path / "out2")


def test_a_row_may_have_as_many_bytes_as_a_document(tmp_path: Path) -> None:
    texts = ["é" * 100, "é" * 101, "€" * 67, "x" * 200, "x" * 201]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    limits = SizeLimits(max_doc_bytes=200)
    summary = run(tmp_path / "a.parquet", tmp_path / "out", limits=limits, on_error=OnError.SKIP)
    assert documents(tmp_path / "out") == expected([texts[0], texts[3]])
    assert summary.rejects == {"longer than a document may be": 3}


def test_a_package_that_is_missing_is_named(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package, extra, name in (("zstandard", "zst", "c.jsonl.zst"), ("pyarrow", "parquet", "d.parquet")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(UsageError, match=re.escape(install_command(extra))):
            run(corpus / name, tmp_path / "out")
