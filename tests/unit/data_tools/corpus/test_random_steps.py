"""Split, sample and shuffle: pure functions of seed and document, whatever the memory and the parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_tools.corpus.flow.run_one_corpus_step_in_workers import (
    ReadOptions,
    Report,
    StepOptions,
    merge_outputs,
    read_report,
    report_path,
    run_step,
)
from data_tools.corpus.split_sample_shuffle import (
    SplitStep,
    draw_number,
    sample_documents,
    shuffle,
    split_outputs,
)
from data_tools.read.cut_files_into_chunks import TaskPart
from data_tools.read.parse_chunks_and_bad_lines import OnError
from lmtrain.errors import DataError, UsageError
from tests.unit.data_tools.corpus_files import read_jsonl, texts, write_jsonl


@pytest.fixture
def inputs(tmp_path: Path) -> list[Path]:
    documents = [{"text": f"text {i} " + "x" * (i % 90), "id": i // 2} for i in range(2000)]
    return [
        write_jsonl(tmp_path / "in" / "a.jsonl", documents[:700]),
        write_jsonl(tmp_path / "in" / "b.jsonl", documents[700:]),
    ]


def shuffled(inputs: list[Path], output: Path, seed: int = 0, memory_bytes: int = 1 << 28, part: str = "0/1") -> Report:
    work = StepOptions(reading=ReadOptions(part=TaskPart.parse(part)))
    return shuffle(inputs, output, work, report_path(output), seed, memory_bytes)


def test_a_shuffle_keeps_every_document_and_depends_on_the_seed_only(tmp_path: Path, inputs: list[Path]) -> None:
    before = [text for path in inputs for text in texts(path)]
    tally = shuffled(inputs, tmp_path / "a.jsonl").tally
    shuffled(inputs, tmp_path / "b.jsonl", memory_bytes=4000)
    shuffled(inputs, tmp_path / "c.jsonl", seed=1)
    said: list[tuple[str, int]] = []
    options = StepOptions(report=lambda *progress: said.append(progress))
    shuffle(inputs, tmp_path / "d.jsonl", options, report_path(tmp_path / "d.jsonl"), seed=0)
    assert said == [("shuffle", 1024)]
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert (tally.num_in, tally.num_out) == (2000, 2000)
    a, c = texts(tmp_path / "a.jsonl"), texts(tmp_path / "c.jsonl")
    assert sorted(a) == sorted(c) == sorted(before)
    places = np.argsort(np.argsort([before.index(text) for text in a]))
    assert abs(np.corrcoef(places, np.arange(2000))[0, 1]) < 0.08
    assert sum(x == y for x, y in zip(a, c, strict=True)) < 20
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


@pytest.mark.parametrize("count", [2, 7])
def test_merged_parts_of_a_shuffle_are_one_shuffle(tmp_path: Path, inputs: list[Path], count: int) -> None:
    shuffled(inputs, tmp_path / "one.jsonl", seed=5)
    for number in range(count):
        shuffled(inputs, tmp_path / "many.jsonl", 5, 30_000, f"{number}/{count}")
    merge_outputs(tmp_path / "many.jsonl")
    assert (tmp_path / "many.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert (tmp_path / "many.jsonl.report.json").read_bytes() == (tmp_path / "one.jsonl.report.json").read_bytes()


def test_a_bad_line_is_counted_once_whatever_the_parts(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": f"text {i}"} for i in range(20)] + [{"text": 1}])
    for output, count in ((tmp_path / "one.jsonl", 1), (tmp_path / "many.jsonl", 3)):
        for number in range(count):
            work = StepOptions(reading=ReadOptions(on_error=OnError.SKIP, part=TaskPart(number, count)))
            shuffle([path], output, work, report_path(output), seed=0)
    merge_outputs(tmp_path / "many.jsonl")
    report = read_report(report_path(tmp_path / "many.jsonl"))
    assert report == read_report(report_path(tmp_path / "one.jsonl"))
    assert (report.tally.num_in, report.tally.dropped.total()) == (21, 1)


def split(inputs: list[Path], folder: Path, step: SplitStep) -> dict[str, list[dict[str, object]]]:
    run_step(step, list(inputs), split_outputs(folder), StepOptions(), folder / "split.report.json")
    return {name: read_jsonl(folder / f"{name}.jsonl") for name in ("train", "valid", "test")}


def test_a_split_has_the_shares_asked_for_and_keeps_equals_together(tmp_path: Path, inputs: list[Path]) -> None:
    found = split(inputs, tmp_path / "a", SplitStep((0.8, 0.15, 0.05), seed=2, by="id"))
    assert {name: len(rows) / 2000 for name, rows in found.items()} == pytest.approx(
        {"train": 0.8, "valid": 0.15, "test": 0.05}, abs=0.03
    )
    ids = [{row["id"] for row in rows} for rows in found.values()]
    assert sum(map(len, ids)) == len(set.union(*ids)) == 1000


@pytest.mark.parametrize("name", [0, ""])
def test_an_empty_or_zero_id_is_an_id(tmp_path: Path, name: int | str) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": f"text {i}", "id": name} for i in range(20)])
    found = split([path], tmp_path / "out", SplitStep((0.4, 0.3, 0.3), by="id"))
    assert sorted(len(rows) for rows in found.values()) == [0, 0, 20]


def test_equal_texts_fall_on_one_side_wherever_they_stand(tmp_path: Path, inputs: list[Path]) -> None:
    backwards = write_jsonl(tmp_path / "back.jsonl", [row for path in inputs for row in read_jsonl(path)][::-1])
    step = SplitStep((0.5, 0.25, 0.25))
    one, two = split(inputs, tmp_path / "a", step), split([backwards], tmp_path / "b", step)
    assert all(one[name] == two[name][::-1] for name in one)


def test_a_share_of_nothing_is_empty(tmp_path: Path, inputs: list[Path]) -> None:
    found = split(inputs, tmp_path / "a", SplitStep((1.0, 0.0, 0.0)))
    assert [len(rows) for rows in found.values()] == [2000, 0, 0]


def sampled(inputs: list[Path], output: Path, *, fraction: float | None = None, count: int | None = None) -> list[str]:
    sample_documents(inputs, output, StepOptions(), fraction, count, seed=4)
    return texts(output)


@pytest.mark.parametrize("count", [1, 123, 2000, 5000])
def test_a_sample_has_the_size_asked_for_in_order(tmp_path: Path, inputs: list[Path], count: int) -> None:
    before = [text for path in inputs for text in texts(path)]
    found = sampled(inputs, tmp_path / "out.jsonl", count=count)
    assert len(found) == min(count, 2000)
    assert [text for text in before if text in set(found)] == found


def test_a_larger_sample_holds_the_smaller(tmp_path: Path, inputs: list[Path]) -> None:
    small = sampled(inputs, tmp_path / "a.jsonl", fraction=0.1)
    large = sampled(inputs, tmp_path / "b.jsonl", fraction=0.3)
    assert set(small) < set(large)
    assert len(small) == pytest.approx(200, abs=50)
    assert len(large) == pytest.approx(600, abs=80)
    with pytest.raises(DataError, match="sample leaves none of 2000 documents: 2000 not drawn"):
        sampled(inputs, tmp_path / "c.jsonl", fraction=0.0)
    with pytest.raises(DataError, match="sample leaves none of 2000 documents: 2000 not drawn"):
        sampled(inputs, tmp_path / "c.jsonl", count=0)
    assert not (tmp_path / "c.jsonl").exists()
    assert len(sampled(inputs, tmp_path / "d.jsonl", fraction=1.0)) == 2000


def test_purposes_draw_different_numbers() -> None:
    assert draw_number(1, "split", b"x") != draw_number(1, "sample", b"x")
    assert draw_number(1, "split", b"x") != draw_number(2, "split", b"x")
    assert draw_number(-1, "split", b"x") == draw_number(-1, "split", b"x")


def test_what_makes_no_sense_is_refused(tmp_path: Path, inputs: list[Path]) -> None:
    with pytest.raises(UsageError, match="--ratios"):
        SplitStep((0.5, 0.4, 0.2))
    with pytest.raises(UsageError, match="--by=url"):
        SplitStep((1.0, 0.0, 0.0), by="url")
    with pytest.raises(UsageError, match="both say how much is drawn"):
        sample_documents(inputs, tmp_path / "out", StepOptions(), fraction=0.1, count=3, seed=0)
    with pytest.raises(UsageError, match="--fraction=2"):
        sample_documents(inputs, tmp_path / "out", StepOptions(), fraction=2.0, count=None, seed=0)
    options = StepOptions(reading=ReadOptions(part=TaskPart(0, 2)))
    with pytest.raises(UsageError, match="--count needs all documents"):
        sample_documents(inputs, tmp_path / "out", options, fraction=None, count=3, seed=0)
    with pytest.raises(UsageError, match="also an input"):
        shuffled(inputs, inputs[0])
