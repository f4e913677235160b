"""What is at the place of the output of a corpus step stays, unless it is documents and --overwrite was typed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.cli.harness import lmtrain
from tests.unit.data_tools.corpus_files import write_jsonl

STEPS = {
    "clean": ("--rule", "none", "--workers", 1), "dedupe": ("--exact-only", "--workers", 1), "shuffle": (),
    "sample": ("--fraction", 1, "--workers", 1), "decontaminate": ("--against", "against.txt", "--workers", 1),
}  # fmt: skip


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("against.txt").write_text("one two three four five six seven eight nine ten eleven twelve thirteen")
    return write_jsonl(Path("in.jsonl"), [{"text": f"document {i}", "words": i} for i in range(9)])


def facts(path: Path) -> tuple[bytes, int]:
    return path.read_bytes(), path.stat().st_mtime_ns


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("content", [b"\1\0\2\0", b"a text\n", b'{"step": 1, "loss": 2.5}\n', b'{\n "format": "x"\n}'])
def test_a_file_of_another_kind_stays(source: Path, step: str, content: bytes) -> None:
    other = Path("train.bin")
    other.write_bytes(content)
    before = facts(other)
    for more in ((), ("--overwrite",)):
        said = lmtrain("corpus", step, source, "--output", other, *STEPS[step], *more, code=73)
        assert "train.bin is not a file of JSON lines" in said
    assert facts(other) == before
    assert sorted(os.listdir()) == ["against.txt", "in.jsonl", "train.bin"]


@pytest.mark.parametrize("step", STEPS)
def test_documents_are_replaced_when_that_is_typed(source: Path, step: str) -> None:
    words = ("corpus", step, source, "--output", "out.jsonl", *STEPS[step])
    lmtrain(*words)
    made = facts(Path("out.jsonl"))
    assert "out.jsonl is already there" in lmtrain(*words)
    assert facts(Path("out.jsonl")) == made
    assert "--overwrite" in lmtrain(*words, "--key", "text", "--on-error", "skip", code=73)
    assert facts(Path("out.jsonl")) == made
    lmtrain(*words, "--on-error", "skip", "--overwrite")
    assert Path("out.jsonl").stat().st_mtime_ns > made[1]
    os.utime(source)  # another input
    assert "out.jsonl is there already" in lmtrain(*words, "--on-error", "skip", code=73)


def test_a_link_a_read_only_file_and_a_foreign_report_stay(source: Path) -> None:
    Path("link.jsonl").symlink_to("nowhere.jsonl")
    Path("kept.jsonl").write_bytes(source.read_bytes())
    Path("kept.jsonl").chmod(0o444)
    Path("new.jsonl.report.json").write_text("a report of mine")
    for name, cause in (("link", "a symbolic link"), ("kept", "read-only"), ("new", "not the report of a corpus step")):
        words = ("corpus", "clean", source, "--output", f"{name}.jsonl", *STEPS["clean"])
        assert cause in lmtrain(*words, "--overwrite", code=73)
    assert not Path("new.jsonl").exists()


def test_a_folder_with_the_name_of_the_work_folder_stays(source: Path) -> None:
    Path("out.jsonl.work").mkdir()
    Path("out.jsonl.work", "mine").touch()
    lmtrain("corpus", "dedupe", source, "--output", "out.jsonl", "--exact-only", code=73)
    assert Path("out.jsonl.work", "mine").exists()


def test_splits_and_merged_parts_are_replaced_when_that_is_typed(source: Path) -> None:
    words = ("corpus", "split", source, "--output", "split", "--workers", 1)
    lmtrain(*words)
    assert "is already there" in lmtrain(*words)
    Path("split/train.jsonl").write_text("notes\n")
    assert "split/train.jsonl is not a file" in lmtrain(*words, "--seed", 1, "--overwrite", code=73)
    parts = ("corpus", "clean", source, "--output", "out.jsonl", *STEPS["clean"])
    for part in ("0/2", "1/2"):
        lmtrain(*parts, "--part", part)
    assert "is already there" in lmtrain(*parts, "--part", "1/2")
    write_jsonl(Path("out.jsonl"), [{"text": "of another command"}])
    assert "--overwrite" in lmtrain("corpus", "merge", "out.jsonl", code=73)
    assert "joined 2 parts" in lmtrain("corpus", "merge", "out.jsonl", "--overwrite")


def test_a_merge_that_was_killed_before_it_removed_the_parts_goes_on(source: Path) -> None:
    for part in ("0/2", "1/2"):
        lmtrain("corpus", "clean", source, "--output", "out.jsonl", *STEPS["clean"], "--part", part)
    Path("out.jsonl").write_bytes(b"".join(path.read_bytes() for path in sorted(Path().glob("out.part-*.jsonl"))))
    assert "joined 2 parts" in lmtrain("corpus", "merge", "out.jsonl")
    assert json.loads(Path("out.jsonl.report.json").read_text())["num_out"] == 9
