"""Running a step: the same bytes with any workers, parts that merge into one run, reports that add up."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from data_tools.corpus.clean import CleanStep
from data_tools.corpus.flow.run_one_corpus_step_in_workers import (
    CollectStep,
    ReadOptions,
    StepOptions,
    merge_outputs,
    merge_parts,
    read_report,
    report_path,
    run_step,
)
from data_tools.corpus.split_sample_shuffle import SampleStep, SplitStep, split_outputs
from data_tools.read.cut_files_into_chunks import TaskPart
from lmtrain.errors import DataError, MissingInputError, StorageError, UsageError
from tests.unit.data_tools.corpus_files import read_jsonl, run, texts, write_jsonl


@pytest.fixture
def inputs(tmp_path: Path) -> list[Path]:
    documents = [{"text": f"document {i}  \n" * (i % 7 + 1), "meta": {"n": i}} for i in range(200)]
    return [
        write_jsonl(tmp_path / "in" / "a.jsonl", documents[:50]),
        write_jsonl(tmp_path / "in" / "b.jsonl", documents[50:]),
    ]


def test_workers_and_blocks_do_not_change_a_byte(tmp_path: Path, inputs: list[Path]) -> None:
    reports = [
        run(CleanStep(), inputs, tmp_path / f"{workers}.jsonl", workers=workers, slice_bytes=700) for workers in (1, 3)
    ]
    run(CleanStep(), inputs, tmp_path / "whole.jsonl")
    assert (tmp_path / "1.jsonl").read_bytes() == (tmp_path / "3.jsonl").read_bytes()
    assert (tmp_path / "1.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert reports[0] == reports[1]
    assert (tmp_path / "1.jsonl.report.json").read_bytes() == (tmp_path / "whole.jsonl.report.json").read_bytes()


def test_metadata_stays_and_the_report_adds_up(tmp_path: Path, inputs: list[Path]) -> None:
    tally = run(CleanStep(), inputs, tmp_path / "out.jsonl").tally
    assert [document["meta"]["n"] for document in read_jsonl(tmp_path / "out.jsonl")] == list(range(200))
    assert (tally.num_in, tally.num_out, tally.dropped.total()) == (200, 200, 0)
    assert tally.changed == {"mended: spaces at line ends": 200}
    assert tally.bytes_in == sum(len(text.encode()) for path in inputs for text in texts(path))
    assert tally.bytes_out == sum(len(text.encode()) for text in texts(tmp_path / "out.jsonl"))
    report = report_path(tmp_path / "out.jsonl")
    assert read_report(report).tally == tally
    for damaged in ("{}", "[]"):
        report.write_text(damaged)
        with pytest.raises(DataError, match=r"is not the report of a step \(.*\)\. Remove it and run the step again"):
            read_report(report)


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("step", [CleanStep(), SampleStep(1 << 62, seed=3)], ids=lambda step: step.name)
def test_merged_parts_are_one_run(tmp_path: Path, inputs: list[Path], step: CleanStep | SampleStep, count: int) -> None:
    run(step, inputs, tmp_path / "one.jsonl")
    for number in reversed(range(count)):
        run(step, inputs, tmp_path / "many.jsonl", part=f"{number}/{count}")
    assert merge_outputs(tmp_path / "many.jsonl") == [(tmp_path / "many.jsonl", count)]
    assert (tmp_path / "many.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert (tmp_path / "many.jsonl.report.json").read_bytes() == (tmp_path / "one.jsonl.report.json").read_bytes()
    assert not list(tmp_path.glob("*.part-*"))


def test_parts_of_a_split_merge_file_by_file(tmp_path: Path, inputs: list[Path]) -> None:
    step = SplitStep((0.6, 0.2, 0.2))
    for folder, parts in (("one", [TaskPart()]), ("many", [TaskPart(i, 3) for i in range(3)])):
        for part in parts:
            output = tmp_path / folder
            work = StepOptions(reading=ReadOptions(part=part))
            run_step(step, inputs, split_outputs(output), work, output / "split.report.json")
    merge_outputs(tmp_path / "many")
    names = ["split.report.json", "test.jsonl", "train.jsonl", "valid.jsonl"]
    assert sorted(path.name for path in (tmp_path / "many").iterdir()) == names
    for name in names:
        assert (tmp_path / "many" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


def test_parts_are_removed_only_after_the_merge(
    tmp_path: Path, inputs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        run(CollectStep(), inputs, tmp_path / "out.jsonl", part=f"{number}/3")

    def fail(*paths: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(StorageError, match="the disk is full"):
            merge_parts(tmp_path / "out.jsonl")
    assert merge_parts(tmp_path / "out.jsonl") == 3
    assert len(texts(tmp_path / "out.jsonl")) == 200


def test_a_missing_part_is_named(tmp_path: Path, inputs: list[Path]) -> None:
    for number in (0, 2):
        run(CollectStep(), inputs, tmp_path / "out.jsonl", part=f"{number}/3")
    with pytest.raises(MissingInputError, match=r"lacks 1 parts, such as out\.part-00001-of-00003\.jsonl"):
        merge_parts(tmp_path / "out.jsonl")
    run(CollectStep(), inputs, tmp_path / "out.jsonl", part="1/4")
    with pytest.raises(DataError, match="runs with 00003 and 00004 parts"):
        merge_parts(tmp_path / "out.jsonl")
    with pytest.raises(MissingInputError, match="has no part files"):
        merge_parts(tmp_path / "other.jsonl")


def test_a_bad_line_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n{"text": 1}\n')
    for workers in (1, 2):
        with pytest.raises(DataError, match=r"a\.jsonl:2"):
            run(CollectStep(), [path], tmp_path / "out.jsonl", workers=workers)
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]
    tally = run(CollectStep(), [path], tmp_path / "out.jsonl", on_error="skip").tally
    assert (tally.num_in, tally.num_out) == (2, 1)
    assert tally.dropped == {"bad line: the value of 'text' is not text": 1}


def test_an_input_is_never_overwritten(tmp_path: Path, inputs: list[Path]) -> None:
    with pytest.raises(UsageError, match="also an input"):
        run(CollectStep(), inputs, inputs[1])
    with pytest.raises(UsageError, match="at least 1"):
        run(CollectStep(), inputs, tmp_path / "out.jsonl", workers=0)


def test_another_key_holds_the_text(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"body": "one\r\ntwo"}])
    run(CleanStep(), [path], tmp_path / "out.jsonl", key="body")
    assert read_jsonl(tmp_path / "out.jsonl") == [{"body": "one\ntwo"}]
